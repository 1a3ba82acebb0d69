"""`trl credit-quickstart`: the embedded task end to end, with few steps."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from credit_trl import cli
from credit_trl.cli import quickstart
from credit_trl.tasks.quickstart_model import read_base
from credit_trl.training.run_directory import EVALUATIONS_FILE, LOG_FILE, read_lines

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    sizes = {"SHOWN": 8, "SAMPLES": 2, "SCORED_PROMPTS": 12, "ROWS_PER_CUE": 1}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sizes.items():
            patch.setattr(quickstart, name, value)
        yield quickstart.run_quickstart(tmp_path_factory.mktemp("quickstart") / "run", steps=3, progress=False)


def test_run_writes_log_evaluations_report_and_model(result):
    logs = [row for row in read_lines(result.run_directory / LOG_FILE) if "reward" in row]
    assert [row["step"] for row in logs] == [1, 2, 3]
    steps = [row["step"] for row in read_lines(result.run_directory / EVALUATIONS_FILE)]
    assert (steps[0], steps[-1]) == (0, 3)
    assert result.page.read_text("utf-8").startswith("<!")
    model, tokenizer = read_base(result.run_directory / "model")
    assert model.config.vocab_size == len(tokenizer)


def test_result_equals_the_logged_evaluations(result):
    rows = read_lines(result.run_directory / EVALUATIONS_FILE)
    for evaluation, row in ((result.before, rows[0]), (result.after, rows[-1])):
        assert set(evaluation.groups) == set(quickstart.GROUPS)
        assert {name: interval.mean for name, interval in evaluation.groups.items()} == row["groups"]


def test_credit_is_on_input_words_and_not_on_the_template(result):
    credit = {share.name: share for share in result.credit_before}
    assert abs(credit["generic"].mean_specific) < 0.1
    assert credit["cue"].mean_specific > 3.0
    assert credit["city"].mean_specific > 3.0


def test_stage_seconds_are_those_of_the_log(result):
    logs = [row for row in read_lines(result.run_directory / LOG_FILE) if "reward" in row]
    assert set(result.stage_seconds) == set(quickstart.STAGES)
    for stage, seconds in result.stage_seconds.items():
        assert seconds == pytest.approx(sum(row[f"credit/seconds_{stage}"] for row in logs) / 3)


def test_report_lists_groups_token_classes_stages_and_paths(result):
    shares = [replace(share, mean_specific=-1e-4) for share in result.credit_before]
    report = quickstart.format_result(replace(result, credit_before=shares))
    assert re.search(r"generic \(template\) +0\.00 ->", report)  # without a sign
    names = ["known cues", "unknown cues", "holdout cues", "format", *quickstart.CLASSES, *quickstart.STAGES]
    places = [report.index(name) for name in [*names, str(result.page)]]
    assert places[:3] == sorted(places[:3])


def test_readme_shows_the_printed_report(result):
    """Line by line, except for the numbers."""

    def masked(text: str) -> list[str]:
        return [re.sub(r"-?\d+\.\d+|(?<=avg@)\d+", "#", " ".join(line.split())) for line in text.strip().splitlines()]

    (shown,) = re.findall(r"```text\n(held-out avg.*?)```", README.read_text("utf-8"), flags=re.DOTALL)
    printed = masked(quickstart.format_result(result))
    start = printed.index(masked(shown)[0])
    assert printed[start : start + len(masked(shown))] == masked(shown)


def test_command_passes_its_arguments(monkeypatch):
    given = {}
    monkeypatch.setattr(quickstart, "run_quickstart", lambda *args, **options: given.update(args=args, **options))
    monkeypatch.setattr(quickstart, "format_result", lambda result: "")
    line = "credit-quickstart --output_dir somewhere --steps 7 --seed 3 --world shortcut --contrastive_coef 0"
    assert cli.main(line.split()) == 0
    expected = {"world": "shortcut", "contrastive_coef": 0.0, "distillation_weight": 1.0}
    assert given == {"args": ("somewhere", 7, 3), **expected}


@pytest.mark.slow
def test_default_run_meets_the_bar_on_one_seed(tmp_path):
    result = quickstart.run_quickstart(tmp_path / "run", progress=False)
    for group, least in (("known", 0.98), ("unknown", 0.90)):
        assert result.after.groups[group].mean >= least
        assert result.after.group_metrics[group]["format"] >= 0.97
    assert result.before.groups["unknown"].high < result.after.groups["unknown"].low
    assert result.after.group_metrics["holdout"]["format"] >= 0.9
