"""Data and verifier of a run: described for `run.json`, and found again from the description as a `Task`."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.verdict import as_verdicts
from credit_trl.tasks.registry import load_task
from credit_trl.tasks.task import Rewards, Task, call_reward

if TYPE_CHECKING:
    from datasets import Dataset

# Loader of `datasets` by the suffix of a file.
LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def describe_data(
    reward_funcs: Sequence[Any] | Any,
    reward_weights: Sequence[float] | None = None,
    *,
    task: str | None = None,
    train: Mapping[str, Any] | None = None,
    test: Mapping[str, Any] | None = None,
    train_split: str = "train",
) -> dict[str, Any]:
    """Field `data` of `run.json`: how the rows and reward functions of a run are found again.

    Args:
        reward_funcs: one reward function or several, as for `GRPOTrainer`.
        reward_weights: their weights, by default 1.
        task: name for `load_task`, whose verifier is the first reward function.
        train, test: `describe_rows` of the training and of the held-out rows.
        train_split: name of the split that means the training rows; any other means the held-out ones.
    """
    functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    return {
        "task": task,
        "train": train,
        "test": test,
        "train_split": train_split,
        "reward_funcs": [describe_function(one) for one in functions[0 if task is None else 1 :]],
        "reward_weights": None if reward_weights is None else list(reward_weights),
        "folder": os.getcwd(),
        "versions": {name: version(name) for name in ("credit-trl", "trl", "datasets")},
    }


def describe_rows(
    path: str | Path | None = None,
    *,
    name: str | None = None,
    config: str | None = None,
    split: str | None = None,
    streaming: bool = False,
) -> dict[str, Any]:
    """Place of rows: a local file or folder (with the hash of a file), or a data set of the hub."""
    file = None if path is None else Path(path).resolve()
    digest = _file_digest(file) if file is not None and file.is_file() else None
    place = {"path": file and str(file), "sha256": digest, "name": name, "config": config, "split": split}
    return {**place, "streaming": streaming}


def describe_function(function: Any) -> dict[str, Any]:
    """Import name and file of a reward function; the name is None where no import finds it."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    is_found = module not in (None, "__main__") and name is not None and "<" not in name
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    called = name or type(function).__name__
    return {"name": f"{module}:{name}" if is_found else None, "called": called, "file": file}


def task_of_data(data: Mapping[str, Any]) -> Task:
    """The task of a description: rows of the split that is asked for, and all reward functions as one verifier.

    Raises:
        ValueError: a function or the rows cannot be found again, or the file has changed; the message says what to
            do.
    """
    if data["folder"] not in sys.path:
        sys.path.insert(0, data["folder"])
    if data["task"] is None:
        functions = [_import(one) for one in data["reward_funcs"]]
        weights = data["reward_weights"] or [1.0] * len(functions)
        weighted = [_weighted(one, weight) for one, weight in zip(functions, weights, strict=True)]
        place = data["test"] or data["train"] or {}
        task = Task.from_dataset({}, weighted, Path(place.get("path") or place.get("name") or "run").stem)
    else:
        task = load_task(data["task"])

    def build(split: str = "test", path: str | Path | None = None, **options: Any) -> Any:
        place = data["train"] if split == data["train_split"] else data["test"] or data["train"]
        if data["task"] is not None:
            return task.build(split, path or (place or {}).get("path"), **options)
        return read_rows(path, "--path") if path is not None else _own_rows(place)

    return replace(task, build=build)


def _own_rows(place: Mapping[str, Any] | None) -> Any:
    """Rows of a place in the description."""
    from datasets import load_dataset

    if place is None:
        raise ValueError(
            "The rows of this run were a `Dataset` object. Save them, `dataset.to_json('questions.jsonl')`, and name "
            "the file with `--path questions.jsonl`."
        )
    if place["path"] is None:
        return load_dataset(place["name"], place["config"], split=place["split"], streaming=place["streaming"])
    file = Path(place["path"])
    if place["sha256"] is not None and file.is_file() and _file_digest(file) != place["sha256"]:
        raise ValueError(f"{place['path']} has changed since the run. Name the file to use with `--path`.")
    return read_rows(place["path"], "--dataset_path", place["streaming"])


def read_rows(path: str | Path, option: str, streaming: bool = False) -> Dataset:
    """Rows of a local file, read by `datasets`; errors name the option that gave the path."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    loader = LOADERS.get(Path(path).suffix)
    if loader is None or not Path(path).is_file():
        problem = "no such file" if loader else f"expected one of {', '.join(LOADERS)}"
        raise ValueError(f"`{option} {path}`: {problem}.")
    try:
        return load_dataset(loader, data_files=str(path), split="train", streaming=streaming)
    except (DatasetGenerationError, StopIteration, ValueError) as error:  # StopIteration: an empty file
        problem = error.__cause__ or str(error) or "it is empty"
        raise ValueError(f"`{option} {path}` cannot be read: {problem}") from error


def _import(described: Mapping[str, Any]) -> Callable[..., Any]:
    """The reward function of a description."""
    if described["name"] is None:
        raise ValueError(
            f"The reward function `{described['called']}` of this run has no import name. Define it with `def` in a "
            "module of its own, such as my_rewards.py, and give `--reward_funcs my_rewards.my_reward`."
        )
    module, _, name = described["name"].partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"The reward function {described['name']} of this run is not found ({error}); it was in "
            f"{described['file']}. Run from the folder of that file, or give `--reward_funcs`."
        ) from error
    return found


def _weighted(function: Callable[..., Any], weight: float) -> Callable[..., Any]:
    """The reward function with its rewards multiplied by its weight."""
    if weight == 1.0:
        return function

    @functools.wraps(function)
    def reward(completions: Sequence[Any], **columns: Any) -> Rewards:
        arguments = {"completions": completions, **columns}
        verdicts = as_verdicts(function.__name__, call_reward(function, **arguments), arguments)
        return [replace(one, reward=one.reward and weight * one.reward) for one in verdicts]

    return reward


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
