"""Weight sync from the policy to a vLLM engine: TRL's generation layer with four changes for self-distillation.

- Adapters are merged out of place, one layer at a time. TRL merges them into the base weights and subtracts them
  again, which leaves a rounding error at each sync. With LoRA, the teacher shares the base weights, and in bf16 the
  errors accumulate.
- Only the trained adapter of a model is sent, never the teacher's `modules_to_save`.
- A colocated engine seeds torch with its own rank; the seed of the run is restored.
- A server that stops answering raises an error that names it (`vllm_client.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
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

# Parts of PEFT's names of parameters that the base model does not have: of adapters, of `modules_to_save` and of
# `trainable_token_indices`.
_NOT_IN_BASE = (".original_module.", ".modules_to_save.", ".trainable_tokens_")


def await_engine(args: GRPOConfig) -> None:
    """Wait for the vLLM server of a configuration, if it uses one. TRL waits for an unhealthy server without a limit.

    Raises:
        VLLMServerError: the server did not answer within `vllm_server_timeout`.
    """
    if args.use_vllm and args.vllm_mode == "server" and args.process_index == 0 and is_vllm_available():
        from credit_trl.rollout.vllm_client import await_server  # needs `requests`, which comes with the extra `vllm`

        url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        await_server(url.rstrip("/"), args.vllm_server_timeout)


class PolicyGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration` for a policy whose weights the teacher may share."""

    @classmethod
    def adopt(cls, generation: VLLMGeneration, seed: int) -> PolicyGeneration:
        """Convert the generation layer that TRL's trainer has built. `seed` is that of the run.

        Processes that share a colocated engine share a random stream.
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
        """Yield (name in the base model, weight for the engine). Every process must iterate."""
        if not is_peft_model(self.model):
            yield from super()._iter_named_params()
        elif self._dist.is_zero3 or self._dist.fsdp_version == 1:  # gathered, merged copies
            yield from (named for named in super()._iter_named_params() if ".modules_to_save." not in named[0])
        else:
            for name, weight in merged_weights(self.model):
                yield self._fix_param_name_to_vllm(name), weight


@contextmanager
def seeded(generation: VLLMGeneration, seeds: Sequence[int]) -> Iterator[None]:
    """Make a colocated engine sample each completion with its own seed inside the block.

    `seeds` has one per prompt of the processes that share the engine, in the order of their ranks.
    """
    engine = generation.llm
    generate = engine.generate

    def seeded_generate(prompts: Sequence[Any], sampling_params: Any, **options: Any) -> Any:
        parameters = [sampling_params.clone() for _ in prompts]
        for one, seed in zip(parameters, seeds, strict=True):
            one.seed = seed
        return generate(prompts, sampling_params=parameters, **options)

    engine.generate = seeded_generate
    try:
        yield
    finally:
        engine.generate = generate


@torch.no_grad()
def merged_weights(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the base model, weight) with the active adapter merged in, and leave the model unchanged.

    Each weight is valid until the next iteration. Sharded weights are gathered, so every process must iterate.
    """
    adapter = model.active_adapter
    wrappers = rf"^base_model\.model\.|\.base_layer(?=\.)|\.token_adapter(?=\.)|\.modules_to_save\.{adapter}(?=\.)"
    for name, parameter in list(model.named_parameters()):
        base_name = re.sub(wrappers, "", name)
        if any(part in base_name for part in (model.prefix, *_NOT_IN_BASE)):
            continue
        path, base_layer, _ = name.partition(".base_layer.")
        with _merged(model.get_submodule(path), adapter) if base_layer else nullcontext():
            yield base_name, _whole(model.get_parameter(name) if base_layer else parameter)


@contextmanager
def _merged(wrapper: BaseTunerLayer, adapter: str) -> Iterator[None]:
    """Merge an adapter into copies of the base weights of a tuner layer, and of those inside it.

    A module with several adapted parameters has nested layers around one base.
    """
    layers = [module for module in wrapper.modules() if isinstance(module, BaseTunerLayer)]
    bases = [layer.get_base_layer() for layer in layers]
    originals = [(base, *named, named[1].data) for base in bases for named in base.named_parameters(recurse=False)]
    for _, _, parameter, data in originals:
        parameter.data = data.clone()
    for layer in layers:  # without PEFT's `safe_merge`, which rounds the adapter's product before the sum
        layer.merge(adapter_names=[adapter])
    try:
        yield
    finally:
        for layer in layers:
            if layer.merged:
                layer.unmerge()
        for base, name, parameter, data in originals:  # quantized layers have replaced the parameter
            parameter.data = data
            base.register_parameter(name, parameter)


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.data
