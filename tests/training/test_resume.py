"""A resumed run equals an uninterrupted run bit for bit."""

import json
import shutil
import warnings

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from credit_trl.teacher.causal_lm import load_renamed_weights
from credit_trl.training.metrics import CreditWarning
from credit_trl.training.step import CreditStep
from tables import tables_of

TABLES = tables_of(__file__)


def adapter(**options):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options})


class Begun(TrainerCallback):
    """Records the weights at the start of the run, after a checkpoint is loaded."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.state = {name: value.detach().clone() for name, value in weights(self.trainer).items()}


def weights(trainer):
    student = {f"student.{n}": p for n, p in trainer.model.named_parameters()}
    teacher = getattr(trainer, "teacher", None)  # none at weight 0
    stored = getattr(teacher, "named_weights", dict)()  # none for a live teacher
    return student | {f"teacher.{n}": p for n, p in stored.items()}


def assert_same_weights(trainer, expected_trainer):
    expected = weights(expected_trainer)
    for name, value in weights(trainer).items():
        assert torch.equal(value, expected[name]), name


@pytest.fixture
def train(make_trainer, tmp_path):
    def run(output_dir=tmp_path, resume=None, lora=False, changes="refuse", **options):
        fixed = {"save_strategy": "steps", "teacher_update_rate": 0.2, "temperature": 0.9}
        peft = adapter(**lora) if isinstance(lora, dict) else adapter() if lora else None
        trainer = make_trainer(output_dir=str(output_dir), peft_config=peft, **fixed, **options)
        trainer.initial = {name: value.detach().clone() for name, value in weights(trainer).items()}
        trainer.add_callback(begun := Begun(trainer))
        trainer.train(resume_from_checkpoint=resume, resume_changes=changes)
        trainer.begun = begun.state
        return trainer

    return run


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(("stop", "last_step", "options"), TABLES["stops"].values(), ids=TABLES["stops"])
def test_resumed_run_equals_uninterrupted_run_bitwise(train, tmp_path, lora, stop, last_step, options):
    options = {"max_steps": last_step, "save_steps": stop, **options}
    uninterrupted = train(tmp_path / "whole", lora=lora, **options)
    checkpoint = tmp_path / "whole" / f"checkpoint-{stop}"
    shutil.copytree(checkpoint, tmp_path / "resumed" / checkpoint.name)
    resumed = train(tmp_path / "resumed", resume=str(tmp_path / "resumed" / checkpoint.name), lora=lora, **options)
    assert resumed.state.global_step == uninterrupted.state.global_step == last_step
    assert_same_weights(resumed, uninterrupted)
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (uninterrupted, resumed)]
    assert losses[0] == losses[1]
    assert any(not torch.equal(value, resumed.begun[name]) for name, value in weights(uninterrupted).items())


@pytest.mark.parametrize(  # 11: an epoch leaves a row unread
    ("rows", "accumulation"), [(12, 1), (11, 1), pytest.param(12, 2, marks=pytest.mark.slow)]
)
def test_resumed_run_goes_on_at_its_place_in_a_stream(train, dataset, tmp_path, rows, accumulation):
    stream = dataset.select(range(rows)).to_iterable_dataset()
    options = TABLES["stream"] | {"gradient_accumulation_steps": accumulation}
    uninterrupted = train(rows=stream, **options)
    assert uninterrupted.state.epoch > 1
    for stop in (8, 6, 4):  # in the second epoch, at the end of the first, inside it
        assert_same_weights(train(rows=stream, resume=str(tmp_path / f"checkpoint-{stop}"), **options), uninterrupted)


@pytest.mark.parametrize("streams", [True, False])
def test_resuming_a_stream_warns_once_of_data_not_compared(train, dataset, tmp_path, streams):
    rows = dataset.to_iterable_dataset() if streams else dataset
    options = {"rows": rows, "steps_per_generation": 1, "save_steps": 1}
    train(max_steps=1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(resume="latest", max_steps=3, **options)
    messages = [str(warning.message) for warning in caught if warning.category is CreditWarning]
    assert len([text for text in messages if "is a stream, of which the first 8 rows are" in text]) == streams


@pytest.mark.parametrize("stop", [1, 2])
def test_resumed_run_with_more_steps_goes_on_at_its_place_in_a_stream(train, dataset, tmp_path, stop):
    options = {"rows": dataset.to_iterable_dataset(), "lr_scheduler_type": "constant", "save_steps": 1}
    uninterrupted = train(tmp_path / "whole", max_steps=4, **options)
    train(max_steps=2, **options)
    resumed = train(resume=str(tmp_path / f"checkpoint-{stop}"), max_steps=4, **options)
    assert_same_weights(resumed, uninterrupted)


@pytest.mark.parametrize("last_step", [2, 6])  # inside an epoch and at its end
def test_resuming_from_last_step_takes_no_step(train, tmp_path, last_step):
    options = {"max_steps": last_step, "save_steps": last_step, "lr_scheduler_type": "constant"}
    uninterrupted = train(**options)
    with pytest.warns(
        CreditWarning, match=f"of step {last_step}, and this run ends after step {last_step}.* Raise `max_steps`"
    ):
        resumed = train(resume=str(tmp_path / f"checkpoint-{last_step}"), **options)
    assert resumed.state.global_step == last_step
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{last_step}"]
    assert_same_weights(resumed, uninterrupted)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_base_teacher_is_the_initial_policy_after_an_ema_run(train, tmp_path, lora):
    """Troubleshooting recommends `"base"` where a run with an average collapses."""
    train(lora=lora, max_steps=2, save_steps=2)
    options = {"teacher_model_kind": "base", "max_steps": 3, "save_steps": 3}
    resumed = train(lora=lora, resume=str(tmp_path / "checkpoint-2"), changes="allow", **options)
    teacher = {name: value for name, value in weights(resumed).items() if name.startswith("teacher.")}
    assert teacher
    assert all(torch.equal(value, resumed.initial[name]) for name, value in teacher.items())
    assert any(not torch.equal(value, resumed.initial[name]) for name, value in resumed.begun.items())
    state = json.loads((tmp_path / "checkpoint-3" / "credit_state.json").read_text())
    assert state["options"]["teacher_model_kind"] == "base"


def test_checkpoints_of_an_earlier_run_are_named_and_not_resumed(train, tmp_path, caplog):
    train(max_steps=1, save_steps=1)
    (tmp_path / "run.json").write_text('{"run": "another"}')
    with pytest.raises(ValueError, match="has no checkpoint of this run"):
        train(resume=True, max_steps=1)
    assert "has checkpoints of an earlier run (1)" in caplog.text


def test_average_of_a_live_teacher_is_refused_even_if_changes_are_allowed(train, tmp_path):
    train(max_steps=1, save_steps=1, teacher_model_kind="live")
    with pytest.raises(FileNotFoundError, match=r"teacher cannot be restored.*same `teacher_model_kind`"):
        train(resume=str(tmp_path / "checkpoint-1"), max_steps=2, changes="allow")


def test_changed_objective_is_refused_with_its_list_unless_allowed(train, tmp_path):
    train(max_steps=1, save_steps=1)
    options = {"max_steps": 2, "contrastive_coef": 0.3, "distillation_topk": 10, "num_generations": 2}
    with pytest.raises(ValueError, match="resume_changes='allow'") as refused:
        train(resume="latest", **options)
    for difference in ("contrastive_coef`: 0.1 -> 0.3", "distillation_topk`: 20 -> 10", "num_generations`: 4 -> 2"):
        assert difference in str(refused.value)
    assert train(resume="latest", changes="allow", **options).state.global_step == 2
    segments = json.loads((tmp_path / "run.json").read_text())["segments"]
    assert {"data", "seed", "processes", "model", "learning_rate"} <= segments[0]["options"].keys()
    assert set(segments[1]["options"]) == {"contrastive_coef", "distillation_topk", "num_generations"}
    assert [(segment["step"], segment["options"]["contrastive_coef"]) for segment in segments] == [(0, 0.1), (1, 0.3)]


@pytest.mark.parametrize(("saved", "resumed_with", "message"), TABLES["methods"])
def test_another_fine_tuning_method_is_refused_with_its_fix(train, tmp_path, saved, resumed_with, message):
    train(lora=saved, max_steps=1, save_steps=1)
    with pytest.raises(ValueError, match=f"{message}.*Resume with those of the checkpoint"):
        train(lora=resumed_with, resume=str(tmp_path / "checkpoint-1"), max_steps=2)


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_resuming_with_another_learning_rate_uses_it(train, tmp_path, schedule):
    """As the alarm of a collapse advises."""
    rates = {}
    options = {"max_steps": 4, "save_steps": 2, "lr_scheduler_type": schedule, "logging_steps": 1}
    for rate, resume in ((1e-3, None), (1e-4, str(tmp_path / "checkpoint-2"))):
        trainer = train(resume=resume, learning_rate=rate, changes="allow", **options)
        rates[rate] = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates[1e-4][:2] == rates[1e-3][:2]
    assert rates[1e-4][2:] == pytest.approx([rate / 10 for rate in rates[1e-3][2:]])
    student = {name: value for name, value in weights(trainer).items() if name.startswith("student.")}
    moved = [(value - trainer.begun[name]).abs().max().item() for name, value in student.items()]
    assert 0 < max(moved) < 4e-4  # two steps of Adam


@pytest.mark.parametrize(
    "change", [{"per_device_train_batch_size": 2, "num_generations": 2}, {"steps_per_generation": 8}]
)
def test_layout_may_change_only_at_generation_boundary(make_trainer, tmp_path, change):
    """Pass 12 of a layout with four passes per batch is pass 24 of one with eight."""
    layout = {"per_device_train_batch_size": 4, "steps_per_generation": 4}
    trainer = make_trainer(**layout)
    resumed = make_trainer(**layout | change)
    trainer._step = 12
    trainer._save_progress(tmp_path)
    resumed._load_progress(tmp_path)
    assert (resumed._step, resumed._buffered_inputs) == (3 * resumed.args.steps_per_generation, None)
    trainer._step = 13
    trainer._buffered_inputs = [{"ids": torch.arange(3)}]
    trainer._save_progress(tmp_path)
    with pytest.raises(ValueError, match="by 1 processes of 4 passes of 4 rollouts; this run has"):
        resumed._load_progress(tmp_path)


def test_each_evaluation_draws_the_same_contrasts(make_trainer, dataset, monkeypatch):
    """The first evaluation after a resumption must draw as the next one of an uninterrupted run."""
    steps = []
    build = CreditStep.build_contexts
    monkeypatch.setattr(
        CreditStep, "build_contexts", lambda self, batch: steps.append(batch.index) or build(self, batch)
    )
    trainer = make_trainer(eval_rows=dataset, per_device_eval_batch_size=8, num_generations_eval=2)
    trainer.evaluate()
    assert len(set(steps)) == 3
    trainer.evaluate()
    assert steps[:3] == steps[3:]


class AtEnd(TrainerCallback):
    """Weights that the callbacks see at the end."""

    def on_train_end(self, args, state, control, model, **kwargs):
        self.weights = [parameter.clone() for parameter in model.parameters()]


def test_weights_that_are_stored_by_other_names_are_loaded(train, make_family, dataset, tmp_path):
    """`save_pretrained` stores the fused experts of Qwen3-MoE one by one."""
    options = {"max_steps": 2, "save_steps": 1}
    uninterrupted = train(model=make_family("Qwen3Moe"), **options)
    resumed = train(model=make_family("Qwen3Moe"), resume=str(tmp_path / "checkpoint-1"), **options)
    assert_same_weights(resumed, uninterrupted)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1}
    at_end = AtEnd()
    for greater in (False, True):  # one of them has its best model at step 1
        best |= {"greater_is_better": greater, "eval_rows": dataset, "per_device_eval_batch_size": 8}
        trained = train(tmp_path / str(greater), model=make_family("Qwen3Moe"), callbacks=[at_end], **options, **best)
        stored = type(trained.model).from_pretrained(trained.state.best_model_checkpoint)
        assert all(map(torch.equal, trained.model.parameters(), stored.parameters()))
        assert all(map(torch.equal, at_end.weights, stored.parameters()))
    load_renamed_weights(trained.model, str(tmp_path / "removed"))  # of which transformers warns


def test_resuming_with_another_model_size_names_the_sizes(train, make_model, tmp_path):
    train(max_steps=1, save_steps=1)
    larger = make_model(hidden_size=64)
    with pytest.raises(ValueError, match=r"other options than this run has: `model\.hidden_size`: \d+ -> 64"):
        train(tmp_path, resume="latest", model=larger, max_steps=2)


def test_tied_weights_are_not_reported_as_missing(train, make_model, tmp_path, caplog):
    options = {"save_steps": 1}
    train(model=make_model(tie_word_embeddings=True), max_steps=1, **options)
    with caplog.at_level("WARNING", logger="transformers.trainer"):
        resumed = train(tmp_path, resume="latest", model=make_model(tie_word_embeddings=True), max_steps=2, **options)
    assert resumed.model.lm_head.weight is resumed.model.get_input_embeddings().weight
    assert "missing keys" not in caplog.text


@pytest.fixture(scope="module")
def long_run():
    """Folder of one run of 51 steps with a checkpoint after each, and what trains it."""
    return {}


@pytest.mark.slow
@pytest.mark.usefixtures("run_callbacks")
@pytest.mark.parametrize(("start", "end"), TABLES["grid"])
def test_default_callbacks_let_a_run_resume_at_each_position(train, long_run, tmp_path_factory, start, end):
    """The token maps are due at the first step, the 50th and the last."""
    options = TABLES["of_grid"]
    if not long_run:
        long_run["folder"] = tmp_path_factory.mktemp("whole")
        train(long_run["folder"], max_steps=51, **options)
    whole = long_run["folder"]
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(whole / f"checkpoint-{start}", folder / f"checkpoint-{start}")
    train(folder, resume="latest", max_steps=end, **options)
    for name in ("model.safetensors", "teacher.safetensors", "optimizer.pt"):
        expected = (whole / f"checkpoint-{end}" / name).read_bytes()
        assert (folder / f"checkpoint-{end}" / name).read_bytes() == expected, name
    if start == 48:  # the generation batch begins in this run
        maps = {path.name for path in (folder / "credit_maps").glob("*.json")}
        assert maps == {f"step-{step:06d}.json" for step in {min(end, 50), end}}
