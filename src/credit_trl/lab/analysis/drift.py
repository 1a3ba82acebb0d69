"""Generic phrases under self-distillation: branches of token maps, the λ that holds a phrase, and its drift in time.

At a branch between a generic token A and an input-specific token B, all values are in nats:

    ℓ_0   log-odds of A against B of the policy, without privileged context
    δ     ΔV(A) − ΔV(B), what the privileged context adds to them
    s     S(B) − S(A), what a contrast prompt adds further, because B loses there
    ρ     rate of the teacher's average; 0 is a frozen teacher, 1 a live one
    m     log-odds of the teacher without privileged context: m ← m + ρ (ℓ − m), with m = ℓ_0 at the start

A ends rarer than B where λ exceeds λ_c = δ/(δ + s), with ℓ_0 + δ in place of δ for a frozen teacher. With δ > 0 it
does not rise where λ is at least λ_hold = δ/(δ + s + ℓ_0), or δ/s for the form `"guide"`. `docs/theory.md` has the
derivations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pandas import DataFrame, Series, concat
from scipy.special import expit
from torch import Tensor

from credit_trl.lab.analysis.tokenmap import TokenMap
from credit_trl.objective import Form
from credit_trl.tasks.escaping import markdown_table, table_cell

# A and B are chosen among the alternatives to which student or teacher gives this probability.
MIN_PROBABILITY = 0.01
# B is the likeliest of them with S of at least the first, A the likeliest with S of at most the second, in nats.
MIN_SPECIFIC, MAX_GENERIC = 1.0, 0.5


def find_branches(token_map: TokenMap) -> dict[str, Tensor]:
    """N branches of a map, at most one a position; none without contrast prompts, or where A or B is missing.

    Returns:
        Tensors of shape (N,): `positions` in the response; `generic_ids` and `specific_ids`, ids of A, the likeliest
        generic token, and of B; `log_odds` ℓ_0, `delta` and `s` > 0, in nats.
    """
    tokens = token_map.scores.alternatives
    likelihood = torch.maximum(tokens.student_logps, tokens.teacher_logps).exp()
    likelihood = likelihood.where(likelihood >= MIN_PROBABILITY, 0.0)
    generic = likelihood.where(tokens.specific <= MAX_GENERIC, 0.0)
    particular = likelihood.where(tokens.specific >= MIN_SPECIFIC, 0.0)
    rows = (generic.any(dim=-1) & particular.any(dim=-1)).nonzero().squeeze(-1)
    a, b = (distribution[rows].argmax(dim=-1, keepdim=True) for distribution in (generic, particular))

    def at(values: Tensor, index: Tensor) -> Tensor:
        return values[rows].gather(-1, index).squeeze(-1)

    return {
        "positions": rows,
        "generic_ids": at(tokens.ids, a),
        "specific_ids": at(tokens.ids, b),
        "log_odds": (at(tokens.student_logps, a) - at(tokens.student_logps, b)).double(),
        "delta": at(tokens.delta_v, a).double() - at(tokens.delta_v, b).double(),
        "s": at(tokens.specific, b).double() - at(tokens.specific, a).double(),
    }


@dataclass(frozen=True)
class BranchDrift:
    """A branch under self-distillation with the target of one configuration."""

    log_odds: float  # ℓ_0, in nats
    delta: float  # δ, in nats
    s: float  # in nats; 0 for a target that is only flattened
    coef: float  # λ; 0 is SDPO
    rate: float  # ρ in [0, 1]
    form: Form = "subtract"  # of the target

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

    def path(self, speeds: Sequence[float], slowing: float = 0.0) -> list[float]:
        """ℓ after each generation batch for a student of finite speed: ℓ ← ℓ + κ (4p(1 − p))^γ (a − ℓ), p = σ(ℓ).

        Args:
            speeds: κ in (0, 1] of every generation batch, such as one constant times the learning rate's warm-up.
            slowing: γ. The gradient of the loss at a branch has the factor p(1 − p), so a rare token moves slowly:
                γ is 1 for gradient descent on logits, 0 where the optimizer undoes the factor.
        """
        student = teacher = self.log_odds
        log_odds = []
        for speed in speeds:
            slowed = speed * math.cosh(student / 2.0) ** (-2.0 * slowing)
            student += slowed * (self.target(teacher) - student)
            teacher += self.rate * (student - teacher)
            log_odds.append(student)
        return log_odds

    def target(self, teacher: float) -> float:
        """Log-odds of the target a, for a teacher with log-odds m without privileged context."""
        if self.form == "guide":
            return teacher + self.delta - self.coef * self.s
        return (1.0 - self.coef) * (teacher + self.delta) - self.coef * self.s


def holding_coef(log_odds: float, delta: float, s: float, form: Form = "subtract") -> float:
    """λ_hold, at which a phrase that the privileged context raises stays: δ / (δ + s + ℓ_0), or δ / s for guide.

    Returns:
        inf where no λ holds the phrase; 0 with δ ≤ 0, where only the flattening of a rare phrase can raise it.
    """
    if delta <= 0.0:
        return 0.0
    divisor = s if form == "guide" else delta + s + log_odds
    return delta / divisor if divisor > 0.0 else math.inf


def branch_table(maps: Sequence[TokenMap], rate: float, batches: int) -> str:
    """Markdown table of all branches, and of those of each class of the sampled token, the most frequent class first.

    Args:
        maps: maps of one checkpoint; their formula has λ and form of the run.
        rate: ρ of the teacher.
        batches: T, generation batches of the predicted drift.
    """
    tables = []
    for token_map in maps:
        table = DataFrame(find_branches(token_map))
        tables.append(table.assign(label=Series(token_map.classes, dtype=str)[table["positions"]].to_numpy()))
    frame = concat(tables, ignore_index=True)
    if frame.empty:
        return "No branch between a generic and an input-specific token was found.\n"
    formula = maps[0].scores.formula
    lead = (frame["delta"] + (frame["log_odds"] if rate == 0.0 else 0.0)).clip(lower=0.0)
    frame["lambda_c"] = lead / (lead + frame["s"])
    frame["lambda_hold"] = list(map(holding_coef, frame["log_odds"], frame["delta"], frame["s"]))
    frame["lambda_guide"] = frame["delta"] / frame["s"]
    frame["rate"] = expit(frame["log_odds"])
    for column, coef in (("rate_sdpo", 0.0), ("rate_run", formula.contrastive_coef)):
        log_odds = []
        for branch in frame.itertuples():
            drift = BranchDrift(branch.log_odds, branch.delta, branch.s, coef, rate, formula.form)
            log_odds.append(drift.after(batches))
        frame[column] = expit(log_odds)
    classes = sorted(frame.groupby("label", sort=False), key=lambda item: -len(item[1]))
    title = (
        "Branches of a generic token A and an input-specific token B: medians, and median [quartiles] of λ where "
        "δ > 0. Above λ_c A ends rarer than B, above λ_hold it does not rise; λ of guide is its λ_hold. Rates are "
        "the mean share of A among A and B in %: now, and predicted after "
        f"T = {batches} generation batches with ρ = {rate:g}."
    )
    columns = ("token class", "branches", "δ > 0", "ℓ_0", "δ", "s", "λ_c", "λ_hold", "λ of guide", "now", "SDPO")
    own_rate = f"λ = {formula.contrastive_coef:g}"
    rows = [_cells(name, table) for name, table in [("all", frame), *classes]]
    return f"{title}\n\n{markdown_table((*columns, own_rate), rows)}\n"


def _cells(name: str, branches: DataFrame) -> list[str]:
    rising = branches[branches["delta"] > 0.0]
    medians = branches[["log_odds", "delta", "s"]].median().map("{:.2f}".format)
    lambdas = []
    for column in ("lambda_c", "lambda_hold", "lambda_guide"):
        # "nearest" does not interpolate with the infinite λ_hold of a branch that no λ holds.
        low, median, high = rising[column].quantile([0.25, 0.5, 0.75], interpolation="nearest")
        lambdas.append(f"{median:.2f} [{low:.2f}, {high:.2f}]".replace("inf", "∞") if len(rising) else "–")
    rates = (100 * branches[["rate", "rate_sdpo", "rate_run"]].mean()).map("{:.1f}".format)
    return [table_cell(name), str(len(branches)), str(len(rising)), *medians, *lambdas, *rates]
