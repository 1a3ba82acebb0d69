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
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from datasets import Dataset, IterableDataset
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints, sort_checkpoints
from trl import GRPOTrainer

from credit_trl.config import CreditConfig, refusal
from credit_trl.rollout.verdict import transferable
from credit_trl.teacher.causal_lm import load_renamed_weights
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.sharding import full_tensor
from credit_trl.training.metrics import Alarms
from credit_trl.training.run_directory import read_json, run_id, run_lock, sync, write_atomically
from credit_trl.training.weights import NonFiniteError, guarded, nonfinite_weight, source_of
from credit_trl.trl_compat import RepeatSampler, check_returned, check_trl

check_trl()
logger = logging.getLogger(__name__)

UNFINISHED = "unfinished"
LATEST = "latest"
STATE_FILE = "credit_state.json"
MANIFEST_FILE = "manifest.json"

# Options that define what is trained: a resumed run with another value is another run.
_OBJECTIVE = (
    *("contrastive_coef", "contrastive_form", "contrastive_count", "contrastive_source"),
    *("distillation_weight", "distillation_alpha", "distillation_support", "distillation_topk", "distillation_tail"),
    *("teacher_model_kind", "teacher_model_name_or_path", "teacher_prompt", "num_generations"),
)
# Fields of an adapter's configuration that determine its parameters and how they change the base.
_ADAPTER_FIELDS = (
    "peft_type r lora_alpha target_modules target_parameters layers_to_transform modules_to_save rank_pattern "
    "alpha_pattern use_dora use_rslora alpha trainable_token_indices".split()
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. Earlier checkpoints are unchanged."""


def stored_options(args: CreditConfig, model: nn.Module) -> dict[str, Any]:
    """Options that a checkpoint stores, and a run that resumes from it must have: objective and adapter, as JSON.

    `model` is the unwrapped policy.
    """
    options = {name: getattr(args, name) for name in _OBJECTIVE}
    adapter = model.peft_config[model.active_adapter].to_dict() if is_peft_model(model) else {}
    options |= {f"peft_config.{name}": adapter[name] for name in _ADAPTER_FIELDS if adapter.get(name)}
    return json.loads(json.dumps(options, default=sorted))


@contextmanager
def raised_on_all() -> Iterator[None]:
    """Raise an error of the block on every process. All processes must enter the block."""
    own = None
    try:
        yield
    except Exception as error:
        own = error
    for error in gather_object([transferable(own)]):
        if error is not None:
            raise error if own is None else own


class ResumableTrainer(GRPOTrainer):
    """TRL's GRPO trainer with atomic checkpoints from which a run resumes bit for bit, and without steps of NaN.

    The subclass sets `alarms` and, where there is one, the teacher π_ref.
    """

    alarms: Alarms
    teacher: Teacher | None = None
    _sampler: RepeatSampler  # of the training rows, unless they are a stream
    _save_dir: str | None = None  # while a checkpoint is written
    _losses_are_finite: Tensor | None = None  # of the micro-batches since the last optimizer step, on this process

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
            resume_changes: whether options of the objective may differ from those of the run that is resumed.

        The learning rate is that of this run; the optimizer and the step of the schedule are restored.

        Raises:
            ValueError: the directory is no complete checkpoint, a file of it is damaged, or its run had another
                fine-tuning method or adapter, or other options of the objective.
            FileNotFoundError: a live teacher becomes an average, which the checkpoint does not hold.
            RunLockedError: another trainer uses `output_dir`.
        """
        output_dir = Path(self.args.output_dir)
        found: list[str | None] = [None]
        with ExitStack() as held:
            with raised_on_all():
                if self.is_world_process_zero():
                    held.enter_context(run_lock(output_dir))
                    for place in ("", "evaluations/*/", "credit_maps/"):  # `write_atomically` in a killed run
                        for scratch in output_dir.glob(f"{place}.*.[0-9]*.tmp"):
                            scratch.unlink(missing_ok=True)
                    if resume_from_checkpoint:
                        requested = LATEST if resume_from_checkpoint is True else str(resume_from_checkpoint)
                        found[0] = checkpoint_to_resume(requested, output_dir)  # reads all of its files
            broadcast_object_list(found)
            if self.args.should_save:
                shutil.rmtree(output_dir / UNFINISHED, ignore_errors=True)  # of a killed run
            if found[0] is not None:
                self._check_options(Path(found[0]), resume_changes)
            elif resume_from_checkpoint is True:
                raise ValueError(f"{output_dir} has no checkpoint of this run. `{LATEST}` starts a run without one.")
            self._step = 0
            self._buffered_inputs = None  # of an earlier call
            self._last_loaded_step = -1  # so that vLLM loads the weights
            output = super().train(found[0], *args, **kwargs)
            if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
                self._load_renamed(self.state.best_model_checkpoint)
                self._last_loaded_step = -1
            return output

    def _check_options(self, checkpoint: Path, resume_changes: str) -> None:
        """Compare the options of a checkpoint with those of this run before anything is loaded."""
        saved = read_json(checkpoint / STATE_FILE)["options"]
        own = stored_options(self.args, self.accelerator.unwrap_model(self.model))
        names = [name for name in own | saved if saved.get(name) != own.get(name)]
        changed = [f"`{name}`: {saved.get(name)!r} -> {own.get(name)!r}" for name in names]
        if changed and resume_changes != "allow":
            raise ValueError(
                f"{checkpoint} was saved with other options than this run has: {'; '.join(changed)}. Resume with "
                "those of the checkpoint, start a new run, or allow the change: `resume_changes='allow'` "
                "(`--resume_changes allow`)."
            )

    @property
    def _layout(self) -> dict[str, int]:
        rollouts = self.args.per_device_train_batch_size
        passes = self.args.steps_per_generation * self.num_iterations
        return {"processes": self.accelerator.num_processes, "rollouts": rollouts, "passes": passes}

    def _guarded(self, loss: Tensor, inputs: dict[str, Any]) -> Tensor:
        """The loss of a micro-batch, which `_get_grad_norm` refuses where it is not finite."""
        if not self.model.training:
            return loss
        loss, finite = guarded(loss, inputs)
        before = self._losses_are_finite
        self._losses_are_finite = finite if before is None else before & finite
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
        losses = self._losses_are_finite is None or bool(self._losses_are_finite)
        self._losses_are_finite = None
        skips = self.args.on_nonfinite == "skip" and self.accelerator.distributed_type != "DEEPSPEED"
        is_bad = not losses or (self.accelerator.scaler is None and not math.isfinite(norm))
        if is_bad and not skips:
            source = source_of(model, self._teacher_weights(), self._buffered_inputs or (), losses)
            raise NonFiniteError(
                f"Step {self.state.global_step + 1} is not finite: the gradient norm is {norm}, from {source}. "
                f"{self._last_checkpoint()}"
            )
        if is_bad:
            model.zero_grad(set_to_none=True)  # the optimizer changes no weight without a gradient
        if skips:
            self._metrics["train"]["credit/frac_skipped_updates"].append(float(is_bad))
        return grad_norm

    def _teacher_weights(self) -> dict[str, Tensor]:
        return getattr(self.teacher, "named_weights", dict)()  # none for a live teacher

    def _last_checkpoint(self) -> str:
        found = own_checkpoints(self.args.output_dir)
        return f"The last checkpoint is {found[-1]}." if found else "There is no checkpoint yet."

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy, as transformers' method. Without shards the main process may call it alone.

        Raises:
            NonFiniteError: where a weight of policy or teacher is not finite. Nothing is saved.
        """
        is_shared = _internal_call or self.is_fsdp_enabled or self.is_deepspeed_enabled
        with raised_on_all() if is_shared else nullcontext():
            weight = nonfinite_weight(self.model, self._teacher_weights())
            if weight is not None:
                raise NonFiniteError(f"The {weight} is not finite, so nothing is saved. {self._last_checkpoint()}")
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Let TRL write into another folder, which then gets its manifest and its name.

        Raises:
            CheckpointError: a file could not be written; the message names the last checkpoint.
        """
        output_dir = Path(self._get_output_dir(trial))
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
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(output_dir), self.args.save_total_limit, best, use_mtime=True)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(finished))

    @contextmanager
    def _saving(self, output_dir: Path) -> Iterator[None]:
        """A part of saving, whose errors name the last checkpoint and the space that is left."""
        try:
            yield
        except NonFiniteError:
            raise
        except Exception as error:
            free = shutil.disk_usage(output_dir).free / 2**30
            raise CheckpointError(
                f"Step {self.state.global_step} could not be saved ({type(error).__name__}: {error}); {free:.2f} GiB "
                f"are free in {output_dir}. {self._last_checkpoint()} Make space, or change `output_dir`, and resume."
            ) from error

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push as transformers does, once the checkpoint has its final name."""
        if self._save_dir is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_progress(self, folder: Path) -> None:
        """Write the count of passes and, inside a generation batch, this process's part of the batch."""
        is_inside = self._step % self._layout["passes"] != 0
        if is_inside:
            torch.save(self._buffered_inputs, folder / f"rollouts_{self.accelerator.process_index}.pt")
        if self.args.should_save:  # one process on each file system
            options = stored_options(self.args, self.accelerator.unwrap_model(self.model))
            state = {"step": self._step, "inside_generation_batch": is_inside, "layout": self._layout}
            state |= {"run": run_id(self.args.output_dir), "time": time.time()}
            (folder / STATE_FILE).write_text(json.dumps(state | {"options": options}))

    def _get_output_dir(self, trial: Any) -> str:
        return self._save_dir or super()._get_output_dir(trial)

    def _load_renamed(self, checkpoint: str) -> None:
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
        saved = read_json(Path(checkpoint) / STATE_FILE)["options"]["teacher_model_kind"]
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
        state = read_json(checkpoint / STATE_FILE)
        saved = state["layout"]
        if not state["inside_generation_batch"]:
            self._step = state["step"] // saved["passes"] * self._layout["passes"]
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
        self._step = state["step"]

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


def own_checkpoints(folder: str | Path) -> list[str]:
    """Checkpoints of the run in a directory, in the order in which they were written.

    Those of an earlier run there name another run. The times of the folders are no order: copying changes them.
    """
    run = run_id(folder)
    found = []
    for path in sort_checkpoints(str(folder)):
        state = {}
        with suppress(OSError, ValueError):  # `find_damage` reports it
            state = read_json(Path(path) / STATE_FILE)
        if run is None or state.get("run", run) == run:
            found.append((state.get("time", os.path.getmtime(path)), path))
    return [path for _, path in sorted(found)]


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
    if others := len(sort_checkpoints(str(output_dir))) - len(paths):
        logger.warning(f"{output_dir} has checkpoints of an earlier run ({others}): resume one by its path.")
    if damages:
        raise ValueError(
            f"No checkpoint in {output_dir} can be resumed: {'; '.join(damages)}. To start again set another "
            "`output_dir`."
        )
    return None


def hash_files(folder: Path) -> dict[str, str]:
    """`size:hash` of each file below a folder, by its path in the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    return {path.relative_to(folder).as_posix(): _digest(path) for path in files}


def write_manifest(folder: Path, hashes: dict[str, str]) -> None:
    """Write the manifest, the last file that a checkpoint gets, with a hash of its own."""
    listed = json.dumps(hashes)
    own = xxhash.xxh3_128(listed.encode()).hexdigest()
    write_atomically(folder / MANIFEST_FILE, json.dumps({"files": listed, "xxh3_128": own}) + "\n")


def find_damage(folder: Path) -> str | None:
    """What differs from the manifest, beginning with the path of the file; None for an undamaged folder."""
    manifest = folder / MANIFEST_FILE
    if not folder.is_dir():
        return "there is no such folder"
    try:
        found = read_json(manifest)
    except FileNotFoundError:
        is_other = (folder / TRAINER_STATE_NAME).is_file() and not (folder / STATE_FILE).is_file()
        if is_other and folder.name.startswith(PREFIX_CHECKPOINT_DIR):
            return f"{folder} was not saved by `CreditTrainer`; start a new run with `model={str(folder)!r}`"
        return f"{manifest} is missing, so the checkpoint was not written completely"
    except ValueError:
        found = {}
    listed = str(found.get("files"))
    if found.get("xxh3_128") != xxhash.xxh3_128(listed.encode()).hexdigest():
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
    shutil.rmtree(finished, ignore_errors=True)
    os.rename(unfinished, finished)
    sync(finished.parent)
