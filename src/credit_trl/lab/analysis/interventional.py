"""Interventional credit: what a token does to the chance of success, measured by branching (Appendix F).

`r^cf(v) = log P(O = 1 | do(Ŷ_t = v), h_t) − log P(O = 1 | h_t)`: force candidate v after the prefix, let the policy go
on by itself, count successes. `r^z(v)` is the self-distillation reward of the same candidate. Proposition 4 says that
both rank candidates alike where the feedback tells of the candidate only through the outcome and speaks for success;
Corollary 5 that they are equal where it is seen on success only.

The estimate needs many rollouts a prefix; `BranchPlan.cost` says how many before any is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from credit_trl import objective
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.formula import PAPER, CreditFormula
from credit_trl.lab.analysis.passes import Reading, conditionals
from credit_trl.lab.analysis.responses import ResponseContexts, generate, grade
from credit_trl.tasks.registry import Task

# (numbers of the questions, beginnings of responses to them) → one whole response for each beginning.
Continue = Callable[[Sequence[int], Sequence[Sequence[int]]], list[list[int]]]
# (numbers of the questions, whole responses to them) → whether each succeeds.
Succeeds = Callable[[Sequence[int], Sequence[Sequence[int]]], Sequence[bool]]


@dataclass(frozen=True)
class Branching:
    """One prefix of a response, and the candidates that are tried after it.

    Args:
        prefix: y_<t.
        candidates: token ids, each with a positive probability (condition iii).
        rewards: r^z of each candidate.
        advantages: R_t of each.
        student_logps: log π_θ of each.
        question: number of the question that the response answers.
    """

    prefix: tuple[int, ...]
    candidates: tuple[int, ...]
    rewards: Float[Tensor, " K"]
    advantages: Float[Tensor, " K"]
    student_logps: Float[Tensor, " K"]
    question: int = 0


@dataclass(frozen=True)
class BranchPlan:
    """What will be rolled out.

    Args:
        branchings: prefixes with their candidates.
        samples: rollouts of each candidate.
        baseline_samples: rollouts of each prefix without intervention.
        max_new_tokens: of one rollout.
    """

    branchings: list[Branching]
    samples: int
    baseline_samples: int
    max_new_tokens: int

    @property
    def rollouts(self) -> int:
        candidates = sum(len(b.candidates) for b in self.branchings)
        return candidates * self.samples + len(self.branchings) * self.baseline_samples

    def cost(self) -> str:
        """One line, for people, before it starts."""
        candidates = sum(len(b.candidates) for b in self.branchings)
        return (
            f"{len(self.branchings)} prefixes, {candidates} candidates: {self.rollouts:,} rollouts of at most "
            f"{self.max_new_tokens} new tokens ({self.samples} a candidate, {self.baseline_samples} a prefix), "
            f"at most {self.rollouts * self.max_new_tokens:,} tokens"
        )


@dataclass(frozen=True)
class InterventionalCredit:
    """r^cf of the candidates of one prefix.

    Args:
        branching: which.
        successes: of `samples` rollouts, (K,).
        samples: of each candidate.
        baseline_successes, baseline_samples: without intervention.
        credit: (K,), the estimate of r^cf in nats.
        standard_error: (K,), of it, by the delta method.
    """

    branching: Branching
    successes: NDArray[np.int64]
    samples: int
    baseline_successes: int
    baseline_samples: int
    credit: Float[NDArray, " K"]
    standard_error: Float[NDArray, " K"]

    @property
    def is_informative(self) -> bool:
        """Whether any two candidates succeed at different rates; else there is nothing to rank."""
        return len(set(self.successes.tolist())) > 1

    @property
    def is_resolved(self) -> bool:
        """Whether the best and the worst candidate differ by more than chance: two standard errors of their rates."""
        rates = self.successes / self.samples
        spread = rates.max() - rates.min()
        pooled = self.successes.mean() / self.samples
        return bool(spread > 2.0 * np.sqrt(2.0 * pooled * (1.0 - pooled) / self.samples) and spread > 0.0)


def interventional_credit(success: Float[NDArray, "*b K"], baseline: Float[NDArray, "*b"]) -> Float[NDArray, "*b K"]:
    """r^cf of candidates from their success probabilities, and that without intervention."""
    with np.errstate(divide="ignore"):
        return np.log(success) - np.log(np.asarray(baseline)[..., None])


def smoothed_rate(successes: NDArray, samples: int) -> NDArray:
    """(k + ½) / (n + 1): a rate whose log exists without successes (the mean under Jeffreys' prior)."""
    return (np.asarray(successes) + 0.5) / (samples + 1.0)


def standard_error(rate: NDArray, samples: int, baseline: float, baseline_samples: int) -> NDArray:
    """Of log rate − log baseline, both from independent rollouts: the delta method, Var(log p̂) ≈ (1 − p) / (n p)."""
    return np.sqrt((1.0 - rate) / (samples * rate) + (1.0 - baseline) / (baseline_samples * baseline))


def candidates_of(
    checkpoint: Checkpoint,
    contexts: ResponseContexts,
    token_ids: Sequence[int],
    *,
    contrastive_coef: float,
    formula: CreditFormula = PAPER,
    positions: int,
    candidates: int,
    temperature: float = 1.0,
    min_probability: float = 0.01,
    question: int = 0,
) -> list[Branching]:
    """The prefixes of a response at which the policy is least certain, with its likeliest candidates.

    Args:
        checkpoint: π_θ and π_ref.
        contexts: x, (x, z), (x'_k, z).
        token_ids: y.
        contrastive_coef: λ, for R_t.
        formula: all else that R_t depends on.
        positions: how many prefixes, by the student's entropy.
        candidates: how many tokens a prefix, at most.
        temperature: of the rollout.
        min_probability: below it a token is no candidate.
        question: number that the branchings carry.

    Returns:
        Prefixes with two candidates or more, in the order of the response.
    """
    readings = [
        Reading(checkpoint.student, [contexts.student]),
        Reading(checkpoint.teacher, [contexts.teacher, *contexts.contrasts], contexts.columns),
    ]
    found: list[tuple[float, Branching]] = []
    for rows, ((student,), (teacher, *contrast)) in conditionals(readings, token_ids, temperature=temperature):
        entropy = torch.special.entr(student.exp()).sum(dim=-1)
        top = student.topk(min(candidates, student.shape[-1]), dim=-1)
        contrasts = torch.stack(contrast) if contrast else student.new_zeros(0, *student.shape)
        advantages, _ = formula.advantages(student, teacher, contrasts, top.indices, contrastive_coef)
        rewards = objective.self_distillation_reward(teacher.gather(-1, top.indices), top.values)
        for n in range(len(student)):
            likely = top.values[n].exp() >= min_probability
            if likely.sum() > 1:
                prefix = tuple(token_ids[: rows.start + n])
                chosen = tuple(top.indices[n, likely].tolist())
                picked = (values[n, likely].cpu() for values in (rewards, advantages, top.values))
                found.append((entropy[n].item(), Branching(prefix, chosen, *picked, question)))
    kept = sorted(found, key=lambda item: -item[0])[:positions]
    return [branching for _, branching in sorted(kept, key=lambda item: len(item[1].prefix))]


def run_plan(
    plan: BranchPlan, continue_: Continue, succeeds: Succeeds, *, announce: Callable[[str], Any] = print
) -> list[InterventionalCredit]:
    """Say what it costs, roll out, and count.

    Args:
        plan: what to roll out.
        continue_: samples one whole response for each given beginning; see `policy_rollouts`.
        succeeds: O of whole responses; see `graded_by`.
        announce: is told the cost before the first rollout.
    """
    announce(plan.cost())
    beginnings: list[tuple[int, ...]] = []
    owner: list[tuple[int, int]] = []  # (branching, candidate), −1 without intervention
    for number, branching in enumerate(plan.branchings):
        for k, candidate in enumerate(branching.candidates):
            beginnings += [(*branching.prefix, candidate)] * plan.samples
            owner += [(number, k)] * plan.samples
        beginnings += [branching.prefix] * plan.baseline_samples
        owner += [(number, -1)] * plan.baseline_samples
    questions = [plan.branchings[number].question for number, _ in owner]
    outcomes = succeeds(questions, continue_(questions, beginnings))
    counts: dict[tuple[int, int], int] = dict.fromkeys(owner, 0)
    for key, outcome in zip(owner, outcomes, strict=True):
        counts[key] += bool(outcome)
    return [
        estimate(
            branching,
            np.array([counts[number, k] for k in range(len(branching.candidates))]),
            plan.samples,
            counts[number, -1],
            plan.baseline_samples,
        )
        for number, branching in enumerate(plan.branchings)
    ]


def policy_rollouts(
    checkpoint: Checkpoint,
    contexts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 256,
) -> Continue:
    """Continuations by the policy itself (condition i): the student, after the question's context and a beginning.

    Args:
        checkpoint: π_θ.
        contexts: the student's context of each question, as token ids.
        max_new_tokens: of one continuation.
        temperature: of the rollout.
        seed: of the rollouts.
        batch_size: rollouts generated side by side.
    """

    def continue_(questions: Sequence[int], beginnings: Sequence[Sequence[int]]) -> list[list[int]]:
        ends = checkpoint.end_ids()
        whole = [list(beginning) for beginning in beginnings]
        unfinished = [i for i, ids in enumerate(whole) if not ids or ids[-1] not in ends]
        continuations = generate(
            checkpoint,
            [[*contexts[questions[i]], *whole[i]] for i in unfinished],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            batch_size=batch_size,
        )
        for i, continuation in zip(unfinished, continuations, strict=True):
            whole[i] += continuation
        return whole

    return continue_


def graded_by(checkpoint: Checkpoint, task: Task, rows: Sequence[dict[str, Any]], threshold: float = 1.0) -> Succeeds:
    """O = 1 where the task's verifier gives a reward of at least `threshold`; `rows` are the questions."""

    def succeeds(questions: Sequence[int], responses: Sequence[Sequence[int]]) -> list[bool]:
        verdicts = grade(checkpoint, task, [rows[q] for q in questions], responses)
        return [verdict.reward is not None and verdict.reward >= threshold for verdict in verdicts]

    return succeeds


def estimate(
    branching: Branching, successes: NDArray, samples: int, baseline_successes: int, baseline_samples: int
) -> InterventionalCredit:
    """r^cf and its standard error from counts."""
    rates = smoothed_rate(successes, samples)
    baseline = float(smoothed_rate(np.array(baseline_successes), baseline_samples))
    return InterventionalCredit(
        branching,
        successes,
        samples,
        baseline_successes,
        baseline_samples,
        interventional_credit(rates, np.array(baseline)),
        standard_error(rates, samples, baseline, baseline_samples),
    )


@dataclass(frozen=True)
class RankAgreement:
    """How two quantities order the candidates of each prefix.

    Args:
        prefixes: with candidates that succeed at different rates; others rank nothing.
        kendall: mean over them of Kendall's τ-b between r^cf and the quantity. Candidates that succeed equally often
            are ties, so a quantity that separates them cannot reach 1.
        kendall_interval: 95 % bootstrap interval of that mean, over questions: prefixes of one question resemble each
            other. NaN where all prefixes are of one.
        spearman: mean of Spearman's ρ.
        concordance: mean share of the pairs with different success rates that the quantity orders alike; a tie of the
            quantity counts half, so ½ is chance.
        concordance_interval: of that mean.
        top: share of prefixes at which the quantity's best candidate has the highest success rate.
    """

    prefixes: int
    kendall: float
    kendall_interval: tuple[float, float]
    spearman: float
    concordance: float
    concordance_interval: tuple[float, float]
    top: float


def rank_agreement(
    credits: Sequence[InterventionalCredit],
    quantity: Literal["rewards", "advantages", "student_logps"] = "rewards",
    *,
    resolved: bool = False,
    seed: int = 0,
) -> RankAgreement:
    """Compare the order of r^cf with that of r^z, of R_t, or of the policy itself.

    Args:
        credits: of prefixes.
        quantity: which of a branching's.
        resolved: count only prefixes whose candidates differ by more than chance.
        seed: of the bootstrap.
    """
    kept = [c for c in credits if (c.is_resolved if resolved else c.is_informative)]
    nan = float("nan")
    if not kept:
        return RankAgreement(0, nan, (nan, nan), nan, nan, (nan, nan), nan)
    pairs = [(c.successes, getattr(c.branching, quantity).double().numpy()) for c in kept]
    questions = [c.branching.question for c in kept]
    taus, rhos, concordances = (np.array([f(*pair) for pair in pairs]) for f in (_kendall, _spearman, concordance))
    tops = [outcomes[other.argmax()] == outcomes.max() for outcomes, other in pairs]
    return RankAgreement(
        len(kept),
        float(taus.mean()),
        _interval(taus, questions, seed),
        float(rhos.mean()),
        float(concordances.mean()),
        _interval(concordances, questions, seed),
        float(np.mean(tops)),
    )


def concordance(outcomes: NDArray, quantity: NDArray) -> float:
    """Share of the pairs that differ in `outcomes` which `quantity` orders alike; its ties count half."""
    difference = np.sign(outcomes[:, None] - outcomes[None])
    ordered = np.sign(quantity[:, None] - quantity[None])[difference > 0]
    return float((ordered > 0).mean() + 0.5 * (ordered == 0).mean())


def _kendall(outcomes: NDArray, quantity: NDArray) -> float:
    from scipy.stats import kendalltau

    return 0.0 if np.ptp(quantity) == 0 else float(kendalltau(outcomes, quantity).statistic)


def _spearman(outcomes: NDArray, quantity: NDArray) -> float:
    from scipy.stats import spearmanr

    return 0.0 if np.ptp(quantity) == 0 else float(spearmanr(outcomes, quantity).statistic)


def _interval(values: NDArray, questions: Sequence[int], seed: int, resamples: int = 2000) -> tuple[float, float]:
    """Percentiles of the mean over values, whole questions resampled."""
    names, owner = np.unique(questions, return_inverse=True)
    if len(names) < 2:
        return float("nan"), float("nan")
    sums, counts = np.bincount(owner, weights=values), np.bincount(owner)
    chosen = np.random.default_rng(seed).integers(len(names), size=(resamples, len(names)))
    low, high = np.quantile(sums[chosen].sum(axis=1) / counts[chosen].sum(axis=1), [0.025, 0.975])
    return float(low), float(high)
