"""Log-probabilities of a response over the whole vocabulary under any prompts, in chunks of positions, and R_t.

The backbone passes are the trainer's own (`teacher.passes`), so adapters, mixed precision and sharded weights behave
as in training. No `(response × vocabulary)` tensor exists whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl import objective
from credit_trl.config import CreditConfig
from credit_trl.contexts.images import PromptImages
from credit_trl.contexts.tokens import CompletionBatch, TokenContexts
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.loss.head import LMHead, accumulation_dtype, lm_head
from credit_trl.objective import Form
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.passes import PADDING_SHARE, token_states

# Elements of all log-probabilities in memory at once: 256 MB in fp32.
_CHUNK_ELEMENTS = 2**26


@dataclass(frozen=True)
class RolloutContexts:
    """Token ids of the prompts under which a response is scored; see `TokenContexts`."""

    student: list[int]  # x
    teacher: list[int]  # (x, z)
    contrasts: list[list[int]]  # (x'_k, z), C of them; C may be 0
    insert_at: list[list[int]] | None = None  # of teacher and contrasts
    images: Sequence[PromptImages | None] = ()  # of teacher and contrasts, not stored; x has the teacher's


@dataclass(frozen=True)
class CreditLogps:
    """Log-probabilities over the vocabulary at n positions, from which R_t is computed."""

    student: Float[Tensor, "n V"]  # log π_θ(· | x, y_<t)
    teacher: Float[Tensor, "n V"]  # f = log π_ref(· | x, y_<t, z)
    contrasts: Float[Tensor, "C n V"]  # g_k = log π_ref(· | x'_k, y_<t, z); C may be 0


@dataclass(frozen=True)
class CreditFormula:
    """What R_t depends on besides the log-probabilities. The defaults are the paper's Eq. 8 over the vocabulary.

    It computes R_t from `CreditLogps` with the functions of `objective`, as a run does.
    """

    contrastive_coef: float  # λ
    form: Form = "subtract"  # of the contrast
    topk: int | None = None  # K of a top-K support; None for the vocabulary, and for the support of the sampled token
    tail: str = "bucket"  # "renormalize" makes R_t conditional on a top-K support
    temperature: float = 1.0  # of the samples, by which logits are divided

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
        chosen = [distribution.gather(-1, ids.expand(*distribution.shape[:-1], -1)) for distribution in passes]
        support = self._support(logps)
        if support is not None and self.tail == "renormalize":
            is_outside = (support[:, None] != ids[..., None]).all(dim=-1)
            chosen = [
                candidate_logps - _log_mass(distribution, support, candidate_logps, is_outside)
                for distribution, candidate_logps in zip(passes, chosen, strict=True)
            ]
        student, teacher, contrasts = chosen
        if not len(contrasts):
            return objective.self_distillation_reward(teacher, student)
        return objective.credit_advantages(teacher, contrasts, student, self.contrastive_coef, self.form)

    def policy_mean(self, logps: CreditLogps) -> Float[Tensor, " n"]:
        """Mean of R_t under the policy, over the buckets of the loss. A step raises the tokens whose R_t is larger."""
        support = self._support(logps)
        passes = (logps.student, logps.teacher, logps.contrasts)
        student, teacher, contrasts = (self._buckets(distribution, support) for distribution in passes)
        return -objective.distillation_loss(student, self._target(teacher, contrasts), alpha=1.0)

    def _target(self, teacher: Float[Tensor, "n A"], contrasts: Float[Tensor, "C n A"]) -> Float[Tensor, "n A"]:
        if not len(contrasts):
            return teacher
        return objective.credit_target(teacher, objective.input_generic(contrasts), self.contrastive_coef, self.form)

    def _support(self, logps: CreditLogps) -> Int[Tensor, "n K"] | None:
        """Ids of the top-K support; None where it is the vocabulary, as for a K of at least its size."""
        if self.topk is None or self.topk >= logps.teacher.shape[-1]:
            return None
        return logps.teacher.topk(self.topk, dim=-1).indices

    def _buckets(self, values: Float[Tensor, "*c n V"], support: Int[Tensor, "n K"] | None) -> Float[Tensor, "*c n B"]:
        """Log-probabilities of the buckets that the loss sums over."""
        if support is None:
            return values
        support = support.expand(*values.shape[:-1], -1)
        chosen = values.gather(-1, support)
        if self.tail == "renormalize":
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
    support_mass = logps.gather(-1, support.expand(*logps.shape[:-1], -1)).logsumexp(dim=-1, keepdim=True)
    return torch.where(is_outside, torch.logaddexp(support_mass, token_logps), support_mass)


def credit_logps(
    checkpoint: Checkpoint, contexts: RolloutContexts, token_ids: Sequence[int], temperature: float
) -> Iterator[tuple[slice, CreditLogps]]:
    """Yield a slice of positions of y and the log-probabilities there, from one pass of student and teacher each."""
    models = [
        (checkpoint.student, TokenContexts(contexts.student, images=contexts.images[:1])),
        (checkpoint.teacher, TokenContexts(contexts.teacher, contexts.contrasts, contexts.insert_at, contexts.images)),
    ]
    for rows, (student, teacher) in vocabulary_logps(models, token_ids, temperature=temperature):
        yield rows, CreditLogps(student[0], teacher[0], teacher[1:])


@torch.no_grad()
def vocabulary_logps(
    models: Sequence[tuple[Teacher, TokenContexts]], response_ids: Sequence[int], *, temperature: float = 1.0
) -> Iterator[tuple[slice, tuple[Float[Tensor, "P n V"], ...]]]:
    """`log π(· | prompt, y_<t)` for every prompt and position.

    Each model makes one batched backbone pass over its P = 1 + C prompts; a plain `Teacher` is the model as it is.
    Where a model is sharded over processes, every process must call this equally often; with `TokenContexts(None)` and
    no response ids it joins the passes and yields nothing.

    Yields:
        A slice of positions and, for each model, the log-probabilities there, in fp32 (fp64 for a model in fp64).
    """
    states = [_states(model, prompts, response_ids, temperature) for model, prompts in models]
    if not response_ids:
        return
    vocabulary = min(head.vocabulary_size for _, head in states)  # another model as the teacher may have more rows
    states = [(hidden, head.map(lambda rows: rows[:vocabulary])) for hidden, head in states]
    size = max(1, _CHUNK_ELEMENTS // sum(len(hidden) * vocabulary for hidden, _ in states))
    for start in range(0, len(response_ids), size):
        rows = slice(start, min(start + size, len(response_ids)))
        yield rows, tuple(_project(hidden[:, rows], head) for hidden, head in states)


def next_token_logps(model: Teacher, prompts: TokenContexts, response_ids: Sequence[int]) -> Float[Tensor, "P V"]:
    """Log-probabilities of the token that follows the whole response, in one batched pass over all prompts."""
    *_, (_, (logps,)) = vocabulary_logps([(model, prompts)], [*response_ids, 0])
    return logps[:, -1]


def _states(
    teacher: Teacher, prompts: TokenContexts, response_ids: Sequence[int], temperature: float
) -> tuple[Float[Tensor, "P n H"], LMHead]:
    """Hidden states of the positions that predict the response's tokens, and the head."""
    ids = torch.tensor([list(response_ids) or [0]], device=teacher.device)
    sequences = list(prompts.sequences())
    padded = len(sequences) * (max((len(prompt) for prompt, _ in sequences), default=0) + ids.shape[1])
    batch = CompletionBatch(ids, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool))
    batch_tokens = round(padded / PADDING_SHARE)  # neither tokens nor padding end the pass
    with teacher.active() as model:
        head = lm_head(teacher.unwrapped(model), temperature).gathered().detached()
        parts = list(token_states(teacher, model, [prompts], batch, batch_tokens))
    if not parts:
        return head.weight.new_zeros(0, 0, head.weight.shape[1]), head
    [(_, _, teacher_states, contrasts)] = parts
    return torch.cat([teacher_states[None], contrasts]), head


def _project(hidden: Float[Tensor, "P n H"], head: LMHead) -> Float[Tensor, "P n V"]:
    """Log-probabilities, in fp32 (fp64 for fp64 inputs)."""
    dtype = accumulation_dtype(hidden.dtype)
    logits = torch.nn.functional.linear(hidden.to(dtype), head.weight.to(dtype))
    return torch.log_softmax(head.finish(logits, head.bias), dim=-1)
