"""Atomic checkpoints from which a run resumes bit for bit.

Beside TRL's files, a checkpoint holds the teacher's weights, the count of forward-backward passes and,
where it lies inside a generation batch, each process's part of that batch.

All processes write a checkpoint into `<output_dir>/unfinished/`. It is synced to disk and then renamed to
`checkpoint-<step>` in one atomic step. Only then are older checkpoints removed.
"""

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
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, rotate_checkpoints
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from credit_trl.teacher.models import Teacher
from credit_trl.training.checks import check_enough_rows
from credit_trl.training.metrics import Alarms
from credit_trl.training.resuming import OptimizerOptions, check_fine_tuning, has_optimizer
from credit_trl.training.run_directory import RUN_FILE
from credit_trl.training.trl_compat import check_trl

check_trl()

UNFINISHED = "unfinished"
LATEST = "latest"
STATE_FILE = "credit_state.json"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. Earlier checkpoints are unchanged."""


@dataclass(frozen=True)
class Layout:
    """Division of a generation batch into processes and forward-backward passes, of `rollouts` each on one process.

    `passes` is the number of passes over a generation batch on one process, `steps_per_generation · num_iterations`.
    """

    processes: int
    rollouts: int
    passes: int


def save_progress(
    directory: str | Path,
    step: int,
    rollouts: list[dict[str, Any]] | None,
    rank: int,
    layout: Layout,
    *,
    teacher_kind: str | None = None,
    writes_state: bool,
) -> None:
    """Write the count of passes and, inside a generation batch, this process's part of the batch.

    Args:
        directory: where to write.
        step: TRL's `_step`, the count of forward-backward passes.
        rollouts: TRL's `_buffered_inputs`, or None at a generation boundary.
        rank: index of this process.
        layout: layout of the run.
        teacher_kind: `teacher_model_kind` of the run; None without a teacher.
        writes_state: whether this process writes what all have in common, as one on each file system must.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if rollouts is not None:
        torch.save(rollouts, directory / f"rollouts_{rank}.pt")
    if writes_state:
        state = {
            "step": step,
            "inside_generation_batch": rollouts is not None,
            "layout": asdict(layout),
            "teacher_model_kind": teacher_kind,
        }
        (directory / STATE_FILE).write_text(json.dumps(state))


def load_progress(
    directory: str | Path, rank: int, device: torch.device, layout: Layout
) -> tuple[int, list[dict[str, Any]] | None] | None:
    """Read what `save_progress` wrote: (step, rollouts), or None for a checkpoint of another trainer.

    At a generation boundary the layout may differ from the saved one. The run starts the same generation batch, and
    `step` is converted to passes of the new layout.

    Raises:
        ValueError: the checkpoint lies inside a generation batch and was saved with another layout.
        FileNotFoundError: it lies inside a generation batch and this process's part is missing.
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
    # The device may be "cpu:0", but CPU tensors are on "cpu".
    location = torch.device("cpu") if device.type == "cpu" else device
    return state["step"], torch.load(path, map_location=location, weights_only=True)


def restores_teacher(directory: str | Path, own: str) -> bool:
    """Whether the teacher of a run with `teacher_model_kind=own` has the weights that a checkpoint stores.

    The initial policy and the live policy do not depend on the checkpoint, whatever teacher it was saved with.

    Raises:
        ValueError: the checkpoint was saved with another kind of teacher, and this run's needs its own state.
    """
    path = Path(directory) / STATE_FILE
    state = json.loads(path.read_text()) if path.is_file() else {}
    saved = state.get("teacher_model_kind", own)  # version 0.1.0 does not store it
    if saved != own and own not in ("base", "live"):
        kept = "without a teacher" if saved is None else f"with `teacher_model_kind={saved!r}`"
        raise ValueError(
            f"{directory} was saved {kept}, and this run has `teacher_model_kind={own!r}`. Resume as it was saved, or "
            "with 'base' or 'live', which need nothing of the checkpoint."
        )
    return saved == own


class EpochRepeatSampler(RepeatSampler):
    """TRL's `RepeatSampler` in the same order, which can start in any epoch.

    TRL draws one permutation per epoch from a single generator. `set_epoch`, which the trainer calls, advances the
    generator to the start of an epoch, so that a resumed run gets the permutation of an uninterrupted run.
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


class ResumableTrainer(GRPOTrainer):
    """TRL's GRPO trainer with atomic checkpoints from which a run resumes bit for bit.

    The subclass sets `alarms` and, where there is one, the teacher π_ref.
    """

    alarms: Alarms
    teacher: Teacher | None = None
    _save_dir: str | None = None
    _has_push: bool = False

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as transformers' `Trainer.train`, which this extends by `"latest"`.

        Args:
            resume_from_checkpoint: directory of a checkpoint; True for the newest in `output_dir`, which must exist;
                or `"latest"` for the newest if there is one.

        The optimizer's options are those of this run; its moments and the step of the schedule are restored.

        Raises:
            ValueError: the directory is no complete checkpoint, or its run had another fine-tuning method, adapter, or
                kind of teacher.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        if isinstance(resume_from_checkpoint, str | Path):
            resume_from_checkpoint = checkpoint_to_resume(str(resume_from_checkpoint), self.args.output_dir)
        if isinstance(resume_from_checkpoint, str):
            self._check_checkpoint(Path(resume_from_checkpoint))
        self._step, self._buffered_inputs = 0, None  # of an earlier call
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _check_checkpoint(self, checkpoint: Path) -> None:
        """Compare a checkpoint with this run before anything is loaded."""
        check_fine_tuning(checkpoint, self.accelerator.unwrap_model(self.model))
        if not has_optimizer(checkpoint):
            self.alarms.raise_once(
                "no_optimizer",
                f"{checkpoint} holds no optimizer (`save_only_model=True`): its moments and the learning rate's "
                "schedule start again, so this run differs from an uninterrupted one. Resume from a checkpoint with "
                "an optimizer, or save later ones with `save_only_model=False`.",
            )
        if not self._restores_teacher(checkpoint) and self.args.teacher_model_kind == "base":
            self.alarms.raise_once(
                "other_teacher",
                f"{checkpoint} was saved with another `teacher_model_kind`. The teacher of this run is the model "
                "that the run was given, not one of the checkpoint.",
            )

    def _restores_teacher(self, checkpoint: str | Path) -> bool:
        return self.teacher is None or restores_teacher(checkpoint, self.args.teacher_model_kind)

    @property
    def _layout(self) -> Layout:
        passes = self.args.steps_per_generation * self.num_iterations
        return Layout(self.accelerator.num_processes, self.args.per_device_train_batch_size, passes)

    # ------------------------------------------------------------------ writing

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        output_dir = Path(self._get_output_dir(trial))
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        unfinished, finished = output_dir / UNFINISHED / name, output_dir / name
        with self._saving_to(unfinished):
            super()._save_checkpoint(model, trial)
            if self.teacher is not None:
                self.teacher.save(unfinished, self.args.should_save)
            rollouts = self._buffered_inputs if self._step % self._layout.passes != 0 else None
            rank, writes = self.accelerator.process_index, self.args.should_save
            kind = self.args.teacher_model_kind if self.teacher is not None else None
            save_progress(unfinished, self._step, rollouts, rank, self._layout, teacher_kind=kind, writes_state=writes)
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
        if self._has_push:
            self._has_push = False
            super()._push_from_checkpoint(str(finished))

    def _get_output_dir(self, trial: Any) -> str:
        return self._save_dir or super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Postpone the push until the checkpoint has its final name."""
        self._has_push = True

    @contextmanager
    def _saving_to(self, unfinished: Path) -> Iterator[None]:
        """Make TRL write into a directory of its own, which is emptied before and after.

        Raises:
            CheckpointError: a file could not be written; the message names the checkpoint to resume from.
        """
        folder = unfinished.parent
        if self.accelerator.is_local_main_process:
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.mkdir(parents=True, exist_ok=True)
        self.accelerator.wait_for_everyone()
        self._save_dir = str(folder)
        try:
            yield
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(_save_failure(folder.parent, self.state.global_step, error)) from error
        finally:
            self._save_dir = None
        shutil.rmtree(folder, ignore_errors=True)

    def _finish(self, unfinished: Path, finished: Path) -> None:
        """Sync and rename the checkpoint after every process has written its part. Every process must call it.

        Nodes may share a file system or not, so the first process of each node renames, the main process first.
        """
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_local_main_process:
            sync_to_disk(unfinished)
        self.accelerator.wait_for_everyone()
        with self.accelerator.main_process_first():
            if self.accelerator.is_local_main_process:
                rename_atomically(unfinished, finished)
        self.accelerator.wait_for_everyone()

    # ------------------------------------------------------------------ reading

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        options = OptimizerOptions(self.optimizer, self.lr_scheduler)
        super()._load_optimizer_and_scheduler(checkpoint)
        options.apply(self.optimizer, self.lr_scheduler)
        if self.teacher is not None and self._restores_teacher(checkpoint):
            self.teacher.load(checkpoint)
        rank, device = self.accelerator.process_index, self.accelerator.device
        progress = load_progress(checkpoint, rank, device, self._layout)
        if progress is not None:
            self._step, self._buffered_inputs = progress
            for batch in self._buffered_inputs or ():
                batch.pop("table_rows", None)  # rows of the table of completions of the process that saved them

    def _get_train_sampler(self, dataset: Dataset | None = None) -> EpochRepeatSampler:
        check_enough_rows(self.args, self.train_dataset if dataset is None else dataset)
        return EpochRepeatSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=self.args.generation_batch_size // self.num_generations,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Skip what the run that is resumed has done.

        After the last step of a run transformers would do one more, and of a stream, whose length it does not know, it
        would skip all batches in the first epoch.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        checkpoint = kwargs.get("resume_from_checkpoint")
        is_stream = isinstance(self.train_dataset, IterableDataset) and not self.args.ignore_data_skip
        if checkpoint is not None and is_stream:
            epochs, batches = stream_position(checkpoint, self.args.gradient_accumulation_steps)
            if kwargs["epoch"] < epochs:
                return
            kwargs |= {"epochs_trained": epochs, "steps_trained_in_current_epoch": batches}
        super()._run_epoch(*args, **kwargs)


def stream_position(checkpoint: str | Path, accumulation_steps: int) -> tuple[int, int]:
    """Finished epochs of a streamed dataset, and batches read since, when a checkpoint was saved.

    For transformers an epoch of a stream has `max_steps` optimizer steps; where the stream ends earlier, a new one
    begins.
    """
    state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    epochs = int(state.epoch)
    return epochs, round((state.epoch - epochs) * state.max_steps * accumulation_steps)


def checkpoint_to_resume(requested: str | None, output_dir: str | Path) -> str | None:
    """Resolve `"latest"` to the newest checkpoint of `output_dir`, or None if it has none; return others unchanged.

    Raises:
        ValueError: the checkpoint does not exist, or is not complete.
    """
    if requested == LATEST:
        requested = get_last_checkpoint(str(output_dir)) if Path(output_dir).is_dir() else None
    if requested is None:
        return None
    folder, fix = Path(requested), f"or `{LATEST}` for the newest in `output_dir`"
    if not folder.is_dir():
        raise ValueError(
            f"`resume_from_checkpoint={requested}`: there is no such folder. Give a checkpoint "
            f"(`<output_dir>/checkpoint-<step>`), {fix}, which also starts a run that has none yet."
        )
    if (folder / RUN_FILE).is_file():
        raise ValueError(
            f"`resume_from_checkpoint={requested}`: this is the folder of a run. Give one of its checkpoints, {fix}."
        )
    if not (folder / TRAINER_STATE_NAME).is_file():
        raise ValueError(
            f"`resume_from_checkpoint={requested}`: the folder has no {TRAINER_STATE_NAME}, so it is no checkpoint or "
            "was not written completely. Remove it, or give another one."
        )
    return requested


def sync_to_disk(folder: Path) -> None:
    """Wait until all files below a folder are on disk. A full disk may only raise an error here."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def rename_atomically(unfinished: Path, finished: Path) -> None:
    """Rename a folder in one step, and replace a folder that has its final name from before a resumption.

    If `unfinished` is gone and `finished` exists, another process on the same file system has renamed it.
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
    _sync(finished.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _save_failure(output_dir: Path, step: int, error: Exception) -> str:
    last = get_last_checkpoint(str(output_dir))
    kept = f"The last complete checkpoint is {last}: resume from it" if last else "There is none yet: start again"
    free = shutil.disk_usage(output_dir).free / 2**30
    return (
        f"Step {step} could not be saved ({type(error).__name__}: {error}); {free:.2f} GiB are free in {output_dir}. "
        f"{kept} once there is room, or set `output_dir` to another disk."
    )
