"""Task registry: `load_task("sciknoweval:chemistry")` returns a `Task`, a dataset builder with its verifier.

A name is a built-in task (`BUILT_IN`), with an option after a colon where its module declares one, or one's own: a
module, or `package.module:name`. A module is imported when its name is loaded.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from credit_trl.tasks.task import Task, batch_of, renamed

if TYPE_CHECKING:
    from datasets import Dataset

BUILT_IN = ("livecodebench", "math", "quickstart", "sciknoweval", "toolalpaca")


def check_name(name: str) -> None:
    """Check the form of a task name without importing anything."""
    head, _, tail = name.partition(":") if isinstance(name, str) else ("", "", "")
    is_own = not head.startswith(".") and ("." in head or tail)
    if not head.strip() or (head not in BUILT_IN and not is_own):
        raise _unknown_task(name)


def load_task(name: str | Task) -> Task:
    """Resolve `"sciknoweval:chemistry"`, `"toolalpaca"` or `"my_package.my_task:MyTask"` to a `Task`.

    Raises:
        ValueError: unknown name or option; the message lists the known ones.
        TypeError: the object has no `build` and `verify`.
    """
    if isinstance(name, Task):
        return name
    check_name(name)
    head, colon, tail = name.partition(":")
    if head in BUILT_IN:
        return as_task(importlib.import_module(f"{__package__}.{head}"), name, tail if colon else None)
    found = import_named(head, _unknown_task(name))
    try:
        found = attrgetter(tail)(found) if tail else found
    except AttributeError as error:
        raise ValueError(f"Task {name!r}: {head} has no attribute {tail!r}.") from error
    return as_task(found, name)


def as_task(found: Any, name: str, option: str | None = None) -> Task:
    """Make a `Task` of a `Task`, a class, a module, or any object with `build` and `verify`.

    `option` is the text after the colon of the name of a built-in task, whose module declares as `OPTION` the keyword
    of `build` and its values.
    """
    if inspect.isclass(found):
        found = found()
    if isinstance(found, Task):
        return found
    if not callable(getattr(found, "build", None)) or not callable(getattr(found, "verify", None)):
        what = f"the {type(found).__name__} `{getattr(found, '__name__', type(found).__name__)}`"
        raise TypeError(
            f"Task {name!r}: {what} lacks `build` or `verify`. A function alone is given by `--reward_funcs`, or with "
            "its data set to `Task.from_dataset`."
        )
    options = {}
    if option is not None:
        keyword, values = getattr(found, "OPTION", ("option", ()))
        if option not in values:
            known = f"use one of {', '.join(values)}" if values else "the task takes no option after the colon"
            raise ValueError(f"Task {name!r}: there is no {keyword} {option!r}; {known}.")
        options[keyword] = option

    @functools.wraps(found.build)
    def build(*args: Any, **kwargs: Any) -> Dataset:
        dataset = found.build(*args, **options, **kwargs)
        columns = getattr(dataset, "column_names", None) or ["prompt", "answer"]
        missing = ", ".join(f"`{column}`" for column in ("prompt", "answer") if column not in columns)
        if missing:
            given = ", ".join(columns)
            raise ValueError(f"Task {name!r}: `build` gives no column {missing}; its columns are {given}.")
        return dataset

    batch = getattr(found, "reward", None)
    reward = batch_of(found.verify, name) if batch is None else renamed(batch, name)
    return Task(name, build, found.verify, reward)


def import_named(module: str, missing: ValueError) -> Any:
    """Import a module that the user names, or raise `missing` if it does not exist."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and one that it imports is missing
        raise missing from error


def _unknown_task(name: Any) -> ValueError:
    close = difflib.get_close_matches(str(name).partition(":")[0], BUILT_IN, n=1)
    suggestion = f" Did you mean {close[0]!r}?" if close else ""
    known = f"{', '.join(BUILT_IN)}; or name your own as `package.module:attribute`"
    return ValueError(f"Unknown task {name!r}.{suggestion} Known tasks: {known}.")
