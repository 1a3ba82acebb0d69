"""Seeded generation with transformers: prompt token ids in, completion token ids out.

Each token is drawn by inverting the cumulative distribution at one uniform number, and a row's uniform numbers come
from its own seed. A completion therefore does not depend on the other rows of its batch, except for rounding in
batched matrix products, and torch's random state does not change.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from credit_trl.contexts.images import PromptImages, joined_images
from credit_trl.evaluation.config import SamplingConfig
from credit_trl.rollout.batch import Prompt
from credit_trl.rollout.thinking import ThinkingMarks, mark_thinking
from credit_trl.tasks.task import response_text
from credit_trl.trl_compat import parse_response

_LAST_TOKENS = 16  # of a prompt, which contain a tag at its end


@dataclass(frozen=True)
class Response:
    """A decoded completion."""

    text: str  # without special tokens; where there is a `message`, its content
    length: int  # number of tokens, end of turn included
    truncated: bool  # whether it reached the length limit before an end of turn
    # In place of the text: where the tokenizer parses responses to conversations, or the text is unclosed thinking
    message: dict[str, Any] | None = None
    ids: Sequence[int] = ()
    marks: ThinkingMarks | None = None  # see `thinking_marks`


class SeededChoice(LogitsProcessor):
    """Samples one token per row by inverse transform sampling and masks all others.

    It is the last processor of the list; greedy decoding then selects the sampled token.

    Args:
        uniforms: (B, T) in [0, 1), the uniform number of each row and step.
        prompt_width: width of the padded prompts, from which steps are counted.
    """

    def __init__(self, uniforms: Float[Tensor, "B T"], prompt_width: int) -> None:
        self.uniforms = uniforms
        self.prompt_width = prompt_width

    def __call__(self, input_ids: Int[Tensor, "B S"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        step = input_ids.shape[1] - self.prompt_width
        cumulative = scores.to(self.uniforms.dtype).softmax(dim=-1).cumsum(dim=-1)
        height = self.uniforms[:, step : step + 1] * cumulative[:, -1:]
        choices = torch.searchsorted(cumulative, height, right=True).clamp(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, choices, 0.0)


@torch.no_grad()
def generate_ids(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    eos_token_ids: Sequence[int],
    *,
    seeds: Sequence[int] | None = None,
    batch_size: int | None = None,
    images: Sequence[PromptImages | None] = (),
) -> list[list[int]]:
    """Sample one completion per prompt. The model's own generation defaults are ignored.

    Args:
        model: a causal language model in evaluation mode.
        eos_token_ids: ids that end a completion, which includes the first of them; may be empty.
        seeds: seed of each row's random stream; by default derived from `sampling.seed` and the row's index.
        batch_size: rows generated together; by default all.
        images: of each prompt; empty where none has any.
    """
    streams = [[sampling.seed, row] for row in range(len(prompts))] if seeds is None else seeds
    padding = eos_token_ids[0] if eos_token_ids else 0  # masked, so that any id will do
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=sampling.max_completion_length,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=padding,
    )
    size = batch_size or max(1, len(prompts))
    completions = []
    holders = [model, model.get_base_model()] if hasattr(model, "get_base_model") else [model]
    with ExitStack() as restored:
        for holder in holders:  # from whose defaults `generate` fills the unset fields
            restored.callback(setattr, holder, "generation_config", holder.generation_config)
            holder.generation_config = config
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            ids = [torch.tensor(prompt, dtype=torch.long) for prompt in batch]
            padded = pad_sequence(ids, batch_first=True, padding_value=padding, padding_side="left")
            mask = pad_sequence(list(map(torch.ones_like, ids)), batch_first=True, padding_side="left")
            width = padded.shape[1]
            image_inputs = list(filter(None, images[start : start + size]))
            inputs = joined_images(image_inputs, padded) if image_inputs else {}
            sequences = model.generate(
                input_ids=padded.to(model.device),
                attention_mask=mask.to(model.device),
                **{name: values.to(model.device) for name, values in inputs.items()},
                generation_config=config,
                logits_processor=_processors(sampling, streams[start : start + size], width, model.device),
            )
            for row in sequences[:, width:].tolist():
                length = next((n for n, token in enumerate(row, 1) if token in eos_token_ids), len(row))
                completions.append(row[:length])
    return completions


def _processors(sampling: SamplingConfig, seeds: Sequence[Any], width: int, device: Any) -> LogitsProcessorList:
    if sampling.temperature == 0.0:
        return LogitsProcessorList()
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(float(sampling.top_p)))
    generators = map(np.random.default_rng, seeds)
    draws = np.stack([generator.random(sampling.max_completion_length) for generator in generators])
    precise = torch.float32 if torch.device(device).type == "mps" else torch.float64
    processors.append(SeededChoice(torch.from_numpy(draws).to(device, precise), width))
    return processors


def read_responses(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[Sequence[int]],
    ids: Sequence[Sequence[int]],
    eos_token_ids: Sequence[int],
    marks: ThinkingMarks,
) -> list[Response]:
    """Decode completion ids; a completion without an end of turn counts as truncated.

    If the tokenizer has a `response_template` or `response_schema`, responses to conversations are parsed as TRL does
    before it calls reward functions, which removes the reasoning from the content. Other text that ends inside
    thinking, which its prompt opened, is marked so.
    """
    texts = tokenizer.batch_decode([list(row) for row in ids], skip_special_tokens=True)
    parses = any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))
    responses = []
    for prompt, prefix, row, text in zip(prompts, prompt_ids, ids, texts, strict=True):
        message = None
        if not isinstance(prompt, str) and parses:
            message = parse_response(tokenizer, list(row), prefix=list(prefix))
            text = response_text([message])
        elif not isinstance(prompt, str):
            plain = [{"role": "assistant", "content": text}]
            end = tokenizer.decode(list(prefix[-_LAST_TOKENS:]))
            [graded] = mark_thinking([plain], [list(row)], tokenizer, lambda _, end=end: end, marks)
            message = None if graded is plain else graded[0]
        responses.append(Response(text, len(row), not row or row[-1] not in eos_token_ids, message, row, marks))
    return responses


def end_of_turn_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a completion: those of the model's generation configuration and the tokenizer's."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos = eos if isinstance(eos, list | tuple) else [eos]
    ids = {tokenizer.eos_token_id, *eos} - {None}
    if not ids:
        raise ValueError("Completions would not end: neither model nor tokenizer has an `eos_token_id`. Set one.")
    return sorted(ids)
