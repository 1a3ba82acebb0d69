"""Checkpoints that are whole or not there, and that a run continues from as if it had never stopped.

A checkpoint is written in `<output_dir>/unfinished/` by every process, forced to disk, and only then renamed to
`checkpoint-<step>`, in one step that a kill cannot divide. Older checkpoints are removed after that, never before."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, rotate_checkpoints
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from credit_trl.teacher.models import Teacher
from credit_trl.training.adaptive import AdaptiveCoefficient

UNFINISHED = "unfinished"

LATEST = "latest"

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


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the ones before it are as they were."""


class ResumableTrainer(GRPOTrainer):
    """TRL's GRPO trainer, whose checkpoints hold all that a run continues from.

    Beside TRL's own files: the teacher's weights, an adapted λ, the count of passes, and the generation batch that
    the checkpoint lies inside of.

    Args:
        teacher: π_ref, or None where there is none; set by the subclass.
        adaptive_coef: λ where it is adapted, else None; set by the subclass.
    """

    teacher: Teacher | None = None
    adaptive_coef: AdaptiveCoefficient | None = None
    _saves_to: str | None = None
    _to_push: str | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own, which also takes `"latest"`.

        Args:
            resume_from_checkpoint: a checkpoint's folder; True for the newest of `output_dir`, which must have one;
                `"latest"` for the newest if there is one.
            *args, **kwargs: as in transformers.

        Raises:
            ValueError: a folder that does not exist.
        """
        if isinstance(resume_from_checkpoint, str):
            resume_from_checkpoint = checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochRepeatSampler:
        return EpochRepeatSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    @property
    def _layout(self) -> Layout:
        passes = self.args.steps_per_generation * self.num_iterations
        return Layout(self.accelerator.num_processes, self.args.per_device_train_batch_size, passes)

    # ------------------------------------------------------------------ writing

    def _get_output_dir(self, trial: Any) -> str:
        return self._saves_to or super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push what is finished: the folder has another name once it is."""
        self._to_push = checkpoint_folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        output_dir = Path(self._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        unfinished, finished = output_dir / UNFINISHED / name, output_dir / name
        with self._saving_to(unfinished):
            super()._save_checkpoint(model, trial)
            if self.teacher is not None:
                self.teacher.save(unfinished)
            if self.adaptive_coef is not None and self.accelerator.is_main_process:
                self.adaptive_coef.save(unfinished)
            inside = self._step % self._layout.passes != 0
            rollouts = self._buffered_inputs if inside else None
            save_progress(unfinished, self._step, rollouts, self.accelerator.process_index, self._layout)
            if self.state.best_model_checkpoint == str(unfinished):
                self.state.best_model_checkpoint = str(finished)
                if self.args.should_save:
                    self.state.save_to_json(str(unfinished / TRAINER_STATE_NAME))
            self._finish(unfinished, finished)
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(output_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        if self._to_push is not None:
            self._to_push = None
            super()._push_from_checkpoint(str(finished))

    @contextmanager
    def _saving_to(self, unfinished: Path) -> Iterator[None]:
        """Let TRL write into a folder of its own, emptied before and after; an error says what to resume from.

        Raises:
            CheckpointError: a file could not be written.
        """
        folder = unfinished.parent
        if self.accelerator.is_local_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.mkdir(parents=True, exist_ok=True)
        self.accelerator.wait_for_everyone()
        self._saves_to = str(folder)
        try:
            yield
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(_not_saved(folder.parent, self.state.global_step, error)) from error
        finally:
            self._saves_to = None
        shutil.rmtree(folder, ignore_errors=True)

    def _finish(self, unfinished: Path, finished: Path) -> None:
        """Give the checkpoint its name, once every process has written its part. Every process must call it.

        Nodes may share a file system or have one each, so the first process of every node renames, in turns.
        """
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process:
            force_to_disk(unfinished)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            rename_whole(unfinished, finished)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process and not self.accelerator.is_main_process:
            rename_whole(unfinished, finished)
        self.accelerator.wait_for_everyone()

    # ------------------------------------------------------------------ reading

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self.teacher is not None:
            self.teacher.load(checkpoint)
        if self.adaptive_coef is not None:
            self.adaptive_coef.load(checkpoint)
        rank, device = self.accelerator.process_index, self.accelerator.device
        progress = load_progress(checkpoint, rank, device, self._layout)
        if progress is not None:
            self._step, self._buffered_inputs = progress

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """transformers' loop asks for the last step after a step; a checkpoint of the last step needs none."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)


def checkpoint_to_resume(asked: str | None, output_dir: str | Path) -> str | None:
    """`"latest"` is the newest checkpoint of the output directory, or none where there is none yet.

    Raises:
        ValueError: another name that is no folder.
    """
    if asked is not None and asked != LATEST and not Path(asked).is_dir():
        raise ValueError(
            f"`resume_from_checkpoint={asked}`: there is no such folder. Give a checkpoint (`<output_dir>/checkpoint-"
            f"<step>`), or `{LATEST}` for the newest in `output_dir`, which also starts a run that has none yet."
        )
    if asked != LATEST:
        return asked
    return get_last_checkpoint(str(output_dir)) if Path(output_dir).is_dir() else None


def force_to_disk(folder: Path) -> None:
    """Wait until every file below a folder is on disk; a full disk may say so only now."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def rename_whole(unfinished: Path, finished: Path) -> None:
    """Rename a folder in one step; a checkpoint of that name, from before the run was resumed, is replaced.

    Where the first name is gone, another process that shares the file system has done it.
    """
    try:
        os.rename(unfinished, finished)
    except FileNotFoundError:
        if not finished.is_dir():
            raise
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        replaced = unfinished.with_name(f"replaced-{finished.name}")
        os.rename(finished, replaced)
        os.rename(unfinished, finished)
        shutil.rmtree(replaced, ignore_errors=True)
    _force_names_to_disk(finished.parent)


def _force_names_to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_saved(output_dir: Path, step: int, error: Exception) -> str:
    last = get_last_checkpoint(str(output_dir))
    kept = f"The last whole checkpoint is {last}: resume from it" if last else "There is none yet: start"
    free = shutil.disk_usage(output_dir).free / 2**30
    return (
        f"Step {step} could not be saved ({type(error).__name__}: {error}); {free:.2f} GiB are free in {output_dir}. "
        f"{kept} anew once there is room, or point `output_dir` elsewhere."
    )
