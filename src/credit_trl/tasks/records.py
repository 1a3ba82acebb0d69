"""Rows of local files and hub data sets, read by `datasets`, and the data set of a task."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.sandbox.protocol import printable

if TYPE_CHECKING:
    from datasets import Dataset

LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # of `datasets`, by suffix
PATH_OPTIONS = "`--dataset_path` of `trl credit`, `--path` of its companion commands"


class Row(dict[str, Any]):
    """Fields of a record, with its file or data set and its number there, from 1."""

    def __init__(self, data: Mapping[str, Any], source: str, number: int) -> None:
        super().__init__(data)
        self.source = source
        self.number = number

    def error(self, field: str, problem: str) -> ValueError:
        text = f"{self.source}, row {self.number}, field {field!r}: {problem}"
        return ValueError(printable(text))

    def text(self, field: str) -> str:
        """Text of a field; a `ValueError` with file, row and field if it is missing, no text, or blank."""
        value = self.get(field)
        if not isinstance(value, str) or not value.strip():
            raise self.error(field, f"expected a text that is not blank, got {value!r:.100}")
        return value

    def object(self, field: str) -> dict[str, Any]:
        """Object of a field; a `ValueError` with file, row and field if it is none."""
        value = self.get(field)
        if not isinstance(value, dict):
            raise self.error(field, f"expected an object, got {value!r:.100}")
        return value

    def integer(self, field: str) -> int:
        """Integer of a field; a `ValueError` with file, row and field if it is none."""
        value = self.get(field)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(field, f"expected an integer, got {value!r:.100}")
        return value

    def texts(self, field: str, value: Any) -> list[str]:
        """A value of a field as a list of texts; a `ValueError` with file, row and field if it is none."""
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.error(field, f"expected a list of texts, got {value!r:.100}")
        return value


def read_rows(task: str, split: str, path: str | Path | None, hub: str, names: Sequence[str] = ()) -> Iterator[Row]:
    """Rows of a file, of a folder's file for the split (`<split>.*` or its shards), or without a path of the hub.

    `names` are stems of the files to read in a folder, instead of the split. If the folder has a subfolder with the
    name of the task, that is read.
    """
    if path is None:
        yield from hub_rows(hub, hub, split=split)
        return
    path = Path(path)
    paths = [path]
    if path.is_dir():
        folder = path / task if (path / task).is_dir() else path
        files = sorted(file for file in folder.rglob("*") if file.suffix in LOADERS and file.is_file())
        stems = "|".join(map(re.escape, names or [split]))
        shard = re.compile(rf"(?:{stems})(?:-\d{{5}}-of-\d{{5}})?")
        paths = [file for file in files if shard.fullmatch(file.stem)]
        if not paths or len({file.parent for file in paths}) > 1:
            listed = ", ".join(printable(file.relative_to(folder).as_posix()) for file in files) or "no data file"
            raise FileNotFoundError(
                f"{folder} has {len(paths)} files named {' or '.join(names or [split])} ({', '.join(LOADERS)}); it "
                f"holds {listed}. Pass one file, or a folder with one file or its shards ({PATH_OPTIONS})."
            )
    for file in paths:
        for number, data in enumerate(read_dataset(file, "path"), 1):
            yield Row(data, str(file), number)


def hub_rows(source: str, builder: str, **options: Any) -> Iterator[Row]:
    """Rows of the hub by the arguments of `datasets.load_dataset`; `source` is their name in messages."""
    remedy = f". Without network, pass `path=` ({PATH_OPTIONS}): a file or folder with the same rows."
    rows = _load(repr(source), remedy, builder, **options)
    return (Row(data, source, number) for number, data in enumerate(rows, 1))


def read_dataset(path: str | Path, option: str, streaming: bool = False) -> Dataset:
    """Rows of a local file; errors name the option that gave the path."""
    loader = LOADERS.get(Path(path).suffix)
    if loader is None or not Path(path).is_file():
        problem = "no such file. Check" if loader else f"expected one of {', '.join(LOADERS)}. Change"
        raise ValueError(f"`{option} {path}`: {problem} the path.")
    return _load(
        f"`{option} {path}`", ". Correct the file.", loader, data_files=[str(path)], split="train", streaming=streaming
    )


def _load(source: str, remedy: str, builder: str, **options: Any) -> Dataset:
    from datasets import load_dataset

    try:
        return load_dataset(builder, **options)
    except Exception as error:  # also a StopIteration, for an empty file
        problem = printable(str(error.__cause__ or error)) or "it is empty"
        lines = [f"{line}: " for file in options.get("data_files", ()) if (line := _bad_line(Path(file)))]
        raise ValueError(f"{source} cannot be read: {''.join(lines)}{problem}{remedy}") from error


def _bad_line(path: Path) -> str | None:
    """`line 5`, the first of a JSON Lines file that is no JSON object; None of another file."""
    if path.suffix == ".jsonl" and path.is_file():
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                if line.strip() and not isinstance(json.loads(line), dict):
                    return f"line {number}"
            except ValueError:
                return f"line {number}"
    return None


def dataset_of(rows: Iterable[Mapping[str, Any]], name: str) -> Dataset:
    """The data set of a task's rows; prints their number and raises where there are none."""
    from datasets import Dataset, Features, List, Value

    rows = list(rows)
    if not rows:
        raise ValueError(f"{name}: no rows left.")
    print(f"{name}: {len(rows)} rows", file=sys.stderr)
    message = {"role": Value("string"), "content": Value("string")}
    features = {"prompt": List(message), "answer": Value("large_string")}  # megabytes of tests
    features |= {"task": Value("string"), "id": Value("string")}
    return Dataset.from_list(rows, features=Features(features))
