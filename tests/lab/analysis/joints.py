"""Small joints that can be enumerated, and models with exactly their conditionals.

A joint P(y, z | x) is a table over inputs x, feedbacks z and responses of T tokens. Every probability of it is a sum
over the table, computed here without any of the code under test.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.tokenmap import score_response
from credit_trl.lab.analysis.vocabulary_logps import CreditFormula, RolloutContexts


@dataclass
class Joint:
    """P(z, y_1, …, y_T | x), an array of shape (X, Z, V, …, V) that sums to one over all but the first dimension."""

    table: Tensor

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """X, Z, V, T."""
        shape = self.table.shape
        return shape[0], shape[1], shape[2], len(shape) - 2

    def log_likelihood(self, x: int, prefix: tuple[int, ...] = (), z: int | None = None) -> Tensor:
        """log P(z, y_<t | x), or log P(y_<t | x)."""
        part = self.table[x] if z is None else self.table[x, z]
        part = part[(slice(None), *prefix)] if z is None else part[prefix]
        return part.sum().log()

    def next_logps(self, x: int, prefix: tuple[int, ...], z: int | None = None) -> Tensor:
        """(V,), log P(· | x, y_<t) or log P(· | x, y_<t, z)."""
        vocabulary = self.sizes[2]
        joint = torch.stack([self.log_likelihood(x, (*prefix, v), z) for v in range(vocabulary)])
        return joint - self.log_likelihood(x, prefix, z)

    def posterior(self, x: int, prefix: tuple[int, ...], z: int) -> Tensor:
        """log P(z | x, y_<t)."""
        return self.log_likelihood(x, prefix, z) - self.log_likelihood(x, prefix)

    def pmi(self, x: int, y: tuple[int, ...], z: int) -> Tensor:
        return self.posterior(x, y, z) - self.posterior(x, (), z)


def random_joint(seed: int, inputs: int = 3, feedbacks: int = 3, vocabulary: int = 3, length: int = 2) -> Joint:
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(inputs, feedbacks, *[vocabulary] * length, generator=generator, dtype=torch.float64)
    table = table.square() + 1e-3
    return Joint(table / table.flatten(1).sum(-1).view(-1, *[1] * (length + 1)))


class JointLM(nn.Module):
    """Causal LM that reads `[x]` or `[x, z]` and then a response, and predicts with the conditionals of the joint.

    Token ids: responses 0 … V−1, then the inputs, then the feedbacks. Its hidden states are the log-probabilities and
    its head the identity.

    Args:
        joint: the joint distribution.
        teacher_noise: noise in nats on the predictions with feedback, which makes the model incompatible.
    """

    def __init__(self, joint: Joint, teacher_noise: float = 0.0) -> None:
        super().__init__()
        self.joint = joint
        inputs, feedbacks, self.vocabulary, _ = joint.sizes
        self.size = self.vocabulary + inputs + feedbacks
        self.head = nn.Linear(self.size, self.size, bias=False, dtype=torch.float64)
        self.head.weight.data = torch.eye(self.size, dtype=torch.float64)
        self.noise = teacher_noise * torch.randn(
            self.vocabulary, generator=torch.Generator().manual_seed(7), dtype=torch.float64
        )
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
        self.generation_config = None
        self.device = self.head.weight.device

    @property
    def base_model(self):
        return self.read

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, *args, **kwargs):
        return self.read(*args, **kwargs)

    def context(self, x: int, z: int | None = None) -> list[int]:
        inputs = self.joint.sizes[0]
        return [self.vocabulary + x] + ([] if z is None else [self.vocabulary + inputs + z])

    def read(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False
    ) -> SimpleNamespace:
        attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden = torch.full((*input_ids.shape, self.size), -1e9, dtype=torch.float64)
        inputs, _, vocabulary, length = self.joint.sizes
        for row, (ids, mask) in enumerate(zip(input_ids.tolist(), attention_mask.tolist(), strict=True)):
            ids = ids[: sum(mask)]
            has_z = len(ids) > 1 and ids[1] >= vocabulary + inputs
            z = ids[1] - vocabulary - inputs if has_z else None
            for t in range(min(len(ids) - has_z, length)):  # tokens of the response that the position has read
                logps = self.joint.next_logps(ids[0] - vocabulary, tuple(ids[1 + has_z : 1 + has_z + t]), z)
                noise = 0.0 if z is None else self.noise
                hidden[row, t + has_z, :vocabulary] = torch.log_softmax(logps + noise, dim=-1)
        return SimpleNamespace(last_hidden_state=hidden)


def mapped_rewards(joint: Joint, x: int, z: int, y: tuple[int, ...], noise: float = 0.0) -> Tensor:
    """(T, V), r_t(v) of the token map: with λ = 0, R_t of every token as an alternative."""
    model = JointLM(joint, noise)
    contexts = RolloutContexts(model.context(x), model.context(x, z), [])
    checkpoint = Checkpoint.from_model(model, None)
    scores = score_response(checkpoint, contexts, list(y), CreditFormula(0.0), alternatives=joint.sizes[2])
    rewards = torch.full((len(y), model.size), torch.nan, dtype=torch.float64)
    rewards.scatter_(-1, scores.alternatives.ids, scores.alternatives.advantage)
    return rewards[:, : joint.sizes[2]]
