"""`torch_compile=True` by region: each layer of student and teacher is compiled in place.

Accelerate compiles the forward pass of the whole model, but scores and loss call the backbone below it. Layers are
compiled as in torchtitan: names of parameters, hooks of FSDP2 and checkpointing stay as they are, and layers of one
class share a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from accelerate.utils.other import is_repeated_blocks
from torch import nn

from credit_trl.config import CreditConfig
from credit_trl.teacher.causal_lm import backbone


def keep_models_whole(accelerator: Accelerator) -> None:
    """Stop accelerate from compiling the models that it prepares."""
    accelerator.state.dynamo_plugin.backend = DynamoBackend.NO


def compile_layers(models: Iterable[nn.Module], config: CreditConfig) -> None:
    """Compile the layers of unwrapped models in place, each model once, with a configuration's backend and mode."""
    for model in {id(model): model for model in models}.values():
        for layer in _layers(backbone(model)):
            layer.compile(backend=config.torch_compile_backend, mode=config.torch_compile_mode)


def uncompiled(config: CreditConfig) -> AbstractContextManager:
    """Inside the block compiled layers run as they are, where a configuration compiles.

    transformers' generation grows its cache with each token, and a graph for each size would use up the limit of
    recompilations.
    """
    return torch.compiler.set_stance("force_eager") if config.torch_compile else nullcontext()


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost repeated blocks."""
    for child in module.children():
        if is_repeated_blocks(child):
            yield from child
        else:
            yield from _layers(child)
