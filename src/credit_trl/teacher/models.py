"""Weights of the teacher π_ref: the policy, its initial copy, or its exponential moving average (EMA).

Full fine-tuning stores a second copy of the weights. LoRA stores a frozen adapter `teacher` beside the trained one, on
the same base. The EMA is stored in fp32, because at a rate of 0.01 a bf16 average rounds the updates away.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel, fsdp2_canonicalize_names, is_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from credit_trl.teacher.sharding import copy_full, frozen_copy, full_shape, full_tensor, gathered, is_zero3, reshard

# Name of stored weights: of the adapter beside the trained one (LoRA), and of the file in a checkpoint.
ADAPTER_NAME = "teacher"
TEACHER_FILE = f"{ADAPTER_NAME}.safetensors"


class Teacher:
    """Live teacher that scores with the policy's current weights. Base class of teachers with weights of their own.

    Args:
        student: the unwrapped policy.
        accelerator: the trainer's accelerator; None on one process without mixed precision.
    """

    def __init__(self, student: nn.Module, accelerator: Accelerator | None = None) -> None:
        self.student = student
        self.accelerator = accelerator
        self.vocabulary_size = full_shape(student.get_output_embeddings().weight)[0]

    @property
    def device(self) -> torch.device:
        """Device of the passes; FSDP2 may keep the weights in main memory."""
        return self.student.device if self.accelerator is None else self.accelerator.device

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """Yield the module to score with, in eval mode and with the teacher's weights inside the block."""
        with eval_mode(self.student):
            yield self.student

    def models(self) -> list[nn.Module]:
        """Return the causal LMs that score."""
        with self.active() as model:
            return [self.unwrapped(model)]

    def named_weights(self) -> dict[str, Tensor]:
        """Return the stored weights by the names of the policy's parameters; a live teacher has none."""
        return {}

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (teacher, student) pairs of parameters that may differ."""
        parameters = _parameters(self.student)
        for name, weight in self.named_weights().items():
            yield weight, parameters[name]

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """teacher ← (1 − rate) · teacher + rate · student, in place."""
        reshard(self.student)
        for teacher, student in self.pairs():
            with gathered([student]), gathered([teacher], write=True):
                teacher.lerp_(student.to(teacher.device, teacher.dtype), rate)

    @torch.no_grad()
    def drift(self) -> float:
        """Return ‖θ_ref − θ‖ / ‖θ‖ over the parameters that may differ; 0 for a live teacher."""
        reshard(self.student)
        difference = norm = torch.zeros((), device=self.device)
        for teacher, student in self.pairs():
            with gathered([teacher, student]):
                scored = self._local_fp32(teacher)
                trained = self._local_fp32(student)
                difference = difference + (scored - trained).square().sum()
                norm = norm + trained.square().sum()
        if self._is_fsdp2():
            difference = self.accelerator.reduce(difference, reduction="sum")
            norm = self.accelerator.reduce(norm, reduction="sum")
        return (difference / norm.clamp(min=1e-30)).sqrt().item()

    def _local_fp32(self, weight: Tensor) -> Tensor:
        """In fp32: pairwise summation is precise enough, and not every device has fp64."""
        if hasattr(weight, "to_local"):
            weight = weight.to_local()
        return weight.to(self.device, torch.float32)

    def save(self, directory: str | Path, writes: bool) -> None:
        """Write the stored weights, if any, into a checkpoint directory.

        Every process must call it; `writes` says which one writes, one on each file system.
        """
        weights: dict[str, Tensor] = {}
        for name, weight in self.named_weights().items():
            gathered_weight = full_tensor(weight)  # a collective: every process must call it
            if writes:
                weights[name] = gathered_weight.detach().cpu().contiguous()
        if weights:
            save_file(weights, Path(directory) / TEACHER_FILE)

    @torch.no_grad()
    def load(self, directory: str | Path) -> None:
        """Read the stored weights, if any, from a checkpoint directory.

        Raises:
            FileNotFoundError, ValueError: the checkpoint has no teacher, or one with other parameters.
        """
        teacher_weights = self.named_weights()
        if not teacher_weights:
            return
        path = Path(directory) / TEACHER_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"The checkpoint {directory} has no {path.name}, so the teacher cannot be restored. Resume from a "
                "checkpoint of a run with the same `teacher_model_kind`, or start a new run from its weights."
            )
        with safe_open(path, framework="pt") as saved:  # one tensor at a time
            if differing := teacher_weights.keys() ^ saved.keys():
                raise ValueError(
                    f"{path} and this run's teacher have different parameters (for example {sorted(differing)[:3]}). "
                    "Resume with the same fine-tuning method (full or LoRA) and LoRA configuration."
                )
            for name, weight in teacher_weights.items():
                copy_full(weight, saved.get_tensor(name))

    def unwrapped(self, model: nn.Module) -> nn.Module:
        """Return the causal LM inside the module that `active` yields."""
        return extract_model_from_parallel(model)

    def mixed_precision(self) -> AbstractContextManager[None]:
        """Return a context with the accelerator's mixed precision, in which the policy computes."""
        return nullcontext() if self.accelerator is None else self.accelerator.autocast()

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context with the student's precision: mixed precision, or that of its half-precision weights.

        DeepSpeed trains in mixed precision without autocast, because it casts the student's weights.
        """
        if self.accelerator is not None and self.accelerator.native_amp:
            return self.mixed_precision()
        dtype = _layers_dtype(self.student)
        if dtype in (torch.bfloat16, torch.float16):
            return torch.autocast(self.device.type, dtype=dtype)
        return nullcontext()

    def most_batches(self, count: int) -> int:
        """Return the number of forward passes of every process: with sharded weights, the largest `count` of all."""
        if not (is_zero3(self.accelerator) or self._is_fsdp2()):
            return count
        counts = self.accelerator.gather(torch.tensor([count], device=self.device))
        return int(counts.max())

    def _is_fsdp2(self) -> bool:
        return any(isinstance(module, FSDPModule) for module in self.student.modules())


class CopyTeacher(Teacher):
    """Teacher with a model of its own, placed or sharded: with full fine-tuning a second copy of the policy."""

    def __init__(self, student: nn.Module, accelerator: Accelerator | None, model: nn.Module) -> None:
        super().__init__(student, accelerator)
        self.model = model
        self.model.requires_grad_(False)
        self.model.eval()  # not chained: DeepSpeed's `eval` returns None

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        try:
            yield self.model
        finally:
            reshard(self.model)

    def named_weights(self) -> dict[str, Tensor]:
        shared = set(map(id, self.student.parameters()))
        parameters = _parameters(self.unwrapped(self.model))
        return {name: weight for name, weight in parameters.items() if id(weight) not in shared}


class AdapterTeacher(Teacher):
    """Teacher of LoRA: a frozen adapter beside the trained one, on a shared base.

    DeepSpeed casts all parameters of a model to one precision. There, the fp32 average is stored outside the model,
    complete on every process, and copied into the adapter after each update.

    Raises:
        ValueError: the policy has an adapter of that name.
    """

    def __init__(self, student: nn.Module, accelerator: Accelerator | None) -> None:
        super().__init__(student, accelerator)
        self.trained = student.active_adapter
        if ADAPTER_NAME in student.peft_config:
            raise ValueError(
                f"The policy has an adapter {ADAPTER_NAME!r}, the name of the teacher's, as after another trainer. "
                f"Remove it first: `model.delete_adapter({ADAPTER_NAME!r})`."
            )
        config = copy.deepcopy(student.peft_config[self.trained])
        if hasattr(config, "init_lora_weights"):
            # PiSSA, OLoRA and others subtract the initial adapter from the base, which must happen only once.
            config.init_lora_weights = True
        student.add_adapter(ADAPTER_NAME, config)
        self.averages: dict[str, Tensor] = {}
        for teacher, trained in self.pairs():
            teacher.requires_grad_(False)
            teacher.data = trained.detach().to(torch.promote_types(trained.dtype, torch.float32), copy=True)
        if accelerator is not None and accelerator.distributed_type == "DEEPSPEED":
            self.averages = {name: adapter.clone() for name, adapter in self._adapter().items()}
        # `save_pretrained` saves the student only; checkpoints store the teacher in a separate file.
        student.save_pretrained = partial(student.save_pretrained, selected_adapters=[self.trained])

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        self._switch(ADAPTER_NAME)
        try:
            with eval_mode(self.student):
                yield self.student
        finally:
            self._switch(self.trained)

    def _switch(self, adapter: str) -> None:
        """Activate an adapter without changing which parameters are trainable.

        PEFT's `set_adapter` freezes all other adapters and unfreezes the active one. FSDP2 reads the trainable
        parameters at the first forward pass, which may be a scoring pass.
        """
        trainable = {parameter: parameter.requires_grad for parameter in self.student.parameters()}
        self.student.set_adapter(adapter)
        for parameter, requires_grad in trainable.items():
            parameter.requires_grad_(requires_grad)

    def named_weights(self) -> dict[str, Tensor]:
        return self.averages or self._adapter()

    def update(self, rate: float) -> None:
        super().update(rate)
        self._copy_averages()

    def load(self, directory: str | Path) -> None:
        super().load(directory)
        self._copy_averages()

    @torch.no_grad()
    def _copy_averages(self) -> None:
        """Copy the averages stored outside the model into the adapter."""
        adapter = self._adapter()
        for name, average in self.averages.items():
            self.averages[name] = average.to(self.device)
            copy_full(adapter[name], self.averages[name])

    def _adapter(self) -> dict[str, Tensor]:
        """The weights of the frozen adapter, by the names of the trained one's."""
        mark = f".{ADAPTER_NAME}"
        adapter = {}
        for name, parameter in _parameters(self.student).items():
            if f"{mark}." in f"{name}.":
                trained_name = name.replace(mark, f".{self.trained}")
                adapter[trained_name] = parameter
        return adapter


def make_teacher(
    kind: Literal["ema", "live", "base"], student: nn.Module, accelerator: Accelerator | None = None
) -> Teacher:
    """Build the teacher π_ref from the policy, before the policy is wrapped for distributed training.

    Args:
        kind: `"live"` shares the policy's weights; `"ema"` and `"base"` start as a copy of them.
        student: a `PreTrainedModel` or a `PeftModel` with tuner adapters.
        accelerator: places or shards the copy in the same way as the policy; None leaves it beside the policy.

    Raises:
        ValueError: the PEFT method has no tuner layers (prompt or prefix tuning) or trains parameters of the base,
            which the teacher shares.
    """
    config = student.peft_config[student.active_adapter] if is_peft_model(student) else None
    if config is not None and (config.is_prompt_learning or config.peft_type == "ADALORA"):
        raise ValueError(
            f"`{type(config).__name__}` is not supported: prompt learning changes the model's inputs, which the loss "
            "does not see, and AdaLoRA allows no second adapter for the teacher. Use LoRA or DoRA."
        )
    if kind == "live":
        return Teacher(student, accelerator)
    if config is None:
        return CopyTeacher(student, accelerator, frozen_copy(student, accelerator, precise=kind == "ema"))
    # Only the adapter and PEFT's copies for it (`modules_to_save`) may be trainable.
    mark = f".{student.active_adapter}."
    base = [name for name, p in student.named_parameters() if p.requires_grad and mark not in f"{name}."]
    if getattr(config, "bias", "none") != "none":
        problem, fix = f"`bias={config.bias!r}` trains biases of the base", 'Set `bias="none"`'
    elif base:
        problem, fix = f"`{base[0]}` of the base is trainable", "Freeze it, add its module to `modules_to_save`"
    else:
        return AdapterTeacher(student, accelerator)
    raise ValueError(
        f"{problem}, and the teacher shares the base, so it would change with the student. {fix}, or set "
        "`teacher_model_kind='live'`."
    )


class TeacherUpdate(TrainerCallback):
    """Updates the EMA every `teacher_sync_steps` optimizer steps, by default at the end of each generation batch.

    A failure ends the run, which would go on with another teacher.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.teacher_sync_steps is not None:
            due = state.global_step % args.teacher_sync_steps == 0
        else:
            batch = args.steps_per_generation * args.num_iterations
            passes = self.trainer._step
            due = passes // batch > (passes - self.trainer.current_gradient_accumulation_steps) // batch
        if due:
            self.trainer.teacher.update(args.teacher_update_rate)


def _layers_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the base without its head, which TRL may cast to fp32; without other weights the head's."""
    head = model.get_output_embeddings().weight
    adapters = getattr(model, "peft_config", ())
    for name, parameter in model.named_parameters():
        is_base = not any(f".{adapter}" in name for adapter in adapters)
        if is_base and parameter is not head and parameter.is_floating_point():
            return parameter.dtype
    return head.dtype


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    """Parameters by their names before activation checkpointing or compilation wrapped inner modules."""
    return fsdp2_canonicalize_names(dict(module.named_parameters()))


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Set a module to eval mode inside the block, and restore the mode of each submodule afterwards."""
    training = [submodule for submodule in module.modules() if submodule.training]
    module.eval()
    try:
        yield
    finally:
        for submodule in training:
            submodule.training = True
