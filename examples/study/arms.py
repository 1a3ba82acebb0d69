"""Arms of the studies: options of `CreditConfig`, by the name in the tables, and their colors in figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from credit_trl import CreditConfig, CreditTrainer

sys.path.append(str(Path(__file__).parents[1] / "family"))
from temper_only import temper

ARMS: dict[str, dict[str, Any]] = {
    "SDPO": {"contrastive_coef": 0.0},
    "CREDIT λ=0.05": {"contrastive_coef": 0.05},
    "CREDIT λ=0.1": {"contrastive_coef": 0.1},
    "CREDIT λ=0.2": {"contrastive_coef": 0.2},
    "CREDIT λ=0.5": {"contrastive_coef": 0.5},
    "CREDIT form=guide λ=0.2": {"contrastive_coef": 0.2, "contrastive_form": "guide"},
    "CREDIT form=guide λ=1": {"contrastive_coef": 1.0, "contrastive_form": "guide"},
    "CREDIT form=guide λ=1.5": {"contrastive_coef": 1.5, "contrastive_form": "guide"},
    "temper-only λ=0.1": {"contrastive_coef": 0.1},
    "GRPO": {"distillation_weight": 0.0},
}
# Name and color in figures, in the order of legends and tables.
STYLES = {
    "SDPO": ("SDPO", "#D55E00"),
    "CREDIT λ=0.05": ("CREDIT, λ = 0.05", "#56B4E9"),
    "CREDIT λ=0.1": ("CREDIT, λ = 0.1", "#0072B2"),
    "CREDIT λ=0.2": ("CREDIT, λ = 0.2", "#7A6AE0"),
    "CREDIT λ=0.5": ("CREDIT, λ = 0.5", "#B07AA1"),
    "CREDIT form=guide λ=0.2": ("guide, λ = 0.2", "#009E73"),
    "CREDIT form=guide λ=1": ("guide, λ = 1", "#009E73"),
    "CREDIT form=guide λ=1.5": ("guide, λ = 1.5", "#009E73"),
    "temper-only λ=0.1": ("temper-only, λ = 0.1", "#E69F00"),
    "hint-contrast λ=0.1": ("contrast of feedback, λ = 0.1", "#CC79A7"),  # version 0.3.0
    "GRPO": ("GRPO", "#7F7F7F"),
}
# The arms that the tables of the predicted worlds have.
DEFAULT_ARMS = (
    *("SDPO", "CREDIT λ=0.1", "CREDIT λ=0.05", "CREDIT λ=0.2"),
    *("temper-only λ=0.1", "CREDIT form=guide λ=0.2", "GRPO"),
)


def with_options(arm: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and options of an arm with further options, such as `SDPO teacher_model_kind=base`.

    The number of steps is not in the name: rows of longer runs have further steps.
    """
    added = "".join(f" {name}={value}" for name, value in options.items() if name != "max_steps")
    return arm + added, ARMS[arm] | options


def make_trainer(
    arm: str, options: dict[str, Any], model: Any, reward: Any, rows: Any, tokenizer: Any
) -> CreditTrainer:
    """The trainer of an arm, by the arm's name in `ARMS`. Temper-only has the target (1 − λ) f in place of f − λ Ĝ."""
    is_tempered = arm.startswith("temper-only")
    config = CreditConfig(**options | ({"contrastive_coef": 0.0} if is_tempered else {}))
    trainer = CreditTrainer(model, reward, config, rows, processing_class=tokenizer)
    if is_tempered:
        temper(trainer.credit_step, options["contrastive_coef"])
    return trainer
