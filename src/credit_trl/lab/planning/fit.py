"""Whether a run fits its GPUs, and the smallest change of its settings that makes it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

from credit_trl.lab.planning.memory import FRAGMENTS, Memory, memory_of
from credit_trl.lab.planning.setup import Setup
from credit_trl.lab.planning.shape import Shape


@dataclass(frozen=True)
class Change:
    """One setting to change.

    Args:
        words: the setting as it is written.
        apply: what it does to the setup; None where it does not apply.
    """

    words: str
    apply: Callable[[Setup], Setup | None]


def usable(setup: Setup) -> int:
    """Bytes of a GPU that a run can count on."""
    return int(setup.gpu.memory * (1.0 - FRAGMENTS))


def fits(memory: Memory, setup: Setup) -> bool:
    return memory.peak[1] <= usable(setup)


def changes_that_fit(shape: Shape, setup: Setup) -> tuple[str, ...] | None:
    """The fewest changes, cheapest first, with which the run fits; None where nothing known here helps."""
    for count in (1, 2, 3):
        for chosen in combinations(CHANGES, count):
            changed = _with(setup, chosen)
            if changed is not None and fits(memory_of(shape, changed), changed):
                return tuple(change.words.format(**_numbers(changed)) for change in chosen)
    return None


def _with(setup: Setup, chosen: tuple[Change, ...]) -> Setup | None:
    for change in chosen:
        changed = change.apply(setup)
        if changed is None:
            return None
        setup = changed
    return setup


def _numbers(setup: Setup) -> dict[str, object]:
    return {
        "per_device": setup.per_device,
        "accumulation": setup.accumulation,
        "share": f"{setup.vllm_share:.2f}",
        "processes": setup.processes,
        "launch": _launch(setup),
        "scoring": setup.scoring_tokens,
    }


def _launch(setup: Setup) -> str:
    """The accelerate file that TRL brings, and the machines where one is not enough."""
    name = {"ddp": "multi_gpu"}.get(setup.strategy, setup.strategy)
    return f"{name}, num_machines: {setup.machines}" if setup.machines > 1 else name


def _checkpointing(setup: Setup) -> Setup | None:
    return None if setup.checkpointing else replace(setup, checkpointing=True)


def _flash(setup: Setup) -> Setup | None:
    return None if setup.flash else replace(setup, flash=True)


def _micro_batch(setup: Setup) -> Setup | None:
    if setup.per_device == 1:
        return None
    return replace(setup, per_device=1, accumulation=setup.accumulation * setup.per_device)


def _sleep(setup: Setup) -> Setup | None:
    return replace(setup, vllm_sleeps=True) if setup.vllm == "colocate" and not setup.vllm_sleeps else None


def _share(setup: Setup) -> Setup | None:
    if setup.vllm != "colocate" or setup.vllm_share <= 0.3:
        return None
    return replace(setup, vllm_share=0.3)


def _scoring(setup: Setup) -> Setup | None:
    longest = setup.context + setup.completion
    return None if setup.scoring_tokens <= longest else replace(setup, scoring_tokens=longest)


def _offload(setup: Setup) -> Setup | None:
    whole_copy = setup.strategy in ("single", "ddp") and not setup.lora_rank and setup.teacher != "live"
    return replace(setup, teacher_offload=True) if whole_copy and not setup.teacher_offload else None


def _shard(setup: Setup) -> Setup | None:
    if setup.strategy not in ("ddp", "zero2") or setup.bits:
        return None
    return replace(setup, strategy="fsdp2")


def _eight_bit(setup: Setup) -> Setup | None:
    if setup.strategy not in ("single", "ddp") or setup.optimizer_bytes <= 2:
        return None
    return replace(setup, optimizer_bytes=2)


def _vllm(setup: Setup) -> Setup | None:
    if setup.vllm is not None or setup.bits:
        return None
    return replace(setup, vllm="colocate", vllm_share=0.4, vllm_sleeps=True)


def _lora(setup: Setup) -> Setup | None:
    return None if setup.lora_rank else replace(setup, lora_rank=32, lora_targets=None)


def _half_weights(setup: Setup) -> Setup | None:
    return replace(setup, weight_bytes=2) if setup.lora_rank and setup.weight_bytes > 2 else None


def _four_bit(setup: Setup) -> Setup | None:
    return replace(setup, bits=4, vllm=None) if setup.lora_rank and not setup.bits and setup.processes == 1 else None


def _more(setup: Setup) -> Setup | None:
    """More processes, for generation batches and optimizer steps of as many rollouts as before."""
    wanted, step = max(8, setup.processes * 2), setup.per_device * setup.accumulation * setup.processes
    sizes = range(setup.per_device, 0, -1)
    fitting = (size for size in sizes if not (step % (size * wanted) or setup.generation_batch % (size * wanted)))
    per_device = next(fitting, None)
    if setup.processes >= 64 or setup.bits or per_device is None:
        return None
    return replace(
        setup,
        processes=wanted,
        machines=-(-wanted // 8),
        strategy="fsdp2" if setup.strategy == "single" else setup.strategy,
        per_device=per_device,
        accumulation=step // (per_device * wanted),
    )


# In the order in which they cost: first what changes no number of the training, last what changes the training.
CHANGES = (
    Change("gradient_checkpointing: true", _checkpointing),
    Change("vllm_enable_sleep_mode: true", _sleep),
    Change("vllm_gpu_memory_utilization: {share}", _share),
    Change("per_device_train_batch_size: {per_device}, gradient_accumulation_steps: {accumulation}", _micro_batch),
    Change("scoring_batch_tokens: {scoring}", _scoring),
    Change("attn_implementation: flash_attention_2", _flash),
    Change("use_vllm: true, vllm_enable_sleep_mode: true, vllm_gpu_memory_utilization: {share}", _vllm),
    Change("teacher_offload: true", _offload),
    Change("accelerate_config: fsdp2", _shard),
    Change("optim: adamw_8bit", _eight_bit),
    Change(
        "num_processes: {processes}, accelerate_config: {launch}, per_device_train_batch_size: {per_device}, "
        "gradient_accumulation_steps: {accumulation}",
        _more,
    ),
    Change("use_peft: true, lora_r: 32, lora_target_modules: all-linear", _lora),
    Change("dtype: bfloat16", _half_weights),
    Change("load_in_4bit: true, use_vllm: false", _four_bit),
)
