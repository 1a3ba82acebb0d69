"""The quickstarts of TRL's documentation train, on a CPU, with a trainer's and a configuration's name changed."""

from __future__ import annotations

import json
import math

import pytest

import tiny

# https://huggingface.co/docs/trl/grpo_trainer#quick-start
GRPO = """
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""

# https://huggingface.co/docs/trl/sdpo_trainer#usage
SDPO = """
from datasets import Dataset

from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

dataset = Dataset.from_dict(
    {
        "prompt": [[{"role": "user", "content": "Solve 2+2."}]],
        "privileged_context": ["Your earlier answer used the wrong format."],
    }
)

training_args = SDPOConfig(
    output_dir="sdpo-model",
    distillation_mode="topk_logits",       # Explicitly select top-K logit distillation
    distillation_topk=100,                 # Required when using top-K logit distillation
    include_environment_feedback=True,     # Use dataset privileged_context for teacher reprompts
)

trainer = SDPOTrainer(
    model="Qwen/Qwen2.5-1.5B-Instruct",
    reward_funcs=reward_func,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
"""


def reward_func(completions, **columns):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (GRPO, {"trl import GRPO": "credit_trl import GRPO", "GRPOTrainer": "CreditTrainer"}),
        (SDPO, {"trl.experimental.sdpo": "credit_trl", "SDPOConfig": "CreditConfig", "SDPOTrainer": "CreditTrainer"}),
    ],
    ids=["grpo", "sdpo"],
)
def test_quickstart_of_trl_trains_with_two_names_changed(tmp_path, monkeypatch, text, names):
    monkeypatch.chdir(tmp_path)
    for name in ("Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"):
        tiny.save_model(tmp_path / name, hidden_size=16, num_hidden_layers=1)
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "solution": f"${n + 1}$"} for n in range(8)]
    (tmp_path / "trl-lib" / "DeepMath-103K").mkdir(parents=True)
    (tmp_path / "trl-lib" / "DeepMath-103K" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for old, new in names.items():
        text = text.replace(old, new)
    namespace = {"reward_func": reward_func}
    exec(compile(text, "quickstart", "exec"), namespace)
    trainer = namespace["trainer"]
    prompts = len(trainer.train_dataset)
    assert trainer.args.generation_batch_size == prompts * trainer.num_generations
    assert trainer.args.output_dir in ("Qwen2-0.5B-Instruct-CREDIT", "sdpo-model")
    assert trainer.state.global_step == 3  # epochs of one generation batch
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
