"""Tokens, operations, traffic between GPUs and time of one generation batch.

Time is a roofline estimate: matrix products run at a fixed share of the GPU's peak, decoding reads weights and cache
from memory, collectives use NVLink inside a node and the network between nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, comb, log

from credit_trl.lab.planning.memory import scoring_shape, trainable_parameters
from credit_trl.lab.planning.setup import Setup
from credit_trl.lab.planning.shape import Shape
from credit_trl.teacher.packing import SHORTEST_SHARED

# Shares of the peak that large bf16 models reach in practice.
PREFILL_SHARE = 0.5
TRAINING_SHARE = 0.4
BANDWIDTH_SHARE = 0.7
LINK_SHARE = 0.7
# Bytes per second of the network between nodes, for each GPU: 400 Gbit/s.
NETWORK = 50e9
# Seconds to launch the kernels of a decoding step; vLLM replays a CUDA graph.
STEP_OVERHEAD = {"vllm": 2e-3, "transformers": 25e-3}
EULER = 0.5772
# Seconds until a small all-reduce inside a node ends, in a CUDA graph.
ALL_REDUCE_LATENCY = 8e-6


@dataclass(frozen=True)
class Lengths:
    """Mean lengths in tokens; a configuration only has the maximum lengths."""

    prompt: int  # the student's
    completion: int
    context: int  # a teacher or contrast prompt, with demonstration and feedback if the teacher reads them


@dataclass(frozen=True)
class Work:
    """Cost of a generation batch, from rollout to the last update."""

    # Over all processes: `generated`, `scored`, `trained`, `padding` that the update reads beside them, and
    # `old_logps`, read without gradient for log-probabilities at rollout time, also of the KL model, with padding.
    # Padding is negative where packed rollouts share their prompt.
    tokens: dict[str, int]
    operations: dict[str, float]  # floating point operations by phase, over all processes
    moved: dict[str, float]  # bytes that one GPU receives from others, by purpose
    seconds: dict[str, float]  # by phase
    updates: float  # optimizer steps; below 1 where one takes several generation batches


def default_lengths(setup: Setup) -> Lengths:
    """A quarter of the maximum lengths, as the mean is unknown before a run."""
    prompt, completion = max(setup.prompt // 4, 1), max(setup.completion // 4, 1)
    return Lengths(prompt, completion, mean_context(setup, prompt, completion))


def mean_context(setup: Setup, prompt: int, completion: int) -> int:
    """Tokens of a teacher prompt: the student's own, or with a demonstration and 256 tokens of feedback."""
    return prompt if setup.is_plain else min(setup.context, prompt + completion + 256)


def work_of(shape: Shape, setup: Setup, lengths: Lengths) -> Work:
    """Tokens, operations, traffic and time of one generation batch."""
    prompt = (1.0 - setup.rehearsal) * lengths.prompt + setup.rehearsal * lengths.context  # that the student reads
    valid = round(setup.generation_batch * (prompt + lengths.completion))
    logps_passes, iterations, in_step = setup.old_logps + setup.has_kl_model, setup.iterations, setup.support.in_step
    tokens = {
        "generated": setup.generation_batch * lengths.completion,
        "scored": round(setup.generation_batch * _scored_tokens(setup, lengths)) * (iterations if in_step else 1),
        "trained": iterations * valid,
        "padding": round(iterations * valid * (padding_factor(setup, lengths) - 1.0)),
        "old_logps": round(logps_passes * valid * padding_factor(setup, lengths, whole_batch=True)),
    }
    per_token = 2 * shape.active_parameters
    backward = 1 if setup.lora else 2  # a frozen weight needs no gradient
    passes = setup.losses * (1 + backward + (1 if setup.checkpointing else 0))
    prompts = setup.generation_batch // setup.group * lengths.prompt
    operations = {
        "rollout": (prompts + tokens["generated"]) * per_token,
        "scores": tokens["scored"] * 2 * scoring_shape(shape, setup).active_parameters,
        "old log-probabilities": tokens["old_logps"] * per_token,
        "update": (tokens["trained"] + tokens["padding"]) * per_token * passes,
    }
    moved = traffic(shape, setup, lengths)
    seconds = {"rollout": rollout_seconds(shape, setup, lengths)}
    shares = {"scores": PREFILL_SHARE, "old log-probabilities": PREFILL_SHARE, "update": TRAINING_SHARE}
    for phase, share in shares.items():
        seconds[phase] = _phase_seconds(operations[phase], share, moved[phase], setup)
    seconds["weights to the engine"] = moved["weights to the engine"] / _link(setup)
    return Work(tokens, operations, moved, seconds, _updates(setup))


def traffic(shape: Shape, setup: Setup, lengths: Lengths) -> dict[str, float]:
    """Bytes that one GPU receives in a generation batch, by purpose; `docs/scaling.md` lists the collectives."""
    others = (setup.processes - 1) / setup.processes
    gathered = setup.compute_bytes * others if setup.shards_weights else 0.0  # bytes per parameter
    whole, scorer = shape.parameters * gathered, scoring_shape(shape, setup)
    pass_tokens = max(setup.scoring_tokens, lengths.context + lengths.completion)
    micro_batches = setup.iterations * ceil(setup.rollouts / setup.per_device)
    # Calls of the teacher, each with so many rollouts: one, or one in each micro-batch.
    calls, rollouts = (micro_batches, setup.per_device) if setup.support.in_step else (1, setup.rollouts)
    passes = calls * ceil(rollouts * _scored_tokens(setup, lengths) / pass_tokens)
    heads = calls * scorer.head * 4 * others if setup.shards_weights else 0.0
    trained = trainable_parameters(shape, setup)
    gathers = 2 * setup.losses  # forward, and backward with its recomputation
    old_passes = (setup.old_logps + setup.has_kl_model) * ceil(setup.rollouts / setup.per_device)
    reductions = micro_batches if setup.shards_weights else _updates(setup)
    reduce = trained * 4 * others * (1 if setup.shards_optimizer else 2)
    regathered = trained * setup.compute_bytes * others * _updates(setup) if setup.strategy == "zero2" else 0.0
    texts = setup.generation_batch * (lengths.prompt * 2 + lengths.completion) * 4  # prompts twice, completions once
    return {
        "texts and verdicts": texts * others,
        "scores": passes * scorer.parameters * gathered + heads,
        "old log-probabilities": old_passes * whole,
        "update": micro_batches * gathers * whole + reductions * reduce + regathered,
        "teacher": _teacher_traffic(setup, trained) * others,
        "weights to the engine": shape.parameters * setup.weight_bytes * others if setup.vllm else 0.0,
    }


def padding_factor(setup: Setup, lengths: Lengths, whole_batch: bool = False) -> float:
    """Tokens that the student reads over those without padding, for lengths exponential up to the maximum.

    Samples are ordered by length within an optimizer step, with `whole_batch` within the generation batch as in the
    pass of old log-probabilities, and each micro-batch is as long as its longest. Prompts are taken as equally long.
    Below 1 where packed rollouts of a micro-batch share their prompt.
    """
    if setup.per_device == 1:
        return 1.0
    if setup.packed:
        repeated = _repeated_prompts(setup) if setup.shares_prompts and lengths.prompt >= SHORTEST_SHARED else 0.0
        return 1.0 - repeated * lengths.prompt / (lengths.prompt + lengths.completion)
    window = setup.rollouts if whole_batch else min(setup.per_device * setup.accumulation, setup.rollouts)
    # Expected order statistics of an exponential distribution: the k-th longest of n is its mean times Σ_{j ≥ k} 1/j.
    tails = [sum(1 / j for j in range(k, window + 1)) for k in range(1, window + 1)]
    drawn = [lengths.prompt + min(lengths.completion * tail, setup.completion) for tail in tails]
    read = sum(drawn[i] * len(drawn[i : i + setup.per_device]) for i in range(0, window, setup.per_device))
    return read / sum(drawn)


def _repeated_prompts(setup: Setup) -> float:
    """Expected share of rollouts whose prompt another rollout of their micro-batch has: micro-batches are random."""
    rollouts, group, drawn = setup.rollouts, min(setup.group, setup.rollouts), min(setup.per_device, setup.rollouts)
    is_absent = comb(rollouts - group, drawn) / comb(rollouts, drawn)  # of a prompt, in a micro-batch
    return 1.0 - rollouts / group * (1.0 - is_absent) / drawn


def _scored_tokens(setup: Setup, lengths: Lengths) -> float:
    """Tokens that are scored for one rollout; a rehearsal batch has no contrasts and one teacher."""
    passes = (1 + setup.contrasts) * (2 if setup.teacher == "trust_region" else 1)
    mean = (1.0 - setup.rehearsal) * passes + setup.rehearsal
    return mean * (lengths.context + lengths.completion) if setup.distills else 0


def _teacher_traffic(setup: Setup, trained: int) -> float:
    """Bytes of an EMA update: ZeRO-3 gathers policy and average and returns the average; others move nothing."""
    if setup.strategy != "zero3" or setup.teacher not in ("ema", "trust_region") or not setup.distills:
        return 0.0
    return trained * (setup.compute_bytes if setup.lora else setup.compute_bytes + 2 * 4)


def rollout_seconds(shape: Shape, setup: Setup, lengths: Lengths) -> float:
    """Time until the longest completion ends; lengths are taken as exponential up to the maximum."""
    parallel = setup.vllm.parallel if setup.vllm else 1
    concurrent = max(setup.generation_batch * parallel // setup.processes, 1)
    steps = min(setup.completion, lengths.completion * (log(concurrent) + EULER) + 1)
    weights = 2 * shape.active_parameters / parallel
    cache = 2 * shape.key_value_elements / parallel
    read = steps * weights + concurrent * lengths.completion * (lengths.prompt + lengths.completion) * cache
    decode = read / (setup.gpu.bandwidth * BANDWIDTH_SHARE)
    decode += steps * STEP_OVERHEAD["vllm" if setup.vllm else "transformers"]
    tokens = concurrent * lengths.completion  # each is summed over the engine's GPUs twice a layer
    summed = 2 * shape.layers * tokens * shape.hidden * 2 * 2 * (parallel - 1) / parallel
    decode += summed / (LINK_SHARE * setup.gpu.link)
    decode += 2 * shape.layers * steps * ALL_REDUCE_LATENCY if parallel > 1 else 0.0
    prefill = concurrent * lengths.prompt * 2 * shape.active_parameters / parallel
    return decode + prefill / (setup.gpu.flops * PREFILL_SHARE)


def _phase_seconds(operations: float, share: float, moved: float, setup: Setup) -> float:
    """The longer of products and collectives, which overlap."""
    products = operations / setup.processes / (setup.gpu.flops * share)
    return max(products, moved / _link(setup))


def _link(setup: Setup) -> float:
    return LINK_SHARE * (NETWORK if setup.machines > 1 else setup.gpu.link)


def _updates(setup: Setup) -> float:
    """Optimizer steps of a generation batch; below 1 where a step takes several generation batches."""
    return setup.iterations * setup.rollouts / (setup.per_device * setup.accumulation)
