"""What runs where: a configuration, the launcher's, and the GPUs, reduced to what memory and time depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

GIB = 2**30

Strategy = Literal["single", "ddp", "fsdp2", "zero2", "zero3"]


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, as its vendor specifies it.

    Args:
        memory: bytes.
        flops: dense bf16 operations a second.
        bandwidth: bytes a second of its memory.
        link: bytes a second to another GPU of the node, one direction.
    """

    memory: int
    flops: float
    bandwidth: float
    link: float


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
class Setup:
    """A run, as far as memory and time go. Lengths are in tokens, batches in rollouts.

    Args:
        strategy: how the training state lies on the GPUs.
        processes: one a GPU.
        machines: nodes.
        gpu: what each process has.
        weight_bytes: of a stored weight, by `dtype`.
        compute_bytes: of an activation: 2 in bf16 mixed precision or with bf16 weights.
        per_device: rollouts of a micro-batch.
        accumulation: micro-batches an optimizer step.
        generation_batch: rollouts of a generation batch, over all processes.
        group: rollouts a problem.
        iterations: μ, updates a generation batch.
        completion: the longest completion.
        context: the longest teacher or contrast prompt.
        prompt: the longest prompt that the student sees.
        contrasts: C, 0 without contrast.
        topk: K.
        stores_scores: the support is scored once a generation batch and stored.
        distills: the distillation loss has a weight.
        teacher: `"ema"`, `"base"` or `"live"`.
        teacher_offload: the teacher waits in main memory.
        scoring_tokens: tokens of one scoring pass.
        checkpointing: activations are recomputed.
        optimizer_bytes: of the optimizer's two moments, for one parameter.
        optimizer_offload, parameter_offload: DeepSpeed's and FSDP's offload to main memory.
        lora_rank: 0 for full fine-tuning.
        lora_targets: suffixes, None for every linear layer.
        dora: with magnitudes.
        bits: 4 or 8 for quantised loading, else 0.
        vllm: `"colocate"`, `"server"` or None.
        vllm_share: of a GPU's memory, for the colocated engine.
        vllm_sleeps: whether it lets go of it during scoring and update.
        vllm_parallel: tensor parallel size.
        flash: attention without a mask of its own, so that no square of the length is stored.
    """

    strategy: Strategy
    processes: int
    machines: int
    gpu: Gpu
    weight_bytes: int
    compute_bytes: int
    per_device: int
    accumulation: int
    generation_batch: int
    group: int
    iterations: int
    completion: int
    context: int
    prompt: int
    contrasts: int
    topk: int
    stores_scores: bool
    distills: bool
    teacher: str
    teacher_offload: bool
    scoring_tokens: int
    checkpointing: bool
    optimizer_bytes: int
    optimizer_offload: bool
    parameter_offload: bool
    lora_rank: int
    lora_targets: Sequence[str] | None
    dora: bool
    bits: int
    vllm: str | None
    vllm_share: float
    vllm_sleeps: bool
    vllm_parallel: int
    flash: bool

    @property
    def rollouts(self) -> int:
        """Rollouts of a generation batch on one process."""
        return self.generation_batch // self.processes

    @property
    def shards_weights(self) -> bool:
        return self.strategy in ("fsdp2", "zero3") and self.processes > 1

    @property
    def shards_optimizer(self) -> bool:
        return self.strategy in ("fsdp2", "zero2", "zero3") and self.processes > 1


# What the Adam family keeps for a parameter: two moments in fp32, or quantised to a byte each. Others keep less.
_OPTIMIZER_BYTES = {"8bit": 2, "sgd": 0, "adafactor": 1, "lion": 4}
_ATTENTION_WITHOUT_MASK = ("flash", "flex")


def make_setup(
    training: Any,
    model: Any,
    launcher: Mapping[str, Any],
    gpu: Gpu,
    *,
    mixed: bool,
    max_prompt: int = 2048,
) -> Setup:
    """From parsed arguments.

    Args:
        training: a `CreditConfig`.
        model: TRL's `ModelConfig`.
        launcher: what accelerate is started with: `distributed_type`, `num_processes`, `num_machines`, …
        gpu: what each process has.
        mixed: bf16 mixed precision.
        max_prompt: tokens of the longest prompt.

    Raises:
        ValueError: a generation batch that the processes cannot share, or an FSDP that is not version 2.
    """
    processes = int(launcher.get("num_processes") or 1)
    strategy = _strategy(launcher, processes)
    batch = training.generation_batch_size
    if batch % (training.per_device_train_batch_size * processes):
        raise ValueError(
            f"A generation batch of {batch} rollouts does not split into micro-batches of "
            f"{training.per_device_train_batch_size} on {processes} processes. Change `generation_batch_size` or "
            "`per_device_train_batch_size`."
        )
    weight_bytes = 2 if model.dtype in ("bfloat16", "float16", "auto") else 4
    optimizer_bytes = next((size for part, size in _OPTIMIZER_BYTES.items() if part in training.optim), None)
    if optimizer_bytes is None:  # torch keeps moments in the dtype of the parameter, DeepSpeed in fp32
        adapter_bytes = 2 if model.load_in_4bit or model.load_in_8bit else 4
        own = adapter_bytes if model.use_peft else weight_bytes
        optimizer_bytes = 8 if strategy in ("zero2", "zero3") else 2 * own
    contrasts = training.contrastive_count if training.contrasts else 0
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
        generation_batch=batch,
        group=training.num_generations,
        iterations=training.num_iterations,
        completion=training.max_completion_length,
        context=training.max_reprompt_len,
        prompt=max_prompt,
        contrasts=contrasts,
        topk=1 if training.distillation_support == "sampled" else training.distillation_topk,
        stores_scores=training.distillation_support in ("teacher_topk", "sampled"),
        distills=training.distillation_weight > 0.0,
        teacher=training.teacher_model_kind,
        teacher_offload=training.teacher_offload,
        scoring_tokens=training.scoring_batch_tokens,
        checkpointing=training.gradient_checkpointing,
        optimizer_bytes=optimizer_bytes,
        optimizer_offload=deepspeed.get("offload_optimizer_device", "none") != "none",
        parameter_offload=deepspeed.get("offload_param_device", "none") != "none"
        or bool(fsdp.get("fsdp_offload_params")),
        lora_rank=model.lora_r if model.use_peft else 0,
        lora_targets=_targets(model.lora_target_modules),
        dora=model.use_dora,
        bits=4 if model.load_in_4bit else 8 if model.load_in_8bit else 0,
        vllm=training.vllm_mode if training.use_vllm else None,
        vllm_share=training.vllm_gpu_memory_utilization,
        vllm_sleeps=training.vllm_enable_sleep_mode,
        vllm_parallel=training.vllm_tensor_parallel_size,
        flash=any(part in (model.attn_implementation or "") for part in _ATTENTION_WITHOUT_MASK),
    )


def read_launcher(path: str | Path | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """accelerate's file with the command line's words over it.

    Args:
        path: an accelerate configuration, or the name of one that TRL brings; None for none.
        overrides: `num_processes` and the like.

    Raises:
        ValueError: no such file.
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
        stage = int((launcher.get("deepspeed_config") or {}).get("zero_stage", 2))
        return "zero3" if stage == 3 else "zero2"
    if kind == "FSDP":
        if int((launcher.get("fsdp_config") or {}).get("fsdp_version", 1)) != 2:
            raise ValueError("FSDP version 1 is not supported here: set `fsdp_version: 2` in the accelerate file.")
        return "fsdp2"
    return "ddp" if processes > 1 else "single"


def _targets(names: Sequence[str] | str | None) -> Sequence[str] | None:
    return [names] if isinstance(names, str) else names
