"""Task registry: `load_task("sciknoweval:chemistry")` returns a `Task`, a dataset builder with its verifier.

A name is a built-in task (`BUILT_IN`), with an option after a colon where its module declares one; an entry point of
the group `credit_trl.tasks`; or a module or `package.module:name`. A module is imported when its name is loaded.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from credit_trl.tasks.task import Task, batch_of, renamed

if TYPE_CHECKING:
    from datasets import Dataset

ENTRY_POINT_GROUP = __package__  # "credit_trl.tasks"
BUILT_IN = ("livecodebench", "math", "quickstart", "sciknoweval", "toolalpaca")


def known_tasks() -> list[str]:
    """Sorted names that need no import path: built-in tasks and entry points."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def check_name(name: str) -> None:
    """Check the form of a task name without importing anything."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"A task name must be a text, got {name!r}. Known tasks: {', '.join(known_tasks())}.")
    head, _, tail = name.partition(":")
    if head not in known_tasks() and (head.startswith(".") or ("." not in head and not tail)):
        raise _unknown_task(name)


def load_task(name: str | Task) -> Task:
    """Resolve `"sciknoweval:chemistry"`, `"toolalpaca"` or `"my_package.my_task:MyTask"` to a `Task`.

    A `Task` is returned as it is.

    Raises:
        ValueError: unknown name or option; the message lists the known ones.
        TypeError: the object has no `build` and `verify`.
    """
    if isinstance(name, Task):
        return name
    check_name(name)
    head, colon, tail = name.partition(":")
    option = tail if colon else None
    if head in BUILT_IN:
        return as_task(importlib.import_module(f"{__package__}.{head}"), name, option)
    points = {point.value: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == head}
    if len(points) > 1:
        raise ValueError(f"Several packages define the task {name!r}: {', '.join(points)}. Uninstall all but one.")
    for point in points.values():
        return as_task(point.load(), name, option)
    found = import_named(head, _unknown_task(name))
    for attribute in filter(None, tail.split(".")):
        if not hasattr(found, attribute):
            raise ValueError(f"Task {name!r}: {head} has no attribute {tail!r}.")
        found = getattr(found, attribute)
    return as_task(found, name)


def as_task(found: Any, name: str, option: str | None = None) -> Task:
    """Make a `Task` of a `Task`, a class, a module, or any object with `build` and `verify`.

    `option` is the text after the colon of the name; see `TaskOption`.
    """
    if inspect.isclass(found):
        found = found()
    options = {}
    if option is not None:
        head = name.partition(":")[0]
        declared = getattr(found, "OPTION", None)
        if declared is None:
            raise ValueError(f"Task {name!r}: {head!r} takes no option after the colon.")
        declared.check(option, head)
        options[declared.keyword] = option
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
    reward = batch_of(found.verify, name) if batch is None else renamed(batch, name)
    return Task(name, _checked(found.build, options, name), found.verify, reward)


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
