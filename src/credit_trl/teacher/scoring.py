"""The scoring phase: f and Ĝ of a whole generation batch, in batches of its own.

The teacher is touched here only. One backbone pass a context; only the hidden states of the positions that predict
completion tokens are kept, and of those only what `kernels` makes of them.

A *group* is as many samples as have their hidden states held at once; a *pass* is one call of the backbone. Within a
group, teacher and contrast contexts of all samples are sorted by length together and cut into passes, so that little
of a pass is padding, or none where sequences are packed one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from credit_trl.loss import Kernels, Scores, Support, Tail, TeacherStates, score_tokens
from credit_trl.loss.head import lm_head
from credit_trl.objective import Baseline
from credit_trl.teacher.causal_lm import backbone, head_input, unwrap_adapters
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.sharding import run_in_wrapped_forward

ContextIds = Sequence[list[list[int]] | None]
ContextColumns = Sequence[list[list[int]] | None]

# Contexts of a group are this many passes long at most: more sort better, fewer hold fewer hidden states.
_PASSES_OF_GROUP = 4
# Layers that keep sequences apart when they are packed; a recurrent layer would carry its state across.
_PACKABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True)
class _Sequence:
    """One context of one sample and its completion, which follows it, or has parts of it inside.

    Args:
        sample, context: their numbers.
        prompt: the context's ids.
        completion: its length.
        columns: for each id of the context, the column of the completion before which it stands, in ascending order;
            None where all stand before the first.
    """

    sample: int
    context: int
    prompt: list[int]
    completion: int
    columns: list[int] | None = None

    def __len__(self) -> int:
        return len(self.prompt) + self.completion

    def places(self, columns: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Where in the sequence the completion's tokens stand: after as much of the context as precedes them."""
        if self.columns is None:
            return columns + len(self.prompt)
        preceding = torch.tensor(self.columns, device=columns.device)
        return columns + torch.searchsorted(preceding, columns.contiguous(), right=True)

    def ids(self, completion_ids: Int[Tensor, "B T"]) -> Int[Tensor, " L"]:
        """The whole sequence."""
        prompt = torch.tensor(self.prompt, device=completion_ids.device)
        completion = completion_ids[self.sample, : self.completion]
        if self.columns is None:
            return torch.cat([prompt, completion])
        whole = completion.new_empty(len(self))
        own = self.places(torch.arange(self.completion, device=whole.device))
        is_context = torch.ones_like(whole, dtype=torch.bool)
        is_context[own] = False
        whole[own], whole[is_context] = completion, prompt
        return whole


@dataclass
class States:
    """Hidden states of n tokens under the teacher's context and the C contrast contexts.

    Args:
        rows: (n,), which sample each token belongs to.
        columns: (n,), its position in the completion.
        hidden: (1 + C, n, H), the teacher's first.
    """

    rows: Int[Tensor, " n"]
    columns: Int[Tensor, " n"]
    hidden: Float[Tensor, "1+C n H"]


def score_completions(
    teacher: Teacher,
    contexts: ContextIds,
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Int[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    support: Support,
    topk: int,
    tail: Tail,
    temperature: float,
    batch_tokens: int,
    baseline: Baseline = "mean_log",
    packed: bool = False,
    kernels: Kernels = "torch",
    chunk_size: int | None = None,
    columns: ContextColumns | None = None,
) -> dict[str, Tensor]:
    """Score a generation batch under the teacher.

    Args:
        teacher: π_ref.
        contexts: for each of the B samples, the token ids of its teacher prompt and its C contrast prompts, or None
            where there is no teacher. C may be 0.
        completion_ids: (B, T), the sampled ids, right-padded.
        completion_mask: (B, T), 1 on tokens that belong to the completion (a tool's included: they are read).
        loss_mask: (B, T), True on tokens to score.
        batch_tokens: tokens in one pass, padding included.
        baseline: how the contrasts are averaged.
        packed: without padding, see `check_packing`.
        kernels: what works on rows of logits, see `kernels.LMHead`.
        chunk_size: tokens projected at once; None chooses.
        columns: for each id of each context, the column of the completion before which it stands: feedback on single
            turns lies inside. None for a sample, or at all, where contexts precede their completion.

    Returns:
        The fields of `kernels.Scores`, each (B, T, …), zero where nothing was scored.
    """
    scores: dict[str, Tensor] = {}
    shape = completion_ids.shape
    with teacher.active() as model:
        head = lm_head(teacher.unwrapped(model), temperature, kernels).gathered().detached().on(loss_mask.device)
        width = topk + 1 if tail == "bucket" else topk
        buckets, size = (1, 1) if support == "sampled" else (width, topk)
        for name, dtype, depth in _layout(buckets, size, head.weight.dtype):
            scores[name] = torch.zeros(*shape, *depth, dtype=dtype, device=completion_ids.device)
        for states in teacher_states(
            teacher, model, contexts, completion_ids, completion_mask, loss_mask, batch_tokens, packed, columns
        ):
            part = score_tokens(
                states.hidden[0],
                states.hidden[1:],
                head,
                completion_ids[states.rows, states.columns],
                support=support,
                topk=topk,
                tail=tail,
                baseline=baseline,
                chunk_size=chunk_size,
            )
            for name, values in scores.items():
                values[states.rows, states.columns] = getattr(part, name).to(values.dtype)
    return scores


def gather_states(
    teacher: Teacher,
    contexts: ContextIds,
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Int[Tensor, "B T"],
    loss_mask: Bool[Tensor, "B T"],
    *,
    temperature: float,
    batch_tokens: int,
    baseline: Baseline = "mean_log",
    packed: bool = False,
    kernels: Kernels = "torch",
    columns: ContextColumns | None = None,
) -> TeacherStates:
    """The teacher's hidden states of a micro-batch, for supports that are chosen inside the step.

    Returns:
        States of the N tokens of `loss_mask`, in row-major order.
    """
    order = torch.full(loss_mask.shape, -1, dtype=torch.long, device=loss_mask.device)
    order[loss_mask] = torch.arange(int(loss_mask.sum()), device=loss_mask.device)
    count = max((len(c) for c in contexts if c is not None), default=1)
    with teacher.active() as model:
        head = lm_head(teacher.unwrapped(model), temperature, kernels).gathered().detached().on(loss_mask.device)
        hidden = head.weight.new_zeros(count, int(loss_mask.sum()), head.weight.shape[1])
        for states in teacher_states(
            teacher, model, contexts, completion_ids, completion_mask, loss_mask, batch_tokens, packed, columns
        ):
            hidden = hidden.to(states.hidden.dtype)
            hidden[: len(states.hidden), order[states.rows, states.columns]] = states.hidden
    return TeacherStates(hidden[0], hidden[1:], head, baseline)


def stored_scores(inputs: dict[str, Tensor], loss_mask: Bool[Tensor, "B T"]) -> Scores:
    """The scores of the N tokens of `loss_mask`, out of a batch that `score_completions` filled."""
    picked = {f.name: inputs[f.name][loss_mask] for f in fields(Scores)}
    picked["support_ids"] = picked["support_ids"].long()
    return Scores(**picked)


@torch.no_grad()
def teacher_states(
    teacher: Teacher,
    model: nn.Module,
    contexts: ContextIds,
    completion_ids: Tensor,
    completion_mask: Tensor,
    loss_mask: Tensor,
    batch_tokens: int,
    packed: bool = False,
    columns: ContextColumns | None = None,
) -> Iterator[States]:
    """Run the teacher over every context of every sample, a group at a time.

    Where the teacher is sharded, every process makes as many passes as the busiest one, so that no collective waits
    for a process that has nothing to score.
    """
    lengths = ((completion_mask.cumsum(-1) * completion_mask).argmax(-1) + 1).tolist()
    samples = [i for i, c in enumerate(contexts) if c is not None and bool(loss_mask[i].any())]
    groups = [
        (group, list(passes(_sequences(group, contexts, lengths, columns), batch_tokens, packed)))
        for group in _groups(samples, contexts, lengths, _PASSES_OF_GROUP * batch_tokens)
    ]
    count = sum(len(of_group) for _, of_group in groups)
    idle = teacher.most_batches(count) - count  # asked first: every process meets there
    for group, of_group in groups:
        yield _states_of(group, of_group, teacher, model, completion_ids, loss_mask, packed)
    for _ in range(idle):
        _forward(teacher, model, {"input_ids": completion_ids[:1, :1]})


def _groups(samples: list[int], contexts: ContextIds, lengths: list[int], tokens: int) -> Iterator[list[int]]:
    """Samples with as many contexts each, sorted by length, and cut where a group's tokens exceed the budget."""
    sizes = {i: sum(map(len, contexts[i])) + len(contexts[i]) * lengths[i] for i in samples}
    group: list[int] = []
    for sample in sorted(samples, key=lambda i: (len(contexts[i]), sizes[i])):
        same_count = not group or len(contexts[group[0]]) == len(contexts[sample])
        if group and (not same_count or sum(sizes[i] for i in [*group, sample]) > tokens):
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def _sequences(
    group: list[int], contexts: ContextIds, lengths: list[int], columns: ContextColumns | None
) -> list[_Sequence]:
    inside = {i: columns[i] for i in group if columns is not None and columns[i] is not None}
    return [
        _Sequence(i, k, prompt, lengths[i], inside[i][k] if i in inside else None)
        for i in group
        for k, prompt in enumerate(contexts[i])
    ]


def passes(sequences: Sequence[_Sequence], batch_tokens: int, packed: bool) -> Iterator[list[_Sequence]]:
    """Sequences sorted by length and cut where a pass, with its padding, exceeds the budget; one at least a pass."""
    batch: list[_Sequence] = []
    for sequence in sorted(sequences, key=len):
        tokens = sum(map(len, batch)) + len(sequence) if packed else (len(batch) + 1) * len(sequence)
        if batch and tokens > batch_tokens:
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
    completion_ids: Tensor,
    loss_mask: Tensor,
    packed: bool,
) -> States:
    device = completion_ids.device
    samples = torch.tensor(group, device=device)
    rows, columns = loss_mask[samples].nonzero(as_tuple=True)
    # Tokens of one sample lie side by side.
    ends = torch.bincount(rows, minlength=len(group)).cumsum(0).tolist()
    span = {sample: slice(start, end) for sample, start, end in zip(group, [0, *ends], ends, strict=False)}
    count = 1 + max(sequence.context for batch in of_group for sequence in batch)
    kept: Tensor | None = None
    for batch in of_group:
        inputs, firsts = _packed_inputs(batch, completion_ids) if packed else _padded_inputs(batch, completion_ids)
        hidden = _forward(teacher, model, inputs).flatten(0, 1)
        if kept is None:
            kept = hidden.new_empty(count, len(rows), hidden.shape[-1])
        for sequence, first in zip(batch, firsts, strict=True):
            tokens = span[sequence.sample]
            kept[sequence.context, tokens] = hidden[first + sequence.places(columns[tokens]) - 1]
    return States(samples[rows], columns, kept)


def _padded_inputs(batch: list[_Sequence], completion_ids: Tensor) -> tuple[dict[str, Tensor], list[int]]:
    """Model inputs, and where each sequence starts in the flattened hidden states.

    Padding is on the right: positions start at 0 and no token attends to a pad.
    """
    input_ids = nn.utils.rnn.pad_sequence([s.ids(completion_ids) for s in batch], batch_first=True)
    lengths = torch.tensor([len(s) for s in batch], device=input_ids.device)
    attention_mask = (torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]).long()
    firsts = [i * input_ids.shape[1] for i in range(len(batch))]
    return {"input_ids": input_ids, "attention_mask": attention_mask}, firsts


def _packed_inputs(batch: list[_Sequence], completion_ids: Tensor) -> tuple[dict[str, Tensor], list[int]]:
    """The same as one row, in which positions that start anew tell the sequences apart."""
    input_ids = torch.cat([s.ids(completion_ids) for s in batch])
    positions = torch.cat([torch.arange(len(s), device=input_ids.device) for s in batch])
    ends = list(itertools.accumulate(map(len, batch)))
    return {"input_ids": input_ids[None], "position_ids": positions[None]}, [0, *ends[:-1]]


def check_packing(model: nn.Module) -> None:
    """Refuse packed passes where they would be wrong, or slower than padded ones.

    Raises:
        ValueError: the attention implementation has no variable lengths (it would form a mask of the square of a whole
            pass), or the model has layers that carry a state across sequences.
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
    """Hidden states (b, L, H), through the wrapper's own forward so that a sharded teacher gathers its weights."""
    unwrapped = teacher.unwrapped(model)

    def run(**inputs: Tensor) -> Tensor:
        with teacher.autocast():
            return head_input(unwrapped, backbone(unwrapped)(**inputs, use_cache=False).last_hidden_state)

    return run_in_wrapped_forward(model, unwrapped, run, **inputs)


def _layout(buckets: int, size: int, dtype: torch.dtype) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Name, dtype and trailing shape of every stored score; ids take 4 bytes, the vocabulary fits."""
    dtype = torch.promote_types(dtype, torch.float32)
    return [
        ("support_ids", torch.int32, (size,)),
        ("teacher_logps", dtype, (buckets,)),
        ("generic_logps", dtype, (buckets,)),
        ("teacher_token_logps", dtype, ()),
        ("generic_token_logps", dtype, ()),
        ("teacher_entropy", dtype, ()),
    ]
