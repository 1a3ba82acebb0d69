"""What a checkpoint needs beyond TRL's for a run to continue as if it had never stopped.

TRL restores weights, optimizer, scheduler, random state and the position in the first epoch. Missing are the shuffling
order from the second epoch on, and the generation batch that a checkpoint may lie inside of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class Layout:
    """What a count of forward-backward passes, and a process's part of a generation batch, are counted in.

    Args:
        processes: how many.
        rollouts: of a pass on one process.
        passes: of a generation batch on one process, μ times those that see each rollout once.
    """

    processes: int
    rollouts: int
    passes: int


def save_progress(
    directory: str | Path, step: int, rollouts: list[dict[str, Any]] | None, rank: int, layout: Layout
) -> None:
    """Write the count of forward-backward passes and, inside a generation batch, this process's part of it.

    Args:
        directory: the checkpoint's.
        step: TRL's `_step`.
        rollouts: TRL's `_buffered_inputs`, or None at a generation boundary.
        rank: of this process; process 0 writes the count.
        layout: of the run.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if rollouts is not None:
        torch.save(rollouts, directory / f"rollouts_{rank}.pt")
    if rank == 0:
        state = {"step": step, "inside_generation_batch": rollouts is not None, "layout": asdict(layout)}
        (directory / STATE_FILE).write_text(json.dumps(state))


def load_progress(
    directory: str | Path, rank: int, device: torch.device, layout: Layout
) -> tuple[int, list[dict[str, Any]] | None] | None:
    """Read what `save_progress` wrote: (step, rollouts), or None for a checkpoint of another trainer.

    At a generation boundary a run may go on with another layout: it begins the same generation batch, and the count is
    told in the new one's passes.

    Raises:
        ValueError: the checkpoint lies inside a generation batch, and was saved with another layout.
        FileNotFoundError: it does, and this process's part is not there.
    """
    directory = Path(directory)
    if not (directory / STATE_FILE).is_file():
        return None
    state = json.loads((directory / STATE_FILE).read_text())
    saved = Layout(**state.get("layout", asdict(layout)))
    if not state["inside_generation_batch"]:
        return state["step"] // saved.passes * layout.passes, None
    if saved != layout:
        raise ValueError(
            f"{directory} was saved inside a generation batch, by {saved.processes} processes of {saved.passes} "
            f"passes of {saved.rollouts} rollouts; this run has {layout.processes} of {layout.passes} of "
            f"{layout.rollouts}. Resume with the number of processes and the batch sizes that saved it, or from a "
            "checkpoint at a generation boundary."
        )
    path = directory / f"rollouts_{rank}.pt"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} was saved inside a generation batch and has no {path.name}.")
    # A CPU's tensors know no index, though its device may have one.
    location = torch.device("cpu") if device.type == "cpu" else device
    return state["step"], torch.load(path, map_location=location, weights_only=True)
