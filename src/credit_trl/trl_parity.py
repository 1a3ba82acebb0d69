"""Two steps of the embedded model, compared with TRL's trainer and a dense loss: `python -m credit_trl.trl_parity`.

`trl_compat.check_behaviour` runs it on an untested minor of TRL. The last line of its output is the difference.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer

from credit_trl.config import CreditConfig
from credit_trl.rollout.verdict import Verdict
from credit_trl.trainer import CreditTrainer

_OPTIONS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 8,
    "num_generations": 2,
    "max_completion_length": 12,
    "learning_rate": 1e-3,
    "loss_type": "grpo",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def verify(completion_ids: list[list[int]], **kwargs: Any) -> list[Verdict]:
    """A verifier that a random model satisfies in half of its rollouts."""
    return [Verdict(float(sum(ids) % 2), f"The response has {len(ids)} tokens.") for ids in completion_ids]


def rewards(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """The rewards of `verify`."""
    return [float(verdict) for verdict in verify(completion_ids)]


class ComparedTrainer(CreditTrainer):
    """A trainer of one micro-batch a step that compares the loss of each step with dense passes.

    Raises:
        AssertionError: they differ.
    """

    compared_steps = 0

    def _distillation_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        loss = super()._distillation_loss(model, inputs)
        expected = self._dense_loss()
        if not torch.allclose(loss.detach(), expected, rtol=1e-4, atol=1e-6):
            raise AssertionError(f"the distillation loss is {loss.item():.6g}, that of dense passes {expected:.6g}")
        self.compared_steps += 1
        return loss

    @torch.no_grad()
    def _dense_loss(self) -> Tensor:
        """Mean over samples of the mean over tokens of Σ_v π_θ (log π_θ − f + λ Ĝ): Algorithm 1 with C = 1."""
        batch = self._generation_batch
        losses = []
        for i, contexts in enumerate(self.credit_step.build_contexts(batch)):
            answer = batch.completion_ids[i]
            prompt = self._tokenizer.apply_chat_template(batch.prompts[i], add_generation_prompt=True)
            logps = dense_logps(self.model, prompt["input_ids"], answer)
            f, generic = (dense_logps(self.teacher.model, ids, answer) for ids, _ in contexts.sequences())
            target = f - self.args.contrastive_coef * generic
            losses.append((logps.exp() * (logps - target)).sum(dim=-1).mean())
        return torch.stack(losses).mean()


def dense_logps(model: nn.Module, prompt: list[int], answer: list[int]) -> Tensor:
    """(T, V) log-probabilities of the whole vocabulary at the tokens of an answer."""
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(dim=-1)


def compare_trainers(directory: Path) -> None:
    """Train with both trainers and with the distillation loss.

    Raises:
        AssertionError: weights or losses differ.
    """
    questions = [f"Help me with number {i}." for i in range(16)]
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": question}] for question in questions]})
    options = _OPTIONS | {"output_dir": str(directory)}
    ours = CreditTrainer("quickstart", verify, CreditConfig(distillation_weight=0.0, **options), rows)
    ours.train()
    trls = GRPOTrainer(ours.model.config._name_or_path, rewards, GRPOConfig(**options), rows)  # seeds torch again
    trls.train()
    for (name, weight), expected in zip(ours.model.named_parameters(), trls.model.parameters(), strict=True):
        if not torch.equal(weight, expected):
            raise AssertionError(f"`{name}` differs from GRPOTrainer's after two steps of GRPO")
    options |= {"distillation_topk": None, "distillation_weight": 0.5}
    blended = ComparedTrainer("quickstart", verify, CreditConfig(**options), rows)
    blended.train()
    if blended.compared_steps != 2:
        raise AssertionError(f"the distillation loss was computed {blended.compared_steps} times in two steps")


def main() -> int:
    with TemporaryDirectory() as directory:
        compare_trainers(Path(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
