"""Drift of a branch between a generic token A and an input-specific token B (docs/theory.md), under `credit_loss`.

The policy is a table of logits: an identity head makes hidden states the logits. Each row is one branch. Logits of the
teacher are those of the policy plus δ on A; under the contrast prompt B loses s as well.
"""

import itertools

import pytest
import torch
from torch import Tensor

from credit_trl.loss.credit_loss import LossTokens, credit_loss
from credit_trl.loss.head import LMHead
from credit_trl.loss.scores import SupportConfig, score_tokens
from dense_reference import loss_options

A, B = 0, 1
DELTAS, SPREADS, COEFS = (0.2, 0.93, 3.0, 6.6), (0.5, 4.5, 7.5, 11.4), (0.05, 0.1, 0.2, 0.5)


class Branch:
    """N branches with a student whose logits start at log-odds `start` of A against B.

    Args:
        delta, s, coef: (N,), δ, s and λ.
        start: log-odds of A against B.
        size: number of tokens.
        following: share of the student's change that appears in the teacher, under x and under x'.
    """

    def __init__(
        self, delta: Tensor, s: Tensor, coef: Tensor, *, start: float = 0.0, size: int = 2, following: float = 1.0
    ):
        self.coef, self.head = coef, LMHead(torch.eye(size, dtype=torch.float64))
        self.first = torch.zeros(len(delta), size, dtype=torch.float64)
        self.first[:, A] = start
        self.logits = self.first.clone().requires_grad_()
        self.following = following
        self.lift, self.loss_of_b = torch.zeros_like(self.first), torch.zeros_like(self.first)
        self.lift[:, A], self.loss_of_b[:, B] = delta, s

    @property
    def log_odds(self) -> Tensor:
        return (self.logits[:, A] - self.logits[:, B]).detach()

    def loss(self, form: str, alpha: float = 1.0, weights: Tensor | None = None) -> Tensor:
        moved = self.logits.detach() - self.first
        teacher = self.first + self.following * moved + self.lift
        contrast = teacher - self.loss_of_b
        ids = torch.zeros(len(self.coef), dtype=torch.int64)
        tokens = LossTokens(ids, torch.ones_like(self.coef) if weights is None else weights, self.coef)
        support = SupportConfig(topk=None)
        scores = score_tokens(teacher, contrast[None], self.head, ids, support)
        return credit_loss(self.logits, self.head, tokens, scores, support, loss_options(form, alpha)).loss

    def train(self, form: str, alpha: float = 1.0, steps: int = 120) -> Tensor:
        """Log-odds after training. Rprop converges whatever the scale of the gradient, which is p_A p_B."""
        optimizer = torch.optim.Rprop([self.logits], lr=0.1, step_sizes=(1e-9, 0.5))
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss(form, alpha).backward()
            optimizer.step()
        return self.log_odds

    def drift(self, form: str, steps: int = 20, rate: float = 0.02) -> list[Tensor]:
        """Changes of the log-odds per unit of time under natural gradient descent, one a step (two tokens)."""
        changes = []
        for _ in range(steps):
            p = self.logits.detach().softmax(-1)
            log_odds_before = self.log_odds
            (gradient,) = torch.autograd.grad(self.loss(form, weights=1 / (2 * p[:, A] * p[:, B])), self.logits)
            with torch.no_grad():
                self.logits -= rate * gradient
            changes.append((self.log_odds - log_odds_before) / rate)
        return changes


def grid() -> tuple[Tensor, Tensor, Tensor]:
    """δ, s and λ with a fixed point of at most 8 nats."""
    cases = [
        (delta, s, coef)
        for delta, s, coef in itertools.product(DELTAS, SPREADS, COEFS)
        if abs(delta * (1 - coef) / coef - s) <= 8
    ]
    return tuple(torch.tensor(cases, dtype=torch.float64).T)


@pytest.mark.parametrize(("alpha", "size"), [(1.0, 2), (1.0, 4), (0.5, 2), (0.0, 2)])
def test_subtract_has_the_fixed_point_of_the_theory(alpha, size):
    delta, s, coef = grid()
    assert len(delta) > 30
    log_odds = Branch(delta, s, coef, start=2.0, size=size).train("subtract", alpha)
    torch.testing.assert_close(log_odds, delta * (1 - coef) / coef - s, rtol=0.05, atol=0.01)
    assert torch.equal(log_odds < 0, coef > delta / (delta + s))


@pytest.mark.parametrize("start", [-3.0, 2.0])
def test_odds_of_generic_tokens_add_up_at_the_fixed_point(start):
    delta, s, coef = grid()
    branch = Branch(delta, s, coef, start=start, size=3)
    branch.lift[:, 2] = delta / 2
    branch.train("subtract")
    logits = branch.logits.detach()
    odds = logits[:, [A, 2]].logsumexp(-1) - logits[:, B]
    expected = torch.stack([token_delta * (1 - coef) / coef - s for token_delta in (delta, delta / 2)]).logsumexp(0)
    torch.testing.assert_close(odds, expected, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("start", [-3.0, 3.0])
def test_guide_drifts_at_a_constant_rate_without_fixed_point(start):
    delta, s, coef = grid()
    coef = coef / (1 - coef)  # λ of guide with the target of subtract up to a factor
    for change in Branch(delta, s, coef, start=start).drift("guide"):
        torch.testing.assert_close(change, delta - coef * s, rtol=0.05, atol=1e-6)
        assert torch.equal(change < 0, coef > delta / s)


@pytest.mark.parametrize("form", ["subtract", "guide"])
@pytest.mark.parametrize("follows", [0.0, 0.5])
def test_teacher_that_follows_in_part_bounds_the_drift(form, follows):
    delta, s, coef = (x[(grid()[0] < 3) & (grid()[1] < 7)] for x in grid())
    start = 1.0
    branch = Branch(delta, s, coef, start=start, following=follows)
    drift, slope = delta - coef * s, 1 - follows
    if form == "subtract":
        drift, slope = (1 - coef) * delta - coef * (start + s), 1 - (1 - coef) * follows
    torch.testing.assert_close(branch.train(form), start + drift / slope, rtol=0.05, atol=0.01)
