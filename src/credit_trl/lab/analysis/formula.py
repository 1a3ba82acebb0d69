"""R_t as a run makes it: its form, where its contrast applies, its average of several contrasts, its support.

The passes of `passes` give whole conditionals; a `CreditFormula` makes of them what the run's loss made. It builds
nothing itself: the target comes from `kernels.target`, which the loss calls, and that from `objective`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl import objective
from credit_trl.config import CreditConfig
from credit_trl.loss.scores import Scores, Support, Tail, condition, has_tail, renormalizes
from credit_trl.loss.target import support_target, vocabulary_target
from credit_trl.objective import Baseline, ContrastRule


@dataclass(frozen=True)
class CreditFormula:
    """All that R_t depends on besides λ and the log-probabilities. The defaults are the paper's Eq. 8.

    Args:
        rule: form, gate and plausibility of the contrast.
        baseline: how several contrasts are averaged.
        contrasted: what a contrast exchanges: the question for another, for nothing, or the hint for another's.
        support: the tokens of the loss, over which the gate and the plausibility mask look.
        topk: K of a top-K support.
        tail: the mass outside it. With `"renormalize"` R_t is that within the support, as it is in the loss.
    """

    rule: ContrastRule = field(default_factory=ContrastRule)
    baseline: Baseline = "mean_log"
    contrasted: Literal["question", "no question", "hint"] = "question"
    support: Support = "full"
    topk: int = 20
    tail: Tail = "bucket"

    @classmethod
    def of(cls, config: CreditConfig) -> CreditFormula:
        """That of a run with this configuration."""
        contrasted = "no question" if config.contrastive_source == "none" else "question"
        return cls(
            config.contrast_rule,
            config.contrastive_baseline,
            "hint" if config.contrastive_swap == "hint" else contrasted,
            config.distillation_support,
            config.distillation_topk,
            config.distillation_tail,
        )

    def advantages(
        self,
        student: Float[Tensor, "n V"],
        teacher: Float[Tensor, "n V"],
        contrasts: Float[Tensor, "C n V"],
        ids: Int[Tensor, "n A"],
        contrastive_coef: float,
    ) -> tuple[Float[Tensor, "n A"], Float[Tensor, "n A"]]:
        """R_t of A tokens at n positions, each as if it had been the realised one.

        Args:
            student, teacher, contrasts: log π_θ, f and the g_k over the whole vocabulary.
            ids: the tokens.
            contrastive_coef: λ.

        Returns:
            R_t, and the λ that entered: 0 without contrast, where the gate is shut and for implausible tokens.
        """
        if contrastive_coef == 0.0:
            contrasts = contrasts[:0]
        coef = teacher.new_full((len(ids),), contrastive_coef if len(contrasts) else 0.0)
        # A support of as many tokens as there are is the whole vocabulary, in the trainer too.
        whole = self.support == "full" or ("topk" in self.support and self.topk >= teacher.shape[-1])
        if whole:
            return self._over_vocabulary(student, teacher, contrasts, ids, coef)
        return self._over_support(student, teacher, contrasts, ids, coef)

    def _over_vocabulary(
        self, student: Tensor, teacher: Tensor, contrasts: Tensor, ids: Tensor, coef: Tensor
    ) -> tuple[Tensor, Tensor]:
        generic = objective.input_generic(contrasts, self.baseline) if len(contrasts) else torch.zeros_like(teacher)
        target = vocabulary_target(
            teacher.clone(), generic, ids[:, :1], coef, self.rule, scratch=torch.empty_like(teacher)
        )
        entered = target.contrastive_coef[:, None].expand(ids.shape)
        if self.rule.plausibility > 0.0:
            entered = entered * objective.plausible_tokens(teacher, self.rule.plausibility).gather(-1, ids)
        return target.logps.gather(-1, ids) - student.gather(-1, ids), entered

    def _over_support(
        self, student: Tensor, teacher: Tensor, contrasts: Tensor, ids: Tensor, coef: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Each of the A tokens is a row of its own, with the support of its position."""
        support = ids[..., None]
        if self.support != "sampled":
            chosen_by = student if self.support == "student_topk" else teacher
            top = chosen_by.topk(self.topk, dim=-1).indices
            support = top[:, None].expand(-1, ids.shape[1], -1)
        teacher_logps, teacher_token = self._read(teacher, support, ids)
        generic_logps, generic_token = torch.zeros_like(teacher_logps), torch.zeros_like(teacher_token)
        if len(contrasts):
            parts = zip(*(self._read(contrast, support, ids) for contrast in contrasts), strict=True)
            generic_logps, generic_token = (objective.input_generic(torch.stack(p), self.baseline) for p in parts)
        no_entropy = torch.full_like(teacher_token, torch.nan)  # no part of a target
        scores = Scores(support.flatten(0, 1), teacher_logps, generic_logps, teacher_token, generic_token, no_entropy)
        tokens = ids.flatten()[:, None]
        target = support_target(
            scores,
            tokens,
            coef.repeat_interleave(ids.shape[1]),
            self.rule,
            support=self.support,
            tail=self.tail,
        )
        entered = target.contrastive_coef
        if self.rule.plausibility > 0.0:
            likely = objective.plausible_tokens(teacher_logps[:, : support.shape[-1]], self.rule.plausibility)
            entered = entered * (likely & (scores.support_ids == tokens)).any(dim=-1)
        advantages = target.token_logps - self._read(student, support, ids)[1]
        return advantages.view(ids.shape), entered.view(ids.shape)

    def _read(self, logps: Float[Tensor, "n V"], support: Int[Tensor, "n A K"], ids: Int[Tensor, "n A"]) -> Any:
        """((n·A, B), (n·A,)): log-probabilities of the buckets and of the token, as the kernels take them."""
        columns = logps.gather(-1, support.flatten(1)).view(-1, support.shape[-1])
        tokens = logps.gather(-1, ids).view(-1)
        if self.conditions_on_support:
            in_support = (support == ids[..., None]).any(dim=-1).view(-1)
            return condition(torch.cat([columns, tokens[:, None]], dim=-1), in_support)
        return (objective.add_tail_bucket(columns) if has_tail(self.support, self.tail) else columns), tokens

    # ------------------------------------------------------------------------------------------------------ in words

    @property
    def conditions_on_support(self) -> bool:
        """Whether R_t is that within a top-K support."""
        return renormalizes(self.support, self.tail)

    @property
    def text(self) -> str:
        """R_t in symbols."""
        return "ΔV_t + λ S_t" if self.rule.form == "guide" else "ΔV_t − λ Ĝ"

    @property
    def conditions(self) -> str:
        """Where the contrast applies and what R_t is conditional on, after a comma; empty for the paper's."""
        told = []
        if self.rule.gate > 0.0:
            told.append(f"where f and Ĝ differ by a total variation above {self.rule.gate:g}")
        if self.rule.plausibility > 0.0:
            told.append(f"for tokens with {self.rule.plausibility:g} or more of the teacher's highest probability")
        text = f", {' and '.join(told)}, else ΔV_t" if told else ""
        if self.conditions_on_support:
            whose = "student" if self.support == "student_topk" else "teacher"
            text += f"; all within the {whose}'s {self.topk} likeliest tokens"
        return text

    def meanings(self) -> dict[str, str]:
        """What each quantity of a token map says under this formula."""
        under = {
            "question": "under other questions with the same feedback",
            "no question": "with the question left out and the same feedback",
            "hint": "under the same question with other problems' hints",
        }[self.contrasted]
        average = "log of the mean probability" if self.baseline == "log_mean" else "mean log-probability"
        return {
            "specific": "input-specific part of the teacher's log-probability: f − Ĝ",
            "delta_v": "self-distillation reward of the token: f − log π_θ",
            "advantage": f"CREDIT's advantage: {self.text}{self.conditions}",
            "generic": f"{'log-probability' if self.contrasted == 'no question' else average} {under}",
            "student_logps": "the student's log-probability",
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> CreditFormula:
        return cls(**{**record, "rule": ContrastRule(**record["rule"])})


# Eq. 8 over the whole vocabulary.
PAPER = CreditFormula()


def coefficient(config: CreditConfig, adapted: float | None) -> float:
    """λ of a run's next update.

    Args:
        config: of the run.
        adapted: where an adapted λ stands, if it is known.

    Raises:
        ValueError: λ is adapted and nobody knows where it stands.
    """
    if config.contrastive_coef != "auto":
        return config.contrastive_coef
    if adapted is None:
        raise ValueError(
            "`contrastive_coef='auto'` has no λ of its own: read a checkpoint of the run, which holds "
            "contrastive_coef.json, or state the number that the run logged as `credit/contrastive_coef` "
            "(`--contrastive_coef 0.3`)."
        )
    return adapted
