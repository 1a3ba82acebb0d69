"""The study's specs are valid, and its page says what its runs say."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from filelock import FileLock

STUDY = Path(__file__).parents[3] / "examples" / "study"
GROUP_SIZES = {"known": 12, "unknown": 12, "holdout": 6}
PROMPTS = {f"{group}{i}": group for group, size in GROUP_SIZES.items() for i in range(size)}


@pytest.fixture(scope="module")
def study():
    """The study's modules, imported by name as its scripts do."""
    sys.path.insert(0, str(STUDY))
    yield lambda name: __import__(name)
    sys.path.remove(str(STUDY))
    for name in (
        "bars",
        "claims",
        "crossed",
        "crossed_figure",
        "endings",
        "forms",
        "report",
        "results",
        "run",
        "tokens",
    ):
        sys.modules.pop(name, None)


def arms_of(spec: str) -> list[str]:
    from credit_trl.lab.sweeps import read_spec

    return [arm.name for arm in read_spec(STUDY / f"{spec}.yaml").arms()]


def write_world(
    write,
    world: str,
    unknown: dict[str, float],
    planted: dict[str, float],
    spec: str | None = None,
    forgets: bool = False,
    known: Mapping[str, float] = MappingProxyType({}),
    gated: float = 0.0,
) -> None:
    """Two seeds of every arm, with final scores on unknown cues and final rates of the planted thought.

    With `forgets` the runs go on from step 20 to 40, and CREDIT loses there what it got right of the hold-out cues."""
    rng = np.random.default_rng(0)
    noise = {prompt: float(rng.normal(0, 0.02)) for prompt in PROMPTS}
    for arm in arms_of(spec or world):
        for seed in (1, 2):
            goal = {"known": known.get(arm, 1.0), "unknown": unknown.get(arm, 0.7), "holdout": 0.25}
            final = {p: goal[g] + noise[p] + 0.001 * seed for p, g in PROMPTS.items()}
            base = {p: 0.25 + noise[p] for p in PROMPTS}
            lost = 0.2 * (arm.split()[0] == "CREDIT")
            later = {40: {p: final[p] - lost * (g == "holdout") for p, g in PROMPTS.items()}} if forgets else {}
            schedule = {"lr_scheduler_type": "linear"}
            if forgets:
                schedule = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 15}}
            size = next((float(part[2:]) for part in arm.split() if part.startswith("λ=")), 0.0)
            log = [
                {"step": s, "step_time": 1.0 + size, "reward": 0.5, "credit/s_mean": 2.0 - size * s / 10}
                | {"credit/s_std": 1.0, "entropy": 1.0, "credit/frac_gated": gated}
                for s in range(1, 21)
            ]
            write(
                f"{world}/{arm.replace(' ', '-')}-{seed}",
                {0: base, 20: final, **later},
                arm=arm,
                seed=seed,
                task="quickstart",
                groups=PROMPTS,
                log=log,
                config={"max_steps": 40 if forgets else 20, "learning_rate": 1e-3, "warmup_steps": 2, **schedule}
                | {"teacher_model_kind": "base" if "teacher_model_kind=base" in arm else "ema"},
                metrics={"format": 1.0, "shortcut": planted.get(arm, 0.9)},
            )


def token_numbers() -> dict:
    classes = {
        name: {"delta_v": 0.1, "S": s, "G": -1.0, "tokens": 9}
        for name, s in {"cue": 9.0, "topic": 3.0, "tool": 0.1, "city": 8.0, "generic": 0.01, "shortcut": 0.0}.items()
    }
    branch = {
        "own": {"f": -2.0, "g": -9.0, "student": -0.1},
        "shortcut": {"f": -0.2, "g": -0.2, "student": -4.0},
    }
    return {
        f"{world}-seed{seed}": {"classes": classes, "branch": branch}
        for world in ("plain", "shortcut")
        for seed in (1, 2)
    }


@pytest.fixture(scope="module")
def page(study, writer_at, tmp_path_factory) -> str:
    tmp_path = tmp_path_factory.mktemp("page")
    write = writer_at(tmp_path / "runs")
    write_world(write, "plain", {"GRPO": 0.4, "SDPO": 0.7, "CREDIT λ=0.5": 0.3}, {})
    write_world(write, "plain-forms", {"GRPO": 0.2, "SDPO": 0.7, "CREDIT λ=0.5": 0.6}, {}, spec="forms")
    write_world(write, "plain-controls", {"foreign-hint λ=0.1": 0.25}, {}, spec="controls")
    write_world(write, "shortcut-forms", {}, {"CREDIT λ=0.5": 0.2}, spec="forms")
    write_world(write, "shortcut", {"CREDIT λ=0.5": 0.4}, {"CREDIT λ=0.5": 0.05})
    (tmp_path / "runs" / "tokens.json").write_text(json.dumps(token_numbers()))
    report = study("report")
    runs = tmp_path / "runs"
    worlds = {name: report.read_world(name, runs / name) for name in report.WORLDS}
    longer = {w: report.read_world(w, *(runs / f"{w}-{s}" for s in report.LONGER)) for w in report.WORLDS}
    report.draw(worlds, tmp_path / "docs" / "study")
    assert len(list((tmp_path / "docs" / "study").glob("*.png"))) == 12
    timed = {
        "seconds_bases": 180.0,
        "seconds": 840.0,
        "processes": 2,
        "cores": 2,
        "seeds": {"plain": [1], "shortcut": [1]},
    }
    return report.page(worlds, token_numbers(), timed, longer)


def line_of(page: str, claim: str, longer: bool = False) -> str:
    hour, _, rest = page.partition("### The same after")
    (line,) = [line for line in (rest if longer else hour).splitlines() if line.startswith(f"- **{claim}")]
    return line


def test_verdicts_follow_from_the_intervals(page):
    methods = line_of(page, "CREDIT > SDPO > GRPO")
    assert "+30.0 points" in methods
    assert methods.count("**holds**") == 1
    assert methods.count("**not decided**") == 1
    assert "**holds within 5 points**" in line_of(page, "C = 1 suffices")
    strength = line_of(page, "λ too large")
    assert strength.count("**holds**") == 2
    assert "-40.0 points" in strength
    assert "**holds on every base**" in line_of(page, "S_t sits")
    shortcut = line_of(page, "Shortcut tokens")
    assert shortcut.count("**holds**") == 1
    assert shortcut.count("**not decided**") == 1
    assert "λ ≈ 0.20" in shortcut


def test_claims_are_told_again_for_the_longer_runs(page):
    assert "+50.0 points" in line_of(page, "CREDIT > SDPO > GRPO", longer=True)
    assert "-10.0 points" in line_of(page, "λ too large", longer=True)
    assert "CREDIT λ=0.5 20 %" in line_of(page, "Shortcut tokens", longer=True)
    assert "-45.0 points" in line_of(page, "Controls", longer=True)


def test_page_states_what_the_study_took_from_nothing(page):
    assert "with 1 of 5 seeds in 2 worlds took 14 minutes, 3 of them for its bases, which are kept" in page
    assert "for all seeds that makes 70." in page


def test_page_states_seeds_budget_and_what_was_not_run(page):
    for text in ("seeds 1, 2", "64 rollouts a step", "tail bucket", "## What has not been run", "2 seeds"):
        assert text in page
    (of_count,) = re.findall(r"\| 4 \| (\d+\.\d) ±", page)
    (of_strength, _) = re.findall(r"\| 0\.5 \| (\d+\.\d) ±", page)
    assert (float(of_count), float(of_strength)) == pytest.approx((70, 30), abs=1.5)


def test_every_arm_of_the_specs_can_train_and_has_the_same_budget(study, tmp_path):
    from credit_trl.lab.sweeps import read_spec
    from credit_trl.lab.sweeps.launch import plan_sweep

    for world in ("plain", "shortcut", "style", "programs"):
        spec = read_spec(STUDY / f"{world}.yaml")
        jobs = [json.loads((f / "job.json").read_text()) for f in plan_sweep(spec, tmp_path / world)]
        assert {job["seed"] for job in jobs} == set(spec.seeds)
        assert len(spec.seeds) >= 5
        budget = ("max_steps", "per_device_train_batch_size", "num_generations", "max_completion_length")
        assert len({tuple(job["config"][name] for name in budget) for job in jobs}) == 1
        assert {job["config"]["distillation_tail"] for job in jobs} == {"bucket"}
        assert {job["model"] for job in jobs} == {f"bases/{world}-seed{seed}" for seed in spec.seeds}


@pytest.fixture(scope="module")
def forms_page(study, writer_at, tmp_path_factory) -> str:
    """SDPO at 70 % and 90 % planted thoughts; the guide as told."""
    tmp_path = tmp_path_factory.mktemp("forms")
    write = writer_at(tmp_path)
    guide = "CREDIT form=guide λ=1"
    write_world(write, "plain-forms", {"SDPO": 0.7, guide: 0.6}, {}, spec="forms")
    rates = {"SDPO": 0.98, "GRPO": 0.3, guide: 0.0}
    write_world(write, "shortcut-forms", {"SDPO": 0.94, guide: 0.94}, rates, spec="forms")
    forms = study("forms")
    results, endings = study("results"), study("endings")
    worlds = results.of_sweep(tmp_path, "forms")
    for world in forms.WORLDS:
        planted = {"CREDIT λ=0.5 gate=0.05": 0.04, guide: 0.0, f"{guide} plausibility=0.01": 0.02}
        write_world(write, f"{world}-choice", {guide: 0.9, f"{guide} source=none": 0.95}, planted, spec="choice")
    write_end(write, tmp_path)
    write_world(write, "style", {guide: 0.8}, {guide: 0.1, "SDPO": 0.6})
    new = {"style": results.read_world("style", tmp_path / "style")}
    write_world(write, "style-long", {FROZEN_SDPO: 0.6, FROZEN: 0.65}, {FROZEN: 0.04}, spec="long")
    later = {"style": results.read_world("style", tmp_path / "style-long")}
    for world in ("style", "plain"):
        unknown = {f"{guide} source=none": 0.75, f"{guide} gate=0.05": 0.85}
        write_world(write, f"{world}-cross", unknown, {f"{guide} source=hard": 0.3}, spec="cross", gated=0.4)
    crossed = study("crossed").read_crossed(tmp_path, dict.fromkeys(("plain", "shortcut", "style"), "quickstart"))
    choice = results.of_sweep(tmp_path, "choice")
    return forms.page(worlds, choice, endings.read_endings(tmp_path), new, later, crossed)


GUIDE_AT_THE_END = "CREDIT form=guide λ=1.5"
FROZEN = f"{GUIDE_AT_THE_END} teacher_model_kind=base"
FROZEN_WEAKER = "CREDIT form=guide λ=1 teacher_model_kind=base"
FROZEN_SDPO = "SDPO teacher_model_kind=base"
BOTH = f"{GUIDE_AT_THE_END} plausibility=0.01 teacher_model_kind=base"


def write_end(write, tmp_path: Path) -> None:
    """Runs to the end of learning: one arm keeps too much of the shortcut, of the others one keeps less.

    In the longer ones the setting that is best by far loses against the frozen teacher's SDPO."""
    masked = f"{GUIDE_AT_THE_END} plausibility=0.01"
    unknown = {"SDPO": 0.9, masked: 0.9, FROZEN: 0.905, BOTH: 0.9}
    planted = {"SDPO": 1.0, FROZEN_SDPO: 1.0, masked: 0.06, FROZEN_WEAKER: 0.02, FROZEN: 0.01, BOTH: 0.03}
    longer = {"SDPO": 0.9, FROZEN_SDPO: 0.93, FROZEN: 0.92, FROZEN_WEAKER: 0.88}
    for world in ("plain", "shortcut"):
        for sweep in ("end_choice", "end"):
            write_world(write, f"{world}-{sweep}", unknown, planted, spec=sweep)
        write_world(write, f"{world}-long_choice", longer, planted, spec="long_choice", forgets=True)
        fallen = {"SDPO": 0.1} if world == "plain" else {}
        write_world(write, f"{world}-long", {**longer, FROZEN: 0.9}, planted, spec="long", known=fallen)


def rows_of(page: str, *beginning: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith("| " + " | ".join(beginning) + " |")]


def test_rows_of_the_prototype_agree_or_differ_by_the_interval(forms_page):
    (guide,) = rows_of(forms_page, "CREDIT form=guide λ=1", "shortcut")
    assert guide.endswith("0.00–0.00 | 0.000 [0.000, 0.000] | agrees |")
    (grpo,) = rows_of(forms_page, "GRPO", "shortcut")
    assert "0.300" in grpo
    assert grpo.endswith("**differs** |")


def test_the_bar_is_paired_with_sdpo_and_says_what_is_missed(forms_page):
    half_way = part_of(forms_page, "Half-way through learning")
    plain, shortcut, *_ = rows_of(half_way, "unknown, against SDPO")
    assert "-10.0 points" in plain
    assert plain.endswith("**missed** |")
    assert shortcut.endswith("| met |")
    assert len(rows_of(half_way, "shortcut", "<= 0.05")) == 2  # of the chosen arm and of the runner-up
    format_holdout, *_ = rows_of(half_way, "format holdout", ">= 0.9")
    assert format_holdout.endswith("| met |")


def part_of(page: str, heading: str) -> str:
    return page.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def rule_of(part: str) -> str:
    (told,) = [line for line in part.splitlines() if line.startswith("Rule: ")]
    return told


def test_of_the_arms_that_meet_every_line_the_one_with_least_shortcut_is_chosen(forms_page):
    end = part_of(forms_page, "A shorter recipe")
    told = rule_of(end)
    listed = re.findall(r"`(CREDIT[^`]+)` (\d+\.\d)", told)
    assert [arm for arm, _ in listed] == [BOTH, FROZEN]
    assert told.endswith(f"Chosen: `{FROZEN}`.")
    assert f"`{FROZEN}`, shortcut world:" in end
    (planted,) = rows_of(end, "shortcut", "<= 0.05")
    assert planted.endswith("| 0.010 [0.010, 0.010] | met |")


def test_where_a_sweep_has_sdpo_with_two_teachers_a_setting_is_held_against_both(forms_page):
    end = part_of(forms_page, "At the end of learning")
    told = rule_of(end)
    assert re.findall(r"`(CREDIT[^`]+)` (\d+\.\d)", told)[0][0] == FROZEN
    assert FROZEN_WEAKER not in told  # 2 points below SDPO, and 5 below SDPO with the frozen teacher
    assert f"`{FROZEN}`, plain world:" in end
    for met in rows_of(end, "unknown, against SDPO"):
        assert met.endswith("| met |")
    for missed in rows_of(end, f"unknown, against {FROZEN_SDPO}"):
        assert missed.endswith("| **missed** |")
    assert len(rows_of(end, f"holdout, against {FROZEN_SDPO}")) == 2


def test_runs_that_fell_apart_are_counted_by_method_and_teacher(forms_page):
    part = part_of(forms_page, "Runs that fell apart")
    (sdpo,) = rows_of(part, "SDPO", "averaged")
    assert sdpo == "| SDPO | averaged | 16 | 2 |"  # two seeds of two worlds, four sweeps; plain-long fell
    (frozen,) = rows_of(part, "SDPO", "frozen")
    assert frozen.endswith(" | 0 |")


def test_a_choice_whose_runs_go_on_is_read_where_the_reported_ones_end_and_told_to_its_own_end(forms_page):
    end = part_of(forms_page, "At the end of learning")
    chosen_on = end.partition("The seeds of the choice, after 20 steps:")[2]
    at_20, _, at_40 = chosen_on.partition("The same runs after 40 steps. Arms that meet every line then: none.")
    (held, *_), (lost, *_) = (rows_of(text, FROZEN) for text in (at_20, at_40))
    assert float(held.split(" | ")[3].split()[0]) > 24  # hold-out cues, per cent
    assert float(lost.split(" | ")[3].split()[0]) < 6
    assert "40 steps, learning rate 0.001, constant up to a decay in the last 15 steps, after 2 warm-up steps." in end
    assert "The same runs" not in part_of(forms_page, "A shorter recipe")


@pytest.mark.parametrize(
    ("difference", "word"),
    [
        ((0.01, -0.01, 0.03), "met"),
        ((-0.01, -0.05, 0.03), "met by the mean, not by the interval"),
        ((-0.03, -0.06, 0.01), "missed by the mean"),
        ((-0.05, -0.08, -0.03), "**missed**"),
    ],
)
def test_a_loss_of_accuracy_is_told_by_mean_and_interval(study, difference, word):
    from credit_trl.evaluation.statistics import Difference

    assert study("bars").told_loss(Difference(*difference, p_value=0.5)) == word


def test_only_arms_without_the_shortcut_are_eligible_and_the_best_is_named_first(forms_page):
    first = forms_page.partition("## A first choice")[2]
    (told,) = [line for line in first.splitlines() if line.startswith("Rule: ")]
    eligible = re.findall(r"`(CREDIT[^`]+)` (\d+\.\d)", told.partition("Eligible")[2])
    assert eligible[0][0] == "CREDIT form=guide λ=1"
    assert "CREDIT form=guide λ=1 source=none" not in dict(eligible)  # the highest score, and the shortcut
    assert float(eligible[0][1]) == pytest.approx(90, abs=1.5)
    assert len(eligible) == 3
    assert told.endswith("Chosen: `CREDIT form=guide λ=1`.")


def test_worlds_that_were_not_chosen_on_show_reward_and_shortcut_against_sdpo(forms_page):
    new = part_of(forms_page, "Two worlds that were not chosen on")
    assert "no reward is against it" in new
    reward, shortcut = new.partition("Style world, shortcut against SDPO:")[::2]
    (row,) = rows_of(shortcut, "CREDIT form=guide λ=1", "unknown")
    assert "-50.0" in row
    (row,) = rows_of(reward, "CREDIT form=guide λ=1", "unknown")
    assert "+10.0" in row


def test_the_new_worlds_are_held_to_the_bar_against_sdpo_with_either_teacher(forms_page):
    part = part_of(forms_page, "The new worlds at the end of learning")
    assert f"`{FROZEN}`, style world:" in part
    (averaged,), (frozen,) = (rows_of(part, f"unknown, against {arm}") for arm in ("SDPO", FROZEN_SDPO))
    assert "-5.0 points" in averaged
    assert averaged.endswith("**missed** |")
    assert "+5.0 points" in frozen
    assert rows_of(part, "shortcut", "<= 0.05")[0].endswith("| 0.040 [0.040, 0.040] | met |")


def test_cells_of_the_cross_are_paired_with_their_form_without_source_and_gate(forms_page):
    """guide is at 60 % in the plain world and at 80 % in the other, where it keeps 10 % of the shortcut."""
    part = part_of(forms_page, "Sources and gates")
    assert "Shortcut world" not in part  # its cross has not been run
    plain, _, style = part.partition("Style world, %, final:")
    guide = "CREDIT form=guide λ=1"
    for world, (none, gate) in {plain: ("+15.0", "+25.0"), style: ("-5.0", "+5.0")}.items():
        effects = world.partition(f"against `{guide}`, points:")[2]
        (row,) = rows_of(effects, f"{guide} source=none")
        assert row.split(" | ")[2].startswith(f"{none} [")
        (row,) = rows_of(effects.partition("\n\n")[2].partition("\n\n")[0], f"{guide} gate=0.05")
        assert row.split(" | ")[2].startswith(f"{gate} [")
    effects = style.partition(f"against `{guide}`, points:")[2]
    (row,) = rows_of(effects, f"{guide} source=hard")
    assert row.split(" | ")[5].startswith("+20.0 [")
    assert len(rows_of(style, f"{guide} source=none gate=0.05")) == 3  # scores, effects and the gate's share
    own, hard = (rows_of(part, of)[1].split(" | ")[3:5] for of in ("batch, no gate", "source=hard"))
    assert [[round(float(number)) for number in cell.rstrip(" |").split(" / ")] for cell in (*own, *hard)] == [
        [80, 10],
        [70, 90],
        [70, 30],
        [70, 90],
    ]
    assert rows_of(style, f"{guide} gate=0.05")[-1].endswith("| 40.0 | 40.0 to 40.0 |")
    in_no_cell = ("| GRPO", "| CREDIT λ=0.05", "| CREDIT λ=0.1 C=2")
    assert not [line for line in plain.splitlines() if line.startswith(in_no_cell)]


def test_the_figure_of_the_cross_shows_the_worlds_that_have_a_shortcut(study, writer_at, tmp_path):
    write = writer_at(tmp_path)
    for world, own in (("plain", "plain-forms"), ("style", "style")):
        write_world(write, own, {}, {}, spec="forms" if world == "plain" else "style")
        write_world(write, f"{world}-cross", {}, {}, spec="cross")
    worlds = study("crossed").read_crossed(tmp_path, dict.fromkeys(("plain", "style"), "quickstart"))
    drawn, light = study("crossed_figure"), study("report").THEMES[0]
    assert drawn.cross_figure(worlds, light).startswith(b"\x89PNG")
    assert drawn.cross_figure({"plain": worlds["plain"]}, light) is None
    arms = study("bars").arms_of(worlds["style"])
    styles = [tuple(sorted((k, str(v)) for k, v in drawn.style_of(arm, light).items())) for arm in arms]
    assert len(set(styles)) == len(arms) == 25  # no two cells look alike


def test_the_cross_has_every_cell_of_its_forms_sources_and_gates_on_the_budget_of_the_forms(study):
    from credit_trl.lab.sweeps import read_spec

    crossed = study("crossed")
    spec, forms = (read_spec(STUDY / f"{name}.yaml") for name in ("cross", "forms"))
    cells = {
        (
            arm.options["contrastive_coef"],
            arm.options.get("contrastive_source", "batch"),
            arm.options.get("contrastive_gate", 0.0),
            arm.options.get("contrastive_form", "subtract"),
        )
        for arm in spec.arms()
    }
    strengths = ((0.1, "subtract"), (0.5, "subtract"), (1.0, "guide"), (1.5, "guide"))
    wanted = {
        (coef, source, gate, form)
        for coef, form in strengths
        for source in ("batch", "none", "hard")
        for gate in (0.0, 0.05)
    }
    assert wanted - cells == {(coef, "batch", 0.0, form) for coef, form in strengths}
    assert cells < wanted
    assert {crossed.form_of(arm.name) for arm in spec.arms()} == set(crossed.FORMS)
    saves = {"save_steps"}
    assert {name for name in spec.config if spec.config[name] != forms.config[name]} == saves
    for world in ("plain", "shortcut", "style", "programs"):
        own, of_world = read_spec(STUDY / f"{world}.yaml"), study("run").read_sweep("cross", world)
        assert (of_world.task, of_world.seeds) == (own.task, own.seeds)
        elsewhere = forms if world in ("plain", "shortcut") else own
        assert {arm.name for arm in elsewhere.arms()} >= {"SDPO", *crossed.FORMS}
    assert set(study("run").read_sweep("long", "programs").seeds) == set(read_spec(STUDY / "programs.yaml").seeds)
    assert not set(study("run").read_sweep("long", "plain").seeds) & set(read_spec(STUDY / "plain.yaml").seeds)


def test_forms_are_chosen_on_seeds_that_are_not_reported():
    from credit_trl.lab.sweeps import read_spec

    specs = {spec.stem: read_spec(spec) for spec in STUDY.glob("*.yaml")}
    seen = {*specs["plain"].seeds, *specs["choice"].seeds}
    assert not set(specs["choice"].seeds) & set(specs["forms"].seeds)
    assert set(specs["forms"].seeds) == set(specs["plain"].seeds)
    assert specs["forms"].config == specs["choice"].config
    for name in ("end", "long"):
        choice, reported = specs[f"{name}_choice"], specs[name]
        assert set(choice.seeds) == set(specs["choice"].seeds)
        differs = {"max_steps", "lr_scheduler_type", "lr_scheduler_kwargs"} if name == "long" else set()
        assert {key for key in choice.config if choice.config[key] != reported.config.get(key)} == differs
        assert not set(reported.seeds) & seen  # fresh: no form was looked at on them
        assert len(reported.seeds) >= 5
        seen |= set(reported.seeds)


def test_bases_are_made_once_and_left_to_a_launcher_that_is_at_them(study, tmp_path, monkeypatch):
    run = study("run")
    made = []
    monkeypatch.setattr(run, "pretrain", lambda base, world, seed: (made.append((world, seed)), base.mkdir()))
    (tmp_path / "plain-seed2").mkdir()
    run.make_bases(tmp_path, [("plain", 1), ("plain", 2), ("plain", 3), ("shortcut", 1)])
    assert made == [("plain", 1), ("plain", 3), ("shortcut", 1)]
    other = FileLock(tmp_path / "plain-seed4.lock")
    other.acquire()
    seen = []
    monkeypatch.setattr(run, "pretrain", lambda base, world, seed: (seen.append(seed), base.mkdir(), other.release()))
    run.make_bases(tmp_path, [("plain", seed) for seed in range(1, 6)])
    assert seen == [5, 4]


def test_a_pretraining_that_misses_its_gate_is_repeated_with_another_seed(study, tmp_path, monkeypatch, capsys):
    run = study("run")
    tried = []

    def make_base(world, seed, directory, progress):
        tried.append(seed)
        if len(tried) < 3:
            raise RuntimeError("Letter look-up is 0.40")
        directory.mkdir()

    monkeypatch.setattr("credit_trl.tasks.quickstart_model.make_base", make_base)
    run.pretrain(tmp_path / "plain-seed7", "plain", 7)
    assert tried == [7, 107, 207]
    assert (tmp_path / "plain-seed7").is_dir()
    assert "attempt 1: Letter look-up" in capsys.readouterr().err


def test_tokens_are_measured_on_the_bases_of_the_study_alone(study, tmp_path):
    for name in ("plain-seed1", "plain-seed2", "plain-seed6", "shortcut-seed1", "style-seed1", "programs-seed1"):
        (tmp_path / name).mkdir()
    (tmp_path / "plain-seed1.lock").touch()
    found = study("tokens").bases_of_the_study(tmp_path)
    assert [base.name for base in found] == ["plain-seed1", "plain-seed2", "shortcut-seed1"]


def test_credit_by_token_class_counts_planted_tokens_apart(study):
    from transformers import AutoTokenizer

    from credit_trl.tasks.quickstart import SHORTCUT_THOUGHT, Question
    from credit_trl.tasks.quickstart_model import SHIPPED

    tokens = study("tokens")
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    question = Question("airport", "Oslo", ("travel", "food", "music", "books"), "travel")
    for thought, expected in ((None, "cue"), (SHORTCUT_THOUGHT, "shortcut")):
        ids = tokenizer(question.response(thought), add_special_tokens=False)["input_ids"]
        labels = tokens.classes_of(ids, tokenizer, thought)
        first = len(tokens.prefix_ids(tokenizer))
        assert labels[first] == expected
        said = tokenizer.decode([i for i, label in zip(ids, labels, strict=True) if label == "shortcut"])
        assert said.strip() == (thought or "")
