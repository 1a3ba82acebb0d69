"""What lies on one GPU in each phase of a step, in bytes.

What lies there all the time (weights, optimizer, teacher, scores) and the gradients are counted exactly and tested
against real tensors. Activations are counted from shapes. What a phase adds is gone in the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from credit_trl.lab.planning.setup import GIB, Setup
from credit_trl.lab.planning.shape import Shape

PHASES = ("rollout", "scores", "update")

# CUDA context, NCCL's buffers, cuBLAS workspaces: what nvidia-smi shows of an idle rank.
RUNTIME = int(1.5 * GIB)
# Share of a GPU that the allocator loses to fragments.
FRAGMENTS = 0.03
# `scoring._PASSES_OF_GROUP`: hidden states of so many passes are held at once.
_HELD_PASSES = 4
# DeepSpeed's `reduce_bucket_size` and `allgather_bucket_size`, in elements.
_ZERO_BUCKET = 500_000_000
# Rows that `kernels.chunks` needs at least to be of use, of the 4,096 that it takes where there is room.
_ROWS = 256
# What bitsandbytes keeps for 64 quantised weights: an absmax, itself quantised.
_QUANTISATION_OVERHEAD = 1.016


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Args:
        steady: there in every phase.
        phases: what each phase adds.
    """

    steady: dict[str, int]
    phases: dict[str, dict[str, int]] = field(default_factory=dict)

    def total(self, phase: str) -> int:
        return sum(self.steady.values()) + sum(self.phases[phase].values())

    @property
    def peak(self) -> tuple[str, int]:
        """The phase that needs most, and how much that is."""
        phase = max(self.phases, key=self.total)
        return phase, self.total(phase)


def memory_of(shape: Shape, setup: Setup) -> Memory:
    """What one GPU holds."""
    steady = {
        "runtime": RUNTIME,
        "weights": weights(shape, setup),
        "optimizer": optimizer(shape, setup),
        "teacher": 0 if setup.teacher_offload else teacher(shape, setup),
        "scores": scores(setup),
    }
    phases = {"rollout": _rollout(shape, setup), "scores": _scoring(shape, setup), "update": _update(shape, setup)}
    if setup.vllm == "colocate" and not setup.vllm_sleeps:
        for phase in ("scores", "update"):
            phases[phase]["vLLM"] = phases["rollout"]["vLLM"]
    if setup.teacher_offload:  # it comes back to score
        phases["scores"]["teacher"] = teacher(shape, setup)
    if not setup.distills:
        phases["scores"] = {}
    return Memory(steady, phases)


# ------------------------------------------------------------------ what lies there


def trainable(shape: Shape, setup: Setup) -> int:
    """Parameters that have gradients."""
    if not setup.lora_rank:
        return shape.parameters
    return shape.adapter_parameters(setup.lora_rank, setup.lora_targets, setup.dora)


def weights(shape: Shape, setup: Setup) -> int:
    """The policy's own, adapters included. DeepSpeed computes in a bf16 copy of fp32 masters (see `optimizer`)."""
    size = 2 if setup.strategy in ("zero2", "zero3") and setup.compute_bytes == 2 else setup.weight_bytes
    total = shape.parameters * size
    if setup.bits:
        quantised = shape.quantisable
        total = (shape.parameters - quantised) * setup.weight_bytes
        total += int(quantised * setup.bits / 8 * _QUANTISATION_OVERHEAD)
    if setup.lora_rank:
        total += trainable(shape, setup) * _adapter_bytes(setup)
    if setup.parameter_offload:
        return 0
    return _shard(total, setup.shards_weights, setup)


def gradients(shape: Shape, setup: Setup) -> int:
    """One a trainable parameter, until the step; DDP keeps the buckets that it reduces beside them."""
    size = _adapter_bytes(setup) if setup.lora_rank else setup.weight_bytes
    if setup.strategy in ("zero2", "zero3") and setup.compute_bytes == 2:
        size = 2
    copies = 2 if setup.strategy == "ddp" else 1
    return copies * _shard(trainable(shape, setup) * size, setup.shards_optimizer, setup)


def optimizer(shape: Shape, setup: Setup) -> int:
    """Adam's moments, and DeepSpeed's fp32 masters."""
    if setup.optimizer_offload or (setup.parameter_offload and setup.strategy == "fsdp2"):
        return 0
    size = setup.optimizer_bytes
    if setup.strategy in ("zero2", "zero3") and setup.compute_bytes == 2:
        size += 4
    return _shard(trainable(shape, setup) * size, setup.shards_optimizer, setup)


def teacher(shape: Shape, setup: Setup) -> int:
    """π_ref: an fp32 average, of the adapter only with LoRA. `"base"` is a copy as it was loaded."""
    if not setup.distills or setup.teacher == "live":
        return 0
    size = 4 if setup.teacher == "ema" else setup.weight_bytes
    count = trainable(shape, setup) if setup.lora_rank else shape.parameters
    if setup.lora_rank and setup.strategy in ("zero2", "zero3"):  # the average is whole, beside the model's adapter
        return 4 * count + _shard(count * setup.compute_bytes, setup.shards_weights, setup)
    return _shard(count * (4 if setup.lora_rank else size), setup.shards_weights, setup)


def scores(setup: Setup) -> int:
    """What `scoring` stores for a generation batch: ids, f and Ĝ of the support and the tail, five numbers a token."""
    if not (setup.distills and setup.stores_scores):
        return 0
    per_token = 4 * setup.topk + 2 * 4 * (setup.topk + 1) + 3 * 4
    return setup.rollouts * setup.completion * per_token


# ------------------------------------------------------------------ what a phase adds


def _rollout(shape: Shape, setup: Setup) -> dict[str, int]:
    if setup.vllm == "colocate":
        return {"vLLM": int(setup.vllm_share * setup.gpu.memory)}
    if setup.vllm == "server":
        return {"weights to send": 2 * shape.largest_layer * setup.weight_bytes}
    tokens = setup.rollouts * (setup.prompt + setup.completion)
    return {
        "key-value cache": tokens * shape.key_value_elements * setup.compute_bytes,
        "gathered weights": shape.parameters * setup.compute_bytes if setup.shards_weights else 0,
        "logits": setup.rollouts * shape.vocabulary * 4 * 2,
    }


def _scoring(shape: Shape, setup: Setup) -> dict[str, int]:
    """Forward passes without gradients: one layer's activations, hidden states of a group, a chunk of logits."""
    longest = setup.context + setup.completion
    tokens = max(setup.scoring_tokens, longest)
    return {
        "gathered weights": _gathered(shape, setup),
        "activations": tokens * shape.layer_elements * setup.compute_bytes // 2
        + _mask(tokens // longest, longest, setup),
        "hidden states": min(_HELD_PASSES * tokens, setup.rollouts * (1 + setup.contrasts) * setup.completion)
        * shape.hidden
        * setup.compute_bytes,
        "head": shape.head * 4 if setup.shards_weights else 0,
        "logits chunk": _ROWS * shape.vocabulary * 4 * (2 if setup.contrasts else 1),
    }


def _update(shape: Shape, setup: Setup) -> dict[str, int]:
    """One micro-batch forward and backward."""
    length = setup.prompt + setup.completion
    tokens = setup.per_device * length
    stored = shape.layers * (shape.hidden if setup.checkpointing else shape.layer_elements)
    recomputed = shape.layer_elements if setup.checkpointing else 0
    has_head_gradient = not setup.lora_rank
    return {
        "gradients": gradients(shape, setup),
        "gathered weights": _gathered(shape, setup),
        "activations": tokens * (stored + recomputed) * setup.compute_bytes + _mask(setup.per_device, length, setup),
        "head": shape.head * 4 * (1 if has_head_gradient else 0),
        "logits chunk": _ROWS * shape.vocabulary * 4 * 2,
        "buckets": 2 * 2 * min(_ZERO_BUCKET, shape.parameters) if setup.strategy == "zero2" else 0,
    }


def _gathered(shape: Shape, setup: Setup) -> int:
    """What a sharded model holds whole while it computes: the layer at work, the next one, and all outside layers."""
    if not setup.shards_weights:
        return 0
    return (2 * shape.largest_layer + shape.outside_layers) * setup.compute_bytes


def _mask(rows: int, length: int, setup: Setup) -> int:
    """The mask of PyTorch's own attention: (rows, 1, length, length), added to the scores in their dtype."""
    return 0 if setup.flash else max(rows, 1) * length * length * setup.compute_bytes


def _adapter_bytes(setup: Setup) -> int:
    """PEFT trains adapters in fp32, whatever the base's dtype; TRL puts those of a quantised base in bf16."""
    return 2 if setup.bits else 4


def _shard(total: int, sharded: bool, setup: Setup) -> int:
    return -(-total // setup.processes) if sharded else total
