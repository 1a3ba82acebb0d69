"""Interventional credit: the effect of a token on the chance of success, measured by branching (Appendix F).

`r^cf(v) = log P(O = 1 | do(Ŷ_t = v), h_t) − log P(O = 1 | h_t)`: candidate v is forced after the prefix, the policy
continues, and successes are counted. `r^z(v)` is the self-distillation reward of the same candidate. Both rank
candidates alike if the feedback depends on the candidate only through the outcome and is more likely on success
(Proposition 4); they are equal if it occurs on success only (Corollary 5).

The estimate needs many rollouts a prefix: of every candidate, and of the prefix without intervention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from credit_trl.evaluation.config import SamplingConfig
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.responses import grade_rollouts
from credit_trl.rollout.batch import is_successful
from credit_trl.tasks.registry import Task

# (indices of questions, prefixes of responses to them) → whether one whole response from each prefix succeeds.
Outcomes = Callable[[Sequence[int], Sequence[Sequence[int]]], Sequence[bool]]


@dataclass(frozen=True)
class Branching:
    """One prefix of a response, and the candidates to force after it."""

    prefix: tuple[int, ...]  # y_<t
    candidates: tuple[int, ...]  # token ids, each with a positive probability (condition iii)
    rewards: Float[Tensor, " K"]  # r^z of each candidate
    advantages: Float[Tensor, " K"]  # R_t of each
    student_logps: Float[Tensor, " K"]  # log π_θ of each
    question: int = 0  # index of the question that the response answers


@dataclass(frozen=True)
class InterventionalCredit:
    """r^cf of the candidates of one prefix."""

    branching: Branching
    successes: NDArray[np.int64]  # (K,), successful rollouts of each candidate
    samples: int  # rollouts of each candidate
    credit: Float[NDArray, " K"]  # estimate of r^cf in nats
    standard_error: Float[NDArray, " K"]  # of `credit`, by the delta method


def interventional_credit(success: Float[NDArray, "*b K"], baseline: Float[NDArray, "*b"]) -> Float[NDArray, "*b K"]:
    """r^cf of candidates from their success probabilities and the one without intervention."""
    with np.errstate(divide="ignore"):
        return np.log(success) - np.log(np.asarray(baseline)[..., None])


def run_branchings(
    branchings: Sequence[Branching], samples: int, baseline_samples: int, outcomes: Outcomes
) -> list[InterventionalCredit]:
    """Make the rollouts and count successes.

    Args:
        branchings: prefixes with their candidates.
        samples: rollouts of each candidate.
        baseline_samples: rollouts of each prefix without intervention.
        outcomes: see `policy_outcomes`.
    """
    prefixes: list[tuple[int, ...]] = []
    questions: list[int] = []
    for branching in branchings:
        for candidate in branching.candidates:
            prefixes += [(*branching.prefix, candidate)] * samples
        prefixes += [branching.prefix] * baseline_samples
        questions += [branching.question] * (len(prefixes) - len(questions))
    succeeded = iter(outcomes(questions, prefixes))
    credits = []
    for branching in branchings:
        counts = [sum(islice(succeeded, samples)) for _ in branching.candidates]
        baseline = sum(islice(succeeded, baseline_samples))
        credits.append(estimate(branching, np.array(counts), samples, baseline, baseline_samples))
    return credits


def policy_outcomes(
    checkpoint: Checkpoint, task: Task, rows: Sequence[dict[str, Any]], sampling: SamplingConfig
) -> Outcomes:
    """Outcomes of continuations by the policy itself (condition i), after a question's prompt and a prefix.

    Args:
        checkpoint: π_θ.
        task: O = 1 where its verifier gives a reward of at least 1.
        rows: the questions.
        sampling: temperature and seed, and the length limit of one continuation.

    Raises:
        ValueError: `sampling` cuts the policy's distribution off.
    """
    if sampling.top_p < 1.0 or sampling.top_k:
        raise ValueError("Outcomes of the policy itself need `top_p=1` and `top_k=0`.")
    contexts = [checkpoint.encode(row["prompt"]) for row in rows]

    def outcomes(questions: Sequence[int], prefixes: Sequence[Sequence[int]]) -> list[bool]:
        ends = checkpoint.end_ids()
        responses = list(map(list, prefixes))
        prompts = {}  # of those that have not ended
        for i, (question, prefix) in enumerate(zip(questions, responses, strict=True)):
            if not prefix or prefix[-1] not in ends:
                prompts[i] = contexts[question] + prefix
        continuations = checkpoint.generate(list(prompts.values()), sampling, batch_size=256)
        for i, continuation in zip(prompts, continuations, strict=True):
            responses[i] += continuation
        verdicts = grade_rollouts(checkpoint, task, [rows[question] for question in questions], responses)
        return is_successful(list(map(float, verdicts)), 1.0)

    return outcomes


def estimate(
    branching: Branching, successes: NDArray, samples: int, baseline_successes: int, baseline_samples: int
) -> InterventionalCredit:
    """r^cf and its standard error from counts of independent rollouts.

    Rates are (k + ½) / (n + 1), the posterior mean under Jeffreys' prior, which has a finite log for k = 0;
    Var(log p̂) ≈ (1 − p) / (n p).
    """
    rates = (successes + 0.5) / (samples + 1.0)
    baseline = (baseline_successes + 0.5) / (baseline_samples + 1.0)
    variance = (1.0 - rates) / (samples * rates) + (1.0 - baseline) / (baseline_samples * baseline)
    credit = interventional_credit(rates, np.array(baseline))
    return InterventionalCredit(branching, successes, samples, credit, np.sqrt(variance))
