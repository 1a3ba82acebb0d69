"""Forward passes of the teacher over a generation batch.

Each prompt of each sample is read once, followed by the completion; only the hidden states that predict scored tokens
are kept. Samples are processed in *groups*, whose hidden states are held at once. Within a group the sequences of all
prompts are sorted and cut into *passes*, calls of the backbone with at most `batch_tokens` tokens, padded or packed.
Padded passes are sorted by length and end early where padding would cost more than another pass. Packed ones are
sorted by prompt, so that a beginning that several prompts share is read once (`packing.SharedRow`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from credit_trl.contexts.tokens import CompletionBatch, TokenContexts
from credit_trl.teacher.causal_lm import backbone, head_input
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.packing import SharedRow, packed_inputs, padded_inputs, shares_beginnings
from credit_trl.teacher.sharding import run_in_wrapped_forward

# Maximum size of a group, in passes. A larger group sorts better, a smaller one holds fewer hidden states.
PASSES_PER_GROUP = 4
# Padding at which a padded pass ends, as a share of `batch_tokens`: another pass costs less time than more of it.
PADDING_SHARE = 1 / 16


@dataclass(frozen=True)
class PassConfig:
    """Size and layout of the teacher's forward passes."""

    batch_tokens: int = 16384  # maximum number of tokens in one pass, padding included
    packed: bool = False  # concatenate sequences without padding, see `packing.enable_packing`


@dataclass
class TokenStates:
    """Hidden states that predict n scored tokens, under the teacher's prompt and under C contrast prompts."""

    rows: Int[Tensor, " n"]  # sample of each token
    columns: Int[Tensor, " n"]  # position of each token in its completion
    teacher: Float[Tensor, "n H"]
    contrasts: Float[Tensor, "C n H"]


@dataclass(frozen=True)
class _Sequence:
    """One prompt and the completion."""

    sample: int
    context: int  # 0 for the teacher's prompt, k for the k-th contrast prompt
    prompt: list[int]  # ids
    completion: int  # length
    columns: list[int] | None = None  # see `ContextColumns`; None where the whole prompt precedes the completion

    def __len__(self) -> int:
        return len(self.prompt) + self.completion

    def positions(self, columns: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Positions in the sequence of the given columns of the completion."""
        if self.columns is None:
            return columns + len(self.prompt)
        return columns + torch.searchsorted(torch.tensor(self.columns), columns.contiguous(), right=True)

    def ids(self, completion_ids: Int[Tensor, "B T"]) -> Int[Tensor, " L"]:
        """Ids of the whole sequence."""
        prompt, completion = torch.tensor(self.prompt), completion_ids[self.sample, : self.completion]
        if self.columns is None:
            return torch.cat([prompt, completion])
        whole = completion.new_empty(len(self))
        own = self.positions(torch.arange(self.completion))
        is_prompt = torch.ones_like(whole, dtype=torch.bool)
        is_prompt[own] = False
        whole[own], whole[is_prompt] = completion, prompt
        return whole


@dataclass(frozen=True)
class _Work:
    """What every pass of a scoring phase needs."""

    teacher: Teacher
    model: nn.Module  # that `teacher.active()` yields
    completion_ids: Int[Tensor, "B T"]  # in main memory, so that a pass copies its ids to the device at once
    loss_mask: Bool[Tensor, "B T"]  # in main memory
    device: torch.device  # of the passes
    packed: bool
    shares: bool  # packed rows are a `SharedRow`

    def shared(self, ids: list[Tensor]) -> SharedRow | None:
        """The layout of a packed row whose sequences share beginnings, if the teacher reads it."""
        return SharedRow.of([sequence.tolist() for sequence in ids]) if self.shares else None

    def forward(self, ids: list[Tensor], shared: SharedRow | None = None) -> Tensor:
        """Hidden states of the sequences, (ΣL, H) packed or (b · longest, H) padded, or of `shared`, (R, H).

        Computed in the wrapper's forward, so that a sharded teacher gathers its weights.
        """
        if shared is not None:
            tokens = shared.ids
        else:
            tokens = torch.cat(ids) if self.packed else nn.utils.rnn.pad_sequence(ids, batch_first=True)
        tokens = tokens.to(self.device, non_blocking=True)
        lengths = [len(sequence) for sequence in ids] if shared is None else shared.lengths
        unwrapped = self.teacher.unwrapped(self.model)
        inputs = packed_inputs(unwrapped, tokens, lengths, shared) if self.packed else padded_inputs(unwrapped, tokens)

        def run(input_ids: Tensor) -> Tensor:
            with self.teacher.autocast():
                outputs = backbone(unwrapped)(**(inputs | {"input_ids": input_ids}), use_cache=False)
                return head_input(unwrapped, outputs.last_hidden_state)

        return run_in_wrapped_forward(self.model, unwrapped, run, inputs["input_ids"]).flatten(0, 1)


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
    process makes as many passes as the busiest one, so that collectives match. `model` is what `teacher.active()`
    yields.
    """
    lengths, is_scored = batch.lengths(), batch.loss_mask.any(dim=1).tolist()
    sequences = {
        i: [_Sequence(i, k, ids, lengths[i], columns) for k, (ids, columns) in enumerate(own.sequences())]
        for i, own in enumerate(contexts)
        if own.teacher is not None and is_scored[i]
    }
    groups = [
        (group, list(passes([s for i in group for s in sequences[i]], config))) for group in _groups(sequences, config)
    ]
    shares = config.packed and shares_beginnings(teacher.unwrapped(model))
    work = _Work(teacher, model, batch.ids.cpu(), batch.loss_mask.cpu(), batch.ids.device, config.packed, shares)
    count = sum(len(of_group) for _, of_group in groups)
    idle = teacher.most_batches(count) - count  # a collective: every process calls it before its passes
    for group, of_group in groups:
        yield _states_of(group, of_group, work)
    for _ in range(idle):
        work.forward([work.completion_ids[0, :1]])


def _groups(sequences: dict[int, list[_Sequence]], config: PassConfig) -> Iterator[list[int]]:
    """Samples with equally many prompts, in groups of at most `PASSES_PER_GROUP` passes."""
    sizes = {i: sum(map(len, own)) for i, own in sequences.items()}
    tokens = PASSES_PER_GROUP * config.batch_tokens
    group: list[int] = []
    in_order = {i: own[0].prompt if config.packed else [sizes[i]] for i, own in sequences.items()}
    for sample in sorted(sequences, key=lambda i: (len(sequences[i]), in_order[i])):
        same_count = not group or len(sequences[group[0]]) == len(sequences[sample])
        if group and (not same_count or sum(sizes[i] for i in [*group, sample]) > tokens):
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def passes(sequences: Sequence[_Sequence], config: PassConfig) -> Iterator[list[_Sequence]]:
    """Sequences in passes of at most `batch_tokens` tokens; a pass has at least one sequence."""
    batch: list[_Sequence] = []
    real = 0
    for sequence in sorted(sequences, key=lambda own: own.prompt if config.packed else [len(own)]):
        tokens = real + len(sequence) if config.packed else (len(batch) + 1) * len(sequence)
        padding = tokens - real - len(sequence)
        if batch and (tokens > config.batch_tokens or padding > PADDING_SHARE * config.batch_tokens):
            yield batch
            batch, real = [], 0
        batch.append(sequence)
        real += len(sequence)
    if batch:
        yield batch


def _states_of(group: list[int], of_group: list[list[_Sequence]], work: _Work) -> TokenStates:
    """Hidden states of one group. Tokens of one sample are contiguous."""
    samples = torch.tensor(group)
    rows, columns = work.loss_mask[samples].nonzero(as_tuple=True)
    ends = torch.bincount(rows, minlength=len(group)).cumsum(0).tolist()
    span = {sample: slice(start, end) for sample, start, end in zip(group, [0, *ends], ends, strict=False)}
    count = 1 + max(sequence.context for of_pass in of_group for sequence in of_pass)
    kept: Tensor | None = None
    for of_pass in of_group:
        ids = [sequence.ids(work.completion_ids) for sequence in of_pass]
        shared = work.shared(ids)
        hidden = work.forward(ids, shared)
        if kept is None:
            kept = hidden.new_empty(count * len(rows), hidden.shape[-1])
        width = max(map(len, of_pass))
        firsts = itertools.accumulate((len(s) if work.packed else width for s in of_pass), initial=0)
        read, written = [], []
        for sequence, first in zip(of_pass, firsts, strict=False):
            tokens = span[sequence.sample]
            read.append(first + sequence.positions(columns[tokens]) - 1)
            written.append(sequence.context * len(rows) + torch.arange(tokens.start, tokens.stop))
        places = torch.cat(read) if shared is None else shared.places[torch.cat(read)]
        at = torch.stack([torch.cat(written), places]).to(work.device, non_blocking=True)
        kept[at[0]] = hidden[at[1]]
    states = kept.view(count, len(rows), -1)
    at = torch.stack([samples[rows], columns]).to(work.device, non_blocking=True)
    return TokenStates(at[0], at[1], states[0], states[1:])
