"""How large a model is, from its configuration alone: its modules are built on torch's meta device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Sizes that the package brings, for planning offline: the hub's names in lower case, without their owner.
_BROUGHT = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b", "olmo-3-7b-instruct")
# Layers that bitsandbytes quantises; the head and the embeddings stay as they are.
_KEPT_WHOLE = ("lm_head", "embed_tokens")


@dataclass(frozen=True)
class Shape:
    """A causal language model without its weights.

    Args:
        model: on the meta device.
        name: for the report.
    """

    model: nn.Module
    name: str

    @cached_property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @cached_property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token meets: of a mixture of experts, those of its experts."""
        count = getattr(self.config, "num_experts", None) or getattr(self.config, "num_local_experts", None)
        if not count:
            return self.parameters
        experts = sum(p.numel() for n, p in self.model.named_parameters() if ".experts." in n)
        return self.parameters - experts + experts * self.config.num_experts_per_tok // count

    @cached_property
    def largest_layer(self) -> int:
        """Parameters of the largest block that FSDP gathers at once: a decoder layer."""
        blocks = [m for m in self.model.modules() if type(m).__name__ in (self.model._no_split_modules or ())]
        return max((sum(p.numel() for p in block.parameters()) for block in blocks), default=self.parameters)

    @cached_property
    def outside_layers(self) -> int:
        """Parameters outside the decoder layers: embeddings, final norm and head, which FSDP keeps in one group."""
        names = type(self.model)._no_split_modules or ()
        blocks = [m for m in self.model.modules() if type(m).__name__ in names]
        return self.parameters - sum(p.numel() for block in blocks for p in block.parameters())

    @cached_property
    def head(self) -> int:
        """Parameters of the head, V · H."""
        return self.model.get_output_embeddings().weight.numel()

    @property
    def vocabulary(self) -> int:
        return self.model.get_output_embeddings().weight.shape[0]

    @property
    def hidden(self) -> int:
        return self.config.hidden_size

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @cached_property
    def key_value_elements(self) -> int:
        """Elements of the key-value cache that one token adds, over all layers."""
        heads = getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads
        size = getattr(self.config, "head_dim", None) or self.hidden // self.config.num_attention_heads
        return 2 * self.layers * heads * size

    @cached_property
    def layer_elements(self) -> int:
        """Elements a token leaves for the backward pass in one decoder layer, without checkpointing.

        Inputs of the two norms and of every linear layer, queries, keys and values after their rotation, the
        attention's output, and the gate, its activation and the product of the gated feed-forward layer.
        """
        config = self.config
        size = getattr(config, "head_dim", None) or self.hidden // config.num_attention_heads
        queries = config.num_attention_heads * size
        keys = self.key_value_elements // (2 * self.layers) * 2
        width = config.intermediate_size
        if getattr(config, "moe_intermediate_size", None):
            width = config.moe_intermediate_size * config.num_experts_per_tok
        return 6 * self.hidden + 4 * queries + 3 * keys + 4 * width

    @cached_property
    def quantisable(self) -> int:
        """Parameters of the linear layers that 4-bit or 8-bit loading replaces."""
        return sum(
            module.weight.numel()
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and not name.endswith(_KEPT_WHOLE)
        )

    def adapter_parameters(self, rank: int, targets: Sequence[str] | None, dora: bool = False) -> int:
        """Trainable parameters of a LoRA adapter: r · (in + out) for each target, and out more with DoRA.

        Args:
            rank: r.
            targets: suffixes of module names; None, or `"all-linear"`, is every linear layer but the head.
            dora: with magnitudes.
        """
        found = 0
        every = targets is None or "all-linear" in targets
        for name, module in self.model.named_modules():
            if not isinstance(module, nn.Linear) or name.endswith("lm_head"):
                continue
            if every or name.rpartition(".")[2] in targets:
                found += rank * (module.in_features + module.out_features) + (module.out_features if dora else 0)
        return found


def load_shape(name: str, config_file: str | Path | None = None) -> Shape:
    """The shape of a model.

    Args:
        name: a hub name whose sizes the package brings, or a directory with `config.json`.
        config_file: a `config.json` to read instead.

    Raises:
        ValueError: nothing is known of this name, or the file is no configuration of a causal language model.
    """
    path = _config_path(name, config_file)
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        fields = dict(json.loads(path.read_text(encoding="utf-8")))
        kind = fields.pop("model_type")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no model configuration ({type(error).__name__}: {error}).") from error
    fields.pop("_source", None)
    config = AutoConfig.for_model(kind, **fields)
    with torch.device("meta"):
        return Shape(AutoModelForCausalLM.from_config(config), name)


def _config_path(name: str, config_file: str | Path | None) -> Path:
    if config_file is not None:
        return Path(config_file)
    if (Path(name) / "config.json").is_file():
        return Path(name) / "config.json"
    if name == "quickstart":
        from credit_trl.tasks.quickstart_model import base_directory

        return Path(str(base_directory())) / "config.json"
    short = name.rpartition("/")[2].lower()
    if short in _BROUGHT:
        return Path(str(resources.files("credit_trl.lab.planning") / "models" / f"{short}.json"))
    raise ValueError(
        f"The sizes of {name!r} are not known here (known: {', '.join(_BROUGHT)}). Give its configuration: "
        "`--model_config path/to/config.json`, or a directory that holds one as `--model_name_or_path`."
    )
