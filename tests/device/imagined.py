"""A GPU that does not exist: tensors that report `cuda:0` and compute on the CPU.

Operations that mix devices raise, as on a GPU. Recorded are what makes the host wait (values, shapes, copies of memory
that is not page-locked), and the masks that attention receives, each with the line of the package that asked for it.
Python sees the device; torch's own code and autograd see CPU tensors, so nothing has to be compiled.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import TrainingArguments

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
# Operations whose result's value or shape the host needs.
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "equal")
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


class Imagined(Tensor):
    """A tensor that reports `GPU`, with a CPU tensor inside."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = GPU
    is_cuda = True

    @staticmethod
    def __new__(cls, inner: Tensor) -> Imagined:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return Tensor._make_wrapper_subclass(cls, inner.size(), **layout)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.inner.detach().__reduce_ex__(protocol)  # a checkpoint holds plain tensors

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return ImaginedGpu.current.compute(func, args, kwargs or {})


def wrap(value: Any) -> Any:
    return Imagined(value) if isinstance(value, Tensor) and not isinstance(value, Imagined) else value


def unwrap(value: Any) -> Any:
    return value.inner if isinstance(value, Imagined) else value


def is_on_host(value: Any) -> bool:
    """Whether a value is a tensor of the host that is no scalar."""
    return isinstance(value, Tensor) and value.dim() > 0 and not isinstance(value, Imagined)


class ImaginedGpu(TorchDispatchMode):
    """Runs operations on the tensors inside, after the checks of a GPU.

    Attributes:
        waits: what made the host wait.
        attention: for each call of attention whether it has a mask.
    """

    current: ImaginedGpu

    def __init__(self) -> None:
        super().__init__()
        ImaginedGpu.current = self
        self.waits: list[str] = []
        self.attention: list[bool] = []
        self.page_locked: list[Tensor] = []
        self.calls_on_gpu = False  # inside a call with tensors of the GPU, which may make others

    def wait(self, what: str) -> None:
        lines = [f for f in traceback.extract_stack() if "/credit_trl/" in f.filename]
        where = f"{lines[-1].filename.split('credit_trl/')[-1]}:{lines[-1].lineno}" if lines else "a library"
        self.waits.append(f"{what} at {where}")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        target = kwargs.get("device")
        if target is not None:
            target = torch.device(target)
            kwargs = kwargs | {"device": CPU}
        if not any(isinstance(x, Imagined) for x in leaves):
            result = func(*args, **kwargs)
            on_gpu = (target is not None and target.type == "cuda") or (self.calls_on_gpu and not leaves)
            if name == "_to_copy" and on_gpu:
                self.check_upload(args[0])
            return tree_map(wrap, result) if on_gpu else result
        if name == "_fused_sdp_choice":
            return 0  # plain operations
        to_host = name == "_to_copy" and target is not None and target.type == "cpu"
        self.check(name, args, leaves, to_host)
        plain_args, plain_kwargs = tree_map(unwrap, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if to_host:
            return result
        schema = func._schema.arguments
        written = [a for a, s in zip(args, schema, strict=False) if s.alias_info and s.alias_info.is_write]
        written += [kwargs[s.name] for s in schema if s.is_out and s.name in kwargs]
        if written:  # in place: the tensors themselves
            return None if not func._schema.returns else written[0] if len(written) == 1 else tuple(written)
        return tree_map(wrap, result)

    def check(self, name: str, args: tuple, leaves: list[Tensor], to_host: bool) -> None:
        """Record a wait, or raise where devices are mixed."""
        if name in _WAITING:
            self.wait(name)
        if name == "copy_":
            if isinstance(args[0], Imagined):
                self.check_upload(args[1])
            else:
                self.wait("copy to the host")
        elif to_host:
            self.wait("copy to the host")
        elif name in _INDEXING:
            indices = [i for i in args[1] if i is not None]
            if any(isinstance(i, Imagined) and i.dtype in (torch.bool, torch.uint8) for i in indices):
                self.wait("a mask as index")
            if any(map(is_on_host, indices)):
                self.wait("an index on the host")
            if any(map(is_on_host, (args[0], *args[2:3]))):
                raise RuntimeError(f"{name} mixes devices")
        elif any(map(is_on_host, leaves)):
            raise RuntimeError(f"{name} mixes devices")

    def check_upload(self, source: Tensor) -> None:
        if is_on_host(source) and not any(source is locked for locked in self.page_locked):
            self.wait("copy from pageable memory")


class Calls(TorchFunctionMode):
    """Functions of Python that choose a device, or that have no operation."""

    def __init__(self, gpu: ImaginedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        first_argument = args[0] if args else None
        if func is Tensor.pin_memory:
            self.gpu.page_locked.append(first_argument.clone())
            return self.gpu.page_locked[-1]
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu):
            return moved(func, first_argument, args[1:], kwargs)
        device = kwargs.get("device")
        to_gpu = device is not None and torch.device(device).type == "cuda"
        if device is not None:
            kwargs = kwargs | {"device": CPU}
        calls_before = self.gpu.calls_on_gpu
        self.gpu.calls_on_gpu = any(isinstance(x, Imagined) for x in tree_leaves((args, kwargs)))
        try:
            result = self.on_gpu(func, args, kwargs) if isinstance(first_argument, Imagined) else func(*args, **kwargs)
        finally:
            self.gpu.calls_on_gpu = calls_before
        if to_gpu and func in (torch.tensor, torch.as_tensor) and not isinstance(first_argument, int | float | bool):
            self.gpu.wait("tensor of a list")
        return tree_map(wrap, result) if to_gpu else result

    def on_gpu(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call whose first argument is on the GPU."""
        first_argument = args[0]
        if func is nn.functional.scaled_dot_product_attention:
            self.gpu.attention.append(kwargs.get("attn_mask", args[3] if len(args) > 3 else None) is not None)
        if func is Tensor.numpy:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func is Tensor.tolist:
            self.gpu.wait("tolist")
        if func in (Tensor.tolist, Tensor.untyped_storage, Tensor.data_ptr):
            return func(first_argument.inner.detach())
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            places = tuple(map(self.index, args[1])) if isinstance(args[1], tuple) else self.index(args[1])
            is_indexed = any(
                isinstance(place, Tensor) for place in (places if isinstance(places, tuple) else [places])
            )
            if is_indexed and any(isinstance(value, int | float) for value in args[2:]):
                self.gpu.wait("a number of the host")
            return func(first_argument, places, *args[2:])
        return func(*args, **kwargs)

    def index(self, place: Any) -> Any:
        """What indexes a tensor, with lists and tensors of the host copied to the device."""
        if isinstance(place, list) or is_on_host(place):
            self.gpu.wait("an index on the host")
            return wrap(torch.as_tensor(place))
        return place


def moved(func: Any, tensor: Tensor, arguments: tuple, kwargs: dict[str, Any]) -> Tensor:
    """`to`, `cuda` and `cpu`, which choose between devices."""
    device = {Tensor.cuda: GPU, Tensor.cpu: CPU}.get(func, kwargs.get("device", tensor.device))
    dtype = kwargs.get("dtype", tensor.dtype)
    for argument in arguments:
        if isinstance(argument, Tensor):
            device, dtype = argument.device, argument.dtype
        elif isinstance(argument, str | torch.device):
            device = argument
        elif isinstance(argument, torch.dtype):
            dtype = argument
    target = None if torch.device(device or tensor.device).type == tensor.device.type else torch.device(device)
    if target is None and dtype in (None, tensor.dtype) and not kwargs.get("copy", False):
        return tensor
    return torch.ops.aten._to_copy(tensor, dtype=dtype, device=target)


@contextlib.contextmanager
def imagined_gpu() -> Iterator[ImaginedGpu]:
    """Inside the block the device of a run is the imagined GPU."""
    load = torch.load
    gpu = ImaginedGpu()

    def load_to(file: Any, *args: Any, map_location: Any = CPU, **options: Any) -> Any:
        loaded = load(file, *args, **options, map_location=CPU)
        return tree_map(wrap, loaded) if torch.device(map_location).type == "cuda" else loaded

    with pytest.MonkeyPatch.context() as patched, Calls(gpu), gpu:
        for owner in (Accelerator, TrainingArguments):
            patched.setattr(owner, "device", property(lambda self: GPU))
        patched.setattr(torch, "load", load_to)
        yield gpu


def place(model: nn.Module) -> None:
    """Move parameters and buffers of a model to the imagined GPU; tied ones stay tied."""
    seen: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, Imagined):
                new = nn.Parameter(Imagined(parameter.detach()), requires_grad=parameter.requires_grad)
                module._parameters[name] = seen.setdefault(id(parameter), new)
        for name, buffer in module._buffers.items():
            module._buffers[name] = wrap(buffer)
