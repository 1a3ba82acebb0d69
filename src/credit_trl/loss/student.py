"""The loss of the student, with the gradient for its hidden states and head formed in the same pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from credit_trl.loss.blocks import accumulation_dtype, chunks, columns_chunk, logits_chunk
from credit_trl.loss.head import HeadGradients, LMHead
from credit_trl.loss.projection import backward_logits, backward_logps, project
from credit_trl.loss.scores import (
    Scores,
    Support,
    Tail,
    TeacherStates,
    check_topk,
    condition,
    generic_over_everything,
    renormalizes,
    score_over_vocabulary,
    score_within_support,
)
from credit_trl.loss.target import Target, support_divergence, support_target, vocabulary_divergence, vocabulary_target
from credit_trl.objective import ContrastRule


class _FormedGradients(torch.autograd.Function):
    """A value whose gradients are already known; the backward pass scales them and gives them away."""

    @staticmethod
    def forward(ctx, loss: Tensor, gradients: list[Tensor | None], *inputs: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "The gradient of this `credit_loss` was given away by an earlier backward pass. Call `credit_loss` "
                "again, or add the losses that share it and go backward once."
            )
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(None if gradient is None else gradient.mul_(upstream) for gradient in gradients)


def with_gradients(loss: Tensor, gradients: HeadGradients, inputs: tuple[Tensor | None, ...]) -> Tensor:
    """Connect the loss to its inputs. The head's gradient is held once: in the parameter's own precision."""
    buffers = [gradients.hidden, gradients.weight, gradients.bias]
    del gradients
    for i, tensor in enumerate(inputs):
        # fp16 waits in fp32 for the loss scale that lifts it into range.
        if buffers[i] is not None and tensor.dtype != torch.float16:
            buffers[i] = buffers[i].to(tensor.dtype)
    with torch.enable_grad():
        return _FormedGradients.apply(loss, buffers, *inputs)


_PAPER = ContrastRule()


@dataclass
class CreditLoss:
    """The loss and what is worth logging about it; all but `loss` are detached.

    With `"renormalize"` some values are those within the support: `credit_trl.loss` says which.

    Args:
        loss: scalar, `Σ_n weight_n · ratio_n · ℓ_n`, differentiable once.
        token_loss: (N,), ℓ_n in nats, without weight and ratio.
        token_logps: (N,), log π_θ of the sampled token.
        entropy: (N,), the student's, nats.
        kl_to_target: (N,), `KL(p ‖ softmax(a))` over the buckets, nats; for `"sampled"` its one-sample estimate −R_t.
        kl_to_teacher: (N,), `KL(softmax(a) ‖ f)` over the buckets, nats: how far the contrast moved the target; 0
            for `"sampled"`, where one token is no distribution.
        student_mass: (N,), the student's probability of the support; NaN where its normaliser was not formed.
        teacher_mass: (N,), the teacher's, likewise.
        teacher_token_logps: (N,), f at the sampled token.
        generic_token_logps: (N,), Ĝ at the sampled token.
        teacher_entropy: (N,), nats.
        contrastive_coef: (N,), λ as it entered: 0 where there was no contrast or the gate was shut.
        advantages: (N,), R_t at the sampled token.
        ratio: (N,), the importance ratio; ones where there is none.
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
    token_ids: Int[Tensor, " N"],
    weights: Float[Tensor, " N"],
    teacher: Scores | TeacherStates,
    *,
    contrastive_coef: Float[Tensor, " N"],
    rule: ContrastRule = _PAPER,
    alpha: float = 1.0,
    support: Support = "teacher_topk",
    topk: int = 20,
    tail: Tail = "bucket",
    old_token_logps: Float[Tensor, " N"] | None = None,
    is_clip: float | None = None,
    chunk_size: int | None = None,
) -> CreditLoss:
    """The distillation loss of the student against the target a, of f and Ĝ, summed with the given weights.

    The gradient is formed here, not in the backward pass, which only scales it; the head's is held once, and handed
    over to the parameter. So one backward pass a call: a second raises. Where no gradient is wanted none is formed.

    Args:
        student_hidden: (N, H), at the positions that predict the tokens; receives a gradient.
        head: the student's head; weight and bias receive gradients. A sharded one is gathered once.
        token_ids: (N,), the sampled tokens.
        weights: (N,), what each token's loss counts: mask, importance ratio and the loss type's normaliser. No
            gradient; a token of weight 0 adds nothing whatever its scores are.
        teacher: `Scores` for `"teacher_topk"` and `"sampled"`, `TeacherStates` for `"full"` and `"student_topk"`.
        contrastive_coef: (N,), λ, or 0 where the sample has no contrast.
        rule: form, gate and plausibility of the contrast; by default the paper's `a = f − λ Ĝ` everywhere.
        alpha: see `objective.distillation_loss`; `"sampled"` takes 1 only: its loss is `−sg[R_t] log π_θ(y_t)`.
        old_token_logps: (N,), log-probabilities of the sampled tokens at rollout time, or None when on-policy.
        is_clip: upper bound on the detached ratio `exp(log π_θ − old)` that multiplies each token's loss; None for no
            ratio.
        chunk_size: tokens projected at once; None chooses.

    Raises:
        TypeError: the teacher is not of the kind that the support needs.
        ValueError: `weights` want a gradient, `topk` exceeds the vocabulary, or alpha does not fit the support.
    """
    _check(weights, teacher, support, alpha)
    check_topk(topk, head, support)
    if isinstance(teacher, TeacherStates):
        teacher = replace(teacher, head=teacher.head.gathered().detached())
    head = head.gathered()
    options = _Options(rule, alpha, support, topk, tail, is_clip, chunk_size)
    inputs = (student_hidden, head.weight, head.bias)
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    dtype = accumulation_dtype(student_hidden)
    gradients = HeadGradients.zeros(student_hidden, head, dtype) if wanted else None
    tokens = _Tokens(
        student_hidden.detach(),
        token_ids.unsqueeze(-1),
        weights.to(dtype),
        teacher,
        contrastive_coef.to(dtype),
        None if old_token_logps is None else old_token_logps.to(dtype),
    )
    with torch.no_grad():
        terms = _in_chunks(tokens, head.detached(), options, gradients)
        if wanted:
            terms.loss = with_gradients(terms.loss, gradients, inputs)
    return terms


@dataclass(frozen=True)
class _Options:
    """How a token's loss is formed; see `credit_loss`."""

    rule: ContrastRule
    alpha: float
    support: Support
    topk: int
    tail: Tail
    is_clip: float | None
    chunk_size: int | None

    def ratio(self, token_logps: Tensor, old_logps: Tensor | None) -> Tensor:
        if old_logps is None or self.is_clip is None:
            return torch.ones_like(token_logps)
        return (token_logps - old_logps).clamp(-20.0, 20.0).exp().clamp(max=self.is_clip)


@dataclass
class _Tokens:
    """N tokens and all that is known of them beside the student's head.

    `support_ids`, `normalizer` and `entropy` are of a student that was projected beforehand, see `_look_ahead`.
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


_Step = Callable[["_Tokens", LMHead, _Options, "HeadGradients | None", "list[Tensor]"], CreditLoss]


def _in_chunks(tokens: _Tokens, head: LMHead, options: _Options, gradients: HeadGradients | None) -> CreditLoss:
    """Run the step that the support needs over chunks of tokens, with buffers that all chunks share."""
    hidden, n = tokens.hidden, len(tokens.hidden)
    dtype = accumulation_dtype(hidden)
    step: _Step
    if renormalizes(options.support, options.tail):
        tokens = _look_ahead(tokens, head, options)
        step, buffers = _step_within_support, 0
        size = options.chunk_size or columns_chunk(n, options.topk + 1, hidden.shape[1], dtype, hidden.device)
    else:
        in_step = isinstance(tokens.teacher, TeacherStates)
        step, buffers = (_step_full, 3) if options.support == "full" else (_step_over_vocabulary, 1 + in_step)
        size = options.chunk_size or logits_chunk(n, head.vocabulary_size, dtype, hidden.device, buffers)
    workspace = hidden.new_empty((buffers, min(size, n), head.vocabulary_size), dtype=dtype)
    parts = []
    for rows in chunks(n, size):
        buffers_of_chunk = list(workspace[:, : rows.stop - rows.start])
        part = None if gradients is None else gradients.rows(rows)
        parts.append(step(tokens[rows], head, options, part, buffers_of_chunk))
    names = [f.name for f in fields(CreditLoss) if f.name != "loss"]
    return CreditLoss(
        loss=torch.stack([part.loss for part in parts]).sum(),
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in names},
    )


def _look_ahead(tokens: _Tokens, head: LMHead, options: _Options) -> _Tokens:
    """The student's normaliser, entropy and top K, where a loss on K columns needs them: no gradient goes through."""
    picks = options.support == "student_topk"
    if not picks and (tokens.old_logps is None or options.is_clip is None):
        return tokens
    n, dtype = len(tokens.hidden), accumulation_dtype(tokens.hidden)
    size = options.chunk_size or logits_chunk(n, head.vocabulary_size, dtype, tokens.hidden.device)
    out = tokens.hidden.new_empty((min(size, n), head.vocabulary_size), dtype=dtype) if picks else None
    topk, parts = options.topk if picks else None, []
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
    tokens: _Tokens, head: LMHead, options: _Options, gradients: HeadGradients | None, buffers: list[Tensor]
) -> CreditLoss:
    """K tokens and a tail bucket, or the sampled token alone: the student's true log-probabilities."""
    scores = tokens.teacher
    if isinstance(scores, TeacherStates):
        student = project(head, tokens.hidden, buffers[0], tokens.ids, topk=options.topk)
        scores = score_over_vocabulary(scores, student.ids, tokens.ids, buffers[1])
    else:
        student = project(head, tokens.hidden, buffers[0], tokens.ids, ids=scores.support_ids)
    logps, log_outside = student.logps, None if options.support == "sampled" else student.log_outside
    ratio = options.ratio(student.token_logps, tokens.old_logps)
    target = _target(scores, tokens, options)
    token_loss, kl, grads, outside_grads = _of_support(logps, log_outside, target, options)
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
    tokens: _Tokens, head: LMHead, options: _Options, gradients: HeadGradients | None, buffers: list[Tensor]
) -> CreditLoss:
    """A renormalised support: K columns of the head forward and backward, and the sampled token's for the log."""
    scores, scored_here = tokens.teacher, isinstance(tokens.teacher, TeacherStates)
    if scored_here:
        scores = score_within_support(scores, tokens.support_ids, tokens.ids)
    rows, bias = head.gather_columns(torch.cat([scores.support_ids, tokens.ids], dim=-1))
    logits = head.column_logits(tokens.hidden, (rows, bias))
    logps, token_logps = condition(logits, (scores.support_ids == tokens.ids).any(dim=-1))
    ratio, unknown = torch.ones_like(token_logps), torch.full_like(token_logps, torch.nan)
    entropy, student_mass = torch.special.entr(logps.exp()).sum(dim=-1), unknown
    if tokens.normalizer is not None:
        ratio = options.ratio(logits[:, -1] - tokens.normalizer, tokens.old_logps)
        entropy, student_mass = tokens.entropy, (logits[:, :-1].logsumexp(dim=-1) - tokens.normalizer).exp()
    target = _target(scores, tokens, options)
    token_loss, kl, grads, _ = _of_support(logits[:, :-1], None, target, options)
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
    tokens: _Tokens, head: LMHead, options: _Options, gradients: HeadGradients | None, buffers: list[Tensor]
) -> CreditLoss:
    """The whole vocabulary as support: the target takes the place of the teacher's logits, in the same buffer."""
    states = tokens.teacher
    teacher = project(states.head, states.hidden, buffers[1], tokens.ids)
    teacher.logits.sub_(teacher.log_normalizer.unsqueeze(-1))
    generic = generic_over_everything(states, buffers[2], buffers[0])
    generic_token_logps = generic.gather(-1, tokens.ids).squeeze(-1)
    target = vocabulary_target(
        teacher.logits, generic, tokens.ids, tokens.contrastive_coef, options.rule, scratch=buffers[0]
    )
    student = project(head, tokens.hidden, buffers[0], tokens.ids)
    token_logps = student.token_logps
    ratio = options.ratio(token_logps, tokens.old_logps)
    logps = torch.sub(student.logits, student.log_normalizer.unsqueeze(-1), out=buffers[2])
    token_loss, kl, grads = vocabulary_divergence(logps, target.logps, options.alpha)
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


def _target(scores: Scores, tokens: _Tokens, options: _Options) -> Target:
    return support_target(
        scores, tokens.ids, tokens.contrastive_coef, options.rule, support=options.support, tail=options.tail
    )


def _of_support(
    columns: Tensor, log_outside: Tensor | None, target: Target, options: _Options
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return support_divergence(
        columns, log_outside, target.logps, alpha=options.alpha, support=options.support, tail=options.tail
    )


def _weigh(grads: Float[Tensor, "n ..."], factors: Float[Tensor, " n"], weights: Float[Tensor, " n"]) -> Tensor:
    """Gradients of the weighted loss, in place; exactly 0 where the weight is, whatever was scored there."""
    shape = (-1, *(1 for _ in grads.shape[1:]))
    return grads.mul_(factors.view(shape)).masked_fill_((weights == 0).view(shape), 0.0)


def _weighted_sum(values: Float[Tensor, " n"], weights: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    return (values * weights).masked_fill(weights == 0, 0.0).sum()


def _check(weights: Tensor, teacher: Scores | TeacherStates, support: Support, alpha: float) -> None:
    needed = TeacherStates if support in ("full", "student_topk") else Scores
    if not isinstance(teacher, needed):
        raise TypeError(f"support {support!r} needs a `{needed.__name__}`, got a `{type(teacher).__name__}`.")
    if weights.requires_grad:
        raise ValueError("`weights` get no gradient: detach them.")
    if not 0.0 <= alpha <= 1.0 or (support == "sampled" and alpha != 1.0):
        raise ValueError(f"alpha must lie in [0, 1], and be 1 for support 'sampled'; got {alpha} for {support!r}.")
