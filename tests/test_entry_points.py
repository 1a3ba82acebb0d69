"""Every public entry point takes each documented form of each of its arguments."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForSequenceClassification, TrainerCallback
from trl import GRPOTrainer

import credit_trl
from credit_trl import CreditTrainer, EvaluationCallback, Task, Verdict, evaluate
from credit_trl.evaluation.engines import TransformersEngine
from credit_trl.loss.token_weight import TokenCredit
from credit_trl.tasks import quickstart
from credit_trl.tasks.registry import load_task
from credit_trl.tasks.task import batch_of
from test_trainer import GuessingGame
from tiny import TABLES, build_tokenizer, length_verdicts, save_model

LORA = LoraConfig(r=2, target_modules="all-linear")


def text_rows() -> Dataset:
    return Dataset.from_dict({"prompt": ["1+1=", "1+2="] * 4, "answer": ["2", "3"] * 4})


def text_verdicts(completions, answer, **columns):
    return [Verdict(float(len(text) % 2), f"It is {a}.") for text, a in zip(completions, answer, strict=True)]


async def coroutine(completions, **columns):
    return length_verdicts(completions, **columns)


def numbers(completions, **columns):
    """Rewards without feedback, and one that does not apply."""
    return [None, *(float(len(completion[-1]["content"])) for completion in completions[1:])]


def reward_folder(parts: SimpleNamespace) -> str:
    """Folder of a random classifier with its tokenizer."""
    tokenizer = build_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "num_labels": 1, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen3ForSequenceClassification(Qwen3Config(**TABLES["sizes"] | sizes))
    model.save_pretrained(parts.folder / "reward")
    tokenizer.save_pretrained(parts.folder / "reward")
    return str(parts.folder / "reward")


def reward_model(parts: SimpleNamespace) -> PreTrainedModel:
    return Qwen3ForSequenceClassification.from_pretrained(reward_folder(parts))


def guess(number: int) -> str:
    """Guess the number.

    Args:
        number: the guess.
    """
    return "higher"


def rollout(prompts, trainer):
    ids = [trainer.processing_class(prompt[-1]["content"])["input_ids"] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": [[65, 66]] * len(ids), "logprobs": [[-1.0, -1.0]] * len(ids)}


class Weight:
    """A token weight with a state."""

    def __call__(self, credit: TokenCredit) -> dict[str, torch.Tensor]:
        return {"distillation": credit.delta_v.exp()}


def sgd(parts: SimpleNamespace) -> dict[str, Any]:
    model = parts.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))}


# Argument of CreditTrainer -> form -> arguments, of the parts of a run.
TRAINER = {
    "model": {
        "alias": lambda parts: {"model": "quickstart", "processing_class": None},
        "folder": lambda parts: {"model": str(parts.folder), "processing_class": None},
        "path": lambda parts: {"model": parts.folder},
        "module": lambda parts: {"model": parts.make_model()},
        "adapter": lambda parts: {"model": get_peft_model(parts.make_model(), LORA)},
    },
    "reward_funcs": {
        "function": lambda parts: {"reward_funcs": length_verdicts},
        "coroutine": lambda parts: {"reward_funcs": coroutine},
        "reward of a task": lambda parts: {"reward_funcs": batch_of(lambda response, answer: Verdict(1.0, answer))},
        "rewards": lambda parts: {"reward_funcs": numbers},
        "reward model": lambda parts: {"reward_funcs": reward_model(parts)},
        "folder of one": lambda parts: {"reward_funcs": reward_folder(parts)},
        "list": lambda parts: {"reward_funcs": [numbers, coroutine, reward_model(parts)]},
    },
    "train_dataset": {
        "rows": lambda parts: {"train_dataset": parts.rows},
        "stream": lambda parts: {"train_dataset": parts.rows.to_iterable_dataset()},
        "text": lambda parts: {"train_dataset": text_rows(), "reward_funcs": text_verdicts},
    },
    "eval_dataset": {
        "rows": lambda parts: {"eval_dataset": parts.rows},
        "stream": lambda parts: {"eval_dataset": parts.rows.to_iterable_dataset()},
        "splits by name": lambda parts: {"eval_dataset": {"easy": parts.rows, "hard": parts.rows}},
        "splits": lambda parts: {"eval_dataset": DatasetDict(easy=parts.rows)},
    },
    "processing_class": {"tokenizer": lambda parts: {"processing_class": build_tokenizer()}},
    "reward_processing_classes": {
        "tokenizer": lambda parts: {
            "reward_funcs": reward_model(parts),
            "reward_processing_classes": build_tokenizer(),
        },
        "list": lambda parts: {
            "reward_funcs": [length_verdicts, reward_model(parts)],
            "reward_processing_classes": [None, build_tokenizer()],
        },
    },
    "callbacks": {"list": lambda parts: {"callbacks": [TrainerCallback()]}},
    "optimizers": {"optimizer and schedule": sgd},
    "peft_config": {"LoRA": lambda parts: {"peft_config": LORA}},
    "tools": {"list": lambda parts: {"tools": [guess], "processing_class": parts.parsing}},
    "rollout_func": {"function": lambda parts: {"rollout_func": rollout}},
    "environment_factory": {
        "class": lambda parts: {"environment_factory": GuessingGame, "processing_class": parts.parsing},
        "classes by name": lambda parts: {
            "environment_factory": {"guess": GuessingGame},
            "train_dataset": parts.rows.add_column("environment", ["guess"] * len(parts.rows)),
            "processing_class": parts.parsing,
        },
    },
    "token_weight": {
        "function": lambda parts: {"token_weight": lambda credit: {"distillation": credit.delta_v.exp()}},
        "object": lambda parts: {"token_weight": Weight()},
    },
}
# `args` is in each run; tests of bitsandbytes have the other one, tests/rollout/test_thinking.py `in_process`.
OUTSIDE = {"args", "quantization_config"}


def cases(table: dict[str, dict[str, Any]]) -> list[Any]:
    return [pytest.param(make, id=f"{name}: {form}") for name, forms in table.items() for form, make in forms.items()]


@pytest.fixture
def parts(make_model, make_config, dataset, parsing, tmp_path) -> SimpleNamespace:
    """What the arguments are made of."""
    folder = Path(save_model(tmp_path / "model"))
    return SimpleNamespace(
        folder=folder, make_model=make_model, rows=dataset, parsing=parsing, make_config=make_config
    )


def make_trainer(parts: SimpleNamespace, arguments: dict[str, Any], **options: Any) -> CreditTrainer:
    config = parts.make_config(max_steps=1, num_generations=2, per_device_eval_batch_size=4, **options)
    default = {"model": parts.make_model, "reward_funcs": length_verdicts, "train_dataset": parts.rows}
    common = {"processing_class": build_tokenizer(), **default, "args": config} | arguments
    if common["model"] is parts.make_model:
        common["model"] = parts.make_model(vocab_size=len(common["processing_class"]))
    return CreditTrainer(**common)


@pytest.mark.parametrize("make", cases(TRAINER))
def test_a_trainer_takes_each_form_of_each_argument(parts, make):
    arguments = make(parts)
    trainer = make_trainer(parts, arguments)
    trainer.train()
    assert trainer.state.global_step == 1
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    if "eval_dataset" in arguments:
        assert any(name.endswith("reward") for name in trainer.evaluate())


def test_the_table_has_each_argument_of_the_trainer():
    names = {*inspect.signature(CreditTrainer).parameters, *inspect.signature(GRPOTrainer).parameters} - {"kwargs"}
    assert TRAINER.keys() | OUTSIDE == names
    assert set(credit_trl.__all__) - {"CreditConfig"} == {"CreditTrainer", "in_process", *EVALUATED, "Task", "Verdict"}


class Sums:
    """A task as a class."""

    build = staticmethod(quickstart.build)
    verify = staticmethod(quickstart.verify)


# Entry point -> form of its first arguments -> the model or trainer, and the task.
EVALUATED = {
    "evaluate": {
        "trainer": lambda parts: (make_trainer(parts, {}), "quickstart"),
        "model": lambda parts: (parts.make_model(), "quickstart"),
        "folder": lambda parts: (str(parts.folder), "quickstart"),
        "alias": lambda parts: ("quickstart", "quickstart"),
        "engine": lambda parts: (TransformersEngine(parts.make_model(), build_tokenizer()), "quickstart"),
        "task": lambda parts: (str(parts.folder), load_task("quickstart")),
        "task of functions": lambda parts: (
            str(parts.folder),
            Task("sums", quickstart.build, quickstart.verify, batch_of(quickstart.verify)),
        ),
        "import name": lambda parts: (str(parts.folder), f"{__name__}:Sums"),
    },
    "EvaluationCallback": {
        "name": lambda parts: (make_trainer(parts, {}), "quickstart"),
        "task": lambda parts: (make_trainer(parts, {}), load_task("quickstart")),
        "import name": lambda parts: (make_trainer(parts, {}), f"{__name__}:Sums"),
    },
}


@pytest.mark.parametrize("make", cases(EVALUATED))
def test_an_evaluation_takes_each_form_of_model_and_task(parts, make, request):
    model, task = make(parts)
    options: dict[str, Any] = {"k": 1, "max_prompts": 2, "max_completion_length": 2}
    if "EvaluationCallback" in request.node.name:
        model.add_callback(EvaluationCallback(model, task, eval_steps=1, **options))
        model.train()
        assert len([row for row in model.state.log_history if "eval_avg@1" in row]) == 2
        return
    tokenizer = {"tokenizer": build_tokenizer()} if isinstance(model, torch.nn.Module) else {}
    assert len(evaluate(model, task, **options, **tokenizer).prompts) == 2


VERDICTS = {
    "integer": ((1,), 1.0),
    "tensor": ((torch.tensor(0.5),), 0.5),
    "not applicable": ((None,), None),
    "feedback": ((0.0, "Wrong."), 0.0),
    "metrics": ((0.0, None, {"passed": torch.tensor(1)}), 0.0),
    "turns": ((0.0, "", {}, {0: "Too early."}), 0.0),
}


@pytest.mark.parametrize(("arguments", "reward"), VERDICTS.values(), ids=VERDICTS)
def test_a_verdict_takes_each_form_of_its_fields(arguments, reward):
    assert Verdict(*arguments).reward == reward
