"""Reading and checking of benchmark rows.

A `Row` knows its file and number, so errors name file, row and field. A `Tally` counts kept and dropped rows, with
reasons, and fingerprints the content.

Parquet files and hub data sets are read by `datasets`. JSON is read line by line with the standard library: the JSON
loader of `datasets` fails for a whole file at one malformed line, and its column types change values (`"1e-05"` beside
`2` becomes a number, `"2020-01-01"` a date).
"""

from __future__ import annotations

import glob
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.tasks.printable import printable

if TYPE_CHECKING:
    from datasets import Dataset, Features

# Tasks that read files, each from the subfolder with its name where there is one.
FOLDERS = ("livecodebench", "math", "sciknoweval", "toolalpaca")
SUFFIXES = (".json", ".jsonl", ".parquet")
PATH_OPTIONS = "`--dataset_path` of `trl credit`, `--path` of its companion commands"
WHOLE_ROW = "(whole row)"


class RowError(ValueError):
    """Malformed row, with its file, its number (from 1; the line number in JSON lines) and the field."""

    def __init__(self, source: str, row: int, field: str, problem: str) -> None:
        self.source, self.row, self.field, self.problem = source, row, field, problem
        super().__init__(printable(f"{source}, row {row}, field {field!r}: {problem}"))


@dataclass(frozen=True)
class Row:
    """One record of a file or data set, with its number there, from 1.

    `content` has its fields, or the error of a row that is not a JSON object. In the shards of a data set the numbers
    continue: `before` is the last number of the shards before this one.
    """

    source: str
    number: int
    content: Mapping[str, Any] | RowError
    before: int = 0

    @property
    def data(self) -> Mapping[str, Any]:
        """Fields of the record; raises the `RowError` of a row that is not a JSON object."""
        if isinstance(self.content, RowError):
            raise self.content
        return self.content

    def error(self, field: str, problem: str) -> RowError:
        return RowError(self.source, self.number - self.before, field, problem)

    def get(self, field: str, kind: type | tuple[type, ...]) -> Any:
        """Value of a field, checked for presence, type (bool is no int) and lone surrogates, which no file holds."""
        if field not in self.data:
            raise self.error(field, f"missing; the row has {', '.join(self.data) or 'no field'}")
        value = self.data[field]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(one.__name__ for one in kinds)
            raise self.error(field, f"expected {names}, got {type(value).__name__}")
        for text in _strings_in(value):
            try:
                text.isascii() or text.encode()
            except UnicodeEncodeError as error:
                raise self.error(field, f"contains the lone surrogate {text[error.start]!a}") from error
        return value

    def text(self, field: str) -> str:
        """Text of a field; raises `RowError` if it is missing, not a text, or blank."""
        value = self.get(field, str)
        if not value.strip():
            raise self.error(field, "blank")
        return value

    def parsed(self, field: str) -> Any:
        """Value of a field that holds JSON text; raises `RowError` if it does not."""
        try:
            return json.loads(self.get(field, str))
        except (ValueError, RecursionError) as error:
            raise self.error(field, f"not JSON: {error}") from error


def _strings_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, at any depth."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            pending += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            pending += one


@dataclass
class Tally:
    """Counts of kept and dropped rows and of peculiarities of kept ones (`notes`), and a hash of the kept ones."""

    name: str
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    digest: str = ""

    def drop(self, reason: str, count: int = 1) -> None:
        if count:
            self.dropped[printable(reason)] += count

    def __str__(self) -> str:
        dropped = self.dropped.total()
        return (
            f"{self.name}: {self.kept + dropped} read, {self.kept} kept{_with_reasons(self.notes)}, "
            f"{dropped} dropped{_with_reasons(self.dropped)}, sha256 {self.digest}"
        )


def _with_reasons(reasons: Counter[str]) -> str:
    listed = "; ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return f" ({listed})" if listed else ""


def accept(rows: Iterable[Any], convert: Callable[[Any], Any], tally: Tally, on_malformed: str) -> Iterator[Any]:
    """Convert rows, or records made from them. Malformed ones raise their `RowError` or, with `"drop"`, are printed.

    `convert` returns `None` for a row that it has dropped and tallied itself.
    """
    if on_malformed not in ("raise", "drop"):
        raise ValueError(f"on_malformed must be 'raise' or 'drop', got {on_malformed!r}.")
    for row in rows:
        try:
            converted = convert(row)
        except RowError as error:
            if on_malformed == "raise":
                raise
            print(f"dropped: {error}", file=sys.stderr)
            tally.drop(f"malformed in {error.field!r}")
            continue
        if converted is not None:
            yield converted


def dataset_of(rows: Sequence[Mapping[str, Any]], tally: Tally) -> Dataset:
    """Build the data set of rows with the columns of `row_features`, and print the tally.

    The tally receives the number of rows and their hash, and `dataset.info.description` contains it too.
    """
    from datasets import Dataset

    tally.kept, tally.digest = len(rows), content_hash(rows)
    if not rows:
        raise ValueError(f"No rows left. {tally}")
    print(tally, file=sys.stderr)
    dataset = Dataset.from_list(list(rows), features=row_features())
    dataset.info.description = str(tally)
    return dataset


def row_features() -> Features:
    """Columns of every task: `prompt` (messages), `answer` (up to megabytes of tests), `task`, `id`."""
    from datasets import Features, List, Value

    message = {"role": Value("string"), "content": Value("string")}
    answer, name = Value("large_string"), Value("string")
    return Features({"prompt": List(message), "answer": answer, "task": name, "id": name})


def content_hash(rows: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 of the rows' canonical JSON, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def data_files(folder: Path, task: str = "") -> list[Path]:
    """Data files below a folder, sorted by path; with `task`, those of its subfolders for other tasks are skipped."""
    others = [folder / name for name in FOLDERS if task and name != task]
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    return [file for file in files if not any(map(file.is_relative_to, others))]


def task_folder(folder: Path, task: str) -> Path:
    """The subfolder with the name of the task if there is one, else the folder itself."""
    return own if (own := folder / task).is_dir() else folder


def read_rows(path: str | Path | Sequence[Path]) -> Iterator[Row]:
    """Rows of a JSON list, of JSON lines (whatever the suffix) or of a parquet file, read as they are consumed.

    Several paths are the shards of one data set, whose row numbers continue; errors have the number in the shard. A
    line that is not JSON, or a value that is not an object, yields a `Row` whose `data` raises.
    """
    if not isinstance(path, str | Path):
        return _shard_rows(path)
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"No file {path}; pass a {', '.join(SUFFIXES)} file or a folder of such files.")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: rows are read from {', '.join(SUFFIXES)}, not from {path.suffix or 'this'}.")
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)


def hub_rows(repository: str, split: str, name: str | None = None, **options: Any) -> Iterator[Row]:
    """Rows of a hub data set or of a local copy, by the arguments of `load_dataset`; `name` is that of messages."""
    from datasets import load_dataset

    name = name or repository
    try:
        rows = load_dataset(repository, split=split, **options)
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {error}")
        raise ValueError(
            f"Could not load {name!r} from the hub ({reason}). Without network, pass `path=` ({PATH_OPTIONS}): a "
            "file or folder with the same rows as JSON, JSONL or parquet."
        ) from error
    return (_row(f"{name}[{split}]", number, data) for number, data in enumerate(rows, 1))


def _shard_rows(paths: Sequence[Path]) -> Iterator[Row]:
    before = last = 0
    for path in paths:
        before = last
        for row in read_rows(path):
            last = before + row.number
            yield replace(row, number=last, before=before)


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    from datasets import load_dataset

    try:  # streaming, since the cache of `datasets` would be a copy of the file
        rows = load_dataset("parquet", data_files=glob.escape(str(path)), split="train", streaming=True)
        yield from (_row(str(path), number, data) for number, data in enumerate(rows, 1))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(printable(f"{path} cannot be read as parquet: {error}")) from error


def _json_rows(path: Path) -> Iterator[Row]:
    """Members of a JSON list, or lines of a file; blank lines count in the numbers only."""
    source, is_first = str(path), True
    try:
        # newline="\n": JSON strings may contain other line separators, such as U+2028
        with open(path, encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                if is_first and line.lstrip().startswith("["):
                    members = _load_json(line + lines.read(), source, number)
                    yield from (_row(source, place, data) for place, data in enumerate(members, 1))
                    return
                is_first = False
                try:
                    yield _row(source, number, _load_json(line, source, number))
                except RowError as error:
                    yield Row(source, number, error)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _load_json(text: str, source: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(source, number, WHOLE_ROW, f"not JSON: {error}") from error


def _row(source: str, number: int, data: Any) -> Row:
    problem = f"expected an object, got {type(data).__name__}"
    return Row(source, number, data if isinstance(data, Mapping) else RowError(source, number, WHOLE_ROW, problem))
