"""From hidden states to scores and loss, without a (tokens × vocabulary) tensor.

Two entry points, both over valid tokens only (N of them, flattened over the batch):

- `score_tokens`: the lagged teacher's hidden states → support ids, f, Ĝ, the sampled token's values. No gradient.
- `credit_loss`: the student's hidden states and the scores → the weighted loss, what is logged, and, in the same pass,
  the gradient for hidden states, head weight and head bias. All that the gradient needs (weights, importance ratio) is
  known while a chunk's logits are at hand, so nothing is kept for the backward pass but the gradient itself.

One chunk of tokens × vocabulary lives at a time. With the tail `"renormalize"` normalisers cancel, and the contrast
and the student project only the K columns of the support. Values that would need a normaliser are then those *within
the support*, in a way that keeps differences meaningful:

- the sampled token's f, Ĝ and log p are conditional on the support and that token, all three;
- an entropy whose normaliser was not formed is that of the distribution on the support, and the mass beside it is NaN.

An importance ratio is always that of the true log-probabilities: where one is wanted, the student's normaliser is
formed, without gradient.

bf16 and fp16 inputs are accumulated in fp32, fp64 inputs are computed in fp64. Chunk sizes come from the device's free
memory (CUDA) or from a fixed budget of bytes (CPU), unless given.
"""

from credit_trl.loss.head import Kernels, LMHead
from credit_trl.loss.scores import Scores, Support, SupportConfig, Tail, TeacherStates, score_tokens
from credit_trl.loss.student import CreditLoss, LossConfig, LossTokens, credit_loss

__all__ = [
    "CreditLoss",
    "Kernels",
    "LMHead",
    "LossConfig",
    "LossTokens",
    "Scores",
    "Support",
    "SupportConfig",
    "Tail",
    "TeacherStates",
    "credit_loss",
    "score_tokens",
]
