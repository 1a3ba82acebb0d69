"""Checkpoints that are whole or not there, and that a run continues from as if it had never stopped.

A checkpoint is written in `<output_dir>/unfinished/` by every process, forced to disk, and only then renamed to
`checkpoint-<step>`, in one step that a kill cannot divide. Older checkpoints are removed after that, never before.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, rotate_checkpoints
from trl import GRPOTrainer

from credit_trl.adaptive import AdaptiveCoefficient
from credit_trl.resume import EpochRepeatSampler, Layout, load_progress, save_progress
from credit_trl.teacher import Reference

UNFINISHED = "unfinished"
LATEST = "latest"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the ones before it are as they were."""


class ResumableTrainer(GRPOTrainer):
    """TRL's GRPO trainer, whose checkpoints hold all that a run continues from.

    Beside TRL's own files: the reference's weights, an adapted λ, the count of passes, and the generation batch that
    the checkpoint lies inside of.

    Args:
        reference: π_ref, or None where there is none; set by the subclass.
        adaptive_coef: λ where it is adapted, else None; set by the subclass.
    """

    reference: Reference | None = None
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
            if self.reference is not None:
                self.reference.save(unfinished)
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
        if self.reference is not None:
            self.reference.load(checkpoint)
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
