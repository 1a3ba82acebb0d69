"""The quickstarts of TRL's documentation train, on a CPU, with a trainer's and a configuration's name changed."""

import json
import math
import re
from pathlib import Path

import pytest

import tiny

PAGE = (Path(__file__).parent / "cases" / "trl_quickstarts.md").read_text("utf-8")
GRPO, SDPO = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


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
@pytest.mark.filterwarnings("ignore:No sample (of this|with a teacher of this)")
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
    assert trainer.args.generation_batch_size == len(trainer.train_dataset) * trainer.num_generations
    assert trainer.args.output_dir in ("Qwen2-0.5B-Instruct-CREDIT", "sdpo-model")
    assert trainer.state.global_step == 3  # epochs of one generation batch
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
