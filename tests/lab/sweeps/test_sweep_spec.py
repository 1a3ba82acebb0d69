"""Sweep files: the arms of their grids, and errors before any job starts."""

from __future__ import annotations

import time

import pytest
import yaml

from credit_trl.lab.sweeps.launch import _job, plan_sweep
from credit_trl.lab.sweeps.spec import METHODS, SweepSpec, make_arm, read_spec

MINIMAL = {"model": "m", "task": "quickstart", "grid": {"method": ["SDPO"]}, "seeds": [1]}
CPU = {"use_cpu": True, "bf16": False, "per_device_train_batch_size": 16}


def arms(grid, **config):
    return [arm.name for arm in SweepSpec(**{**MINIMAL, "grid": grid, "config": config}).arms()]


def test_a_grid_is_a_product_and_a_list_of_grids_is_their_union():
    assert arms({"method": ["CREDIT"], "contrastive_count": [1, 2], "contrastive_coef": [0.1, 0.5]}) == [
        "CREDIT C=1 λ=0.1",
        "CREDIT C=1 λ=0.5",
        "CREDIT C=2 λ=0.1",
        "CREDIT C=2 λ=0.5",
    ]
    assert arms([{"method": ["GRPO", "SDPO"]}, {"method": "CREDIT", "contrastive_coef": 0.2}]) == [
        "GRPO",
        "SDPO",
        "CREDIT λ=0.2",
    ]


def test_combinations_that_train_the_same_are_one_arm():
    grid = {
        "method": ["GRPO", "SDPO", "CREDIT"],
        "contrastive_coef": [0.0, 0.1],
        "contrastive_count": [1, 2],
        "teacher_context": ["solution", "think"],
    }
    assert arms(grid) == [
        "GRPO",
        "SDPO context=solution",
        "SDPO context=think",
        "CREDIT λ=0.1 C=1 context=solution",
        "CREDIT λ=0.1 C=1 context=think",
        "CREDIT λ=0.1 C=2 context=solution",
        "CREDIT λ=0.1 C=2 context=think",
    ]


@pytest.mark.parametrize("config", [{}, {"contrastive_coef": 0.2, "teacher_context": "think"}])
def test_an_option_at_its_default_makes_no_separate_arm(config):
    coefs, contexts = [0.1, 0.2], ["solution", "think"]
    grid = [
        {"method": "CREDIT"},
        {"method": "CREDIT", "contrastive_coef": coefs},
        {"method": ["CREDIT", "SDPO"], "teacher_context": contexts},
        {"method": ["SDPO"], "contrastive_count": [1, 2]},
    ]
    other_coef, other_context = ("λ=0.1", "context=solution") if config else ("λ=0.2", "context=think")
    found = [arm.name for arm in SweepSpec(**{**MINIMAL, "grid": grid, "config": config}).arms()]
    assert [name for name in found if name.startswith("CREDIT")] == [
        "CREDIT",
        f"CREDIT {other_coef}",
        f"CREDIT {other_context}",
    ]
    assert sum(name.startswith("SDPO") for name in found) == 2


def test_methods_are_options_of_one_trainer():
    ignored = {"contrastive_coef": 0.3, "distillation_weight": 0.5}
    assert make_arm({"method": "GRPO", **ignored}, {}).options == {"distillation_weight": 0.0}
    assert make_arm({"method": "SDPO", "contrastive_coef": 0.3}, {}).options == {"contrastive_coef": 0.0}
    assert make_arm({"method": "CREDIT"}, {"contrastive_coef": 0.0}).method == "SDPO"
    control = make_arm({"method": "hint-contrast", "contrastive_coef": 0.3}, {})
    assert control.options == {"contrastive_swap": "hint", "contrastive_coef": 0.3}
    assert make_arm({"method": "temper-only"}, {}).options == {"contrastive_swap": "self"}
    assert make_arm({"method": "foreign-hint"}, {}).options == {"teacher_hint": "foreign"}


def test_directory_names_are_ascii():
    assert make_arm({"contrastive_coef": 0.05, "contrastive_count": 2}, {}).slug == "credit-lambda-0.05-c-2"
    assert {make_arm({"method": method}, {}).slug for method in METHODS} == {m.lower() for m in METHODS}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": {"method": ["PPO"]}}, "choose among GRPO"),
        ({"grid": []}, "no arm"),
        ({"grid": ["CREDIT"]}, "maps options"),
        ({"grid": "CREDIT"}, "maps options"),
        ({"grid": {"learning_rate": [1.2345678e-6, 1.2345679e-6]}}, "share the directory"),
        ({"grid": {"method": "hint-contrast", "contrastive_swap": "input"}}, "sets contrastive_swap itself"),
        ({"seeds": []}, "at least one"),
        ({"seeds": [1, 1]}, "repeats"),
        ({"seeds": ["a"]}, "at least one integer"),
        ({"seeds": [True]}, "from 0 to"),
        ({"seeds": [-1]}, "from 0 to"),
        ({"data": {1: 2}}, "`data` must be a mapping of options"),
        ({"accelerate_args": "--num_processes 2"}, "list of arguments"),
        ({"launcher": "slurm"}, "process, inline, accelerate"),
        ({"config": {"output_dir": "x"}}, "`config.output_dir` is set by the sweep"),
        ({"grid": {"seed": [0, 1]}}, "`grid.seed` is set by the sweep"),
        ({"grid": {"method": "SDPO", "resume_from_checkpoint": "x"}}, "`grid.resume_from_checkpoint` is set"),
        ({"keep_checkpoints": "maybe"}, "true or false, got 'maybe'"),
        ({"data": {"max_train_rows": "many"}}, "`data.max_train_rows` must be an integer, got 'many'"),
        ({"data": {"max_train_rows": 0}}, "`data.max_train_rows` must be at least 1, got 0"),
        ({"data": {"path": 3}}, "`data.path` must be a string, got 3"),
        ({"data": {"train_split": None}}, "`data.train_split` must be a string, got None"),
        ({"data": {"split": "train"}}, "not split"),
        ({"grid": {"contrastive_coef": [n / 2000 for n in range(1001)]}}, "1,001 combinations"),
        (
            {"grid": {"learning_rate": [0.1] * 9_999, "contrastive_coef": [0.1] * 9_999, "seed": [1] * 9}},
            "899,820,009",
        ),
        ({"seeds": list(range(10_001))}, "10,001 jobs"),
        ({"model": "{seed.__class__.__mro__}"}, "no other braces"),
        ({"model": "{seed:999999999d}"}, "no other braces"),
        ({"model": "m-{seed}{}"}, "no other braces"),
    ],
)
def test_invalid_specs_are_errors(change, message):
    with pytest.raises(ValueError, match=message):
        SweepSpec(**{**MINIMAL, **change})


def test_file_errors_name_the_field_and_yaml_builds_no_objects(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text("model: m\ntask: quickstart\ngrid: {method: [SDPO]}\nseeds: [1, 2]\nconfig: {max_steps: 3}\n")
    spec = read_spec(path)
    assert (spec.model, spec.seeds, spec.config) == ("m", [1, 2], {"max_steps": 3})
    for text, message in {
        "model: [": "not YAML",
        "- 1": "not a mapping",
        "model: m\ntask: t\ngrid: {}\nseeds: [1]\nsteps: 3": "unknown field steps",
        "model: m\ntask: t": "grid, seeds missing",
        "model: !!python/object/apply:os.getcwd []": "not YAML",
        "model: m\ntask: t\ngrid: {method: [PPO]}\nseeds: [1]": "Unknown method 'PPO'",
    }.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as raised:
            read_spec(path)
        assert "sweep.yaml" in str(raised.value)


@pytest.mark.parametrize("form", ["grid: *l4", "config: {options: *l4}"])
def test_a_file_whose_anchors_expand_exponentially_is_an_error(tmp_path, form):
    levels = [f"l0: &l0 [{', '.join('1' * 20)}]"]
    levels += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 20)}]" for n in range(1, 5)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join([*levels, "model: m", "task: t", "seeds: [1]", form]))
    with pytest.raises(ValueError, match=r"bomb\.yaml expands to more than 100,000 values"):
        read_spec(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 5_000, "nested too deeply"),
        ("#" + "]" * 15_000 + "\n" + "[" * 15_000, "nested too deeply"),
        ("config: {a: " + "[" * 12 + "1" + "]" * 12 + "}", "nested more than 8 levels"),
        ("a: &a [*a]", "nested more than 8 levels"),
        ("a: &a {x: 1}\n" + "\n".join(f"{n}: &{n} {{<<: [{'*a, ' * 9}*a]}}" for n in "bcdefghi"), "merge keys"),
        ("# " + "x" * 1_000_000, "more than 32,768 bytes"),
        ("- 1\n" * 8_000, "not a mapping"),
        ('"\\e]0;title\\a": 1', "unknown field"),
    ],
)
def test_hostile_files_are_refused_at_once(tmp_path, text, message):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    started = time.process_time()
    with pytest.raises(ValueError, match=message) as raised:
        read_spec(path)
    assert time.process_time() - started < 1
    assert str(raised.value).replace("\n", "").isprintable()


def test_seed_is_the_only_field_of_the_model():
    spec = SweepSpec(**{**MINIMAL, "model": "base-{seed}/{seed}"})
    assert _job(spec, spec.arms()[0], 7)["model"] == "base-7/7"


def test_an_invalid_arm_is_an_error_before_directories_are_made(tmp_path):
    spec = SweepSpec(**{**MINIMAL, "grid": {"contrastive_coef": [0.1, 2.0]}, "config": CPU})
    with pytest.raises(ValueError, match=r"λ=2.*contrastive_coef"):
        plan_sweep(spec, tmp_path / "out")
    spec = SweepSpec(**{**MINIMAL, "config": {**CPU, "learningrate": 1.0}})
    with pytest.raises(ValueError, match="learningrate"):
        plan_sweep(spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_number_that_yaml_reads_as_text_is_an_error(tmp_path):
    config = yaml.safe_load("learning_rate: 1e-6")
    spec = SweepSpec(**{**MINIMAL, "config": {**CPU, **config}})
    with pytest.raises(ValueError, match=r"`learning_rate` is the text '1e-6'.*write 1.0e-06"):
        plan_sweep(spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"evaluation": {"k": 2, "eval_steps": 0}}, "`evaluation`: `eval_steps` must be at least 1, got 0"),
        ({"evaluation": {"max_prompts": "two"}}, "`evaluation`: `max_prompts` must be an integer, got 'two'"),
        ({"evaluation": {"k": True}}, "`evaluation`: `k` must be an integer, got True"),
        ({"evaluation": {"temperature": "1e-1"}}, "`evaluation`: `temperature` must be a number"),
        ({"evaluation": {"keep_best": "no"}}, "`evaluation`: `keep_best` must be true or false"),
        ({"evaluation": {"split": "nothere"}}, "`evaluation`: Unknown split 'nothere'"),
        ({"data": {"train_split": "nothere"}}, "`data`: Unknown split 'nothere'"),
        ({"task": "math", "data": {"path": "nothere.jsonl"}}, "`data`: No file nothere.jsonl"),
        ({"task": "math", "evaluation": {"path": "nothere.jsonl"}}, "`evaluation`: No file nothere.jsonl"),
    ],
)
def test_evaluation_and_data_are_checked_before_any_job(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        plan_sweep(SweepSpec(**{**MINIMAL, "config": CPU, **change}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_of_the_hub_are_not_loaded_by_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr("credit_trl.tasks.math.hub_rows", lambda *args, **options: pytest.fail("rows were loaded"))
    for task in ("math", "math,quickstart"):
        assert plan_sweep(SweepSpec(**{**MINIMAL, "config": CPU, "task": task}), tmp_path, write=False)


@pytest.mark.parametrize("value", ["2026-01-01", ".inf"])
def test_a_value_that_a_job_cannot_store_is_an_error(tmp_path, value):
    config = yaml.safe_load(f"run_name: {value}")
    with pytest.raises(ValueError, match=r"'SDPO' has an invalid configuration.*JSON"):
        plan_sweep(SweepSpec(**MINIMAL, config={**CPU, **config}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_arm_with_a_long_name_has_a_directory(tmp_path):
    grid = {"reprompt_template": [f"{{prompt}}{'x' * 300}{end}{{solution}}{{feedback}}" for end in "ab"]}
    folders = plan_sweep(SweepSpec(**{**MINIMAL, "grid": grid}, config=CPU), tmp_path)
    assert len({folder.parent for folder in folders}) == 2


def test_a_directory_of_another_sweep_is_an_error(tmp_path):
    plan_sweep(SweepSpec(**MINIMAL, config=CPU), tmp_path)
    plan_sweep(SweepSpec(**{**MINIMAL, "seeds": [1, 2]}, config=CPU), tmp_path)
    with pytest.raises(ValueError, match=r"seed-1 holds another job \(config differ\)"):
        plan_sweep(SweepSpec(**MINIMAL, config={**CPU, "max_steps": 7}), tmp_path)


@pytest.mark.parametrize("point", [{"method": ["GRPO", "SDPO"]}, {1: 2}])
def test_names_of_a_grid_are_text(point):
    with pytest.raises(ValueError, match=r"Unknown method \['GRPO', 'SDPO'\]|Options of a grid have names, got 1"):
        make_arm(point, {})
