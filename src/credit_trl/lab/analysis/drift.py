"""Drift of a generic phrase in finite time: the log-odds of a branch after T generation batches (`docs/theory.md`).

At a branch between a generic token A and an input-specific token B, all values are log-odds of A against B in nats:

    ℓ_0   of the policy before training, without privileged context
    δ     what the privileged context adds to them
    s     what a contrast prompt adds further, because B loses there
    ρ     rate of the teacher's average; 0 is a frozen teacher, 1 a live one
    m     of the teacher without privileged context: m ← m + ρ (ℓ − m), with m = ℓ_0 at the start
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from credit_trl.objective import Form


@dataclass(frozen=True)
class BranchDrift:
    """A branch under self-distillation with the target of one configuration.

    Args:
        log_odds: ℓ_0, in nats.
        delta: δ, in nats.
        s: in nats; 0 for a target that is only flattened.
        coef: λ; 0 is SDPO.
        rate: ρ in [0, 1].
        form: form of the target.
    """

    log_odds: float
    delta: float
    s: float
    coef: float
    rate: float
    form: Form = "subtract"

    @property
    def end_point(self) -> float:
        """ℓ* = δ (1 − λ) / λ − s of an average that has come to rest; ±inf where the drift has no bound."""
        if self.form == "subtract" and self.coef > 0.0:
            return self.delta * (1.0 - self.coef) / self.coef - self.s
        return math.copysign(math.inf, self.delta - self.coef * self.s)

    def after(self, batches: int) -> float:
        """ℓ_T of a student that reaches its target in every generation batch. Nothing is fitted.

        SDPO and guide: ℓ_0 + (δ − λ s)(1 + ρ T). Subtract: ℓ* + (1 − λ)(ℓ_0 − ℓ*)(1 − ρ λ)^T.
        """
        if self.form == "guide" or self.coef == 0.0:
            return self.log_odds + (self.delta - self.coef * self.s) * (1.0 + self.rate * batches)
        distance = (1.0 - self.coef) * (self.log_odds - self.end_point)
        return self.end_point + distance * (1.0 - self.rate * self.coef) ** batches

    def path(self, speeds: Sequence[float]) -> list[float]:
        """ℓ after each generation batch for a student of finite speed: ℓ ← ℓ + κ (a − ℓ).

        Args:
            speeds: κ in (0, 1] of every generation batch, such as one constant times the learning rate's warm-up.
        """
        student = teacher = self.log_odds
        found = []
        for speed in speeds:
            student += speed * (self.target(teacher) - student)
            teacher += self.rate * (student - teacher)
            found.append(student)
        return found

    def target(self, teacher: float) -> float:
        """Log-odds of the target a, for a teacher with log-odds m without privileged context."""
        if self.form == "guide":
            return teacher + self.delta - self.coef * self.s
        return (1.0 - self.coef) * (teacher + self.delta) - self.coef * self.s


def holding_coef(log_odds: float, delta: float, s: float, form: Form = "subtract") -> float:
    """λ_hold, at which a phrase neither rises nor falls: δ / (δ + s + ℓ_0), or δ / s for guide.

    Returns:
        0 where the privileged context does not raise the phrase; inf where no λ holds it.
    """
    if delta <= 0.0:
        return 0.0
    divisor = s if form == "guide" else delta + s + log_odds
    return delta / divisor if divisor > 0.0 else math.inf
