"""R_t as a run computes it: λ, form of the contrast, support and temperature.

The log-probabilities of `vocabulary_logps` cover the whole vocabulary; `CreditFormula` computes R_t from them with the
functions of `objective`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl import objective
from credit_trl.config import CreditConfig
from credit_trl.lab.analysis.vocabulary_logps import CreditLogps
from credit_trl.objective import Form


@dataclass(frozen=True)
class CreditFormula:
    """What R_t depends on besides the log-probabilities. The defaults are the paper's Eq. 8 over the vocabulary.

    Args:
        contrastive_coef: λ.
        form: form of the contrast.
        topk: K of a top-K support; None for the whole vocabulary and for the support of the sampled token.
        tail: `"renormalize"` makes R_t conditional on a top-K support.
        temperature: of the samples, by which logits are divided.
    """

    contrastive_coef: float
    form: Form = "subtract"
    topk: int | None = None
    tail: str = "bucket"
    temperature: float = 1.0

    @classmethod
    def from_config(cls, config: CreditConfig) -> CreditFormula:
        """Formula of a run with this configuration."""
        topk = config.distillation_topk if config.distillation_support == "teacher_topk" else None
        return cls(
            config.contrastive_coef, config.contrastive_form, topk, config.distillation_tail, config.temperature
        )

    def advantages(self, logps: CreditLogps, ids: Int[Tensor, "n A"]) -> Float[Tensor, "n A"]:
        """R_t of A tokens at n positions, each computed as if it were the sampled token.

        Without contrast prompts λ is 0.
        """
        passes = (logps.student, logps.teacher, logps.contrasts)
        chosen = [one.gather(-1, ids.expand(*one.shape[:-1], -1)) for one in passes]
        if self._renormalizes(logps):
            support = self._support(logps)
            is_outside = (support[:, None] != ids[..., None]).all(dim=-1)
            chosen = [own - _log_mass(one, support, own, is_outside) for one, own in zip(passes, chosen, strict=True)]
        student, teacher, contrasts = chosen
        return self._target(teacher, contrasts) - student

    def policy_mean(self, logps: CreditLogps) -> Float[Tensor, " n"]:
        """Mean of R_t under the policy, over the buckets of the loss. A step raises the tokens whose R_t is larger."""
        student, teacher, contrasts = (
            self._buckets(one, logps) for one in (logps.student, logps.teacher, logps.contrasts)
        )
        return (student.exp() * (self._target(teacher, contrasts) - student)).sum(dim=-1)

    def _target(self, teacher: Float[Tensor, "n A"], contrasts: Float[Tensor, "C n A"]) -> Float[Tensor, "n A"]:
        if not len(contrasts):
            return teacher
        return objective.credit_target(teacher, objective.input_generic(contrasts), self.contrastive_coef, self.form)

    def _is_whole(self, logps: CreditLogps) -> bool:
        """Whether the support is the vocabulary; a K of at least its size is."""
        return self.topk is None or self.topk >= logps.teacher.shape[-1]

    def _renormalizes(self, logps: CreditLogps) -> bool:
        return self.tail == "renormalize" and not self._is_whole(logps)

    def _support(self, logps: CreditLogps) -> Int[Tensor, "n K"]:
        return logps.teacher.topk(self.topk, dim=-1).indices

    def _buckets(self, values: Float[Tensor, "*c n V"], logps: CreditLogps) -> Float[Tensor, "*c n B"]:
        """Log-probabilities of the buckets that the loss sums over."""
        if self._is_whole(logps):
            return values
        support = self._support(logps).expand(*values.shape[:-1], -1)
        chosen = values.gather(-1, support)
        if self._renormalizes(logps):
            return objective.renormalize(chosen)
        outside = values.scatter(-1, support, -torch.inf).logsumexp(dim=-1)
        return objective.add_tail_bucket(chosen, outside)

    @property
    def symbols(self) -> str:
        """R_t in symbols, with the support that it is conditional on."""
        text = "ΔV_t + λ S_t" if self.form == "guide" else "ΔV_t − λ Ĝ"
        if self.tail == "renormalize" and self.topk is not None:
            text += f"; conditional on the teacher's {self.topk} most likely tokens"
        return text

    @property
    def text(self) -> str:
        """R_t in symbols and λ, on one line."""
        return f"R_t = {self.symbols}, λ = {self.contrastive_coef:.4g}"

    def meanings(self) -> dict[str, str]:
        """Explanation of each quantity of a token map under this formula."""
        return {
            "centred": f"R_t = {self.symbols}, minus its mean under the policy: a step raises positive tokens",
            "advantage": f"CREDIT's advantage: {self.symbols}",
            "specific": "input-specific part of the teacher's log-probability: f − Ĝ",
            "delta_v": "self-distillation reward of the token: f − log π_θ",
            "generic": "mean log-probability under contrast prompts with the same feedback",
            "student_logps": "the student's log-probability",
        }


def _log_mass(
    logps: Float[Tensor, "*c n V"],
    support: Int[Tensor, "n K"],
    token_logps: Float[Tensor, "*c n A"],
    is_outside: Tensor,
) -> Float[Tensor, "*c n A"]:
    """Log-probability of the support and of each token, which may lie outside it."""
    inside = logps.gather(-1, support.expand(*logps.shape[:-1], -1)).logsumexp(dim=-1, keepdim=True)
    return torch.where(is_outside, torch.logaddexp(inside, token_logps), inside)
