"""Whether the teacher, which reads the feedback, prefers the answer that a verdict names (`Verdict.corrected`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from credit_trl.rollout.batch import GenerationBatch


def answer_metrics(
    batch: GenerationBatch,
    scores: dict[str, Tensor],
    mask: Bool[Tensor, "B T"],
    tokenizer: PreTrainedTokenizerBase,
    reduce: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """Share of samples whose teacher prefers the named answer to the sampled one.

    Both are compared at the first token in which completion and `Verdict.corrected` differ, where the teacher has read
    the same text before: the teacher prefers the named answer if f of its token exceeds f of the sampled token. A
    token outside the stored support has less probability than each of its K tokens and is not preferred. Of a
    renormalized support, samples whose own token is outside do not count.

    Args:
        scores: what `DistillationLoss.score` returned, with the fields of `Scores`, (B, T, ...).
        mask: (B, T), True on the tokens that are scored.
        reduce: sums a vector over processes. Every process calls it once.

    Returns:
        `credit/teacher_prefers_answer` and `credit/named_answers`, the number of samples that count; nothing for
        supports without stored scores of other tokens than the sampled one, or where no sample counts.
    """
    if "teacher_logps" not in scores or scores["support_ids"].shape[-1] < 2:
        return {}
    counts = torch.zeros(2, dtype=torch.float64)
    has_teacher = scores["teacher_mask"].tolist()
    for i, (ids, corrected) in enumerate(zip(batch.completion_ids, batch.corrected, strict=True)):
        found = first_difference(ids, corrected, tokenizer) if corrected is not None and has_teacher[i] else None
        if found is not None and mask[i, found[0]]:
            position, token = found
            support, logps = scores["support_ids"][i, position], scores["teacher_logps"][i, position]
            own = scores["teacher_token_logps"][i, position]
            if len(logps) == len(support):  # without a tail they are conditional on different sets of tokens
                own = logps[support == ids[position]]
                if not len(own):
                    continue
            named = logps[: len(support)][support == token]
            counts += torch.tensor([bool((named > own).any()), True])
    preferred, counted = reduce(counts.float()).tolist()
    if not counted:
        return {}
    return {"credit/teacher_prefers_answer": preferred / counted, "credit/named_answers": counted}


def first_difference(
    completion_ids: Sequence[int], corrected: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, int] | None:
    """Position of the first token in which a completion and its corrected text differ, and the corrected token.

    None where one is a prefix of the other, or where the tokens before it are not those of the text, as for a
    completion that was sampled in another tokenisation.
    """

    def encode(text: str) -> list[int]:
        encoded: Any = tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return encoded["input_ids"]

    sampled, wanted = list(completion_ids), encode(corrected)
    own = encode(tokenizer.decode(sampled, skip_special_tokens=True))
    both = zip(sampled, wanted, strict=False)
    position = next((t for t, (one, other) in enumerate(both) if one != other), None)
    if position is None or own[: position + 1] != sampled[: position + 1]:
        return None
    return position, wanted[position]
