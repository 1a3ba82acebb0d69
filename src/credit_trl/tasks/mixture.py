"""One task of several: their rows take turns, and the column `task` routes each row to its verifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.task import Rewards, Task, call_reward, renamed

if TYPE_CHECKING:
    from datasets import Dataset


def mix_tasks(tasks: Sequence[Task]) -> Task:
    """A task of several tasks, each of which grades its rows of a batch in one call.

    `build` passes each task the subfolder of `path` with the task's name (`sciknoweval`, `toolalpaca`) where there is
    one, else `path`. Rows of the tasks take turns until each task's are used up, so that the first rows are of all
    tasks. The data set has the columns `prompt`, `answer`, `task`; `id` if all tasks have it; and
    `privileged_context`, `None` where missing, if any task has it. `verify` needs the row's `task` as a keyword.

    Raises:
        ValueError: two tasks have one name. In `build`: a column is missing, or has another type in another task;
            nothing is cast, since a verifier of the answer `5` rejects "5". In `verify` and `reward`: a row names
            another task.
    """
    parts = {task.name: task for task in tasks}
    if len(parts) < len(tasks):
        raise ValueError(f"The tasks of a mixture need different names, got {', '.join(task.name for task in tasks)}.")

    def build(split: str, path: str | Path | None = None, **options: Any) -> Dataset:
        rows = {}
        for name, part in parts.items():
            folder = None if path is None else Path(path, name.partition(":")[0])
            rows[name] = part.build(split, folder if folder is not None and folder.is_dir() else path, **options)
        return _interleaved(rows)

    def part_of(task: str) -> Task:
        if task not in parts:
            raise ValueError(f"{task!r} is no part of the mixed task {','.join(parts)!r}.")
        return parts[task]

    def verify(response: str, answer: Any, *, task: str, truncated: bool = False, **options: Any) -> Verdict:
        return part_of(task).verify(response, answer, truncated=truncated, **options)

    def reward(completions: Sequence[Any], task: Sequence[str], **columns: Any) -> Rewards:
        columns = {"completions": completions, "task": task, **columns}
        verdicts: Rewards = [None] * len(task)
        for name in dict.fromkeys(task):
            rows = [row for row, other in enumerate(task) if other == name]
            own = {column: _select(values, rows, len(task)) for column, values in columns.items()}
            for row, verdict in zip(rows, call_reward(part_of(name).reward, **own), strict=True):
                verdicts[row] = verdict
        return verdicts

    name = ",".join(parts)
    return Task(name, build, verify, renamed(reward, name))


def _select(values: Any, rows: Sequence[int], count: int) -> Any:
    """The given rows of a column; values that are not a column of the batch are returned unchanged."""
    is_column = isinstance(values, Sequence) and not isinstance(values, str | bytes) and len(values) == count
    return [values[row] for row in rows] if is_column else values


def _interleaved(parts: Mapping[str, Dataset]) -> Dataset:
    """The rows of the data sets by task, with the columns that `mix_tasks` names."""
    from datasets import Value, interleave_datasets

    columns = ["prompt", "answer"]
    if all("id" in part.column_names for part in parts.values()):
        columns.append("id")
    rows = []
    for name, part in parts.items():
        contexts = [column for column in part.column_names if column == "privileged_context"]
        part = part.select_columns(columns + contexts)
        for column in ("answer", "privileged_context"):
            if part.features.get(column) == Value("string"):
                part = part.cast_column(column, Value("large_string"))
        rows.append(part.add_column("task", [name] * len(part)))
    return interleave_datasets(rows, stopping_strategy="all_exhausted_without_replacement")
