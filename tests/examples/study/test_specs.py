"""The sweeps of the study: trainable arms, equal budgets, separate seeds for choices and reports."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from credit_trl.lab.sweeps import read_spec
from credit_trl.lab.sweeps.launch import plan_sweep

STUDY = Path(__file__).parents[3] / "examples" / "study"
FROZEN_SDPO = "SDPO teacher_model_kind=base"
GUIDE = "CREDIT form=guide λ=1.5 teacher_model_kind=base"
WORLDS = ("plain", "shortcut", "style", "programs")


@pytest.fixture(scope="module")
def specs():
    return {path.stem: read_spec(path) for path in STUDY.glob("*.yaml")}


def arms_of(spec) -> set[str]:
    return {arm.name for arm in spec.arms()}


@pytest.mark.parametrize("world", WORLDS)
def test_arms_of_a_world_can_train_and_share_one_budget(study, specs, world, tmp_path):
    jobs = [json.loads((folder / "job.json").read_text()) for folder in plan_sweep(specs[world], tmp_path)]
    assert {job["seed"] for job in jobs} == set(specs[world].seeds)
    assert len(specs[world].seeds) >= 5
    budget = ("max_steps", "per_device_train_batch_size", "num_generations", "max_completion_length")
    assert len({tuple(job["config"][name] for name in budget) for job in jobs}) == 1
    assert {job["config"]["distillation_tail"] for job in jobs} == {"bucket"}
    assert {job["model"] for job in jobs} == {f"bases/{world}-seed{seed}" for seed in specs[world].seeds}


def test_cross_has_every_cell_of_forms_sources_and_gates(specs, study):
    options = [arm.options for arm in specs["cross"].arms()]
    cells = {
        (
            cell["contrastive_coef"],
            cell.get("contrastive_form", "subtract"),
            cell.get("contrastive_source", "batch"),
            cell.get("contrastive_gate", 0.0),
        )
        for cell in options
    }
    strengths = ((0.1, "subtract"), (0.5, "subtract"), (1.0, "guide"), (1.5, "guide"))
    wanted = {(*strength, *rest) for strength, *rest in product(strengths, ("batch", "none", "hard"), (0.0, 0.05))}
    assert cells == {cell for cell in wanted if cell[2:] != ("batch", 0.0)}
    crossed = study("crossed")
    assert {crossed.form_of(arm) for arm in arms_of(specs["cross"])} == set(crossed.FORMS)


def test_cross_has_the_budget_of_forms_in_every_world(specs, study):
    cross, forms = specs["cross"].config, specs["forms"].config
    assert {name for name in cross if cross[name] != forms[name]} == {"save_steps"}
    for world in WORLDS:
        read = study("run").read_sweep("cross", world)
        assert (read.task, read.seeds) == (specs[world].task, specs[world].seeds)
        baselines = specs["forms"] if world in ("plain", "shortcut") else specs[world]
        assert arms_of(baselines) >= {"SDPO", *study("crossed").FORMS}


def test_choices_and_reports_have_separate_seeds(specs, study):
    assert not set(specs["choice"].seeds) & set(specs["forms"].seeds)
    assert set(specs["forms"].seeds) == set(specs["plain"].seeds)
    assert specs["forms"].config == specs["choice"].config
    seen = {*specs["plain"].seeds, *specs["choice"].seeds}
    for name in ("end", "long"):
        choice, reported = specs[f"{name}_choice"], specs[name]
        assert not set(reported.seeds) & seen
        assert arms_of(reported) <= arms_of(choice)
        seen |= set(reported.seeds)
    read = study("run").read_sweep
    assert set(read("long", "programs").seeds) == set(specs["programs"].seeds)


def test_confirmed_setting_runs_on_new_seeds(specs):
    settled, again, confirmed = (specs[name] for name in ("settled", "long_relabelled", "confirmed"))
    others = specs.keys() - {"settled", "long_relabelled", "confirmed", "subtract_long", "subtract_settled"}
    seen = {seed for name in others for seed in specs[name].seeds}
    assert set(settled.seeds) == set(again.seeds)
    assert not set(settled.seeds) & seen
    assert not set(confirmed.seeds) & (seen | set(settled.seeds))
    slower = f"{GUIDE} learning_rate=0.0011"
    assert arms_of(again) == {FROZEN_SDPO, GUIDE}
    assert arms_of(confirmed) == {FROZEN_SDPO, slower}
    assert arms_of(settled) == {FROZEN_SDPO, GUIDE, GUIDE.replace("1.5", "1"), slower}


def test_confirmed_setting_keeps_the_budget_of_long(specs):
    settled, again, confirmed, long = (specs[n] for n in ("settled", "long_relabelled", "confirmed", "long"))
    assert confirmed.config == settled.config
    budget = ("per_device_train_batch_size", "num_generations", "temperature", "distillation_tail")
    for spec in (settled, again, confirmed):
        assert [spec.config[name] for name in budget] == [long.config[name] for name in budget]
    assert {name for name in again.config if again.config[name] != long.config[name]} == {"save_steps"}


def test_papers_form_runs_with_the_recipes_of_long_and_settled(specs):
    strengths = (0.05, 0.1, 0.2)
    settled, long = specs["subtract_settled"], specs["subtract_long"]
    assert settled.seeds == long.seeds == specs["settled"].seeds
    assert settled.config == specs["settled"].config
    assert {k: v for k, v in long.config.items() if k != "save_steps"} == {
        k: v for k, v in specs["long"].config.items() if k != "save_steps"
    }
    assert arms_of(long) == {"SDPO", *(f"CREDIT λ={strength}" for strength in strengths)}
    frozen = {f"{arm} teacher_model_kind=base" for arm in arms_of(long)}
    assert arms_of(settled) == frozen | {f"{FROZEN_SDPO} learning_rate=0.0011"}
