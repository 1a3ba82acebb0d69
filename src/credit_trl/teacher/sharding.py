"""Gathering of sharded weights (FSDP2's `DTensor`s, ZeRO-3's partitions), frozen copies, and wrapped forward passes.

Every process must call these functions, in the same order.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from credit_trl.teacher.causal_lm import use_fp32_lm_head, uses_fp32_lm_head
from credit_trl.trl_compat import _ForwardRedirection, prepare_deepspeed

T = TypeVar("T")


def is_zero3(accelerator: Accelerator | None) -> bool:
    """Whether DeepSpeed partitions the parameters over the processes."""
    if accelerator is None:
        return False
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def gathered(parameters: Iterable[Tensor], *, write: bool = False) -> AbstractContextManager[None]:
    """Gather those of the parameters that ZeRO-3 has partitioned inside the block.

    With `write` the block changes them, with the same result on every process.
    """
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_tensor")]
    if not partitioned:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if write else None)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor that is not sharded: the tensor itself, or a gathered copy of a sharded one."""
    if hasattr(tensor, "ds_tensor"):
        with gathered([tensor]):
            return tensor.detach().clone()
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    return tensor


def copy_full(target: Tensor, value: Tensor) -> None:
    """Copy a full tensor into a parameter that may be sharded."""
    if hasattr(target, "full_tensor"):
        value = distribute_tensor(value.to(target.device, target.dtype), target.device_mesh, target.placements)
    with gathered([target], write=True):
        target.copy_(value)


def full_shape(parameter: Tensor) -> torch.Size:
    """Shape of a parameter before sharding."""
    return getattr(parameter, "ds_shape", parameter.shape)


def local_part(weight: Tensor) -> Tensor:
    """The part of a weight that this process holds, under FSDP2 and DeepSpeed ZeRO-3 too."""
    weight = getattr(weight, "ds_tensor", weight)
    return weight.to_local() if hasattr(weight, "to_local") else weight


def is_whole(model: nn.Module) -> bool:
    """Whether this process holds all weights of a model that is not wrapped yet."""
    return not any(p.is_meta or isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())


def run_in_wrapped_forward(wrapper: nn.Module, unwrapped: nn.Module, work: Callable[[Tensor], T], ids: Tensor) -> T:
    """Call `work` as the forward pass of the wrapper, so that DDP, FSDP and DeepSpeed register the used parameters.

    Args:
        wrapper: the model prepared for distributed training.
        unwrapped: the model inside, which may be the wrapper itself.
        work: function of `ids` that returns tensors, a tuple or a dictionary of them. Bind other tensors to it:
            FSDP2's mixed precision casts floating-point arguments, inside dataclasses too.
        ids: integers (DDP on a GPU needs an argument).

    Returns:
        The result of `work`, before FSDP2 casts it. FSDP2's backward hooks are on these tensors.
    """
    returned: list[T] = []

    def forward(ids: Tensor) -> T:
        returned.append(work(ids))
        return returned[0]

    output = _ForwardRedirection()(wrapper, unwrapped, forward, ids)
    return returned[0] if isinstance(unwrapped, FSDPModule) else output


def reshard(module: nn.Module) -> None:
    """Reshard FSDP2's parameters, whose last groups stay gathered after a forward pass without a backward pass."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


def frozen_copy(model: PreTrainedModel, accelerator: Accelerator | None, *, precise: bool) -> nn.Module:
    """Copy a model without gradients, and place or shard the copy as the accelerator will do with the model.

    The model is not wrapped yet; ZeRO-3 may have partitioned it during loading. Without an accelerator the copy stays
    on the same device. Frozen parameters are shared with the model where neither is sharded. `precise` stores the
    copy in at least fp32, in place of DeepSpeed's precision.
    """
    if is_zero3(accelerator):
        return _zero3_copy(model, accelerator, precise)
    copied = copy.deepcopy(model).requires_grad_(False)
    copied.__dict__.pop("forward", None)  # TRL's patched forward is bound to the original
    if precise:
        copied = copied.to(torch.promote_types(copied.dtype, torch.float32))
    if accelerator is not None:
        copied = place_frozen(copied, accelerator)
    if accelerator is None or accelerator.distributed_type not in ("FSDP", "DEEPSPEED"):
        for name, parameter in model.named_parameters(remove_duplicate=False):  # tied ones by each of their names
            if not parameter.requires_grad:  # of a vision tower, for example
                owner, _, attribute = name.rpartition(".")
                setattr(copied.get_submodule(owner), attribute, parameter)
    return copied


def wrapping(state: AcceleratorState) -> str:
    """How accelerate wraps the policy, for the console: `"DDP"`, `"FSDP2"`, `"ZeRO-3"`, or `"not wrapped"`."""
    kind = state.distributed_type
    if kind == "FSDP":
        return f"FSDP{state.fsdp_plugin.fsdp_version}"
    if kind == "DEEPSPEED":
        return f"ZeRO-{state.deepspeed_plugin.zero_stage}"
    return "not wrapped" if kind == "NO" else "DDP"


def place_frozen(model: PreTrainedModel, accelerator: Accelerator) -> nn.Module:
    """Place or shard a model without gradients as the accelerator will do with the policy.

    The model is not wrapped yet; ZeRO-3 has partitioned it during loading.
    """
    if accelerator.distributed_type == "FSDP":  # by layer, as the policy; TRL's function gathers the whole model
        return fsdp2_prepare_model(accelerator, model)
    if is_zero3(accelerator):
        return _zero3_engine(model, _zero3_config(accelerator, is_precise=model.dtype == torch.float32))
    if accelerator.distributed_type == "DEEPSPEED":  # stages 1 and 2 shard only optimizer states and gradients
        return model.to(accelerator.device)
    return accelerator.prepare_model(model, evaluation_mode=True)


def _zero3_config(accelerator: Accelerator, is_precise: bool) -> dict[str, Any]:
    """DeepSpeed's configuration, without its precision where the model keeps fp32."""
    config = copy.deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
    if is_precise:
        config.pop("bf16", None)
        config.pop("fp16", None)
    return config


def _zero3_engine(model: PreTrainedModel, config: dict[str, Any]) -> nn.Module:
    plugin = SimpleNamespace(deepspeed_config=config)
    return prepare_deepspeed(model, SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin)))


def _zero3_copy(model: PreTrainedModel, accelerator: Accelerator, precise: bool) -> nn.Module:
    """Build a partitioned copy and fill it one parameter at a time, so that no process holds the whole copy."""
    import deepspeed
    from transformers.initialization import no_init_weights
    from transformers.integrations.deepspeed import prevent_arange_dtype_change

    config = _zero3_config(accelerator, precise)
    with no_init_weights(), prevent_arange_dtype_change(), deepspeed.zero.Init(config_dict_or_path=config):
        copied = type(model)(copy.deepcopy(model.config))
    copied.requires_grad_(False)
    if uses_fp32_lm_head(model):
        use_fp32_lm_head(copied)
    parameters = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            with gathered([parameters[name]]), gathered([parameter], write=True):
                parameter.copy_(parameters[name])
        for name, buffer in copied.named_buffers():  # not partitioned; some route tokens to experts
            buffer.copy_(buffers[name])
    return _zero3_engine(copied, config)
