"""Contexts of a generation batch: (x, z) and (x'_k, z) of every sample, as token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from accelerate.utils import gather_object
from datasets import Dataset

from credit_trl.config import CreditConfig
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.contrast import ContrastBatch, draw_contrasts, source_columns
from credit_trl.contexts.privileged import PrivilegedContext, demonstration_text
from credit_trl.contexts.tokens import TokenContexts
from credit_trl.contexts.turns import place_turns
from credit_trl.rollout.batch import GenerationBatch, is_successful
from credit_trl.rollout.thinking import decode_with_marks, opening_mark


def build_contexts(batch: GenerationBatch, builder: ContextBuilder) -> list[TokenContexts]:
    """Teacher and contrast contexts of the local samples. Every process must call it.

    Args:
        batch: the generation batch, with its turns where rollouts have several.
        builder: turns prompts and z into token ids; its configuration chooses z and the contrasts.

    Raises:
        ValueError: turn feedback cannot be placed.
    """
    gathered = gather_contrast_batch(batch, builder)
    contexts = []
    for i, sample in enumerate(batch.indices):
        prompt = batch.prompts[i]
        tools = batch.tools[i] if batch.tools else None
        drawn = draw_contrasts(builder.source, gathered, sample, builder.config.seed) if builder.source else ()
        built = builder.build(prompt, gathered.privileged[sample], drawn, tools=tools)
        if built.teacher is not None and built.privileged.turns:
            render = None if isinstance(prompt, str) else partial(builder.render, tools=tools)
            built = place_turns(built, batch.completion_ids[i], batch.turn_starts[i], builder, render)
        contexts.append(built)
    return contexts


def gather_contrast_batch(batch: GenerationBatch, builder: ContextBuilder) -> ContrastBatch:
    """The generation batch of all processes with z of every sample. Every process must call it."""
    config = builder.config
    columns = source_columns(builder.source) if builder.source else []
    texts = decode_with_marks(builder.tokenizer, batch.completion_ids, builder.marks)
    tools = batch.tools or [None] * len(texts)
    samples = zip(texts, batch.prompts, tools, batch.feedback, batch.feedback_by_turn, strict=True)
    local = []
    for (text, prompt, own, feedback, turns), row in zip(samples, batch.rows, strict=True):
        opened = opening_mark(builder.student_text(prompt, own), builder.marks) != ""
        answer = demonstration_text(text, config.teacher_context, builder.marks, opened=opened)
        rollout = PrivilegedContext(answer, feedback, turns)
        local.append((prompt, row.get("prompt", prompt), rollout, [row[name] for name in columns]))
    prompts, dataset_prompts, rollouts, values = (list(one) for one in zip(*gather_object(local), strict=True))
    successes = is_successful(batch.rewards, config.success_reward_threshold)
    gathered = ContrastBatch(
        index=batch.index,
        group_size=batch.group_size,
        prompts=prompts,
        dataset_prompts=dataset_prompts,
        privileged=[],
        rollouts=rollouts,
        successes=[None if reward != reward else ok for reward, ok in zip(batch.rewards, successes, strict=True)],
        dataset=batch.dataset["prompt"] if isinstance(batch.dataset, Dataset | Mapping) else (),
        columns={name: [own[k] for own in values] for k, name in enumerate(columns)},
    )
    return replace(gathered, privileged=[_privileged_context(gathered, i, config) for i in range(len(prompts))])


def _privileged_context(batch: ContrastBatch, sample: int, config: CreditConfig) -> PrivilegedContext:
    """z of one sample, by the options that choose its parts.

    Its demonstration is the first successful rollout of its group that has an answer.
    """
    if config.teacher_prompt == "student":
        return PrivilegedContext()
    own = batch.rollouts[sample]
    hidden = {sample} if config.dont_reprompt_on_self_success else {}
    answers = (batch.rollouts[i].demonstration for i in batch.group(sample) if batch.successes[i] and i not in hidden)
    shown = next((answer for answer in answers if answer is not None), None)
    z = replace(own, demonstration=shown if config.use_successful_as_teacher else None)
    only_solution = config.environment_feedback_only_without_solution and z.demonstration is not None
    if only_solution or not config.include_environment_feedback:
        return PrivilegedContext(z.demonstration)
    return z


def ignored_feedback(batch: GenerationBatch, config: CreditConfig) -> tuple[bool, list[int]]:
    """Whether any process has feedback that `include_environment_feedback` ignores, and `missing_turns` of all.

    Every process must call it.
    """
    is_ignored = not config.include_environment_feedback and any(batch.feedback)
    ignored, missing = zip(*gather_object([(is_ignored, batch.missing_turns)]), strict=True)
    return any(ignored), [turn for turns in missing for turn in turns]
