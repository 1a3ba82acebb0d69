"""`trl credit --task` trains the tasks of the paper on local rows."""

import json

import pytest
from trl.chat_template_utils import qwen3_chat_template

from credit_trl.cli import training
from credit_trl.sandbox import SandboxError, open_sandbox
from tiny import SMALL, save_model


@pytest.mark.slow
@pytest.mark.parametrize("task", ["toolalpaca", "livecodebench:examples"])
def test_task_trains_with_feedback_from_its_verifier(tmp_path, task):
    options = {"task": task, "output_dir": tmp_path / "run", **SMALL, "generation_batch_size": 4}
    if task == "toolalpaca":
        calls = json.dumps([{"Action": "getWeather", "Action_Input": '{"city": "Rome"}'}])
        rows = [{"prompt": f"Tools: getWeather(city). Question: {i}?", "answer": calls, "idx": i} for i in range(4)]
        options["dataset_path"] = tmp_path / "train.jsonl"
        options["dataset_path"].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        try:
            open_sandbox().close()
        except SandboxError as error:
            pytest.skip(f"no sandbox is available on this machine: {error}")
    model = save_model(tmp_path / "model", qwen3_chat_template)
    line = ["--model_name_or_path", model]
    for option, value in options.items():
        line += [f"--{option}", str(value)]
    assert training.run(line) == 0
    logs = map(json.loads, (tmp_path / "run" / "log.jsonl").read_text("utf-8").splitlines())
    log = next(row for row in logs if "reward" in row)
    assert log["reward"] == 0.0  # random tokens
    assert log["credit/frac_with_feedback"] == 1.0
