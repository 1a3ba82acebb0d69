"""Loss of the student; the gradients of its hidden states and head are computed in the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_trl.loss.blocks import accumulation_dtype, chunks, columns_chunk, logits_chunk
from credit_trl.loss.head import HeadGradients, LMHead
from credit_trl.loss.projection import backward_logits, backward_logps, project
from credit_trl.loss.scores import (
    Scores,
    SupportConfig,
    TeacherStates,
    condition,
    full_generic_logps,
    score_over_vocabulary,
    score_within_support,
)
from credit_trl.loss.target import support_divergence, support_target, vocabulary_divergence, vocabulary_target
from credit_trl.objective import ContrastRule


class _FormedGradients(torch.autograd.Function):
    """Autograd function whose gradients are computed in the forward pass."""

    @staticmethod
    def forward(ctx, loss: Tensor, gradients: list[Tensor | None], *inputs: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "An earlier backward pass released the gradient of this `credit_loss`. Call `credit_loss` again, or "
                "add the losses that share it and call `backward` once."
            )
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(None if gradient is None else gradient.mul_(upstream) for gradient in gradients)


def with_gradients(loss: Tensor, gradients: HeadGradients, inputs: tuple[Tensor | None, ...]) -> Tensor:
    """Connect the loss to its inputs. The gradient of the head is stored once, in the parameter's dtype."""
    buffers = [gradients.hidden, gradients.weight, gradients.bias]
    del gradients
    for i, tensor in enumerate(inputs):
        # Gradients of fp16 inputs stay in fp32 until the loss scale is applied.
        if buffers[i] is not None and tensor.dtype != torch.float16:
            buffers[i] = buffers[i].to(tensor.dtype)
    with torch.enable_grad():
        return _FormedGradients.apply(loss, buffers, *inputs)


@dataclass(frozen=True)
class LossConfig:
    """How the loss of a token is formed.

    Args:
        support: tokens that carry the loss.
        rule: form and gate of the contrast; the default is the paper's `a = f − λ Ĝ` at every position.
        alpha: see `objective.distillation_loss`; `"sampled"` takes 1 only, its loss is `−sg[R_t] log π_θ(y_t)`.
        is_clip: upper bound on the detached ratio `exp(log π_θ − old)` that multiplies the loss of a token; None for
            no ratio.
        chunk_size: tokens per logits chunk; None picks from free memory.

    Raises:
        ValueError: alpha is outside [0, 1], or not 1 for `"sampled"`.
    """

    support: SupportConfig = field(default_factory=SupportConfig)
    rule: ContrastRule = field(default_factory=ContrastRule)
    alpha: float = 1.0
    is_clip: float | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0 or (self.support.kind == "sampled" and self.alpha != 1.0):
            raise ValueError(
                f"alpha must lie in [0, 1], and be 1 for support 'sampled'; got {self.alpha} for "
                f"{self.support.kind!r}."
            )

    def ratio(self, token_logps: Float[Tensor, " n"], old_logps: Float[Tensor, " n"] | None) -> Float[Tensor, " n"]:
        """Clipped importance ratio of the sampled tokens; ones where there is none."""
        if old_logps is None or self.is_clip is None:
            return torch.ones_like(token_logps)
        return (token_logps - old_logps).clamp(-20.0, 20.0).exp().clamp(max=self.is_clip)


@dataclass(frozen=True)
class LossTokens:
    """N sampled tokens that carry loss.

    Args:
        ids: (N,), the sampled tokens.
        weights: (N,), weight of each token's loss, without gradient; a token of weight 0 contributes nothing, whatever
            its scores.
        contrastive_coef: (N,), λ; 0 where the sample has no contrast.
        old_logps: (N,), log-probabilities of the sampled tokens at rollout time; None when on-policy.
    """

    ids: Int[Tensor, " N"]
    weights: Float[Tensor, " N"]
    contrastive_coef: Float[Tensor, " N"]
    old_logps: Float[Tensor, " N"] | None = None


@dataclass
class CreditLoss:
    """The loss and per-token values for logging; all but `loss` are detached.

    With `"renormalize"` some values are conditional on the support, see `credit_trl.loss`.

    Args:
        loss: scalar, `Σ_n weight_n · ratio_n · ℓ_n`, differentiable once.
        token_loss: (N,), ℓ_n in nats, without weight and ratio.
        token_logps: (N,), log π_θ of the sampled token.
        entropy: (N,), entropy of the student, nats.
        kl_to_target: (N,), `KL(p ‖ softmax(a))` over the buckets, nats; for `"sampled"` its one-sample estimate −R_t.
        kl_to_teacher: (N,), `KL(softmax(a) ‖ f)` over the buckets, nats; 0 for `"sampled"`.
        student_mass: (N,), probability of the support under the student; NaN where its normaliser is not computed.
        teacher_mass: (N,), the same under the teacher.
        teacher_token_logps: (N,), f at the sampled token.
        generic_token_logps: (N,), Ĝ at the sampled token.
        teacher_entropy: (N,), entropy of the teacher, nats.
        contrastive_coef: (N,), λ as applied: 0 where there is no contrast or the gate is closed.
        advantages: (N,), R_t at the sampled token.
        ratio: (N,), importance ratio; ones where there is none.
    """

    loss: Float[Tensor, ""]
    token_loss: Float[Tensor, " N"]
    token_logps: Float[Tensor, " N"]
    entropy: Float[Tensor, " N"]
    kl_to_target: Float[Tensor, " N"]
    kl_to_teacher: Float[Tensor, " N"]
    student_mass: Float[Tensor, " N"]
    teacher_mass: Float[Tensor, " N"]
    teacher_token_logps: Float[Tensor, " N"]
    generic_token_logps: Float[Tensor, " N"]
    teacher_entropy: Float[Tensor, " N"]
    contrastive_coef: Float[Tensor, " N"]
    advantages: Float[Tensor, " N"]
    ratio: Float[Tensor, " N"] | None = None


def credit_loss(
    student_hidden: Float[Tensor, "N H"],
    head: LMHead,
    tokens: LossTokens,
    teacher: Scores | TeacherStates,
    config: LossConfig,
) -> CreditLoss:
    """Weighted sum of the divergences from the student to the target a of f and Ĝ.

    The gradient is computed here and the backward pass only scales it, so `backward` can be called once. No gradient
    is computed where none is required.

    Args:
        student_hidden: (N, H), hidden states at the positions that predict the tokens; receives a gradient.
        head: head of the student; weight and bias receive gradients. A sharded head is gathered once.
        tokens: the sampled tokens, their weights and λ.
        teacher: `Scores` for `"teacher_topk"` and `"sampled"`, `TeacherStates` for `"full"` and `"student_topk"`.
        config: how the loss of a token is formed.

    Raises:
        TypeError: `teacher` does not match the support.
        ValueError: the weights require a gradient, or K exceeds the vocabulary.
    """
    _check(tokens, teacher, config)
    config.support.check(head.vocabulary_size)
    if isinstance(teacher, TeacherStates):
        teacher = replace(teacher, head=teacher.head.gathered().detached())
    head = head.gathered()
    inputs = (student_hidden, head.weight, head.bias)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    dtype = accumulation_dtype(student_hidden)
    gradients = HeadGradients.zeros(student_hidden, head, dtype) if wanted else None
    chunkable = _Tokens(
        student_hidden.detach(),
        tokens.ids.unsqueeze(-1),
        tokens.weights.to(dtype),
        teacher,
        tokens.contrastive_coef.to(dtype),
        None if tokens.old_logps is None else tokens.old_logps.to(dtype),
    )
    with torch.no_grad():
        terms = _in_chunks(chunkable, head.detached(), config, gradients)
        if wanted:
            terms.loss = with_gradients(terms.loss, gradients, inputs)
    return terms


@dataclass
class _Tokens:
    """N tokens with hidden states and scores, indexable by chunk.

    `support_ids`, `normalizer` and `entropy` are set by `_project_student`.
    """

    hidden: Float[Tensor, "N H"]
    ids: Int[Tensor, "N 1"]
    weights: Float[Tensor, " N"]
    teacher: Scores | TeacherStates
    contrastive_coef: Float[Tensor, " N"]
    old_logps: Float[Tensor, " N"] | None
    support_ids: Int[Tensor, "N K"] | None = None
    normalizer: Float[Tensor, " N"] | None = None
    entropy: Float[Tensor, " N"] | None = None

    def __getitem__(self, rows: slice) -> _Tokens:
        return _Tokens(**{f.name: None if (x := getattr(self, f.name)) is None else x[rows] for f in fields(self)})


_Step = Callable[["_Tokens", LMHead, LossConfig, "HeadGradients | None", "list[Tensor]"], CreditLoss]


def _in_chunks(tokens: _Tokens, head: LMHead, config: LossConfig, gradients: HeadGradients | None) -> CreditLoss:
    """Form the loss chunk by chunk, with buffers that all chunks share."""
    hidden, n = tokens.hidden, len(tokens.hidden)
    dtype = accumulation_dtype(hidden)
    step: _Step
    if config.support.renormalizes:
        tokens = _project_student(tokens, head, config)
        step, buffers = _step_within_support, 0
        size = config.chunk_size or columns_chunk(n, config.support.topk + 1, hidden.shape[1], dtype, hidden.device)
    else:
        in_step = isinstance(tokens.teacher, TeacherStates)
        step, buffers = (_step_full, 3) if config.support.kind == "full" else (_step_over_vocabulary, 1 + in_step)
        size = config.chunk_size or logits_chunk(n, head.vocabulary_size, dtype, hidden.device, buffers)
    workspace = hidden.new_empty((buffers, min(size, n), head.vocabulary_size), dtype=dtype)
    parts = []
    for rows in chunks(n, size):
        buffers_of_chunk = list(workspace[:, : rows.stop - rows.start])
        part = None if gradients is None else gradients.rows(rows)
        parts.append(step(tokens[rows], head, config, part, buffers_of_chunk))
    names = [f.name for f in fields(CreditLoss) if f.name != "loss"]
    return CreditLoss(
        loss=torch.stack([part.loss for part in parts]).sum(),
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in names},
    )


def _project_student(tokens: _Tokens, head: LMHead, config: LossConfig) -> _Tokens:
    """Add the student's normaliser, entropy and top K where a loss on K columns needs them; without gradient."""
    picks = config.support.kind == "student_topk"
    if not picks and (tokens.old_logps is None or config.is_clip is None):
        return tokens
    n, dtype = len(tokens.hidden), accumulation_dtype(tokens.hidden)
    size = config.chunk_size or logits_chunk(n, head.vocabulary_size, dtype, tokens.hidden.device)
    out = tokens.hidden.new_empty((min(size, n), head.vocabulary_size), dtype=dtype) if picks else None
    topk, parts = config.support.topk if picks else None, []
    for rows in chunks(n, size):
        buffer = None if out is None else out[: rows.stop - rows.start]
        parts.append(replace(project(head, tokens.hidden[rows], buffer, topk=topk), logits=None))
    return replace(
        tokens,
        support_ids=torch.cat([part.ids for part in parts]) if picks else None,
        normalizer=torch.cat([part.log_normalizer for part in parts]),
        entropy=torch.cat([part.entropy for part in parts]),
    )


def _step_over_vocabulary(
    tokens: _Tokens, head: LMHead, config: LossConfig, gradients: HeadGradients | None, buffers: list[Tensor]
) -> CreditLoss:
    """Loss on true log-probabilities: K tokens and a tail bucket, or the sampled token."""
    scores = tokens.teacher
    if isinstance(scores, TeacherStates):
        student = project(head, tokens.hidden, buffers[0], tokens.ids, topk=config.support.topk)
        scores = score_over_vocabulary(scores, student.ids, tokens.ids, buffers[1])
    else:
        student = project(head, tokens.hidden, buffers[0], tokens.ids, ids=scores.support_ids)
    logps, log_outside = student.logps, None if config.support.kind == "sampled" else student.log_outside
    ratio = config.ratio(student.token_logps, tokens.old_logps)
    target = support_target(scores, tokens.contrastive_coef, config.rule, config.support)
    token_loss, kl, grads, outside_grads = support_divergence(
        logps, log_outside, target.logps, config.alpha, config.support
    )
    if gradients is not None:
        grads, outside_grads = (
            None if x is None else _weigh(x, tokens.weights * ratio, tokens.weights) for x in (grads, outside_grads)
        )
        backward_logps(head, student, grads, outside_grads, tokens.hidden, gradients)
    return CreditLoss(
        loss=_weighted_sum(token_loss * ratio, tokens.weights),
        token_loss=token_loss,
        token_logps=student.token_logps,
        entropy=student.entropy,
        kl_to_target=kl,
        kl_to_teacher=target.kl_to_teacher,
        student_mass=logps.exp().sum(dim=-1),
        teacher_mass=scores.teacher_logps[:, : scores.support_ids.shape[-1]].exp().sum(dim=-1),
        teacher_token_logps=scores.teacher_token_logps,
        generic_token_logps=scores.generic_token_logps,
        teacher_entropy=scores.teacher_entropy,
        contrastive_coef=target.contrastive_coef,
        advantages=target.token_logps - student.token_logps,
        ratio=ratio,
    )


def _step_within_support(
    tokens: _Tokens, head: LMHead, config: LossConfig, gradients: HeadGradients | None, buffers: list[Tensor]
) -> CreditLoss:
    """Loss on a renormalised support: only K columns of the head are used, and the sampled token's for logging."""
    scores, scored_here = tokens.teacher, isinstance(tokens.teacher, TeacherStates)
    if scored_here:
        scores = score_within_support(scores, tokens.support_ids, tokens.ids)
    rows, bias = head.gather_columns(torch.cat([scores.support_ids, tokens.ids], dim=-1))
    logits = head.column_logits(tokens.hidden, (rows, bias))
    logps, token_logps = condition(logits, (scores.support_ids == tokens.ids).any(dim=-1))
    ratio, unknown = torch.ones_like(token_logps), torch.full_like(token_logps, torch.nan)
    entropy, student_mass = torch.special.entr(logps.exp()).sum(dim=-1), unknown
    if tokens.normalizer is not None:
        ratio = config.ratio(logits[:, -1] - tokens.normalizer, tokens.old_logps)
        entropy, student_mass = tokens.entropy, (logits[:, :-1].logsumexp(dim=-1) - tokens.normalizer).exp()
    target = support_target(scores, tokens.contrastive_coef, config.rule, config.support)
    token_loss, kl, grads, _ = support_divergence(logits[:, :-1], None, target.logps, config.alpha, config.support)
    if gradients is not None:
        grads = _weigh(grads, tokens.weights * ratio, tokens.weights)
        head.backward_columns(scores.support_ids, rows[:, :-1], logits[:, :-1], grads, tokens.hidden, gradients)
    return CreditLoss(
        loss=_weighted_sum(token_loss * ratio, tokens.weights),
        token_loss=token_loss,
        token_logps=token_logps,
        entropy=entropy,
        kl_to_target=kl,
        kl_to_teacher=target.kl_to_teacher,
        student_mass=student_mass,
        teacher_mass=unknown if scored_here else scores.teacher_logps.exp().sum(dim=-1),
        teacher_token_logps=scores.teacher_token_logps,
        generic_token_logps=scores.generic_token_logps,
        teacher_entropy=scores.teacher_entropy,
        contrastive_coef=target.contrastive_coef,
        advantages=target.token_logps - token_logps,
        ratio=ratio,
    )


def _step_full(
    tokens: _Tokens, head: LMHead, config: LossConfig, gradients: HeadGradients | None, buffers: list[Tensor]
) -> CreditLoss:
    """Loss over the whole vocabulary; the target overwrites the teacher's logits."""
    states = tokens.teacher
    teacher = project(states.head, states.hidden, buffers[1], tokens.ids)
    teacher.logits.sub_(teacher.log_normalizer.unsqueeze(-1))
    generic = full_generic_logps(states, buffers[2], buffers[0])
    generic_token_logps = generic.gather(-1, tokens.ids).squeeze(-1)
    target = vocabulary_target(
        teacher.logits, generic, tokens.ids, tokens.contrastive_coef, config.rule, scratch=buffers[0]
    )
    student = project(head, tokens.hidden, buffers[0], tokens.ids)
    token_logps = student.token_logps
    ratio = config.ratio(token_logps, tokens.old_logps)
    logps = torch.sub(student.logits, student.log_normalizer.unsqueeze(-1), out=buffers[2])
    token_loss, kl, grads = vocabulary_divergence(logps, target.logps, config.alpha)
    if gradients is not None:
        grads = _weigh(grads, tokens.weights * ratio, tokens.weights)
        backward_logits(head, student.logits, grads, tokens.hidden, gradients)
    everything = torch.ones_like(token_logps)
    return CreditLoss(
        loss=_weighted_sum(token_loss * ratio, tokens.weights),
        token_loss=token_loss,
        token_logps=token_logps,
        entropy=student.entropy,
        kl_to_target=kl,
        kl_to_teacher=target.kl_to_teacher,
        student_mass=everything,
        teacher_mass=everything,
        teacher_token_logps=teacher.token_logps,
        generic_token_logps=generic_token_logps,
        teacher_entropy=teacher.entropy,
        contrastive_coef=target.contrastive_coef,
        advantages=target.token_logps - token_logps,
        ratio=ratio,
    )


def _weigh(grads: Float[Tensor, "n ..."], factors: Float[Tensor, " n"], weights: Float[Tensor, " n"]) -> Tensor:
    """Gradients of the weighted loss, in place; exactly 0 where the weight is 0, even where scores are not finite."""
    shape = (-1, *(1 for _ in grads.shape[1:]))
    return grads.mul_(factors.view(shape)).masked_fill_((weights == 0).view(shape), 0.0)


def _weighted_sum(values: Float[Tensor, " n"], weights: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    return (values * weights).masked_fill(weights == 0, 0.0).sum()


def _check(tokens: LossTokens, teacher: Scores | TeacherStates, config: LossConfig) -> None:
    needed = TeacherStates if config.support.in_step else Scores
    if not isinstance(teacher, needed):
        raise TypeError(
            f"support {config.support.kind!r} needs a `{needed.__name__}`, got a `{type(teacher).__name__}`."
        )
    if tokens.weights.requires_grad:
        raise ValueError("`weights` get no gradient: detach them.")
