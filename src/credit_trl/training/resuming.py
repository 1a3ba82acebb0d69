"""Comparison of a checkpoint with the run that resumes from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from peft.utils import CONFIG_NAME as ADAPTER_CONFIG
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

# Fields of an adapter's configuration that determine its parameters and how they change the base.
_ADAPTER_FIELDS = (
    "peft_type r lora_alpha target_modules target_parameters layers_to_transform modules_to_save rank_pattern "
    "alpha_pattern use_dora use_rslora".split()
)


def check_fine_tuning(checkpoint: Path, model: nn.Module) -> None:
    """Check that a checkpoint holds what the run trains: the model, or an adapter with the same configuration.

    Args:
        checkpoint: directory of the checkpoint. One of shards, without a file of the weights, is not checked.
        model: the unwrapped policy.

    Raises:
        ValueError: the fine-tuning methods or the configurations of the adapters differ.
    """
    configs = [*checkpoint.glob(ADAPTER_CONFIG), *sorted(checkpoint.glob(f"*/{ADAPTER_CONFIG}"))]
    if not is_peft_model(model):
        if configs:
            raise ValueError(
                f"{checkpoint} was saved by a run that trained an adapter, and this run trains the whole model. "
                "Resume with the checkpoint's `peft_config` (`--use_peft`)."
            )
    elif configs:
        _check_adapter(configs[0], model.peft_config[model.active_adapter].to_dict())
    elif any((checkpoint / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME)):
        raise ValueError(
            f"{checkpoint} was saved by full fine-tuning, and this run trains an adapter. Resume without "
            f"`peft_config` (`--use_peft`), or start a new run from its weights (`model_name_or_path={checkpoint}`)."
        )


def _check_adapter(path: Path, own: dict[str, Any]) -> None:
    saved = json.loads(path.read_text())
    for name in _ADAPTER_FIELDS:
        before, now = _plain(saved.get(name)), _plain(own.get(name))
        if before != now:
            raise ValueError(
                f"The adapter of {path.parent} was saved with `{name}={before!r}`, and this run has {now!r}. Resume "
                "with the checkpoint's `peft_config`."
            )


def _plain(value: Any) -> Any:
    """A field as JSON stores it, in a fixed order; None where it is empty."""
    plain = json.loads(json.dumps(value, default=list))
    return (sorted(plain, key=str) if isinstance(plain, list) else plain) or None


def has_optimizer(checkpoint: Path) -> bool:
    """Whether a checkpoint holds the optimizer's state, in any of the layouts that transformers writes."""
    return any(any(checkpoint.glob(pattern)) for pattern in ("optimizer*", "rank*-optimizer.pt", "global_step*"))
