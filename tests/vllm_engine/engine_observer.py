"""Weights of a vLLM engine, and comparison of its log-probabilities with the policy's."""

from dataclasses import dataclass, field
from typing import Any

import torch

from credit_trl import CreditTrainer


@dataclass
class Recording:
    """Records of a run.

    Args:
        differences: max |log π_vLLM − log π| over the sampled tokens, per generation batch.
        batches: inputs of the loss, per generation batch.
    """

    differences: list[float] = field(default_factory=list)
    batches: list[dict[str, Any]] = field(default_factory=list)


@torch.no_grad()
def token_logps(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log π(y_t | x, y_<t) of one completion, from a plain forward pass."""
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


@torch.no_grad()
def record(trainer: CreditTrainer) -> Recording:
    """Compare the engine's log-probabilities with the policy's forward pass for each batch from now on."""
    recording = Recording()
    generate = trainer.vllm_generation.generate

    def comparing(*args: Any, **kwargs: Any) -> Any:
        prompts, completions, logps, _ = output = generate(*args, **kwargs)
        was_training = trainer.model.training
        trainer.model.eval()
        count = len(completions) // len(prompts) if len(prompts) != len(completions) else 1
        policy_logps = [
            token_logps(trainer.model, list(prompts[i // count]), list(ids), trainer.temperature)
            for i, ids in enumerate(completions)
        ]
        trainer.model.train(was_training)
        theirs = [torch.tensor([position[0] for position in sample]) for sample in logps]
        recording.differences.append(
            max((a - b).abs().max().item() for a, b in zip(policy_logps, theirs, strict=True))
        )
        return output

    trainer.vllm_generation.generate = comparing
    score = trainer._generate_and_score_completions

    def keeping(inputs: Any) -> dict[str, Any]:
        recording.batches.append(score(inputs))
        return recording.batches[-1]

    trainer._generate_and_score_completions = keeping
    return recording


def engine_weights(trainer: CreditTrainer) -> dict[str, torch.Tensor]:
    """Copy the weights of a colocated engine, fused and padded as it stores them."""
    runner = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner
    return {name: weight.detach().clone() for name, weight in runner.model.named_parameters()}


def as_in_engine(model: Any) -> dict[str, torch.Tensor]:
    """Fuse the weights of a Qwen3 as vLLM does, without padding of the vocabulary."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    fused: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if ".q_proj." in name:
            parts = [weights[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            fused[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".gate_proj." in name:
            fused[name.replace("gate_proj", "gate_up_proj")] = torch.cat(
                [weight, weights[name.replace("gate_proj", "up_proj")]]
            )
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            fused[name] = weight.clone()
    return fused


def same_weights(engine: dict[str, torch.Tensor], model: dict[str, torch.Tensor]) -> bool:
    assert engine.keys() == model.keys()
    return all(torch.equal(engine[name][: len(weight)], weight) for name, weight in model.items())
