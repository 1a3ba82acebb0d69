"""Maps of random numbers, and hostile texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from credit_trl import objective
from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.lab.analysis.responses import Rollout
from credit_trl.lab.analysis.tokenmap import ScoredTokens, TokenMap
from credit_trl.lab.analysis.tokentext import TokenText, visible
from credit_trl.lab.analysis.vocabulary_logps import CreditFormula

HOSTILE = json.loads((Path(__file__).parent / "hostile.json").read_text())
FORMULA = CreditFormula(0.1)


def drawn_map(
    tokens: list[str],
    *,
    seed: int = 0,
    checkpoint: str = "step-1",
    contrasts: int = 2,
    alternatives: Sequence[str] = (" yes", " no", "↵\n"),
    dtype: torch.dtype = torch.float32,
    formula: CreditFormula = FORMULA,
    **rollout: Any,
) -> TokenMap:
    """Map of random log-probabilities over the given token texts; `rollout` are arguments of `drawn_rollout`."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*sizes: int) -> torch.Tensor:
        return -8 * torch.rand(*sizes, generator=generator, dtype=dtype).square()

    def scored(ids: torch.Tensor) -> dict[str, Any]:
        student, teacher, contrast = drawn(*ids.shape), drawn(*ids.shape), drawn(contrasts, *ids.shape)
        advantage = objective.self_distillation_reward(teacher, student)
        if contrasts:
            advantage = objective.credit_advantages(teacher, contrast, student, formula.contrastive_coef, formula.form)
        mean = -drawn(len(ids)).view(-1, *[1] * (ids.dim() - 1)).expand(ids.shape)
        return {
            "ids": ids,
            "student_logps": student,
            "teacher_logps": teacher,
            "contrast_logps": contrast,
            "advantage": advantage,
            "policy_mean": mean,
            "formula": formula,
        }

    sampled = scored(torch.arange(len(tokens)))
    candidates = ScoredTokens(**scored(torch.arange(len(alternatives)).expand(len(tokens), -1).contiguous()))
    return TokenMap(
        drawn_rollout(len(tokens), contrasts, **rollout),
        checkpoint,
        [TokenText(visible(text).replace("\n", "↵\n")) for text in tokens],
        ["other word"] * len(tokens),
        ScoredTokens(**sampled, alternatives=candidates),
        [[visible(text) for text in alternatives]] * len(tokens),
    )


def drawn_rollout(
    count: int,
    contrasts: int = 2,
    *,
    identifier: str = "r0",
    problem: str = "a problem",
    feedback: str | None = "the feedback",
) -> Rollout:
    """Rollout of `count` tokens."""
    prompts = tuple(f"another problem {k}" for k in range(contrasts))
    return Rollout(identifier, problem, tuple(range(count)), PrivilegedContext(feedback=feedback), prompts, 1.0)
