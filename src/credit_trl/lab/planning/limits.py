"""Settings with which vLLM does not start beside the trainer."""

from __future__ import annotations

from math import ceil

from credit_trl.lab.planning.setup import GIB, Setup
from credit_trl.lab.planning.shape import Shape

# vLLM stores weights and cache in the model's own dtype, bf16.
_ENGINE_BYTES = 2


def engine_bytes(shape: Shape, setup: Setup) -> int:
    """Least memory of a colocated engine on one GPU: its weights and the cache of one sequence; 0 without one."""
    if setup.vllm is None or setup.vllm.mode != "colocate":
        return 0
    context = setup.vllm.context or getattr(shape.config, "max_position_embeddings", None)
    context = context or setup.prompt + setup.completion
    weights = shape.parameters - (shape.quantizable * (1 - setup.bits / 16) if setup.bits else 0)
    return int((weights + context * shape.key_value_elements) * _ENGINE_BYTES / setup.vllm.parallel)


def engine_starts(shape: Shape, setup: Setup) -> bool:
    """Whether the engine's share of the GPU holds its weights and one sequence."""
    needed = engine_bytes(shape, setup)
    return not needed or needed <= setup.vllm.share * setup.gpu.memory


def engine_problem(shape: Shape, setup: Setup) -> str | None:
    """Why a colocated engine does not start, or None."""
    if engine_starts(shape, setup):
        return None
    needed = engine_bytes(shape, setup)
    share = ceil(100 * needed / setup.gpu.memory) / 100
    return (
        f"The engine does not start: `vllm_gpu_memory_utilization={setup.vllm.share:g}` is "
        f"{setup.vllm.share * setup.gpu.memory / GIB:.1f} GiB of a GPU, and its weights and one sequence need "
        f"{needed / GIB:.1f} GiB. "
        + (f"Set it to {share:.2f} or more, " if share < 0.95 else "Raise `vllm_tensor_parallel_size`, ")
        + "or lower `vllm_max_model_length`."
    )


def check_longest_prompt(setup: Setup) -> None:
    """Raise a `ValueError` where the longest prompt fills the context of a colocated engine."""
    context = setup.vllm.context if setup.vllm and setup.vllm.mode == "colocate" else None
    if context is not None and setup.prompt >= context:
        raise ValueError(
            f"`--max_prompt {setup.prompt}` leaves no token of `vllm_max_model_length={context}` for the answer. Set "
            "`vllm_max_model_length` to the longest prompt and the longest completion together."
        )
