"""Weights that lie in parts on several processes, made whole for a moment: FSDP2's `DTensor`s and ZeRO-3's partitions.

And work that goes on inside their wrapper. Every process of the run must call these functions, in the same order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from trl.models import prepare_deepspeed
from trl.models.utils import _ForwardRedirection

from credit_trl.teacher.causal_lm import use_fp32_lm_head, uses_fp32_lm_head

T = TypeVar("T")


def is_zero3(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed keeps a part of each parameter on each process."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


@contextmanager
def gathered(parameters: Iterable[Tensor], *, write: bool = False) -> Iterator[None]:
    """Inside, parameters that ZeRO-3 has partitioned are whole; all others are as they were.

    Args:
        parameters: of any kind.
        write: they are changed inside, on every process alike.
    """
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_tensor")]
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if write else None):
        yield


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor: itself where it is in one piece, else a copy."""
    if hasattr(tensor, "ds_tensor"):
        with gathered([tensor]):
            return tensor.detach().clone()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def copy_full(target: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a parameter, sharded or not."""
    if hasattr(target, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(target.device, target.dtype), target.device_mesh, target.placements)
    with gathered([target], write=True):
        target.copy_(value)


def full_shape(parameter: Tensor) -> torch.Size:
    """The shape of the whole parameter."""
    return getattr(parameter, "ds_shape", parameter.shape)


def run_in_wrapped_forward(
    wrapper: nn.Module, unwrapped: nn.Module, work: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Call `work` as the wrapper's forward, where DDP, FSDP and DeepSpeed see parameters used.

    Args:
        wrapper: the model as it was prepared for distributed training.
        unwrapped: the model inside, perhaps the same.
        work: returns tensors, perhaps in a tuple or a dictionary, and may bind others beforehand.
        args, kwargs: of `work`: integers and masks, one at least (DDP on a GPU fails on none). FSDP2's mixed precision
            rounds floats on their way in, those inside dataclasses too.

    Returns:
        What `work` returned, from before FSDP2 rounds it: the hooks of its backward pass are on those very tensors.
    """
    returned: list[T] = []

    def keeping(*args: Any, **kwargs: Any) -> T:
        returned.append(work(*args, **kwargs))
        return returned[0]

    output = _ForwardRedirection()(wrapper, unwrapped, keeping, *args, **kwargs)
    return returned[0] if isinstance(unwrapped, FSDPModule) else output


def reshard(module: nn.Module) -> None:
    """After a forward without a backward, FSDP2's last groups are still gathered: their parameters are not shards."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


def frozen_copy(model: PreTrainedModel, *, precise: bool) -> PreTrainedModel:
    """A copy that is never trained, on the same device.

    Args:
        model: a causal LM that is in one piece.
        precise: hold the copy in fp32 at least.
    """
    twin = copy.deepcopy(model).requires_grad_(False)
    twin.__dict__.pop("forward", None)  # TRL's patched forward is bound to the model, not to its copy
    return twin.to(torch.promote_types(twin.dtype, torch.float32)) if precise else twin


def sharded_copy(model: PreTrainedModel, accelerator: Accelerator, *, precise: bool) -> nn.Module:
    """A frozen copy that is placed, or sharded, as the model itself is going to be.

    Args:
        model: a causal LM, not wrapped yet; ZeRO-3 may have partitioned it while it was loaded.
        accelerator: the trainer's.
        precise: hold the copy in fp32 at least, which DeepSpeed would cast to its own precision.
    """
    if is_zero3(accelerator):
        return _zero3_copy(model, accelerator, precise)
    twin = frozen_copy(model, precise=precise)
    if accelerator.distributed_type == "FSDP":  # layer by layer, as the model: TRL's own would gather it all at once
        return fsdp2_prepare_model(accelerator, twin)
    if accelerator.distributed_type == "DEEPSPEED":  # stages 1 and 2 shard what a frozen model does not have
        return twin.to(accelerator.device)
    return accelerator.prepare_model(twin, evaluation_mode=True)


def _zero3_copy(model: PreTrainedModel, accelerator: Accelerator, precise: bool) -> nn.Module:
    """Built in parts and filled from the model one parameter at a time, so that no process ever holds it whole."""
    import deepspeed
    from transformers.initialization import no_init_weights
    from transformers.integrations.deepspeed import prevent_arange_dtype_change

    config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
    if precise:
        config = {name: value for name, value in config.items() if name not in ("bf16", "fp16")}
    with no_init_weights(), prevent_arange_dtype_change(), deepspeed.zero.Init(config_dict_or_path=config):
        twin = type(model)(copy.deepcopy(model.config))
    twin.requires_grad_(False)
    if uses_fp32_lm_head(model):
        use_fp32_lm_head(twin)
    named, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            with gathered([named[name]]), gathered([parameter], write=True):
                parameter.copy_(named[name])
        for name, buffer in twin.named_buffers():  # whole on every process; some decide which expert a token goes to
            buffer.copy_(buffers[name])
    plugin = SimpleNamespace(deepspeed_config=config)
    return prepare_deepspeed(twin, SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)))
