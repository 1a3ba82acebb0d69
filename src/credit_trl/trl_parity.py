"""Two steps of the embedded model, compared with TRL's trainer and a dense loss: `python -m credit_trl.trl_parity`.

`trl_compat.check_behaviour` runs it on an untested minor of TRL. The last line of its output is the difference.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from datasets import Dataset
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer

from credit_trl.config import CreditConfig
from credit_trl.trainer import CreditTrainer

_OPTIONS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("trl_hooks.yaml").read_text("utf-8"))["parity"]


def rewards(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Rewards that a random model earns in half of its rollouts."""
    return [float(sum(ids) % 2) for ids in completion_ids]


class ComparedTrainer(CreditTrainer):
    """A trainer of one micro-batch a step that compares the loss of each step with dense passes.

    Raises:
        AssertionError: they differ.
    """

    def _distillation_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        loss = super()._distillation_loss(model, inputs)
        expected = self._dense_loss()
        if not torch.allclose(loss.detach(), expected, rtol=1e-4, atol=1e-6):
            raise AssertionError(f"the distillation loss is {loss.item():.6g}, that of dense passes {expected:.6g}")
        return loss

    @torch.no_grad()
    def _dense_loss(self) -> Tensor:
        """Mean over samples of the mean over tokens of Σ_v π_θ (log π_θ − f + λ Ĝ): Algorithm 1 with C = 1."""
        batch = self._generation_batch
        losses = []
        for i, contexts in enumerate(self.credit_step.build_contexts(batch)):
            answer = batch.completion_ids[i]
            prompt = self._tokenizer.apply_chat_template(batch.prompts[i], add_generation_prompt=True)
            logps = dense_logps(self.model, prompt["input_ids"], answer)
            f, generic = (dense_logps(self.teacher.model, ids, answer) for ids, _ in contexts.sequences())
            target = f - self.args.contrastive_coef * generic
            losses.append((logps.exp() * (logps - target)).sum(dim=-1).mean())
        return torch.stack(losses).mean()


def dense_logps(model: nn.Module, prompt: list[int], answer: list[int]) -> Tensor:
    """(T, V) log-probabilities of the whole vocabulary at the tokens of an answer."""
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(dim=-1)


def compare_trainers(directory: str) -> None:
    """Train with both trainers and with the distillation loss.

    Raises:
        AssertionError: weights or losses differ.
    """
    prompts = [[{"role": "user", "content": f"Help me with number {i}."}] for i in range(16)]
    rows = Dataset.from_dict({"prompt": prompts, "privileged_context": ["It is travel."] * 16})
    options = _OPTIONS | {"output_dir": directory}
    ours = CreditTrainer("quickstart", rewards, CreditConfig(distillation_weight=0.0, **options), rows)
    ours.train()
    trls = GRPOTrainer(ours.model.config._name_or_path, rewards, GRPOConfig(**options), rows)  # seeds torch again
    trls.train()
    for (name, weight), expected in zip(ours.model.named_parameters(), trls.model.parameters(), strict=True):
        if not torch.equal(weight, expected):
            raise AssertionError(f"`{name}` differs from GRPOTrainer's after two steps of GRPO")
    options |= {"distillation_topk": None, "distillation_weight": 0.5}
    ComparedTrainer("quickstart", rewards, CreditConfig(**options), rows).train()


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        compare_trainers(folder)
