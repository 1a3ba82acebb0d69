"""Evaluation by the paper's protocol: avg@k with bootstrap intervals over prompts.

    from credit_trl.evaluation import evaluate

    result = evaluate("Qwen/Qwen3-0.6B", "sciknoweval:chemistry", k=16, output_dir="runs/base-chemistry")
    print(result)

The statistics and the settings need numpy and scipy only; the other names load torch on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from credit_trl.evaluation.config import EvaluationConfig, SamplingConfig
from credit_trl.evaluation.statistics import bootstrap_ci, paired_bootstrap, pass_at_k

if TYPE_CHECKING:
    from credit_trl.evaluation.callback import EvaluationCallback
    from credit_trl.evaluation.protocol import evaluate
    from credit_trl.evaluation.result import Evaluation

__all__ = [
    "Evaluation",
    "EvaluationCallback",
    "EvaluationConfig",
    "SamplingConfig",
    "bootstrap_ci",
    "evaluate",
    "paired_bootstrap",
    "pass_at_k",
]

_MODULES = {"Evaluation": "result", "EvaluationCallback": "callback", "evaluate": "protocol"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
