"""Adaptive contrast strength: a controller that changes λ between updates to hold a metric at a target level.

Two metrics can be held. `"kl"` is `KL(softmax(a) ‖ f)`, the mean divergence from the guided target to the teacher over
the positions that have a contrast, in nats. It grows with λ, so λ rises while the metric is below its level. `"s"` is
the mean of S_t at the sampled tokens. Under the paper's form it falls as training with a larger λ goes on (the paper's
figure on λ), so λ rises while the metric is above its level.

After each optimizer step `log λ ← log λ ± rate · clip((metric − level) / level, −1, 1)`, integral control in log λ,
which changes λ by a factor of at most `exp(rate)`. λ stays between `FLOOR`, from which it can rise again, and the
upper bound of the contrast form.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback

from credit_trl.config import CEILING, FLOOR, CreditConfig

# Quantity -> the logged metric, and the sign of its change when λ grows.
METRICS = {"kl": ("credit/kl_to_teacher", 1.0), "s": ("credit/s_mean", -1.0)}
COEFFICIENT_FILE = "contrastive_coef.json"


class AdaptiveCoefficient(TrainerCallback):
    """λ and the controller that updates it, after each optimizer step of the trainer that it is added to.

    Observations are sums over all processes, so every process computes the same λ.

    Args:
        quantity: the metric to hold.
        level: its target.
        start: λ of the first step.
        rate: largest change of log λ per optimizer step.
        ceiling: upper bound of λ.
    """

    def __init__(self, quantity: Literal["kl", "s"], level: float, *, start: float, rate: float, ceiling: float):
        self.metric, self._sign = METRICS[quantity]
        self.level, self.rate, self.ceiling = level, rate, ceiling
        self.value = start
        self._total, self._count = 0.0, 0.0

    def observe(self, mean: float, tokens: float) -> None:
        """Add the metric of a micro-batch, a mean over `tokens` tokens. Without tokens, do nothing."""
        if tokens:
            self._total += mean * tokens
            self._count += tokens

    def update(self) -> None:
        """Update λ from the observations since the last call. Without observations, λ does not change."""
        if self._count:
            error = (self._total / self._count - self.level) / self.level
            factor = math.exp(-self._sign * self.rate * min(max(error, -1.0), 1.0))
            self.value = min(max(self.value * factor, FLOOR), self.ceiling)
        self._total, self._count = 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.update()

    def save(self, directory: str | Path) -> None:
        """Write λ into a checkpoint directory; call it on one process."""
        (Path(directory) / COEFFICIENT_FILE).write_text(json.dumps({"contrastive_coef": self.value}))

    def load(self, directory: str | Path) -> None:
        """Read λ from a checkpoint directory, bit for bit.

        Raises:
            FileNotFoundError: the checkpoint comes from a run with a fixed λ.
        """
        path = Path(directory) / COEFFICIENT_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"The checkpoint {directory} has no {COEFFICIENT_FILE}: its run had a fixed λ. Resume with that "
                "`contrastive_coef`, or start a new run from the checkpoint's weights with `contrastive_coef='auto'`."
            )
        self.value = float(json.loads(path.read_text())["contrastive_coef"])


def make_adaptive(config: CreditConfig) -> AdaptiveCoefficient:
    """Build the controller of a configuration with `contrastive_coef="auto"`."""
    return AdaptiveCoefficient(
        config.contrastive_auto_quantity,
        config.contrastive_auto_level,
        start=config.contrastive_auto_start,
        rate=config.contrastive_auto_rate,
        ceiling=CEILING[config.contrastive_form],
    )
