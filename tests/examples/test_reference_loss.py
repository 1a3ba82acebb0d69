"""`examples/reference_loss.py` equals `credit_loss`."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from credit_trl.loss.credit_loss import LossTokens, credit_loss
from credit_trl.loss.head import LMHead
from credit_trl.loss.scores import SupportConfig, score_tokens
from dense_reference import loss_options

N, V, H, C, TOPK, COEF = 12, 31, 7, 2, 5, 0.3
SCRIPT = Path(__file__).parents[2] / "examples" / "reference_loss.py"
reference_loss = runpy.run_path(str(SCRIPT))["reference_loss"]


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_reference_loss_equals_the_real_one(tail, alpha):
    torch.manual_seed(0)
    hidden, weight = leaf(N, H), leaf(V, H)
    states, contrast_states, weight_of_teacher = (leaf(*shape).detach() for shape in ((N, H), (C, N, H), (V, H)))
    token_ids, weights = torch.randint(V, (N,)), torch.rand(N, dtype=torch.float64)
    support = SupportConfig("teacher_topk", TOPK, tail)
    scores = score_tokens(states, contrast_states, LMHead(weight_of_teacher), token_ids, support)
    tokens = LossTokens(token_ids, weights, torch.full_like(weights, COEF))
    ours = credit_loss(hidden, LMHead(weight), tokens, scores, support, loss_options(alpha=alpha))
    teacher, contrasts = states @ weight_of_teacher.T, contrast_states @ weight_of_teacher.T
    token_loss, advantages = reference_loss(hidden @ weight.T, teacher, contrasts, token_ids, COEF, TOPK, tail, alpha)
    loss = (weights * token_loss).sum()
    torch.testing.assert_close(ours.token_loss, token_loss.detach())
    torch.testing.assert_close(ours.loss, loss)
    if tail == "bucket":  # with "renormalize" the logged advantage is conditional on the support
        torch.testing.assert_close(ours.advantages, advantages)
    expected = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(ours.loss, (hidden, weight)), expected)
