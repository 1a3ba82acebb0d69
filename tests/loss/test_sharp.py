"""Peaked distributions and forbidden tokens against dense sums in fp64: no floor, no overflow, no NaN."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from credit_trl import objective
from credit_trl.loss.credit_loss import LossTokens, credit_loss
from credit_trl.loss.head import LMHead
from credit_trl.loss.scores import SupportConfig, score_tokens
from dense_reference import loss_options

V = 40
# Factor of the teacher's logits and of the student's, temperature, K.
SHARP = {
    "sharp teacher": (20.0, 0.1, 1.0, 5),
    "sharp student": (0.1, 20.0, 1.0, 5),
    "temperature .01": (1.0, 1.0, 0.01, 5),
    "logits of 1e4": (1e4, 1e4, 1.0, 5),
    "logits of 1e4 for the teacher": (1e4, 1.0, 1.0, 5),
    "K = V - 1": (3.0, 1.0, 1.0, V - 1),
    "K = V - 1, sharp": (50.0, 50.0, 1.0, V - 1),
    "1e-9 outside": (12.0, 12.0, 1.0, 15),
    "K = V": (30.0, 1.0, 1.0, None),
}
ALPHAS = [0.0, 0.5, 1.0]


def mean(logps: Tensor, values: Tensor) -> Tensor:
    """Σ p x, in which 0 · ∞ is 0."""
    is_zero = logps == -torch.inf
    return (logps.exp() * torch.where(is_zero, 0.0, values)).sum(-1)


def reference(
    student: Tensor, teacher: Tensor, contrasts: Tensor, topk: int | None, alpha: float, tail: str
) -> Tensor:
    """(n,) losses with λ = .3 from all logits, of which some are −∞."""
    p, f, g = (logits.log_softmax(-1) for logits in (student, teacher, contrasts))
    ids = f.topk(V if topk is None else topk).indices

    def on_support(logps: Tensor) -> Tensor:
        inside = logps.gather(-1, ids.expand(*logps.shape[:-1], -1))
        if topk is None:
            return inside
        if tail == "renormalize":
            return inside.log_softmax(-1)
        is_rest = torch.ones_like(p, dtype=torch.bool).scatter(-1, ids, False) & (logps > -torch.inf)
        rest = torch.where(is_rest, logps, -1e15).logsumexp(-1, keepdim=True)  # of no tokens: no gradient of −∞
        return torch.cat([inside, torch.where(rest > -1e14, rest, -torch.inf)], dim=-1)

    log_p = on_support(p)
    generic = on_support(g).mean(0)
    target = torch.where(generic == -torch.inf, -torch.inf, on_support(f) - 0.3 * generic)
    log_q = target.log_softmax(-1)
    if alpha == 1.0:
        return mean(log_p, log_p - (log_q if tail == "renormalize" and topk is not None else target))
    if alpha == 0.0:
        return mean(log_q, log_q - log_p)
    finite_p = torch.where(log_p == -torch.inf, -1e15, log_p)
    log_m = torch.logaddexp(finite_p + math.log1p(-alpha), log_q + math.log(alpha))
    return (1 - alpha) * mean(log_p, log_p - log_m) + alpha * mean(log_q, log_q - log_m)


def problem(sharpness, dtype, bias=(None, None), contrasts=2):
    """Hidden states and heads of student and teacher, and logits in fp64 as they would sample."""
    of_teacher, of_student, temperature, topk = sharpness
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n = 12
    hidden = normal(n, 8).to(dtype).requires_grad_()
    weight = (of_student * normal(V, 8) / 8**0.5).to(dtype).requires_grad_()
    scored = normal(1 + contrasts, n, 8).to(dtype)
    scored[0] = hidden.detach() + 0.3 * scored[0]  # the teacher agrees with the student for the most part
    teacher_weight = (weight.detach().double() * of_teacher / of_student + 0.1 * normal(V, 8)).to(dtype)
    tokens = torch.randint(V, (n,), generator=generator)
    heads = [LMHead(w, b, temperature=temperature) for w, b in ((weight, bias[0]), (teacher_weight, bias[1]))]
    return hidden, scored, heads, tokens, topk


def losses(hidden, scored, heads, tokens, topk, alpha, tail):
    support = SupportConfig("teacher_topk", topk, tail)
    scores = score_tokens(scored[0], scored[1:], heads[1], tokens, support)
    ones = torch.ones(len(tokens), dtype=hidden.dtype)
    result = credit_loss(
        hidden, heads[0], LossTokens(tokens, ones, 0.3 * ones), scores, support, loss_options(alpha=alpha)
    )
    return result, scores


def logits(head: LMHead, hidden: Tensor) -> Tensor:
    values = hidden.double() @ head.weight.double().T
    return (values if head.bias is None else values + head.bias.double()) / head.temperature


def expected_losses(hidden, scored, heads, topk, alpha, tail):
    with torch.no_grad():
        teacher, contrasts = logits(heads[1], scored[0]), logits(heads[1], scored[1:])
    return reference(logits(heads[0], hidden), teacher, contrasts, topk, alpha, tail)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@pytest.mark.parametrize("sharpness", SHARP.values(), ids=SHARP)
def test_sharp_distributions_have_the_dense_loss_and_gradient(sharpness, tail, alpha):
    hidden, scored, heads, tokens, topk = problem(sharpness, torch.float64)
    leaves = (hidden, heads[0].weight)
    result, _ = losses(hidden, scored, heads, tokens, topk, alpha, tail)
    computed = torch.autograd.grad(result.loss, leaves)
    expected = expected_losses(hidden, scored, heads, topk, alpha, tail)
    assert_close(result.token_loss, expected.detach(), rtol=1e-9, atol=1e-9)
    for gradient, dense in zip(computed, torch.autograd.grad(expected.sum(), leaves), strict=True):
        assert_close(gradient, dense, rtol=1e-7, atol=1e-9 * float(1 + dense.abs().max()))


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("sharpness", [SHARP["sharp teacher"], SHARP["1e-9 outside"]])
def test_fp32_sees_a_mass_outside_far_below_its_rounding(sharpness, alpha):
    hidden, scored, heads, tokens, topk = problem(sharpness, torch.float32)
    result, scores = losses(hidden, scored, heads, tokens, topk, alpha, "bucket")
    student = logits(heads[0], hidden).log_softmax(-1).scatter(-1, scores.support_ids, -torch.inf).logsumexp(-1)
    assert min(scores.teacher_logps[:, -1].min(), student.min()) < math.log(1e-9)  # control: a floor would be seen
    expected = expected_losses(hidden, scored, heads, topk, alpha, "bucket")
    assert_close(result.token_loss.double(), expected.detach(), rtol=1e-3, atol=1e-4)


def test_half_of_the_students_mass_outside_costs_what_the_teacher_says():
    """The teacher has e^-40 outside; with a floor at 1e-7 the loss would be a third."""
    teacher = torch.tensor([[-1e-17, -45.0, -40.0]])
    student = torch.tensor([[math.log(0.49), math.log(0.01), math.log(0.5)]])
    target = objective.add_tail_bucket(teacher[:, :2], teacher[:, 2])
    buckets = objective.add_tail_bucket(student[:, :2], student[:, 2])
    expected = sum(p * (math.log(p) - f) for p, f in zip((0.49, 0.01, 0.5), teacher[0].tolist(), strict=True))
    assert_close(objective.distillation_loss(buckets, target, 1.0), torch.tensor([expected]), rtol=1e-5, atol=0)


FORBIDS = {"both": (True, True), "student": (True, False), "teacher": (False, True)}


def forbidding(dtype, by):
    """Biases of student and teacher, of which some forbid a third of the vocabulary."""
    biases = []
    for forbids in by:
        bias = torch.linspace(-1, 1, V).to(dtype)
        if forbids:
            bias[::3] = -torch.inf
        biases.append(bias)
    return tuple(biases)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
@pytest.mark.parametrize(
    ("by", "topk"), [("both", V - 3), ("both", None), ("both", 5), ("student", 9), ("teacher", None)]
)
def test_forbidden_tokens_contribute_nothing(dtype, tail, alpha, by, topk):
    hidden, scored, heads, tokens, _ = problem((1.0, 1.0, 0.7, topk), dtype, forbidding(dtype, FORBIDS[by]))
    if (by, alpha) in {("student", 0.0), ("teacher", 1.0)}:
        result, _ = losses(hidden, scored, heads, tokens, topk, alpha, tail)
        assert result.loss == torch.inf  # as the divergence is: the run ends before the step
        return
    leaves = (hidden, heads[0].weight)
    result, _ = losses(hidden, scored, heads, tokens, topk, alpha, tail)
    computed = torch.autograd.grad(result.loss, leaves)
    expected = expected_losses(hidden, scored, heads, topk, alpha, tail)
    tolerance = 1e-8 if dtype == torch.float64 else 1e-4
    assert_close(result.token_loss.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    for gradient, dense in zip(computed, torch.autograd.grad(expected.sum(), leaves), strict=True):
        assert_close(gradient, dense, rtol=tolerance, atol=tolerance)
    if by == "both":
        for name in ("entropy", "kl_to_target", "kl_to_teacher", "teacher_mass", "teacher_entropy"):
            assert getattr(result, name).isfinite().all(), name


@pytest.mark.parametrize("alpha", ALPHAS)
def test_infinite_logits_in_the_equations_give_no_nan(alpha):
    student = torch.tensor([[1.0, -torch.inf, 0.5, 2.0]], requires_grad=True)
    teacher, contrast = (torch.tensor([[0.3, -torch.inf, x, 1.0]]).log_softmax(-1) for x in (0.1, 0.2))
    target = objective.credit_target(teacher, contrast, 1.0)
    loss = objective.distillation_loss(student.log_softmax(-1), target, alpha).sum()
    (gradient,) = torch.autograd.grad(loss, student)
    allowed = [0, 2, 3]
    leaf = student.detach()[:, allowed].requires_grad_()
    expected = objective.distillation_loss(leaf.log_softmax(-1), (teacher - contrast)[:, allowed], alpha).sum()
    assert_close(loss, expected)
    assert_close(gradient[:, allowed], torch.autograd.grad(expected, leaf)[0])
    assert gradient[0, 1] == 0.0
