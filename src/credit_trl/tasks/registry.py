"""Tasks by name: `load_task("sciknoweval:chemistry")` gives a dataset builder and its verifier.

A task is two functions, `build(split, path=None, **options) -> Dataset` and
`verify(response, answer, *, truncated=False, **options) -> Verdict`, and the batch form of the second, `reward`,
which plugs straight into TRL's `reward_funcs`. Names resolve in this order:

1. the built-in tasks (`BUILT_IN`), with an option after a colon where the module declares one;
2. entry points of the group `credit_trl.tasks`, so that an installed package can add names;
3. `package.module:attribute`, anything importable.

Several names with commas between them are one mixed task, whose column `task` routes each row to its verifier.
Nothing is imported before its name is asked for.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.completions import response_text

if TYPE_CHECKING:
    from datasets import Dataset

ENTRY_POINT_GROUP = "credit_trl.tasks"

BUILT_IN = {
    "livecodebench": "credit_trl.tasks.livecodebench",
    "math": "credit_trl.tasks.math",
    "quickstart": "credit_trl.tasks.quickstart",
    "sciknoweval": "credit_trl.tasks.sciknoweval",
    "toolalpaca": "credit_trl.tasks.toolalpaca",
}

Rewards = list["Verdict | float | None"]

# What this program asked for itself. A row may name no other import path, since data is not trusted.
_asked_for: set[str] = set()


@dataclass(frozen=True)
class Task:
    """An environment: where its prompts come from and how responses to them are graded.

    Args:
        name: the registry name, which is also what `build` writes into the `task` column.
        build: `(split, path=None, **options) -> Dataset` with the columns `prompt` (messages), `answer`, `task`, `id`.
        verify: `(response, answer, *, truncated=False, **options) -> Verdict`, one response.
        reward: `(completions, answer, truncated=None, **columns) -> list[Verdict]`, a batch, for `reward_funcs`.
    """

    name: str
    build: Callable[..., Dataset]
    verify: Callable[..., Verdict]
    reward: Callable[..., Rewards]


@dataclass(frozen=True)
class TaskOption:
    """What the text after the colon of a task's name means: a module declares it as `OPTION`.

    Args:
        keyword: the keyword argument that takes the text.
        values: the texts allowed, or empty where the task itself checks.
        verify: whether the verifier takes the keyword too (the builder always does).
    """

    keyword: str
    values: tuple[str, ...] = ()
    verify: bool = False


def known_tasks() -> list[str]:
    """The names that `load_task` resolves without an import path: built in and from entry points, sorted."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def check_name(name: str) -> None:
    """Refuse what is neither a known task nor the path of one; nothing is imported.

    Raises:
        ValueError: such a name, alone or among several; the message lists what exists.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"A task is named by text, got {name!r}. Known tasks: {', '.join(known_tasks())}.")
    for one in map(str.strip, name.split(",")):
        head, _, tail = one.partition(":")
        if one and head not in known_tasks() and (head.startswith(".") or ("." not in head and not tail)):
            raise _unknown(one)


def load_task(name: str) -> Task:
    """Resolve `"sciknoweval:chemistry"`, `"toolalpaca"`, `"my_package.my_task:MyTask"`, or several, to a `Task`.

    Of several (`"sciknoweval:physics,toolalpaca"`) `build` hands each its own part of `path`, the subfolder with the
    task's name (`sciknoweval`, `toolalpaca`) where there is one and `path` itself elsewhere, and `verify` takes the
    row's `task` too.

    Raises:
        ValueError: no such name, or an option that the task does not know; the message lists what exists.
        TypeError: the object found offers no `build` and `verify`.
    """
    check_name(name)
    if "," in name:
        return _mixture(name)
    _asked_for.add(name)
    return _load(name)


def _load(name: str) -> Task:
    head, colon, tail = name.partition(":")
    if head in BUILT_IN:
        return as_task(_import(BUILT_IN[head], name), name, tail if colon else None)
    points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == head]
    if points:
        return as_task(_load_entry_point(points, name), name, tail if colon else None)
    found = _import(head, name)
    for attribute in filter(None, tail.split(".")):
        if not hasattr(found, attribute):
            raise ValueError(f"Task {name!r}: {head} has no attribute {tail!r}.")
        found = getattr(found, attribute)
    return as_task(found, name, None)


def as_task(found: Any, name: str, option: str | None = None) -> Task:
    """Make a `Task` of what a name resolved to: a `Task`, a class, or anything with `build` and `verify`.

    Raises:
        TypeError: neither a `Task` nor an object with `build` and `verify`.
        ValueError: `option` given where the task takes none, or not among its values.
    """
    if inspect.isclass(found):
        found = found()
    declared: TaskOption | None = getattr(found, "OPTION", None)
    build_options, verify_options = _options(declared, name, option)
    if isinstance(found, Task):
        return found
    for part in ("build", "verify"):
        if not callable(getattr(found, part, None)):
            raise TypeError(f"Task {name!r}: {found!r} has no function `{part}`; a task offers `build` and `verify`.")
    verify = _with_options(found.verify, verify_options, name)
    batch = getattr(found, "reward", None)
    reward = batch_of(verify, name) if batch is None else _with_options(batch, verify_options, name)
    build = _with_columns(_with_options(found.build, build_options, name), name)
    return Task(name=name, build=build, verify=verify, reward=reward)


def batch_of(verify: Callable[..., Verdict], name: str = "reward") -> Callable[..., list[Verdict]]:
    """The batch form of a verifier that takes one response and its answer.

    The function returned takes TRL's arguments: `completions` (texts, or lists of messages of which the last
    assistant turn counts), the dataset column `answer`, and `truncated` (one flag a completion, or `None`). Its name
    is `name`, under which TRL logs it.
    """

    def reward(
        completions: Sequence[Any], answer: Sequence[Any], truncated: Sequence[bool] | None = None, **columns: Any
    ) -> list[Verdict]:
        flags = [False] * len(completions) if truncated is None else truncated
        return [
            verify(response_text(completion), gold, truncated=bool(flag))
            for completion, gold, flag in zip(completions, answer, flags, strict=True)
        ]

    reward.__name__ = name
    return reward


def mixed_reward(
    completions: Sequence[Any], task: Sequence[str], truncated: Sequence[bool] | None = None, **columns: Any
) -> Rewards:
    """Grade a batch of several environments: the column `task` routes each row to its verifier.

    Each task sees its own rows in one call, with every column cut to them, so that a task that runs programs still
    runs them as one batch. Verdicts come back in the order of `completions`. A reward function may be asynchronous.

    Raises:
        ValueError: a row without a task, or with a name that is neither known (`known_tasks`) nor one that this
            program has given to `load_task` or `mix_datasets`. Names in data import nothing.
    """
    return _routed(_of_a_row, completions, task, truncated, columns)


def _routed(
    find: Callable[[str], Task],
    completions: Sequence[Any],
    task: Sequence[str],
    truncated: Sequence[bool] | None,
    columns: dict[str, Any],
) -> Rewards:
    """Verdicts of rows that are graded by several tasks, each found by its name."""
    count = len(completions)
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(task):
        rows_of.setdefault(name, []).append(row)
    verdicts: Rewards = [None] * count
    columns |= {"completions": completions, "task": task, "truncated": truncated}
    for name, rows in rows_of.items():
        own_columns = {key: _rows(value, rows, count) for key, value in columns.items()}
        graded = call_reward(find(name).reward, **own_columns)
        for row, verdict in zip(rows, graded, strict=True):
            verdicts[row] = verdict
    return verdicts


def call_reward(reward: Callable[..., Any], **arguments: Any) -> Rewards:
    """What a reward function says of a batch; a coroutine is waited for.

    That is done in a thread of its own, since a notebook's has a running loop.
    """
    graded = reward(**arguments)
    if not inspect.iscoroutine(graded):
        return graded
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, graded).result()


@functools.lru_cache(maxsize=64)  # a task that is a class is made once, not once a batch
def _of_a_row(name: str) -> Task:
    check_name(name)
    if name not in _asked_for and name.partition(":")[0] not in known_tasks():
        raise ValueError(
            f"A row names the task {name!r}, which is not one of {', '.join(known_tasks())}. A name in data does not "
            f"import a module: where this task is yours, call `load_task({name!r})` first."
        )
    return _load(name)


def mix_datasets(parts: Mapping[str, Dataset] | Sequence[Dataset]) -> Dataset:
    """One data set of several tasks' rows, for a run that `mixed_reward` grades.

    Only the columns that every task has are kept (`prompt`, `answer`, `task`, and `id` where all have it); rows keep
    their order, part after part, since the trainer shuffles.

    Args:
        parts: data sets with a `task` column, or data sets by task name, which then becomes their `task` column.
    """
    from datasets import concatenate_datasets

    from credit_trl.tasks.records import row_features

    if isinstance(parts, Mapping):
        _asked_for.update(parts)
        parts = [_named(part, name) for name, part in parts.items()]
    features = row_features()
    if not all("id" in part.column_names for part in parts):
        del features["id"]
    return concatenate_datasets([part.select_columns(list(features)).cast(features) for part in parts])


def _named(part: Dataset, name: str) -> Dataset:
    rest = part.remove_columns("task") if "task" in part.column_names else part
    return rest.add_column("task", [name] * len(rest))


def _mixture(name: str) -> Task:
    parts = {one.strip(): load_task(one.strip()) for one in name.split(",")}

    def build(split: str, path: str | Path | None = None, **options: Any) -> Dataset:
        paths = {one: None if path is None else _own_path(Path(path), one) for one in parts}
        return mix_datasets({one: part.build(split, paths[one], **options) for one, part in parts.items()})

    def part_of(task: str) -> Task:
        if task not in parts:
            raise ValueError(f"{task!r} is no part of the mixed task {name!r}.")
        return parts[task]

    def verify(response: str, answer: Any, *, task: str, truncated: bool = False, **options: Any) -> Verdict:
        return part_of(task).verify(response, answer, truncated=truncated, **options)

    def reward(
        completions: Sequence[Any], task: Sequence[str], truncated: Sequence[bool] | None = None, **columns: Any
    ) -> Rewards:
        return _routed(part_of, completions, task, truncated, columns)

    return Task(name=name, build=build, verify=verify, reward=_with_options(reward, {}, name))


def _own_path(path: Path, name: str) -> Path:
    own = path / name.partition(":")[0]
    return own if own.is_dir() else path


def _rows(value: Any, rows: Sequence[int], count: int) -> Any:
    """The given rows of a column; what is not a column of the batch passes through whole."""
    is_column = isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) == count
    return [value[row] for row in rows] if is_column else value


def _options(declared: TaskOption | None, name: str, option: str | None) -> tuple[dict[str, str], dict[str, str]]:
    if option is None:
        return {}, {}
    if declared is None:
        raise ValueError(f"Task {name!r}: {name.partition(':')[0]!r} takes no option after the colon.")
    if declared.values and option not in declared.values:
        allowed = ", ".join(f"{name.partition(':')[0]}:{value}" for value in declared.values)
        raise ValueError(f"Task {name!r}: {option!r} is no {declared.keyword}. Use one of {allowed}.")
    chosen = {declared.keyword: option}
    return chosen, chosen if declared.verify else {}


def _with_columns(build: Callable[..., Dataset], name: str) -> Callable[..., Dataset]:
    """`build`, whose rows have what every reader of a task's rows reads."""

    @functools.wraps(build)
    def checked(*args: Any, **kwargs: Any) -> Dataset:
        dataset = build(*args, **kwargs)
        columns = getattr(dataset, "column_names", None) or ["prompt", "answer"]
        if missing := [column for column in ("prompt", "answer") if column not in columns]:
            raise ValueError(
                f"Task {name!r}: `build` gives no column {', '.join(f'`{m}`' for m in missing)}; its columns are "
                f"{', '.join(columns)}. Rename one, dataset.rename_column('question', '{missing[0]}'), or add it."
            )
        return dataset

    return checked


def _with_options(function: Callable[..., Any], options: dict[str, str], name: str) -> Callable[..., Any]:
    """`function` with keyword arguments fixed, under the task's name, since TRL logs a reward by its `__name__`."""

    def configured(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**options, **kwargs})

    async def configured_coroutine(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **{**options, **kwargs})

    configured = configured_coroutine if inspect.iscoroutinefunction(function) else configured
    configured.__name__ = name
    configured.__doc__ = function.__doc__
    configured.__wrapped__ = function
    return configured


def _import(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            raise  # the task exists and something that it imports is missing: its own message says more
        raise _unknown(name) from error


def _load_entry_point(points: Sequence[EntryPoint], name: str) -> Any:
    if len({point.value for point in points}) > 1:
        origins = ", ".join(f"{point.value} ({point.dist.name if point.dist else '?'})" for point in points)
        raise ValueError(f"Task {name!r} is offered by several packages: {origins}. Uninstall all but one.")
    return points[0].load()


def _unknown(name: str) -> ValueError:
    close = difflib.get_close_matches(name.partition(":")[0], known_tasks(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ValueError(
        f"Unknown task {name!r}.{hint} Known tasks: {', '.join(known_tasks())}; or name your own as "
        f"`package.module:attribute`, or add an entry point in the group `{ENTRY_POINT_GROUP}`."
    )
