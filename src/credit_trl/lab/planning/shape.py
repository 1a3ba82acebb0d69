"""Sizes of a model from its configuration: its modules are built on torch's meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Configurations in `models/`, for planning offline: hub names in lower case, without their owner.
_PACKAGED = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b", "olmo-3-7b-instruct", "smollm2-135m-instruct")
_ALIASES = {"smollm2": "smollm2-135m-instruct"}
# Layers that bitsandbytes does not quantize.
_UNQUANTIZED = ("lm_head", "embed_tokens")


@dataclass(frozen=True)
class Lora:
    """A LoRA or DoRA adapter."""

    rank: int
    targets: Sequence[str] | None = None  # suffixes of module names; None or "all-linear": all except the head
    dora: bool = False


@dataclass(frozen=True)
class Shape:
    """A causal language model without its weights."""

    model: nn.Module  # modules on the meta device
    name: str  # in the report

    @cached_property
    def config(self) -> Any:
        """Configuration of the text model."""
        return self.model.config.get_text_config()

    @cached_property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return _count(self.model)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token uses: in a mixture of experts, those of its experts only."""
        count = getattr(self.config, "num_experts", None) or getattr(self.config, "num_local_experts", None)
        if not count:
            return self.parameters
        experts = sum(p.numel() for n, p in self.model.named_parameters() if ".experts." in n)
        return self.parameters - experts + experts * self.config.num_experts_per_tok // count

    @cached_property
    def _layers(self) -> list[int]:
        """Parameters of each decoder layer."""
        names = self.model._no_split_modules or ()
        return [_count(module) for module in self.model.modules() if type(module).__name__ in names]

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest decoder layer, the unit that FSDP gathers."""
        return max(self._layers, default=self.parameters)

    @property
    def outside_layers(self) -> int:
        """Parameters outside the decoder layers (embeddings, final norm, head), which FSDP gathers as one group."""
        return self.parameters - sum(self._layers)

    @property
    def head(self) -> int:
        """Parameters of the LM head, V · H."""
        return self.model.get_output_embeddings().weight.numel()

    @property
    def vocabulary(self) -> int:
        """V, the size of the vocabulary."""
        return self.model.get_output_embeddings().weight.shape[0]

    @property
    def hidden(self) -> int:
        """H, the size of a hidden state."""
        return self.config.hidden_size

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return self.config.num_hidden_layers

    @cached_property
    def _layer_configs(self) -> list[Any]:
        """Configuration of each decoder layer, which differ in Gemma 4."""
        return list(getattr(self.config, "per_layer_config", None) or [self.config] * self.layers)

    @property
    def key_value_elements(self) -> int:
        """Elements that one token adds to the key-value cache, over all layers."""
        return sum(2 * _key_heads(layer) * _head_size(layer) for layer in self._layer_configs)

    @property
    def layer_elements(self) -> int:
        """Elements that the largest decoder layer stores per token for the backward pass, without checkpointing.

        These are the inputs of the two norms and of every linear layer, queries, keys and values after the rotation,
        the attention's output, and the gate, its activation and the product of the gated feed-forward layer.
        """
        return max(map(_elements, self._layer_configs))

    @cached_property
    def quantizable(self) -> int:
        """Parameters of the linear layers that 4-bit or 8-bit loading quantizes."""
        return sum(layer.weight.numel() for name, layer in self._linear_layers() if not name.endswith(_UNQUANTIZED))

    def adapter_parameters(self, lora: Lora) -> int:
        """Trainable parameters of an adapter: r · (in + out) per target, and out more with DoRA."""
        every = lora.targets is None or "all-linear" in lora.targets
        return sum(
            lora.rank * (layer.in_features + layer.out_features) + lora.dora * layer.out_features
            for name, layer in self._linear_layers()
            if not name.endswith("lm_head") and (every or name.rpartition(".")[2] in lora.targets)
        )

    def _linear_layers(self) -> list[tuple[str, nn.Linear]]:
        return [(name, module) for name, module in self.model.named_modules() if isinstance(module, nn.Linear)]


def load_shape(name: str, config_file: str | Path | None = None, argument: str = "--model_config") -> Shape:
    """Load the shape of a model.

    Args:
        name: hub name of a packaged configuration, a directory with `config.json`, `smollm2` or `quickstart`.
        config_file: a `config.json` to read instead.
        argument: argument of the command line that gives this file, for the message.

    Raises:
        ValueError: an unknown name, a file that does not exist or is not the configuration of a causal language model.
    """
    path = _config_path(name, config_file, argument)
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a model configuration ({type(error).__name__}: {error}).") from error
    text = config.get_text_config()
    layer = (getattr(text, "per_layer_config", None) or [text])[0]
    if getattr(layer, "num_attention_heads", None) is None:
        raise ValueError(f"{path} has no `num_attention_heads`: only models with attention can be planned.")
    with torch.device("meta"):
        return Shape(AutoModelForCausalLM.from_config(config, trust_remote_code=False), name)


def _config_path(name: str, config_file: str | Path | None, argument: str) -> Path:
    if config_file is not None:
        if not Path(config_file).exists():  # transformers would look for it on the Hub
            raise ValueError(f"`{argument} {config_file}`: no such file.")
        return Path(config_file)
    if name == "quickstart" and not Path(name).is_dir():
        from credit_trl.tasks.model_names import model_path

        name = model_path(name)
    if (Path(name) / "config.json").is_file():
        return Path(name) / "config.json"
    short = _ALIASES.get(name, name.rpartition("/")[2].lower())
    if short in _PACKAGED:
        return Path(str(resources.files("credit_trl.lab.planning") / "models" / f"{short}.json"))
    raise ValueError(
        f"The sizes of {name!r} are unknown (known: {', '.join(_PACKAGED)}). Give its configuration with "
        f"`{argument} path/to/config.json`, or name a directory with one."
    )


def _head_size(layer: Any) -> int:
    return getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads


def _key_heads(layer: Any) -> int:
    return getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads


def _elements(layer: Any) -> int:
    """`Shape.layer_elements` of one layer, from its configuration."""
    queries, keys = (heads * _head_size(layer) for heads in (layer.num_attention_heads, 2 * _key_heads(layer)))
    return 6 * layer.hidden_size + 4 * queries + 3 * keys + 4 * _width(layer)


def _width(layer: Any) -> int:
    """Intermediate size of a layer's feed-forward network, for one token."""
    of_expert, experts = (getattr(layer, name, None) for name in ("moe_intermediate_size", "num_experts_per_tok"))
    if of_expert and experts:
        return of_expert * experts
    width = getattr(layer, "intermediate_size", None) or 4 * layer.hidden_size  # as in GPT-2, where it has no name
    return max(width) if isinstance(width, list | tuple) else width


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
