"""Dense reference of the loss on hidden states: `dense`'s formulas on every logit, in fp64, by autograd."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.testing import assert_close

from credit_trl.config import CreditConfig
from credit_trl.loss.credit_loss import CreditLoss, LossTokens, credit_loss
from credit_trl.loss.head import LMHead
from credit_trl.loss.scores import SupportConfig, score_tokens
from credit_trl.objective import Form
from dense import buckets, divergence

TAILS = ("bucket", "renormalize")
SUPPORTS = [("teacher_topk", tail, alpha) for tail in TAILS for alpha in (0.0, 0.5, 1.0)]
SUPPORTS += [("sampled", tail, 1.0) for tail in TAILS]


@contextmanager
def chunks_of(size: int | None) -> Iterator[None]:
    """Take chunks of this many tokens; None for those of the fixed budget of bytes."""
    if size is None:
        yield
        return
    with patch.object(LMHead, "chunk_size", lambda *_: size):
        yield


@dataclass
class Case:
    """One random problem; `hidden`, `weight` and `bias` are the student's leaves."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    teacher: Tensor
    contrasts: Tensor
    reference_weight: Tensor
    reference_bias: Tensor | None
    token_ids: Tensor
    weights: Tensor
    coef: Tensor
    old_logps: Tensor
    softcap: float | None
    scale: float = 1.0
    temperature: float = 1.0

    def tokens(self) -> LossTokens:
        return LossTokens(self.token_ids, self.weights, self.coef, self.old_logps)

    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None]

    def head(self, weight: Tensor, bias: Tensor | None) -> LMHead:
        return LMHead(weight, bias, self.scale, self.softcap, self.temperature)

    def copy(self, dtype: torch.dtype) -> Self:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                wants = name in ("hidden", "weight", "bias")
                values[name] = value.detach().to(dtype, copy=True).requires_grad_(wants)
        return Case(**values)


def make_case(
    n: int = 7,
    v: int = 41,
    h: int = 6,
    contrasts: int = 1,
    bias: bool = False,
    softcap: float | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: float,
) -> Self:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    case = Case(
        hidden=normal(n, h),
        weight=normal(v, h) / h**0.5,
        bias=normal(v) / 2 if bias else None,
        teacher=normal(n, h),
        contrasts=normal(contrasts, n, h),
        reference_weight=normal(v, h) / h**0.5,
        reference_bias=normal(v) / 2 if bias else None,
        token_ids=torch.randint(v, (n,), generator=g),
        weights=torch.rand(n, generator=g, dtype=torch.float64) * (torch.rand(n, generator=g) > 0.2),
        coef=torch.rand(n, generator=g, dtype=torch.float64) * (torch.rand(n, generator=g) > 0.2) * (contrasts > 0),
        old_logps=normal(n) - 3,
        softcap=softcap,
        **options,
    )
    return case.copy(dtype)


@cache
def loss_options(form: Form = "subtract", alpha: float = 1.0, is_clip: float | None = None) -> CreditConfig:
    """Options of the loss."""
    return CreditConfig("run", contrastive_form=form, distillation_alpha=alpha, distillation_is_clip=is_clip)


def ours(
    case: Case,
    support: str,
    tail: str,
    alpha: float,
    topk: int | None,
    is_clip=None,
    chunk_size=None,
    form: Form = "subtract",
) -> CreditLoss:
    chosen = SupportConfig(support, topk, tail)
    head = case.head(case.reference_weight, case.reference_bias)
    with chunks_of(chunk_size):
        scores = score_tokens(case.teacher, case.contrasts, head, case.token_ids, chosen)
        student = case.head(case.weight, case.bias)
        return credit_loss(case.hidden, student, case.tokens(), scores, chosen, loss_options(form, alpha, is_clip))


def dense_logps(hidden: Tensor, weight: Tensor, bias: Tensor | None, case: Case) -> Tensor:
    logits = hidden @ weight.T
    logits = (logits if bias is None else logits + bias) * case.scale
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    return torch.log_softmax(logits / case.temperature, dim=-1)


def dense(
    case: Case, support: str, tail: str, alpha: float, topk: int | None, is_clip=None, form: Form = "subtract"
) -> CreditLoss:
    """The loss from every logit of student, teacher and contrasts, by the definitions of the paper."""
    logp = dense_logps(case.hidden, case.weight, case.bias, case)
    f = dense_logps(case.teacher, case.reference_weight, case.reference_bias, case)
    g = [dense_logps(hidden, case.reference_weight, case.reference_bias, case) for hidden in case.contrasts]
    token = case.token_ids[:, None]

    def at_token(logps: Tensor) -> Tensor:
        return logps.gather(-1, token)[:, 0]

    is_whole = topk is None or topk == logp.shape[-1]
    within = tail == "renormalize" and support == "teacher_topk" and not is_whole
    ids = token if support == "sampled" else f.topk(logp.shape[-1] if topk is None else topk, dim=-1).indices

    def on_support(logps: Tensor) -> Tensor:
        if support == "sampled" or is_whole:
            return logps.gather(-1, ids)
        return buckets(logps, ids, tail)

    def average(parts: list[Tensor], otherwise: Tensor) -> Tensor:
        return sum(parts) / len(parts) if parts else torch.zeros_like(otherwise)

    generic, log_p = average([on_support(x) for x in g], on_support(f)), on_support(logp)
    moved = on_support(f) - generic if form == "guide" else -generic
    a = on_support(f) + case.coef[:, None] * moved
    log_q, log_f = (x - x.logsumexp(-1, keepdim=True) for x in (a, on_support(f)))
    a = log_q if within else a
    reward = (a - log_p).detach()
    token_loss = -(reward * log_p).sum(-1) if support == "sampled" else divergence(log_p, a, alpha)
    ratio = torch.ones_like(token_loss)
    if is_clip is not None:
        ratio = (at_token(logp) - case.old_logps).exp().clamp(max=is_clip).detach()

    def at_sampled_token(logps: Tensor) -> Tensor:
        """Conditional on support and token where the support is renormalised."""
        chosen = torch.zeros_like(logps, dtype=torch.bool).scatter(-1, torch.cat([ids, token], -1), True)
        return at_token(logps) - logps.masked_fill(~chosen, -torch.inf).logsumexp(-1) * within

    f_token, g_token = at_sampled_token(f), average([at_sampled_token(x) for x in g], at_sampled_token(f))
    token_target = f_token + case.coef * (f_token - g_token if form == "guide" else -g_token)
    return CreditLoss(
        loss=(token_loss * ratio * case.weights).sum(),
        token_loss=token_loss,
        token_logps=at_sampled_token(logp),
        kl_to_target=(log_p - a).sum(-1) if support == "sampled" else divergence(log_p, log_q, 1.0),
        student_mass=logp.gather(-1, ids).exp().sum(-1),
        teacher_mass=f.gather(-1, ids).exp().sum(-1),
        kl_to_teacher=divergence(log_q, log_f, 1.0),
        teacher_token_logps=f_token,
        generic_token_logps=g_token,
        advantages=token_target - at_sampled_token(logp),
        ratio=ratio,
        policy_logps=at_token(logp),
        entropy=-(logp.exp() * logp).sum(-1),
        teacher_entropy=-(f.exp() * f).sum(-1),
    )


def assert_same_gradients(case: Case, exact: Case, ratio: Tensor, tolerance: float = 1e-5) -> None:
    """To 1e-5 of the largest entry, and what fp32 leaves where larger terms cancel to it."""
    rounding = 2**-21 * (exact.weights * ratio).sum()
    factors = (exact.weight.abs().max(), exact.hidden.abs().max(), 1.0)
    for ours_leaf, dense_leaf, factor in zip(case.leaves(), exact.leaves(), factors, strict=False):
        reference = dense_leaf.grad
        error = (ours_leaf.grad.double() - reference).abs().max()
        assert error <= tolerance * reference.abs().max() + rounding * factor


def assert_same(result: CreditLoss, expected: CreditLoss, weights: Tensor, tolerance: float = 1e-5) -> None:
    scale = (expected.token_loss * expected.ratio * weights).abs().sum()
    rounding = 2**-21 * (expected.ratio * weights).sum()
    assert abs(result.loss.item() - expected.loss.item()) <= tolerance * scale + rounding
    assert_close(result.token_loss.double().cpu(), expected.token_loss, rtol=tolerance, atol=2 * tolerance)
