"""Forward passes of the teacher over a generation batch.

Each prompt of each sample is read once, followed by the completion; only the hidden states that predict scored tokens
are kept. Samples are processed in *groups*, whose hidden states are held at once. Within a group the sequences of all
prompts are sorted by length and cut into *passes*, calls of the backbone with at most `batch_tokens` tokens, padded or
packed one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from credit_trl.contexts.tokens import CompletionBatch, TokenContexts
from credit_trl.teacher.causal_lm import backbone, head_input, unwrap_adapters
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.sharding import run_in_wrapped_forward

# Maximum size of a group, in passes. A larger group sorts better, a smaller one holds fewer hidden states.
PASSES_PER_GROUP = 4
# Layer types that keep packed sequences apart; a recurrent layer would carry its state across them.
_PACKABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class PassConfig:
    """Size and layout of the teacher's forward passes.

    Args:
        batch_tokens: maximum number of tokens in one pass, padding included.
        packed: concatenate sequences without padding, see `check_packing`.
    """

    batch_tokens: int = 16384
    packed: bool = False


@dataclass
class TokenStates:
    """Hidden states that predict n scored tokens, under the teacher's prompt and under C contrast prompts.

    Args:
        rows: (n,), sample of each token.
        columns: (n,), position of each token in its completion.
        teacher: (n, H).
        contrasts: (C, n, H).
    """

    rows: Int[Tensor, " n"]
    columns: Int[Tensor, " n"]
    teacher: Float[Tensor, "n H"]
    contrasts: Float[Tensor, "C n H"]


@dataclass(frozen=True)
class _Sequence:
    """One prompt and the completion.

    Args:
        sample: index of the sample.
        context: 0 for the teacher's prompt, k for the k-th contrast prompt.
        prompt: ids of the prompt.
        completion: length of the completion.
        columns: the column of the completion before which each id of the prompt stands, in ascending order; None where
            the whole prompt precedes the completion.
    """

    sample: int
    context: int
    prompt: list[int]
    completion: int
    columns: list[int] | None = None

    def __len__(self) -> int:
        return len(self.prompt) + self.completion

    def positions(self, columns: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Positions in the sequence of the given columns of the completion."""
        if self.columns is None:
            return columns + len(self.prompt)
        preceding = torch.tensor(self.columns, device=columns.device)
        return columns + torch.searchsorted(preceding, columns.contiguous(), right=True)

    def ids(self, completion_ids: Int[Tensor, "B T"]) -> Int[Tensor, " L"]:
        """Ids of the whole sequence."""
        prompt = torch.tensor(self.prompt, device=completion_ids.device)
        completion = completion_ids[self.sample, : self.completion]
        if self.columns is None:
            return torch.cat([prompt, completion])
        whole = completion.new_empty(len(self))
        own = self.positions(torch.arange(self.completion, device=whole.device))
        is_prompt = torch.ones_like(whole, dtype=torch.bool)
        is_prompt[own] = False
        whole[own], whole[is_prompt] = completion, prompt
        return whole


@torch.no_grad()
def token_states(
    teacher: Teacher,
    model: nn.Module,
    contexts: Sequence[TokenContexts],
    batch: CompletionBatch,
    config: PassConfig,
) -> Iterator[TokenStates]:
    """Run the teacher over every prompt of every sample and yield the hidden states of one group after the other.

    Samples without a teacher and samples without scored tokens are skipped. Where the teacher is sharded, every
    process makes as many passes as the busiest one, so that collectives match.

    Args:
        teacher: π_ref.
        model: the module that `teacher.active()` yields.
        contexts: prompts of the B samples.
        batch: their completions.
        config: size and layout of the passes.
    """
    lengths, is_scored = batch.lengths(), batch.loss_mask.any(dim=1).tolist()
    sequences = {
        i: [_Sequence(i, k, ids, lengths[i], columns) for k, (ids, columns) in enumerate(own.sequences())]
        for i, own in enumerate(contexts)
        if own.teacher is not None and is_scored[i]
    }
    groups = [
        (group, list(passes([s for i in group for s in sequences[i]], config)))
        for group in _groups(sequences, PASSES_PER_GROUP * config.batch_tokens)
    ]
    count = sum(len(of_group) for _, of_group in groups)
    idle = teacher.most_batches(count) - count  # a collective: every process calls it before its passes
    for group, of_group in groups:
        yield _states_of(group, of_group, teacher, model, batch, config.packed)
    for _ in range(idle):
        _forward(teacher, model, {"input_ids": batch.ids[:1, :1]})


def _groups(sequences: dict[int, list[_Sequence]], tokens: int) -> Iterator[list[int]]:
    """Samples with equally many prompts, sorted by length, in groups of at most `tokens` tokens."""
    sizes = {i: sum(map(len, own)) for i, own in sequences.items()}
    group: list[int] = []
    for sample in sorted(sequences, key=lambda i: (len(sequences[i]), sizes[i])):
        same_count = not group or len(sequences[group[0]]) == len(sequences[sample])
        if group and (not same_count or sum(sizes[i] for i in [*group, sample]) > tokens):
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def passes(sequences: Sequence[_Sequence], config: PassConfig) -> Iterator[list[_Sequence]]:
    """Sequences sorted by length, in passes of at most `batch_tokens` tokens; a pass has at least one sequence."""
    batch: list[_Sequence] = []
    for sequence in sorted(sequences, key=len):
        tokens = sum(map(len, batch)) + len(sequence) if config.packed else (len(batch) + 1) * len(sequence)
        if batch and tokens > config.batch_tokens:
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch


def _states_of(
    group: list[int],
    of_group: list[list[_Sequence]],
    teacher: Teacher,
    model: nn.Module,
    batch: CompletionBatch,
    packed: bool,
) -> TokenStates:
    """Hidden states of one group. Tokens of one sample are contiguous."""
    samples = torch.tensor(group, device=batch.ids.device)
    rows, columns = batch.loss_mask[samples].nonzero(as_tuple=True)
    ends = torch.bincount(rows, minlength=len(group)).cumsum(0).tolist()
    span = {sample: slice(start, end) for sample, start, end in zip(group, [0, *ends], ends, strict=False)}
    count = 1 + max(sequence.context for of_pass in of_group for sequence in of_pass)
    kept: Tensor | None = None
    for of_pass in of_group:
        inputs, firsts = _packed_inputs(of_pass, batch.ids) if packed else _padded_inputs(of_pass, batch.ids)
        hidden = _forward(teacher, model, inputs).flatten(0, 1)
        if kept is None:
            kept = hidden.new_empty(count, len(rows), hidden.shape[-1])
        for sequence, first in zip(of_pass, firsts, strict=True):
            tokens = span[sequence.sample]
            kept[sequence.context, tokens] = hidden[first + sequence.positions(columns[tokens]) - 1]
    return TokenStates(samples[rows], columns, kept[0], kept[1:])


def _padded_inputs(batch: list[_Sequence], completion_ids: Tensor) -> tuple[dict[str, Tensor], list[int]]:
    """Model inputs of a right-padded pass, and the start of each sequence in the flattened hidden states."""
    input_ids = nn.utils.rnn.pad_sequence([s.ids(completion_ids) for s in batch], batch_first=True)
    lengths = torch.tensor([len(s) for s in batch], device=input_ids.device)
    attention_mask = (torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]).long()
    firsts = [i * input_ids.shape[1] for i in range(len(batch))]
    return {"input_ids": input_ids, "attention_mask": attention_mask}, firsts


def _packed_inputs(batch: list[_Sequence], completion_ids: Tensor) -> tuple[dict[str, Tensor], list[int]]:
    """Model inputs of a packed pass, one row whose position ids restart at each sequence, and the starts."""
    input_ids = torch.cat([s.ids(completion_ids) for s in batch])
    positions = torch.cat([torch.arange(len(s), device=input_ids.device) for s in batch])
    ends = list(itertools.accumulate(map(len, batch)))
    return {"input_ids": input_ids[None], "position_ids": positions[None]}, [0, *ends[:-1]]


def check_packing(model: nn.Module) -> None:
    """Check that packed passes are correct for a model, and not slower than padded ones.

    Raises:
        ValueError: the attention implementation has no variable lengths, so that it would form a mask of the square of
            the pass, or the model has layers that carry a state across sequences.
    """
    config = unwrap_adapters(model).config.get_text_config()
    implementation = config._attn_implementation or ""
    if "flash" not in implementation and implementation != "flex_attention":
        raise ValueError(
            f"`scoring_packed=True` needs an attention implementation with variable lengths, such as "
            f"'flash_attention_2' or 'flex_attention'; the model has {implementation!r}. Load it with another "
            "`attn_implementation`, or set `scoring_packed=False`."
        )
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _PACKABLE_LAYERS)
    if others:
        raise ValueError(
            f"`scoring_packed=True` would carry the state of {', '.join(others)} layers from one sequence into the "
            "next. Set `scoring_packed=False`."
        )


def _forward(teacher: Teacher, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Hidden states (b, L, H) of the teacher, those of its parts side by side."""
    states = [_part_states(teacher, part, inputs) for part in teacher.parts(model)]
    return torch.cat(states, dim=-1) if len(states) > 1 else states[0]


def _part_states(teacher: Teacher, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Hidden states, computed in the wrapper's forward so that a sharded teacher gathers its weights."""
    unwrapped = teacher.unwrapped(model)

    def run(**inputs: Tensor) -> Tensor:
        with teacher.autocast():
            return head_input(unwrapped, backbone(unwrapped)(**inputs, use_cache=False).last_hidden_state)

    return run_in_wrapped_forward(model, unwrapped, run, **inputs)
