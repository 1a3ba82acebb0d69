"""What goes from the policy to a vLLM engine: TRL's generation layer, and what a self-teacher asks of it besides.

- Adapters are merged out of place, one layer at a time. TRL merges them into the base weights and subtracts them
  again, which leaves a rounding error there at every synchronisation: under LoRA the teacher scores with those very
  weights, and in bf16 the errors add up.
- Of a model with several adapters only the trained one is sent: the teacher's `modules_to_save` never are.
- An engine in this process seeds torch with its own rank, whatever `seed` says; the run's seed is restored.
- A server that stops answering ends the run with an error that names it (`vllm_server.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import set_seed
from trl import GRPOConfig
from trl.generation.vllm_generation import VLLMGeneration
from trl.import_utils import is_vllm_available

_WRAPPED = ".base_layer"
_BASE = f"{_WRAPPED}."
_SAVED = ".modules_to_save."


def await_engine(args: GRPOConfig) -> None:
    """Wait for the vLLM server of this configuration, where it has one. TRL waits without a limit for a sick one.

    Raises:
        VLLMServerError: it did not answer within `vllm_server_timeout`.
    """
    if args.use_vllm and args.vllm_mode == "server" and args.process_index == 0 and is_vllm_available():
        from credit_trl.rollout.vllm_client import await_server  # needs `requests`, which comes with the extra `vllm`

        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        await_server(url.rstrip("/"), args.vllm_server_timeout)


class PolicyGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration` for a policy that teaches itself."""

    @classmethod
    def adopt(cls, generation: VLLMGeneration, seed: int) -> PolicyGeneration:
        """Take over what TRL's trainer has built.

        Args:
            generation: a colocated engine, or the connection to a server.
            seed: the run's. Processes that share an engine draw from the same stream, all others from their own.
        """
        adopted = cls.__new__(cls)
        vars(adopted).update(vars(generation))
        if adopted.mode == "colocate":
            set_seed(seed + adopted.accelerator.process_index // adopted.tensor_parallel_size)
        elif adopted.accelerator.is_main_process:
            from credit_trl.rollout.vllm_client import WatchedClient

            adopted.vllm_client = WatchedClient.adopt(adopted.vllm_client, patience=adopted.server_timeout)
        return adopted

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """Names in the base model, and the weights as the engine is to have them. Every process must iterate."""
        if not is_peft_model(self.model):
            yield from super()._iter_named_params()
        elif self._dist.is_zero3 or self._dist.fsdp_version == 1:  # gathered whole, and what was merged is discarded
            yield from (named for named in super()._iter_named_params() if _SAVED not in named[0])
        else:
            for name, weight in merged_weights(self.model):
                yield self._fix_param_name_to_vllm(name), weight


@contextmanager
def seeded(generation: VLLMGeneration, seeds: Sequence[int]) -> Iterator[None]:
    """Inside, a colocated engine draws each answer from a random stream of its own.

    Args:
        generation: with the engine.
        seeds: one for each prompt of the processes that share the engine, in the order of their ranks.
    """
    engine = generation.llm
    generation.llm = _SeededEngine(engine, seeds)
    try:
        yield
    finally:
        generation.llm = engine


class _SeededEngine:
    """A `vllm.LLM` whose requests carry seeds.

    Args:
        engine: the engine.
        seeds: one a request.
    """

    def __init__(self, engine: Any, seeds: Sequence[int]) -> None:
        self.engine = engine
        self.seeds = seeds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, prompts: Sequence[Any], sampling_params: Any, **options: Any) -> Any:
        parameters = []
        for _, seed in zip(prompts, self.seeds, strict=True):
            parameters.append(sampling_params.clone())
            parameters[-1].seed = seed
        return self.engine.generate(prompts, sampling_params=parameters, **options)


@torch.no_grad()
def merged_weights(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """(name in the base model, weight) with the active adapter merged in; the model is the same before and after.

    Each weight is valid until the next one is asked for. Sharded weights are gathered, which every process must join.
    """
    adapter = model.active_adapter
    for name, parameter in list(model.named_parameters()):
        base_name = name.removeprefix("base_model.model.")
        if _BASE in name and model.prefix not in name.rpartition(_BASE)[2]:
            with ExitStack() as merged:
                for layer in _wrappers(model, name):
                    merged.enter_context(_merged(layer, adapter))
                yield base_name.replace(_WRAPPED, ""), _whole(model.get_parameter(name))
        elif f"{_SAVED}{adapter}." in name:
            yield base_name.replace(f"{_SAVED}{adapter}.", "."), _whole(parameter)
        elif model.prefix not in base_name and ".original_module." not in name and _SAVED not in name:
            yield base_name, _whole(parameter)


def _wrappers(model: PeftModel, name: str) -> list[BaseTunerLayer]:
    """The tuner layers around a base parameter, innermost first: several where a module's parameters are adapted."""
    path = name.rpartition(_BASE)[0]
    found = [path]
    while path.endswith(_WRAPPED):
        path = path.removesuffix(_WRAPPED)
        found.append(path)
    return [model.get_submodule(one) for one in found]


@contextmanager
def _merged(layer: BaseTunerLayer, adapter: str) -> Iterator[None]:
    base = layer.get_base_layer()
    kept = [(name, parameter, parameter.data) for name, parameter in base.named_parameters(recurse=False)]
    for _, parameter, data in kept:
        parameter.data = data.clone()
    # Not PEFT's `safe_merge`, which rounds the adapter's product before the sum and the sum again.
    layer.merge(adapter_names=[adapter])
    try:
        yield
    finally:
        if layer.merged:
            layer.unmerge()
        for name, parameter, data in kept:  # quantised layers have put a new parameter in its place
            parameter.data = data
            base.register_parameter(name, parameter)


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.data
