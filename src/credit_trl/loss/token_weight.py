"""Token weights: a function of the credit that weighs the tokens of the distillation loss or of GRPO's.

The argument `token_weight` of `CreditTrainer` is such a function, called once for each generation batch;
CONTRIBUTING.md has an example.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from credit_trl.sandbox.user_code import explained_errors
from credit_trl.trl_compat import identity


@dataclass(frozen=True)
class TokenCredit:
    """Credit of the sampled tokens of a generation batch, in nats, without gradient."""

    teacher_logps: Float[Tensor, "B T"]  # f
    generic_logps: Float[Tensor, "B T"]  # Ĝ; 0 where a sample has no contrast prompt
    specific: Float[Tensor, "B T"]  # S = f − Ĝ; 0 where a sample has no contrast prompt
    delta_v: Float[Tensor, "B T"]  # ΔV = f − log p, with the policy that sampled the tokens
    entropy: Float[Tensor, "B T"]  # of the teacher
    advantages: Float[Tensor, " B"]  # GRPO's advantage of each sample
    rewards: Float[Tensor, " B"]  # weighted sums over the reward functions; NaN where none applied
    mask: Bool[Tensor, "B T"]  # True on tokens that the teacher scored; other entries above have no meaning
    reduce: Callable[[Tensor], Tensor] = identity  # sums over processes, for `mean`; the default serves one

    def mean(self, values: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, ""]:
        """Mean over the tokens of all processes where `mask` (by default the scored ones) is True; 0 without any."""
        mask = self.mask if mask is None else mask & self.mask
        sums = torch.stack([values[mask].sum(), mask.sum().to(values.dtype)])
        total, count = self.reduce(sums)
        return total / count.clamp(min=1.0)


# Returns weights (B, T) of the loss "distillation", of the loss "grpo", or of both; a loss without weights keeps ones.
TokenWeight = Callable[[TokenCredit], Mapping[str, Tensor]]


def weigh_tokens(token_weight: TokenWeight, credit: TokenCredit) -> dict[str, Float[Tensor, "B T"]]:
    """Weights of the losses by name; ones where the teacher did not score a token.

    Raises:
        TypeError: the token weight does not return a dictionary of tensors.
        ValueError: a loss has another name, or weights have another shape or are not finite and at least 0.
    """
    weights = {}
    copies = {name: value.clone() for name, value in vars(credit).items() if isinstance(value, Tensor)}
    name = getattr(token_weight, "__name__", type(token_weight).__name__)
    with explained_errors(f"The token weight {name!r}", "Correct it; `credit_trl.testing.check_weight` tests it."):
        returned = token_weight(replace(credit, **copies))  # the loss reads the tensors that it may edit
    if not isinstance(returned, Mapping) or not all(isinstance(values, Tensor) for values in returned.values()):
        text = " ".join(repr(returned).split())
        raise TypeError(f"A token weight must return a dictionary of tensors, got {text:.60}.")
    for loss, values in returned.items():
        if loss not in ("distillation", "grpo"):
            raise ValueError(f"A token weight must return weights of 'distillation' or 'grpo', got {loss!r}.")
        if values.shape != credit.mask.shape:
            raise ValueError(
                f"The token weights of {loss!r} have shape {tuple(values.shape)}; return one for each token, "
                f"{tuple(credit.mask.shape)}."
            )
        values = values.detach().to(credit.teacher_logps.dtype)
        values = values.masked_fill(~credit.mask, 1.0)
        is_valid = torch.isfinite(values) & (values >= 0)
        if bad := values[~is_valid].tolist():
            raise ValueError(f"The token weights of {loss!r} must be finite and at least 0; some are {bad[:3]}.")
        weights[loss] = values
    return weights


def weighted_tensors(
    weights: Mapping[str, Float[Tensor, "B T"]], advantages: Float[Tensor, " B"], distillation_weight: float
) -> dict[str, Float[Tensor, "B T"]]:
    """Tensors of the generation batch that weights add or replace: `token_weight`, and GRPO's `advantages`.

    Raises:
        ValueError: `distillation_weight` computes none of the losses that have weights.
    """
    computes = {"distillation": distillation_weight > 0.0, "grpo": distillation_weight < 1.0}
    if weights and not any(computes[loss] for loss in weights):
        raise ValueError(
            f"The token weight returns weights of {[*weights]}, and `distillation_weight={distillation_weight:g}` "
            "does not compute these losses. Set another `distillation_weight`, or weigh the loss that it computes."
        )
    tensors = {}
    if "distillation" in weights:
        tensors["token_weight"] = weights["distillation"]
    if "grpo" in weights:
        tensors["advantages"] = advantages[:, None] * weights["grpo"].to(advantages.dtype)
    return tensors
