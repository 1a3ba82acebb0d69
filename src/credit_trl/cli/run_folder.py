"""A run directory as the one argument of `credit-eval` and `credit-map`, and what replaces its parts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from credit_trl.tasks.registry import load_task, task_of_data
from credit_trl.tasks.task import Task
from credit_trl.training.run_directory import ROWS_FOLDER, RUN_FILE, read_json


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN, what replaces its parts, and the sandbox."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="run directory, whose model, data and verifier are used")
    parser.add_argument("--model", metavar="NAME", help="hub name or directory, or quickstart")
    parser.add_argument("--task", metavar="NAME", help="such as sciknoweval:chemistry, my_package.task:Task")
    parser.add_argument("--split", metavar="NAME", default="test", help="split of the task's data (default test)")
    parser.add_argument("--path", metavar="PATH", help="local data file or folder")
    group = parser.add_argument_group("sandbox, for tasks that run model-written programs")
    group.add_argument(
        "--sandbox", metavar="NAME", help="auto (default), bubblewrap, landlock, or the address of a remote one"
    )
    group.add_argument("--allow_unsandboxed", action="store_true", help="without a sandbox, run unprotected")


def read_run(folder: str | Path) -> dict[str, Any]:
    """Content of `run.json`.

    Raises:
        FileNotFoundError: the folder is not a run directory.
    """
    path = Path(folder) / RUN_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a run directory: it has no {RUN_FILE}. Give a run's `output_dir`.")
    return read_json(path)


def model_of_run(folder: str | Path) -> Path:
    """Folder of the final model, or of the last checkpoint of a run that has not ended.

    Raises:
        FileNotFoundError: there is neither.
    """
    from transformers.trainer_utils import get_last_checkpoint

    folder = Path(folder)
    for place in (folder, folder / "model", Path(get_last_checkpoint(str(folder)) or folder)):
        if any((place / name).is_file() for name in ("config.json", "adapter_config.json")):
            return place
    raise FileNotFoundError(f"{folder} holds neither a final model nor a checkpoint. Give `--model`.")


def task_of_run(folder: str | Path, name: str | None = None) -> Task:
    """The task called `name`, else that of the run, whose folder may have moved.

    Raises:
        ValueError: the run does not say where its data and verifier are, or they are not found again.
    """
    if name is not None:
        return load_task(name)
    data = read_run(folder).get("data")
    if data is None:
        raise ValueError(f"{folder}: run.json does not describe data and verifier. Give `--task`.")
    for name in ("train", "test"):
        stored = Path(folder) / ROWS_FOLDER / f"{name}.parquet"
        if stored.is_file() and data[name] is not None and Path(data[name]["path"] or "").parent.name == ROWS_FOLDER:
            data[name]["path"] = str(stored)
    return task_of_data(data)
