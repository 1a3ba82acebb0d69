"""A run directory as the one argument of `credit-eval` and `credit-map`, and what replaces its parts."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from credit_trl.cli.data import import_function
from credit_trl.run_directory import LOG_FILE, RUN_FILE, describe_function, read_run_file, read_steps
from credit_trl.tasks.registry import load_task, task_of_data
from credit_trl.tasks.task import Task


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN, what replaces its parts, and the sandbox."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="run directory, whose model, data and verifier are used")
    parser.add_argument("--model", metavar="NAME", help="hub name or directory, or quickstart")
    parser.add_argument("--task", metavar="NAME", help="such as sciknoweval:chemistry, my_package.task:Task")
    parser.add_argument("--split", metavar="NAME", default="test", help="split of the task's data (default test)")
    parser.add_argument("--path", metavar="PATH", help="local data file or folder")
    parser.add_argument("--reward_funcs", metavar="NAME", action="append", help="my_module.my_reward, for the run's")
    group = parser.add_argument_group("sandbox, for tasks that run model-written programs")
    group.add_argument("--sandbox", metavar="NAME", help="auto (default), bubblewrap, landlock, unprotected, or a URL")
    group.add_argument("--allow_unsandboxed", action="store_true", help="without a sandbox, run unprotected")


def read_run(folder: str | Path) -> dict[str, Any]:
    """Content of `run.json`.

    Raises:
        FileNotFoundError: the folder is not a run directory.
    """
    path = Path(folder) / RUN_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a run directory: it has no {RUN_FILE}. Name a model by `--model`.")
    return read_run_file(folder)


def option_names() -> set[str]:
    """Names of the options of `CreditConfig` beyond those of `GRPOConfig`."""
    from trl import GRPOConfig

    from credit_trl.config import CreditConfig

    return CreditConfig.__dataclass_fields__.keys() - GRPOConfig.__dataclass_fields__.keys()


def model_of_run(folder: str | Path) -> Path:
    """Folder of the final model, or of the last checkpoint of a run that has not ended.

    Until the run has ended, a final model in the folder belongs to an earlier one.

    Raises:
        FileNotFoundError: there is neither.
    """
    from credit_trl.training.checkpoints import own_checkpoints

    folder = Path(folder)
    has_ended = any("train_runtime" in row for row in read_steps(folder / LOG_FILE))
    final = (folder, folder / "model") if has_ended else ()
    for place in (*final, *map(Path, own_checkpoints(folder)[-1:])):
        if any((place / name).is_file() for name in ("config.json", "adapter_config.json")):
            return place
    raise FileNotFoundError(f"{folder} holds neither a final model nor a checkpoint of its run. Give `--model`.")


def task_of_run(folder: str | Path, name: str | None = None, reward_funcs: Sequence[str] | None = None) -> Task:
    """The task called `name`, else that of the run with its own or the named reward functions.

    The folder may have moved, alone or with that in which the run was started.

    Raises:
        ValueError: the run does not say where its data and verifier are, or they are not found again.
    """
    if name is not None:
        return load_task(name)
    run = read_run(folder)
    data = run.get("data")
    if data is None:
        raise ValueError(f"{folder}: run.json does not describe data and verifier. Give `--task`.")
    _follow_moves(data, run["config"]["output_dir"], Path(folder).resolve())
    if reward_funcs is not None:
        data["reward_funcs"] = [
            describe_function(import_function(reward_func, "--reward_funcs")) for reward_func in reward_funcs
        ]
    return task_of_data(data)


def _follow_moves(data: dict[str, Any], output_dir: str, folder: Path) -> None:
    """Update paths of `describe_data` in the run directory, and in the folder of its start if both have moved."""
    started = Path(data["folder"])
    written = started / output_dir
    relative_parts = Path(os.path.relpath(written, started)).parts
    if folder.parts[-len(relative_parts) :] == relative_parts:
        data["folder"] = str(folder.parents[len(relative_parts) - 1])
    moves = {written: folder, started: Path(data["folder"])}
    for place in filter(None, (data["train"], data["test"])):
        path = Path(place["path"] or "")
        old = next((old_folder for old_folder in moves if path.is_relative_to(old_folder)), None)
        if old is not None:
            place["path"] = str(moves[old] / path.relative_to(old))
