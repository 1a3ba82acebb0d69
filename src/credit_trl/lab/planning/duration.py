"""Generation batches, evaluations and hours of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from credit_trl.lab.planning.setup import Setup
from credit_trl.lab.planning.shape import Shape
from credit_trl.lab.planning.work import Lengths, Work, rollout_seconds


@dataclass(frozen=True)
class Schedule:
    """Length of a run and its evaluations of avg@k."""

    steps: int | None  # optimizer steps, or None for `epochs`
    epochs: float  # passes over the training rows
    rows: int | None  # training rows, or None if unknown
    samples: int | None  # k, or None without evaluations
    every: int  # generation batches between two evaluations
    eval_rows: int | None  # rows of an evaluation, or None if unknown
    eval_batch: int  # samples that one process generates at a time

    def batches(self, setup: Setup, updates: float) -> int | None:
        """Generation batches of the run; None if the number of training rows is unknown."""
        prompts = setup.generation_batch // setup.group
        if self.rows is not None and self.rows < prompts:
            raise ValueError(
                f"--rows {self.rows}: a generation batch of {setup.generation_batch} rollouts with "
                f"`num_generations={setup.group}` needs {prompts} training rows, so no step can be made. Add rows, or "
                "lower `gradient_accumulation_steps`, `per_device_train_batch_size` or `generation_batch_size`."
            )
        if self.steps is not None:
            return ceil(self.steps / updates)
        return None if self.rows is None else ceil(self.epochs * (self.rows // prompts))

    def evaluations(self, batches: int) -> int:
        """Evaluations of a run: before the first step, every `every` generation batches, and after the last."""
        return 0 if self.samples is None else 1 + ceil(batches / self.every)


@dataclass(frozen=True)
class Duration:
    """Duration of a run."""

    batches: int  # generation batches
    evaluations: int  # their number
    training: float  # seconds of all generation batches
    evaluating: float | None  # seconds of all evaluations; None if their number of rows is unknown

    @property
    def hours(self) -> float:
        """Hours of the run, without evaluations whose rows are unknown."""
        return (self.training + (self.evaluating or 0.0)) / 3600


def duration_of(shape: Shape, setup: Setup, lengths: Lengths, work: Work, schedule: Schedule) -> Duration | None:
    """Duration of a run; None if its number of generation batches is unknown."""
    batches = schedule.batches(setup, work.updates)
    if batches is None:
        return None
    count = schedule.evaluations(batches)
    evaluating: float | None = 0.0
    if count and schedule.eval_rows is None:
        evaluating = None
    elif count:
        samples, at_once = schedule.eval_rows * schedule.samples, schedule.eval_batch * setup.processes
        seconds = rollout_seconds(shape, replace(setup, generation_batch=at_once), lengths)
        evaluating = count * (ceil(samples / at_once) * seconds)
    return Duration(batches, count, batches * sum(work.seconds.values()), evaluating)
