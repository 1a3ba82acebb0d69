r"""Your own verifier: a reward function that returns verdicts, here for sums with the wrong digit as feedback.

    python examples/custom_verifier.py        # three steps of the embedded model, on any machine
    python examples/custom_verifier.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name my/sums \
        --max_completion_length 128

Copy this script and change the rows (`prompt` and the columns that the verifier reads) and `verifier`. The reward is
that of GRPO; the feedback says how to correct the response.
"""

import random
import re

import torch
from datasets import Dataset, load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from credit_trl import CreditConfig, CreditTrainer, Verdict

DEFAULTS = {
    "model_name_or_path": "quickstart",
    "output_dir": "runs/custom_verifier",
    "max_steps": 3,
    "per_device_train_batch_size": 16,
    "num_generations": 4,
    "max_completion_length": 16,
    "chat_template_kwargs": {"enable_thinking": False},  # thinking needs thousands of tokens
    "use_cpu": not torch.accelerator.is_available(),
    "bf16": torch.accelerator.is_available(),
    "logging_steps": 1,
    "report_to": "none",
}


def make_rows(count: int = 64) -> Dataset:
    """Columns `prompt`, as messages, and `answer`, which the verifier reads."""
    rng = random.Random(0)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(count)]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)} for a, b in pairs]
    )


def verifier(completions: list, answer: list[str], **columns) -> list[Verdict]:
    """One verdict per completion: the last number must be the sum."""
    return [grade(completion[-1]["content"], right) for completion, right in zip(completions, answer, strict=True)]


def grade(response: str, right: str) -> Verdict:
    numbers = re.findall(r"\d+", response)
    if not numbers:
        return Verdict(0.0, f"There is no number in the answer. The sum has {len(right)} digits.")
    answered = numbers[-1]
    if answered == right:
        return Verdict(1.0)  # the response is the demonstration for the others of its group
    if len(answered) != len(right):
        return Verdict(0.0, f"{answered} has {len(answered)} digits, the sum has {len(right)}.")
    place = next(i for i, (a, b) in enumerate(zip(answered, right, strict=True)) if a != b)
    return Verdict(
        0.0, f"In {answered} the digit at place {place + 1} should be {right[place]}.", {"length_right": 1.0}
    )


def main(script: ScriptArguments, config: CreditConfig, model: ModelConfig) -> None:
    rows = load_dataset(script.dataset_name, split="train") if script.dataset_name else make_rows()
    trainer = CreditTrainer(
        model=model.model_name_or_path,
        reward_funcs=verifier,
        args=config,
        train_dataset=rows,
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model(f"{config.output_dir}/final")
    trainer.accelerator.print(f"The model is in {config.output_dir}/final. Logged metrics: docs/options.md")


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, CreditConfig, ModelConfig), description=__doc__)
    parser.set_defaults(**DEFAULTS)
    main(*parser.parse_args_and_config())
