"""Sampling with vLLM: TRL's weight sync and client, with changes for self-distillation.

- Adapters are merged out of place, one layer at a time. TRL merges them into the base weights and subtracts them
  again, which leaves a rounding error at each sync. With LoRA, the teacher shares the base weights, and in bf16 the
  errors accumulate.
- Only the trained adapter of a model is sent, never the teacher's `modules_to_save`.
- A colocated engine expands the placeholders of images; TRL sends them expanded.
- A colocated engine seeds torch with its own rank; the seed of the run is restored.
- TRL waits for its server without a limit: requests have no timeout, because a batch of long completions may take any
  time, and a weight broadcast to a dead server never returns. Here each call runs in a thread, and meanwhile `/health`
  is polled, which the server answers during its work. If the answer fails to come, the run ends with an error.
"""

import copy
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from functools import partial
from typing import Any, Self

import torch
from accelerate.utils import is_peft_model
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import set_seed

from credit_trl.rollout.verdict import call_in_thread
from credit_trl.trl_compat import VLLMClient, VLLMGeneration, check_returned, is_requests_available

if is_requests_available():  # it comes with the extra `vllm`
    import requests

POLL_SECONDS = 1.0
CONNECT_SECONDS = 5.0

# Parts of PEFT's names of parameters that the base model does not have: of adapters, of `modules_to_save` and of
# `trainable_token_indices`.
_NOT_IN_BASE = (".original_module.", ".modules_to_save.", ".trainable_tokens_")

_RESTART = (
    "See the server's log (often it ran out of memory), restart it with the same model and flags, and resume: "
    "`trainer.train(resume_from_checkpoint=True)`, or `trl credit --resume_from_checkpoint latest`."
)


class PolicyGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration` for a policy whose weights the teacher may share."""

    @classmethod
    def adopt(cls, generation: VLLMGeneration, seed: int) -> Self:
        """Convert the generation layer that TRL's trainer has built. `seed` is that of the run.

        Processes that share a colocated engine share a random stream.
        """
        adopted = cls.__new__(cls)
        vars(adopted).update(vars(generation))
        # Ids of prompts with images -> those with one placeholder for each image. Set before each generation.
        adopted.unexpanded = {}
        if adopted.mode == "colocate":
            set_seed(seed + adopted.accelerator.process_index // adopted.tensor_parallel_size)
        elif adopted.accelerator.is_main_process:
            adopted.vllm_client = WatchedClient.adopt(adopted.vllm_client, patience=adopted.server_timeout)
        return adopted

    def generate(self, prompts: list[list[int]], images: list[Any] | None, **kwargs: Any) -> Any:
        """TRL's `generate`. A colocated engine reads `unexpanded` prompts, because it expands each placeholder.

        TRL sends expanded prompts, whose placeholders would be expanded again (TRL issue 6294). The engine keeps the
        features of images when it receives weights: they are dropped here.

        Raises:
            ValueError: the engine expands a prompt to other ids than the policy reads.
        """
        if images is not None and self.mode == "server" and self.accelerator.is_main_process:
            self.vllm_client.reset_encoder_cache()
        if images is None or self.mode == "server":
            return check_returned("VLLMGeneration.generate", super().generate(prompts, images, **kwargs))
        self.llm.llm_engine.reset_encoder_cache()
        sent_prompts = list(map(self._unexpanded, prompts))
        generated = super().generate(sent_prompts, images, **kwargs)
        prompt_ids, *outputs = check_returned("VLLMGeneration.generate", generated)
        for ids, sent_ids, engine_ids in zip(prompts, sent_prompts, prompt_ids, strict=True):
            if sent_ids is not ids and list(engine_ids) != list(ids):
                raise ValueError(
                    f"vLLM expands a prompt with images to {len(engine_ids)} tokens, the processor to {len(ids)}, or "
                    "to other ones. Give both the same image processor, such as by `preprocessor_config.json`."
                )
        return prompts, *outputs

    def _unexpanded(self, ids: list[int]) -> list[int]:
        """The ids of a prompt, perhaps with turns after it, as the engine reads them."""
        for expanded, unexpanded in self.unexpanded.items():
            if tuple(ids[: len(expanded)]) == expanded:
                return unexpanded + ids[len(expanded) :]
        return ids

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the base model, weight for the engine). Every process must iterate."""
        if not is_peft_model(self.model):
            yield from super()._iter_named_params()
        elif self._dist.is_zero3 or self._dist.fsdp_version == 1:  # gathered, merged copies
            for name, weight in super()._iter_named_params():
                if ".modules_to_save." not in name:
                    yield name, weight
        else:
            for name, weight in merged_weights(self.model):
                yield self._fix_param_name_to_vllm(name), weight


@torch.no_grad()
def merged_weights(model: PeftModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the base model, weight) with the active adapter merged in, and leave the model unchanged.

    Each weight is valid until the next iteration. Sharded weights are gathered, so every process must iterate.
    """
    adapter = model.active_adapter
    wrappers = rf"^base_model\.model\.|\.base_layer(?=\.)|\.token_adapter(?=\.)|\.modules_to_save\.{adapter}(?=\.)"
    for name, weight in list(model.named_parameters()):
        base_name = re.sub(wrappers, "", name)
        if any(part in base_name for part in (model.prefix, *_NOT_IN_BASE)):
            continue
        path, base_layer, own_name = name.partition(".base_layer.")
        if base_layer:
            wrapper = copy.deepcopy(model.get_submodule(path))
            # A module with several adapted parameters has nested layers around one base. PEFT's `safe_merge` would
            # round the adapter's product before the sum.
            for layer in wrapper.modules():
                if isinstance(layer, BaseTunerLayer):
                    layer.merge(adapter_names=[adapter])
            weight = wrapper.get_parameter(f"base_layer.{own_name}")
        yield base_name, weight.full_tensor() if isinstance(weight, DTensor) else weight.data


class VLLMServerError(ConnectionError):
    """The vLLM server is gone, does not answer, or refused a request, as `problem` says."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"The vLLM server at {url} {problem}. {_RESTART}")


class WatchedClient(VLLMClient):
    """TRL's client with calls that raise a `VLLMServerError` when the server fails, instead of waiting forever."""

    @classmethod
    def adopt(cls, client: VLLMClient, patience: float) -> Self:
        """Convert a connected client; `/health` or a weight update may stay unanswered for `patience` seconds."""
        watched = cls.__new__(cls)
        vars(watched).update(vars(client))
        watched.patience = patience
        watched.failure = None  # of the last request that failed
        return watched

    def generate(self, prompts: list[Any], **kwargs: Any) -> dict[str, Any]:
        return self._watch("generating", partial(super().generate, prompts, **kwargs))

    def update_named_params(self, metadata: list[Any], named_params: Iterator[tuple[str, Tensor]]) -> None:
        self._watch("receiving weights", partial(super().update_named_params, metadata, named_params))

    def reset_prefix_cache(self) -> None:
        self._post(f"{self.base_url}/reset_prefix_cache")

    def reset_encoder_cache(self) -> None:
        """Drop the features of images, which earlier weights gave."""
        self._post(f"{self.base_url}/reset_encoder_cache")

    def _post(self, url: str, **kwargs: Any) -> dict[str, Any]:
        """Send a request. One that changes the server's state has a timeout and is not retried."""
        endpoint = url.removeprefix(self.base_url)
        try:
            if "/v1/" in endpoint:  # completions, which take any time
                return super()._post(url, **kwargs)
            response = requests.post(url, timeout=(CONNECT_SECONDS, self.patience), **kwargs)
            if response.status_code != 200:
                raise requests.HTTPError(f"{response.status_code}: {response.text[:500]}")
        except Exception as error:  # of `requests`, or TRL's for another status
            self.failure = VLLMServerError(self.base_url, f"failed at {endpoint} ({error})")
            raise self.failure from error
        return response.json() if response.content else {}

    def _watch(self, activity: str, work: Callable[[], Any]) -> Any:
        outcome = call_in_thread("vllm-server-call", torch.no_grad()(work))  # torch stores the grad mode per thread
        last_answer = time.monotonic()
        while not wait([outcome], timeout=POLL_SECONDS).done:
            if self.failure is not None:  # the broadcast of weights still waits for its receiver
                raise self.failure
            try:
                health = requests.get(f"{self.base_url}/health", timeout=min(CONNECT_SECONDS, self.patience))
                health.raise_for_status()
                last_answer = time.monotonic()
            except requests.RequestException as silence:
                if time.monotonic() - last_answer >= self.patience:
                    problem = f"has not answered for {self.patience:g} s ({silence}) while {activity}"
                    raise VLLMServerError(self.base_url, problem) from silence
        return outcome.result()
