"""Contrasts (line 3 of Algorithm 1): the registry of sources, and the draws of one sample.

A source is a function of the generation batch, a sample and a random stream, with no other state; CONTRIBUTING.md has
an example. Its stream is keyed by `(seed, batch.index, sample)`, with the index of the sample in the global batch, so
that a draw does not depend on the number of processes.
"""

import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from credit_trl.contexts.prompts import images_of, with_images
from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.rollout.batch import Prompt, content_key, prompt_key
from credit_trl.sandbox.user_code import explained, explained_errors

T = TypeVar("T")


@dataclass(frozen=True)
class Contrast:
    """One contrast of a sample. A source may return the prompt alone in its place."""

    prompt: Prompt  # x'
    privileged: PrivilegedContext | None = None  # z'; None for the sample's own z


@dataclass(frozen=True)
class ContrastBatch:
    """The generation batch of all processes, as a source reads it.

    Args:
        index: ordinal of the generation batch.
        group_size: rollouts of a dataset row; groups are contiguous.
        prompts: x of every sample, after `reset()` of its environment, if any.
        dataset_prompts: x of every sample as in the dataset.
        privileged: z of every sample.
        rollouts: answer and feedback of every sample's own rollout, in the form of z.
        successes: whether every sample's reward reaches the threshold; None without a reward.
        dataset: the prompts of the whole dataset, read as they are indexed; empty for a stream.
        columns: the dataset columns that the source takes, one entry for each sample.
    """

    index: int
    group_size: int
    prompts: Sequence[Prompt]
    dataset_prompts: Sequence[Prompt]
    privileged: Sequence[PrivilegedContext]
    rollouts: Sequence[PrivilegedContext]
    successes: Sequence[bool | None]
    dataset: Sequence[Prompt] = ()
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def group(self, sample: int) -> range:
        """Indices of the samples of the same dataset row."""
        start = sample // self.group_size * self.group_size
        return range(start, min(start + self.group_size, len(self.prompts)))

    @cached_property
    def keys(self) -> list[str]:
        """Key of every sample's prompt; an environment may word the prompts of a group differently."""
        return list(map(prompt_key, self.prompts))

    def other_prompts(self, sample: int) -> list[Prompt]:
        """The distinct first prompts of all groups in their order, without the prompts of the sample's own group."""
        group = self.group(sample)
        group_keys = self.keys[group.start : group.stop]
        excluded = {prompt_key(self.dataset_prompts[sample]), *group_keys}
        prompts = {}
        for start in range(0, len(self.prompts), self.group_size):
            key = self.keys[start]
            if key not in excluded:
                prompts[key] = self.prompts[start]
        return list(prompts.values())


# `source(batch, sample, rng)`, with the dataset columns that it reads as further parameters. It returns prompts or
# `Contrast`s, lazily or as a list, in the order of the draw: the first C whose context fits the budget are taken. With
# fewer they repeat; with none the sample has no contrast.
Source = Callable[..., Iterable[Prompt | Contrast]]


def find_source(name: str) -> Source:
    """The source of a registered name or of `"module:function"`.

    Raises:
        ValueError: there is no such source.
    """
    if name in SOURCES:
        return SOURCES[name]
    try:
        source = pkgutil.resolve_name(name)
        inspect.signature(source).bind_partial("batch", "sample", "rng")
        return source
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"`contrastive_source` must be {', '.join(map(repr, SOURCES))}, or 'module:function' for a function "
            f"`(batch, sample, rng)` of a module in PYTHONPATH; got {name!r} ({error})."
        ) from error
    except Exception as error:  # of its module
        raise explained(error, f"The contrast source {name!r}", "Correct its module.") from None


def source_columns(source: Source) -> list[str]:
    """Names of the dataset columns that a source takes: its parameters without a default after the first three."""
    parameters = list(inspect.signature(source).parameters.values())[3:]
    passed_by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    columns = []
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.kind in passed_by_name:
            columns.append(parameter.name)
    return columns


def draw_contrasts(source: Source, batch: ContrastBatch, sample: int, seed: int) -> Iterator[Contrast]:
    """Yield the contrasts of one sample in the order of the draw.

    Raises:
        TypeError: the source does not return prompts or `Contrast`s.
        ValueError: a contrast has the sample's own prompt and privileged context.
    """
    rng = np.random.default_rng([seed, batch.index, sample])
    sample_keys = (batch.keys[sample], prompt_key(batch.dataset_prompts[sample]))
    name = f"The contrast source {getattr(source, '__name__', source)!r}"
    fix = "Return a list of texts, lists of messages or `Contrast(prompt, privileged)`, or yield them."
    with explained_errors(name, "Correct it; `credit_trl.testing.check_source` calls it alone."):
        elements = source(batch, sample, rng, **batch.columns)
        if isinstance(elements, str) or not isinstance(elements, Iterable):
            raise TypeError(f"{name} returned a {type(elements).__name__}. {fix}")
        for element in elements:
            contrast = element if isinstance(element, Contrast) else Contrast(element)
            if not isinstance(contrast.prompt, str | list):
                raise TypeError(f"{name} returned an element of type {type(element).__name__}. {fix}")
            has_sample_z = contrast.privileged in (None, batch.privileged[sample])
            if has_sample_z and prompt_key(contrast.prompt) in sample_keys:
                raise ValueError(f"{name} returned the prompt of sample {sample} itself. Draw another prompt.")
            yield contrast


def shuffled(items: Sequence[T], rng: np.random.Generator) -> Iterator[T]:
    """Yield every item once in random order, then all again in another order, without end; nothing of no items."""
    while len(items):
        for i in rng.permutation(len(items)):
            yield items[i]


def from_batch(batch: ContrastBatch, sample: int, rng: np.random.Generator) -> Iterator[Prompt]:
    """The other prompts of the generation batch, uniformly, with one draw for all samples of a group."""
    *key, _ = rng.bit_generator.seed_seq.entropy
    group_rng = np.random.default_rng([*key, batch.group(sample).start])
    return shuffled(batch.other_prompts(sample), group_rng)


def from_dataset(batch: ContrastBatch, sample: int, rng: np.random.Generator) -> Iterator[Prompt]:
    """The other prompts of the whole dataset, uniformly over its rows, for batches with few prompts."""
    seen = {prompt_key(batch.dataset_prompts[sample])}

    def rows() -> Iterator[int]:
        """16 independent draws, which nearly always suffice, then a permutation of all rows."""
        yield from rng.integers(len(batch.dataset), size=16)
        yield from rng.permutation(len(batch.dataset))

    for row in rows() if len(batch.dataset) else ():
        prompt = batch.dataset[int(row)]
        if prompt_key(prompt) not in seen:
            seen.add(prompt_key(prompt))
            yield prompt


def other_images(batch: ContrastBatch, sample: int, rng: np.random.Generator) -> Iterator[Prompt]:
    """The sample's own prompt with the images of other prompts of the batch that have as many, uniformly."""
    prompt = batch.prompts[sample]
    sample_key = list(map(content_key, images_of(prompt)))
    choices = {}
    for images in _images_of_batch(batch):
        key = list(map(content_key, images))
        if len(key) == len(sample_key) and key != sample_key:
            choices[tuple(key)] = images
    return (with_images(prompt, images) for images in shuffled(list(choices.values()), rng))


def without_images(batch: ContrastBatch, sample: int, rng: np.random.Generator) -> list[Prompt]:
    """The sample's own prompt without its images: what the images explain, and the text does not."""
    prompt = batch.prompts[sample]
    has_images = _images_of_batch(batch)[sample]
    return [with_images(prompt, [])] if has_images else []


def _images_of_batch(batch: ContrastBatch) -> list[list[Any]]:
    """Images of every sample.

    Raises:
        ValueError: no sample of the run's first batch has any.
    """
    images = [images_of(prompt) for prompt in batch.prompts]
    if batch.index == 0 and not any(images):
        raise ValueError(
            "`contrastive_source` exchanges or removes images, and no prompt of the first generation batch has any. "
            "Set `contrastive_source='batch'`, or train on prompts with images."
        )
    return images


# Registered sources by name.
SOURCES: dict[str, Source] = {"batch": from_batch, "dataset": from_dataset}
SOURCES |= {"other_images": other_images, "without_images": without_images}
