"""What the reward of a whole response measures: pointwise mutual information, and how it splits.

The first part is arithmetic on log-probabilities, one function per statement of the paper, for tensors of any origin.
`measure` runs the models for one response and puts the parts together.

Leading dimensions `*b` are free; C is the number of other questions and stands in front; masks are 1 where a token
counts. All results are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from credit_trl import objective
from credit_trl.config import CreditConfig
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.formula import PAPER, CreditFormula, coefficient
from credit_trl.lab.analysis.passes import Reading, conditionals
from credit_trl.lab.analysis.responses import Response, build_contexts
from credit_trl.objective import Baseline, Form
from credit_trl.tasks.printable import plain


def trajectory_pmi(
    teacher_token_logps: Float[Tensor, "*b T"],
    prior_token_logps: Float[Tensor, "*b T"],
    mask: Float[Tensor, "*b T"] | None = None,
) -> Float[Tensor, "*b"]:
    """Σ_t r_t(y_t) = log P(z | x, y) / P(z | x) = pmi(y; z | x), Corollary 2.

    The sum is the pMI of the joint distribution if there is one of which both passes are conditionals (Assumption 1).

    Args:
        teacher_token_logps: log π(y_t | x, y_<t, z) at the sampled tokens.
        prior_token_logps: log π(y_t | x, y_<t), of the same π.
        mask: tokens that count; None for all.
    """
    rewards = objective.self_distillation_reward(teacher_token_logps, prior_token_logps)
    return (rewards if mask is None else rewards * mask).sum(dim=-1)


@dataclass(frozen=True)
class ContrastivePMI:
    """The parts of Eq. 9 for one response, or for a batch, and of the same sum under the form `"guide"`.

    Args:
        pmi: pmi(y; z | x).
        contrast_pmi: mean over the other questions of pmi(y; z | x').
        surprisal: mean over them of −log π(y | x').
        contrastive_pmi: pmi(y; z | x) − λ E[pmi(y; z | x')], what the full-ratio reward of Appendix D sums to; for
            guide `pmi + λ (pmi − E[pmi(y; z | x')])`.
        anti_genericity: λ E[−log π(y | x')], never negative: what a response earns for being unlikely under other
            questions; for guide `λ E[log π(y | x) − log π(y | x')]`, for being likelier under its own, of any sign.
    """

    pmi: Float[Tensor, "*b"]
    contrast_pmi: Float[Tensor, "*b"]
    surprisal: Float[Tensor, "*b"]
    contrastive_pmi: Float[Tensor, "*b"]
    anti_genericity: Float[Tensor, "*b"]

    @property
    def total(self) -> Float[Tensor, "*b"]:
        """Σ_t R_t(y_t), Eq. 9."""
        return self.contrastive_pmi + self.anti_genericity


def contrastive_pmi(
    teacher_token_logps: Float[Tensor, "*b T"],
    prior_token_logps: Float[Tensor, "*b T"],
    contrast_token_logps: Float[Tensor, "C *b T"],
    contrast_prior_token_logps: Float[Tensor, "C *b T"],
    contrastive_coef: float | Float[Tensor, "*b T"],
    mask: Float[Tensor, "*b T"] | None = None,
    *,
    form: Form = "subtract",
    baseline: Baseline = "mean_log",
) -> ContrastivePMI:
    """Split the sum of CREDIT's rewards as in Eq. 9.

    With the baseline `"log_mean"` the means over questions are of probabilities: Σ_t of log E[π(y_t | x', y_<t, z)]
    and of log E[π(y_t | x', y_<t)] take the place of E[log π(y | x', z)] and E[log π(y | x')]. The parts still sum to
    Σ_t R_t.

    Args:
        teacher_token_logps: log π(y_t | x, y_<t, z).
        prior_token_logps: log π(y_t | x, y_<t).
        contrast_token_logps: log π(y_t | x'_k, y_<t, z).
        contrast_prior_token_logps: log π(y_t | x'_k, y_<t).
        contrastive_coef: λ, or the λ that entered each token's R_t.
        mask: tokens that count; None for all.
        form: of the contrast.
        baseline: how several contrasts are averaged.
    """
    rewards = objective.self_distillation_reward(teacher_token_logps, prior_token_logps)
    generic_prior = objective.input_generic(contrast_prior_token_logps, baseline)
    others = objective.input_generic(contrast_token_logps, baseline) - generic_prior

    def total(values: Tensor) -> Tensor:
        return (values if mask is None else values * mask).sum(dim=-1)

    bonus = -generic_prior if form == "subtract" else prior_token_logps - generic_prior
    shift = -others if form == "subtract" else rewards - others
    return ContrastivePMI(
        total(rewards),
        total(others),
        -total(generic_prior),
        total(rewards + contrastive_coef * shift),
        total(contrastive_coef * bonus),
    )


def prior_contrastive_mi(
    teacher_logps: Float[Tensor, "*t v"], contrast_logps: Float[Tensor, "C *t v"]
) -> Float[Tensor, "*t v"]:
    """pCMI = f − log E_x'[π_ref(· | x', y_<t, z)], the expectation over the C questions given."""
    return teacher_logps - (torch.logsumexp(contrast_logps, dim=0) - math.log(len(contrast_logps)))


def jensen_gap(contrast_logps: Float[Tensor, "C *t v"]) -> Float[Tensor, "*t v"]:
    """Ŝ − pCMI over the same questions: the log of their mean less the mean of their logs, ≥ 0 (Proposition 3)."""
    mean_of_logs = objective.input_generic(contrast_logps)
    return torch.logsumexp(contrast_logps, dim=0) - math.log(len(contrast_logps)) - mean_of_logs


@dataclass(frozen=True)
class SurrogateAtCount:
    """How Ŝ with C questions behaves against pCMI over the whole population.

    Args:
        count: C.
        mean: of Ŝ over draws.
        std: of Ŝ over draws: what a larger C buys.
        gap: mean of Ŝ less the population's pCMI: what no C removes.
        plug_in: mean over draws of pCMI with the C drawn questions in place of the population.
    """

    count: int
    mean: float
    std: float
    gap: float
    plug_in: float


def surrogate_by_count(
    teacher_token_logps: Float[Tensor, " T"],
    population_logps: Float[Tensor, "N T"],
    counts: Sequence[int],
    *,
    draws: int = 256,
    seed: int = 0,
) -> tuple[float, list[SurrogateAtCount]]:
    """Proposition 3 for growing C, summed over a response: Ŝ with C questions drawn i.i.d. from N.

    Args:
        teacher_token_logps: f at the sampled tokens.
        population_logps: g under each question of the population 𝒟.
        counts: values of C.
        draws: sets of questions drawn for each C.
        seed: of the draws.

    Returns:
        pCMI over the population, and one record for each C.
    """
    generator = torch.Generator().manual_seed(seed)
    exact = prior_contrastive_mi(teacher_token_logps, population_logps).sum().item()
    records = []
    for count in counts:
        chosen = torch.randint(len(population_logps), (draws, count), generator=generator)
        drawn = population_logps[chosen].transpose(0, 1)
        surrogates = objective.input_specific(teacher_token_logps, drawn).sum(dim=-1)
        plug_in = prior_contrastive_mi(teacher_token_logps, drawn).sum(dim=-1)
        mean = surrogates.mean().item()
        records.append(
            SurrogateAtCount(count, mean, surrogates.std(correction=0).item(), mean - exact, plug_in.mean().item())
        )
    return exact, records


@dataclass(frozen=True)
class RewardSplit:
    """r_t = implicit advantage + teacher–student gap (Appendix C).

    Args:
        advantage: term (i), log π_ref(v | x, y_<t, z) − log π_ref(v | x, y_<t): all that comes from the feedback.
        gap: term (ii), log π_ref(v | x, y_<t) − log π_θ(v | x, y_<t): 0 where the teacher does not lag.
        bound: max(D_∞(π_ref ‖ π_θ), D_∞(π_θ ‖ π_ref)) at each position, which no |gap| exceeds.
    """

    advantage: Float[Tensor, "*t v"]
    gap: Float[Tensor, "*t v"]
    bound: Float[Tensor, "*t"]


def split_reward(
    teacher_logps: Float[Tensor, "*t v"],
    reference_logps: Float[Tensor, "*t v"],
    student_logps: Float[Tensor, "*t v"],
) -> RewardSplit:
    """Split r_t over a complete vocabulary; over a part of it the bound holds for that part only.

    Args:
        teacher_logps: f = log π_ref(· | x, y_<t, z).
        reference_logps: log π_ref(· | x, y_<t), without feedback.
        student_logps: log π_θ(· | x, y_<t).
    """
    gap = reference_logps - student_logps
    bound = torch.maximum(
        renyi_infinity(reference_logps, student_logps), renyi_infinity(student_logps, reference_logps)
    )
    return RewardSplit(teacher_logps - reference_logps, gap, bound)


def renyi_infinity(p_logps: Float[Tensor, "*t v"], q_logps: Float[Tensor, "*t v"]) -> Float[Tensor, "*t"]:
    """D_∞(p ‖ q) = max_v log p(v) / q(v), the Rényi divergence of infinite order."""
    return (p_logps - q_logps).amax(dim=-1)


@dataclass(frozen=True)
class PMIReport:
    """All of this for one response, summed over its tokens.

    `reward = pmi + gap` and `credit = contrastive_pmi + anti_genericity + gap + conditioning`, where the pMIs are
    those of the teacher: with a lagged teacher it is the one of which the Bayesian reading speaks (Appendix C).

    Args:
        identifier: of the response.
        tokens: T.
        reward: Σ_t r_t(y_t).
        credit: Σ_t R_t(y_t), as the run's loss has it.
        pmi: pmi(y; z | x) under the teacher.
        gap: Σ_t of the teacher–student gap, 0 without lag.
        gap_bound: Σ_t of its bound.
        contrast_pmi: mean over the other questions.
        contrastive_pmi, anti_genericity: see `ContrastivePMI`, with the λ that entered each token's R_t.
        specific: Σ_t Ŝ_t(y_t), with the run's average of several contrasts.
        pcmi: Σ_t pCMI over the same questions.
        jensen_gap: Σ_t of the log of the contrasts' mean less the mean of their logs, ≥ 0; `specific − pcmi` where
            the run takes the mean of logs.
        conditioning: what R_t gains from being taken within the support (`distillation_tail="renormalize"`), else 0.
    """

    identifier: str
    tokens: int
    reward: float
    credit: float
    pmi: float
    gap: float
    gap_bound: float
    contrast_pmi: float
    contrastive_pmi: float
    anti_genericity: float
    specific: float
    pcmi: float
    jensen_gap: float
    conditioning: float


@dataclass(frozen=True)
class ResponseLogps:
    """What `measure` reads off the models, at the sampled tokens.

    Args:
        student: log π_θ(y_t | x).
        teacher: log π_ref(y_t | x, z).
        prior: log π_ref(y_t | x).
        contrast: log π_ref(y_t | x'_k, z), (C, T).
        contrast_prior: log π_ref(y_t | x'_k), (C, T).
        bound: of the teacher–student gap at each position.
        advantage: R_t(y_t), (T,).
        entered_coef: the λ that entered it, (T,).
        formula: all else that it depends on.
    """

    student: Float[Tensor, " T"]
    teacher: Float[Tensor, " T"]
    prior: Float[Tensor, " T"]
    contrast: Float[Tensor, "C T"]
    contrast_prior: Float[Tensor, "C T"]
    bound: Float[Tensor, " T"]
    advantage: Float[Tensor, " T"]
    entered_coef: Float[Tensor, " T"]
    formula: CreditFormula


def read_response(
    student: Reading,
    teacher: Reading,
    token_ids: Sequence[int],
    *,
    contrastive_coef: float,
    formula: CreditFormula = PAPER,
    temperature: float = 1.0,
) -> ResponseLogps:
    """Read a response under all contexts of Eq. 9 and Appendix C.

    Args:
        student: π_θ with the context x.
        teacher: π_ref with the contexts (x, z), (x'_1, z), …, (x'_C, z), x, x'_1, …, x'_C.
        token_ids: y.
        contrastive_coef: λ.
        formula: all else that R_t depends on.
        temperature: of the rollout.
    """
    parts: list[list[Tensor]] = []
    count = len(teacher.contexts) // 2
    for rows, ((policy,), logps) in conditionals([student, teacher], token_ids, temperature=temperature):
        y = torch.tensor(token_ids[rows], device=policy.device)
        picked = logps.gather(-1, y.expand(len(logps), -1)[..., None]).squeeze(-1)
        bound = split_reward(logps[0], logps[count], policy).bound
        credit = formula.advantages(policy, logps[0], logps[1:count], y[:, None], contrastive_coef)
        parts.append([policy.gather(-1, y[:, None]).T, picked, bound[None], *(values.T for values in credit)])
    (own,), read, (bound,), (advantage,), (entered,) = (
        torch.cat(tensors, dim=-1).cpu() for tensors in zip(*parts, strict=True)
    )
    return ResponseLogps(
        own, read[0], read[count], read[1:count], read[count + 1 :], bound, advantage, entered, formula
    )


def measure(checkpoint: Checkpoint, response: Response, config: CreditConfig) -> PMIReport:
    """The report of one response under one checkpoint.

    Raises:
        ValueError: it has no teacher or no contrast, or a trainer's contexts; λ is adapted and not in the checkpoint.
    """
    contexts = build_contexts(response, config, checkpoint)
    if not contexts.contrasts or response.contexts is not None:  # `CreditMapCallback` keeps (x', z) and not x' alone
        raise ValueError(f"Response {response.identifier!r} has no other question to compare with: see `credit-map`.")
    plain = [checkpoint.encode(prompt) for prompt in response.contrasts]
    read = [contexts.teacher, *contexts.contrasts, contexts.student, *plain]
    columns = [*(contexts.columns or ()), *([0] * len(ids) for ids in (contexts.student, *plain))]
    logps = read_response(
        Reading(checkpoint.student, [contexts.student]),
        Reading(checkpoint.teacher, read, None if contexts.columns is None else columns),
        response.token_ids,
        contrastive_coef=coefficient(config, checkpoint.contrastive_coef),
        formula=CreditFormula.of(config),
        temperature=config.temperature,
    )
    return report(response.identifier, logps)


def report(identifier: str, logps: ResponseLogps) -> PMIReport:
    """Sum what was read."""
    formula = logps.formula
    parts = contrastive_pmi(
        logps.teacher,
        logps.prior,
        logps.contrast,
        logps.contrast_prior,
        logps.entered_coef,
        form=formula.rule.form,
        baseline=formula.baseline,
    )
    credit, gap = logps.advantage.sum().item(), (logps.prior - logps.student).sum().item()
    return PMIReport(
        identifier,
        len(logps.student),
        trajectory_pmi(logps.teacher, logps.student).item(),
        credit,
        parts.pmi.item(),
        gap,
        logps.bound.sum().item(),
        parts.contrast_pmi.item(),
        parts.contrastive_pmi.item(),
        parts.anti_genericity.item(),
        objective.input_specific(logps.teacher, logps.contrast, formula.baseline).sum().item(),
        prior_contrastive_mi(logps.teacher, logps.contrast).sum().item(),
        jensen_gap(logps.contrast).sum().item(),
        credit - parts.total.item() - gap if formula.conditions_on_support else 0.0,
    )


def format_reports(reports: Sequence[PMIReport]) -> str:
    """Markdown, one row a response."""
    columns = {
        "reward": "Σ r_t",
        "credit": "Σ R_t",
        "pmi": "pmi",
        "gap": "gap",
        "contrastive_pmi": "contrastive pmi",
        "anti_genericity": "anti-genericity",
        "specific": "Σ Ŝ_t",
        "pcmi": "Σ pCMI",
        "jensen_gap": "Jensen gap",
    }
    if any(one.conditioning for one in reports):
        columns["conditioning"] = "conditioning"
    lines = [f"| response | T | {' | '.join(columns.values())} |", "| --- |" + " ---: |" * (len(columns) + 1)]
    for one in reports:
        numbers = " | ".join(f"{getattr(one, name):+.2f}" for name in columns)
        lines.append(f"| {plain(one.identifier)} | {one.tokens} | {numbers} |")
    return "\n".join(lines) + "\n"
