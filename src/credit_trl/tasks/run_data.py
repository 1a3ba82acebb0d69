"""Data and verifier of a run as a `Task`, from their description in `run.json` (`credit_trl.training.run_data`)."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from credit_trl.tasks.records import read_dataset
from credit_trl.tasks.registry import load_task
from credit_trl.tasks.task import Task


def task_of_data(data: Mapping[str, Any]) -> Task:
    """The task of `describe_data`: rows of the split that is asked for, and all reward functions as one verifier.

    Raises:
        ValueError: a function or the rows cannot be found again, or the file has changed; the message says what to
            do.
    """
    if data["folder"] not in sys.path:
        sys.path.insert(0, data["folder"])
    held_out = data["test"] or data["train"]
    place = held_out or {}
    if data["task"] is not None:
        task = load_task(data["task"])
    else:
        name = Path(place.get("path") or place.get("name") or "run").stem
        task = Task.from_dataset({}, list(map(_reward, data["reward_funcs"])), name, data["reward_weights"])

    def build(split: str = "test", path: str | Path | None = None, **options: Any) -> Any:
        place = data["train"] if split == data["train_split"] else held_out
        if data["task"] is not None:
            return task.build(split, path or (place or {}).get("path"), **options)
        return _own_rows(place) if path is None else read_dataset(path, "--path")

    return replace(task, build=build)


def _own_rows(place: Mapping[str, Any] | None) -> Any:
    """Rows of a place of `describe_rows`."""
    from datasets import load_dataset

    if place is None:
        raise ValueError(
            "The rows of this run were a `Dataset` object that it did not store: a stream, or more than 1 GB. Save "
            "them, `dataset.to_json('questions.jsonl')`, and name the file with `--path questions.jsonl`."
        )
    if place["path"] is None:
        return load_dataset(place["name"], place["config"], split=place["split"], streaming=place["streaming"])
    file = Path(place["path"])
    if place["sha256"] is not None and file.is_file():
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
    try:
        return resolve_name(described["name"])
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"The reward function {described['name']} of this run is not found ({error}). Run from the folder of "
            f"{described['file']}, or give `--reward_funcs`."
        ) from error
