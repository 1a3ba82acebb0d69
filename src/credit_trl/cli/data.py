"""Data and verifier of `trl credit`: a task, or TRL's dataset options with reward functions of the user's own."""

import os
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from trl import DatasetMixtureConfig, ScriptArguments, get_dataset

from credit_trl.cli.errors import suggest
from credit_trl.run_directory import describe_data, describe_rows
from credit_trl.sandbox import choose_sandbox
from credit_trl.tasks.registry import import_named, load_task, task_of_data


def _option(text: str, default: Any = None) -> Any:
    """Field of an option with its line in the help."""
    return field(default=default, metadata={"help": text})


@dataclass
class CreditScriptArguments(ScriptArguments):
    """Arguments of `trl credit` for data, verifier and evaluation, in addition to TRL's `ScriptArguments`."""

    task: str | None = _option("Task of the registry, or package.module:attribute: dataset and verifier.")
    dataset_path: str | None = _option("Local data: of the task, or JSONL, JSON, CSV or Parquet without a task.")
    eval_dataset_path: str | None = _option("The same for the evaluation data; defaults to dataset_path.")
    max_train_rows: int | None = _option("Use the first rows of the training data only.")
    max_eval_rows: int | None = _option("Use the first rows of the evaluation data only.")
    max_prompt_tokens: int | None = _option("Drop rows whose prompt has more tokens, as SDPO's pipeline does (2048).")
    reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "my_module.my_reward: reward functions, besides a task's verifier."}
    )
    token_weight: str | None = _option("my_module:my_weight: function that weights the losses token by token.")
    avg_at_k: int | None = _option("k: evaluate avg@k on the test split, save the best model and a log.")
    avg_at_k_steps: int = _option("Generation batches between two evaluations.", 5)
    avg_at_k_temperature: float = _option("Sampling temperature of avg@k.", 0.6)
    avg_at_k_top_p: float = _option("Nucleus mass of avg@k.", 0.95)
    resume_changes: Literal["refuse", "allow"] = _option("Differences of a resumed run's objective.", "refuse")
    check: bool = _option("Load everything, show one rollout, measure one step, leave nothing behind.", False)
    sandbox: str | None = _option("auto (default), bubblewrap, landlock, unprotected, or the URL of a service.")
    allow_unsandboxed: bool = _option("Without a sandbox, run programs with resource limits only.", False)

    def __post_init__(self) -> None:
        for name in ("avg_at_k", "avg_at_k_steps", "max_train_rows", "max_eval_rows", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`--{name}` must be at least 1, got {value}.")
        if isinstance(self.reward_funcs, str):  # `reward_funcs: my_module.my_reward` in a YAML file
            self.reward_funcs = [name.strip() for name in self.reward_funcs.split(",")]
        choose_sandbox(self.sandbox, self.allow_unsandboxed)
        if os.getcwd() not in sys.path:  # for tasks and functions of the user's own
            sys.path.insert(0, os.getcwd())


def load_reward_funcs(script_args: CreditScriptArguments) -> list[Any]:
    """The verifier of a task, and the reward functions."""
    reward_funcs = _named_functions(script_args)
    if script_args.task is not None:
        reward_funcs.insert(0, load_task(script_args.task).reward)
    elif not reward_funcs:
        raise ValueError("Nothing grades the answers: give `--task NAME`, or `--reward_funcs my_module.my_reward`.")
    return reward_funcs


def _named_functions(script_args: CreditScriptArguments) -> list[Any]:
    return [import_function(name, "--reward_funcs") for name in script_args.reward_funcs or ()]


def load_data(
    script_args: CreditScriptArguments, dataset_args: DatasetMixtureConfig, wants_eval: bool
) -> tuple[Any, Any]:
    """(training rows, evaluation rows or None) of a task, or of TRL's dataset options."""
    if dataset_args.datasets:
        build = get_dataset(dataset_args).__getitem__
    else:
        build = task_of_data(describe(script_args)).build
    if script_args.eval_dataset_path is not None and not os.path.exists(script_args.eval_dataset_path):
        raise FileNotFoundError(f"`--eval_dataset_path {script_args.eval_dataset_path}` does not exist.")
    rows = build(script_args.dataset_train_split)
    held_out = build(script_args.dataset_test_split) if wants_eval else None
    return first_rows(rows, script_args.max_train_rows), first_rows(held_out, script_args.max_eval_rows)


def import_function(name: str, option: str) -> Any:
    """Import the function of `module.name` or `module:name`, also from the working directory."""
    module, _, function = name.replace(":", ".").rpartition(".")
    if not all(part.isidentifier() and part != "py" for part in (*module.split("."), function)):
        raise ValueError(f"`{option} {name}`: expected an import path such as my_module:my_function.")
    missing = ValueError(
        f"`{option} {name}`: no module `{module}` in {os.getcwd()} or installed. Run from its folder."
    )
    imported = import_named(module, missing)
    if not hasattr(imported, function):
        advice = suggest(function, vars(imported)) or " Define it there."
        raise ValueError(f"`{option} {name}`: {module} has no `{function}`.{advice}")
    value = getattr(imported, function)
    if not callable(value):
        raise ValueError(f"`{option} {name}` is {value!r:.80}, which is no function. Name a function of {module}.")
    return value


def check_one_source(script_args: CreditScriptArguments, dataset_args: DatasetMixtureConfig) -> None:
    """Raise where no data is given, or two sources, of which one would be ignored."""
    value_of = {
        "--task": script_args.task,
        "--dataset_name": script_args.dataset_name,
        "datasets": dataset_args.datasets or None,
        "--dataset_path": None if script_args.task else script_args.dataset_path,  # the local copy of a task's data
    }
    sources = []
    for option, value in value_of.items():
        if value is not None:
            sources.append(f"`{option} {value}`")
    if not sources:
        raise ValueError(
            "No training data: give `--task NAME`, `--dataset_path questions.jsonl`, `--dataset_name NAME`, or "
            "`datasets:` in the YAML."
        )
    if len(sources) > 1:
        raise ValueError(f"The training data is given by {' and '.join(sources)}. Remove all but one.")


def describe(script_args: CreditScriptArguments, weights: list[float] | None = None) -> dict[str, Any]:
    """Field `data` of `run.json`, from which `credit-eval RUN` and others find rows and verifier again."""
    train = None
    test = None
    if script_args.dataset_path is not None:
        train = describe_rows(script_args.dataset_path, streaming=script_args.dataset_streaming)
        test = train if script_args.eval_dataset_path is None else describe_rows(script_args.eval_dataset_path)
    elif script_args.dataset_name is not None:
        hub = {"name": script_args.dataset_name, "config": script_args.dataset_config}
        train = describe_rows(**hub, split=script_args.dataset_train_split, streaming=script_args.dataset_streaming)
        test = describe_rows(**hub, split=script_args.dataset_test_split)
    places = {"task": script_args.task, "train": train, "test": test, "train_split": script_args.dataset_train_split}
    return describe_data(_named_functions(script_args), weights, **places)


def first_rows(dataset: Any, rows: int | None) -> Any:
    """The first rows of a dataset, or all of them for `rows=None`."""
    return dataset if dataset is None or rows is None else dataset.take(rows)


def drop_long_prompts(name: str, dataset: Any, processor: Any, limit: int, options: dict[str, Any]) -> Any:
    """The rows whose prompt has at most `limit` tokens, with the chat template's generation prompt.

    `name` is that of the rows in messages, `processor` that of the model or its tokenizer, `options` are
    `chat_template_kwargs`.
    """
    from credit_trl.contexts.images import with_local_images
    from credit_trl.contexts.prompts import check_rows, row_prompt
    from credit_trl.evaluation.engines import encode_prompt

    dataset = with_local_images(dataset)
    if hasattr(dataset, "__len__"):  # not a stream
        check_rows(f"the {name} rows", (row.get("prompt") for row in dataset))
    short_enough = dataset.filter(lambda row: len(encode_prompt(processor, row_prompt(row), **options)) <= limit)
    if hasattr(short_enough, "__len__") and len(short_enough) == 0:
        raise ValueError(f"`--max_prompt_tokens {limit}` drops all {len(dataset)} {name} rows. Raise it.")
    return short_enough
