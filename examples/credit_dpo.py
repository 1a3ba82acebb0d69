"""The contrast for DPO's implicit reward: separate input-specific from generic preferences.

    python examples/credit_dpo.py          # the embedded model, a minute on any machine

The training pairs are confounded: the chosen answer calls the right tool and is polite, the rejected one is neither.
DPO (TRL's `DPOTrainer`, unchanged) learns a reward for both. In the test pairs one answer calls the right tool and the
other is polite. The corrected reward subtracts the reward of the same answer under contrast prompts.
"""

import random

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, TrlParser

from credit_trl.tasks import quickstart

DEFAULTS = {
    "output_dir": "runs/credit_dpo",
    "max_steps": 30,
    "per_device_train_batch_size": 16,
    "learning_rate": 3e-4,
    "beta": 0.1,
    "use_cpu": not torch.accelerator.is_available(),
    "bf16": torch.accelerator.is_available(),
    "report_to": "none",
}
POLITE, CONTRASTS = "sure, this is simple.", 4


def make_pairs(split: str, *, confounded: bool, count: int = 512) -> Dataset:
    """Pairs whose chosen answer calls the right tool. The chosen (confounded) or the rejected answer is polite."""
    rng, pairs = random.Random(split), []
    for cue in rng.choices(quickstart.GROUPS["known"], k=count):
        question = quickstart.draw_question(rng, cue, quickstart.cities_of(cue, split))
        wrong = rng.choice([topic for topic in question.options if topic != question.topic])
        other = quickstart.Question(cue, question.city, question.options, wrong)
        texts = question.response(POLITE if confounded else None), other.response(None if confounded else POLITE)
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in texts)
        pairs.append({"prompt": question.prompt, "chosen": chosen, "rejected": rejected})
    return Dataset.from_list(pairs)


def credit_rewards(policy, reference, others_policy, others_reference, coef: float, beta: float) -> torch.Tensor:
    """ρ(x, y) − λ ρ̂(y): DPO's reward ρ = β log π_θ(y | x) / π_ref(y | x), and ρ̂ its mean over contrast prompts.

    The difference of two answers holds a part of the reward that does not depend on x with the weight 1 − λ. Tokens
    have such a reward too, as in PRIME. The first four arguments are what `measure` returns.
    """
    generic = (others_policy - others_reference).mean(dim=0)
    return beta * (policy - reference - coef * generic)


@torch.no_grad()
def log_probs(model: torch.nn.Module, prompts: list[list[int]], answers: list[list[int]]) -> torch.Tensor:
    """log π(y | x) of each pair, in nats."""
    sums = []
    for x, y in zip(prompts, answers, strict=True):
        logps = model(torch.tensor([x + y], device=model.device)).logits[0, len(x) - 1 : -1].log_softmax(-1)
        sums.append(logps.gather(-1, torch.tensor(y, device=model.device)[:, None]).sum())
    return torch.stack(sums)


def measure(trainer: DPOTrainer) -> list[list[torch.Tensor]]:
    """For chosen and rejected answers: log π_θ and log π_ref, (n,), and both under contrast prompts, (C, n)."""
    pairs, found = trainer.eval_dataset, []
    models, x = (trainer.model.eval(), trainer.ref_model), pairs["prompt_ids"][:]
    for y in (pairs["chosen_ids"][:], pairs["rejected_ids"][:]):
        own = [log_probs(model, x, y) for model in models]
        others = [[log_probs(m, x[k:] + x[:k], y) for k in range(1, CONTRASTS + 1)] for m in models]
        found.append([*own, *map(torch.stack, others)])
    return found


if __name__ == "__main__":
    parser = TrlParser(DPOConfig, description=__doc__)
    parser.set_defaults(**DEFAULTS)
    (config,) = parser.parse_args_and_config()
    model, tokenizer = quickstart.load_model()
    train, test = make_pairs("train", confounded=True), make_pairs("test", confounded=False, count=32)
    trainer = DPOTrainer(model, args=config, train_dataset=train, eval_dataset=test, processing_class=tokenizer)
    trainer.train()
    print("DPOTrainer's own margin on the test pairs:", round(trainer.evaluate()["eval_rewards/margins"], 4))
    found = measure(trainer)
    for coef in (0.0, 0.5, 1.0):
        chosen, rejected = (credit_rewards(*of, coef, trainer.beta) for of in found)
        margin = chosen - rejected
        print(f"λ {coef}: right tool preferred {(margin > 0).float().mean():.3f}, mean margin {margin.mean():.4f}")
