"""R_t as a run computes it: form and gate of the contrast, average over contrast prompts, support and λ.

The passes of `passes` give log-probabilities over the whole vocabulary; `CreditFormula` computes R_t from them with
the functions of the loss (`loss.target`, `objective`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl import objective
from credit_trl.config import CreditConfig
from credit_trl.lab.analysis.passes import CreditLogps
from credit_trl.loss.scores import Scores, SupportConfig, condition
from credit_trl.loss.target import support_target, vocabulary_target
from credit_trl.objective import Baseline, ContrastRule


@dataclass(frozen=True)
class CreditFormula:
    """Formula of R_t without λ. The defaults are the paper's Eq. 8 over the whole vocabulary."""

    rule: ContrastRule = field(default_factory=ContrastRule)  # form and gate of the contrast
    baseline: Baseline = "mean_log"  # average over contrast prompts
    # What a contrast prompt exchanges: the question for another one, or for none, or the privileged context for that
    # of another problem (`"hint"`) or of failed rollouts, or nothing (Ĝ = f).
    contrasted: Literal["question", "no question", "hint", "wrong feedback", "nothing"] = "question"
    # Tokens of the loss, which the gate compares. With `tail="renormalize"` R_t is conditional on them.
    support: SupportConfig = field(default_factory=lambda: SupportConfig("full"))

    @classmethod
    def of(cls, config: CreditConfig) -> CreditFormula:
        """Formula of a run with this configuration."""
        by_source = {"none": "no question", "wrong_feedback": "wrong feedback"}
        by_swap = {"hint": "hint", "self": "nothing"}
        return cls(
            config.contrast_rule,
            config.contrastive_baseline,
            by_swap.get(config.contrastive_swap) or by_source.get(config.contrastive_source, "question"),
            SupportConfig(config.distillation_support, config.distillation_topk, config.distillation_tail),
        )

    def advantages(
        self, logps: CreditLogps, ids: Int[Tensor, "n A"], contrastive_coef: float
    ) -> tuple[Float[Tensor, "n A"], Float[Tensor, "n A"]]:
        """R_t of A tokens at n positions, each computed as if it were the sampled token, with λ = `contrastive_coef`.

        Returns:
            R_t, and the λ in it: 0 without contrast prompts and where the gate is closed.
        """
        if contrastive_coef == 0.0:
            logps = replace(logps, contrasts=logps.contrasts[:0])
        coef = logps.teacher.new_full((len(ids),), contrastive_coef if len(logps.contrasts) else 0.0)
        # A top-K support as large as the vocabulary is the whole vocabulary, as in the trainer.
        size = logps.teacher.shape[-1]
        is_whole = self.support.kind == "full" or (self.support.is_topk and self.support.topk >= size)
        return (self._over_vocabulary if is_whole else self._over_support)(logps, ids, coef)

    def _over_vocabulary(self, logps: CreditLogps, ids: Tensor, coef: Tensor) -> tuple[Tensor, Tensor]:
        generic, scratch = torch.zeros_like(logps.teacher), torch.empty_like(logps.teacher)
        if len(logps.contrasts):
            generic = objective.input_generic(logps.contrasts, self.baseline)
        target = vocabulary_target(logps.teacher.clone(), generic, ids[:, :1], coef, self.rule, scratch=scratch)
        advantages = target.logps.gather(-1, ids) - logps.student.gather(-1, ids)
        return advantages, target.contrastive_coef[:, None].expand(ids.shape)

    def _over_support(self, logps: CreditLogps, ids: Tensor, coef: Tensor) -> tuple[Tensor, Tensor]:
        """Each of the A tokens is a row of its own, with the support of its position."""
        support = ids[..., None]
        if self.support.is_topk:
            chosen_by = logps.teacher
            support = chosen_by.topk(self.support.topk, dim=-1).indices[:, None].expand(-1, ids.shape[1], -1)
        teacher_logps, teacher_token = self._gather(logps.teacher, support, ids)
        generic_logps, generic_token = torch.zeros_like(teacher_logps), torch.zeros_like(teacher_token)
        if len(logps.contrasts):
            parts = zip(*(self._gather(contrast, support, ids) for contrast in logps.contrasts), strict=True)
            generic_logps, generic_token = (objective.input_generic(torch.stack(p), self.baseline) for p in parts)
        no_entropy = torch.full_like(teacher_token, torch.nan)  # the target does not use it
        scores = Scores(support.flatten(0, 1), teacher_logps, generic_logps, teacher_token, generic_token, no_entropy)
        target = support_target(scores, coef.repeat_interleave(ids.shape[1]), self.rule, self.support)
        advantages = target.token_logps - self._gather(logps.student, support, ids)[1]
        return advantages.view(ids.shape), target.contrastive_coef.view(ids.shape)

    def _gather(
        self, logps: Float[Tensor, "n V"], support: Int[Tensor, "n A K"], ids: Int[Tensor, "n A"]
    ) -> tuple[Float[Tensor, "n*A B"], Float[Tensor, " n*A"]]:
        """Log-probabilities of the buckets and of the token, conditional on the support where the loss is."""
        columns = logps.gather(-1, support.flatten(1)).view(-1, support.shape[-1])
        tokens = logps.gather(-1, ids).view(-1)
        if self.support.renormalizes:
            in_support = (support == ids[..., None]).any(dim=-1).view(-1)
            return condition(torch.cat([columns, tokens[:, None]], dim=-1), in_support)
        return (objective.add_tail_bucket(columns) if self.support.has_tail else columns), tokens

    @property
    def text(self) -> str:
        """R_t in symbols, with the condition of the gate and the support that R_t is conditional on."""
        text = "ΔV_t + λ S_t" if self.rule.form == "guide" else "ΔV_t − λ Ĝ"
        if self.rule.gate > 0.0:
            text += f", where f and Ĝ differ by a total variation above {self.rule.gate:g}, else ΔV_t"
        if self.support.renormalizes:
            model = "student" if self.support.kind == "student_topk" else "teacher"
            text += f"; conditional on the {model}'s {self.support.topk} most likely tokens"
        return text

    def meanings(self) -> dict[str, str]:
        """Explanation of each quantity of a token map under this formula."""
        context = {
            "question": "under contrast prompts with the same feedback",
            "no question": "without the question, with the same feedback",
            "hint": "under the same question with the feedback of other problems",
            "wrong feedback": "under the same question with the feedback of failed rollouts",
            "nothing": "in the teacher's own context",
        }[self.contrasted]
        average = "log of the mean probability" if self.baseline == "log_mean" else "mean log-probability"
        return {
            "specific": "input-specific part of the teacher's log-probability: f − Ĝ",
            "delta_v": "self-distillation reward of the token: f − log π_θ",
            "advantage": f"CREDIT's advantage: {self.text}",
            "generic": f"{'log-probability' if self.contrasted == 'no question' else average} {context}",
            "student_logps": "the student's log-probability",
        }

    def to_json(self) -> dict[str, Any]:
        support = {"support": self.support.kind, "topk": self.support.topk, "tail": self.support.tail}
        return {"rule": asdict(self.rule), "baseline": self.baseline, "contrasted": self.contrasted, **support}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> CreditFormula:
        rule = ContrastRule(record["rule"]["form"], record["rule"]["gate"])
        support = SupportConfig(record["support"], record["topk"], record["tail"])
        return cls(rule, record["baseline"], record["contrasted"], support)


# Eq. 8 over the whole vocabulary.
PAPER = CreditFormula()


@dataclass(frozen=True)
class CreditSettings:
    """Values that R_t depends on besides the log-probabilities."""

    contrastive_coef: float  # λ
    formula: CreditFormula = PAPER
    temperature: float = 1.0  # of the samples, by which logits are divided

    @classmethod
    def of(cls, config: CreditConfig) -> CreditSettings:
        """Settings of a run's configuration."""
        return cls(config.contrastive_coef, CreditFormula.of(config), config.temperature)

    @property
    def text(self) -> str:
        """R_t in symbols and λ, on one line."""
        return f"R_t = {self.formula.text}, λ = {self.contrastive_coef:.4g}"
