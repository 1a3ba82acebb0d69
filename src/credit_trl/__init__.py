"""CREDIT for TRL: input-specific credit for on-policy self-distillation.

Public API: `CreditTrainer`, `CreditConfig`, `Verdict`, `Task`, `evaluate`, `EvaluationCallback` and `in_process` for
verifiers that may hang. All but `Verdict` are imported on first use, because they load torch or TRL.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.verdict import Verdict

if TYPE_CHECKING:
    from credit_trl.config import CreditConfig
    from credit_trl.evaluation.callback import EvaluationCallback
    from credit_trl.evaluation.protocol import evaluate
    from credit_trl.tasks.task import Task, in_process
    from credit_trl.trainer import CreditTrainer

__all__ = ["CreditConfig", "CreditTrainer", "EvaluationCallback", "Task", "Verdict", "evaluate", "in_process"]

_MODULES = {
    "CreditConfig": "credit_trl.config",
    "CreditTrainer": "credit_trl.trainer",
    "EvaluationCallback": "credit_trl.evaluation.callback",
    "Task": "credit_trl.tasks.task",
    "evaluate": "credit_trl.evaluation.protocol",
    "in_process": "credit_trl.tasks.task",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value
