"""Contexts of a generation batch: z from the samples of all processes, then (x, z) and (x'_k, z) as token ids."""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset

from credit_trl.config import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.contrast import SOURCES, ContrastBatch, draw_contrasts, source_columns
from credit_trl.contexts.prompts import row_prompt, share_images
from credit_trl.contexts.tokens import PrivilegedContext, TokenContexts, demonstration_text
from credit_trl.contexts.turns import place_turns
from credit_trl.rollout.batch import GenerationBatch, Prompt, is_successful
from credit_trl.rollout.thinking import decode_with_marks, opening_mark


def build_contexts(batch: GenerationBatch, builder: ContextBuilder) -> list[TokenContexts]:
    """Teacher and contrast contexts of the local samples. Every process must call it.

    Raises:
        ValueError: turn feedback cannot be placed.
    """
    gathered = gather_contrast_batch(batch, builder)
    tools_of = batch.tools or [None] * len(batch.prompts)
    readable = gathered
    if builder.source is not None and builder.source not in SOURCES.values():  # a function of the user's may edit it
        readable = deepcopy(gathered, {id(gathered.dataset): gathered.dataset})
    contexts = []
    for i, sample in enumerate(batch.indices):
        prompt = batch.prompts[i]
        tools = tools_of[i]
        contrasts = ()
        if builder.source is not None:
            contrasts = draw_contrasts(builder.source, readable, sample, builder.config.seed)
        built = builder.build(prompt, gathered.privileged[sample], contrasts, tools=tools)
        if built.teacher is not None and built.privileged.turns:
            render = None
            if not isinstance(prompt, str):
                render = partial(builder.render, tools=tools or None)
            built = place_turns(built, batch.completion_ids[i], batch.turn_starts[i], builder, render)
        contexts.append(built)
    return contexts


@dataclass(frozen=True)
class GatheredSample:
    """What every process knows of one sample."""

    prompt: Prompt  # x, after `reset()` of its environment, if any
    dataset_prompt: Prompt  # x as in the dataset
    rollout: PrivilegedContext  # the sample's own answer and feedback, in the form of z
    is_successful: bool | None  # None without a reward
    columns: dict[str, Any]  # the dataset columns that the contrast source takes


def gather_contrast_batch(batch: GenerationBatch, builder: ContextBuilder) -> ContrastBatch:
    """The generation batch of all processes with z of every sample. Every process must call it."""
    column_names: list[str] = []
    if builder.source is not None:
        column_names = source_columns(builder.source)
    samples: list[GatheredSample] = gather_object(_local_samples(batch, builder, column_names))
    privileged = []
    for start in range(0, len(samples), batch.group_size):
        group = samples[start : start + batch.group_size]
        for sample in group:
            privileged.append(_privileged_context(sample, group, builder.config))
    columns = {}
    for name in column_names:
        columns[name] = [sample.columns[name] for sample in samples]
    dataset: Sequence[Prompt] = ()
    if isinstance(batch.dataset, Dataset | Mapping):
        dataset = _DatasetPrompts(batch.dataset)
    return ContrastBatch(
        index=batch.index,
        group_size=batch.group_size,
        prompts=[sample.prompt for sample in samples],
        dataset_prompts=[sample.dataset_prompt for sample in samples],
        privileged=privileged,
        rollouts=[sample.rollout for sample in samples],
        successes=[sample.is_successful for sample in samples],
        dataset=dataset,
        columns=columns,
    )


def _local_samples(
    batch: GenerationBatch, builder: ContextBuilder, column_names: Sequence[str]
) -> list[GatheredSample]:
    """Records of the samples of this process."""
    config = builder.config
    texts = decode_with_marks(builder.tokenizer, batch.completion_ids, builder.marks)
    feedback = batch.feedback
    successes = is_successful(batch.rewards, config.success_reward_threshold)
    tools_of = batch.tools or [None] * len(batch.prompts)
    shared_images: dict[str, Any] = {}  # by their content: pickling stores the same object once
    samples = []
    for i, (sample, row, prompt) in enumerate(zip(batch.indices, batch.rows, batch.prompts, strict=True)):
        turns = batch.turn_feedback[i] if batch.turn_starts else None
        student_text = builder.student_text(prompt, tools_of[i])
        is_open = opening_mark(student_text, builder.marks) != ""
        answer = demonstration_text(texts[i], config.teacher_context, builder.marks, opened=is_open)
        dataset_prompt = row_prompt({"prompt": prompt, **row})
        has_reward = not math.isnan(batch.rewards[sample])
        samples.append(
            GatheredSample(
                prompt=share_images(prompt, shared_images),
                dataset_prompt=share_images(dataset_prompt, shared_images),
                rollout=PrivilegedContext(answer, feedback[i], turns or None),
                is_successful=successes[sample] if has_reward else None,
                columns={name: row[name] for name in column_names},
            )
        )
    return samples


def _privileged_context(
    sample: GatheredSample, group: Sequence[GatheredSample], config: CreditConfig
) -> PrivilegedContext:
    """z of one sample, by the options that choose its parts."""
    if config.teacher_prompt == "student":
        return PrivilegedContext()
    demonstration = None
    if config.use_successful_as_teacher:
        demonstration = _demonstration(sample, group, config)
    suffices = config.environment_feedback_only_without_solution and demonstration is not None
    if suffices or not config.include_environment_feedback:
        return PrivilegedContext(demonstration)
    return replace(sample.rollout, demonstration=demonstration)


def _demonstration(sample: GatheredSample, group: Sequence[GatheredSample], config: CreditConfig) -> str | None:
    """The answer of the first successful rollout of the group that has one."""
    for sibling in group:
        if sibling is sample and config.dont_reprompt_on_self_success:
            continue
        if sibling.is_successful and sibling.rollout.demonstration is not None:
            return sibling.rollout.demonstration
    return None


class _DatasetPrompts(Sequence):
    """The prompts of a dataset with their images, read as they are indexed."""

    def __init__(self, dataset: Dataset | Mapping[str, Sequence[Any]]) -> None:
        column_names = getattr(dataset, "column_names", dataset)
        is_transformed = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
        self.dataset = dataset if is_transformed else None  # a transform forms whole rows
        self.columns = {}
        for name in ("prompt", "images", "image"):
            if name in column_names and not is_transformed:
                self.columns[name] = dataset[name]

    def __len__(self) -> int:
        if self.dataset is not None:
            return len(self.dataset)
        return len(self.columns["prompt"])

    def __getitem__(self, index: int) -> Prompt:
        if self.dataset is not None:
            return row_prompt(self.dataset[index])
        row = {}
        for name, values in self.columns.items():
            row[name] = values[index]
        return row_prompt(row)


def ignored_feedback(batch: GenerationBatch, config: CreditConfig) -> tuple[bool, list[int]]:
    """Whether any process has feedback that `include_environment_feedback` ignores, and `missing_turns` of all.

    Every process must call it.
    """
    has_ignored = not config.include_environment_feedback and any(batch.feedback)
    is_ignored = False
    missing_turns: list[int] = []
    for process_has_ignored, process_missing_turns in gather_object([(has_ignored, batch.missing_turns)]):
        is_ignored = is_ignored or process_has_ignored
        missing_turns += process_missing_turns
    return is_ignored, missing_turns
