"""What a checkpoint needs beyond TRL's for a run to continue as if it had never stopped.

TRL restores weights, optimizer, scheduler, random state and the position in the first epoch. Missing are the shuffling
order from the second epoch on, and the generation batch that a checkpoint may lie inside of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from trl.trainer.utils import RepeatSampler

STATE_FILE = "credit_state.json"


class EpochRepeatSampler(RepeatSampler):
    """TRL's sampler in TRL's order, which can start in any epoch.

    TRL's draws one permutation an epoch from one generator; this one winds the generator to the epoch that the
    trainer names with `set_epoch`, so that a resumed run sees the permutation it would have seen.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle and self.seed is not None:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):
                torch.randperm(self.num_samples, generator=self.generator)
        yield from super().__iter__()


def save_progress(directory: str | Path, step: int, rollouts: list[dict[str, Any]] | None, rank: int) -> None:
    """Write the count of forward-backward passes and, inside a generation batch, this process's part of it.

    Args:
        directory: the checkpoint's.
        step: TRL's `_step`.
        rollouts: TRL's `_buffered_inputs`, or None at a generation boundary.
        rank: of this process; process 0 writes the count.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if rollouts is not None:
        torch.save(rollouts, directory / f"rollouts_{rank}.pt")
    if rank == 0:
        (directory / STATE_FILE).write_text(
            json.dumps({"step": step, "inside_generation_batch": rollouts is not None})
        )


def load_progress(
    directory: str | Path, rank: int, device: torch.device
) -> tuple[int, list[dict[str, Any]] | None] | None:
    """Read what `save_progress` wrote: (step, rollouts), or None for a checkpoint of another trainer.

    Raises:
        FileNotFoundError: the checkpoint lies inside a generation batch and this process's part is not there, for
            example because the run had fewer processes.
    """
    directory = Path(directory)
    if not (directory / STATE_FILE).is_file():
        return None
    state = json.loads((directory / STATE_FILE).read_text())
    if not state["inside_generation_batch"]:
        return state["step"], None
    path = directory / f"rollouts_{rank}.pt"
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} was saved inside a generation batch and has no {path.name}. Resume with the number of "
            "processes that saved it, or from a checkpoint at a generation boundary."
        )
    # A CPU's tensors know no index, though its device may have one.
    location = torch.device("cpu") if device.type == "cpu" else device
    return state["step"], torch.load(path, map_location=location, weights_only=True)
