"""Evaluation by the paper's protocol: avg@k with bootstrap intervals over prompts.

from credit_trl.evaluation import evaluate

result = evaluate("Qwen/Qwen3-0.6B", "sciknoweval:chemistry", k=16, output_dir="runs/base-chemistry")
print(result)
"""

from credit_trl.evaluation.callback import EvaluationCallback
from credit_trl.evaluation.config import EvaluationConfig, SamplingConfig
from credit_trl.evaluation.protocol import evaluate
from credit_trl.evaluation.result import Evaluation
from credit_trl.evaluation.statistics import bootstrap_ci, paired_bootstrap, pass_at_k

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
