"""Draws of the contrast prompts x'_k (line 3 of Algorithm 1).

A draw depends on `(seed, step, sample)` and on the prompts that can be drawn, not on the number of processes: each
sample has its own random stream, and `sample` is its index in the global generation batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from datasets import Dataset

from credit_trl.config import CreditConfig
from credit_trl.contexts.prompts import Prompt
from credit_trl.rollout.batch import GenerationBatch, prompt_key


def draw_from_batch(
    keys: Sequence[str],
    samples: Sequence[int],
    count: int,
    *,
    seed: int,
    step: int,
) -> list[list[int]]:
    """Draw `count` contrast prompts for each of `samples`, uniformly from the distinct prompts of the batch.

    Args:
        keys: `prompt_key` of every sample of the global generation batch.
        samples: global indices of the samples to draw for.
        count: C.
        seed: seed of the run.
        step: index of the generation batch.

    Returns:
        For each sample, `count` indices into `keys`, never of its own prompt or a duplicate of it: without replacement
        while enough prompts exist, then from all of them again. Empty where no other prompt exists.
    """
    first: dict[str, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    draws = []
    for sample in samples:
        others = [i for key, i in first.items() if key != keys[sample]]
        rng = np.random.default_rng([seed, step, sample])
        draws.append([others[i] for i in _rounds(rng, len(others), count)])
    return draws


def draw_from_dataset(
    prompts: Sequence[Any], keys: Sequence[str], samples: Sequence[int], count: int, *, seed: int, step: int
) -> list[list[int]]:
    """Draw as `draw_from_batch` does, uniformly from the rows of a dataset.

    Args:
        prompts: prompt column of the dataset; rows are read as they are drawn.
        keys: see `draw_from_batch`, as `samples`, `count`, `seed` and `step`.

    Returns:
        For each sample, `count` row numbers of `prompts`, distinct prompts while the dataset has enough; empty where
        it has no other prompt.
    """
    draws = []
    for sample in samples:
        rng = np.random.default_rng([seed, step, sample])
        rows: dict[str, int] = {}
        for row in _rows_in_random_order(rng, len(prompts)):
            key = prompt_key(prompts[row])
            if key != keys[sample]:
                rows.setdefault(key, row)
            if len(rows) == count:
                break
        found = list(rows.values())
        draws.append([found[i % len(found)] for i in range(count)] if found else [])
    return draws


def _rows_in_random_order(rng: np.random.Generator, population: int) -> Iterator[int]:
    """Yield 16 independent draws, which nearly always suffice, then a permutation of all rows."""
    if population:
        yield from (int(row) for row in rng.integers(population, size=16))
        yield from (int(row) for row in rng.permutation(population))


def _rounds(rng: np.random.Generator, population: int, count: int) -> list[int]:
    """`count` numbers below `population`: concatenated permutations, the last one cut."""
    picks: list[int] = []
    while population and len(picks) < count:
        picks.extend(rng.permutation(population)[: count - len(picks)].tolist())
    return picks


@dataclass(frozen=True)
class ContrastSource:
    """Where contrast prompts come from besides the generation batch."""

    # A `Dataset`, or a mapping with the column `prompt`, for `contrastive_source="dataset"`; streams have no rows.
    dataset: Any
    step: int  # index of the generation batch; selects the random stream


def draw_contrasts(batch: GenerationBatch, config: CreditConfig, source: ContrastSource) -> list[list[Prompt]]:
    """The contrast prompts x'_k of each local sample; empty lists where there are none. Every process must call it."""
    if not config.contrasts:
        return [[] for _ in batch.prompts]
    from_dataset = config.contrastive_source == "dataset"
    prompts: Sequence[Prompt] = gather_object(batch.dataset_prompts if from_dataset else batch.prompts)
    keys = _group_keys(prompts, 1 if from_dataset else batch.group_size)
    options = {"samples": batch.indices, "count": config.contrastive_count, "seed": config.seed, "step": source.step}
    if from_dataset:
        prompts = source.dataset["prompt"] if isinstance(source.dataset, Dataset | Mapping) else []
        draws = draw_from_dataset(prompts, keys, **options)
    else:
        draws = draw_from_batch(keys, **options)
    return [[prompts[i] for i in drawn] for drawn in draws]


def _group_keys(prompts: Sequence[Prompt], group_size: int) -> list[str]:
    """`prompt_key` of each sample's group, whose prompts an environment may word differently."""
    firsts = [prompt_key(prompt) for prompt in prompts[::group_size]]
    return [firsts[i // group_size] for i in range(len(prompts))]
