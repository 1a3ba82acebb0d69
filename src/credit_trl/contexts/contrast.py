"""Which other questions x'_k a sample is compared with (line 3 of Algorithm 1).

A draw depends on `(seed, step, sample)` and on the questions that may be drawn, not on the number of processes: each
sample has a random stream of its own, and its index is that in the global batch."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from datasets import Dataset

from credit_trl.config import CreditConfig
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.contexts.prompts import Prompt, user_text, without_question
from credit_trl.rollout.batch import GenerationBatch


def prompt_key(prompt: str | list[dict[str, Any]]) -> str:
    """What makes two prompts the same question: their content, whatever the order of a message's keys."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)


def draw_from_batch(
    keys: Sequence[str],
    samples: Sequence[int],
    count: int,
    *,
    seed: int,
    step: int,
    eligible: Sequence[bool] | None = None,
) -> list[list[int]]:
    """Draw `count` other questions for each of `samples`, uniformly from the distinct questions of the batch.

    Args:
        keys: `prompt_key` of every sample of the global generation batch, in the order of the samples.
        samples: global indices of the samples to draw for.
        count: C.
        seed: the run's seed.
        step: which generation batch this is.
        eligible: which samples may be drawn, by default all.

    Returns:
        For each sample, `count` indices into `keys`, never of its own question or a duplicate of it; without
        replacement while enough questions exist, then again from all of them. Empty where no other question exists.
    """
    first: dict[str, int] = {}
    for index, key in enumerate(keys):
        if eligible is None or eligible[index]:
            first.setdefault(key, index)
    draws = []
    for sample in samples:
        others = [index for key, index in first.items() if key != keys[sample]]
        rng = np.random.default_rng([seed, step, sample])
        draws.append([others[i] for i in _rounds(rng, len(others), count)])
    return draws


def draw_within_groups(
    keys: Sequence[str], groups: Sequence[Any], samples: Sequence[int], count: int, *, seed: int, step: int
) -> list[list[int]]:
    """Like `draw_from_batch`, from the samples of the same group only.

    Args:
        keys, samples, count, seed, step: as above.
        groups: which group every sample of the batch belongs to, such as its task.
    """
    draws: dict[int, list[int]] = {}
    for group in dict.fromkeys(groups[sample] for sample in samples):
        members = [sample for sample in samples if groups[sample] == group]
        eligible = [other == group for other in groups]
        drawn = draw_from_batch(keys, members, count, seed=seed, step=step, eligible=eligible)
        draws.update(zip(members, drawn, strict=True))
    return [draws[sample] for sample in samples]


def draw_nearest(
    keys: Sequence[str], texts: Sequence[str], samples: Sequence[int], count: int, *, seed: int, step: int
) -> list[list[int]]:
    """The `count` other questions of the batch that are most similar to the sample's, the nearest first.

    Args:
        keys, samples, count, seed, step: as above; chance decides between questions that are equally near.
        texts: the question of every sample of the batch.

    Returns:
        As above; where the batch has fewer other questions, the nearest come again.
    """
    first: dict[str, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    distinct = list(first.values())
    row = {key: i for i, key in enumerate(first)}
    similarity = text_similarity([texts[index] for index in distinct])
    draws = []
    for sample in samples:
        own = row[keys[sample]]
        chance = np.random.default_rng([seed, step, sample]).permutation(len(distinct))
        order = [i for i in np.lexsort((chance, -similarity[own].round(9))) if i != own]
        draws.append([distinct[order[i % len(order)]] for i in range(count)] if order else [])
    return draws


def text_similarity(texts: Sequence[str]) -> np.ndarray:
    """(n, n) cosines of the texts' word counts, each weighted with `1 + log((1 + n) / (1 + texts with the word))`.

    A text without a word is similar to none.
    """
    counts = [Counter(re.findall(r"\w+", text.casefold())) for text in texts]
    containing = Counter(word for words in counts for word in words)
    column = {word: i for i, word in enumerate(containing)}
    weight = 1.0 + np.log((1 + len(texts)) / (1 + np.array(list(containing.values()), dtype=float)))
    similarity = np.zeros((len(texts), len(texts)))
    vectors = []
    for words in counts:
        columns = np.array([column[word] for word in words], dtype=int)
        values = np.array(list(words.values()), dtype=float) * weight[columns]
        vectors.append((columns, values / max(np.linalg.norm(values), 1e-12)))
    for i, (columns, values) in enumerate(vectors):
        dense = np.zeros(len(column))
        dense[columns] = values
        for j, (others, other_values) in enumerate(vectors[: i + 1]):
            similarity[i, j] = similarity[j, i] = dense[others] @ other_values
    return similarity


def draw_from_dataset(
    prompts: Sequence[Any], keys: Sequence[str], samples: Sequence[int], count: int, *, seed: int, step: int
) -> list[list[int]]:
    """Like `draw_from_batch`, uniformly from the rows of a dataset.

    Args:
        prompts: the dataset's prompt column; rows are read as they are drawn.
        keys: `prompt_key` of every sample of the global generation batch.
        samples: global indices of the samples to draw for.
        count, seed, step: as above.

    Returns:
        For each sample, `count` row numbers of `prompts`, all of different questions while the dataset has enough;
        empty where it has no other question.
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
    """A few independent draws first, which nearly always suffice; then every row, for data that repeat themselves."""
    if population:
        yield from (int(row) for row in rng.integers(population, size=16))
        yield from (int(row) for row in rng.permutation(population))


def _rounds(rng: np.random.Generator, population: int, count: int) -> list[int]:
    """`count` numbers below `population`: whole permutations one after another, the last one cut."""
    picks: list[int] = []
    while population and len(picks) < count:
        picks.extend(rng.permutation(population)[: count - len(picks)].tolist())
    return picks


# Another problem's hint for the teacher is drawn from random streams beyond those of the contrasts.
_FOREIGN_STREAM = 2**32


def draw_contrasts(rollouts: GenerationBatch, config: CreditConfig, dataset: Any, step: int) -> list[list[Prompt]]:
    """The other questions x'_k of each local sample; empty lists where there are none. Every process must call it.

    Args:
        rollouts: the generation batch.
        config: C, λ, the source and the seed.
        dataset: the rows to draw from with `contrastive_source="dataset"`.
        step: which generation batch this is.
    """
    if not config.contrasts:
        return [[] for _ in rollouts.prompts]
    if config.contrastive_source == "none":
        return [[without_question(prompt)] for prompt in rollouts.prompts]
    from_dataset = config.contrastive_source == "dataset"
    prompts: Sequence[Prompt] = gather_object(rollouts.asked() if from_dataset else rollouts.prompts)
    keys = _question_keys(prompts, 1 if from_dataset else rollouts.group_size)
    options = {"samples": rollouts.indices, "count": config.contrastive_count, "seed": config.seed, "step": step}
    if config.contrastive_source == "batch":
        draws = draw_from_batch(keys, **options)
    elif config.contrastive_source == "hard":
        draws = draw_nearest(keys, [user_text(prompt) for prompt in prompts], **options)
    elif config.contrastive_source == "same_task":
        draws = draw_within_groups(keys, gather_object([row["task"] for row in rollouts.rows]), **options)
    else:
        prompts = dataset["prompt"] if isinstance(dataset, Dataset) else []
        draws = draw_from_dataset(prompts, keys, **options)
    return [[prompts[i] for i in drawn] for drawn in draws]


def _question_keys(prompts: Sequence[Prompt], group_size: int) -> list[str]:
    """What tells questions apart, for the global batch: the rollouts of a row ask the same one, in whatever words an
    environment's `reset` put it for each.
    """
    firsts = [prompt_key(prompt) for prompt in prompts[::group_size]]
    return [firsts[i // group_size] for i in range(len(prompts))]


def draw_hints(
    rollouts: GenerationBatch, privileged: Sequence[PrivilegedContext], count: int, *, seed: int, step: int
) -> list[list[PrivilegedContext]]:
    """What other problems' rollouts were shown, `count` of them for each local sample; empty lists where nothing was.

    Every process must call it.

    Args:
        rollouts: the generation batch.
        privileged: z of each local sample.
        count: hints a sample.
        seed, step: as in `draw_from_batch`.
    """
    keys = _question_keys(gather_object(rollouts.prompts), rollouts.group_size)
    hints: list[PrivilegedContext] = gather_object(list(privileged))
    shown = [bool(hint) for hint in hints]
    draws = draw_from_batch(keys, rollouts.indices, count, seed=seed, step=step, eligible=shown)
    return [[hints[i] for i in drawn] for drawn in draws]
