"""A draw of the contrast prompt for each sample; the source `"batch"` has one for all rollouts of a prompt.

    trl credit --task quickstart --model_name_or_path quickstart \
        --contrastive_source examples.family.per_sample:per_sample
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from credit_trl.contexts.contrast import ContrastBatch, shuffled
from credit_trl.rollout.batch import Prompt


def per_sample(batch: ContrastBatch, sample: int, rng: np.random.Generator) -> Iterator[Prompt]:
    """The other prompts of the generation batch, uniformly."""
    return shuffled(batch.other_prompts(sample), rng)
