"""What a generation batch costs in tokens, operations, bytes between GPUs, and so in seconds.

An estimate to plan with, not a measurement: a roofline. Products run at a stated share of the GPU's peak, decoding
reads weights and cache from memory, collectives cross NVLink inside a node and the network between nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log

from credit_trl.lab.planning.setup import Setup
from credit_trl.lab.planning.shape import Shape

# Shares of the peak that large bf16 models reach in practice.
PREFILL_SHARE = 0.5
TRAINING_SHARE = 0.4
BANDWIDTH_SHARE = 0.7
LINK_SHARE = 0.7
# Bytes a second of one GPU's share of the network between nodes: 400 Gbit/s a GPU.
NETWORK = 50e9
# A decoding step that launches its kernels one by one, as transformers' generation does; vLLM replays a graph.
STEP_OVERHEAD = {"vllm": 2e-3, "transformers": 25e-3}
EULER = 0.5772


@dataclass(frozen=True)
class Lengths:
    """Mean lengths in tokens: what a run has, where the configuration says only what it may have.

    Args:
        prompt: of a question.
        completion: of an answer.
        context: of a teacher or contrast prompt: question, demonstration, feedback.
    """

    prompt: int
    completion: int
    context: int


@dataclass(frozen=True)
class Work:
    """A generation batch, from rollout to its last update.

    Args:
        tokens: by what is done with them: `generated`, `scored`, `trained`; over all processes.
        operations: by phase, over all processes.
        moved: bytes that one GPU receives from others, by collective.
        seconds: by phase.
        updates: optimizer steps.
    """

    tokens: dict[str, int]
    operations: dict[str, float]
    moved: dict[str, float]
    seconds: dict[str, float]
    updates: int


def default_lengths(setup: Setup) -> Lengths:
    """A quarter of what the configuration allows, as no more is known before a run."""
    completion = max(setup.completion // 4, 1)
    prompt = max(setup.prompt // 4, 1)
    return Lengths(prompt, completion, min(setup.context, prompt + completion + 256))


def work_of(shape: Shape, setup: Setup, lengths: Lengths) -> Work:
    """Tokens, operations, traffic and time of one generation batch."""
    rollouts = setup.generation_batch
    contexts = 1 + setup.contrasts
    generated = rollouts * lengths.completion
    scored = rollouts * contexts * (lengths.context + lengths.completion) if setup.distills else 0
    trained = setup.iterations * rollouts * (lengths.prompt + lengths.completion)
    per_token = 2 * shape.active_parameters
    backward = 1 if setup.lora_rank else 2  # a frozen weight needs no gradient of its own
    passes = 1 + backward + (1 if setup.checkpointing else 0)
    operations = {
        "rollout": (rollouts // setup.group * lengths.prompt + generated) * per_token,
        "scores": scored * per_token,
        "update": trained * per_token * passes,
    }
    moved = traffic(shape, setup, lengths)
    seconds = {
        "rollout": _rollout_seconds(shape, setup, lengths),
        "scores": _seconds(operations["scores"], PREFILL_SHARE, moved["scores"], setup),
        "update": _seconds(operations["update"], TRAINING_SHARE, moved["update"], setup),
        "weights to the engine": moved["weights to the engine"] / _link(setup),
    }
    return Work(
        {"generated": generated, "scored": scored, "trained": trained},
        operations,
        moved,
        seconds,
        updates=_updates(setup),
    )


def traffic(shape: Shape, setup: Setup, lengths: Lengths) -> dict[str, float]:
    """Bytes that one GPU receives in a generation batch, by phase; what each is for is in `docs/scaling.md`."""
    others = (setup.processes - 1) / setup.processes
    whole = shape.parameters * setup.compute_bytes * others if setup.shards_weights else 0.0
    contexts = 1 + setup.contrasts
    tokens = setup.rollouts * contexts * (lengths.context + lengths.completion)
    passes = ceil(tokens / max(setup.scoring_tokens, lengths.context + lengths.completion)) if setup.distills else 0
    micro_batches = setup.iterations * ceil(setup.rollouts / setup.per_device)
    trained = (
        shape.parameters
        if not setup.lora_rank
        else shape.adapter_parameters(setup.lora_rank, setup.lora_targets, setup.dora)
    )
    gathers = 2 if setup.shards_weights else 0  # forward, and backward (recomputation shares it)
    reductions = micro_batches if setup.shards_weights else _updates(setup)
    reduce = trained * 4 * others * (1 if setup.shards_optimizer else 2)
    regathered = trained * setup.compute_bytes * others * _updates(setup) if setup.strategy == "zero2" else 0.0
    texts = setup.generation_batch * (lengths.prompt * 2 + lengths.completion) * 4  # prompts twice, answers once
    return {
        "texts and verdicts": texts * others,
        "scores": passes * whole + (shape.head * 4 * others if setup.shards_weights else 0.0),
        "update": micro_batches * gathers * whole + reductions * reduce + regathered,
        "teacher": _teacher_bytes(setup, trained) * others,
        "weights to the engine": shape.parameters * setup.weight_bytes * others if setup.vllm else 0.0,
    }


def _teacher_bytes(setup: Setup, trained: int) -> float:
    """ZeRO-3 gathers policy and average and sends the average back; elsewhere each process moves what it holds."""
    if setup.strategy != "zero3" or setup.teacher != "ema" or not setup.distills:
        return 0.0
    return trained * (setup.compute_bytes if setup.lora_rank else setup.compute_bytes + 2 * 4)


def _rollout_seconds(shape: Shape, setup: Setup, lengths: Lengths) -> float:
    """Decoding until the longest answer ends; lengths are taken as exponential, cut at the longest allowed."""
    parallel = setup.vllm_parallel if setup.vllm else 1
    side_by_side = max(setup.generation_batch * parallel // setup.processes, 1)
    steps = min(setup.completion, lengths.completion * (log(side_by_side) + EULER) + 1)
    weights = 2 * shape.active_parameters / parallel
    cache = 2 * shape.key_value_elements / parallel
    read = steps * weights + side_by_side * lengths.completion * (lengths.prompt + lengths.completion) * cache
    decode = read / (setup.gpu.bandwidth * BANDWIDTH_SHARE)
    decode += steps * STEP_OVERHEAD["vllm" if setup.vllm else "transformers"]
    prefill = side_by_side * lengths.prompt * 2 * shape.active_parameters / parallel
    return decode + prefill / (setup.gpu.flops * PREFILL_SHARE)


def _seconds(operations: float, share: float, moved: float, setup: Setup) -> float:
    """Products and collectives overlap: the slower decides."""
    products = operations / setup.processes / (setup.gpu.flops * share)
    return max(products, moved / _link(setup))


def _link(setup: Setup) -> float:
    return LINK_SHARE * (NETWORK if setup.machines > 1 else setup.gpu.link)


def _updates(setup: Setup) -> int:
    return max(setup.iterations * setup.rollouts // (setup.per_device * setup.accumulation), 1)
