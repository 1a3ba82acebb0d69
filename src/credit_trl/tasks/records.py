"""Reading a benchmark's rows: every row is checked, every row is accounted for.

A `Row` knows its file and number, so that whatever is wrong with it can be said as file, row and field. A `Tally`
counts what was kept and what was dropped and why, and fingerprints the content.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.tasks.printable import printable

if TYPE_CHECKING:
    from datasets import Dataset, Features

SUFFIXES = (".json", ".jsonl", ".parquet")
PATH_OPTIONS = "`--dataset_path` of `trl credit`, `--path` of the commands beside it"


class RowError(ValueError):
    """A malformed row, told as file, row (from 1; in JSONL the line) and field."""

    def __init__(self, source: str, row: int, field: str, problem: str) -> None:
        self.source, self.row, self.field, self.problem = source, row, field, problem
        super().__init__(printable(f"{source}, row {row}, field {field!r}: {problem}"))


@dataclass(frozen=True)
class Row:
    """One record as read, with where it came from; `fault` says what is wrong with one that could not be read."""

    source: str
    number: int
    data: Mapping[str, Any]
    fault: RowError | None = None

    def error(self, field: str, problem: str) -> RowError:
        return RowError(self.source, self.number, field, problem)

    def get(self, field: str, kind: type | tuple[type, ...]) -> Any:
        """The field's value, which must be there and of the given type.

        Raises:
            RowError: it is missing or of another type (a bool is no int), or holds text that no encoding can write.
        """
        if self.fault is not None:
            raise self.fault
        if field not in self.data:
            raise self.error(field, f"missing; the row has {', '.join(self.data) or 'no field'}")
        value = self.data[field]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(one.__name__ for one in kinds)
            raise self.error(field, f"{type(value).__name__} where {names} is needed")
        for text in _texts(value):
            try:
                text.isascii() or text.encode()
            except UnicodeEncodeError as error:
                half = text[error.start]
                raise self.error(field, f"{half!a} is half of a surrogate pair and no character") from error
        return value

    def text(self, field: str) -> str:
        """A text that is not blank.

        Raises:
            RowError: missing, not a text, or blank.
        """
        value = self.get(field, str)
        if not value.strip():
            raise self.error(field, "blank")
        return value

    def parsed(self, field: str) -> Any:
        """The value of a field that holds JSON as text.

        Raises:
            RowError: missing, not a text, or not JSON.
        """
        try:
            return json.loads(self.get(field, str))
        except (ValueError, RecursionError) as error:
            raise self.error(field, f"not JSON: {error}") from error


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value as JSON has them, however deep."""
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
    """Rows read, kept and dropped, and a hash of what was kept.

    Args:
        name: what was loaded, for the printed line.
        notes: oddities of rows that were kept all the same.
    """

    name: str
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    digest: str = ""

    def drop(self, reason: str, count: int = 1) -> None:
        if count:
            self.dropped[printable(reason)] += count

    @property
    def read(self) -> int:
        return self.kept + self.dropped.total()

    def __str__(self) -> str:
        kept = f"{self.kept} kept{_counted(self.notes)}"
        dropped = f"{self.dropped.total()} dropped{_counted(self.dropped)}"
        return f"{self.name}: {self.read} read, {kept}, {dropped}, sha256 {self.digest}"


def _counted(reasons: Counter[str]) -> str:
    listed = "; ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return f" ({listed})" if listed else ""


def accept(rows: Iterable[Any], convert: Callable[[Any], Any], tally: Tally, on_malformed: str) -> Iterator[Any]:
    """Convert rows, or records made of them; a `RowError` ends the load, or with `on_malformed="drop"` is printed and
    counted.

    `convert` returns `None` for a row that it has dropped and tallied itself.
    """
    if on_malformed not in ("raise", "drop"):
        raise ValueError(f"on_malformed is 'raise' or 'drop', got {on_malformed!r}.")
    for row in rows:
        try:
            if isinstance(row, Row) and row.fault is not None:
                raise row.fault
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
    """The finished data set, after printing the tally; `dataset.info.description` carries the same line.

    Args:
        rows: each with `prompt` (messages), `answer`, `task` and `id`, all text.
        tally: completed here with the number of rows and the hash of their content, which depends on nothing else
            (order included), so that two machines can tell whether they train on the same data.

    Raises:
        ValueError: no row is left; the message is the tally, which says where they went.
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
    """The columns of every task: `prompt` (messages), `answer`, `task`, `id`; answers may be megabytes of tests."""
    from datasets import Features, List, Value

    message = {"role": Value("string"), "content": Value("string")}
    answer, name = Value("large_string"), Value("string")
    return Features({"prompt": List(message), "answer": answer, "task": name, "id": name})


def content_hash(rows: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 over the rows' canonical JSON, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def read_rows(path: str | Path) -> Iterator[Row]:
    """The rows of a JSON list, of JSON lines (whatever the suffix says) or of a parquet file, one at a time.

    A line that is not JSON, or a row that is no object, is a `Row` with a `fault`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a suffix that is none of `.json`, `.jsonl`, `.parquet`, bytes that are not UTF-8, or no parquet.
        RowError: a list that is not JSON.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"No file {path}; pass a {', '.join(SUFFIXES)} file or a folder of such files.")
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: rows are read from {', '.join(SUFFIXES)}, not from {path.suffix or 'this'}.")
    return _objects(_parquet(path) if path.suffix == ".parquet" else _json_rows(path), str(path))


def hub_rows(repository: str, split: str, name: str | None = None, **options: Any) -> Iterator[Row]:
    """The rows of a data set on the hub, or of a local folder in the hub's layout, through `datasets`.

    Args:
        repository, split, options: as `datasets.load_dataset` takes them.
        name: what errors call the data set; by default the repository.

    Raises:
        ValueError: it cannot be loaded; the message says how to use a local copy.
    """
    from datasets import load_dataset

    name = name or repository
    try:
        rows = load_dataset(repository, split=split, **options)
    except Exception as error:
        raise ValueError(
            f"Could not load {name!r} from the hub ({type(error).__name__}: {error}). Without network, pass `path=` "
            f"({PATH_OPTIONS}): a file or folder with the same rows as JSON, JSONL or parquet."
        ) from error
    return _objects(enumerate(rows, 1), f"{name}[{split}]")


def data_files(folder: Path) -> list[Path]:
    """The data files below a folder, sorted by path."""
    return sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The members of a JSON list, or the lines of a file, with their numbers; blank lines only count."""
    try:
        # newline="\n": JSON text may hold U+2028 and friends unescaped, and lines are read as they stand
        with open(path, encoding="utf-8-sig", newline="\n") as lines:
            numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            for count, (number, line) in enumerate(numbered):
                if count == 0 and line.lstrip().startswith("["):
                    yield from enumerate(_json(line + lines.read(), str(path), number), 1)
                    return
                yield number, _json_line(line, str(path), number)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=64))
            yield from enumerate((row for batch in batches for row in batch), 1)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error


def _json(text: str, source: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(source, number, "(whole row)", f"not JSON: {error}") from error


def _json_line(text: str, source: str, number: int) -> Any:
    """The line's value, or the error that says why it has none: the lines after it are rows all the same."""
    try:
        return _json(text, source, number)
    except RowError as error:
        return error


def _objects(numbered: Iterable[tuple[int, Any]], source: str) -> Iterator[Row]:
    for number, data in numbered:
        if isinstance(data, Mapping):
            yield Row(source, number, data)
            continue
        problem = f"{type(data).__name__} where an object is needed"
        fault = data if isinstance(data, RowError) else RowError(source, number, "(whole row)", problem)
        yield Row(source, number, {}, fault)
