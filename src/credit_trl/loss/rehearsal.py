"""Rehearsal: the policy keeps saying under (x, z) what the initial policy says there.

The policy is trained on x alone, and a teacher made from it reads (x, z) with the same weights. On a rehearsal batch
the teacher's prompt is the student's prompt too, and the teacher is the initial policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from trl.trainer.utils import pad

from credit_trl.contexts.tokens import TokenContexts


def is_rehearsal(index: int, share: float) -> bool:
    """Whether the generation batch `index` rehearses: a share in [0, 1) of all, evenly spread."""
    return int((index + 1) * share + 1e-9) > int(index * share + 1e-9)


def rehearsal_contexts(contexts: Sequence[TokenContexts]) -> list[TokenContexts]:
    """Contexts without contrasts; samples with feedback inside the completion, which no prompt holds, have none."""
    return [
        replace(c, teacher=None if c.columns is not None else c.teacher, contrasts=[], columns=None) for c in contexts
    ]


def rehearse(output: dict[str, Any], contexts: Sequence[TokenContexts], pad_token_id: int) -> None:
    """Let the student of TRL's generation batch read the teacher's prompts of `rehearsal_contexts`, in place.

    Importance ratios belong to the rollouts' prompts and are dropped: nothing was sampled under z.
    """
    own = zip(output["prompt_ids"], output["prompt_mask"], contexts, strict=True)
    ids = [
        ids[mask.bool()] if c.teacher is None else torch.tensor(c.teacher, device=ids.device) for ids, mask, c in own
    ]
    output["prompt_ids"] = pad(ids, padding_value=pad_token_id, padding_side="left")
    output["prompt_mask"] = pad([torch.ones_like(x) for x in ids], padding_value=0, padding_side="left")
    for name in ("old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"):
        output.pop(name, None)
