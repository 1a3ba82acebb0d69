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


def first_log(output: Path) -> dict:
    lines = map(json.loads, (output / "log.jsonl").read_text("utf-8").splitlines())
    return next(line for line in lines if "reward" in line)


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
