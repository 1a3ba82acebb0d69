"""The group `relabelled`, and results/settled.md with its CSV."""

from __future__ import annotations

import csv
import dataclasses
import json
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from credit_trl.tasks import load_task, quickstart
from synthetic_runs import writer

STUDY = Path(__file__).parents[3] / "examples" / "study"
SEEDS = range(25, 31)
FROZEN_SDPO = "SDPO teacher_model_kind=base"
GUIDE = "CREDIT form=guide λ=1.5 teacher_model_kind=base"
GROUP_SIZES = {"known": 12, "unknown": 12, "holdout": 6, "relabelled": 24}


def test_relabelled_rows_cover_every_cue_and_topic(study):
    task = load_task("relabelled:TASK")
    rows, own = task.build("test"), quickstart.build("test")
    assert rows[: len(own)]["prompt"] == own["prompt"]
    added = rows.select(range(len(own), len(rows)))
    topics = Counter((row["cue"], json.loads(row["answer"])["tool"]) for row in added)
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


@settings(deadline=None, max_examples=10)
@given(st.randoms(use_true_random=False))
def test_score_on_relabelled_rows_ignores_beliefs_about_cues(study, rng):
    """A model that calls the tool of one fixed topic per cue is correct on one twelfth of the rows."""
    belief = {cue: rng.choice(quickstart.TOPICS) for cue in quickstart.GROUPS["holdout"]}
    rewards = []
    for row in study("relabelled").every_topic():
        call = f'Action: {quickstart.tool(belief[row["cue"]])}\nAction Input: {{"city": "{row["city"]}"}}'
        rewards.append(quickstart.verify(f"Thought: so.\n{call}", row["answer"]).reward)
    assert np.mean(rewards) == pytest.approx(1 / len(quickstart.TOPICS))


@settings(deadline=None, max_examples=20)
@given(st.randoms(use_true_random=False))
def test_score_over_the_labels_is_a_quarter_of_offered_calls(study, rng):
    """Calls depend on the cue and the options alone: over the labels of a prompt one in four offered ones is right."""
    relabelled = study("relabelled")
    call = {}  # of a prompt: one topic, offered or not
    rewards, offered = [], []
    for _ in range(20):
        question = relabelled.draw_question(
            rng, rng.choice(quickstart.GROUPS["holdout"]), rng.choice(quickstart.TOPICS)
        )
        called = call.setdefault(question.prompt[0]["content"], rng.choice(quickstart.TOPICS))
        response = dataclasses.replace(question, options=(called, *_three_others(called)), topic=called).response()
        labels = [dataclasses.replace(question, topic=topic) for topic in question.options]
        rewards += [quickstart.verify(response, label.answer).reward for label in labels]
        offered.append(called in question.options)
    assert relabelled.offered_rate(np.mean(rewards)) == pytest.approx(np.mean(offered))


def _three_others(topic):
    return [other for other in quickstart.TOPICS if other != topic][:3]


def test_every_option_is_equally_often_the_label(study):
    """Given the set of options: labels are uniform, so the position and the topic of the label say nothing."""
    relabelled, rng = study("relabelled"), random.Random(0)
    letters = Counter()
    for _ in range(2400):
        topic = rng.choice(quickstart.TOPICS)
        letters[relabelled.draw_question(rng, quickstart.GROUPS["holdout"][0], topic).letter] += 1
    assert stats.chisquare(list(letters.values())).pvalue > 0.001


def write_world(write, folder: str, relabelled: dict[str, float], seeds=SEEDS) -> None:
    """Write runs of two arms with random hold-out scores and given scores on the relabelled rows."""
    rng = np.random.default_rng(0)
    prompts = {f"{group}{i}": group for group, size in GROUP_SIZES.items() for i in range(size)}
    for arm in (FROZEN_SDPO, GUIDE):
        for seed in seeds:
            goal = {"known": 1.0, "unknown": 0.97, "holdout": float(rng.uniform(0.0, 0.5))}
            goal["relabelled"] = relabelled[arm] + 0.001 * (seed % 2) * (arm == GUIDE)
            write(
                f"{folder}/{arm.replace(' ', '-')}-{seed}",
                {180: {prompt: goal[group] for prompt, group in prompts.items()}},
                arm=arm,
                seed=seed,
                task="relabelled:TASK",
                groups=prompts,
                metrics={"format": 1.0, "shortcut": 0.0 if arm == GUIDE else 0.9},
            )


@pytest.fixture
def write_page(study, tmp_path, monkeypatch):
    """A function that writes runs of sweeps into a folder, runs settled.py on it and returns the page."""

    def write_them(name: str, *worlds: tuple, **options) -> str:
        for world in worlds:
            write_world(writer(tmp_path / name), *world, **options)
        line = ["settled.py", "--output_dir", str(tmp_path / name), "--results", str(tmp_path / "results")]
        monkeypatch.setattr(sys, "argv", line)
        study("settled").main()
        return (tmp_path / "results" / "settled.md").read_text("utf-8")

    return write_them


def rows_of(text: str, beginning: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"| {beginning} |")]


EVEN = {FROZEN_SDPO: 0.2, GUIDE: 0.2}


def test_thresholds_apply_to_offered_and_holdout_rows(write_page):
    page = write_page("runs", ("plain-settled", EVEN), ("shortcut-settled", EVEN | {GUIDE: 0.12}))
    plain, shortcut = rows_of(page, "offered tool, against SDPO")
    assert plain.endswith("| no lower by more than 8 points | +0.2 points [-0.0, +0.4] | met |")
    assert shortcut.endswith("| **missed** |")
    for drawn in rows_of(page, "holdout, against SDPO"):
        assert not drawn.endswith("| met |")  # random labels
    assert rows_of(page, "shortcut")[0].endswith("| 0.000 [0.000, 0.000] | met |")
    assert 'src="settled-light.png"' in page
    assert page.count("\n## ") == 1  # of five sweeps one was run
    assert "Seeds, each with its own base model: plain 25, 26, 27, 28, 29, 30; shortcut 25" in page
    assert "not run yet" not in page


def test_interval_is_students_t_over_shared_seeds(study):
    settled, rng = study("settled"), np.random.default_rng(3)
    ours, theirs = ({seed: {"unknown": float(rng.normal())} for seed in seeds} for seeds in (range(7), range(2, 9)))
    found = settled.paired(ours, theirs, "unknown")
    reference = stats.ttest_rel([ours[s]["unknown"] for s in range(2, 7)], [theirs[s]["unknown"] for s in range(2, 7)])
    low, high = reference.confidence_interval(0.95)
    assert (found.low, found.high, found.p_value) == pytest.approx((low, high, reference.pvalue))
    assert settled.interval([0.3]) == (-np.inf, np.inf)


def test_figure_shows_settings_with_at_least_two_seeds(study, write_page, tmp_path):
    write_page("runs", ("plain-settled", EVEN), ("shortcut-settled", EVEN | {GUIDE: 0.12}))
    write_page("more", ("plain-confirmed", EVEN), seeds=(31,))  # one seed has no interval
    settled = study("settled")
    rows = settled.read_rows(tmp_path / "results" / "settled.csv")
    rows = {key: row | {settled.OFFERED: 4 * row["relabelled"]} for key, row in rows.items()}
    unknown, offered = settled.panels_of(rows).values()
    labels = ["settled: λ = 1.5, plain, 6 seeds", "settled: λ = 1.5, shortcut, 6 seeds"]
    assert [line.label for line in unknown.lines] == [line.label for line in offered.lines] == labels
    assert offered.lines[1].differences == pytest.approx([4 * (-0.08 + 0.001 * (seed % 2)) for seed in SEEDS])
    assert (unknown.limit, offered.limit) == (0.02, 0.08)
    assert settled.label_of(f"{GUIDE} learning_rate=0.0011") == "λ = 1.5 at 0.0011"
    for theme in settled.THEMES:
        assert (tmp_path / "results" / f"settled-{theme.name}.png").read_bytes().startswith(b"\x89PNG")
    assert settled.panels_of({}) == {}


def test_cell_shows_the_range_of_many_seeds(study):
    cell = study("settled").mean_of_seeds
    assert cell([10.0, 20.0]) == "15.0 (10, 20)"
    assert cell([float(value) for value in range(9)]) == "4.0 (0 to 8)"


def test_later_seeds_are_added_to_the_csv(write_page, tmp_path):
    write_page("first", ("plain-confirmed", EVEN), seeds=(31, 32))
    page = write_page("second", ("plain-confirmed", EVEN), seeds=(33,))
    assert "80.0 (80, 80, 80)" in rows_of(page, FROZEN_SDPO)[0]  # four times the score
    assert "plain 31, 32, 33 (17 per world not run yet)" in page
    with (tmp_path / "results" / "settled.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seed"]) for row in rows] == [
        (a, str(s)) for a in (GUIDE, FROZEN_SDPO) for s in (31, 32, 33)
    ]
    kept = rows[0]
    assert (kept["relabelled"], kept["shortcut"], kept["format relabelled"]) == ("0.2010", "0.0000", "1.0000")
    again = write_page("nothing")
    assert again == page


def test_differences_leave_out_seeds_that_collapsed(study):
    """The last seed collapsed in λ = 0.1: three pairs are left, and the interval is Student's."""
    settled, rng = study("settled"), np.random.default_rng(4)
    arms = ("SDPO", "CREDIT λ=0.1")
    rows = {
        settled.Key("subtract_long", "plain", arm, seed): {
            name: 0.1 if (arm, seed) == (arms[1], 28) else float(rng.uniform(0.6, 1.0)) for name in settled.SHOWN
        }
        for arm in arms
        for seed in range(25, 29)
    }
    sdpo, credit = settled.differences_table(rows, "plain", arms).splitlines()[-2:]
    ours, theirs = ([rows["subtract_long", "plain", arm, s]["unknown"] for s in range(25, 28)] for arm in arms[::-1])
    reference = stats.ttest_rel(ours, theirs)
    low, high = reference.confidence_interval(0.95)
    assert sdpo.startswith("| SDPO | 0 of 4 |")
    assert credit.startswith("| CREDIT λ=0.1 | 1 of 4 |")
    assert f"| {100 * np.subtract(ours, theirs).mean():+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] |" in credit
