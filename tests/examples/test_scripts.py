"""The scripts of `examples/` run from their command line on a tiny model and local rows."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from trl.chat_template_utils import qwen3_chat_template

from tiny import SMALL, save_model

EXAMPLES = Path(__file__).parents[2] / "examples"
EVALUATED = {"avg_at_k": 1, "avg_at_k_steps": 1, "max_eval_rows": 1}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a script like `python examples/NAME.py --option value …` and return its output directory."""

    def call(name: str, **options) -> Path:
        options_of_call = {"output_dir": tmp_path / "run", **SMALL, **options}
        line = [text for option, value in options_of_call.items() for text in (f"--{option}", str(value))]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *line])
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return tmp_path / "run"

    return call


@pytest.fixture
def tiny_model(tmp_path) -> str:
    """A tiny model whose chat template supports tools."""
    return save_model(tmp_path / "model", qwen3_chat_template)


def science_rows(path: Path, count: int) -> Path:
    """Rows in SDPO's published format."""
    same = {"kind": "mcq", "dataset": "sciknoweval", "system": "Answer with <answer>letter</answer>."}
    texts = [f"Larger?\n\nA: {2 * i + 1}\nB: {2 * i + i % 2 * 2}\nPlease reason." for i in range(count)]
    return write_rows(
        path, [{"idx": i, "answer": "AB"[i % 2], "prompt": text, **same} for i, text in enumerate(texts)]
    )


def tool_rows(path: Path, count: int) -> Path:
    """Records in SDPO's training format."""
    calls = [json.dumps([{"Action": "getWeather", "Action_Input": f'{{"city": "{i}"}}'}]) for i in range(count)]
    rows = [{"prompt": f"Tools: getWeather(city). Question: {i}?", "answer": c, "idx": i} for i, c in enumerate(calls)]
    return write_rows(path, rows)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def first_log(output: Path) -> dict:
    lines = map(json.loads, (output / "log.jsonl").read_text("utf-8").splitlines())
    return next(line for line in lines if "reward" in line)


def test_sciknoweval_trains_and_evaluates(run, tiny_model, tmp_path, capsys):
    train, test = (science_rows(tmp_path / f"physics-{split}.jsonl", 4) for split in ("train", "test"))
    options = {"task": "sciknoweval:physics", "dataset_path": train, "eval_dataset_path": test, **EVALUATED}
    output = run("train_task", model_name_or_path=tiny_model, **options)
    assert (output / "final" / "model.safetensors").is_file()
    steps = re.findall(r"^step +(\d+)  avg@1", capsys.readouterr().out, flags=re.MULTILINE)
    assert steps == ["0", "1"]  # before the first and after the last step


def test_toolalpaca_trains_and_evaluates(run, tiny_model, tmp_path, capsys):
    rows = {"dataset_path": tool_rows(tmp_path / "train.jsonl", 4)}
    rows["eval_dataset_path"] = tool_rows(tmp_path / "test.jsonl", 2)
    output = run("train_task", model_name_or_path=tiny_model, task="toolalpaca", **rows, avg_at_k=2)
    assert (output / "final" / "model.safetensors").is_file()
    assert "avg@2" in capsys.readouterr().out


def test_livecodebench_runs_programs_in_the_sandbox(run, tiny_model):
    from credit_trl.sandbox import SandboxError, open_sandbox

    try:
        open_sandbox().close()
    except SandboxError as error:
        pytest.skip(f"no sandbox is available on this machine: {error}")
    options = {"task": "livecodebench:examples", "generation_batch_size": 4, "max_train_rows": 2, **EVALUATED}
    log = first_log(run("train_task", model_name_or_path=tiny_model, **options))
    assert log["reward"] == 0.0  # random tokens are no program
    assert log["credit/frac_with_feedback"] == 1.0  # the feedback reports it


def test_custom_verifier_trains_and_its_feedback_names_the_error(run):
    output = run("custom_verifier")
    assert (output / "final" / "model.safetensors").is_file()
    assert first_log(output)["credit/frac_with_feedback"] == 1.0
    grade = runpy.run_path(str(EXAMPLES / "custom_verifier.py"))["grade"]
    assert grade("It is 42.", "42").reward == 1.0
    assert "3 digits, the sum has 2" in grade("421", "42").feedback
    assert "place 2 should be 2" in grade("47", "42").feedback
    assert "no number" in grade("I do not know", "42").feedback


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_images_teach_a_tiny_model_the_color_of_a_square(tmp_path, capsys, seed):
    runpy.run_path(str(EXAMPLES / "images.py"))["main"](seed, str(tmp_path))
    printed = capsys.readouterr().out
    gain, margin = map(float, re.search(r"training ([+-][\d.]+) ± ([\d.]+) points", printed).groups())
    assert gain - margin > 20.0
    seen, unseen = map(float, re.findall(r"'right colour': (-?[\d.]+)", printed))
    assert seen > max(4.0, unseen + 1.0)
    assert len(re.findall(r"'frame': -?0\.0\d*[,}]", printed)) == 2


def test_multi_turn_tools_gives_feedback_for_wrong_turns(run, tiny_model):
    log = first_log(run("multi_turn_tools", model_name_or_path=tiny_model))
    assert log["credit/frac_with_feedback"] == 1.0
    assert log["tools/call_frequency"] == 0.0  # random tokens call no tool
    shop = runpy.run_path(str(EXAMPLES / "multi_turn_tools.py"))["Shop"]()
    shop.reset(items=["apple", "pear"], pieces=[2, 1], prompt=[])
    turns = [lambda: shop.price("apple"), lambda: shop.price("apple"), lambda: shop.price("pear")]
    turns += [lambda: shop.price("pear"), lambda: shop.pay(9), lambda: shop.pay(10)]
    for shop.current_turn, turn in enumerate(turns):
        turn()
    verdict = shop.get_reward()
    assert (verdict.reward, verdict.feedback) == (1.0, None)
    assert verdict.turn_feedback == {1: "Ask for: pear.", 3: "Pay now.", 4: "Pay 10, not 9."}
