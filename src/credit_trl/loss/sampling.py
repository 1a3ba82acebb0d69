"""The distribution that an engine samples from, where options of sampling change the policy's.

vLLM reports the log-probability of a sampled token among the tokens that its options keep, the policy's is over the
whole vocabulary. Their ratio would be the probability of the kept tokens, .95 for `top_p=.95`. Here the options are
replayed on the policy's logits, in vLLM's order: bias, temperature, `min_p`, `top_k`, `top_p`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from credit_trl.config import CreditConfig
from credit_trl.loss.head import LMHead, accumulation_dtype, chunks
from credit_trl.loss.projection import project, token_logps

# Arguments of vLLM's `SamplingParams` that leave the probabilities of tokens as they are.
_NEUTRAL = frozenset(
    "seed stop stop_token_ids ignore_eos max_tokens detokenize skip_special_tokens spaces_between_special_tokens "
    "include_stop_str_in_output".split()
)
# Arguments whose default changes nothing, with that default.
_DEFAULTS = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
# Logits of a pass are sorted, which takes this many times their memory.
_SORTED_COPIES = 4


@dataclass(frozen=True)
class SamplingDistribution:
    """Options that change the distribution of sampled tokens; the defaults are those of the policy."""

    top_p: float = 1.0  # tokens are kept until their probability is top_p
    top_k: int = 0  # number of kept tokens; 0 or less for all
    min_p: float = 0.0  # lowest probability of a kept token, as a share of the largest
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit before the temperature)
    temperature: float = 1.0

    @classmethod
    def from_config(cls, config: CreditConfig, logit_bias: Mapping[int, float] | None = None) -> Self:
        """The distribution of a configuration; `generation_kwargs` override its options, `logit_bias` theirs."""
        options = engine_options(config)
        bias = options["logit_bias"] if logit_bias is None else logit_bias
        moved = tuple((int(token), float(value)) for token, value in (bias or {}).items() if value)
        min_p = options["min_p"] or 0.0
        return cls(options["top_p"], options["top_k"], min_p, moved, config.temperature)

    @property
    def is_policy(self) -> bool:
        """Whether tokens have the policy's probabilities."""
        return self.top_p >= 1.0 and self.top_k <= 0 and self.min_p <= 0.0 and not self.logit_bias

    def token_logps(self, logits: Float[Tensor, "n V"], tokens: Int[Tensor, "n 1"]) -> Float[Tensor, " n"]:
        """Log-probabilities of sampled tokens from logits that are divided by the temperature, and overwritten.

        Where rounding has moved a sampled token below the last kept one, the tokens down to it count as kept.
        """
        for token, value in self.logit_bias:
            logits[:, token] += value / self.temperature
        token_logits = logits.gather(-1, tokens)
        ordered = logits.sort(dim=-1, descending=True).values
        is_kept = torch.ones_like(ordered, dtype=torch.bool)
        if self.min_p > 0.0:
            is_kept &= ordered.sub(ordered[:, :1]).exp_() >= self.min_p
        if 0 < self.top_k < ordered.shape[-1]:
            is_kept &= ordered >= ordered[:, self.top_k - 1 : self.top_k]
        if self.top_p < 1.0:
            probabilities = ordered.masked_fill(~is_kept, -torch.inf).softmax(dim=-1)
            mass_above = probabilities.cumsum(dim=-1).sub_(probabilities)
            is_kept &= mass_above < self.top_p
        is_kept |= ordered >= token_logits
        normalizer = ordered.masked_fill_(~is_kept, -torch.inf).logsumexp(dim=-1)
        return token_logits.squeeze(-1) - normalizer


def engine_options(config: CreditConfig) -> dict[str, Any]:
    """Options of an engine's sampling by the names of `SamplingParams`; `generation_kwargs` override the others."""
    names = ("top_p", "top_k", "min_p", "repetition_penalty", "vllm_structured_outputs_regex")
    options = {name: getattr(config, name) for name in names} | {"logit_bias": None}
    return options | (config.generation_kwargs or {})


def unknown_option(config: CreditConfig) -> str | None:
    """Name of an option with which log-probabilities of the engine cannot be compared; None where there is none."""
    replayed = {"top_p", "top_k", "min_p", "logit_bias"}
    for name, value in engine_options(config).items():
        is_temperature = (name, value) == ("temperature", config.temperature)
        is_default = value is None or _DEFAULTS.get(name) == value or is_temperature
        if name not in replayed | _NEUTRAL and not is_default:
            return name
    return None


class PolicyLogps(NamedTuple):
    """Log-probabilities of sampled tokens under the policy; 0 on padding, where there is any."""

    full: Float[Tensor, "..."]  # over the whole vocabulary
    sampled: Float[Tensor, "..."]  # under the distribution that the engine samples from


def sampling_logps(
    head: LMHead, hidden: Float[Tensor, "N H"], tokens: Int[Tensor, "N 1"], sampling: SamplingDistribution
) -> PolicyLogps:
    """Log-probabilities (N,) of sampled tokens, without gradient.

    `head` is not sharded.
    """
    if sampling.is_policy:
        logps = token_logps(head, hidden, tokens)
        return PolicyLogps(logps, logps)
    size = max(head.chunk_size(hidden) // _SORTED_COPIES, 1)
    count = min(size, len(hidden))
    buffer = hidden.new_empty((count, head.vocabulary_size), dtype=accumulation_dtype(hidden.dtype))
    policy = []
    sampled = []
    for rows in chunks(len(hidden), size):
        logits = buffer[: rows.stop - rows.start]
        projection = project(head, hidden[rows], out=logits, tokens=tokens[rows], wants_entropy=False)
        policy.append(projection.token_logps)
        sampled.append(sampling.token_logps(logits, tokens[rows]))
    return PolicyLogps(torch.cat(policy), torch.cat(sampled))
