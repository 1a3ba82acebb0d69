"""Bytes on one GPU in each phase of a step.

Weights, gradients, optimizer state, teacher and scores are exact and tested against real tensors. Activations are
estimated from shapes. What a phase allocates is free in the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch

from credit_trl.lab.planning.setup import GIB, Setup
from credit_trl.lab.planning.shape import Shape
from credit_trl.loss.scoring import stored_layout
from credit_trl.teacher.passes import PASSES_PER_GROUP

# CUDA context, NCCL buffers and cuBLAS workspaces.
RUNTIME = int(1.5 * GIB)
# Share of a GPU that the allocator loses to fragmentation.
FRAGMENTATION = 0.03
# DeepSpeed's `reduce_bucket_size` and `allgather_bucket_size`, in elements.
_ZERO_BUCKET = 500_000_000
# Tokens of a logits chunk in short memory; `loss.blocks` takes up to 8,192 if there is room.
_CHUNK_TOKENS = 256
# bitsandbytes stores a quantized absmax for every 64 quantized weights.
_QUANTIZATION_OVERHEAD = 1.016


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    steady: dict[str, int]  # allocated in every phase, by name
    phases: dict[str, dict[str, int]]  # allocated in one phase only, by phase and name

    def total(self, phase: str) -> int:
        """Bytes of a phase."""
        return sum(self.steady.values()) + sum(self.phases[phase].values())

    @property
    def peak(self) -> tuple[str, int]:
        """The phase that needs most memory, and its bytes."""
        phase = max(self.phases, key=self.total)
        return phase, self.total(phase)


def memory_of(shape: Shape, setup: Setup) -> Memory:
    """Memory of one GPU."""
    teacher = teacher_bytes(shape, setup)
    steady = {
        "runtime": RUNTIME,
        "weights": policy_bytes(shape, setup),
        "optimizer": optimizer_state_bytes(shape, setup),
        "teacher": 0 if setup.teacher_offload else teacher,
        "scores": score_bytes(setup),
    }
    if setup.has_kl_model and not setup.lora:  # an adapter is switched off instead
        steady["KL model"] = policy_bytes(shape, setup)
    phases = {"rollout": _rollout(shape, setup), "scores": _scores(shape, setup), "update": _update(shape, setup)}
    if setup.vllm and setup.vllm.mode == "colocate" and not setup.vllm.sleeps:
        for phase in ("scores", "update"):
            phases[phase]["vLLM"] = phases["rollout"]["vLLM"]
    if setup.teacher_offload:
        phases["scores"]["teacher"] = teacher
    if setup.support.in_step and setup.accumulation > 1:  # the teacher reads each micro-batch before the student
        phases["scores"]["gradients"] = phases["update"]["gradients"]
    if not setup.distills:
        phases["scores"] = {}
    return Memory(steady, phases)


def trainable_parameters(shape: Shape, setup: Setup) -> int:
    """Number of parameters with a gradient."""
    return shape.adapter_parameters(setup.lora) if setup.lora else shape.parameters


def policy_bytes(shape: Shape, setup: Setup) -> int:
    """Weights of the policy, adapter included; with DeepSpeed the bf16 copy (see `optimizer_state_bytes`)."""
    if setup.parameter_offload:
        return 0
    total = _stored_bytes(shape, 2 if setup.has_bf16_copy else setup.weight_bytes, setup.bits)
    if setup.lora:
        total += trainable_parameters(shape, setup) * _adapter_bytes(setup)
    return _per_process(total, setup.shards_weights, setup)


def gradient_bytes(shape: Shape, setup: Setup) -> int:
    """One gradient per trainable parameter, kept until the step; DDP keeps buckets of the same size beside them."""
    size = 2 if setup.has_bf16_copy else _adapter_bytes(setup) if setup.lora else setup.weight_bytes
    copies = 2 if setup.strategy == "ddp" else 1
    return copies * _per_process(trainable_parameters(shape, setup) * size, setup.shards_optimizer, setup)


def optimizer_state_bytes(shape: Shape, setup: Setup) -> int:
    """Moments of the optimizer, and DeepSpeed's fp32 weights."""
    if setup.optimizer_offload or (setup.parameter_offload and setup.strategy == "fsdp2"):
        return 0
    size = setup.optimizer_bytes + (4 if setup.has_bf16_copy else 0)
    return _per_process(trainable_parameters(shape, setup) * size, setup.shards_optimizer, setup)


def teacher_bytes(shape: Shape, setup: Setup) -> int:
    """Weights of π_ref: an fp32 average, with LoRA of the adapter only; for `"base"`, a copy of the loaded weights.

    A trust region stores both, rehearsal stores the base too, and another model is stored as it is loaded.
    """
    if setup.teacher == "trust_region" or setup.rehearsal:
        kinds = {"ema" if setup.teacher == "trust_region" else setup.teacher, "base"}
        return sum(teacher_bytes(shape, replace(setup, teacher=kind, rehearsal=0.0)) for kind in kinds)
    if not setup.distills or setup.teacher == "live":
        return 0
    if setup.teacher_model:
        own = setup.teacher_model
        stored = _stored_bytes(own.shape, own.weight_bytes, own.bits)
        return _per_process(stored, setup.shards_weights, setup)
    count = trainable_parameters(shape, setup)
    if setup.lora and setup.strategy in ("zero2", "zero3"):  # a replicated average beside the model's adapter
        return 4 * count + _per_process(count * setup.compute_bytes, setup.shards_weights, setup)
    size = 4 if setup.lora or setup.teacher == "ema" else setup.weight_bytes
    return _per_process(count * size, setup.shards_weights, setup)


def scoring_shape(shape: Shape, setup: Setup) -> Shape:
    """The model that scores: another model as the teacher, or the policy."""
    return setup.teacher_model.shape if setup.teacher_model else shape


def score_bytes(setup: Setup) -> int:
    """Scores that are stored for a generation batch (`loss.scoring.stored_layout`)."""
    if not setup.distills or setup.support.in_step:
        return 0
    per_token = sum(dtype.itemsize * prod(tail) for _, dtype, tail in stored_layout(setup.support, torch.float32))
    return setup.rollouts * setup.completion * per_token


def _rollout(shape: Shape, setup: Setup) -> dict[str, int]:
    if setup.vllm and setup.vllm.mode == "colocate":
        return {"vLLM": int(setup.vllm.share * setup.gpu.memory)}
    if setup.vllm:
        return {"weights to send": 2 * shape.largest_layer * setup.weight_bytes}
    tokens = setup.rollouts * (setup.prompt + setup.completion)
    return {
        "key-value cache": tokens * shape.key_value_elements * setup.compute_bytes,
        "gathered weights": shape.parameters * setup.compute_bytes if setup.shards_weights else 0,
        "logits": setup.rollouts * shape.vocabulary * 4 * 2,
    }


def _scores(shape: Shape, setup: Setup) -> dict[str, int]:
    """Forward passes without gradient: activations of one layer, hidden states of a group, a chunk of logits."""
    shape, longest = scoring_shape(shape, setup), setup.context + setup.completion
    tokens = max(setup.scoring_tokens, longest)
    held = min(PASSES_PER_GROUP * tokens, setup.rollouts * (1 + setup.contrasts) * setup.completion)
    layer = tokens * shape.layer_elements * _scoring_bytes(setup) // 2
    return {
        "gathered weights": _gathered_bytes(shape, setup),
        "activations": layer + _mask_bytes(tokens // longest, longest, setup),
        "hidden states": held * _state_bytes(shape, setup),
        "head": shape.head * 4 if setup.shards_weights else 0,
        "logits chunk": _CHUNK_TOKENS * shape.vocabulary * 4 * (2 if setup.contrasts else 1),
    }


def _update(shape: Shape, setup: Setup) -> dict[str, int]:
    """Forward and backward pass of one micro-batch, or part of it; those of two losses are held at once."""
    length = (max(setup.prompt, setup.context) if setup.rehearsal else setup.prompt) + setup.completion
    elements = setup.losses * shape.layers * (shape.hidden if setup.checkpointing else shape.layer_elements)
    elements += shape.layer_elements if setup.checkpointing else 0  # the recomputed layer
    rows = setup.per_device if setup.update_tokens is None else min(setup.per_device, setup.update_tokens // length)
    rows = max(rows, 1)
    activations = rows * length * elements * setup.compute_bytes
    scored = rows * setup.completion * (1 + setup.contrasts)  # teacher's tokens, scored inside the step
    in_step = setup.distills and setup.support.in_step
    return {
        "gradients": gradient_bytes(shape, setup),
        "gathered weights": _gathered_bytes(shape, setup),
        "activations": activations + setup.losses * _mask_bytes(rows, length, setup),
        "head": 0 if setup.lora else shape.head * 4,  # its gradient
        "logits chunk": _CHUNK_TOKENS * shape.vocabulary * 4 * 2,
        "hidden states": scored * _state_bytes(scoring_shape(shape, setup), setup) if in_step else 0,
        "buckets": 2 * 2 * min(_ZERO_BUCKET, shape.parameters) if setup.strategy == "zero2" else 0,
    }


def _state_bytes(shape: Shape, setup: Setup) -> int:
    """Bytes of the teacher's hidden state of a token; those of a trust region's two models are side by side."""
    return shape.hidden * _scoring_bytes(setup) * (2 if setup.teacher == "trust_region" else 1)


def _scoring_bytes(setup: Setup) -> int:
    """Bytes of an activation of the teacher; another model computes in its own dtype where it is not sharded."""
    own = setup.teacher_model
    return own.weight_bytes if own and setup.strategy in ("single", "ddp") else setup.compute_bytes


def _stored_bytes(shape: Shape, weight_bytes: int, bits: int) -> int:
    """Bytes of a model's weights, of which the linear layers may be quantized."""
    if not bits:
        return shape.parameters * weight_bytes
    quantized = int(shape.quantizable * bits / 8 * _QUANTIZATION_OVERHEAD)
    return (shape.parameters - shape.quantizable) * weight_bytes + quantized


def _gathered_bytes(shape: Shape, setup: Setup) -> int:
    """Gathered weights of a sharded model while it computes: two layers, and everything outside the layers."""
    return (2 * shape.largest_layer + shape.outside_layers) * setup.compute_bytes if setup.shards_weights else 0


def _mask_bytes(rows: int, length: int, setup: Setup) -> int:
    """The mask of PyTorch's attention, (rows, 1, length, length) in the dtype of the attention scores."""
    return 0 if setup.flash else max(rows, 1) * length * length * setup.compute_bytes


def _adapter_bytes(setup: Setup) -> int:
    """Bytes per adapter weight: PEFT trains adapters in fp32, TRL those of a quantized base in bf16."""
    return 2 if setup.bits else 4


def _per_process(total: int, sharded: bool, setup: Setup) -> int:
    return -(-total // setup.processes) if sharded else total
