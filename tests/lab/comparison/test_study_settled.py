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
from scipy import stats

from credit_trl.tasks import load_task, quickstart

STUDY = Path(__file__).parents[3] / "examples" / "study"
SEEDS = range(25, 31)
FROZEN_SDPO = "SDPO teacher_model_kind=base"
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


def write_world(write, folder: str, relabelled: dict[str, float], seeds=SEEDS) -> None:
    """Runs of two arms; the twelve labels' luck is another for each run, and what it is about is not."""
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
def write_page(study, writer_at, tmp_path, monkeypatch):
    """A function that writes runs of a sweep into a folder of their own, and the page with what is known by then."""

    def write_them(name: str, *worlds: tuple, **options) -> str:
        for world in worlds:
            write_world(writer_at(tmp_path / name), *world, **options)
        line = ["settled.py", "--output_dir", str(tmp_path / name), "--docs", str(tmp_path / "docs")]
        monkeypatch.setattr(sys, "argv", line)
        study("settled").main()
        return (tmp_path / "docs" / "settled_study.md").read_text("utf-8")

    return write_them


def rows_of(text: str, beginning: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"| {beginning} |")]


EVEN = {FROZEN_SDPO: 0.2, GUIDE: 0.2}


def test_holdout_cues_under_every_topic_are_held_to_the_bar_beside_the_drawn_ones(write_page):
    page = write_page("runs", ("plain-settled", EVEN), ("shortcut-settled", EVEN | {GUIDE: 0.12}))
    plain, shortcut = rows_of(page, "relabelled, against SDPO")
    assert plain.endswith(" points [-0.0, +0.1] | met |")
    assert shortcut.endswith("| **missed** |")
    for drawn in rows_of(page, "holdout, against SDPO"):
        assert not drawn.endswith("| met |")  # luck
    assert rows_of(page, "shortcut")[0].endswith("| 0.000 [0.000, 0.000] | met |")
    assert "![differences](study/settled-light.png#only-light)" in page
    assert page.count("\n## ") == 1  # of three sweeps one was run
    assert "Seeds, each with a base of its own: plain 25, 26, 27, 28, 29, 30; shortcut 25" in page
    assert "are not run yet" not in page


def test_the_interval_is_students_over_the_seeds_that_both_arms_have(study):
    settled, rng = study("settled"), np.random.default_rng(3)
    ours, theirs = ({seed: {"unknown": float(rng.normal())} for seed in seeds} for seeds in (range(7), range(2, 9)))
    found = settled.paired(ours, theirs, "unknown")
    reference = stats.ttest_rel([ours[s]["unknown"] for s in range(2, 7)], [theirs[s]["unknown"] for s in range(2, 7)])
    low, high = reference.confidence_interval(0.95)
    assert (found.low, found.high, found.p_value) == pytest.approx((low, high, reference.pvalue))
    assert settled.interval([0.3]) == (-np.inf, np.inf)


def test_the_figure_shows_the_differences_of_every_setting_that_has_an_interval(study, write_page, tmp_path):
    write_page("runs", ("plain-settled", EVEN), ("shortcut-settled", EVEN | {GUIDE: 0.12}))
    write_page("more", ("plain-confirmed", EVEN), seeds=(31,))  # of one seed, without interval
    settled = study("settled")
    rows = settled.read_rows(tmp_path / "docs" / "study" / "settled.csv")
    unknown, relabelled = settled.panels_of(rows).values()
    labels = ["settled: λ = 1.5, plain, 6 seeds", "settled: λ = 1.5, shortcut, 6 seeds"]
    assert [line.label for line in unknown] == [line.label for line in relabelled] == labels
    assert relabelled[1].differences == pytest.approx([-0.08 + 0.001 * (seed % 2) for seed in SEEDS])
    assert settled.label_of(f"{GUIDE} learning_rate=0.0011") == "λ = 1.5 at 0.0011"
    for theme in settled.THEMES:
        assert (tmp_path / "docs" / "study" / f"settled-{theme.name}.png").read_bytes().startswith(b"\x89PNG")
    assert settled.panels_of({}) == {}


def test_of_many_seeds_a_cell_tells_the_range(study):
    cell = study("settled").mean_of_seeds
    assert cell([10.0, 20.0]) == "15.0 (10, 20)"
    assert cell([float(value) for value in range(9)]) == "4.0 (0 to 8)"


def test_seeds_that_are_run_later_join_those_that_were_written_down(write_page, tmp_path):
    write_page("first", ("plain-confirmed", EVEN), seeds=(31, 32))
    page = write_page("second", ("plain-confirmed", EVEN), seeds=(33,))
    assert "(20, 20, 20)" in rows_of(page, FROZEN_SDPO)[0]
    assert "plain 31, 32, 33 (17 of a world are not run yet)" in page
    with (tmp_path / "docs" / "study" / "settled.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seed"]) for row in rows] == [
        (a, str(s)) for a in (GUIDE, FROZEN_SDPO) for s in (31, 32, 33)
    ]
    kept = rows[0]
    assert (kept["relabelled"], kept["shortcut"], kept["format relabelled"]) == ("0.2010", "0.0000", "1.0000")
    again = write_page("nothing")
    assert again == page


def test_these_runs_have_seeds_of_their_own_and_arms_that_differ_in_the_contrast_and_where_named_in_the_rate():
    from credit_trl.lab.sweeps import read_spec

    specs = {spec.stem: read_spec(spec) for spec in STUDY.glob("*.yaml")}
    settled, again, confirmed = (specs.pop(name) for name in ("settled", "long_relabelled", "confirmed"))
    assert set(settled.seeds) == set(again.seeds)
    seen = {seed for other in specs.values() for seed in other.seeds}
    assert not set(settled.seeds) & seen
    assert not set(confirmed.seeds) & (seen | set(settled.seeds))  # its rate was chosen on those of `settled`
    slower = f"{GUIDE} learning_rate=0.0011"
    assert {arm.name for arm in again.arms()} == {FROZEN_SDPO, GUIDE}
    assert {arm.name for arm in confirmed.arms()} == {FROZEN_SDPO, slower}
    assert {arm.name for arm in settled.arms()} == {FROZEN_SDPO, GUIDE, GUIDE.replace("1.5", "1"), slower}
    assert confirmed.config == settled.config
    budget = ("per_device_train_batch_size", "num_generations", "temperature", "distillation_tail")
    for spec in (settled, again, confirmed):
        assert [spec.config[name] for name in budget] == [specs["long"].config[name] for name in budget]
    saving = {"save_steps"}
    assert {key for key in again.config if again.config[key] != specs["long"].config[key]} == saving
