"""CREDIT for TRL: input-specific credit for on-policy self-distillation.

The public face: `CreditTrainer`, `CreditConfig`, `Verdict`; `credit_rewards` for other trainers. The first two load
TRL when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from credit_trl.rollout.verdict import Verdict

if TYPE_CHECKING:
    from credit_trl.config import CreditConfig
    from credit_trl.objective import credit_rewards
    from credit_trl.trainer import CreditTrainer

__all__ = ["CreditConfig", "CreditTrainer", "Verdict", "credit_rewards"]


def __getattr__(name: str) -> Any:
    if name in ("CreditConfig", "CreditTrainer"):
        from credit_trl.training.trl_compat import check_trl

        check_trl()  # before anything private of TRL's is imported
    if name == "CreditTrainer":
        from credit_trl.trainer import CreditTrainer

        return CreditTrainer
    if name == "CreditConfig":
        from credit_trl.config import CreditConfig

        return CreditConfig
    if name == "credit_rewards":
        from credit_trl.objective import credit_rewards

        return credit_rewards
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
