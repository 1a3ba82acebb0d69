"""Token maps: the credit of every token of a response, in the paper's symbols.

`map_response` runs the models. R_t is computed as in the run's loss (`formula`); every other quantity is a property of
`ScoredTokens` and one function of `objective.py`. `tokenmap_json` stores maps, `lab.report` shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl import objective
from credit_trl.config import CreditConfig
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.formula import CreditFormula
from credit_trl.lab.analysis.responses import Rollout, rollout_contexts
from credit_trl.lab.analysis.token_classes import Classify, default_classes
from credit_trl.lab.analysis.tokentext import TokenText, token_texts
from credit_trl.lab.analysis.vocabulary_logps import CreditLogps, RolloutContexts, credit_logps

# Quantities of a map and their symbols, the default one first; `CreditFormula.meanings` explains them.
QUANTITIES = {
    "centred": "R_t − mean",
    "advantage": "R_t",
    "specific": "S_t",
    "delta_v": "ΔV_t",
    "generic": "Ĝ_t",
    "student_logps": "log π_θ",
}


@dataclass(frozen=True)
class ScoredTokens:
    """Scores of tokens v in nats; the shape (T, ...) is (T,) or (T, A)."""

    ids: Int[Tensor, "T ..."]
    student_logps: Float[Tensor, "T ..."]  # log π_θ(v | x, y_<t)
    teacher_logps: Float[Tensor, "T ..."]  # f = log π_ref(v | x, y_<t, z)
    contrast_logps: Float[Tensor, "C T ..."]  # g_k = log π_ref(v | x'_k, y_<t, z); C may be 0
    advantage: Float[Tensor, "T ..."]  # R_t(v) as in the run's loss (Eq. 8)
    policy_mean: Float[Tensor, "T ..."]  # mean of R_t under the policy at the position
    formula: CreditFormula  # λ, form and support of R_t
    # (T, A) scores of the most likely tokens under student or teacher, in descending order; None of the alternatives
    alternatives: ScoredTokens | None = None

    @property
    def centred(self) -> Float[Tensor, "T ..."]:
        """R_t(v) minus the policy's mean: the sign of the update of log π_θ(v)."""
        return self.advantage - self.policy_mean

    @property
    def delta_v(self) -> Float[Tensor, "T ..."]:
        """ΔV_t = r_t(v), Eq. 3."""
        return objective.self_distillation_reward(self.teacher_logps, self.student_logps)

    @property
    def generic(self) -> Float[Tensor, "T ..."]:
        """Ĝ_t(v), Eq. 6; NaN without contrast prompts."""
        return objective.input_generic(self.contrast_logps)

    @property
    def specific(self) -> Float[Tensor, "T ..."]:
        """Ŝ_t(v), Eq. 6; NaN without contrast prompts."""
        return objective.input_specific(self.teacher_logps, self.contrast_logps)


@dataclass(frozen=True)
class TokenMap:
    """Scores of one response under one checkpoint, with the texts to show."""

    response: Rollout
    checkpoint: str  # name
    tokens: list[TokenText]  # texts of the T tokens
    classes: list[str]  # token class of each
    scores: ScoredTokens
    alternatives: list[list[str]]  # (T, A), texts

    def values(self, quantity: str) -> Float[Tensor, " T"]:
        """Values of one of `QUANTITIES`."""
        return getattr(self.scores, quantity)


def score_response(
    checkpoint: Checkpoint,
    contexts: RolloutContexts,
    token_ids: Sequence[int],
    formula: CreditFormula,
    *,
    alternatives: int = 5,
) -> ScoredTokens:
    """Score y in two backbone passes, one of the student and a batched one of the teacher.

    Returns:
        Scores on the CPU, and at each position those of the A = `alternatives` likeliest tokens, which may include
        the sampled one.
    """
    parts: list[dict[str, Tensor]] = []
    for rows, logps in credit_logps(checkpoint, contexts, token_ids, formula.temperature):
        sampled = torch.tensor(token_ids[rows], device=logps.student.device)[:, None]
        likeliest = torch.maximum(logps.student, logps.teacher)
        top = likeliest.topk(min(alternatives, likeliest.shape[-1]), dim=-1).indices
        ids = torch.cat([sampled, top], dim=-1)
        parts.append(gather_scores(logps, ids, formula))
    joined = {name: torch.cat([part[name] for part in parts], dim=-2) for name in parts[0]}
    others = ScoredTokens(**{name: values[..., 1:] for name, values in joined.items()}, formula=formula)
    own = {name: values[..., 0] for name, values in joined.items()}
    return ScoredTokens(**own, formula=formula, alternatives=others)


def gather_scores(logps: CreditLogps, ids: Int[Tensor, "n A"], formula: CreditFormula) -> dict[str, Tensor]:
    """Tensors of `ScoredTokens` for A tokens at n positions, on the CPU."""
    scores = {
        "ids": ids,
        "student_logps": logps.student.gather(-1, ids),
        "teacher_logps": logps.teacher.gather(-1, ids),
        "contrast_logps": logps.contrasts.gather(-1, ids.expand(len(logps.contrasts), -1, -1)),
        "advantage": formula.advantages(logps, ids),
        "policy_mean": formula.policy_mean(logps)[:, None].expand(ids.shape),
    }
    return {name: values.cpu() for name, values in scores.items()}


def map_response(
    checkpoint: Checkpoint,
    response: Rollout,
    config: CreditConfig,
    *,
    alternatives: int = 5,
    classify: Classify | None = None,
) -> TokenMap:
    """Map one response under one checkpoint.

    Args:
        checkpoint: π_θ and π_ref.
        response: it needs a privileged context, and contrast prompts for S_t.
        config: configuration of the run: λ, the formula of R_t, the temperature and the templates.
        alternatives: number of alternatives at each position.
        classify: token classes; None takes `token_classes.default_classes`.

    Raises:
        ValueError: the response is empty or has no teacher.
    """
    if not response.token_ids:
        raise ValueError(f"Response {response.identifier!r} is empty.")
    contexts = rollout_contexts(response, config, checkpoint)
    formula = CreditFormula.from_config(config)
    scores = score_response(checkpoint, contexts, response.token_ids, formula, alternatives=alternatives)
    tokens = token_texts(checkpoint.tokenizer, response.token_ids)
    distinct = sorted(set(scores.alternatives.ids.flatten().tolist()))
    text_of = {i: token_texts(checkpoint.tokenizer, [i])[0].text for i in distinct}
    if contexts.images:  # their tensors are not stored
        response = replace(response, contexts=replace(contexts, images=()))
    return TokenMap(
        response,
        checkpoint.name,
        tokens,
        (classify or default_classes)(response, tokens),
        scores,
        [[text_of[i] for i in row] for row in scores.alternatives.ids.tolist()],
    )
