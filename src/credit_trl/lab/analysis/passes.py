"""Log-probabilities of a response over the whole vocabulary, under any contexts, a chunk of positions at a time.

The backbone passes are the trainer's own (`scoring.teacher_states`), so adapters, mixed precision and sharded
weights behave as in training. No `(response × vocabulary)` tensor exists whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from credit_trl.loss import LMHead
from credit_trl.teacher.models import Teacher
from credit_trl.teacher.scoring import lm_head, teacher_states

# Elements of all log-probabilities that live at once: 256 MB in fp32.
_CHUNK_ELEMENTS = 2**26


@dataclass(frozen=True)
class Reading:
    """A model and the contexts under which it reads the response.

    Args:
        model: π; a plain `Teacher` is the model as it is.
        contexts: token ids of each context, generation prompt included.
        columns: for each id of each context, the position of the response before which it stands; None where contexts
            precede the response.
    """

    model: Teacher
    contexts: Sequence[Sequence[int]]
    columns: Sequence[Sequence[int]] | None = None


@torch.no_grad()
def conditionals(
    readings: Sequence[Reading],
    response_ids: Sequence[int],
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> Iterator[tuple[slice, tuple[Float[Tensor, "contexts n V"], ...]]]:
    """`log π(· | context, y_<t)` for every context and position.

    Each reading is one batched backbone pass. Where a model is sharded over processes, all of them must call this as
    often as each other; a response without ids joins in and yields nothing.

    Args:
        readings: models and contexts.
        response_ids: y, the T sampled ids.
        temperature: logits are divided by it, as in the rollout.
        chunk_size: positions projected at once; None chooses.

    Yields:
        A slice of positions and, for each reading, its log-probabilities there, fp32 (fp64 for a model in fp64).
    """
    states = [_states(reading, response_ids, temperature) for reading in readings]
    if not response_ids:
        return
    width = sum(len(hidden) * head.vocabulary_size for hidden, head in states)
    size = chunk_size or max(1, _CHUNK_ELEMENTS // width)
    for start in range(0, len(response_ids), size):
        rows = slice(start, min(start + size, len(response_ids)))
        yield rows, tuple(_project(hidden[:, rows], head) for hidden, head in states)


@torch.no_grad()
def last_position(
    reading: Reading, response_ids: Sequence[int], *, temperature: float = 1.0
) -> Float[Tensor, "contexts V"]:
    """The same at the position that follows the whole response, in one batched pass over all contexts."""
    hidden, head = _states(reading, [*response_ids, 0], temperature, only_last=True)
    return _project(hidden, head)[:, 0]


def _states(
    reading: Reading, response_ids: Sequence[int], temperature: float, only_last: bool = False
) -> tuple[Float[Tensor, "contexts n H"], LMHead]:
    """Hidden states of the positions that predict the response's tokens, or its last one only; and the head."""
    device = reading.model.accelerator.device
    ids = torch.tensor([list(response_ids) or [0]], device=device)
    present = torch.ones_like(ids)
    wanted = present.bool()
    if only_last:
        wanted = torch.zeros_like(wanted)
        wanted[:, -1] = True
    contexts = [[list(context) for context in reading.contexts]] if response_ids else [None]
    columns = None if reading.columns is None else [[list(own) for own in reading.columns]]
    one_pass = len(reading.contexts) * (max(map(len, reading.contexts), default=0) + ids.shape[1])
    with reading.model.active() as model:
        head = lm_head(reading.model.unwrapped(model), temperature).gathered().detached()
        parts = teacher_states(
            reading.model, model, contexts, ids, present, wanted, batch_tokens=one_pass, columns=columns
        )
        hidden = [part.hidden for part in parts]
    return torch.cat(hidden) if hidden else head.weight.new_zeros(0, 0, head.weight.shape[1]), head


def _project(hidden: Float[Tensor, "contexts n H"], head: LMHead) -> Float[Tensor, "contexts n V"]:
    return head.logps(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
