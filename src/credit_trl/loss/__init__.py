"""Stage 4: scores and loss from hidden states, without a (tokens × vocabulary) tensor.

Both entry points take the N unmasked tokens of a batch:

- `score_tokens`: hidden states of the teacher to support ids, f, Ĝ and their values at the sampled token, without
  gradient.
- `credit_loss`: hidden states of the student and scores to the weighted loss and the values to log. The gradients of
  hidden states, head weight and head bias are computed in the same pass, so that nothing else is kept for `backward`.

One chunk of (tokens × vocabulary) exists at a time. With the tail `"renormalize"` normalisers cancel: contrasts and
student project only the K tokens of the support. f, Ĝ and log p at the sampled token are then conditional on the
support and the token. Where no normaliser is computed, the entropy is that of the support and its probability is NaN.

Importance ratios always use true log-probabilities; the student's normaliser is then computed without gradient.

bf16 and fp16 inputs are accumulated in fp32, fp64 inputs are computed in fp64. A chunk takes a fixed number of bytes.
"""

from credit_trl.loss.head import LMHead
from credit_trl.loss.token_weight import TokenCredit

__all__ = ["LMHead", "TokenCredit"]
