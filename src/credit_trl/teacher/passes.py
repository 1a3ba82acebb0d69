"""Forward passes of the teacher over a generation batch and of the policy over a micro-batch, for hidden states only.

Teacher: each prompt of each sample is read once, followed by the completion; only hidden states that predict scored
tokens are kept. Samples are processed in *groups*, whose hidden states are held at once. Within a group the sequences
of all prompts are sorted and cut into *passes*, calls of the backbone with at most `batch_tokens` tokens, padded or
packed. Padded passes are sorted by length and end early where padding would cost more than another pass. Packed ones
are sorted by prompt, so that a prefix that several prompts share is read once (`packing.packed_row`) and counted once.

Policy: TRL pads prompts on the left and completions on the right, to the longest of the process. Here each sample is
one sequence from position 0, padded on the right to the longest of the micro-batch, or packed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
class TeacherSequence:
    """One prompt of the teacher and the completion."""

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


class _Group(NamedTuple):
    """Samples with equally many prompts, whose hidden states are held at once."""

    samples: list[int]
    prompts: int  # 1 + C of each sample
    passes: list[list[TeacherSequence]]


class TokenStates(NamedTuple):
    """The n scored tokens of one group, and the hidden states that predict them."""

    samples: Int[Tensor, " n"]  # of each token
    columns: Int[Tensor, " n"]  # of each token in the completion
    teacher: Float[Tensor, "n H"]  # under the teacher's prompt
    contrasts: Float[Tensor, "C n H"]  # under the contrast prompts


@torch.no_grad()
def token_states(
    teacher: Teacher,
    model: nn.Module,
    contexts: Sequence[TokenContexts],
    batch: CompletionBatch,
    batch_tokens: int,
    packed: bool = False,
) -> Iterator[TokenStates]:
    """Run the teacher over every prompt of every sample.

    Samples without a teacher and samples without scored tokens are skipped. Where the teacher is sharded, every
    process makes as many passes as the busiest one, so that collectives match.

    Args:
        model: what `teacher.active()` yields.
        batch_tokens: maximum number of tokens in one pass, padding included.
        packed: concatenate sequences without padding, see `packing.enable_packing`.
    """
    sequences = _sequences_of(contexts, batch)
    unwrapped = teacher.unwrapped(model)
    shares = packed and shares_prefixes(unwrapped)
    groups = list(_groups(sequences, batch_tokens, packed, shares))
    # In main memory, so that a pass copies its own to the device at once.
    loss_mask = batch.loss_mask.cpu()
    device = batch.ids.device
    encoded: dict[int, Any] = {}

    def forward(sequences_of_pass: list[TeacherSequence]) -> tuple[Tensor, Tensor]:
        """Hidden states (R, H) of a pass, and the row of each token of the sequences, one after the other."""
        ids = [sequence.ids() for sequence in sequences_of_pass]
        images = [sequence.images for sequence in sequences_of_pass]
        inputs, indices = model_inputs(unwrapped, ids, device, packed=packed)

        def run(input_ids: Tensor) -> Tensor:
            with teacher.autocast():
                image_kwargs = image_inputs(unwrapped, ids, images, device, encoded)
                kwargs = inputs | {"input_ids": input_ids} | image_kwargs
                outputs = backbone(unwrapped)(**kwargs, use_cache=False)
                return head_input(unwrapped, outputs.last_hidden_state)

        # In the wrapper's forward, so that a sharded teacher gathers its weights.
        hidden = run_in_wrapped_forward(model, unwrapped, run, inputs["input_ids"])
        return hidden.flatten(0, 1), indices

    count = sum(len(group.passes) for group in groups)
    idle = teacher.most_batches(count) - count  # a collective: every process calls it before its passes
    for group in groups:
        yield _states_of(group, forward, loss_mask, device)
    for _ in range(idle):
        forward([TeacherSequence(0, 0, [], [0])])


def _sequences_of(contexts: Sequence[TokenContexts], batch: CompletionBatch) -> dict[int, list[TeacherSequence]]:
    """The sequences of every sample that has a teacher and scored tokens."""
    lengths = (batch.mask.cumsum(-1) * batch.mask).argmax(-1) + 1  # up to the last unmasked token
    ends = lengths.tolist()
    ids = batch.ids.tolist()
    is_scored = batch.loss_mask.any(dim=1).tolist()
    sequences: dict[int, list[TeacherSequence]] = {}
    for sample, sample_contexts in enumerate(contexts):
        if sample_contexts.teacher is None or not is_scored[sample]:
            continue
        completion = ids[sample][: ends[sample]]
        sequences[sample] = []
        for context, (prompt, columns) in enumerate(sample_contexts.sequences()):
            images = sample_contexts.images[context] if sample_contexts.images else None
            sequence = TeacherSequence(sample, context, prompt, completion, columns, images)
            sequences[sample].append(sequence)
    return sequences


def _states_of(
    group: _Group,
    forward: Callable[[list[TeacherSequence]], tuple[Tensor, Tensor]],
    loss_mask: Bool[Tensor, "B T"],
    device: torch.device,
) -> TokenStates:
    """One group's part of `token_states`. Tokens of one sample are contiguous."""
    samples = torch.tensor(group.samples)
    rows, columns = loss_mask[samples].nonzero(as_tuple=True)
    sizes = torch.bincount(rows, minlength=len(samples)).tolist()
    rows_of_samples = torch.arange(len(rows)).split(sizes)
    rows_of = dict(zip(group.samples, rows_of_samples, strict=True))
    flat_states: Tensor | None = None
    for sequences in group.passes:
        hidden, indices = forward(sequences)
        if flat_states is None:
            flat_states = hidden.new_empty(group.prompts * len(rows), hidden.shape[-1])
        start = 0
        sources: list[Tensor] = []  # places in the sequences of the pass, one after the other
        targets: list[Tensor] = []  # places in `flat_states`
        for sequence in sequences:
            sample_rows = rows_of[sequence.sample]
            positions = sequence.positions(columns[sample_rows])
            sources.append(start + positions - 1)
            targets.append(sequence.context * len(rows) + sample_rows)
            start += len(sequence)
        places = torch.stack([torch.cat(targets), indices[torch.cat(sources)]])
        target, source = to_device(places, device)
        flat_states[target] = hidden[source]
    states = flat_states.view(group.prompts, len(rows), -1)
    token_samples, token_columns = to_device(torch.stack([samples[rows], columns]), device)
    return TokenStates(token_samples, token_columns, states[0], states[1:])


def _groups(
    sequences: dict[int, list[TeacherSequence]], batch_tokens: int, packed: bool, shares: bool
) -> Iterator[_Group]:
    """The groups, each of at most `PASSES_PER_GROUP` passes."""
    for samples in _samples_of_groups(sequences, batch_tokens, packed):
        group_sequences: list[TeacherSequence] = []
        for sample in samples:
            group_sequences += sequences[sample]
        prompts = len(sequences[samples[0]])
        yield _Group(samples, prompts, list(passes(group_sequences, batch_tokens, packed, shares)))


def _samples_of_groups(
    sequences: dict[int, list[TeacherSequence]], batch_tokens: int, packed: bool
) -> Iterator[list[int]]:
    """Samples with equally many prompts; in a packed group similar prompts, else similar sizes."""
    sizes = {}
    order: dict[int, tuple[int, list[int]]] = {}
    for sample, sample_sequences in sequences.items():
        sizes[sample] = sum(map(len, sample_sequences))
        key = sample_sequences[0].prompt if packed else [sizes[sample]]
        order[sample] = len(sample_sequences), key
    group: list[int] = []
    tokens = 0
    for sample in sorted(sequences, key=order.__getitem__):
        if group:
            has_other_count = len(sequences[group[0]]) != len(sequences[sample])
            is_full = tokens + sizes[sample] > PASSES_PER_GROUP * batch_tokens
            if has_other_count or is_full:
                yield group
                group = []
                tokens = 0
        group.append(sample)
        tokens += sizes[sample]
    if group:
        yield group


def passes(
    sequences: Sequence[TeacherSequence], batch_tokens: int, packed: bool, shares: bool = False
) -> Iterator[list[TeacherSequence]]:
    """Sequences in passes of at most `batch_tokens` tokens; a pass has at least one sequence.

    With `shares`, a prefix that prompts of a packed pass share counts once.
    """
    batch: list[TeacherSequence] = []
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
class PolicySequences:
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
        if values is None:
            return None
        return values.flatten(0, 1)[self.chosen]

    def scatter(self, values: Float[Tensor, " N"]) -> Float[Tensor, "B T"]:
        """Values of the chosen tokens at their places, 0 elsewhere."""
        places = values.new_zeros(len(self.ids) * self.width)
        return places.index_put((self.chosen,), values).view(len(self.ids), self.width)


def chosen_sequences(batch: dict[str, Any], mask: Bool[Tensor, "B T"]) -> PolicySequences:
    """Sequences of TRL's micro-batch, with tokens chosen where `mask` is True; waits for the device once."""
    names = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")
    tensors = [batch[name] for name in names]
    table = np.array(torch.cat([*tensors, mask.long()], dim=1).tolist())
    prompt_width = batch["prompt_ids"].shape[1]
    width = batch["completion_ids"].shape[1]
    ids, valid, picked = np.split(table, [prompt_width + width, 2 * (prompt_width + width)], axis=1)
    rows, columns = picked.nonzero()
    lengths = valid.sum(axis=1)
    starts = lengths.cumsum() - lengths
    # `cumsum` counts from 1, and position t − 1 predicts token t: hence − 2.
    positions = valid.cumsum(axis=1)[rows, prompt_width + columns] - 2
    predicting = torch.from_numpy(starts[rows] + positions)
    valid_ids = []
    for row_ids, is_valid in zip(ids, valid.astype(bool), strict=True):
        valid_ids.append(row_ids[is_valid].tolist())
    chosen = to_device(torch.from_numpy(rows * width + columns), mask.device)
    return PolicySequences(valid_ids, width, chosen, predicting, batch.get("prompt_images"))


class PolicyStates(NamedTuple):
    """What the policy's backbone returns for a micro-batch."""

    hidden: Float[Tensor, "N H"]  # that predict the chosen tokens, in the dtype of the LM head's product
    tokens_read: int  # padding included
    aux_loss: Float[Tensor, ""] | None  # load-balancing loss of a mixture of experts


def policy_states(
    model: nn.Module, sequences: PolicySequences, *, packed: bool = False, router_loss: bool = False
) -> PolicyStates:
    """Run the policy's backbone over a micro-batch.

    Args:
        model: the unwrapped policy.
        sequences: the micro-batch; each prompt has at least one token.
        router_loss: also compute the load-balancing loss of a mixture of experts.
    """
    device = sequences.chosen.device
    # A router's loss is a mean over the tokens of every sequence, so that none is shared.
    inputs, indices = model_inputs(model, sequences.ids, device, packed=packed, shares=not router_loss)
    mask = None
    if not packed:
        lengths = torch.tensor(list(map(len, sequences.ids)))
        columns = torch.arange(inputs["input_ids"].shape[1])
        mask = to_device((columns < lengths[:, None]).long(), device)
        if device.type == "cpu":
            # Without a mask a CPU sums the gradients of attention in another order: weights differ in their last bit.
            inputs.setdefault("attention_mask", mask)
    images = image_inputs(model, sequences.ids, sequences.images or (), device, {})
    options = inputs | images
    if router_loss:
        options["output_router_logits"] = True
    outputs = backbone(model)(**options, use_cache=False)
    predicting = to_device(indices[sequences.predicting], device)
    hidden = outputs.last_hidden_state.flatten(0, 1)[predicting]
    aux_loss = _router_loss(model, outputs, mask) if router_loss else None
    if sequences.images is not None and not images:
        hidden = hidden + zero_of_tower(model)
    return PolicyStates(head_input(model, hidden), inputs["input_ids"].numel(), aux_loss)


def _router_loss(model: nn.Module, outputs: Any, mask: Int[Tensor, "B L"] | None) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    if not outputs.router_logits:  # dense, with the configuration of a mixture of experts
        return outputs.last_hidden_state.new_zeros(())
    shape = outputs.router_logits[0].shape
    if len(shape) != 2:  # one logit for each expert and token
        raise ValueError(
            f"The router of `{type(model).__name__}` has logits of shape {tuple(shape)}, for which no load-balancing "
            "loss is computed. Set `router_aux_loss_coef=0`."
        )
    config = model.config.get_text_config()
    experts = shape[-1]  # whose name differs between configurations
    return load_balancing_loss_func(outputs.router_logits, experts, config.num_experts_per_tok, mask)
