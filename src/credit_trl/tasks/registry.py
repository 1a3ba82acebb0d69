"""Task registry: `load_task("sciknoweval:chemistry")` returns a `Task`, a dataset builder with its verifier.

A name is a built-in task (`BUILT_IN`), with an option after a colon where its module declares one; an entry point of
the group `credit_trl.tasks`; or a module or `package.module:name`. Several names with commas form a mixed task, whose
column `task` routes each row to its verifier. A module is imported when its name is loaded.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.task import Rewards, Task, TaskOption, batch_of, call_reward

if TYPE_CHECKING:
    from datasets import Dataset

ENTRY_POINT_GROUP = __package__  # "credit_trl.tasks"
BUILT_IN = {
    name: f"credit_trl.tasks.{name}" for name in ("livecodebench", "math", "quickstart", "sciknoweval", "toolalpaca")
}

# Names that this process has loaded. Data is not trusted, so a row may name no other import path.
_loaded_names: set[str] = set()


def known_tasks() -> list[str]:
    """Sorted names that need no import path: built-in tasks and entry points."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def check_name(name: str) -> None:
    """Check the form of a task name, or of several with commas between them, without importing anything."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"A task name must be a text, got {name!r}. Known tasks: {', '.join(known_tasks())}.")
    for one in map(str.strip, name.split(",")):
        head, _, tail = one.partition(":")
        if one and head not in known_tasks() and (head.startswith(".") or ("." not in head and not tail)):
            raise _unknown_task(one)


def load_task(name: str | Task) -> Task:
    """Resolve `"sciknoweval:chemistry"`, `"toolalpaca"` or `"my_package.my_task:MyTask"` to a `Task`.

    Several names (`"sciknoweval:physics,toolalpaca"`) give a mixed task. Its `build` passes each part the subfolder of
    `path` with the part's name (`sciknoweval`, `toolalpaca`) where there is one, else `path`; its `verify` needs the
    row's `task` as a keyword. A `Task` is returned as it is.

    Raises:
        ValueError: unknown name or option; the message lists the known ones.
        TypeError: the object has no `build` and `verify`.
    """
    if isinstance(name, Task):
        return name
    check_name(name)
    if "," in name:
        return _mixture(name)
    _loaded_names.add(name)
    return _load(name)


def _load(name: str) -> Task:
    head, colon, tail = name.partition(":")
    option = tail if colon else None
    if head in BUILT_IN:
        return as_task(importlib.import_module(BUILT_IN[head]), name, option)
    points = {point.value: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == head}
    if len(points) > 1:
        raise ValueError(f"Several packages define the task {name!r}: {', '.join(points)}. Uninstall all but one.")
    if points:
        return as_task(next(iter(points.values())).load(), name, option)
    found = import_named(head, _unknown_task(name))
    for attribute in filter(None, tail.split(".")):
        if not hasattr(found, attribute):
            raise ValueError(f"Task {name!r}: {head} has no attribute {tail!r}.")
        found = getattr(found, attribute)
    return as_task(found, name)


def as_task(found: Any, name: str, option: str | None = None) -> Task:
    """Make a `Task` of a `Task`, a class, a module, or any object with `build` and `verify`."""
    if inspect.isclass(found):
        found = found()
    options = _options(getattr(found, "OPTION", None), name, option)
    if isinstance(found, Task):
        return found
    for part in ("build", "verify"):
        if not callable(getattr(found, part, None)):
            what = f"the {type(found).__name__} `{getattr(found, '__name__', None) or type(found).__name__}`"
            raise TypeError(
                f"Task {name!r}: {what} has no function `{part}`. A task needs `build` and `verify`; a function "
                "alone is given by `--reward_funcs`, or with its data set to `Task.from_dataset`."
            )
    batch = getattr(found, "reward", None)
    reward = batch_of(found.verify, name) if batch is None else _renamed(batch, name)
    return Task(name=name, build=_checked(found.build, options, name), verify=found.verify, reward=reward)


def mixed_reward(
    completions: Sequence[Any], task: Sequence[str], truncated: Sequence[bool] | None = None, **columns: Any
) -> Rewards:
    """Grade a batch of several tasks, in order: the column `task` routes each row to its verifier.

    Each task grades its rows in one call, with every column reduced to them. A reward function may be asynchronous.

    Raises:
        ValueError: a row has no task, or a name that is neither known (`known_tasks`) nor passed to `load_task` or
            `mix_datasets` before.
    """
    return _route(_task_of_row, {"completions": completions, "task": task, "truncated": truncated, **columns})


def _route(find: Callable[[str], Task], columns: Mapping[str, Any]) -> Rewards:
    """Grade the rows of several tasks; `find` returns the task of a name."""
    count = len(columns["completions"])
    rows_of: dict[str, list[int]] = {}
    for row, name in enumerate(columns["task"]):
        rows_of.setdefault(name, []).append(row)
    verdicts: Rewards = [None] * count
    for name, rows in rows_of.items():
        graded = call_reward(find(name).reward, **{key: _select(value, rows, count) for key, value in columns.items()})
        for row, verdict in zip(rows, graded, strict=True):
            verdicts[row] = verdict
    return verdicts


@functools.lru_cache(maxsize=64)  # a task that is a class is instantiated once, not once per batch
def _task_of_row(name: str) -> Task:
    check_name(name)
    if name not in _loaded_names and name.partition(":")[0] not in known_tasks():
        raise ValueError(
            f"A row names the task {name!r}, which is not one of {', '.join(known_tasks())}. A name in data does not "
            f"import a module: if the task is yours, call `load_task({name!r})` first."
        )
    return _load(name)


def mix_datasets(parts: Mapping[str, Dataset] | Sequence[Dataset]) -> Dataset:
    """Join data sets of several tasks, for a run with `mixed_reward`.

    Rows of the parts take turns until each part is used up, so that the first rows are of all tasks. Keeps the columns
    that every task has (`prompt`, `answer`, `task`, and `id` if all parts have it), and `privileged_context` if any
    part has it, `None` in the others.

    Args:
        parts: data sets with a `task` column, or data sets by task name, which then fills their `task` column.

    Raises:
        ValueError: a part lacks a column, or has prompts that are not messages of role and content, or an answer or a
            `privileged_context` that is not text. A cast of the answer `5` to "5" would make its verifier reject it.
    """
    from datasets import Value, interleave_datasets

    from credit_trl.tasks.records import row_features

    if isinstance(parts, Mapping):
        _loaded_names.update(parts)
        parts = [
            part.remove_columns([c for c in part.column_names if c == "task"]).add_column("task", [name] * len(part))
            for name, part in parts.items()
        ]
    features = row_features()
    for place, part in enumerate(parts):
        _check_part(part, place)
    if not all("id" in part.column_names for part in parts):
        del features["id"]
    context = "privileged_context"
    if any(context in part.column_names for part in parts):
        features[context] = Value("large_string")
        parts = [
            part if context in part.column_names else part.add_column(context, [None] * len(part)) for part in parts
        ]
    parts = [part.select_columns(list(features)).cast(features) for part in parts]
    return interleave_datasets(parts, stopping_strategy="all_exhausted_without_replacement")


def _check_part(part: Dataset, place: int) -> None:
    """Raise where a part of a mixture lacks a column, or a column has another type than mixtures have."""
    from datasets import Value

    texts = (Value("string"), Value("large_string"))
    message = getattr(part.features.get("prompt"), "feature", None)
    is_messages = isinstance(message, Mapping) and message.keys() == {"role", "content"}
    are_right = {
        "prompt": is_messages and all(kind in texts for kind in message.values()),
        "answer": part.features.get("answer") in texts,
        "task": part.features.get("task") in texts,
        "privileged_context": part.features.get("privileged_context", Value("null")) in (*texts, Value("null")),
    }
    for column, is_right in are_right.items():
        if not is_right:
            found = part.features.get(column, f"missing among {', '.join(part.features)}")
            raise ValueError(
                f"The column `{column}` of parts[{place}] is {found}. Mixed tasks have prompts that are lists "
                "of messages with the texts `role` and `content` alone, and texts in `answer` (for example by "
                "`json.dumps`), `task` and `privileged_context`."
            )


def _mixture(name: str) -> Task:
    parts = {one.strip(): load_task(one.strip()) for one in name.split(",")}

    def build(split: str, path: str | Path | None = None, **options: Any) -> Dataset:
        paths = dict.fromkeys(parts, path)
        for one in parts if path is not None else ():
            if (folder := Path(path, one.partition(":")[0])).is_dir():
                paths[one] = folder
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
        return _route(part_of, {"completions": completions, "task": task, "truncated": truncated, **columns})

    return Task(name=name, build=build, verify=verify, reward=_renamed(reward, name))


def _select(value: Any, rows: Sequence[int], count: int) -> Any:
    """The given rows of a column; values that are not a column of the batch are returned unchanged."""
    is_column = isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(value) == count
    return [value[row] for row in rows] if is_column else value


def _options(declared: TaskOption | None, name: str, option: str | None) -> dict[str, str]:
    """Keyword arguments of `build` that the option sets."""
    if option is None:
        return {}
    head = name.partition(":")[0]
    if declared is None:
        raise ValueError(f"Task {name!r}: {head!r} takes no option after the colon.")
    declared.check(option, head)
    return {declared.keyword: option}


def _checked(build: Callable[..., Dataset], options: Mapping[str, str], name: str) -> Callable[..., Dataset]:
    """`build` with the options of the name and a check for the columns `prompt` and `answer`."""

    @functools.wraps(build)
    def checked(*args: Any, **kwargs: Any) -> Dataset:
        dataset = build(*args, **{**options, **kwargs})
        columns = getattr(dataset, "column_names", None) or ["prompt", "answer"]
        if missing := [column for column in ("prompt", "answer") if column not in columns]:
            raise ValueError(
                f"Task {name!r}: `build` gives no column {', '.join(f'`{m}`' for m in missing)}; its columns are "
                f"{', '.join(columns)}. Rename one, dataset.rename_column('question', '{missing[0]}'), or add it."
            )
        return dataset

    return checked


def _renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function` with the task's name as `__name__`, under which TRL logs rewards."""

    def named(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    async def named_coroutine(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    wrapper = named_coroutine if inspect.iscoroutinefunction(function) else named
    functools.update_wrapper(wrapper, function).__name__ = name
    return wrapper


def import_named(module: str, missing: ValueError) -> Any:
    """Import a module that the user names, or raise `missing` if it does not exist."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and one that it imports is missing
        raise missing from error


def _unknown_task(name: str) -> ValueError:
    close = difflib.get_close_matches(name.partition(":")[0], known_tasks(), n=1)
    suggestion = f" Did you mean {close[0]!r}?" if close else ""
    return ValueError(
        f"Unknown task {name!r}.{suggestion} Known tasks: {', '.join(known_tasks())}; or name your own as "
        f"`package.module:attribute`, or add an entry point in the group `{ENTRY_POINT_GROUP}`."
    )
