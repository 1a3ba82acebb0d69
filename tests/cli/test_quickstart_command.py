"""`trl credit-quickstart`: the embedded task end to end, with few steps."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from credit_trl import cli
from credit_trl.cli import quickstart_report, quickstart_run, tool_choice_base
from credit_trl.cli.quickstart_tasks import quickstart_task
from credit_trl.evaluation import evaluate
from credit_trl.tasks import model_names
from credit_trl.tasks.quickstart_model import read_base
from credit_trl.training.run_directory import EVALUATIONS_FILE, LOG_FILE, read_lines

SMALL = replace(quickstart_task("quickstart"), scored=(12, 2), test_rows={"rows_per_cue": 1})
ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SEEDS = ROOT / "examples" / "study" / "results" / "quickstart.csv"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module", autouse=True)
def few_scored_answers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart_run, "SHOWN", 8)
        patch.setattr(quickstart_run, "SAMPLES", 2)
        yield


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    directory = tmp_path_factory.mktemp("quickstart") / "run"
    return quickstart_run.run_quickstart(directory, steps=3, progress=False, task=SMALL)


def test_run_writes_log_evaluations_figure_and_model(result):
    logs = [row for row in read_lines(result.run_directory / LOG_FILE) if "reward" in row]
    assert [row["step"] for row in logs] == [1, 2, 3]
    steps = [row["step"] for row in read_lines(result.run_directory / EVALUATIONS_FILE)]
    assert (steps[0], steps[-1]) == (0, 3)
    assert result.figure.read_bytes().startswith(PNG)
    model, tokenizer = read_base(result.run_directory / "model")
    assert model.config.vocab_size == len(tokenizer)


def test_result_equals_the_logged_evaluations(result):
    rows = read_lines(result.run_directory / EVALUATIONS_FILE)
    for evaluation, row in ((result.before, rows[0]), (result.after, rows[-1])):
        assert set(evaluation.groups) == {"known", "unknown", "holdout"}
        assert {name: interval.mean for name, interval in evaluation.groups.items()} == row["groups"]


def test_credit_is_on_input_words_and_not_on_the_template(result):
    credit = {share.name: share for share in result.credit_before}
    assert set(credit) >= {"cue", "topic", "tool", "city", "generic"}
    assert abs(credit["generic"].mean_specific) < 0.1
    assert credit["cue"].mean_specific > 3.0
    assert credit["city"].mean_specific > 3.0


def test_page_shows_responses_before_and_after(result):
    found = re.search(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', result.page.read_text("utf-8"), re.S)
    document = json.loads(found[1])
    assert document["checkpoints"] == ["before", "after"]
    rewards = [response["reward"] for response in document["responses"]]
    assert rewards == sorted(rewards)
    assert len(rewards) == quickstart_run.SHOWN
    assert all(None not in response["maps"] for response in document["responses"])
    assert any(before != after for before, after in (response["maps"] for response in document["responses"]))


def test_stage_seconds_are_those_of_the_log(result):
    logs = [row for row in read_lines(result.run_directory / LOG_FILE) if "reward" in row]
    assert set(result.stage_seconds) == set(quickstart_report.STAGES)
    for stage, seconds in result.stage_seconds.items():
        assert seconds == pytest.approx(sum(row[f"credit/seconds_{stage}"] for row in logs) / 3)
        assert seconds >= 0.0


def test_report_lists_groups_token_classes_stages_and_paths(result):
    report = quickstart_report.format_result(result)
    names = ["known cues", "unknown cues", "holdout cues", "format", "generic (template)", *SMALL.words]
    for name in [*names, *quickstart_report.STAGES, *map(str, (result.figure, result.page, result.run_directory))]:
        assert name in report
    assert report.index("known cues") < report.index("unknown cues") < report.index("holdout cues")


def test_report_prints_zero_without_a_sign(result):
    shares = [replace(share, mean_specific=-1e-4) for share in result.credit_before]
    report = quickstart_report.format_result(replace(result, credit_before=shares))
    assert re.search(r"generic \(template\) +0\.00 ->", report)


def test_readme_shows_the_printed_report(result):
    """Line by line, except for the numbers."""

    def masked(text: str) -> list[str]:
        return [re.sub(r"-?\d+\.\d+|(?<=avg@)\d+", "#", " ".join(line.split())) for line in text.strip().splitlines()]

    (shown,) = re.findall(r"```text\n(held-out avg.*?)```", README.read_text("utf-8"), flags=re.DOTALL)
    printed = masked(quickstart_report.format_result(result))
    start = printed.index(masked(shown)[0])
    assert printed[start : start + len(masked(shown))] == masked(shown)


@pytest.mark.slow
def test_grpo_reports_without_a_scoring_stage(tmp_path):
    result = quickstart_run.run_quickstart(
        tmp_path / "run", steps=1, progress=False, task=SMALL, distillation_weight=0.0
    )
    assert "scores" not in result.stage_seconds
    assert "unknown cues" in quickstart_report.format_result(result)


def test_command_passes_its_arguments(monkeypatch):
    given = {}

    def record(output_dir, steps, seed, **options):
        given.update(output_dir=output_dir, steps=steps, seed=seed, **{**options, "task": options["task"].name})

    monkeypatch.setattr(quickstart_run, "run_quickstart", record)
    monkeypatch.setattr(quickstart_report, "format_result", lambda result: "")
    line = "credit-quickstart --output_dir somewhere --steps 7 --seed 3 --world shortcut --contrastive_coef 0"
    assert cli.main(line.split()) == 0
    assert given == {
        "output_dir": "somewhere",
        "steps": 7,
        "seed": 3,
        "task": "quickstart",
        "use_peft": False,
        "world": "shortcut",
        "contrastive_coef": 0.0,
        "distillation_weight": 1.0,
    }


@pytest.fixture
def tiny_smollm2(monkeypatch, make_model, tokenizer):
    """The quickstart of SmolLM2 with random weights in place of the warmed-up base."""
    task = replace(
        quickstart_task("smollm2"),
        load=lambda world: (make_model(), tokenizer),
        test_rows={"rows_per_tool": 2},
        scored=(2, 1),
    )
    return task


def test_smollm2_run_shows_answers_openings_and_curve(tiny_smollm2, tmp_path):
    result = quickstart_run.run_quickstart(
        tmp_path, steps=1, task=tiny_smollm2, progress=False, per_device_train_batch_size=4, max_completion_length=8
    )
    report = quickstart_report.format_result(result)
    for text in ("new arguments", "new requests", "gain", "openings that no other response of the base has", "tool"):
        assert text in report
    assert len(result.answers.prompts) == len(result.answers.pairs) == 5
    assert all(prompt in report for prompt in result.answers.prompts)
    assert len(result.answers.before) == len(result.answers.after) == 24 * quickstart_run.SAMPLES
    assert result.figure.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_smollm2_trains_adapters_too(tiny_smollm2, tmp_path):
    quickstart_run.run_quickstart(
        tmp_path, steps=1, task=tiny_smollm2, progress=False, use_peft=True, per_device_train_batch_size=4
    )
    assert (tmp_path / "model" / "adapter_config.json").is_file()


def test_smollm2_base_is_loaded_in_fp32_and_described(monkeypatch, make_model, tokenizer, tmp_path, capsys):
    make_model().bfloat16().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    accuracy = {"none": 0.36, "letter": 0.9, "stated": 0.97}
    (tmp_path / "warm_up.json").write_text(json.dumps({"accuracy": accuracy}))
    monkeypatch.setattr(model_names, "model_path", lambda name: f"path of {name}")
    monkeypatch.setattr(tool_choice_base, "warmed_up_base", {"path of smollm2": tmp_path}.get)
    model, _ = quickstart_task("smollm2").load("plain")
    assert model.dtype == torch.float32
    assert "36 % of the held-out requests without feedback, 90 % with the letter" in capsys.readouterr().out


def test_unknown_quickstart_model_and_world_are_refused():
    with pytest.raises(ValueError, match="not 'qwen'"):
        quickstart_task("qwen")
    with pytest.raises(ValueError, match="--world style: SmolLM2 has the world plain only"):
        quickstart_task("smollm2").load("style")


def test_invalid_requests_fail_before_anything_is_built(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="`steps` must be at least 1"):
        quickstart_run.run_quickstart(tmp_path / "run", steps=0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        quickstart_run.run_quickstart(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_recorded_seeds_meet_the_bar():
    """Nothing was chosen on these seeds; `examples/study/quickstart_seeds.py` writes them."""
    with SEEDS.open(encoding="utf-8", newline="") as lines:
        rows = [{name: float(text) for name, text in row.items()} for row in csv.DictReader(lines)]
    assert [row["seed"] for row in rows] == list(range(len(rows)))
    assert {row["steps"] for row in rows} == {quickstart_task("quickstart").defaults["max_steps"]}
    mean = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    assert mean["unknown"] >= 0.95
    assert min(row["unknown"] for row in rows) >= 0.90
    assert mean["known"] >= 0.98
    assert min(mean[f"format_{group}"] for group in ("known", "unknown", "holdout")) >= 0.97
    assert min(row["teacher_fidelity"] for row in rows) >= 0.95


@pytest.mark.slow
def test_default_run_meets_the_bar_on_one_seed(tmp_path):
    result = quickstart_run.run_quickstart(tmp_path / "run", progress=False)
    for group, least in (("known", 0.98), ("unknown", 0.90)):
        assert result.after.groups[group].mean >= least
        assert result.after.group_metrics[group]["format"] >= 0.97
    assert result.before.groups["unknown"].high < result.after.groups["unknown"].low
    assert result.after.group_metrics["holdout"]["format"] >= 0.9
    model, tokenizer = read_base(tmp_path / "run" / "model")
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_completion_length": 32, "batch_size": 288}
    probed = evaluate(model, "quickstart", 4, tokenizer=tokenizer, group_by="group", progress=False, **sampling)
    assert probed.groups["unknown"].mean == pytest.approx(result.after.groups["unknown"].mean, abs=0.1)
