"""Task registry: `load_task("sciknoweval:chemistry")` returns a `Task`, a dataset builder with its verifier.

A name is a built-in task (`BUILT_IN`), with an option after a colon where its module declares one, or one's own: a
module, or `package.module:name`. A module is imported when its name is loaded. `task_of_data` makes a task of the
description of a run's data and verifier in `run.json` (`credit_trl.run_directory`).
"""

import difflib
import functools
import hashlib
import importlib
import inspect
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from credit_trl.sandbox.user_code import exit_is_an_error, exit_raises, explained
from credit_trl.tasks.records import read_dataset
from credit_trl.tasks.task import Task, batch_of, renamed

logger = logging.getLogger(__name__)

TRAINING_ROWS = ", training rows"  # of the name of a task without held-out rows
BUILT_IN = ("livecodebench", "quickstart", "sciknoweval", "toolalpaca")


def check_name(name: str) -> None:
    """Check the form of a task name without importing anything."""
    head, _, tail = name.partition(":") if isinstance(name, str) else ("", "", "")
    is_own = not head.startswith(".") and ("." in head or tail)
    if not head.strip() or (head not in BUILT_IN and not is_own):
        raise _unknown_task(name)


def load_task(name: str | Task) -> Task:
    """Resolve `"sciknoweval:chemistry"`, `"toolalpaca"` or `"my_package.my_task:MyTask"` to a `Task`.

    The `ValueError` for an unknown name or option lists the known ones.
    """
    if isinstance(name, Task):
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"A task is a name or a `Task`, got {type(name).__name__}. Of rows and reward functions "
            "`Task.from_dataset(rows, reward_funcs)` makes one, of an object with `build` and `verify` `as_task`."
        )
    check_name(name)
    head, colon, tail = name.partition(":")
    if head in BUILT_IN:
        return as_task(importlib.import_module(f"{__package__}.{head}"), name, tail if colon else None)
    target = import_named(head, ValueError(f"{_unknown_task(name)} No module {head!r} is found from here."))
    try:
        target = attrgetter(tail)(target) if tail else target
    except AttributeError as error:
        raise ValueError(f"Task {name!r}: {head} has no attribute {tail!r}.") from error
    return as_task(target, name)


def as_task(target: Any, name: str, option: str | None = None) -> Task:
    """Make a `Task` of a `Task`, a class, a module, or any object with `build` and `verify`.

    `option` is the text after the colon of the name of a built-in task, whose module declares as `OPTION` the keyword
    of `build` and its values.
    """
    if inspect.isclass(target):
        target = target()
    if isinstance(target, Task):
        return target
    for method in ("build", "verify"):
        if not callable(getattr(target, method, None)):
            raise TypeError(f"Task {name!r} lacks `{method}`. A function alone is given by `--reward_funcs`.")
    options = {}
    if option is not None:
        keyword, values = getattr(target, "OPTION", ("option", ()))
        if option not in values:
            remedy = f"use one of {', '.join(values)}" if values else "the task takes no option after the colon"
            raise ValueError(f"Task {name!r}: there is no {keyword} {option!r}; {remedy}.")
        options[keyword] = option

    @functools.wraps(target.build)
    def build(*args: Any, **kwargs: Any) -> Any:
        dataset = target.build(*args, **options, **kwargs)
        columns = getattr(dataset, "column_names", None) or ["prompt", "answer"]
        missing = ", ".join(f"`{column}`" for column in ("prompt", "answer") if column not in columns)
        if missing:
            listed = ", ".join(columns)
            raise ValueError(f"Task {name!r}: `build` has no column {missing}; its columns are {listed}. Add it.")
        return dataset

    batch = getattr(target, "reward", None)
    reward = batch_of(target.verify, name) if batch is None else renamed(batch, name)
    return Task(name, build, target.verify, reward)


def import_named(module: str, missing: ValueError) -> Any:
    """Import a module that the user names, or raise `missing` if it does not exist."""
    try:
        with exit_is_an_error(f"The module {module!r}"), exit_raises():
            return importlib.import_module(module)
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        if is_missing and error.name:  # and not one that it imports
            raise missing from error
        raise explained(error, f"The module {module!r}", "Correct it, or install what it imports.") from None


def _unknown_task(name: Any) -> ValueError:
    close = difflib.get_close_matches(str(name).partition(":")[0], BUILT_IN, n=1)
    suggestion = f" Did you mean {close[0]!r}?" if close else ""
    choices = f"{', '.join(BUILT_IN)}; or name your own as `package.module:attribute`"
    return ValueError(f"Unknown task {name!r}.{suggestion} Known tasks: {choices}.")


def task_of_data(data: Mapping[str, Any]) -> Task:
    """The task of `describe_data`: rows of the split that is asked for, and all reward functions as one verifier.

    A function or rows that are not found again, or a file that has changed, are a `ValueError`.
    """
    if data["folder"] not in sys.path:
        sys.path.insert(0, data["folder"])
    has_held_out = data["test"] not in (None, data["train"])
    held_out = (data["test"] if has_held_out else data["train"]) or {}
    if data["task"] is not None:
        task = load_task(data["task"])
    else:
        name = Path(held_out.get("path") or held_out.get("name") or "run").stem
        name = name if has_held_out else name + TRAINING_ROWS
        task = Task.from_dataset({}, list(map(_reward, data["reward_funcs"])), name, data["reward_weights"])

    def build(split: str = "test", path: str | Path | None = None, **options: Any) -> Any:
        place = data["train"] if split == data["train_split"] else held_out
        if data["task"] is not None:
            return task.build(split, path or (place or {}).get("path"), **options)
        if path is None and split != data["train_split"] and not has_held_out:
            logger.warning("No held-out rows: training rows are used. --eval_dataset_path, or --path, gives others.")
        return _own_rows(place) if path is None else read_dataset(path, "--path")

    return replace(task, build=build)


def _own_rows(place: Mapping[str, Any] | None) -> Any:
    """Rows of a place of `describe_rows`."""
    from datasets import load_dataset

    if not place:
        raise ValueError(
            "The rows of this run were a `Dataset` object that it did not store: a stream, transformed, or above "
            "1 GB. Save them, `dataset.to_json('questions.jsonl')`, and name the file with `--path questions.jsonl`."
        )
    if place["path"] is None:
        return load_dataset(place["name"], place["config"], split=place["split"], streaming=place["streaming"])
    file = Path(place["path"])
    if place["sha256"] is not None:
        if not file.is_file():
            raise ValueError(f"{file} of the run does not exist. Name the file to use with `--path`.")
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if digest != place["sha256"]:
            raise ValueError(f"{file} has changed since the run. Name the file to use with `--path`.")
    return read_dataset(file, "--dataset_path", place["streaming"])


def _reward(described: Mapping[str, Any]) -> Any:
    """The reward function of `describe_function`."""
    if described["name"] is None:
        raise ValueError(
            f"The reward function `{described['called']}` of this run has no import name. Define it with `def` in a "
            "module of its own, such as my_rewards.py, and give `--reward_funcs my_rewards.my_reward`."
        )
    module, _, path = described["name"].partition(":")
    try:
        return attrgetter(path)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"The reward function {described['name']} of this run is not found ({error}). Run from the folder of "
            f"{described['file']}, or give `--reward_funcs`."
        ) from error
