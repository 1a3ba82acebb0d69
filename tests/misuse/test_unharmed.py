"""A call that fails before its first update leaves the folder of an earlier run as it was, byte for byte."""

import math
import time
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from credit_trl import EvaluationCallback
from credit_trl.tasks.task import Task
from tables import tables_of
from tiny import build_model, build_tokenizer, file_hashes, length_verdicts

HERE = Path(__file__).parent
TABLE = yaml.safe_load((HERE / "unharmed.yaml").read_text("utf-8"))


def failing(error: BaseException):
    """A reward function, or weight of tokens, that raises an error."""

    def function(*arguments, **columns):
        raise error

    return function


def failing_at(count: int):
    """A function of rows that raises an error at its call of this number."""
    calls = []

    def function(rows):
        calls.append(rows)
        return rows if len(calls) < count else {}["no such column"]

    return function


def callback(event: str) -> TrainerCallback:
    return type("Failing", (TrainerCallback,), {event: failing(KeyError("no such column"))})()


def wait(completions, **columns):
    time.sleep(1.0)
    return [0.0] * len(completions)


def model_of_nan() -> torch.nn.Module:
    model = build_model(build_tokenizer())
    model.model.norm.weight.data.fill_(math.nan)
    return model


def changed(dataset: Dataset) -> Dataset:
    """The rows, of which the last has another answer."""
    rows = dataset.to_list()
    rows[-1]["answer"] = "99"
    return Dataset.from_list(rows)


OBJECTS = {
    "weights of NaN": lambda dataset: model_of_nan(),
    "wider": lambda dataset: build_model(build_tokenizer(), hidden_size=48),
    "weight that fails": lambda dataset: failing(KeyError("no such column")),
    "weight of another shape": lambda dataset: lambda credit: {"distillation": credit.entropy[:, :1]},
    "verifier that fails": lambda dataset: failing(KeyError("no such column")),
    "verifier that is interrupted": lambda dataset: failing(KeyboardInterrupt()),
    "verifier that exits": lambda dataset: failing(SystemExit(3)),
    "verifier without memory": lambda dataset: failing(torch.OutOfMemoryError("out of memory")),
    "verifier that waits": lambda dataset: wait,
    "callback that fails at the start": lambda dataset: [callback("on_train_begin")],
    "callback that fails at the first step": lambda dataset: [callback("on_pre_optimizer_step")],
    "rollout that fails": lambda dataset: failing(ConnectionError("no engine answers")),
    "rows that fail": lambda dataset: dataset.with_transform(failing_at(3)),
    "stream that fails later": lambda dataset: dataset.to_iterable_dataset().map(failing_at(3)),
    "LoRA of no layer": lambda dataset: LoraConfig(r=4, target_modules=["nothing"]),
    "environment that fails": lambda dataset: failing(KeyError("no such column")),
    "sums": lambda dataset: dataset,
    "other sums": changed,
    "one sum less": lambda dataset: dataset.select(range(11)),
    "sums in another order": lambda dataset: dataset.select(range(11, -1, -1)),
    "LoRA": lambda dataset: LoraConfig(r=4, target_modules=["q_proj"]),
}


@pytest.fixture
def train(make_trainer, dataset, unharmed):
    """Call `train` as a row of the table says."""

    def call(row) -> None:
        arguments = {name: OBJECTS[value](dataset) for name, value in row.get("arguments", {}).items()}
        options = {"save_strategy": "steps", "save_steps": 1, **row.get("options", {})}
        if "output_dir" in options:
            options["output_dir"] = str(unharmed.parent / options["output_dir"])
        resume = row.get("resume")
        if resume not in (None, "latest"):
            resume = str(unharmed / resume)
        trainer = make_trainer(**{"reward_funcs": length_verdicts, **arguments, **options})
        trainer.train(resume_from_checkpoint=resume, resume_changes=row.get("changes", "refuse"))

    return call


def text_of(row) -> str:
    return str({name: value for name, value in row.items() if name != "says"})


@pytest.mark.parametrize("row", TABLE["calls"], ids=text_of)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("run_callbacks")
def test_failed_call_leaves_the_earlier_run_as_it_was(train, row):
    with pytest.raises(BaseException) as failed:  # noqa: PT011
        train(row)
    message = f"{type(failed.value).__name__} {failed.value}"
    assert [part for part in row["says"] if part not in message] == [], message


@pytest.mark.parametrize("option", TABLE["resumed"])
def test_resume_with_a_changed_option_is_refused_with_it(train, option):
    value = TABLE["resumed"][option]
    with pytest.raises(ValueError, match=rf"`{option}`: .* -> .*`resume_changes='allow'`"):
        train({"resume": "latest", "options": {"max_steps": 3, option: value}})


@pytest.mark.filterwarnings("ignore")
def test_evaluation_before_the_first_loss_harms_no_earlier_run(make_trainer, dataset, unharmed):
    trainer = make_trainer(loss_type="dapoo", distillation_weight=0.5)
    task = Task.from_dataset(dataset.select(range(2)), length_verdicts)
    evaluation = EvaluationCallback(trainer, task, k=1, max_completion_length=4)
    trainer.add_callback(evaluation)
    with pytest.raises(ValueError, match="dapoo"):
        trainer.train()
    assert [row["step"] for row in evaluation.history] == [0]


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_begins_with_the_first_update(make_trainer, dataset, earlier_run):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    expected = file_hashes(earlier_run)
    rows = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "eval_rows": dataset}
    with pytest.raises(ValueError, match="dapoo"):
        make_trainer(loss_type="dapoo", distillation_weight=0.5, report_to="tensorboard").train()
    assert file_hashes(earlier_run) == expected
    make_trainer(report_to="tensorboard", max_steps=1, **rows).train()
    [events] = (earlier_run / "runs").glob("*/events*")
    read = accumulator.EventAccumulator(str(events)).Reload()
    assert [event.step for event in read.Scalars("eval/loss")] == [0, 1]
    assert [event.step for event in read.Scalars("train/loss")] == [1]
    assert "args/text_summary" in read.Tags()["tensors"]


def test_stream_with_other_first_rows_is_not_resumed(make_trainer, dataset, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    make_trainer(rows=dataset.to_iterable_dataset(), **options).train()
    expected = file_hashes(tmp_path / "run")
    others = Dataset.from_list([row | {"answer": "99"} for row in dataset]).to_iterable_dataset()
    trainer = make_trainer(rows=others, **options | {"max_steps": 2})
    with pytest.raises(ValueError, match=r"`data`: 'a stream, \w+' -> 'a stream, \w+'"):
        trainer.train(resume_from_checkpoint="latest")
    assert file_hashes(tmp_path / "run") == expected


def test_eighty_failing_calls_and_commands_are_tried_on_an_earlier_run():
    mistakes = yaml.safe_load((HERE / "mistakes.yaml").read_text("utf-8"))
    commands = tables_of(str(HERE.parent / "cli" / "test_errors.py"))
    tried = [*TABLE["calls"], *TABLE["resumed"], *mistakes["trainer"], *mistakes["step"], *commands["training"]]
    assert len(tried) >= 80
