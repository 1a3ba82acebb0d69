"""π_ref, the lagged teacher: the policy itself, its initial copy, or its exponential moving average.

Full fine-tuning keeps a second copy of the weights; LoRA keeps a frozen adapter called `teacher` beside the trained
one, on the same base. The average is held in fp32: at a rate of 0.01 a bf16 average would round every update away.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import fsdp2_canonicalize_names, is_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, TrainerCallback

from credit_trl.teacher.sharding import copy_full, frozen_copy, full_tensor, gathered, is_zero3, reshard, sharded_copy

ADAPTER_NAME = "teacher"
TEACHER_FILE = "teacher.safetensors"


class Teacher:
    """A live teacher: the policy as it is. Base of the other two.

    Args:
        student: the policy, unwrapped.
        accelerator: the trainer's.
    """

    def __init__(self, student: nn.Module, accelerator: Accelerator) -> None:
        self.student = student
        self.accelerator = accelerator

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The module to score with, its weights those of the teacher and in eval mode, until the block ends."""
        with _eval_mode(self.student):
            yield self.student

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(teacher, student) parameters that may differ."""
        yield from ()

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """teacher ← (1 − rate) · teacher + rate · student, in place."""
        reshard(self.student)
        for teacher, student in self.pairs():
            with gathered([student]), gathered([teacher], write=True):
                teacher.lerp_(student.to(teacher.device, teacher.dtype), rate)

    @torch.no_grad()
    def drift(self) -> float:
        """‖θ_ref − θ‖ / ‖θ‖ over the parameters that may differ; 0 for a live teacher."""
        reshard(self.student)
        difference = norm = torch.zeros((), device=self.accelerator.device)
        for teacher, student in self.pairs():
            with gathered([teacher, student]):
                ours, theirs = _local(teacher), _local(student.to(teacher.device, teacher.dtype))
                difference = difference + _square_sum(ours - theirs).to(norm.device)
                norm = norm + _square_sum(theirs).to(norm.device)
        if self._is_fsdp2():
            difference, norm = (self.accelerator.reduce(x, reduction="sum") for x in (difference, norm))
        return (difference / norm.clamp(min=1e-30)).sqrt().item()

    def save(self, directory: str | Path) -> None:
        """Write the teacher's weights into a checkpoint directory; nothing for a live one."""

    def load(self, directory: str | Path) -> None:
        """Read them back.

        Raises:
            FileNotFoundError: the checkpoint holds no teacher.
        """

    def unwrapped(self, model: nn.Module) -> nn.Module:
        """The causal LM inside what `active` yields."""
        return self.accelerator.unwrap_model(model)

    def autocast(self) -> AbstractContextManager[None]:
        """The precision that the student computes in: mixed precision, or that of its half-precision weights.

        DeepSpeed trains in mixed precision without autocast: it casts the student's weights.
        """
        if self.accelerator.native_amp:
            return self.accelerator.autocast()
        dtype = _layers_dtype(self.student)
        if dtype in (torch.bfloat16, torch.float16):
            return torch.autocast(self.accelerator.device.type, dtype=dtype)
        return nullcontext()

    def most_batches(self, count: int) -> int:
        """How many forward passes every process has to join: the largest `count` where weights are sharded."""
        if not self._is_sharded():
            return count
        counts = self.accelerator.gather(torch.tensor([count], device=self.accelerator.device))
        return int(counts.max())

    def _is_sharded(self) -> bool:
        return is_zero3(self.accelerator) or self._is_fsdp2()

    def _is_fsdp2(self) -> bool:
        return any(isinstance(module, FSDPModule) for module in self.student.modules())


class _StoredTeacher(Teacher):
    """A teacher with weights of its own, by name."""

    def named_weights(self) -> dict[str, Tensor]:
        """What is saved and loaded; each kind of stored teacher says which weights."""
        raise NotImplementedError

    def save(self, directory: str | Path) -> None:
        weights: dict[str, Tensor] = {}
        for name, weight in self.named_weights().items():
            whole = full_tensor(weight)  # every process joins, and one keeps it
            if self.accelerator.is_main_process:
                weights[name] = whole.detach().cpu().contiguous()
        if self.accelerator.is_main_process:
            save_file(weights, Path(directory) / TEACHER_FILE)

    @torch.no_grad()
    def load(self, directory: str | Path) -> None:
        path = Path(directory) / TEACHER_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"The checkpoint {directory} has no {TEACHER_FILE}, so its teacher cannot be restored. Resume "
                "from a checkpoint of a run with the same `teacher_model_kind`, or start a new run from its weights."
            )
        own = self.named_weights()
        with safe_open(path, framework="pt") as saved:  # one tensor at a time
            if differing := own.keys() ^ saved.keys():
                raise ValueError(
                    f"{path} holds other parameters than this run's teacher (for example {sorted(differing)[:3]}): "
                    "was the run full fine-tuning or LoRA with another config?"
                )
            for name, weight in own.items():
                copy_full(weight, saved.get_tensor(name))


class CopyTeacher(_StoredTeacher):
    """A second copy of a fully fine-tuned policy."""

    def __init__(self, student: PreTrainedModel, accelerator: Accelerator, model: nn.Module) -> None:
        super().__init__(student, accelerator)
        self.model = model
        self.model.requires_grad_(False)
        self.model.eval()  # DeepSpeed's returns nothing

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        try:
            yield self.model
        finally:
            reshard(self.model)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        student = _parameters(self.student)
        for name, teacher in self.named_weights().items():
            yield teacher, student[name]

    def named_weights(self) -> dict[str, Tensor]:
        return _parameters(self.accelerator.unwrap_model(self.model))


class OffloadedTeacher(CopyTeacher):
    """A copy that waits in main memory: it is on the accelerator only while it scores."""

    def __init__(self, student: PreTrainedModel, accelerator: Accelerator, model: PreTrainedModel) -> None:
        super().__init__(student, accelerator, model.to("cpu"))

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        self.model.to(self.accelerator.device)
        try:
            yield self.model
        finally:
            self.model.to("cpu")


class AdapterTeacher(_StoredTeacher):
    """A frozen adapter beside the trained one; the base is shared.

    DeepSpeed casts every parameter of a model to one precision, so there the fp32 average is kept beside the model,
    whole on every process, and the adapter follows it.
    """

    def __init__(self, student: nn.Module, accelerator: Accelerator) -> None:
        super().__init__(student, accelerator)
        self.trained = student.active_adapter
        config = copy.deepcopy(student.peft_config[self.trained])
        if hasattr(config, "init_lora_weights"):
            # PiSSA, OLoRA and others take what an adapter starts with out of the base: once is enough.
            config.init_lora_weights = True
        student.add_adapter(ADAPTER_NAME, config)
        self.averages: dict[str, Tensor] = {}
        for teacher, trained in self.pairs():
            teacher.requires_grad_(False)
            teacher.data = trained.detach().to(torch.promote_types(trained.dtype, torch.float32), copy=True)
        if accelerator.distributed_type == "DEEPSPEED":
            self.averages = {name: adapter.clone() for name, adapter in self._adapter().items()}
        # The model that a user saves is the student; checkpoints keep the teacher in a file of its own.
        student.save_pretrained = partial(student.save_pretrained, selected_adapters=[self.trained])

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        self._switch(ADAPTER_NAME)
        try:
            with _eval_mode(self.student):
                yield self.student
        finally:
            self._switch(self.trained)

    def _switch(self, adapter: str) -> None:
        """Use this adapter, and leave what trains to whoever decided it.

        PEFT's `set_adapter` freezes all other adapters and thaws all of its own; FSDP2 fixes at the first pass, which
        may be one of scoring, in which precision it keeps what trains.
        """
        trains = {parameter: parameter.requires_grad for parameter in self.student.parameters()}
        self.student.set_adapter(adapter)
        for parameter, requires_grad in trains.items():
            parameter.requires_grad_(requires_grad)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        parameters = _parameters(self.student)
        for name, teacher in self.named_weights().items():
            yield teacher, parameters[name.replace(f".{ADAPTER_NAME}", f".{self.trained}")]

    def named_weights(self) -> dict[str, Tensor]:
        return self.averages or self._adapter()

    def update(self, rate: float) -> None:
        super().update(rate)
        self._follow()

    def load(self, directory: str | Path) -> None:
        super().load(directory)
        self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        """Round the averages that are kept beside the model into its adapter."""
        adapter = self._adapter()
        for name, average in self.averages.items():
            self.averages[name] = average.to(self.accelerator.device)
            copy_full(adapter[name], self.averages[name])

    def _adapter(self) -> dict[str, Tensor]:
        mark = f".{ADAPTER_NAME}"
        named = _parameters(self.student).items()
        return {name: p for name, p in named if name.endswith(mark) or f"{mark}." in name}


def make_teacher(
    kind: Literal["ema", "live", "base"],
    student: nn.Module,
    accelerator: Accelerator,
    offload: bool = False,
) -> Teacher:
    """Build π_ref from the policy before it is wrapped for distributed training.

    Args:
        kind: `"live"` shares the policy's weights; `"ema"` and `"base"` start as its copy.
        student: the policy: a `PreTrainedModel` or a `PeftModel` with tuner adapters.
        accelerator: places or shards the copy as it does the policy.
        offload: keep the copy in main memory between scoring phases.

    Raises:
        ValueError: a PEFT method without tuner layers (prompt or prefix tuning), one that trains parameters of the
            base, which the teacher shares, or `offload` where there is no whole copy to move.
    """
    sharded = accelerator.distributed_type in ("FSDP", "DEEPSPEED")
    if offload and (kind == "live" or is_peft_model(student) or sharded):
        raise ValueError(
            "`teacher_offload=True` moves a whole second copy of the policy, which this run does not have: a live "
            "teacher and adapters share the policy's weights, FSDP and DeepSpeed shard the copy (offload it through "
            "their own configuration). Set `teacher_offload=False`."
        )
    if kind == "live":
        return Teacher(student, accelerator)
    if is_peft_model(student):
        if student.peft_config[student.active_adapter].is_prompt_learning:
            raise ValueError(
                "Prompt-learning adapters change the model's inputs and cannot be averaged beside each other; use "
                "LoRA (or DoRA)."
            )
        _check_trains_adapter_only(student)
        return AdapterTeacher(student, accelerator)
    precise = kind == "ema"
    if offload:
        return OffloadedTeacher(student, accelerator, frozen_copy(student, precise=precise))
    return CopyTeacher(student, accelerator, sharded_copy(student, accelerator, precise=precise))


def _check_trains_adapter_only(student: nn.Module) -> None:
    """What trains is the adapter, or what PEFT has copied for it (`modules_to_save`)."""
    config, mark = student.peft_config[student.active_adapter], f".{student.active_adapter}"
    base = [n for n, p in student.named_parameters() if p.requires_grad and f"{mark}." not in f"{n}."]
    if getattr(config, "bias", "none") != "none":
        what, fix = f"`bias={config.bias!r}` trains biases of the base", 'Set `bias="none"`'
    elif base:
        what, fix = f"`{base[0]}` of the base trains", "Freeze it, have its module copied by `modules_to_save`"
    else:
        return
    raise ValueError(
        f"{what}, and the teacher shares the base: there it would neither lag nor stay as it was. {fix}, or set "
        "`teacher_model_kind='live'`."
    )


class TeacherUpdate(TrainerCallback):
    """Moves the EMA after an optimizer step: every `teacher_sync_steps`, or where a generation batch ended.

    Args:
        trainer: whose `teacher` it is; its passes over micro-batches are counted.
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
    """Of the base's weights without the head, which TRL may have cast to fp32, and tied embeddings with it.

    Of the head where the model has nothing else.
    """
    head, adapters = model.get_output_embeddings(), tuple(getattr(model, "peft_config", ()))
    layers = (
        parameter.dtype
        for name, parameter in model.named_parameters()
        if parameter is not head.weight
        and parameter.is_floating_point()
        and not any(f".{adapter}" in name for adapter in adapters)
    )
    return next(layers, head.weight.dtype)


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    """By the names that they had before activation checkpointing or compilation wrapped modules inside."""
    return fsdp2_canonicalize_names(dict(module.named_parameters()))


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def _square_sum(weights: Tensor) -> Tensor:
    """In fp32, whose pairwise sum is precise enough: not every device has fp64."""
    return weights.float().pow(2).sum()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
