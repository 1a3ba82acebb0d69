"""`trl credit-quickstart`: the embedded task end to end, with few steps."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from credit_trl.cli import quickstart
from credit_trl.quickstart_model import read_base
from credit_trl.run_directory import EVALUATIONS_FILE, LOG_FILE, read_lines

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("quickstart") / "run"


@pytest.fixture(scope="module")
def table(folder):
    sizes = {"SHOWN": 8, "SAMPLES": 2, "SCORED_PROMPTS": 12, "ROWS_PER_CUE": 1}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(quickstart, name, value)
        output = io.StringIO()
        with redirect_stdout(output):
            table = quickstart.run_quickstart(folder, steps=3, disable_tqdm=True)
        return output.getvalue() + table


def test_run_writes_log_evaluations_report_and_model(folder, table):
    logs = [row for row in read_lines(folder / LOG_FILE) if "reward" in row]
    assert [row["step"] for row in logs] == [1, 2, 3]
    steps = [row["step"] for row in read_lines(folder / EVALUATIONS_FILE)]
    assert (steps[0], steps[-1]) == (0, 3)
    assert (folder / "report.html").read_text("utf-8").startswith("<!")
    model, tokenizer = read_base(folder / "model")
    assert model.config.vocab_size == len(tokenizer)


def test_training_prints_the_link_of_its_report_once(table):
    assert table.count("Report: ") == 1


def test_credit_is_on_input_words_and_not_on_the_template(table):
    credit_before = {
        name: float(re.search(rf"  {name}.* ([\d.-]+) -> ", table)[1]) for name in ("generic", "cue", "city")
    }
    assert credit_before["generic"] == 0.0
    assert min(credit_before["cue"], credit_before["city"]) > 3.0


def test_readme_shows_the_printed_table(table):
    """Line by line, except for the numbers."""

    def masked(text):
        return [re.sub(r"-?\d+\.\d+|(?<=avg@)\d+", "#", " ".join(line.split())) for line in text.strip().splitlines()]

    (readme_table,) = re.findall(r"```text\n(held-out avg.*?)```", README.read_text("utf-8"), flags=re.DOTALL)
    printed = masked(table)
    start = printed.index(masked(readme_table)[0])
    assert printed[start : start + len(masked(readme_table))] == masked(readme_table)


@pytest.mark.slow
def test_default_run_meets_the_bar_on_one_seed(tmp_path):
    quickstart.run_quickstart(tmp_path / "run", seed=0, disable_tqdm=True)  # as the command
    results = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("run/evaluations/*/result.json"))]
    result_before, result_after = results[0], results[-1]
    for group, least in (("known", 0.98), ("unknown", 0.90)):
        assert result_after["groups"][group]["mean"] >= least
        assert result_after["group_metrics"][group]["format"] >= 0.97
    assert result_before["groups"]["unknown"]["high"] < result_after["groups"]["unknown"]["low"]
    assert result_after["group_metrics"]["holdout"]["format"] >= 0.9
