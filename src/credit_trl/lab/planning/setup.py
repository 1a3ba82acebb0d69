"""The settings of a run that memory and time depend on, and data sheets of GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from credit_trl.lab.planning.shape import Lora, Shape
from credit_trl.loss.scores import SupportConfig
from credit_trl.loss.uses import choose_support

if TYPE_CHECKING:
    from trl import ModelConfig

    from credit_trl.config import CreditConfig

GIB = 2**30

Strategy = Literal["single", "ddp", "fsdp2", "zero2", "zero3"]


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, as its vendor specifies it."""

    memory: int  # bytes
    flops: float  # dense bf16 operations per second
    bandwidth: float  # bytes per second of its memory
    link: float  # bytes per second to another GPU of the node, in one direction


GPUS = {
    "3090": Gpu(24 * GIB, 71e12, 0.94e12, 25e9),
    "4090": Gpu(24 * GIB, 165e12, 1.01e12, 25e9),
    "l40s": Gpu(48 * GIB, 362e12, 0.86e12, 25e9),
    "a100-40gb": Gpu(40 * GIB, 312e12, 1.56e12, 300e9),
    "a100-80gb": Gpu(80 * GIB, 312e12, 2.04e12, 300e9),
    "h20": Gpu(96 * GIB, 148e12, 4.0e12, 450e9),
    "h100": Gpu(80 * GIB, 989e12, 3.35e12, 450e9),
    "h200": Gpu(141 * GIB, 989e12, 4.8e12, 450e9),
    "b200": Gpu(180 * GIB, 2250e12, 8.0e12, 900e9),
}


@dataclass(frozen=True)
class Vllm:
    """The vLLM engine."""

    mode: str  # "colocate" or "server"
    share: float  # of a GPU's memory, for a colocated engine
    sleeps: bool  # whether a colocated engine releases its memory during scoring and update
    parallel: int = 1  # tensor parallel size
    context: int | None = None  # tokens of the longest sequence; None for the model's positions


@dataclass(frozen=True)
class TeacherModel:
    """The teacher of `teacher_model_kind="model"`, without its adapter."""

    shape: Shape
    weight_bytes: int  # per stored weight that is not quantized
    bits: int  # 4 or 8 for quantized weights, else 0


@dataclass(frozen=True)
class Setup:
    """A run as memory and time depend on it. Lengths are in tokens, batches in rollouts."""

    strategy: Strategy
    processes: int  # one per GPU
    machines: int  # nodes
    gpu: Gpu
    weight_bytes: int  # per stored weight, from `dtype`
    compute_bytes: int  # per activation: 2 in bf16 mixed precision or with bf16 weights
    per_device: int  # rollouts per micro-batch
    accumulation: int  # micro-batches per optimizer step
    generation_batch: int  # over all processes
    group: int  # rollouts per prompt
    iterations: int  # μ, passes over a generation batch
    completion: int  # maximum length of a completion
    context: int  # maximum length of a teacher or contrast prompt; that of `prompt` where the teacher reads no z
    prompt: int  # maximum length of the student's prompt
    contrasts: int  # C, 0 without contrast
    support: SupportConfig
    distills: bool  # whether the distillation loss has a weight
    teacher: str  # "ema", "base", "live", "trust_region" or "model"
    teacher_offload: bool  # the teacher is in main memory except while it scores
    scoring_tokens: int  # per scoring pass
    checkpointing: bool  # activations are recomputed
    optimizer_bytes: int  # moments per parameter
    optimizer_offload: bool  # to main memory, by DeepSpeed
    parameter_offload: bool  # to main memory, by DeepSpeed or FSDP
    lora: Lora | None  # None for full fine-tuning
    bits: int  # 4 or 8 for quantized weights, else 0
    vllm: Vllm | None  # None for transformers' generation
    flash: bool  # attention without a stored mask, which grows with the square of the length
    update_tokens: int | None = None  # of the student's passes; None for whole micro-batches
    packed: bool = False  # the update reads no padding
    shares_prompts: bool = False  # a packed micro-batch reads the prompt of several rollouts once
    old_logps: bool = False  # a pass without gradient computes the log-probabilities at rollout time
    has_kl_model: bool = False  # another pass there reads the KL model of GRPO's `beta`
    losses: int = 1  # 2 where GRPO's and the distillation's loss are added, each with its own pass of the student
    teacher_model: TeacherModel | None = None  # of the kind "model"
    is_plain: bool = False  # the teacher reads the student's prompt
    rehearsal: float = 0.0  # share of generation batches in which the student reads the teacher's prompt

    @property
    def rollouts(self) -> int:
        """Rollouts of a generation batch on one process."""
        return self.generation_batch // self.processes

    @property
    def shards_weights(self) -> bool:
        """Whether each process stores a share of the weights."""
        return self.strategy in ("fsdp2", "zero3") and self.processes > 1

    @property
    def shards_optimizer(self) -> bool:
        """Whether each process stores a share of the optimizer's state and of the gradients."""
        return self.strategy in ("fsdp2", "zero2", "zero3") and self.processes > 1

    @property
    def has_bf16_copy(self) -> bool:
        """Whether DeepSpeed computes with a bf16 copy of fp32 weights."""
        return self.strategy in ("zero2", "zero3") and self.compute_bytes == 2


def _offloads(deepspeed: Mapping[str, Any], what: Literal["param", "optimizer"]) -> bool:
    return deepspeed.get(f"offload_{what}_device", "none") != "none"


def _stores_no_mask(training: CreditConfig, model: ModelConfig) -> bool:
    kinds = ("flash", "flex")
    is_packed = training.update_packed and training.scoring_packed
    return is_packed or any(kind in (model.attn_implementation or "") for kind in kinds)


def _has_old_logps(training: CreditConfig) -> bool:
    """Whether the trainer computes log-probabilities at rollout time, see `training.micro_batches`."""
    passes = training.steps_per_generation * training.num_iterations
    is_one_step = training.gradient_accumulation_steps % passes == 0
    corrects = training.use_vllm and training.vllm_importance_sampling_correction
    reads_policy = training.shares[0] > 0.0
    if is_one_step:
        return corrects and reads_policy
    return corrects or reads_policy or training.distillation_is_clip is not None


# Bytes of the moments per parameter, for optimizers other than torch's Adam family.
_OPTIMIZER_BYTES = {"8bit": 2, "sgd": 0, "adafactor": 1, "lion": 4}


def make_setup(
    training: CreditConfig,
    model: ModelConfig,
    launcher: Mapping[str, Any],
    gpu: Gpu,
    *,
    mixed: bool,
    max_prompt: int = 2048,
    teacher: Shape | None = None,
) -> Setup:
    """Make a setup from parsed arguments.

    Args:
        training, model: the configurations of the trainer and of the model.
        launcher: accelerate's configuration: `distributed_type`, `num_processes`, `num_machines`, …
        gpu: GPU of each process.
        mixed: bf16 mixed precision.
        max_prompt: tokens of the longest prompt.
        teacher: shape of the teacher of `teacher_model_kind="model"`.

    Raises:
        ValueError: FSDP version 1.
    """
    processes = int(launcher.get("num_processes") or 1)
    strategy = _strategy(launcher, processes)
    weight_bytes = 2 if model.dtype in ("bfloat16", "float16", "auto") else 4
    deepspeed, fsdp = launcher.get("deepspeed_config") or {}, launcher.get("fsdp_config") or {}
    return Setup(
        strategy=strategy,
        processes=processes,
        machines=int(launcher.get("num_machines") or 1),
        gpu=gpu,
        weight_bytes=weight_bytes,
        compute_bytes=2 if mixed or weight_bytes == 2 else 4,
        per_device=training.per_device_train_batch_size,
        accumulation=training.gradient_accumulation_steps,
        generation_batch=training.generation_batch_size,
        group=training.num_generations,
        iterations=training.num_iterations,
        completion=training.max_completion_length,
        prompt=max_prompt,
        contrasts=training.contrastive_count if training.contrasts else 0,
        support=choose_support(training, vocabulary=0),  # a K of the whole vocabulary stays a top-K
        distills=training.distillation_weight > 0.0,
        scoring_tokens=training.scoring_batch_tokens,
        optimizer_bytes=_optimizer_bytes(training, model, strategy, weight_bytes),
        optimizer_offload=_offloads(deepspeed, "optimizer"),
        parameter_offload=_offloads(deepspeed, "param") or bool(fsdp.get("fsdp_offload_params")),
        lora=_lora(model),
        bits=4 if model.load_in_4bit else 8 if model.load_in_8bit else 0,
        vllm=_vllm(training),
        flash=_stores_no_mask(training, model),
        old_logps=_has_old_logps(training),
        has_kl_model=training.beta != 0.0,
        losses=sum(share > 0.0 for share in training.shares),
        **_update_fields(training, model),
        **_teacher_fields(training, teacher, max_prompt),
    )


def _update_fields(training: CreditConfig, model: ModelConfig) -> dict[str, Any]:
    """Fields of a setup that describe the student's passes in the update."""
    attention = model.attn_implementation or "sdpa"
    return {
        "checkpointing": training.gradient_checkpointing,
        "update_tokens": training.update_batch_tokens if training.distillation_weight else None,
        "packed": training.update_packed and attention != "eager",
        "shares_prompts": attention == "sdpa",
    }


def _teacher_fields(training: CreditConfig, shape: Shape | None, max_prompt: int) -> dict[str, Any]:
    """Fields of a setup that describe the teacher."""
    is_plain, options = training.teacher_prompt == "student", training.teacher_model_init_kwargs or {}
    return {
        "context": max_prompt if is_plain else training.max_reprompt_len,
        "teacher": training.teacher_model_kind,
        "teacher_offload": training.teacher_offload,
        "teacher_model": None if shape is None else _teacher_model(shape, options),
        "is_plain": is_plain,
        "rehearsal": training.teacher_rehearsal,
    }


def _teacher_model(shape: Shape, options: Mapping[str, Any]) -> TeacherModel:
    """The teacher as `teacher_model_init_kwargs` load it; bf16 where its configuration names no dtype."""
    wanted = str(options.get("dtype", "auto"))
    dtype = str(getattr(shape.config, "dtype", None) or "bfloat16") if wanted == "auto" else wanted
    quantized = options.get("quantization_config") or {}
    bits = quantized.get("bits") or (4 if quantized.get("load_in_4bit") else 8 if quantized else 0)
    return TeacherModel(shape, 4 if dtype.endswith("float32") else 2, int(bits))


def _optimizer_bytes(training: CreditConfig, model: ModelConfig, strategy: Strategy, weight_bytes: int) -> int:
    """Bytes of the moments per parameter: torch keeps them in the parameter's dtype, DeepSpeed in fp32."""
    for name, size in _OPTIMIZER_BYTES.items():
        if name in training.optim:
            return size
    if strategy in ("zero2", "zero3"):
        return 8
    adapter_bytes = 2 if model.load_in_4bit or model.load_in_8bit else 4
    return 2 * (adapter_bytes if model.use_peft else weight_bytes)


def _lora(model: ModelConfig) -> Lora | None:
    names = model.lora_target_modules
    targets = [names] if isinstance(names, str) else names
    return Lora(model.lora_r, targets, model.use_dora) if model.use_peft else None


def _vllm(training: CreditConfig) -> Vllm | None:
    if not training.use_vllm:
        return None
    share, sleeps = training.vllm_gpu_memory_utilization, training.vllm_enable_sleep_mode
    context = training.vllm_max_model_length
    return Vllm(training.vllm_mode, share, sleeps, training.vllm_tensor_parallel_size, context)


def read_launcher(path: str | Path | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Read an accelerate configuration and apply arguments of the command line.

    Args:
        path: the file, the name of one that TRL ships, or None for none.
        overrides: `num_processes` and similar; None values are ignored.
    """
    import yaml

    given = {name: value for name, value in overrides.items() if value is not None}
    if path is None:
        return given
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    _, resolved = resolve_accelerate_config_argument(["--accelerate_config", str(path)])
    return (yaml.safe_load(Path(resolved).read_text(encoding="utf-8")) or {}) | given


def _strategy(launcher: Mapping[str, Any], processes: int) -> Strategy:
    kind = str(launcher.get("distributed_type", "NO")).upper()
    if kind == "DEEPSPEED":
        return "zero3" if int((launcher.get("deepspeed_config") or {}).get("zero_stage", 2)) == 3 else "zero2"
    if kind == "FSDP":
        if int((launcher.get("fsdp_config") or {}).get("fsdp_version", 1)) != 2:
            raise ValueError("FSDP version 1 is not supported. Set `fsdp_version: 2` in the accelerate file.")
        return "fsdp2"
    return "ddp" if processes > 1 else "single"
