"""Forward passes of the teacher over a generation batch and of the policy over a micro-batch, for hidden states only.

Teacher: each prompt of each sample is read once, followed by the completion; only hidden states that predict scored
tokens are kept. Samples are processed in *groups*, whose hidden states are held at once. Within a group the sequences
of all prompts are sorted and cut into *passes*, calls of the backbone with at most `batch_tokens` tokens, padded or
packed. Padded passes are sorted by length and end early where padding would cost more than another pass. Packed ones
are sorted by prompt, so that a prefix that several prompts share is read once (`packing.packed_row`) and counted once.

Policy: TRL pads prompts on the left and completions on the right, to the longest of the process. Here each sample is
one sequence from position 0, padded on the right to the longest of the micro-batch, or packed.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from credit_trl.contexts.images import PromptImages
from credit_trl.contexts.tokens import CompletionBatch, TokenContexts
from credit_trl.teacher.causal_lm import backbone, head_input
from credit_trl.teacher.image_inputs import image_inputs, zero_of_tower
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.packing import PrefixSharing, model_inputs, shares_prefixes, to_device
from credit_trl.teacher.sharding import run_in_wrapped_forward
from credit_trl.trl_compat import common_prefix_length

# Maximum size of a group, in passes. A larger group sorts better, a smaller one holds fewer hidden states.
PASSES_PER_GROUP = 4
# Padding at which a padded pass ends, as a share of `batch_tokens`: another pass costs less time than more of it.
PADDING_SHARE = 1 / 16


@dataclass(frozen=True)
class _Sequence:
    """One prompt and the completion."""

    sample: int
    context: int  # 0 for the teacher's prompt, k for the k-th contrast prompt
    prompt: list[int]  # ids
    completion: list[int]  # ids
    columns: list[int] | None = None  # see `TokenContexts.insert_at`; None without such columns
    images: PromptImages | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)

    @property
    def opening(self) -> list[int]:
        """The ids before the completion."""
        return self.prompt if self.columns is None else self.prompt[: self.columns.count(0)]

    def positions(self, columns: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Positions in the sequence of the given columns of the completion."""
        if self.columns is None:
            return columns + len(self.prompt)
        return columns + torch.searchsorted(torch.tensor(self.columns), columns.contiguous(), right=True)

    def ids(self) -> list[int]:
        """Ids of the whole sequence."""
        ids = self.prompt + self.completion
        if self.columns is None:
            return ids
        columns = [*self.columns, *range(len(self.completion))]  # a token of the prompt comes first in its column
        return [ids[i] for i in sorted(range(len(ids)), key=columns.__getitem__)]


@torch.no_grad()
def token_states(
    teacher: Teacher,
    model: nn.Module,
    contexts: Sequence[TokenContexts],
    batch: CompletionBatch,
    batch_tokens: int,
    packed: bool = False,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Run the teacher over every prompt of every sample.

    Samples without a teacher and samples without scored tokens are skipped. Where the teacher is sharded, every
    process makes as many passes as the busiest one, so that collectives match.

    Args:
        model: what `teacher.active()` yields.
        batch_tokens: maximum number of tokens in one pass, padding included.
        packed: concatenate sequences without padding, see `packing.enable_packing`.

    Yields:
        Of n scored tokens of one group: sample (n,) and column of the completion (n,) of each, and the hidden states
        that predict them, (n, H) under the teacher's prompt and (C, n, H) under C contrast prompts.
    """
    sequences = _sequences_of(contexts, batch)
    unwrapped = teacher.unwrapped(model)
    shares = packed and shares_prefixes(unwrapped)
    groups = [
        (group, list(passes([s for i in group for s in sequences[i]], batch_tokens, packed, shares)))
        for group in _groups(sequences, batch_tokens, packed)
    ]
    # In main memory, so that a pass copies its own to the device at once.
    loss_mask = batch.loss_mask.cpu()
    device = batch.ids.device
    encoded: dict[int, Any] = {}

    def forward(of_pass: list[_Sequence]) -> tuple[Tensor, Tensor]:
        """Hidden states (R, H) of a pass, and the row of each token of the sequences, one after the other."""
        ids = [sequence.ids() for sequence in of_pass]
        images = [sequence.images for sequence in of_pass]
        inputs, indices = model_inputs(unwrapped, ids, device, packed=packed)

        def run(input_ids: Tensor) -> Tensor:
            with teacher.autocast():
                image_kwargs = image_inputs(unwrapped, ids, images, device, encoded)
                outputs = backbone(unwrapped)(**(inputs | {"input_ids": input_ids} | image_kwargs), use_cache=False)
                return head_input(unwrapped, outputs.last_hidden_state)

        # In the wrapper's forward, so that a sharded teacher gathers its weights.
        return run_in_wrapped_forward(model, unwrapped, run, inputs["input_ids"]).flatten(0, 1), indices

    count = sum(len(of_group) for _, of_group in groups)
    idle = teacher.most_batches(count) - count  # a collective: every process calls it before its passes
    for group, of_group in groups:
        yield _states_of(group, of_group, forward, loss_mask, device)
    for _ in range(idle):
        forward([_Sequence(0, 0, [], [0])])


def _sequences_of(contexts: Sequence[TokenContexts], batch: CompletionBatch) -> dict[int, list[_Sequence]]:
    """The sequences of every sample that has a teacher and scored tokens."""
    lengths = (batch.mask.cumsum(-1) * batch.mask).argmax(-1) + 1  # up to the last unmasked token
    completions = [ids[:length] for ids, length in zip(batch.ids.tolist(), lengths.tolist(), strict=True)]
    is_scored = batch.loss_mask.any(dim=1).tolist()
    return {
        i: [
            _Sequence(
                i, k, ids, completions[i], columns, sample_contexts.images[k] if sample_contexts.images else None
            )
            for k, (ids, columns) in enumerate(sample_contexts.sequences())
        ]
        for i, sample_contexts in enumerate(contexts)
        if sample_contexts.teacher is not None and is_scored[i]
    }


def _states_of(
    group: list[int],
    of_group: list[list[_Sequence]],
    forward: Callable[[list[_Sequence]], tuple[Tensor, Tensor]],
    loss_mask: Bool[Tensor, "B T"],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One group's part of `token_states`. Tokens of one sample are contiguous."""
    samples = torch.tensor(group)
    rows, columns = loss_mask[samples].nonzero(as_tuple=True)
    sizes = torch.bincount(rows, minlength=len(group)).tolist()
    places = dict(zip(group, torch.arange(len(rows)).split(sizes), strict=True))  # of each sample's tokens
    count = 1 + max(sequence.context for of_pass in of_group for sequence in of_pass)
    flat_states: Tensor | None = None
    for of_pass in of_group:
        hidden, indices = forward(of_pass)
        if flat_states is None:
            flat_states = hidden.new_empty(count * len(rows), hidden.shape[-1])
        firsts = itertools.accumulate(map(len, of_pass), initial=0)
        read_positions: list[Tensor] = []
        written: list[Tensor] = []
        for sequence, start in zip(of_pass, firsts, strict=False):
            sample_rows = places[sequence.sample]
            read_positions.append(start + sequence.positions(columns[sample_rows]) - 1)
            written.append(sequence.context * len(rows) + sample_rows)
        at = to_device(torch.stack([torch.cat(written), indices[torch.cat(read_positions)]]), device)
        flat_states[at[0]] = hidden[at[1]]
    states = flat_states.view(count, len(rows), -1)
    at = to_device(torch.stack([samples[rows], columns]), device)
    return at[0], at[1], states[0], states[1:]


def _groups(sequences: dict[int, list[_Sequence]], batch_tokens: int, packed: bool) -> Iterator[list[int]]:
    """Samples with equally many prompts, in groups of at most `PASSES_PER_GROUP` passes."""
    sizes = {i: sum(map(len, sample_sequences)) for i, sample_sequences in sequences.items()}
    tokens = PASSES_PER_GROUP * batch_tokens
    group: list[int] = []
    in_order = {i: sample_sequences[0].prompt if packed else [sizes[i]] for i, sample_sequences in sequences.items()}
    for sample in sorted(sequences, key=lambda i: (len(sequences[i]), in_order[i])):
        same_count = not group or len(sequences[group[0]]) == len(sequences[sample])
        if group and (not same_count or sum(sizes[i] for i in [*group, sample]) > tokens):
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def passes(
    sequences: Sequence[_Sequence], batch_tokens: int, packed: bool, shares: bool = False
) -> Iterator[list[_Sequence]]:
    """Sequences in passes of at most `batch_tokens` tokens; a pass has at least one sequence.

    With `shares`, a prefix that prompts of a packed pass share counts once.
    """
    batch: list[_Sequence] = []
    real = 0
    sharing = PrefixSharing()
    for sequence in sorted(sequences, key=lambda candidate: candidate.prompt if packed else [len(candidate)]):
        tokens = real + len(sequence) if packed else (len(batch) + 1) * len(sequence)
        padding = tokens - real - len(sequence)
        if shares and batch:
            tokens -= sharing.add(common_prefix_length(batch[-1].opening, sequence.opening))
        if batch and (tokens > batch_tokens or padding > PADDING_SHARE * batch_tokens):
            yield batch
            batch = []
            real = 0
            sharing = PrefixSharing()
        batch.append(sequence)
        real += len(sequence)
    if batch:
        yield batch


@dataclass(frozen=True)
class Sequences:
    """Prompts and completions of a micro-batch, and the completion tokens that are chosen."""

    ids: list[list[int]]  # prompt and completion of each sample, without padding
    width: int  # T
    # Indices of the chosen completion tokens in the flattened (B, T), ascending, on the device of the micro-batch.
    chosen: Int[Tensor, " N"]
    # Indices of the tokens that predict them in the sequences one after the other, in main memory.
    predicting: Int[Tensor, " N"]
    # Of each sample; None where no prompt of the generation batch has images.
    images: Sequence[PromptImages | None] | None

    @property
    def rows(self) -> Int[Tensor, " N"]:
        """Sample of each chosen token."""
        return self.chosen // self.width

    def pick(self, values: Tensor | None) -> Tensor | None:
        """Entries of (B, T, …) at the chosen tokens, (N, …)."""
        return None if values is None else values.flatten(0, 1)[self.chosen]

    def scatter(self, values: Float[Tensor, " N"]) -> Float[Tensor, "B T"]:
        """Values of the chosen tokens at their places, 0 elsewhere."""
        places = values.new_zeros(len(self.ids) * self.width)
        return places.index_put((self.chosen,), values).view(len(self.ids), self.width)


def chosen_sequences(batch: dict[str, Any], mask: Bool[Tensor, "B T"]) -> Sequences:
    """Sequences of TRL's micro-batch, with tokens chosen where `mask` is True; waits for the device once."""
    names = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")
    table = np.array(torch.cat([*(batch[name] for name in names), mask.long()], dim=1).tolist())
    prompt, width = (batch[name].shape[1] for name in names[:2])
    ids, valid, picked = np.split(table, [prompt + width, 2 * (prompt + width)], axis=1)
    rows, columns = picked.nonzero()
    lengths = valid.sum(axis=1)
    # `cumsum` counts from 1, and position t − 1 predicts token t: hence − 2.
    predicting = (lengths.cumsum() - lengths)[rows] + valid.cumsum(axis=1)[rows, prompt + columns] - 2
    valid_ids = [row_ids[is_valid.astype(bool)].tolist() for row_ids, is_valid in zip(ids, valid, strict=True)]
    chosen = to_device(torch.from_numpy(rows * width + columns), mask.device)
    return Sequences(valid_ids, width, chosen, torch.from_numpy(predicting), batch.get("prompt_images"))


def policy_states(
    model: nn.Module, sequences: Sequences, *, packed: bool = False, router_loss: bool = False
) -> tuple[Float[Tensor, "N H"], int, Float[Tensor, ""] | None]:
    """Run the policy's backbone over a micro-batch.

    Args:
        model: the unwrapped policy.
        sequences: the micro-batch; each prompt has at least one token.
        router_loss: also compute the load-balancing loss of a mixture of experts.

    Returns:
        The hidden states that predict the chosen tokens, in the dtype of the LM head's product; the number of tokens
        that the pass read, padding included; and the load-balancing loss or None.
    """
    device = sequences.chosen.device
    # A router's loss is a mean over the tokens of every sequence, so that none is shared.
    inputs, indices = model_inputs(model, sequences.ids, device, packed=packed, shares=not router_loss)
    mask = None
    if not packed:
        lengths = torch.tensor([len(ids) for ids in sequences.ids])
        mask = to_device((torch.arange(inputs["input_ids"].shape[1]) < lengths[:, None]).long(), device)
        if device.type == "cpu":
            # Without a mask a CPU sums the gradients of attention in another order: weights differ in their last bit.
            inputs.setdefault("attention_mask", mask)
    extra = {"output_router_logits": True} if router_loss else {}
    images = image_inputs(model, sequences.ids, sequences.images or (), device, {})
    outputs = backbone(model)(**(inputs | images), use_cache=False, **extra)
    hidden = outputs.last_hidden_state.flatten(0, 1)[to_device(indices[sequences.predicting], device)]
    aux_loss = _router_loss(model, outputs, mask) if router_loss else None
    if sequences.images is not None and not images:
        hidden = hidden + zero_of_tower(model)
    return head_input(model, hidden), inputs["input_ids"].numel(), aux_loss


def _router_loss(model: nn.Module, outputs: Any, mask: Int[Tensor, "B L"] | None) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    if not outputs.router_logits:  # dense, with the configuration of a mixture of experts
        return outputs.last_hidden_state.new_zeros(())
    config = model.config.get_text_config()
    experts = outputs.router_logits[0].shape[-1]  # whose name differs between configurations
    return load_balancing_loss_func(outputs.router_logits, experts, config.num_experts_per_tok, mask)
