"""The scripts of `examples/study` on the shipped base."""

import csv
import math
import random
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from credit_trl.quickstart_model import SHIPPED

EXAMPLES = Path(__file__).parents[2] / "examples"
RESULTS = EXAMPLES / "study" / "results"
WORLDS = ("weak", "tables", "skip", "filler", "useful")


def table(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((RESULTS / f"{name}.csv").open(encoding="utf-8")))


@pytest.mark.parametrize("world", WORLDS)
def test_committed_rows_have_every_column_and_occur_once(study, world):
    rows = table(world)
    run = study("run")
    assert set(run.COLUMNS) - set(rows[0]) <= {"teacher_log_odds", "teacher_delta", "teacher_s"}  # of later runs
    keys = [tuple(row[name] for name in run.KEY) for row in rows]
    assert len(set(keys)) == len(keys)
    assert {row["world"] for row in rows} == {world}


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/results/**/*.csv")), ids=lambda file: file.stem)
def test_rows_of_studies_name_version_and_commit(file):
    rows = list(csv.DictReader(file.open(encoding="utf-8")))
    assert rows
    assert all(row["version"] and re.fullmatch("[0-9a-f]{7,40}(-dirty)?", row["commit"]) for row in rows)


def test_page_prints_means_and_paired_differences(study, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["page.py", "weak", "--step", "60", "--measure", "thought_unknown"])
    study("page").main()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| CREDIT λ=0.1 |")]
    rates = {
        arm: np.array([float(r["thought_unknown"]) for r in table("weak") if (r["arm"], r["step"]) == (arm, "60")])
        for arm in ("SDPO", "CREDIT λ=0.1")
    }
    assert f"| {100 * rates['CREDIT λ=0.1'].mean():.1f} [" in line
    assert f"| {100 * (rates['CREDIT λ=0.1'] - rates['SDPO']).mean():.1f} [" in line


def test_runner_appends_rows_once_with_the_branch_of_the_base(study, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    run = study("run")
    monkeypatch.setattr(run, "EVALUATION", run.EVALUATION | {"k": 1, "max_prompts": 96})
    monkeypatch.setattr(run, "branch_rows", partial(run.branch_rows, rows_per_cue=1))
    world = study("worlds").WORLDS["weak"]
    shutil.copytree(SHIPPED, tmp_path / "bases" / "weak-seed0")
    small = {"max_steps": 1, "per_device_train_batch_size": 8}
    options = (small, tmp_path, tmp_path / "results")
    assert run.run_arm(world, 0, "GRPO", *options)
    assert run.run_arm(world, 0, "CREDIT λ=0.1", *options)
    assert run.run_arm(world, 0, "temper-only λ=0.1", *options)
    assert not run.run_arm(world, 0, "GRPO", *options)
    rows = run.read_rows(tmp_path / "results" / "weak.csv")
    names = [f"{arm} per_device_train_batch_size=8" for arm in ("GRPO", "CREDIT λ=0.1", "temper-only λ=0.1")]
    assert list(rows) == [("weak", 0, name, step) for name in names for step in (0, 1)]
    grpo, _, credit, trained, tempered, _ = rows.values()
    assert grpo["accuracy_known"] == credit["accuracy_known"] > 0.8
    assert credit["s"] > 5.0
    assert tempered["s"] == 0.0
    assert tempered["delta"] == credit["delta"] == trained["delta"] == grpo["delta"]
    assert credit["log_odds_given"] == pytest.approx(credit["log_odds"] + credit["delta"], abs=2e-3)
    assert trained["teacher_fidelity"] > 0.9
    assert trained["teacher_log_odds"] == pytest.approx(credit["log_odds"], abs=0.1)  # after one step of an average
    assert trained["teacher_s"] == pytest.approx(credit["s"], abs=0.5)
    assert trained["trl"]
    assert trained["commit"]


def test_measured_rows_are_predicted_before_training(study, tmp_path, monkeypatch):
    run = study("run")
    monkeypatch.setitem(run.EVALUATION, "k", 1)
    world = study("worlds").WORLDS["weak"]
    shutil.copytree(SHIPPED, tmp_path / "bases" / "weak-seed300")
    assert run.run_arm(world, 300, "SDPO", {"max_steps": 60}, tmp_path, tmp_path, measure_only=True)
    law = study("law")
    seen = law.read_rows([RESULTS / "weak.csv"])
    predicted = law.predictions(seen + law.read_rows([tmp_path / "weak.csv"]), {"weak": [60]})
    start, middle, end = predicted[predicted["base"].isin([0, 300]) & (predicted["arm"] == "SDPO")].itertuples()
    assert start.seen
    assert [middle.step, end.step, middle.seen, end.in_band] == [30, 60, False, None]
    assert math.isnan(end.measured)
    changes = (middle.predicted_finite, middle.predicted, end.predicted)
    assert np.all(np.diff(np.abs(np.array([0.0, *changes]) - [0.0, *[end.log_odds_0] * 3])) > 0)


def test_committed_predictions_are_those_of_the_law(study):
    (row,) = [r for r in table("weak") if (r["seed"], r["arm"], r["step"]) == ("3", "CREDIT λ=0.1", "0")]
    key = ("weak", "3", row["arm"], "60")
    (committed,) = [r for r in table("predicted") if tuple(r[n] for n in ("world", "base", "arm", "step")) == key]
    assert float(committed["predicted"]) == pytest.approx(study("law").path_of(row, 60)[-1], abs=1e-3)


def test_sign_of_the_change_is_right_in_the_number_of_runs_that_the_findings_name(study):
    law = study("law")
    assert law.right_signs(law.read_rows(RESULTS / f"{world}.csv" for world in WORLDS)) == (174, 168)


def test_guide_lags_behind_a_target_at_a_nearly_constant_distance_from_the_teacher(study):
    rows = study("law").measured_targets().query("step == 60")
    gaps = [rows[f"{name}delta"] - rows["lambda"] * rows[f"{name}s"] for name in ("teacher_", "")]
    assert len(rows) == 16
    assert (gaps[0] / gaps[1]).between(0.95, 1.25).all()
    assert (rows["log_odds"] - rows["target"]).min() > 0.45


@pytest.mark.parametrize("name", ["tables", "skip", "useful", "filler"])
def test_planted_worlds_draw_their_text_and_keep_the_splits_apart(study, name):
    world = study("worlds").WORLDS[name]
    test = world.task.build("test").to_list()
    trained = {str(row["prompt"]) for row in world.task.build("train").to_list()}
    assert {row["group"] for row in test} == {"known", "unknown", "holdout"}
    assert not trained & {str(row["prompt"]) for row in test if row["group"] == "unknown"}
    rng = random.Random(0)
    curriculum = study("planted.base").CURRICULA[name]
    planted = sum(world.point.planted.rstrip(".") in str(curriculum.draw(rng)[1]) for _ in range(400))
    assert 0 < planted < 300


def test_direction_of_the_gradient_is_that_of_enumerated_success(study, tmp_path):
    direction = study("direction")
    base = tmp_path / "weak-seed0"
    shutil.copytree(SHIPPED, base)
    rows = direction.measure(study("worlds").WORLDS["weak"], base, 0, 1)
    rows = {row["quantity"]: row for row in rows if row["group"] == "unknown"}
    assert set(rows) == set(direction.QUANTITIES)
    assert 0.0 < rows["S"]["success"] < 1.0
    assert rows["ΔV"]["cosine"] > 0.9  # the teacher reads the letter
    assert rows["ΔV"]["commit"]


def test_teacher_reads_z_with_the_tokens_of_pretraining(study):
    direction, curriculum = study("direction"), study("embedded_base.curriculum")
    checkpoint = direction.Checkpoint.load(str(SHIPPED), name="base")
    builder = checkpoint.context_builder(direction.analysis_config(**direction.TEMPLATES))
    prompt = study("worlds").WORLDS["weak"].task.build("test")[0]["prompt"]
    for solution, feedback in ((None, "Correct option: B."), ("Thought: it is.", None), ("Thought: x", "Correct.")):
        text = checkpoint.tokenizer.apply_chat_template(
            curriculum.teacher_prompt(prompt, solution, feedback), add_generation_prompt=True, tokenize=False
        )
        ids = builder.encode(prompt, direction.PrivilegedContext(solution, feedback))
        assert ids == checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_success_of_a_prefix_is_the_mean_over_its_tokens(study):
    direction = study("direction")
    world = study("worlds").WORLDS["weak"]
    checkpoint = direction.Checkpoint.load(str(SHIPPED), name="base")
    row = world.task.build("test")[0]
    tree = direction.enumerate_responses(checkpoint, checkpoint.encode(row["prompt"]))
    values = direction.success_of(checkpoint, world, row, tree)
    leaves = [leaf for leaf in values if leaf not in tree]
    assert sum(tree[leaf[:-1]][0] * tree[leaf[:-1]][1][leaf[-1]] for leaf in leaves) == pytest.approx(1.0)
    weighted = [tree[leaf[:-1]][0] * tree[leaf[:-1]][1][leaf[-1]] * values[leaf] for leaf in leaves]
    assert values[()] == pytest.approx(sum(weighted))
    assert all(leaf[-1] in checkpoint.end_ids() for leaf in leaves)
