"""λ that is adapted between updates: a controller holds what the contrast does at a stated level.

Two quantities can be held. `"kl"` is the mean divergence from the guided target to the teacher, `KL(softmax(a) ‖ f)`
over the positions that have a contrast, in nats: it grows with λ, so λ rises where it is below its level. `"s"` is the
mean of S_t at the sampled tokens: under the paper's form it falls as training with a larger λ goes on (its Figure on
λ), so λ rises where S_t is above its level, and is taken back where it has decayed.

After every optimizer step `log λ ← log λ ± rate · clip((quantity − level) / level, −1, 1)`: integral control in log λ,
which moves λ by a factor of `exp(rate)` at most. λ stays between `FLOOR`, from where it can rise again, and the bound
of its form.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback

from credit_trl.config import CEILING, FLOOR, CreditConfig

Quantity = Literal["kl", "s"]

# The logged metric that each quantity is, and the sign of its answer to a larger λ.
METRICS = {"kl": ("credit/kl_to_teacher", 1.0), "s": ("credit/s_mean", -1.0)}
CHECKPOINT_FILE = "contrastive_coef.json"


class AdaptiveCoefficient:
    """λ, and what it follows. The observations are sums over all processes, so every process has the same λ.

    Args:
        quantity: what is held.
        level: where.
        start: λ of the first step.
        rate: how fast log λ moves, per optimizer step.
        ceiling: λ's upper bound.
    """

    def __init__(self, quantity: Quantity, level: float, *, start: float, rate: float, ceiling: float) -> None:
        self.metric, self._sign = METRICS[quantity]
        self.level, self.rate, self.ceiling = level, rate, ceiling
        self.value = start
        self._total, self._count = 0.0, 0.0

    def observe(self, mean: float, tokens: float) -> None:
        """Take note of a micro-batch's mean of the quantity over `tokens` tokens; nothing where there were none."""
        if tokens:
            self._total += mean * tokens
            self._count += tokens

    def update(self) -> None:
        """Move λ by what was observed since the last update; it stays where nothing was."""
        if self._count:
            error = (self._total / self._count - self.level) / self.level
            factor = math.exp(-self._sign * self.rate * min(max(error, -1.0), 1.0))
            self.value = min(max(self.value * factor, FLOOR), self.ceiling)
        self._total, self._count = 0.0, 0.0

    def save(self, directory: str | Path) -> None:
        """Write λ into a checkpoint directory; one process does."""
        (Path(directory) / CHECKPOINT_FILE).write_text(json.dumps({"contrastive_coef": self.value}))

    def load(self, directory: str | Path) -> None:
        """Read it back, to the last bit.

        Raises:
            FileNotFoundError: the checkpoint is of a run whose λ was fixed.
        """
        path = Path(directory) / CHECKPOINT_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"The checkpoint {directory} has no {CHECKPOINT_FILE}: its run had a fixed λ. Resume with that "
                "`contrastive_coef`, or start a new run from the checkpoint's weights with `contrastive_coef='auto'`."
            )
        self.value = float(json.loads(path.read_text())["contrastive_coef"])


def make_adaptive(config: CreditConfig) -> AdaptiveCoefficient:
    """λ as a configuration with `contrastive_coef="auto"` wants it."""
    return AdaptiveCoefficient(
        config.contrastive_auto_quantity,
        config.contrastive_auto_level,
        start=config.contrastive_auto_start,
        rate=config.contrastive_auto_rate,
        ceiling=CEILING[config.contrastive_form],
    )


class CoefficientUpdate(TrainerCallback):
    """Adapts λ after every optimizer step."""

    def __init__(self, coefficient: AdaptiveCoefficient) -> None:
        self.coefficient = coefficient

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.coefficient.update()
