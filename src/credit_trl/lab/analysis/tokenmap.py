"""Token maps: for each token of a response what CREDIT makes of it, in the paper's symbols.

`map_response` runs the models; R_t is that of the run's loss (`formula`), everything else that is shown is a property
of `TokenScores`, and each property is one function of `objective.py`. Drawing is elsewhere: `tokenmap_html`,
`tokenmap_png`, `tokenmap_terminal`, `tokenmap_parquet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl import objective
from credit_trl.config import CreditConfig
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.formula import PAPER, CreditFormula, coefficient
from credit_trl.lab.analysis.passes import Reading, conditionals
from credit_trl.lab.analysis.responses import Response, ResponseContexts, build_contexts
from credit_trl.lab.analysis.token_classes import Classify, default_classes
from credit_trl.lab.analysis.tokentext import TokenText, token_texts

# What can be shown, with its symbol; `TokenMap.meaning` says what it is. The first is shown first.
QUANTITIES = {
    "specific": "S_t",
    "delta_v": "ΔV_t",
    "advantage": "R_t",
    "generic": "Ĝ_t",
    "student_logps": "log π_θ",
}
# Colours saturate at this many times the group's root mean square.
SATURATION = 2.0


@dataclass(frozen=True)
class TokenScores:
    """Numbers of a response's T tokens and of A alternatives at each position; log-probabilities are natural logs.

    Args:
        student_logps: (T,), log π_θ(y_t | x, y_<t).
        teacher_logps: (T,), f = log π_ref(y_t | x, y_<t, z).
        contrast_logps: (C, T), g_k = log π_ref(y_t | x'_k, y_<t, z); C may be 0.
        advantage: (T,), R_t(y_t) as the run's loss has it (Eq. 8); without contrast λ is 0, as in training.
        entered_coef: (T,), the λ that entered R_t(y_t): 0 where there is no contrast, or it does not apply.
        contrastive_coef: λ.
        formula: all else that R_t depends on.
        alternative_ids: (T, A), the likeliest tokens under student or teacher, the likeliest first.
        alternative_student_logps, alternative_teacher_logps, alternative_advantages, alternative_entered_coef: (T, A).
        alternative_contrast_logps: (C, T, A).
    """

    student_logps: Float[Tensor, " T"]
    teacher_logps: Float[Tensor, " T"]
    contrast_logps: Float[Tensor, "C T"]
    advantage: Float[Tensor, " T"]
    entered_coef: Float[Tensor, " T"]
    contrastive_coef: float
    formula: CreditFormula
    alternative_ids: Int[Tensor, "T A"]
    alternative_student_logps: Float[Tensor, "T A"]
    alternative_teacher_logps: Float[Tensor, "T A"]
    alternative_contrast_logps: Float[Tensor, "C T A"]
    alternative_advantages: Float[Tensor, "T A"]
    alternative_entered_coef: Float[Tensor, "T A"]

    @property
    def delta_v(self) -> Float[Tensor, " T"]:
        """ΔV_t = r_t(y_t), Eq. 3."""
        return objective.self_distillation_reward(self.teacher_logps, self.student_logps)

    @property
    def generic(self) -> Float[Tensor, " T"]:
        """Ĝ_t(y_t), Eq. 6; NaN without contrast."""
        return objective.input_generic(self.contrast_logps, self.formula.baseline)

    @property
    def specific(self) -> Float[Tensor, " T"]:
        """Ŝ_t(y_t), Eq. 6; NaN without contrast."""
        return objective.input_specific(self.teacher_logps, self.contrast_logps, self.formula.baseline)

    @property
    def alternative_specific(self) -> Float[Tensor, "T A"]:
        return objective.input_specific(
            self.alternative_teacher_logps, self.alternative_contrast_logps, self.formula.baseline
        )


@dataclass(frozen=True)
class TokenMap:
    """One response under one checkpoint.

    Args:
        response: what was read.
        checkpoint: its name.
        tokens: T tokens as shown.
        classes: T names of token classes, for the summary.
        scores: their numbers.
        alternatives: (T, A) texts of the alternatives.
    """

    response: Response
    checkpoint: str
    tokens: list[TokenText]
    classes: list[str]
    scores: TokenScores
    alternatives: list[list[str]]

    def values(self, quantity: str) -> Float[Tensor, " T"]:
        """One of `QUANTITIES`."""
        return getattr(self.scores, quantity)

    def meaning(self, quantity: str) -> str:
        """What it says under the formula of this map's run."""
        return self.scores.formula.meanings()[quantity]


def score_response(
    checkpoint: Checkpoint,
    contexts: ResponseContexts,
    token_ids: Sequence[int],
    *,
    contrastive_coef: float,
    formula: CreditFormula = PAPER,
    temperature: float = 1.0,
    alternatives: int = 5,
) -> TokenScores:
    """Two backbone passes over the response, one of the student and a batched one of the teacher.

    Args:
        checkpoint: π_θ and π_ref.
        contexts: ids of x, of (x, z) and of the (x'_k, z).
        token_ids: y.
        contrastive_coef: λ.
        formula: all else that R_t depends on.
        temperature: of the rollout.
        alternatives: A, how many alternatives to keep at each position.

    Returns:
        Scores on the CPU.
    """
    readings = [
        Reading(checkpoint.student, [contexts.student]),
        Reading(checkpoint.teacher, [contexts.teacher, *contexts.contrasts], contexts.columns),
    ]
    parts: list[dict[str, Tensor]] = []
    for rows, ((student,), (teacher, *contrast)) in conditionals(readings, token_ids, temperature=temperature):
        y = torch.tensor(token_ids[rows], device=student.device)[:, None]
        top = torch.maximum(student, teacher).topk(min(alternatives, student.shape[-1]), dim=-1).indices
        ids = torch.cat([y, top], dim=-1)
        contrasts = torch.stack(contrast) if contrast else student.new_zeros(0, *student.shape)
        advantages, entered = formula.advantages(student, teacher, contrasts, ids, contrastive_coef)
        picked = {
            "advantages": advantages,
            "entered": entered,
            "student": student.gather(-1, ids),
            "teacher": teacher.gather(-1, ids),
            "contrast": contrasts.gather(-1, ids.expand(len(contrasts), -1, -1)).movedim(0, 1),
            "ids": ids,
        }
        parts.append({name: values.cpu() for name, values in picked.items()})
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    contrast_logps = joined["contrast"].movedim(1, 0)
    return TokenScores(
        joined["student"][:, 0],
        joined["teacher"][:, 0],
        contrast_logps[..., 0].contiguous(),
        joined["advantages"][:, 0],
        joined["entered"][:, 0],
        contrastive_coef,
        formula,
        joined["ids"][:, 1:],
        joined["student"][:, 1:],
        joined["teacher"][:, 1:],
        contrast_logps[..., 1:].contiguous(),
        joined["advantages"][:, 1:],
        joined["entered"][:, 1:],
    )


def map_response(
    checkpoint: Checkpoint,
    response: Response,
    config: CreditConfig,
    *,
    alternatives: int = 5,
    classify: Classify | None = None,
) -> TokenMap:
    """The map of one response under one checkpoint.

    Args:
        checkpoint: π_θ and π_ref.
        response: what to read; it needs privileged, and contrasts for S_t.
        config: of the run: λ and all else that R_t depends on, temperature, templates. An adapted λ is the
            checkpoint's.
        alternatives: how many alternatives to keep at each position.
        classify: token classes; by default `token_classes.default_classes`.

    Raises:
        ValueError: the response is empty or has no teacher, or λ is adapted and the checkpoint does not hold it.
    """
    if not response.token_ids:
        raise ValueError(f"Response {response.identifier!r} is empty.")
    contexts = build_contexts(response, config, checkpoint)
    scores = score_response(
        checkpoint,
        contexts,
        response.token_ids,
        contrastive_coef=coefficient(config, checkpoint.contrastive_coef),
        formula=CreditFormula.of(config),
        temperature=config.temperature,
        alternatives=alternatives,
    )
    return label_scores(checkpoint, response, scores, classify)


def label_scores(
    checkpoint: Checkpoint, response: Response, scores: TokenScores, classify: Classify | None = None
) -> TokenMap:
    """Put texts and classes to numbers."""
    tokens = token_texts(checkpoint.tokenizer, response.token_ids)
    distinct = sorted(set(scores.alternative_ids.flatten().tolist()))
    text_of = {i: token_texts(checkpoint.tokenizer, [i])[0].text for i in distinct}
    return TokenMap(
        response,
        checkpoint.name,
        tokens,
        (classify or default_classes)(response, tokens),
        scores,
        [[text_of[i] for i in row] for row in scores.alternative_ids.tolist()],
    )


def group_scales(maps: Sequence[TokenMap]) -> dict[str, dict[str, float]]:
    """What a group's values are divided by before they are coloured: `{group: {quantity: root mean square}}`.

    The paper's maps are normalised within the group of a problem's rollouts, and their colour is the sign of the
    value: so values are scaled and not centred. Checkpoints that are compared share the scale of their group.
    """
    scales: dict[str, dict[str, float]] = {}
    for group in dict.fromkeys(m.response.group for m in maps):
        members = [m for m in maps if m.response.group == group]
        scales[group] = {q: _root_mean_square([m.values(q) for m in members]) for q in QUANTITIES}
    return scales


def colour_strength(values: Float[Tensor, " T"], scale: float) -> Float[Tensor, " T"]:
    """Signed strength of the colour in [−1, 1]: positive is red, negative blue; 0 where there is no value."""
    return (values / (SATURATION * scale)).nan_to_num(0.0).clamp(-1.0, 1.0)


def _root_mean_square(values: list[Tensor]) -> float:
    joined = torch.cat(values).double()
    joined = joined[joined.isfinite()]
    scale = joined.square().mean().sqrt().item() if len(joined) else 0.0
    return scale or 1.0
