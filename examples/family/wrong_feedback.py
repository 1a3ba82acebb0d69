"""Wrong feedback as the contrast: x stays, and a failed rollout of the same group takes the place of z.

Each has the parts that z has, so that it differs in content only: the answer of the failed rollout in place of the
demonstration, its feedback in place of the feedback. RLCSD (arXiv:2606.11709) contrasts with such contexts:

    trl credit --task quickstart --model_name_or_path quickstart \
        --contrastive_source examples.family.wrong_feedback:wrong_feedback
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from credit_trl.contexts.contrast import Contrast, ContrastBatch, shuffled
from credit_trl.contexts.tokens import PrivilegedContext


def wrong_feedback(batch: ContrastBatch, sample: int, rng: np.random.Generator) -> Iterator[Contrast]:
    """Contexts of other failed rollouts of the group in random order; none where they have not the parts of z."""
    privileged = batch.privileged[sample]
    contexts = []
    for sibling in batch.group(sample):
        if sibling == sample or batch.successes[sibling] is not False:
            continue
        rollout = batch.rollouts[sibling]
        wrong = PrivilegedContext(
            None if privileged.demonstration is None else rollout.demonstration,
            None if privileged.feedback is None else rollout.feedback,
        )
        if wrong != privileged and parts(wrong) == parts(privileged):
            contexts.append(wrong)
    return (Contrast(batch.prompts[sample], wrong) for wrong in shuffled(contexts, rng))


def parts(z: PrivilegedContext) -> tuple[bool, bool]:
    """Whether z has a demonstration, and feedback."""
    return z.demonstration is not None, z.feedback is not None
