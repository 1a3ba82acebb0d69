"""Sum of the rewards of a whole response: pointwise mutual information and its parts.

The first functions are one statement of the paper each and take log-probabilities of any origin. `measure_pmi` runs
the models for one response.

Leading dimensions `*b` are free, C is the number of contrast prompts, and results are in nats.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from credit_trl import objective
from credit_trl.config import CreditConfig
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.responses import Rollout, rollout_contexts
from credit_trl.lab.analysis.tokenmap import ScoredTokens, gather_scores, joined_scores
from credit_trl.lab.analysis.vocabulary_logps import CreditFormula, CreditLogps, RolloutContexts, vocabulary_logps
from credit_trl.objective import Form


def contrastive_pmi(
    teacher_token_logps: Float[Tensor, "*b T"],
    prior_token_logps: Float[Tensor, "*b T"],
    contrast_token_logps: Float[Tensor, "C *b T"],
    contrast_prior_token_logps: Float[Tensor, "C *b T"],
    contrastive_coef: float,
    *,
    form: Form = "subtract",
) -> dict[str, Float[Tensor, "*b"]]:
    """Split the sum of CREDIT's rewards as in Eq. 9, for one response or a batch.

    Args:
        teacher_token_logps: log π(y_t | x, y_<t, z).
        prior_token_logps: log π(y_t | x, y_<t).
        contrast_token_logps: log π(y_t | x'_k, y_<t, z).
        contrast_prior_token_logps: log π(y_t | x'_k, y_<t).
        contrastive_coef: λ.
        form: form of the contrast.

    Returns:
        - `pmi`: Σ_t r_t(y_t) = log P(z | x, y) / P(z | x) = pmi(y; z | x), Corollary 2. It is the pMI of a joint
          distribution if both passes are conditionals of one (Assumption 1).
        - `contrastive_pmi`: pmi(y; z | x) − λ E[pmi(y; z | x')], the sum of the full-ratio reward of Appendix D; for
          guide `pmi + λ (pmi − E[pmi(y; z | x')])`.
        - `anti_genericity`: λ E[−log π(y | x')] ≥ 0, the reward of a response for being unlikely under contrast
          prompts; for guide `λ E[log π(y | x) − log π(y | x')]`, of any sign. It and `contrastive_pmi` sum to Σ_t R_t.
    """
    rewards = objective.self_distillation_reward(teacher_token_logps, prior_token_logps)
    generic_prior = objective.input_generic(contrast_prior_token_logps)
    contrast_pmi = objective.input_generic(contrast_token_logps) - generic_prior
    bonus = -generic_prior if form == "subtract" else prior_token_logps - generic_prior
    shift = -contrast_pmi if form == "subtract" else rewards - contrast_pmi
    return {
        "pmi": rewards.sum(dim=-1),
        "contrastive_pmi": (rewards + contrastive_coef * shift).sum(dim=-1),
        "anti_genericity": (contrastive_coef * bonus).sum(dim=-1),
    }


def prior_contrastive_mi(
    teacher_logps: Float[Tensor, "*t v"], contrast_logps: Float[Tensor, "C *t v"]
) -> Float[Tensor, "*t v"]:
    """pCMI = f − log E_x'[π_ref(· | x', y_<t, z)], with the mean over the C contrast prompts."""
    return teacher_logps - _log_mean(contrast_logps)


def jensen_gap(contrast_logps: Float[Tensor, "C *t v"]) -> Float[Tensor, "*t v"]:
    """Ŝ − pCMI with the same contrast prompts: log of the mean minus mean of the logs, ≥ 0 (Proposition 3)."""
    return _log_mean(contrast_logps) - objective.input_generic(contrast_logps)


def _log_mean(contrast_logps: Float[Tensor, "C *t v"]) -> Float[Tensor, "*t v"]:
    """Log of the mean probability over the contrast prompts."""
    return contrast_logps.logsumexp(dim=0) - math.log(len(contrast_logps))


def measure_pmi(checkpoint: Checkpoint, response: Rollout, config: CreditConfig) -> dict[str, float]:
    """`response_pmi` of one response under one checkpoint.

    Raises:
        ValueError: the response has no teacher or no contrast prompt, or has a trainer's contexts.
    """
    contexts = rollout_contexts(response, config, checkpoint)
    if not contexts.contrasts or response.contexts is not None:  # `CreditMapCallback` keeps (x', z) and not x' alone
        raise ValueError(f"Response {response.identifier!r} has no contrast prompt to compare with: see `credit-map`.")
    tokenizer = checkpoint.tokenizer
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    # plain text without its question may have no token
    prompts = [checkpoint.encode(prompt) or [start] for prompt in response.contrasts]
    return response_pmi(checkpoint, contexts, prompts, response.token_ids, CreditFormula.from_config(config))


def response_pmi(
    checkpoint: Checkpoint,
    contexts: RolloutContexts,
    contrast_prompts: Sequence[Sequence[int]],
    token_ids: Sequence[int],
    formula: CreditFormula,
) -> dict[str, float]:
    """Sums over the T tokens of y, in one pass of the student and one of the teacher.

    `reward = pmi + gap` and `credit = contrastive_pmi + anti_genericity + gap + conditioning`, with the pMIs of the
    teacher, to which the Bayesian reading of a lagged teacher applies (Appendix C).

    Args:
        checkpoint: π_θ and π_ref.
        contexts: every prompt precedes y; there are no columns.
        contrast_prompts: ids of the x'_k, without z.
        token_ids: y.
        formula: of R_t.

    Returns:
        `tokens` (T); `reward` (Σ r_t) and `credit` (Σ R_t, as in the run's loss); `pmi`, `contrastive_pmi` and
        `anti_genericity`, see `contrastive_pmi`; `gap`, Σ_t of the teacher–student gap, 0 without lag; `specific`
        (Σ Ŝ_t), `pcmi` over the same contrast prompts and `jensen_gap = specific − pcmi`; `conditioning`, what
        conditioning on the support (`distillation_tail="renormalize"`) adds to R_t.
    """
    prompts = TokenContexts(contexts.teacher, [*contexts.contrasts, contexts.student, *map(list, contrast_prompts)])
    models = [(checkpoint.student, TokenContexts(contexts.student)), (checkpoint.teacher, prompts)]
    prior = 1 + len(contexts.contrasts)  # of the teacher's prompts, those from here on are without z: x, then the x'_k
    parts: list[dict[str, Tensor]] = []
    for rows, ((student,), teacher_logps) in vocabulary_logps(models, token_ids, temperature=formula.temperature):
        y = torch.tensor(token_ids[rows], device=student.device)[:, None]
        scores = gather_scores(CreditLogps(student, teacher_logps[0], teacher_logps[1:prior]), y, formula)
        scores["without_z"] = teacher_logps[prior:].gather(-1, y.expand(len(teacher_logps) - prior, -1, -1)).cpu()
        parts.append({name: values.squeeze(-1) for name, values in scores.items()})
    joined = joined_scores(parts, dim=-1)
    without_z = joined.pop("without_z")
    scored = ScoredTokens(**joined, formula=formula)
    split = contrastive_pmi(
        scored.teacher_logps,
        without_z[0],
        scored.contrast_logps,
        without_z[1:],
        formula.contrastive_coef,
        form=formula.form,
    )
    credit = scored.advantage.sum()
    gap = (without_z[0] - scored.student_logps).sum()
    total = split["contrastive_pmi"] + split["anti_genericity"]
    is_conditional = formula.tail == "renormalize" and formula.topk is not None
    sums = {
        "reward": scored.delta_v.sum(),
        "credit": credit,
        "gap": gap,
        **split,
        "specific": scored.specific.sum(),
        "pcmi": prior_contrastive_mi(scored.teacher_logps, scored.contrast_logps).sum(),
        "jensen_gap": jensen_gap(scored.contrast_logps).sum(),
        "conditioning": credit - total - gap if is_conditional else torch.zeros(()),
    }
    return {"tokens": len(token_ids)} | {name: value.item() for name, value in sums.items()}
