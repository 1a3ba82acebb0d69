"""`trl credit-quickstart`: the embedded task end to end, with few steps."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from credit_trl import cli
from credit_trl.cli import quickstart
from credit_trl.evaluation import evaluate
from credit_trl.tasks.quickstart_model import read_base
from credit_trl.training.run_directory import EVALUATIONS_FILE, LOG_FILE, read_lines

README = Path(__file__).parents[2] / "README.md"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module", autouse=True)
def few_scored_answers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "SCORED_PROMPTS", 12)
        patch.setattr(quickstart, "SHOWN", 8)
        yield


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    directory = tmp_path_factory.mktemp("quickstart") / "run"
    return quickstart.run_quickstart(directory, steps=3, progress=False, samples=2, test_rows_per_cue=1)


def test_a_run_leaves_its_log_its_evaluations_a_picture_and_a_model_that_loads(outcome):
    logs = [row for row in read_lines(outcome.run_directory / LOG_FILE) if "reward" in row]
    assert [row["step"] for row in logs] == [1, 2, 3]
    steps = [row["step"] for row in read_lines(outcome.run_directory / EVALUATIONS_FILE)]
    assert (steps[0], steps[-1]) == (0, 3)
    assert outcome.figure.read_bytes().startswith(PNG)
    model, tokenizer = read_base(outcome.run_directory / "model")
    assert model.config.vocab_size == len(tokenizer)


def test_before_and_after_cover_the_three_groups_and_equal_the_logged_evaluations(outcome):
    rows = read_lines(outcome.run_directory / EVALUATIONS_FILE)
    for result, row in ((outcome.before, rows[0]), (outcome.after, rows[-1])):
        assert set(result.groups) == {"known", "unknown", "holdout"}
        assert {name: interval.mean for name, interval in result.groups.items()} == row["groups"]


def test_the_credit_sits_on_words_of_the_input_and_not_on_the_template(outcome):
    credit = {share.name: share for share in outcome.credit_before}
    assert set(credit) >= {"cue", "topic", "tool", "city", "generic"}
    assert abs(credit["generic"].mean_specific) < 0.1
    assert credit["cue"].mean_specific > 3.0
    assert credit["city"].mean_specific > 3.0


def test_the_page_shows_the_same_answers_before_and_after_wrong_ones_first(outcome):
    told = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', outcome.page.read_text("utf-8"), re.S)
    document = json.loads(told[1])
    assert document["checkpoints"] == ["before", "after"]
    rewards = [response["reward"] for response in document["responses"]]
    assert rewards == sorted(rewards)
    assert len(rewards) == quickstart.SHOWN
    assert all(None not in response["maps"] for response in document["responses"])
    assert any(before != after for before, after in (response["maps"] for response in document["responses"]))


def test_stage_seconds_are_those_of_the_log(outcome):
    logs = [row for row in read_lines(outcome.run_directory / LOG_FILE) if "reward" in row]
    assert set(outcome.stage_seconds) == set(quickstart.STAGES)
    for stage, seconds in outcome.stage_seconds.items():
        assert seconds == pytest.approx(sum(row[f"credit/seconds_{stage}"] for row in logs) / 3)
        assert seconds >= 0.0


def test_the_report_names_every_group_kind_of_token_stage_and_path(outcome):
    report = quickstart.format_outcome(outcome)
    names = ["known cues", "unknown cues", "holdout cues", "format", "generic (template)", *quickstart.WORDS]
    for name in [*names, *quickstart.STAGES, *map(str, (outcome.figure, outcome.page, outcome.run_directory))]:
        assert name in report
    assert report.index("known cues") < report.index("unknown cues") < report.index("holdout cues")


def test_the_readme_shows_what_is_printed(outcome):
    """Line for line, but for the numbers, which are those of the whole run, with its four samples."""

    def masked(text: str) -> list[str]:
        return [re.sub(r"-?\d+\.\d+|(?<=avg@)\d+", "#", " ".join(line.split())) for line in text.strip().splitlines()]

    (shown,) = re.findall(r"```text\n(held-out avg.*?)```", README.read_text("utf-8"), flags=re.DOTALL)
    printed = masked(quickstart.format_outcome(outcome))
    start = printed.index(masked(shown)[0])
    assert printed[start : start + len(masked(shown))] == masked(shown)


def test_grpo_has_no_scoring_stage_and_still_reports(tmp_path):
    outcome = quickstart.run_quickstart(
        tmp_path / "run", steps=1, progress=False, samples=1, test_rows_per_cue=1, distillation_weight=0.0
    )
    assert "scores" not in outcome.stage_seconds
    assert "unknown cues" in quickstart.format_outcome(outcome)


def test_the_command_passes_its_arguments_on(monkeypatch):
    given = {}

    def record(output_dir, steps, seed, **options):
        given.update(output_dir=output_dir, steps=steps, seed=seed, **options)

    monkeypatch.setattr(quickstart, "run_quickstart", record)
    monkeypatch.setattr(quickstart, "format_outcome", lambda outcome: "")
    line = "credit-quickstart --output_dir somewhere --steps 7 --seed 3 --world shortcut --contrastive_coef 0"
    assert cli.main(line.split()) == 0
    assert given == {
        "output_dir": "somewhere",
        "steps": 7,
        "seed": 3,
        "world": "shortcut",
        "contrastive_coef": 0.0,
        "distillation_weight": 1.0,
    }


def test_what_cannot_run_says_so_before_anything_is_built(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="`steps` must be at least 1"):
        quickstart.run_quickstart(tmp_path / "run", steps=0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"credit-trl\[viz\]"):
        quickstart.run_quickstart(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_default_run_raises_held_out_accuracy_and_keeps_the_format(tmp_path):
    outcome = quickstart.run_quickstart(tmp_path / "run", progress=False)
    for group, least in (("known", 0.95), ("unknown", 0.5)):
        assert outcome.after.groups[group].mean >= least
    assert outcome.before.groups["unknown"].high < outcome.after.groups["unknown"].low
    assert outcome.after.group_metrics["holdout"]["format"] >= 0.9
    model, tokenizer = read_base(tmp_path / "run" / "model")
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_completion_length": 32, "batch_size": 288}
    probed = evaluate(model, "quickstart", 4, tokenizer=tokenizer, group_by="group", progress=False, **sampling)
    assert probed.groups["unknown"].mean == pytest.approx(outcome.after.groups["unknown"].mean, abs=0.1)
