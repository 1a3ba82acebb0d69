"""Comparison of a checkpoint with the run that resumes from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from credit_trl.config import CreditConfig

# Options that define what is trained: a resumed run with another value is another run.
_OBJECTIVE = (
    *("contrastive_coef", "contrastive_form", "contrastive_count", "contrastive_source"),
    *("distillation_weight", "distillation_alpha", "distillation_support", "distillation_topk", "distillation_tail"),
    *("teacher_model_kind", "teacher_model_name_or_path", "teacher_prompt", "num_generations"),
)
# Fields of an adapter's configuration that determine its parameters and how they change the base.
_ADAPTER_FIELDS = (
    "peft_type r lora_alpha target_modules target_parameters layers_to_transform modules_to_save rank_pattern "
    "alpha_pattern use_dora use_rslora".split()
)


def stored_options(args: CreditConfig, model: nn.Module) -> dict[str, Any]:
    """Options that a checkpoint stores, and a run that resumes from it must have: objective and adapter, as JSON.

    Args:
        model: the unwrapped policy.
    """
    options = {name: getattr(args, name) for name in _OBJECTIVE}
    adapter = model.peft_config[model.active_adapter].to_dict() if is_peft_model(model) else {}
    options |= {f"peft_config.{name}": adapter[name] for name in _ADAPTER_FIELDS if adapter.get(name)}
    return json.loads(json.dumps(options, default=sorted))


@contextmanager
def configured_optimizer(optimizer: Optimizer, scheduler: LRScheduler) -> Iterator[None]:
    """Keep the configured options of the optimizer, while the block loads its moments and the schedule's step.

    A schedule that is not a function of the step, such as `reduce_lr_on_plateau`, keeps its restored rate. DeepSpeed
    loads the optimizer earlier, so only the learning rate is kept there.
    """
    names = ("weight_decay", "betas", "eps")
    options = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    rates = list(scheduler.base_lrs) if isinstance(scheduler, LambdaLR) else []
    yield
    for group, configured in zip(optimizer.param_groups, options, strict=True):
        group |= configured
    if rates:
        scheduler.base_lrs = rates
        for group, rate, share in zip(optimizer.param_groups, rates, scheduler.lr_lambdas, strict=True):
            group |= {"initial_lr": rate, "lr": rate * share(scheduler.last_epoch)}
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]  # which is logged
