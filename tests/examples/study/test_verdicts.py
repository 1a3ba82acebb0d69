"""Verdicts, choices and differences of the study, on runs with given scores."""

from __future__ import annotations

import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from credit_trl.evaluation.statistics import Difference
from credit_trl.lab.sweeps import read_spec
from synthetic_runs import writer

STUDY = Path(__file__).parents[3] / "examples" / "study"
GROUP_SIZES = {"known": 12, "unknown": 12, "holdout": 6}
PROMPTS = {f"{group}{i}": group for group, size in GROUP_SIZES.items() for i in range(size)}
GUIDE = "CREDIT form=guide λ=1"
FROZEN = "CREDIT form=guide λ=1.5 teacher_model_kind=base"
FROZEN_WEAKER = "CREDIT form=guide λ=1 teacher_model_kind=base"
FROZEN_SDPO = "SDPO teacher_model_kind=base"
WORLDS = ("plain", "shortcut")


def write_world(write, world, spec, scores=None, planted=None, forgets=False):
    """Write three seeds of every arm of a sweep.

    Args:
        scores: (arm, group) → final accuracy, by default 1 on known, 0.7 on unknown and 0.25 on hold-out cues.
        planted: arm → final shortcut rate, by default 0.9.
        forgets: Continue from step 20 to 40, where CREDIT arms lose 0.2 of their hold-out accuracy.
    """
    scores, planted = scores or {}, planted or {}
    defaults = {"known": 1.0, "unknown": 0.7, "holdout": 0.25}
    rng = np.random.default_rng(0)
    noise = {prompt: float(rng.normal(0, 0.02)) for prompt in PROMPTS}
    for arm in sorted({arm.name for arm in read_spec(STUDY / f"{spec}.yaml").arms()}):
        options = dict(part.split("=") for part in arm.split() if "=" in part)
        strength = float(options.get("λ", 0.0))
        for seed in (1, 2, 3):
            final = {p: scores.get((arm, g), defaults[g]) + noise[p] + 0.001 * seed for p, g in PROMPTS.items()}
            steps = {0: {p: 0.25 + noise[p] for p in PROMPTS}, 20: final}
            if forgets:
                lost = 0.2 * arm.startswith("CREDIT")
                steps[40] = {p: final[p] - lost * (g == "holdout") for p, g in PROMPTS.items()}
            log = [
                {"step": s, "step_time": 1.0 + strength, "reward": 0.5, "entropy": 1.0, "credit/frac_gated": 0.4}
                | {"credit/s_mean": 2.0 - strength * s / 10, "credit/s_std": 1.0}
                for s in range(1, 21)
            ]
            write(
                f"{world}/{arm.replace(' ', '-')}-{seed}",
                steps,
                arm=arm,
                seed=seed,
                task="quickstart",
                groups=PROMPTS,
                log=log,
                config={"max_steps": max(steps), "learning_rate": 1e-3, "warmup_steps": 2}
                | {"lr_scheduler_type": "linear", "teacher_model_kind": options.get("teacher_model_kind", "ema")},
                metrics={"format": 1.0, "shortcut": planted.get(arm, 0.9)},
            )


def unknown(scores: dict[str, float]) -> dict[tuple[str, str], float]:
    return {(arm, "unknown"): score for arm, score in scores.items()}


@pytest.fixture(scope="module")
def worlds(study, tmp_path_factory):
    """The sweep `methods` with known differences between its arms."""
    root = tmp_path_factory.mktemp("methods")
    write = writer(root)
    write_world(write, "plain", "plain", unknown({"GRPO": 0.4, "SDPO": 0.7, "CREDIT λ=0.5": 0.3}))
    write_world(write, "shortcut", "shortcut", unknown({"CREDIT λ=0.5": 0.4}), {"CREDIT λ=0.5": 0.05})
    read = study("worlds").read_world
    return {name: read(name, root / name) for name in WORLDS}


def endings_of(study, root, name):
    return {ending.title: ending for ending in study("endings").read_endings(root)}[name]


@pytest.mark.parametrize(
    ("interval", "wanted", "word"),
    [
        ((0.1, 0.3), "more", "holds"),
        ((-0.1, 0.3), "more", "not decided"),
        ((-0.3, -0.1), "more", "does not hold: the reverse"),
        ((-0.3, -0.1), "less", "holds"),
        ((0.1, 0.3), "less", "does not hold: the reverse"),
    ],
)
def test_verdict_follows_from_the_interval(study, interval, wanted, word):
    contrast = SimpleNamespace(difference=Difference(0.0, *interval, p_value=0.5))
    assert study("claims").verdict(contrast, wanted) == word


@pytest.mark.parametrize(
    ("difference", "word"),
    [
        ((0.01, -0.01, 0.03), "met"),
        ((-0.01, -0.05, 0.03), "met by the mean, not by the interval"),
        ((-0.03, -0.06, 0.01), "missed by the mean"),
        ((-0.05, -0.08, -0.03), "**missed**"),
    ],
)
def test_loss_verdict_follows_from_mean_and_interval(study, difference, word):
    assert study("bars").loss_verdict(Difference(*difference, p_value=0.5)) == word


def test_contrasts_are_paired_differences_of_the_arms(worlds):
    plain, shortcut = worlds["plain"], worlds["shortcut"]
    assert plain.contrast("SDPO", "unknown", baseline="GRPO").difference.difference == pytest.approx(0.3)
    assert plain.contrast("CREDIT λ=0.5", "unknown").difference.difference == pytest.approx(-0.4)
    rates = shortcut.contrast("CREDIT λ=0.5", "unknown", measure="shortcut")
    assert rates.difference.difference == pytest.approx(-0.85)


def test_claims_count_the_verdicts_of_their_contrasts(study, worlds):
    claims = study("claims")
    methods = claims.claim_methods(worlds["plain"])
    assert (methods.count("**holds**"), methods.count("**not decided**")) == (1, 1)
    assert "**holds within 5 points**" in claims.claim_count(worlds["plain"])
    assert claims.claim_lambda(worlds["plain"], worlds["shortcut"]).count("**holds**") == 2


def test_seed_difference_is_a_paired_t_interval(study, worlds):
    module, arms = study("worlds"), ("CREDIT λ=0.5", "CREDIT λ=0.05")
    numbers = {(arm, seed): value for arm, values in zip(arms, ((1.0, 1.5, 1.2), (0.7, 0.9, 0.8)), strict=True)
               for seed, value in zip((1, 2, 3), values, strict=True)}  # fmt: skip
    found = module.seed_difference(worlds["plain"], *arms, lambda run: numbers[run.arm, run.seed])
    low, high = stats.ttest_rel((1.0, 1.5, 1.2), (0.7, 0.9, 0.8)).confidence_interval(0.95)
    assert found == f"{1.3 / 3:+.3f} [{low:+.3f}, {high:+.3f}]"


def test_change_of_s_compares_first_and_last_steps(study, worlds):
    values = [2.0 - 0.5 * step / 10 for step in range(1, 21)]
    expected = statistics.fmean(values[-10:]) / statistics.fmean(values[:5]) - 1
    assert study("worlds").s_change(worlds["plain"], "CREDIT λ=0.5") == pytest.approx(expected)


def test_break_even_lambda_equates_both_targets(study):
    own, planted = {"f": -2.0, "g": -9.0}, {"f": -0.2, "g": -0.2}
    coef = (planted["f"] - own["f"]) / (planted["g"] - own["g"])
    assert own["f"] - coef * own["g"] == pytest.approx(planted["f"] - coef * planted["g"])
    tokens = {f"shortcut-seed{seed}": {"branch": {"own": own, "shortcut": planted}} for seed in (1, 2)}
    assert study("claims").break_even(tokens) == f"{coef:.2f} (range over bases {coef:.2f} to {coef:.2f})"


def test_world_at_a_step_ignores_later_evaluations(study, tmp_path):
    write_world(writer(tmp_path), "plain-long", "long", forgets=True)
    module = study("worlds")
    world = module.read_world("plain", tmp_path / "plain-long")
    assert world.mean(FROZEN, "holdout") == pytest.approx(0.05, abs=0.02)
    assert module.world_at(world, 20).mean(FROZEN, "holdout") == pytest.approx(0.25, abs=0.02)


def test_choice_takes_the_least_shortcut_among_close_arms(study, tmp_path):
    write, averaged = writer(tmp_path), "CREDIT form=guide λ=1.5"
    scores = unknown({"SDPO": 0.9, averaged: 0.9, FROZEN: 0.905})
    for world in WORLDS:
        for sweep in ("end_choice", "end"):
            write_world(write, f"{world}-{sweep}", sweep, scores, {averaged: 0.03, FROZEN: 0.01})
    ending = endings_of(study, tmp_path, "A shorter recipe")
    assert set(study("endings").qualified(ending.chosen_on)) == {averaged, FROZEN}
    assert study("endings").chosen(ending.chosen_on) == FROZEN
    assert study("bars").meets(ending.reported["plain"], FROZEN)


def test_settings_are_compared_with_sdpo_of_either_teacher(study, tmp_path):
    write = writer(tmp_path)
    scores = unknown({"SDPO": 0.9, FROZEN_SDPO: 0.93, FROZEN: 0.92, FROZEN_WEAKER: 0.88})
    planted = {FROZEN: 0.01, FROZEN_WEAKER: 0.02}
    for world in WORLDS:
        write_world(write, f"{world}-long_choice", "long_choice", scores, planted, forgets=True)
        write_world(write, f"{world}-long", "long", scores | {(FROZEN, "unknown"): 0.9}, planted)
    ending = endings_of(study, tmp_path, "At the end of learning")
    endings, bars = study("endings"), study("bars")
    assert set(endings.qualified(ending.chosen_on)) == {FROZEN}  # the weaker one is 5 points below the frozen SDPO
    assert endings.qualified(ending.choice) == {}  # hold-out accuracy is lost by step 40
    assert not bars.meets(ending.reported["plain"], FROZEN)
    assert bars.baselines_of(ending.reported["plain"]) == ["SDPO", FROZEN_SDPO]


def test_collapsed_runs_are_counted_by_method_and_teacher(study, tmp_path):
    for world in WORLDS:
        scores = {("SDPO", "known"): 0.1 if world == "plain" else 1.0}
        for sweep in ("long_choice", "long"):
            write_world(writer(tmp_path), f"{world}-{sweep}", sweep, scores if sweep == "long" else None)
    counts = study("endings").collapsed_section(study("endings").read_endings(tmp_path))[-1]
    assert "| SDPO | averaged | 12 | 3 |" in counts
    assert "| SDPO | frozen | 12 | 0 |" in counts


def test_first_choice_excludes_arms_with_the_shortcut(study, tmp_path):
    scores = unknown({GUIDE: 0.9, f"{GUIDE} source=none": 0.95})
    planted = {GUIDE: 0.0, "CREDIT λ=0.5 gate=0.05": 0.04}
    for world in WORLDS:
        write_world(writer(tmp_path), f"{world}-choice", "choice", scores, planted)
    choice = study("worlds").read_sweep_worlds(tmp_path, "choice")
    assert set(study("forms").eligible(choice)) == {GUIDE, "CREDIT λ=0.5 gate=0.05"}
    assert study("forms").chosen(choice) == GUIDE


@pytest.fixture(scope="module")
def crossed_worlds(study, tmp_path_factory):
    root = tmp_path_factory.mktemp("crossed")
    write = writer(root)
    scores = unknown({GUIDE: 0.6, f"{GUIDE} source=none": 0.75, f"{GUIDE} gate=0.05": 0.85})
    for world, baseline, spec in (("plain", "plain-forms", "forms"), ("style", "style", "style")):
        write_world(write, baseline, spec, scores, {GUIDE: 0.1, "SDPO": 0.9})
        write_world(write, f"{world}-cross", "cross", scores, {f"{GUIDE} source=hard": 0.3})
    return study("crossed").read_crossed(root, dict.fromkeys(("plain", "shortcut", "style"), "quickstart"))


def test_cells_are_paired_with_their_form_without_options(study, crossed_worlds):
    crossed = study("crossed")
    assert set(crossed_worlds) == {"plain", "style"}
    for world in crossed_worlds.values():
        assert crossed.cells_of(world, GUIDE) == sorted(f"{GUIDE} {option}" for option in crossed.OPTIONS if option)
        for option, points in (("source=none", "+15.0 ["), ("gate=0.05", "+25.0 [")):
            assert crossed.effect(world, f"{GUIDE} {option}", GUIDE, "score", "unknown").startswith(points)
    rates = crossed.effect(crossed_worlds["style"], f"{GUIDE} source=hard", GUIDE, "shortcut", "unknown")
    assert rates.startswith("+20.0 [")
    assert {crossed.form_of(run.arm) for run in crossed_worlds["plain"].runs} == {None, *crossed.FORMS}


def test_figure_of_the_cross_has_a_style_per_cell(study, crossed_worlds):
    drawn, light = study("crossed_figure"), study("report").THEMES[0]
    assert drawn.cross_figure(crossed_worlds, light).startswith(b"\x89PNG")
    assert drawn.cross_figure({"plain": crossed_worlds["plain"]}, light) is None
    arms = study("bars").arms_of(crossed_worlds["style"])
    styles = {tuple(sorted((k, str(v)) for k, v in drawn.style_of(arm, light).items())) for arm in arms}
    assert len(styles) == len(arms) == 25


@pytest.mark.slow
def test_pages_are_written_from_run_directories(study, worlds, tmp_path):
    report = study("report")
    tokens = {
        f"{world}-seed1": {
            "classes": {n: {"delta_v": 0.1, "S": 1.0, "G": -1.0} for n in ("cue", "topic", "city", "generic")},
            "branch": {n: {"f": -2.0, "g": g, "student": -0.1} for n, g in (("own", -9.0), ("shortcut", -0.2))},
        }
        for world in WORLDS
    }
    report.draw(worlds, tmp_path)
    assert len(list(tmp_path.glob("*.png"))) == 12
    page = report.page(worlds, tokens)
    assert all(f'src="{path.name}"' in page for path in tmp_path.glob("*-light.png"))
