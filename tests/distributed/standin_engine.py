"""Stand-in for `vllm.LLM` that stores the weights it gets."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from trl.generation import vllm_generation


class StandIn:
    """The part of a colocated engine that TRL uses for weight sync."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(options["seed"])  # vLLM's worker does
        runner = SimpleNamespace(model=self)
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=executor)
        self.weights: dict[str, torch.Tensor] = {}
        self.times = 0

    def load_weights(self, named_weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.weights.update((name, weight.detach().clone()) for name, weight in named_weights)

    def reset_prefix_cache(self) -> None:
        """Count the weight syncs; this is the last call of each."""
        self.times += 1


def install() -> None:
    """Patch TRL; call it before the trainer is built."""
    vllm_generation.is_vllm_available = lambda: True
    vllm_generation.LLM = StandIn
