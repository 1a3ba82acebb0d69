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
from credit_trl.evaluation.statistics import bootstrap_ci, majority_at_k, paired_bootstrap, pass_at_k, two_level_ci

if TYPE_CHECKING:
    from credit_trl.evaluation.callback import EvaluationCallback
    from credit_trl.evaluation.engines import TransformersEngine, VLLMEngine
    from credit_trl.evaluation.generation import generate_ids
    from credit_trl.evaluation.protocol import evaluate
    from credit_trl.evaluation.result import Evaluation

Sampling = SamplingConfig  # the name in version 0.1.0

__all__ = [
    "Evaluation",
    "EvaluationCallback",
    "EvaluationConfig",
    "Sampling",
    "SamplingConfig",
    "TransformersEngine",
    "VLLMEngine",
    "bootstrap_ci",
    "evaluate",
    "generate_ids",
    "majority_at_k",
    "paired_bootstrap",
    "pass_at_k",
    "two_level_ci",
]

_MODULES = {
    "Evaluation": "result",
    "EvaluationCallback": "callback",
    "TransformersEngine": "engines",
    "VLLMEngine": "engines",
    "evaluate": "protocol",
    "generate_ids": "generation",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
