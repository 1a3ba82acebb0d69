"""Who answers: sampling from a transformers model or a vLLM engine, each answer from a random stream of its own.

The transformers engine draws every token by inverting the cumulative distribution at one uniform number, and a
sample's uniform numbers come from its seed alone. So a sample does not depend on which others share its batch (but for
the rounding of batched matrix products), an interrupted evaluation continues with the samples that it would have had,
and an evaluation in the middle of training leaves torch's random state as it was. vLLM takes the same seed with each
request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from credit_trl.evaluation.fingerprints import file_fingerprint, weight_fingerprint
from credit_trl.tasks.quickstart_model import model_path

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; the defaults are the paper's evaluation settings.

    Args:
        temperature: 0 takes the likeliest token.
        top_p: mass of the nucleus, in (0, 1].
        top_k: tokens that may be drawn; 0 for all.
        max_completion_length: tokens of an answer, its end of turn included.

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 0
    max_completion_length: int = 4096

    def __post_init__(self) -> None:
        if self.temperature < 0.0:
            raise ValueError(f"`temperature` must be at least 0, got {self.temperature}.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"`top_p` must be in (0, 1], got {self.top_p}.")
        if self.top_k < 0:
            raise ValueError(f"`top_k` must be at least 0 (0: no limit), got {self.top_k}.")
        if self.max_completion_length < 1:
            raise ValueError(f"`max_completion_length` must be at least 1, got {self.max_completion_length}.")


@dataclass(frozen=True)
class Request:
    """One answer that is wanted: a prompt, and the seed of the sample's random stream, in [0, 2**63)."""

    prompt: Prompt
    seed: int


@dataclass(frozen=True)
class Response:
    """One answer: its text without special tokens, its length in tokens with the end of turn, and whether it was cut
    at the length limit."""

    text: str
    length: int
    truncated: bool


class Engine(Protocol):
    """What `evaluate` needs of a model. In a distributed run every process has one and calls it in step.

    Attributes:
        name: how results call the model.
        batch_size: requests that `evaluate` passes at once, and so loses at most where it is interrupted.
        is_main: whether this process grades and writes.
    """

    name: str
    batch_size: int
    is_main: bool

    def identity(self) -> str:
        """Tells two models apart: an evaluation is only continued by the model that began it."""

    def session(self, sampling: Sampling) -> AbstractContextManager[None]:
        """Surrounds all calls of `generate`."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """The answers, in order."""

    def share(self, value: Any) -> Any:
        """The main process's value, on every process."""


class TransformersEngine:
    """Samples with `model.generate` in this process.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer, with a chat template where prompts are conversations.
        batch_size: answers that are generated side by side.
        chat_template_kwargs: such as `{"enable_thinking": False}`.
        name: how results call the model; by default where it was loaded from.
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
    def from_pretrained(cls, name: str, **options: Any) -> TransformersEngine:
        """Load a model and its tokenizer by hub name or directory, onto the accelerator where there is one.

        Raises:
            ValueError: an option that this engine does not have.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if unknown := sorted(options.keys() - {"batch_size", "chat_template_kwargs"}):
            raise ValueError(f"The transformers engine takes `chat_template_kwargs`, not {', '.join(unknown)}.")
        path = model_path(name)
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(device)
        return cls(model, AutoTokenizer.from_pretrained(path), name=name, **options)

    def identity(self) -> str:
        return weight_fingerprint(self.model)

    @contextmanager
    def session(self, sampling: Sampling) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        prompts = [encode_prompt(self.tokenizer, r.prompt, **self.chat_template_kwargs) for r in requests]
        ids = generate_ids(
            self.model,
            prompts,
            [r.seed for r in requests],
            sampling,
            self.eos_token_ids,
            pad_token_id=pad_token_id(self.tokenizer),
        )
        return read_responses(self.tokenizer, ids, self.eos_token_ids)

    def share(self, value: Any) -> Any:
        return value


class VLLMEngine:
    """Samples with an offline `vllm.LLM`.

    Args:
        llm: the engine.
        name: how results call the model.
        batch_size: requests that are handed over at once; vLLM schedules them itself, so many is good.
        chat_template_kwargs: such as `{"enable_thinking": False}`.
    """

    is_main = True

    def __init__(
        self,
        llm: Any,
        *,
        name: str,
        batch_size: int = 512,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.llm = llm
        self.name = name
        self.batch_size = batch_size
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.tokenizer = llm.get_tokenizer()

    @classmethod
    def from_pretrained(cls, name: str, *, batch_size: int = 512, **options: Any) -> VLLMEngine:
        """Start an engine; `options` are `vllm.LLM`'s, but for `chat_template_kwargs`.

        Raises:
            ImportError: vLLM is not installed.
        """
        try:
            from vllm import LLM
        except ImportError as error:
            raise ImportError(
                "This evaluation asks for vLLM, which is not installed: pip install 'credit-trl[vllm]', or use the "
                "transformers engine."
            ) from error
        template = options.pop("chat_template_kwargs", None)
        return cls(
            LLM(model=model_path(name), **options), name=name, batch_size=batch_size, chat_template_kwargs=template
        )

    def identity(self) -> str:
        """The name and, of a directory, the fingerprint of its files: a run may have written other weights there."""
        folder = Path(model_path(self.name))
        return f"vllm:{self.name}" + (f":{file_fingerprint(folder)}" if folder.is_dir() else "")

    def session(self, sampling: Sampling) -> AbstractContextManager[None]:
        return nullcontext()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        from vllm import SamplingParams

        prompts = [
            {"prompt_token_ids": encode_prompt(self.tokenizer, r.prompt, **self.chat_template_kwargs)}
            for r in requests
        ]
        parameters = [SamplingParams(seed=r.seed, **vllm_options(sampling)) for r in requests]
        outputs = self.llm.generate(prompts, sampling_params=parameters, use_tqdm=False)
        completions = [output.outputs[0] for output in outputs]
        texts = self.tokenizer.batch_decode([list(c.token_ids) for c in completions], skip_special_tokens=True)
        return [
            Response(text, len(c.token_ids), c.finish_reason == "length")
            for text, c in zip(texts, completions, strict=True)
        ]

    def share(self, value: Any) -> Any:
        return value


def vllm_options(sampling: Sampling) -> dict[str, Any]:
    """`Sampling` in the names of `vllm.SamplingParams`."""
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_completion_length,
    }


class SeededChoice(LogitsProcessor):
    """Draws one token a row by inverting the cumulative distribution, and leaves only that one possible.

    It stands last in the list, and greedy decoding then takes what it drew.

    Args:
        uniforms: (B, T) in [0, 1), row b's numbers for its T steps.
        prompt_width: width of the padded prompts, from which the step is counted.
    """

    def __init__(self, uniforms: Float[Tensor, "B T"], prompt_width: int) -> None:
        self.uniforms = uniforms
        self.prompt_width = prompt_width

    def __call__(self, input_ids: Int[Tensor, "B S"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        step = input_ids.shape[1] - self.prompt_width
        precise = torch.float32 if scores.device.type == "mps" else torch.float64
        cumulative = scores.to(precise).softmax(dim=-1).cumsum(dim=-1)
        height = self.uniforms[:, step : step + 1].to(cumulative) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, height, right=True).clamp(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)


@torch.no_grad()
def generate_ids(
    model: Any,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    sampling: Sampling,
    eos_token_ids: Sequence[int],
    *,
    pad_token_id: int,
) -> list[list[int]]:
    """Sampled ids up to the first end of turn, which is kept; a model's own sampling defaults have no say.

    Args:
        model: a causal language model in evaluation mode.
        prompts: token ids, of any lengths.
        seeds: of each row's random stream.
        sampling: temperature, nucleus and length.
        eos_token_ids: ids that end an answer.
        pad_token_id: fills rows; masked.
    """
    width = max(map(len, prompts))
    padded = torch.tensor([[pad_token_id] * (width - len(ids)) + list(ids) for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=sampling.max_completion_length,
        eos_token_id=list(eos_token_ids),
        pad_token_id=pad_token_id,
    )
    device = model.device
    with _generation_config(model, config):
        sequences = model.generate(
            input_ids=padded.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
            logits_processor=_processors(sampling, seeds, width, device),
        )
    ends = set(eos_token_ids)
    return [_until_end(row, ends) for row in sequences[:, width:].tolist()]


def _processors(sampling: Sampling, seeds: Sequence[int], width: int, device: Any) -> LogitsProcessorList:
    if sampling.temperature == 0.0:
        return LogitsProcessorList()
    draws = np.stack([np.random.default_rng(seed).random(sampling.max_completion_length) for seed in seeds])
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(float(sampling.top_p)))
    dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64
    processors.append(SeededChoice(torch.from_numpy(draws).to(device, dtype), width))
    return processors


@contextmanager
def _generation_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Replace a model's defaults for a while: `generate` fills what a given configuration leaves open from them."""
    holders = [model, model.get_base_model()] if hasattr(model, "get_base_model") else [model]
    kept = [holder.generation_config for holder in holders]
    for holder in holders:
        holder.generation_config = config
    try:
        yield
    finally:
        for holder, old in zip(holders, kept, strict=True):
            holder.generation_config = old


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    for position, token in enumerate(row):
        if token in ends:
            return row[: position + 1]
    return row


def read_responses(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[Sequence[int]], eos_token_ids: Sequence[int]
) -> list[Response]:
    """Texts, lengths and truncation of sampled ids."""
    texts = tokenizer.batch_decode([list(row) for row in ids], skip_special_tokens=True)
    ends = set(eos_token_ids)
    return [Response(text, len(row), not row or row[-1] not in ends) for text, row in zip(texts, ids, strict=True)]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, **chat_template_kwargs: Any) -> list[int]:
    """Token ids of a prompt: a conversation through the chat template up to the generation prompt, a text as it is."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **chat_template_kwargs)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def end_of_turn_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end an answer: the model's own, and the tokenizer's."""
    found = {tokenizer.eos_token_id}
    config = getattr(model, "generation_config", None)
    eos = getattr(config, "eos_token_id", None)
    found.update(eos if isinstance(eos, list | tuple) else [eos])
    found.discard(None)
    if not found:
        raise ValueError("Neither the model nor the tokenizer has an `eos_token_id`: answers would never end.")
    return sorted(found)


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
