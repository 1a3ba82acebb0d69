"""Changes of settings that make a run fit its GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from credit_trl.lab.planning.limits import engine_starts
from credit_trl.lab.planning.memory import FRAGMENTATION, memory_of
from credit_trl.lab.planning.setup import Setup, Vllm
from credit_trl.lab.planning.shape import Lora, Shape


@dataclass(frozen=True)
class Change:
    """A change of one setting."""

    setting: str  # in YAML, with fields of `_values`
    fields: Callable[[Setup], dict[str, Any] | None]  # changed fields of a setup; None if it does not apply to it

    def apply(self, setup: Setup) -> Setup | None:
        """Return the changed setup, None if the change does not apply."""
        fields = self.fields(setup)
        return None if fields is None else replace(setup, **fields)


def usable_bytes(setup: Setup) -> int:
    """Bytes of a GPU that a run can allocate."""
    return int(setup.gpu.memory * (1.0 - FRAGMENTATION))


def fits(shape: Shape, setup: Setup) -> bool:
    """Whether a colocated engine starts and the run's peak is within the usable memory."""
    return engine_starts(shape, setup) and memory_of(shape, setup).peak[1] <= usable_bytes(setup)


def changes_that_fit(shape: Shape, setup: Setup) -> tuple[str, ...] | None:
    """The fewest changes with which the run fits, cheapest first; None if three changes are not enough."""
    candidates = CHANGES if engine_starts(shape, setup) else (_SPLIT_ENGINE, *CHANGES)
    for count in (1, 2, 3):
        for chosen in combinations(candidates, count):
            changed: Setup | None = setup
            for change in chosen:
                changed = changed and change.apply(changed)
            if changed is not None and fits(shape, changed):
                return tuple(change.setting.format(**_values(changed)) for change in chosen)
    return None


def _values(setup: Setup) -> dict[str, object]:
    file = {"ddp": "multi_gpu"}.get(setup.strategy, setup.strategy)  # accelerate files of TRL
    return {
        "per_device": setup.per_device,
        "accumulation": setup.accumulation,
        "share": f"{setup.vllm.share:.2f}" if setup.vllm else "",
        "parallel": setup.vllm.parallel if setup.vllm else "",
        "processes": setup.processes,
        "launch": f"{file}, num_machines: {setup.machines}" if setup.machines > 1 else file,
        "scoring": setup.scoring_tokens,
    }


def _colocated(setup: Setup) -> Vllm | None:
    return setup.vllm if setup.vllm and setup.vllm.mode == "colocate" else None


def _sleep(setup: Setup) -> dict[str, Any] | None:
    vllm = _colocated(setup)
    return {"vllm": replace(vllm, sleeps=True)} if vllm and not vllm.sleeps else None


def _share(setup: Setup) -> dict[str, Any] | None:
    vllm = _colocated(setup)
    return {"vllm": replace(vllm, share=0.3)} if vllm and vllm.share > 0.3 else None


def _micro_batch(setup: Setup) -> dict[str, Any] | None:
    fields = {"per_device": 1, "accumulation": setup.accumulation * setup.per_device}
    return fields if setup.per_device > 1 else None


def _scoring(setup: Setup) -> dict[str, Any] | None:
    longest = setup.context + setup.completion
    return {"scoring_tokens": longest} if setup.scoring_tokens > longest else None


def _offload(setup: Setup) -> dict[str, Any] | None:
    has_copy = (not setup.lora and setup.teacher != "live") or setup.teacher_model is not None
    has_copy = has_copy and setup.strategy in ("single", "ddp")
    return {"teacher_offload": True} if has_copy and not setup.teacher_offload else None


def _eight_bit_optimizer(setup: Setup) -> dict[str, Any] | None:
    return {"optimizer_bytes": 2} if setup.strategy in ("single", "ddp") and setup.optimizer_bytes > 2 else None


def _more_processes(setup: Setup) -> dict[str, Any] | None:
    """More processes with the same rollouts per generation batch and optimizer step."""
    wanted, step = max(8, setup.processes * 2), setup.per_device * setup.accumulation * setup.processes
    sizes = range(setup.per_device, 0, -1)
    fitting = (size for size in sizes if not (step % (size * wanted) or setup.generation_batch % (size * wanted)))
    per_device = next(fitting, None)
    if setup.processes >= 64 or setup.bits or per_device is None:
        return None
    return {
        "processes": wanted,
        "machines": -(-wanted // 8),
        "strategy": "fsdp2" if setup.strategy == "single" else setup.strategy,
        "per_device": per_device,
        "accumulation": step // (per_device * wanted),
    }


def _four_bit(setup: Setup) -> dict[str, Any] | None:
    return {"bits": 4, "vllm": None} if setup.lora and not setup.bits and setup.processes == 1 else None


def _split_engine(setup: Setup) -> dict[str, Any] | None:
    """Weights of the engine over the GPUs of a node, for an engine that does not start."""
    vllm, node = _colocated(setup), min(setup.processes // setup.machines, 8)
    return {"vllm": replace(vllm, parallel=node)} if vllm and vllm.parallel < node else None


_SPLIT_ENGINE = Change("vllm_tensor_parallel_size: {parallel}", _split_engine)
_USE_VLLM = Change(
    "use_vllm: true, vllm_enable_sleep_mode: true, vllm_gpu_memory_utilization: {share}",
    lambda setup: None if setup.vllm or setup.bits else {"vllm": Vllm("colocate", 0.4, sleeps=True)},
)

# Cheapest first: changes that leave the training's numbers alone, then changes of the training.
CHANGES = (
    Change("gradient_checkpointing: true", lambda setup: None if setup.checkpointing else {"checkpointing": True}),
    Change("vllm_enable_sleep_mode: true", _sleep),
    Change("vllm_gpu_memory_utilization: {share}", _share),
    Change("per_device_train_batch_size: {per_device}, gradient_accumulation_steps: {accumulation}", _micro_batch),
    Change("scoring_batch_tokens: {scoring}", _scoring),
    Change("attn_implementation: flash_attention_2", lambda setup: None if setup.flash else {"flash": True}),
    _USE_VLLM,
    Change("teacher_offload: true", _offload),
    Change(
        "accelerate_config: fsdp2",
        lambda setup: {"strategy": "fsdp2"} if setup.strategy in ("ddp", "zero2") and not setup.bits else None,
    ),
    Change("optim: adamw_8bit", _eight_bit_optimizer),
    Change(
        "num_processes: {processes}, accelerate_config: {launch}, per_device_train_batch_size: {per_device}, "
        "gradient_accumulation_steps: {accumulation}",
        _more_processes,
    ),
    Change(
        "use_peft: true, lora_r: 32, lora_target_modules: all-linear",
        lambda setup: None if setup.lora else {"lora": Lora(32)},
    ),
    Change("dtype: bfloat16", lambda setup: {"weight_bytes": 2} if setup.lora and setup.weight_bytes > 2 else None),
    Change("load_in_4bit: true, use_vllm: false", _four_bit),
)


def _parallel(setup: Setup, size: int) -> dict[str, Any] | None:
    vllm, fits_node = _colocated(setup), setup.processes // setup.machines % size == 0
    return {"vllm": replace(vllm, parallel=size)} if vllm and fits_node and vllm.parallel != size else None


def _per_device(setup: Setup, size: int) -> dict[str, Any] | None:
    """Another micro-batch with the same optimizer step."""
    step = setup.per_device * setup.accumulation
    if size == setup.per_device or step % size or setup.rollouts % size:
        return None
    return {"per_device": size, "accumulation": step // size}


# Changes that leave the result of training alone and may save time.
SAVINGS = (
    *(Change(f"vllm_tensor_parallel_size: {n}", lambda setup, n=n: _parallel(setup, n)) for n in (1, 2, 4, 8)),
    *(
        Change(
            "per_device_train_batch_size: {per_device}, gradient_accumulation_steps: {accumulation}",
            lambda setup, n=n: _per_device(setup, n),
        )
        for n in (1, 2, 4, 8, 16)
    ),
    Change("update_packed: true", lambda setup: None if setup.packed else {"packed": True}),
    Change("gradient_checkpointing: false", lambda setup: {"checkpointing": False} if setup.checkpointing else None),
    _USE_VLLM,
)


def largest_saving(shape: Shape, setup: Setup, seconds: Callable[[Setup], float]) -> tuple[str, float] | None:
    """The change that fits the GPUs and saves most time, and its seconds a generation batch; None if none saves 2 %.

    `seconds` is the time of a generation batch of a setup.
    """
    before, best = seconds(setup), None
    for change in SAVINGS:
        changed = change.apply(setup)
        if changed is None or not fits(shape, changed):
            continue
        saved = before - seconds(changed)
        if saved > (best[1] if best else 0.02 * before):
            best = (change.setting.format(**_values(changed)), saved)
    return best
