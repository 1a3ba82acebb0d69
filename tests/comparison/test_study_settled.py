"""Hold-out cues under every topic, and the page of the runs that are tested with them."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl.tasks import load_task, quickstart

STUDY = Path(__file__).parents[2] / "examples" / "study"
SEEDS = range(21, 27)
SDPO, FROZEN_SDPO = "SDPO", "SDPO teacher_model_kind=base"
GUIDE = "CREDIT form=guide λ=1.5 teacher_model_kind=base"
GROUP_SIZES = {"known": 12, "unknown": 12, "holdout": 6, "relabelled": 24}


@pytest.fixture(scope="module")
def study():
    """The study's modules, imported by name as its scripts do."""
    before = set(sys.modules)
    sys.path.insert(0, str(STUDY))
    yield lambda name: __import__(name)
    sys.path.remove(str(STUDY))
    for name in set(sys.modules) - before:
        if str(STUDY) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_every_holdout_cue_is_asked_about_under_every_topic_and_the_other_rows_stay(study):
    task = load_task("relabelled:TASK")
    rows, own = task.build("test"), quickstart.build("test")
    assert rows[: len(own)]["prompt"] == own["prompt"]
    added = rows.select(range(len(own), len(rows)))
    topics = Counter((row["cue"], answer_of(row)["tool"]) for row in added)
    cues = quickstart.GROUPS["holdout"]
    assert set(topics) == {(cue, quickstart.tool(topic)) for cue in cues for topic in quickstart.TOPICS}
    assert set(topics.values()) == {study("relabelled").ROWS_PER_PAIR}
    assert set(added["group"]) == {study("relabelled").GROUP}
    assert len(set(rows["id"])) == len(rows)
    assert set(rows["task"]) == {"relabelled:TASK"}
    assert (
        task.build("train").remove_columns("task").to_list()
        == quickstart.build("train").remove_columns("task").to_list()
    )
    for row in added:
        assert row["city"] in quickstart.cities_of(row["cue"], "test")


def answer_of(row) -> dict:
    return quickstart._parse_answer(row["answer"])


@settings(deadline=None, max_examples=10)
@given(st.randoms(use_true_random=False))
def test_what_a_model_believes_of_holdout_cues_does_not_decide_its_score(study, rng):
    """A model that calls one topic's tool for a cue, whichever, is right once in twelve."""
    belief = {cue: rng.choice(quickstart.TOPICS) for cue in quickstart.GROUPS["holdout"]}
    rewards = []
    for row in study("relabelled").every_topic():
        call = f'Action: {quickstart.tool(belief[row["cue"]])}\nAction Input: {{"city": "{row["city"]}"}}'
        rewards.append(quickstart.verify(f"Thought: so.\n{call}", row["answer"]).reward)
    assert np.mean(rewards) == pytest.approx(1 / len(quickstart.TOPICS))


def write_world(write, world: str, relabelled: dict[str, float], fallen: tuple[int, ...] = ()) -> None:
    """Six seeds of three arms; SDPO's runs on the fallen seeds end with nothing."""
    rng = np.random.default_rng(0)
    prompts = {f"{group}{i}": group for group, size in GROUP_SIZES.items() for i in range(size)}
    for arm in (SDPO, FROZEN_SDPO, GUIDE):
        for seed in SEEDS:
            goal = {"known": 1.0, "unknown": 0.97, "holdout": 0.2, "relabelled": relabelled[arm]}
            luck = {"holdout": float(rng.normal(0, 0.15))}
            kept = 0.0 if arm == SDPO and seed in fallen else 1.0
            write(
                f"{world}-settled/{arm.replace(' ', '-')}-{seed}",
                {120: {p: kept * max(goal[g] + luck.get(g, 0.0), 0.0) for p, g in prompts.items()}},
                arm=arm,
                seed=seed,
                task="relabelled:TASK",
                groups=prompts,
                config={
                    "max_steps": 120,
                    "learning_rate": 2e-3,
                    "warmup_steps": 10,
                    "lr_scheduler_type": "warmup_stable_decay",
                    "lr_scheduler_kwargs": {"num_decay_steps": 20},
                    "teacher_model_kind": "base" if "base" in arm else "ema",
                },
                metrics={"format": 1.0, "shortcut": 0.0 if arm == GUIDE else 0.9},
            )


@pytest.fixture(scope="module")
def written(study, writer_at, tmp_path_factory) -> Path:
    """The page's folder: in the shortcut world SDPO falls apart on two seeds, and the setting loses hold-out cues."""
    root = tmp_path_factory.mktemp("settled")
    write = writer_at(root / "runs")
    even = {SDPO: 0.2, FROZEN_SDPO: 0.2, GUIDE: 0.2}
    write_world(write, "plain", even)
    write_world(write, "shortcut", even | {GUIDE: 0.12}, fallen=(22, 25))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["settled.py", "--output_dir", str(root / "runs"), "--docs", str(root)])
        study("settled").main()
    return root


def rows_of(text: str, beginning: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"| {beginning} |")]


def test_holdout_cues_under_every_topic_are_held_to_the_bar_beside_the_drawn_ones(written):
    page = (written / "settled_study.md").read_text("utf-8")
    for baseline in (SDPO, FROZEN_SDPO):
        plain, *_ = rows_of(page, f"relabelled, against {baseline}")
        assert plain.endswith("| +0.0 points [+0.0, +0.0], p = 1.000 | met |")
        drawn, *_ = rows_of(page, f"holdout, against {baseline}")
        assert not drawn.endswith("| met |")  # by the luck of six draws the interval is wide
    for missed in rows_of(page, f"relabelled, against {FROZEN_SDPO}")[1:]:
        assert missed.endswith("| **missed** |")


def test_where_sdpo_fell_apart_the_bar_is_told_again_without_these_seeds(written):
    page = (written / "settled_study.md").read_text("utf-8")
    assert "In the shortcut world SDPO fell apart on 2 of the seeds (22, 25):" in page
    assert "In the plain world SDPO fell apart" not in page
    _, whole, standing = rows_of(page, f"unknown, against {SDPO}")
    assert "+32.3 points" in whole
    assert "+0.0 points [+0.0, +0.0]" in standing
    assert page.count("## ") == 1  # of two sweeps one was run
    assert f"| {SDPO} | averaged | 12 | 2 |" in page
    assert f"| {GUIDE} | frozen | 12 | 0 |" in page


def test_numbers_of_every_run_stand_beside_the_page(written):
    with (written / "study" / "settled.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * len(SEEDS)
    lost = [row for row in rows if float(row["known"]) == 0]
    assert {(row["world"], row["arm"], row["seed"]) for row in lost} == {("shortcut", SDPO, s) for s in ("22", "25")}
    kept = next(row for row in rows if row["arm"] == GUIDE and row["world"] == "shortcut")
    assert (kept["relabelled"], kept["shortcut"], kept["format relabelled"]) == ("0.1200", "0.0000", "1.0000")


def test_these_runs_have_seeds_of_their_own_and_arms_that_differ_in_the_contrast():
    from credit_trl.sweeps import read_spec

    specs = {spec.stem: read_spec(spec) for spec in STUDY.glob("*.yaml")}
    settled, again = specs.pop("settled"), specs.pop("long_relabelled")
    assert set(settled.seeds) == set(again.seeds)
    assert not set(settled.seeds) & {seed for other in specs.values() for seed in other.seeds}
    sdpo, guide, *slower = sorted((arm.options for arm in settled.arms()), key=len)
    assert guide == sdpo | {"contrastive_form": "guide", "contrastive_coef": 1.5}
    assert [options.keys() - guide.keys() for options in slower] == [{"learning_rate"}]
    assert {arm.name for arm in again.arms()} == {FROZEN_SDPO, GUIDE}
    budget = ("per_device_train_batch_size", "num_generations", "temperature", "distillation_tail")
    for spec in (settled, again):
        assert [spec.config[name] for name in budget] == [specs["long"].config[name] for name in budget]
    saving = {"save_steps"}
    assert {key for key in again.config if again.config[key] != specs["long"].config[key]} == saving
