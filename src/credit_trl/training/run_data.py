"""Description of a run's data and verifier for `run.json`, from which `credit_trl.tasks.registry` finds them again."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datasets import Dataset, are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from credit_trl.training.run_directory import ROWS_FOLDER

MAX_STORED_BYTES = 10**9


def describe_data(
    reward_funcs: Sequence[Any] | Any, reward_weights: Sequence[float] | None = None, **places: Any
) -> dict[str, Any]:
    """Field `data` of `run.json`: how the rows and reward functions of a run are found again.

    Args:
        reward_funcs: one reward function or several, as for `GRPOTrainer`; besides the verifier of `task`.
        reward_weights: their weights, by default 1.
        **places: `task`, a name for `load_task`; `train` and `test`, `describe_rows` of the training and of the
            held-out rows, None for `Dataset` objects, which `store_rows` writes; `train_split`, the split that means
            the training rows.
    """
    functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    return {
        **{"task": None, "train": None, "test": None, "train_split": "train", **places},
        "reward_funcs": [describe_function(one) for one in functions],
        "reward_weights": None if reward_weights is None else list(reward_weights),
        "folder": os.getcwd(),
        "versions": {name: version(name) for name in ("credit-trl", "trl", "datasets")},
    }


def describe_rows(
    path: str | Path | None = None, *, name: str | None = None, streaming: bool = False, **hub: str | None
) -> dict[str, Any]:
    """Place of rows: a local file or folder (with the hash of a file), or `name`, `config` and `split` of the hub."""
    if name is not None and Path(name).is_dir():  # a folder in the hub's form
        name = str(Path(name).resolve())
    place = {"path": None, "sha256": None, "name": name, "config": None, "split": None, "streaming": streaming, **hub}
    if path is not None:
        file = Path(path).resolve()
        place["path"] = str(file)
        if file.is_file():
            with file.open("rb") as content:
                place["sha256"] = hashlib.file_digest(content, "sha256").hexdigest()
    return place


def store_rows(folder: Path, data: dict[str, Any], rows: Mapping[str, Any]) -> None:
    """Write `Dataset` objects that neither task, path nor hub name describes as Parquet into a run directory.

    The `train` and `test` of `data`, the field of `run.json`, are set to the files of the `rows` of these names.
    Streams, and those above `MAX_STORED_BYTES`, are not written.
    """
    for name, dataset in rows.items():
        is_stored = isinstance(dataset, Dataset) and dataset.data.nbytes <= MAX_STORED_BYTES
        if data["task"] is None and data[name] is None and is_stored:
            path = folder / ROWS_FOLDER / f"{name}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            shows_bars = not are_progress_bars_disabled()
            disable_progress_bars()
            dataset.to_parquet(path)
            if shows_bars:
                enable_progress_bars()
            data[name] = describe_rows(path)


def describe_function(function: Any) -> dict[str, Any]:
    """Import name and file of a reward function; the name is None where no import finds it."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    is_found = module not in (None, "__main__") and name is not None and "<" not in name
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    called = name or type(function).__name__
    return {"name": f"{module}:{name}" if is_found else None, "called": called, "file": file}
