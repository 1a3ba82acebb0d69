"""Sampling engines for evaluation: a transformers model in this process, or an offline vLLM engine.

Every request has a seed of its own, so a sample does not depend on its batch and an interrupted evaluation continues
with the same samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from credit_trl.evaluation.config import SamplingConfig
from credit_trl.evaluation.generation import (
    Response,
    encode_prompt,
    end_of_turn_ids,
    generate_ids,
    pad_id,
    read_responses,
)
from credit_trl.rollout.batch import Prompt
from credit_trl.tasks.model_names import model_path, naming_model
from credit_trl.teacher.models import eval_mode


@dataclass(frozen=True)
class Request:
    """A completion to sample."""

    prompt: Prompt
    seed: int  # of the sample's random stream, in [0, 2**63)


class Engine(Protocol):
    """Interface between `evaluate` and a model. In a distributed run all processes call it together.

    Attributes:
        name: name of the model in results.
        batch_size: requests per call of `generate`; an interruption loses at most one batch.
        is_main: whether this process grades samples and writes files.
    """

    name: str
    batch_size: int
    is_main: bool

    def identity(self) -> str:
        """A fingerprint of the weights; an evaluation continues only with the same fingerprint."""

    def session(self, sampling: SamplingConfig) -> AbstractContextManager[None]:
        """Context manager around all calls of `generate`."""

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Response]:
        """One response per request, in order."""

    def share(self, value: Any) -> Any:
        """Broadcast the main process's value."""


class TransformersEngine:
    """Samples with `model.generate`.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer, with a chat template if prompts are conversations.
        batch_size: completions generated together.
        chat_template_kwargs: such as `{"enable_thinking": False}`.
        name: name of the model in results; by default the path or hub name it was loaded from.
    """

    is_main = True

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 32,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.name = name or getattr(model, "name_or_path", "") or type(model).__name__
        self.eos_token_ids = end_of_turn_ids(model, tokenizer)

    @classmethod
    def from_pretrained(
        cls, name: str, *, batch_size: int = 32, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> TransformersEngine:
        """Load a model and its tokenizer by hub name or directory, onto the accelerator if there is one."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = model_path(name)
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        with naming_model(name):
            model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(device)
        tokenizer = AutoTokenizer.from_pretrained(path)
        return cls(model, tokenizer, name=name, batch_size=batch_size, chat_template_kwargs=chat_template_kwargs)

    def identity(self) -> str:
        return weight_fingerprint(self.model)

    def session(self, sampling: SamplingConfig) -> AbstractContextManager[None]:
        return eval_mode(self.model)

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Response]:
        prompts = [request.prompt for request in requests]
        prompt_ids = [encode_prompt(self.tokenizer, prompt, **self.chat_template_kwargs) for prompt in prompts]
        ids = generate_ids(
            self.model,
            prompt_ids,
            sampling,
            eos_token_ids=self.eos_token_ids,
            pad_token_id=pad_id(self.tokenizer),
            seeds=[request.seed for request in requests],
        )
        return read_responses(self.tokenizer, prompts, prompt_ids, ids, self.eos_token_ids)

    def share(self, value: Any) -> Any:
        return value


class VLLMEngine:
    """Samples with an offline `vllm.LLM`.

    Args:
        llm: the vLLM engine.
        name: name of the model in results.
        batch_size: requests per call; vLLM schedules them itself, so a large value is good.
        chat_template_kwargs: such as `{"enable_thinking": False}`.
    """

    is_main = True

    def __init__(
        self, llm: Any, *, name: str, batch_size: int = 512, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.llm = llm
        self.tokenizer = llm.get_tokenizer()
        self.name = name
        self.batch_size = batch_size
        self.chat_template_kwargs = dict(chat_template_kwargs or {})

    @classmethod
    def from_pretrained(cls, name: str, **options: Any) -> VLLMEngine:
        """Start a vLLM engine. `options` are `batch_size`, `chat_template_kwargs` and the arguments of `vllm.LLM`."""
        try:
            from vllm import LLM
        except ImportError as error:
            raise ImportError("`engine='vllm'` needs vLLM: pip install vllm, or use transformers.") from error
        own = {key: options.pop(key) for key in ("batch_size", "chat_template_kwargs") if key in options}
        return cls(LLM(model=model_path(name), **options), name=name, **own)

    def identity(self) -> str:
        folder = Path(model_path(self.name))
        return f"vllm:{self.name}" + (f":{file_fingerprint(folder)}" if folder.is_dir() else "")

    def session(self, sampling: SamplingConfig) -> AbstractContextManager[None]:
        return nullcontext()

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[Response]:
        from vllm import SamplingParams

        filters = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        options = {"n": 1, "max_tokens": sampling.max_completion_length, **filters}
        parameters = [SamplingParams(seed=request.seed, **options) for request in requests]
        prompts = [request.prompt for request in requests]
        prompt_ids = [encode_prompt(self.tokenizer, prompt, **self.chat_template_kwargs) for prompt in prompts]
        inputs = [{"prompt_token_ids": ids} for ids in prompt_ids]
        outputs = self.llm.generate(inputs, sampling_params=parameters, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        responses = read_responses(self.tokenizer, prompts, prompt_ids, [c.token_ids for c in completions], ())
        ended = [completion.finish_reason != "length" for completion in completions]
        return [replace(one, truncated=not end) for one, end in zip(responses, ended, strict=True)]

    def share(self, value: Any) -> Any:
        return value


def file_fingerprint(folder: Path) -> str:
    """16 hex digits that change with the weight files: a hash of names, sizes and 256 evenly spaced 4 KiB blocks."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin") and p.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for position in sorted({size * block // 256 for block in range(256)}):
                file.seek(position)
                digest.update(file.read(4096))
    return digest.hexdigest()[:16]


@torch.no_grad()
def weight_fingerprint(model: torch.nn.Module) -> str:
    """16 hex digits that change with the weights of this process: a hash of each parameter's sum and norm."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        weights = getattr(parameter, "ds_tensor", parameter)  # the local shard under ZeRO-3
        weights = weights.to_local() if hasattr(weights, "to_local") else weights
        precise = torch.float32 if weights.device.type == "mps" else torch.float64
        flat = weights.detach().flatten()
        flat = flat if flat.is_floating_point() else flat.float()  # 4-bit weights are packed in bytes
        sums = (flat.sum(dtype=precise).item(), torch.linalg.vector_norm(flat, dtype=precise).item())
        digest.update(f"{name} {tuple(weights.shape)} {sums[0].hex()} {sums[1].hex()}\n".encode())
    return digest.hexdigest()[:16]
