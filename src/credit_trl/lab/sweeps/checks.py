"""Checks of a sweep's evaluation and data before its first job."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from credit_trl.evaluation.callback import EvaluationCallback, check_options
from credit_trl.evaluation.config import EvaluationConfig
from credit_trl.evaluation.protocol import task_rows
from credit_trl.lab.sweeps.job import build_rows, evaluation_options
from credit_trl.lab.sweeps.spec import SweepSpec, check_type
from credit_trl.tasks.registry import BUILT_IN, load_task


def check_evaluation(spec: SweepSpec) -> None:
    """Check the task's name and the arguments of the jobs' `EvaluationCallback`."""
    load_task(spec.task)
    try:
        _check_types(spec.evaluation)
        check_options(spec.evaluation.get("k", 1), _passed_on(spec.evaluation))
    except (TypeError, ValueError) as error:
        raise ValueError(f"`evaluation`: {error}") from error
    if (steps := spec.evaluation.get("eval_steps", 1)) < 1:
        raise ValueError(f"`evaluation`: `eval_steps` must be at least 1, got {steps}.")


def check_data(spec: SweepSpec) -> None:
    """Load the rows of training and of the evaluation once, as every job does, unless they come from the Hub."""
    task = load_task(spec.task)
    config = EvaluationConfig(**_passed_on(evaluation_options(spec.data, spec.evaluation)))
    loads = {
        "data": (spec.data.get("path"), lambda: build_rows(task, spec.data)),
        "evaluation": (config.path, lambda: task_rows(task, config)),
    }
    for name, (path, load) in loads.items():
        if path is None and _reads_hub(spec.task):
            continue
        try:
            load()
        except (OSError, ValueError) as error:
            raise ValueError(f"`{name}`: {error}") from error


def _check_types(evaluation: Mapping[str, Any]) -> None:
    annotations = {one.name: str(one.type) for one in fields(EvaluationConfig)}
    annotations |= {one.name: str(one.annotation) for one in inspect.signature(EvaluationCallback).parameters.values()}
    for name, value in evaluation.items():
        check_type(name, value, annotations.get(name, ""))


def _passed_on(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Options that the callback passes to `EvaluationConfig`."""
    own = inspect.signature(EvaluationCallback).parameters.keys() - {"trainer", "task", "options"}
    return {name: value for name, value in evaluation.items() if name not in own}


def _reads_hub(task: str) -> bool:
    """Whether a built-in task, or a part of a mixed one, reads its rows from the Hub if it has no path."""
    heads = [one.strip().partition(":")[0] for one in task.split(",")]
    return any(hasattr(import_module(BUILT_IN[head]), "HUB") for head in heads if head in BUILT_IN)
