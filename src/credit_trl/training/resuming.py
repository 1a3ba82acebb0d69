"""Comparison of a checkpoint with the run that resumes from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from peft.utils import CONFIG_NAME as ADAPTER_CONFIG
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

from credit_trl.config import CreditConfig

# Fields of an adapter's configuration that determine its parameters and how they change the base.
_ADAPTER_FIELDS = (
    "peft_type r lora_alpha target_modules target_parameters layers_to_transform modules_to_save rank_pattern "
    "alpha_pattern use_dora use_rslora".split()
)
# Options of the optimizer that the configuration sets, besides the learning rate.
_OPTIMIZER_OPTIONS = ("weight_decay", "betas", "eps")


# Options that define the objective: a resumed run with another value is another run.
_OBJECTIVE = (
    *("contrastive_coef", "contrastive_form", "contrastive_count", "contrastive_source"),
    *("distillation_weight", "distillation_alpha", "distillation_support", "distillation_topk", "distillation_tail"),
    *("teacher_model_kind", "teacher_model_name_or_path", "teacher_prompt", "num_generations"),
)


def stored_options(args: CreditConfig) -> dict[str, Any]:
    """Options that a checkpoint stores, for `changed_options`."""
    return {name: getattr(args, name) for name in _OBJECTIVE}


def changed_options(saved: Mapping[str, Any], args: CreditConfig) -> list[str]:
    """Differences between a checkpoint's options and those of this run, as `name: saved value -> own value`."""
    own = stored_options(args)
    return [
        f"`{name}`: {saved[name]!r} -> {own[name]!r}" for name in own if name in saved and saved[name] != own[name]
    ]


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


class OptimizerOptions:
    """Learning rate and options of the optimizer that a run has configured, before it loads those of a checkpoint.

    DeepSpeed loads the optimizer earlier, so only the learning rate is kept there.
    """

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        self.groups = [{n: group[n] for n in _OPTIMIZER_OPTIONS if n in group} for group in optimizer.param_groups]
        self.rates = list(scheduler.base_lrs) if isinstance(scheduler, LambdaLR) else []

    def apply(self, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        """Set them after loading, with the learning rate of the schedule at its restored step.

        A schedule that is not a function of the step, such as `reduce_lr_on_plateau`, keeps its restored rate.
        """
        for group, options in zip(optimizer.param_groups, self.groups, strict=True):
            group |= options
        if self.rates:
            scheduler.base_lrs = self.rates
            for group, rate, share in zip(optimizer.param_groups, self.rates, scheduler.lr_lambdas, strict=True):
                group |= {"initial_lr": rate, "lr": rate * share(scheduler.last_epoch)}
            scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]  # which is logged
