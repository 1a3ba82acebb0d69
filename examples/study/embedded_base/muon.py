"""Muon with an fp32 iteration: `torch.optim.Muon` iterates in bf16, which is slow on CPUs without its instructions."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# Coefficients of the quintic iteration and its number of steps, those of `torch.optim.Muon`.
_A, _B, _C = 3.4445, -4.775, 2.0315
_STEPS = 5


class Muon(torch.optim.Optimizer):
    """Momentum whose update of a matrix is orthogonalised (Jordan et al., 2024, github.com/KellerJordan/Muon).

    Args:
        params: matrices.
        lr: learning rate, multiplied by √(rows / columns) for tall matrices.
        momentum: weight of the past in the running mean of gradients.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                gradient, momentum = matrix.grad, group["momentum"]
                if gradient is None:
                    continue
                mean = self.state[matrix].setdefault("mean", torch.zeros_like(matrix))
                mean.lerp_(gradient, 1.0 - momentum)
                update = orthogonalized(gradient.lerp(mean, momentum))
                matrix.sub_(update, alpha=group["lr"] * math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1])))


def orthogonalized(matrix: Tensor) -> Tensor:
    """(m, n) matrix with the singular vectors of `matrix` and singular values near 1, by Newton-Schulz iteration."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    update = matrix.mT if is_tall else matrix
    update = update / update.norm().clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = update @ update.mT
        update = torch.addmm(update, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), update, beta=_A)
    return update.mT if is_tall else update
