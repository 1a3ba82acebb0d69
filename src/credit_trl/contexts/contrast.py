"""Draws of the contrast prompts x'_k (line 3 of Algorithm 1).

A draw depends on `(seed, step, sample)` and on the prompts that can be drawn, not on the number of processes: each
sample has its own random stream, and `sample` is its index in the global generation batch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from datasets import Dataset

from credit_trl.config import CreditConfig
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.contexts.prompts import Prompt, user_text, without_question
from credit_trl.rollout.batch import GenerationBatch, is_successful, prompt_key


def draw_from_batch(
    keys: Sequence[str],
    samples: Sequence[int],
    count: int,
    *,
    seed: int,
    step: int,
    eligible: Sequence[bool] | None = None,
    groups: Sequence[Any] | None = None,
) -> list[list[int]]:
    """Draw `count` contrast prompts for each of `samples`, uniformly from the distinct prompts of the batch.

    Args:
        keys: `prompt_key` of every sample of the global generation batch.
        samples: global indices of the samples to draw for.
        count: C.
        seed: seed of the run.
        step: index of the generation batch.
        eligible: samples that can be drawn; all by default.
        groups: group of every sample, such as its task, in which its draws stay; one for all by default.

    Returns:
        For each sample, `count` indices into `keys`, never of its own prompt or a duplicate of it: without replacement
        while enough prompts exist, then from all of them again. Empty where no other prompt exists.
    """
    group_of = groups or [None] * len(keys)
    first: dict[tuple[Any, str], int] = {}
    for index, key in enumerate(keys):
        if eligible is None or eligible[index]:
            first.setdefault((group_of[index], key), index)
    draws = []
    for sample in samples:
        others = [i for (group, key), i in first.items() if group == group_of[sample] and key != keys[sample]]
        rng = np.random.default_rng([seed, step, sample])
        draws.append([others[i] for i in _rounds(rng, len(others), count)])
    return draws


def draw_nearest(
    keys: Sequence[str], texts: Sequence[str], samples: Sequence[int], count: int, *, seed: int, step: int
) -> list[list[int]]:
    """Choose the `count` prompts of the batch that are most similar to the sample's, the most similar first.

    Args:
        keys: see `draw_from_batch`, as `samples`, `count`, `seed` and `step`; ties are broken at random.
        texts: user text of every sample of the batch.

    Returns:
        Indices as `draw_from_batch` returns; where the batch has fewer prompts, the most similar repeat.
    """
    first: dict[str, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    distinct, own_row = list(first.values()), {key: i for i, key in enumerate(first)}
    similarity = text_similarity([texts[index] for index in distinct])
    draws = []
    for sample in samples:
        own = own_row[keys[sample]]
        chance = np.random.default_rng([seed, step, sample]).permutation(len(distinct))
        order = [i for i in np.lexsort((chance, -similarity[own].round(9))) if i != own]
        draws.append([distinct[order[i % len(order)]] for i in range(count)] if order else [])
    return draws


def text_similarity(texts: Sequence[str]) -> np.ndarray:
    """(n, n) cosine similarities of the texts' word counts, weighted by inverse document frequency.

    The weight of a word is `1 + log((1 + n) / (1 + number of texts with the word))`. A text without words has
    similarity 0 to every text.
    """
    counts = [Counter(re.findall(r"\w+", text.casefold())) for text in texts]
    containing = Counter(word for words in counts for word in words)
    column = {word: i for i, word in enumerate(containing)}
    weight = 1.0 + np.log((1 + len(texts)) / (1 + np.array(list(containing.values()), dtype=float)))
    vectors = np.zeros((len(texts), len(column)))
    for vector, words in zip(vectors, counts, strict=True):
        vector[[column[word] for word in words]] = list(words.values())
    vectors *= weight
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True).clip(min=1e-12)
    return vectors @ vectors.T


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
    if config.contrastive_swap == "self":
        return [[prompt] * config.contrastive_count for prompt in batch.prompts]
    if config.contrastive_source == "none":
        return [[without_question(prompt)] for prompt in batch.prompts]
    from_dataset = config.contrastive_source == "dataset"
    prompts: Sequence[Prompt] = gather_object(batch.dataset_prompts if from_dataset else batch.prompts)
    keys = _group_keys(prompts, 1 if from_dataset else batch.group_size)
    options = {"samples": batch.indices, "count": config.contrastive_count, "seed": config.seed, "step": source.step}
    if config.contrastive_source == "batch":
        draws = draw_from_batch(keys, **options)
    elif config.contrastive_source == "hard":
        draws = draw_nearest(keys, [user_text(prompt) for prompt in prompts], **options)
    elif config.contrastive_source == "same_task":
        draws = draw_from_batch(keys, groups=gather_object([row["task"] for row in batch.rows]), **options)
    else:
        prompts = source.dataset["prompt"] if isinstance(source.dataset, Dataset | Mapping) else []
        draws = draw_from_dataset(prompts, keys, **options)
    return [[prompts[i] for i in drawn] for drawn in draws]


def draw_privileged_contexts(
    batch: GenerationBatch, privileged: Sequence[PrivilegedContext], count: int, *, seed: int, step: int
) -> list[list[PrivilegedContext]]:
    """Draw `count` privileged contexts of other prompts for each local sample. Every process must call it.

    Args:
        batch: the generation batch.
        privileged: z of each local sample.
        count: see `draw_from_batch`, as `seed` and `step`.

    Returns:
        Lists of `count`; empty where no other prompt of the batch has a privileged context.
    """
    keys = _group_keys(gather_object(batch.prompts), batch.group_size)
    everyone: list[PrivilegedContext] = gather_object(list(privileged))
    eligible = [bool(one) for one in everyone]
    draws = draw_from_batch(keys, batch.indices, count, seed=seed, step=step, eligible=eligible)
    # The feedback of both is introduced in the same words, so that they differ in content only.
    return [
        [replace(everyone[i], success=z.success) for i in drawn] for drawn, z in zip(draws, privileged, strict=True)
    ]


def draw_wrong_contexts(
    batch: GenerationBatch,
    privileged: Sequence[PrivilegedContext],
    texts: Sequence[str | None],
    config: CreditConfig,
    step: int,
) -> list[list[PrivilegedContext]]:
    """Draw C privileged contexts of failed rollouts of the same group for each local sample, never the sample's own.

    Each has the parts that z has, so that it differs in content only: the completion of a failed rollout in place of
    the demonstration, its feedback in place of the feedback. Every process must call it.

    Args:
        batch: the generation batch.
        privileged: z of each local sample.
        texts: what a demonstration shows of each local completion; None where that is empty.
        config: C, the success threshold and the seed.
        step: index of the generation batch.

    Returns:
        Lists of C, with repetition where fewer exist; empty where the group has none.
    """
    texts, feedback = gather_object(list(texts)), gather_object(batch.feedback)
    successes = is_successful(batch.rewards, config.success_reward_threshold)
    has_failed = [reward == reward and not ok for reward, ok in zip(batch.rewards, successes, strict=True)]
    draws = []
    for index, z in zip(batch.indices, privileged, strict=True):
        start = index // batch.group_size * batch.group_size
        group = range(start, min(start + batch.group_size, len(batch.rewards)))
        siblings = [i for i in group if has_failed[i] and i != index] if z else []
        wrong = [
            PrivilegedContext(
                None if z.demonstration is None else texts[i],
                None if z.feedback is None else feedback[i],
                success=z.success,
            )
            for i in siblings
        ]
        wrong = [other for other in wrong if other != z and _parts(other) == _parts(z)]
        rng = np.random.default_rng([config.seed, step, index])
        draws.append([wrong[i] for i in _rounds(rng, len(wrong), config.contrastive_count)])
    return draws


def _parts(z: PrivilegedContext) -> tuple[bool, bool]:
    return z.demonstration is not None, z.feedback is not None


def _group_keys(prompts: Sequence[Prompt], group_size: int) -> list[str]:
    """`prompt_key` of each sample's group, whose prompts an environment may word differently."""
    firsts = [prompt_key(prompt) for prompt in prompts[::group_size]]
    return [firsts[i // group_size] for i in range(len(prompts))]
