"""Atomic checkpoints from which a run resumes bit for bit.

Beside TRL's files, a checkpoint holds the teacher's weights, the count of forward-backward passes, the options that
define the run's objective and, where it lies inside a generation batch, each process's part of that batch.

All processes write a checkpoint into `<output_dir>/unfinished/`. All is synced to disk, a manifest with the hash of
each file is added, and the folder is renamed to `checkpoint-<step>`. Only then are older checkpoints removed.
"""

import hashlib
import json
import logging
import math
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
from trl import GRPOTrainer

from credit_trl.mistakes import refusal
from credit_trl.rollout.verdict import transferable
from credit_trl.run_directory import (
    RunLock,
    file_versions,
    read_json,
    refuse_links,
    run_id,
    run_lock,
    sync,
    write_advice,
    write_atomically,
)
from credit_trl.teacher.causal_lm import load_renamed_weights
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.sharding import full_tensor
from credit_trl.training.metrics import Alarms
from credit_trl.training.run_options import STREAM_ROWS, describe_change, run_options
from credit_trl.training.weights import (
    LossReport,
    NonFiniteError,
    guarded,
    nonfinite_moment,
    nonfinite_weight,
    source_of,
)
from credit_trl.trl_compat import RepeatSampler, check_returned, check_trl

check_trl()
logger = logging.getLogger(__name__)

UNFINISHED = "unfinished"
LATEST = "latest"
STATE_FILE = "credit_state.json"
MANIFEST_FILE = "manifest.json"
PROMPT_CHARACTERS = 80  # of a prompt in an error


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. Earlier checkpoints are unchanged."""


@dataclass(frozen=True)
class CheckpointState:
    """Content of `credit_state.json`: where a checkpoint lies in its run."""

    step: int  # forward-backward passes so far
    inside_generation_batch: bool
    layout: Mapping[str, int]
    options: Mapping[str, Any]  # `run_options`
    run: str | None = None
    start: int = 0  # how often the run has been started; greater than that of checkpoints that it went back behind


def read_state(checkpoint: str | Path) -> CheckpointState:
    """Read `credit_state.json` of a checkpoint.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no JSON, or a field is missing or has another type.
    """
    path = Path(checkpoint) / STATE_FILE
    state = read_json(path)
    kinds = {"step": int, "inside_generation_batch": bool, "layout": dict, "options": dict, "start": int}
    state = {"start": 0, **state}
    for name, kind in kinds.items():
        if not isinstance(state.get(name), kind):
            raise ValueError(f"{path}: `{name}` is {state.get(name)!r}, expected {kind.__name__}. Resume another one.")
    fields = CheckpointState.__dataclass_fields__
    return CheckpointState(**{name: value for name, value in state.items() if name in fields})


@dataclass(frozen=True)
class RunStart:
    """How a call of `train` begins."""

    checkpoint: str | None  # that is resumed
    run: str | None  # the run that saved it
    count: int  # `CheckpointState.start` of the checkpoints that follow
    continues: bool  # whether the files in `output_dir` are of that run
    options: dict[str, Any]  # `run_options`


@contextmanager
def raised_on_all() -> Iterator[None]:
    """Raise an error of the block on every process. All processes must enter the block."""
    local_error = None
    try:
        yield
    except Exception as error:
        local_error = error
    for error in gather_object([transferable(local_error)]):
        if error is not None:
            raise error if local_error is None else local_error


class BestWeights(TrainerCallback):
    """Loads the weights of the best model that transformers does not load. Later callbacks see the whole model.

    A failure ends the run: the model that it returns would not be the best.
    """

    def __init__(self, trainer: "ResumableTrainer") -> None:
        self.trainer = trainer

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self.trainer._load_renamed(state.best_model_checkpoint)


class ResumableTrainer(GRPOTrainer):
    """TRL's GRPO trainer with atomic checkpoints from which a run resumes bit for bit, and without steps of NaN.

    The subclass sets `alarms`, `run_log` and, where there is one, the teacher π_ref.
    """

    alarms: Alarms
    run_log: Any  # a `RunLog`
    teacher: Teacher | None = None
    _sampler: RepeatSampler  # of the training rows, unless they are a stream
    run_start: RunStart | None = None  # of the last call of `train`
    _lock: RunLock | None = None  # of `output_dir` while this process trains and is the main one
    _save_dir: str | None = None  # while a checkpoint is written
    _loss_reports: Sequence[LossReport] = ()  # of this process's micro-batches since the last optimizer step

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        *args: Any,
        resume_changes: Literal["refuse", "allow"] = "refuse",
        **kwargs: Any,
    ) -> Any:
        """Train as transformers' `Trainer.train`, alone in `output_dir`.

        Args:
            resume_from_checkpoint: directory of a checkpoint; True for the newest undamaged one in `output_dir`, which
                must exist; or `"latest"` for the newest undamaged one if there is one.
            resume_changes: whether data, seed and options that change what is learnt may differ from those of the run
                that is resumed.

        Before the first update no file in `output_dir` changes. Then `RunLog` moves those of an earlier run aside. The
        learning rate is that of this run; the optimizer and the step of the schedule are restored.

        Raises:
            ValueError: the directory is no complete checkpoint, a file of it is damaged, or its run had other data,
                another seed, number of processes, fine-tuning method or adapter, or other options of `run_options`.
            FileNotFoundError: a live teacher becomes an average, which the checkpoint does not hold.
            RunLockedError: another trainer uses `output_dir`, or it was moved while this one trained.
        """
        output_dir = Path(self.args.output_dir)
        with ExitStack() as resources:
            with raised_on_all():
                start = None
                if self.is_world_process_zero():
                    self._lock = resources.enter_context(run_lock(output_dir))
                    resources.callback(setattr, self, "_lock", None)
                    start = self._find_start(output_dir, resume_from_checkpoint)
            shared = [start]
            broadcast_object_list(shared)
            self.run_start = start = shared[0]
            if start.checkpoint is not None:
                self._check_options(start, resume_changes)
                is_stream = isinstance(self.train_dataset, IterableDataset)
                self.alarms.raise_if(is_stream, "stream_resumed", rows=STREAM_ROWS, checkpoint=start.checkpoint)
                # A checkpoint stores tied weights once; transformers would report the others as missing.
                self.model._keys_to_ignore_on_save = {*self.model.all_tied_weights_keys}
            elif resume_from_checkpoint is True:
                raise ValueError(f"{output_dir} has no checkpoint of this run. `{LATEST}` starts a run without one.")
            self.run_log.hold_back()
            self._step = 0
            self._buffered_inputs = None  # of an earlier call
            self._last_loaded_step = -1  # so that vLLM loads the weights
            return super().train(start.checkpoint, *args, **kwargs)

    def _find_start(self, output_dir: Path, resume_from_checkpoint: str | bool | None) -> RunStart:
        """Find the checkpoint to resume, whose files are all read, and describe the run. Changes nothing."""
        checkpoints = own_checkpoints(output_dir)
        refuse_links(output_dir, sort_checkpoints(str(output_dir)))
        checkpoint = None
        if resume_from_checkpoint:
            requested = LATEST if resume_from_checkpoint is True else str(resume_from_checkpoint)
            checkpoint = checkpoint_to_resume(requested, output_dir)
        state: CheckpointState | None = None
        if checkpoint is not None:
            state = read_state(checkpoint)
            refuse_pickles(Path(checkpoint))
        states = [_state_or_none(path) for path in checkpoints] + [state]
        count = max((one.start for one in states if one is not None), default=0) + 1
        run = run_id(output_dir)
        continues = False
        if state is not None:
            is_here = Path(checkpoint).resolve().parent == output_dir.resolve()
            continues = is_here if None in (run, state.run) else run == state.run
        return RunStart(checkpoint, state and state.run, count, continues, run_options(self))

    def _check_options(self, start: RunStart, resume_changes: str) -> None:
        """Compare the options of a checkpoint with those of this run before anything is loaded."""
        changed = describe_change(read_state(start.checkpoint).options, start.options)
        if changed and resume_changes != "allow":
            raise ValueError(
                f"{start.checkpoint} was saved with other options than this run has: {'; '.join(changed)}. Resume "
                "with those of the checkpoint, start a new run, or allow the change: `resume_changes='allow'` "
                "(`--resume_changes allow`)."
            )

    @property
    def _layout(self) -> dict[str, int]:
        return {
            "processes": self.accelerator.num_processes,
            "rollouts": self.args.per_device_train_batch_size,
            "passes": self.args.steps_per_generation * self.num_iterations,
        }

    def _guarded(self, loss: Tensor, inputs: dict[str, Any], nonfinite: Tensor | None = None) -> Tensor:
        """The loss of a micro-batch, which `_get_grad_norm` refuses where it is not finite.

        `nonfinite` says of which samples, if that is known.
        """
        if not self.model.training:
            return loss
        loss, finite = guarded(loss, inputs)
        self._loss_reports = [*self._loss_reports, LossReport(finite, inputs, nonfinite)]
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The global gradient norm, which decides on every process whether the optimizer may step.

        DeepSpeed has made its step by now.

        Raises:
            NonFiniteError: it is not finite, unless `on_nonfinite="skip"` or a loss scale of fp16 explains it.
        """
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        check_returned("GRPOTrainer._get_grad_norm", grad_norm)
        norm = float(full_tensor(grad_norm)) if isinstance(grad_norm, Tensor) else grad_norm
        reports = self._loss_reports
        self._loss_reports = ()
        losses = not reports or bool(torch.stack([report.is_finite for report in reports]).all())
        skips = self.args.on_nonfinite == "skip" and self.accelerator.distributed_type != "DEEPSPEED"
        is_bad = not losses or (self.accelerator.scaler is None and not math.isfinite(norm))
        if is_bad and not skips:
            source = source_of(model, self._teacher_weights(), self._buffered_inputs or (), losses)
            raise NonFiniteError(
                f"Step {self.state.global_step + 1} is not finite: the gradient norm is {norm}, from {source}"
                f"{self._bad_sample(reports)}. {self._last_checkpoint()}"
            )
        if is_bad:
            model.zero_grad(set_to_none=True)  # the optimizer changes no weight without a gradient
        if skips:
            self._metrics["train"]["credit/frac_skipped_updates"].append(float(is_bad))
        return grad_norm

    def _bad_sample(self, reports: Sequence[LossReport]) -> str:
        """The end of the prompt of the first sample that is not finite, in words; empty where none is known."""
        ids = next(filter(None, map(LossReport.bad_prompt, reports)), None)
        if ids is None:
            return ""
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return f" (of a sample whose prompt ends in {text[-PROMPT_CHARACTERS:]!r})"

    def _teacher_weights(self) -> dict[str, Tensor]:
        return getattr(self.teacher, "named_weights", dict)()  # none for a live teacher

    def _last_checkpoint(self) -> str:
        checkpoints = own_checkpoints(self.args.output_dir)
        return f"The last checkpoint is {checkpoints[-1]}." if checkpoints else "There is no checkpoint yet."

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy, as transformers' method. Without shards the main process may call it alone.

        Raises:
            NonFiniteError: where a weight of policy or teacher is not finite. Nothing is saved.
            RunLockedError: another trainer uses `args.output_dir`, into which the model would be saved.
        """
        is_shared = _internal_call or self.is_fsdp_enabled or self.is_deepspeed_enabled
        root = Path(self.args.output_dir).absolute()
        target = Path(output_dir or root).absolute()
        is_of_run = self._save_dir is None and self.is_world_process_zero() and target.is_relative_to(root)
        with ExitStack() as held:
            with raised_on_all() if is_shared else nullcontext():
                weight = nonfinite_weight(self.model, self._teacher_weights())
                if weight is not None:
                    raise NonFiniteError(f"The {weight} is not finite, so nothing is saved. {self._last_checkpoint()}")
                if is_of_run and self._lock is None:
                    held.enter_context(run_lock(root))
            earlier = file_versions(root) if is_of_run else {}
            with self.args.masked_tokens():
                super().save_model(output_dir, _internal_call)
            if is_of_run and target == root:
                self.run_log.note_saved({name for name, v in file_versions(root).items() if earlier.get(name) != v})
            elif is_of_run:
                self.run_log.note_saved({target.relative_to(root).parts[0]})

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Let TRL write into another folder, which then gets its manifest and its name.

        Raises:
            CheckpointError: a file could not be written; the message names the last checkpoint.
            NonFiniteError: a weight, or a number of the optimizer's state, is not finite.
            RunLockedError: the run directory is no longer that of this trainer.
        """
        output_dir = Path(self._get_output_dir(trial))
        with raised_on_all():
            self.check_lock()
            moment = nonfinite_moment(self.optimizer)
            if moment is not None:
                raise NonFiniteError(f"The {moment} is not finite, so nothing is saved. {self._last_checkpoint()}")
        finished = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        unfinished = output_dir / UNFINISHED / finished.name
        self._save_dir = str(unfinished.parent)
        # A sharded model is gathered while it is written, so that a process that fails does not meet the others.
        together = nullcontext() if self.is_fsdp_enabled or self.is_deepspeed_enabled else raised_on_all()
        try:
            with together, self._saving(output_dir):
                super()._save_checkpoint(model, trial)
                if self.teacher is not None:
                    self.teacher.save(unfinished, self.args.should_save)
                self._save_progress(unfinished)
                if self.state.best_model_checkpoint == str(unfinished):
                    self.state.best_model_checkpoint = str(finished)
                    if self.args.should_save:
                        self.state.save_to_json(str(unfinished / TRAINER_STATE_NAME))
            self.accelerator.wait_for_everyone()
            with raised_on_all(), self._saving(output_dir):
                if self.args.should_save:
                    finish(unfinished, finished)
        finally:
            self._save_dir = None
            shutil.rmtree(unfinished.parent, ignore_errors=True)
        if self.args.should_save:
            remove_old_checkpoints(output_dir, self.args.save_total_limit, self.state.best_model_checkpoint)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(finished))

    def check_lock(self) -> None:
        """Raise `RunLockedError` where the run directory was moved, or its lock removed, while this process trains."""
        if self._lock is not None:
            self._lock.check()

    @contextmanager
    def _saving(self, output_dir: Path) -> Iterator[None]:
        """A part of saving, whose errors name the last checkpoint and the space that is left."""
        try:
            yield
        except NonFiniteError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"Step {self.state.global_step} could not be saved ({type(error).__name__}: {error}). "
                f"{self._last_checkpoint()} {write_advice(error, output_dir)}, or change `output_dir`, and resume."
            ) from error

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push as transformers does, once the checkpoint has its final name. A failure only warns.

        The run needs no upload: its checkpoint is saved, and a later push uploads the later weights.
        """
        if self._save_dir is not None:
            return
        try:
            with self.args.masked_tokens():
                super()._push_from_checkpoint(checkpoint_folder)
        except Exception as error:
            cause = str(error).partition("\n")[0]
            text = f"{checkpoint_folder} was not uploaded ({type(error).__name__}: {cause}). Training continues."
            logger.warning(text)

    def _save_progress(self, folder: Path) -> None:
        """Write the count of passes and, inside a generation batch, this process's part of the batch."""
        is_inside = self._step % self._layout["passes"] != 0
        if is_inside:
            torch.save(self._buffered_inputs, folder / f"rollouts_{self.accelerator.process_index}.pt")
        if self.args.should_save:  # one process on each file system
            state = {"step": self._step, "inside_generation_batch": is_inside, "layout": self._layout}
            start = self.run_start
            state |= {"run": run_id(self.args.output_dir), "start": start.count if start else 0}
            state |= {"options": start.options if start else {}}
            write_checked(folder / STATE_FILE, state)

    def _get_output_dir(self, trial: Any) -> str:
        return self._save_dir or super()._get_output_dir(trial)

    def _load_renamed(self, checkpoint: str) -> None:
        self._last_loaded_step = -1  # so that vLLM loads the weights
        is_whole = self.accelerator.distributed_type not in ("FSDP", "DEEPSPEED")
        if is_whole and isinstance(self.model, PreTrainedModel):
            load_renamed_weights(self.model, checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore optimizer, the step of the schedule, teacher and progress. The learning rate is this run's."""
        if checkpoint is None:
            return
        # Others, such as `reduce_lr_on_plateau`, are no function of the step and keep their restored rate.
        rates = list(self.lr_scheduler.base_lrs) if isinstance(self.lr_scheduler, LambdaLR) else []
        super()._load_optimizer_and_scheduler(checkpoint)
        if rates:
            schedule = self.lr_scheduler
            schedule.base_lrs = rates
            for group, rate, share in zip(self.optimizer.param_groups, rates, schedule.lr_lambdas, strict=True):
                group |= {"initial_lr": rate, "lr": rate * share(schedule.last_epoch)}
            schedule._last_lr = [group["lr"] for group in self.optimizer.param_groups]  # which is logged
        self._load_renamed(checkpoint)
        saved = read_state(checkpoint).options.get("teacher_model_kind")
        if self.teacher is not None and self.args.teacher_model_kind in ("ema", saved):
            self.teacher.load(checkpoint)
        self._load_progress(Path(checkpoint))

    def _load_progress(self, checkpoint: Path) -> None:
        """Read what `_save_progress` wrote.

        At a generation boundary the layout may differ from the saved one. The run starts the same generation batch, so
        the count of passes is converted to the new layout.

        Raises:
            ValueError: the checkpoint lies inside a generation batch and was saved with another layout.
        """
        state = read_state(checkpoint)
        saved = state.layout
        if not state.inside_generation_batch:
            self._step = state.step // saved["passes"] * self._layout["passes"]
            return
        if saved != self._layout:
            words = "{processes} processes of {passes} passes of {rollouts} rollouts"
            raise ValueError(
                f"{checkpoint} was saved inside a generation batch, by {words.format(**saved)}; this run has "
                f"{words.format(**self._layout)}. Resume with the number of processes and the batch sizes that saved "
                "it, or from a checkpoint at a generation boundary."
            )
        path = checkpoint / f"rollouts_{self.accelerator.process_index}.pt"
        self._buffered_inputs = torch.load(path, map_location=self.accelerator.device.type, weights_only=True)
        self._step = state.step

    def _get_train_sampler(self, dataset: Dataset | None = None) -> RepeatSampler:
        """TRL's sampler, which drops an incomplete generation batch.

        Raises:
            ValueError: the dataset does not fill one, so that training would end before its first step.
        """
        self._sampler = super()._get_train_sampler(dataset)
        if len(self._sampler) == 0:
            raise refusal("few_rows", c=self.args, rows=self._sampler.num_samples, needed=self._sampler.batch_size)
        return self._sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Skip what the run that is resumed has done.

        After the last step of a run transformers would do one more. TRL's sampler draws the permutations of all epochs
        from one generator, so those of finished epochs are drawn first. Of a stream, whose length it does not know,
        transformers would skip all batches in the first epoch.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        checkpoint = kwargs.get("resume_from_checkpoint")
        is_stream = isinstance(self.train_dataset, IterableDataset)
        if checkpoint is not None and not is_stream and kwargs["epoch"] == kwargs["epochs_trained"]:
            for _ in range(kwargs["epoch"] if self._sampler.shuffle else 0):
                torch.randperm(self._sampler.num_samples, generator=self._sampler.generator)
        if checkpoint is not None and is_stream and not self.args.ignore_data_skip:
            # For transformers an epoch of a stream has `max_steps` steps; where it ends earlier, a new one begins.
            saved = read_json(Path(checkpoint) / TRAINER_STATE_NAME)
            passes = max(math.ceil(saved["epoch"]) - 1, 0)
            if kwargs["epoch"] < passes:
                return
            steps = (saved["epoch"] - passes) * saved["max_steps"]
            batches = round(steps * self.args.gradient_accumulation_steps)
            kwargs |= {"epochs_trained": passes, "steps_trained_in_current_epoch": batches}
        super()._run_epoch(*args, **kwargs)


def _state_or_none(checkpoint: str | Path) -> CheckpointState | None:
    """Its `read_state`; None for a damaged checkpoint, which `find_damage` reports."""
    try:
        return read_state(checkpoint)
    except (OSError, ValueError):
        return None


def own_checkpoints(folder: str | Path) -> list[str]:
    """Checkpoints of the run in a directory, in the order in which it wrote them: by start and step.

    A run that went back to an earlier checkpoint counts a new start. No time is read, as clocks differ and copying
    changes the times of folders. Checkpoints of an earlier run in the directory name another run.
    """
    run = run_id(folder)
    states = {path: _state_or_none(path) for path in sort_checkpoints(str(folder))}  # by step
    latest = max((state.start for state in states.values() if state is not None), default=0)
    numbered = []
    for path, state in states.items():
        if state is None:  # a damaged one may be of the latest start
            numbered.append((latest, path))
        elif run is None or state.run in (None, run):
            numbered.append((state.start, path))
    return [path for _, path in sorted(numbered, key=lambda pair: pair[0])]


def remove_old_checkpoints(folder: Path, limit: int | None, best: str | None) -> None:
    """Remove the first of `own_checkpoints`, so that `limit` remain, or two if the best is not the last."""
    paths = own_checkpoints(folder)
    protected = {paths[-1], best and str(Path(best))} if paths else set()
    removable = [path for path in paths if path not in protected]
    excess = len(paths) - max(limit or len(paths), 1)
    for path in removable[: max(excess, 0)]:
        shutil.rmtree(path, ignore_errors=True)


def checkpoint_to_resume(requested: str, output_dir: str | Path) -> str | None:
    """Resolve `"latest"` to the newest undamaged one of `own_checkpoints`, or None if there is none.

    Returns others unchanged. Reads all files of a checkpoint.

    Raises:
        ValueError: the checkpoint does not exist or is damaged, or `"latest"` finds damaged ones only.
    """
    damages = []
    paths = own_checkpoints(output_dir) if requested == LATEST else [requested]
    for path in reversed(paths):
        damage = find_damage(Path(path))
        if damage is None:
            if damages:
                logger.warning(f"DAMAGED CHECKPOINT: {'; '.join(damages)}. The run resumes from {path} instead.")
            return path
        damages.append(damage)
    if requested != LATEST:
        raise ValueError(
            f"`resume_from_checkpoint={requested}`: {damages[0]}. Give a checkpoint (`<output_dir>/checkpoint-<step>"
            f"`), or `{LATEST}` for the newest in `output_dir`, which also starts a run that has none yet."
        )
    if foreign := len(sort_checkpoints(str(output_dir))) - len(paths):
        logger.warning(f"{output_dir} has checkpoints of an earlier run ({foreign}): resume one by its path.")
    if damages:
        raise ValueError(
            f"No checkpoint in {output_dir} can be resumed: {'; '.join(damages)}. To start again set another "
            "`output_dir`."
        )
    return None


def refuse_pickles(checkpoint: Path) -> None:
    """Refuse a checkpoint whose files hold Python objects, which run code when they are loaded.

    Raises:
        ValueError: the message names the file.
    """
    for path in sorted({*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth"), *checkpoint.glob("pytorch_model*.bin")}):
        try:
            with safe_globals():  # of numpy's arrays in the random state
                torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError:  # whose text advises to load them
            raise ValueError(
                f"{path} holds Python objects besides tensors, which are not loaded, as they could run any code. "
                "It was not saved by `CreditTrainer`: resume another checkpoint."
            ) from None


def hash_files(folder: Path) -> dict[str, str]:
    """`size:hash` of each file below a folder, by its path in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    return {path.relative_to(folder).as_posix(): _digest(path) for path in files}


def write_manifest(folder: Path, hashes: dict[str, str]) -> None:
    """Write the manifest, the last file that a checkpoint gets, with a hash of its own."""
    listed = json.dumps(hashes)
    digest = xxhash.xxh3_128(listed.encode()).hexdigest()
    write_checked(folder / MANIFEST_FILE, {"files": listed, "xxh3_128": digest})


def write_checked(path: Path, value: dict[str, Any]) -> None:
    """Write JSON and read it back, as code of the user's may have replaced `json.dumps`."""
    write_atomically(path, json.dumps(value) + "\n")
    if read_json(path) != value:
        raise ValueError(f"{path.name} was not written as it is: restore `json.dumps`, which your code has replaced")


def find_damage(folder: Path) -> str | None:
    """What differs from the manifest, beginning with the path of the file; None for an undamaged folder."""
    manifest = folder / MANIFEST_FILE
    if not folder.is_dir():
        return "there is no such folder"
    try:
        manifest_content = read_json(manifest)
    except FileNotFoundError:
        is_other = (folder / TRAINER_STATE_NAME).is_file() and not (folder / STATE_FILE).is_file()
        if is_other and folder.name.startswith(PREFIX_CHECKPOINT_DIR):
            return f"{folder} was not saved by `CreditTrainer`; start a new run with `model={str(folder)!r}`"
        return f"{manifest} is missing, so the checkpoint was not written completely"
    except (OSError, ValueError):  # a folder, or no JSON
        manifest_content = {}
    listed = str(manifest_content.get("files"))
    if manifest_content.get("xxh3_128") != xxhash.xxh3_128(listed.encode()).hexdigest():
        return f"{manifest} is damaged"
    for name, expected in json.loads(listed).items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if _digest(path) != expected:
            size = expected.partition(":")[0]
            return f"{path} has changed since it was written ({path.stat().st_size} bytes, then {size})"
    return None


def _digest(path: Path) -> str:
    """Size and xxh3 of a file: it finds damage, at the speed of memory, and is no protection against an attack."""
    with path.open("rb") as file:
        return f"{path.stat().st_size}:{hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}"


def sync_to_disk(folder: Path) -> None:
    """Wait until all files below a folder are on disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def finish(unfinished: Path, finished: Path) -> None:
    """Wait until a checkpoint is on disk, add its manifest, and give it its name in one step."""
    with ThreadPoolExecutor(1) as thread:  # so that hashing takes no time of its own
        hashes = thread.submit(hash_files, unfinished)
        sync_to_disk(unfinished)
    write_manifest(unfinished, hashes.result())
    sync(unfinished)
    if finished.is_symlink():
        finished.unlink()
    shutil.rmtree(finished, ignore_errors=True)
    os.rename(unfinished, finished)
    sync(finished.parent)
