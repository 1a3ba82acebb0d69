"""Contexts of a generation batch: (x, z) and (x'_k, z) of every sample, as token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset

from credit_trl.config import CreditConfig
from credit_trl.contexts.builder import ContextBuilder, SlottedIds
from credit_trl.contexts.contrast import ContrastBatch, draw_contrasts, source_columns
from credit_trl.contexts.prompts import Render, row_prompt, share_images
from credit_trl.contexts.tokens import PrivilegedContext, TokenContexts, demonstration_text
from credit_trl.rollout.batch import GenerationBatch, Prompt, is_successful
from credit_trl.rollout.thinking import decode_with_marks, opening_mark


def build_contexts(batch: GenerationBatch, builder: ContextBuilder) -> list[TokenContexts]:
    """Teacher and contrast contexts of the local samples. Every process must call it.

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
            render = None if isinstance(prompt, str) else partial(builder.render, tools=tools or None)
            built = place_turns(built, batch.completion_ids[i], batch.turn_starts[i], builder, render)
        contexts.append(built)
    return contexts


def gather_contrast_batch(batch: GenerationBatch, builder: ContextBuilder) -> ContrastBatch:
    """The generation batch of all processes with z of every sample. Every process must call it."""
    config = builder.config
    columns = source_columns(builder.source) if builder.source else []
    texts = decode_with_marks(builder.tokenizer, batch.completion_ids, builder.marks)
    tools = batch.tools or [None] * len(texts)
    by_turn = batch.turn_feedback if batch.turn_starts else [None] * len(texts)
    samples = zip(texts, batch.prompts, tools, batch.feedback, by_turn, strict=True)
    local = []
    shared: dict[str, Any] = {}  # images by their content: pickling stores the same object once
    for (text, prompt, own, feedback, turns), row in zip(samples, batch.rows, strict=True):
        opened = opening_mark(builder.student_text(prompt, own), builder.marks) != ""
        answer = demonstration_text(text, config.teacher_context, builder.marks, opened=opened)
        rollout = PrivilegedContext(answer, feedback, turns or None)
        both = (share_images(one, shared) for one in (prompt, row_prompt({"prompt": prompt, **row})))
        local.append((*both, rollout, [row[name] for name in columns]))
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
        dataset=_RowPrompts(batch.dataset) if isinstance(batch.dataset, Dataset | Mapping) else (),
        columns={name: [own[k] for own in values] for k, name in enumerate(columns)},
    )
    return replace(gathered, privileged=[_privileged_context(gathered, i, config) for i in range(len(prompts))])


class _RowPrompts(Sequence):
    """The prompts of a dataset with their images, read as they are indexed."""

    def __init__(self, dataset: Dataset | Mapping[str, Sequence[Any]]) -> None:
        names = [name for name in ("prompt", "images", "image") if name in getattr(dataset, "column_names", dataset)]
        is_transformed = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
        self.rows = dataset if is_transformed else {name: dataset[name] for name in names}

    def __len__(self) -> int:
        return len(self.rows["prompt"] if isinstance(self.rows, dict) else self.rows)

    def __getitem__(self, row: int) -> Prompt:
        if isinstance(self.rows, dict):
            return row_prompt({name: values[row] for name, values in self.rows.items()})
        return row_prompt(self.rows[row])


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


def turn_message(builder: ContextBuilder, render: Render | None) -> tuple[SlottedIds, list[int]]:
    """The message with a slot for feedback in the middle of a conversation, and the generation prompt after it.

    Raises:
        ValueError: the template rewrites earlier messages when a user message is appended.
    """
    text = builder.config.feedback_template.format(feedback_raw=builder.slots["feedback"]).strip()
    if render is None:  # plain text has nothing around the feedback
        return builder.slotted(text), []
    answer = builder.slots["demonstration"]
    dialogue = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
    asked = [*dialogue, {"role": "user", "content": text}]
    ended = render(dialogue, add_generation_prompt=False).split(answer)[-1]
    closed = render(asked, add_generation_prompt=False)
    opened = render(asked)
    added = closed.split(answer)[-1]
    if not (added.startswith(ended) and added.count(text) == 1 and opened.startswith(closed)):
        raise ValueError(
            "The chat template does not append a user message to the conversation before it, where feedback on a turn "
            "would stand. Return it as `Verdict.feedback`, or use a template whose turns end alike in every position."
        )
    return builder.slotted(added[len(ended) :]), builder.tokenize(opened[len(closed) :])


def place_turns(
    contexts: TokenContexts,
    completion_ids: Sequence[int],
    starts: Sequence[int],
    builder: ContextBuilder,
    render: Render | None,
) -> TokenContexts:
    """Contexts of one completion with its feedback on single turns, each as a user message right before the turn.

    A turn is a run of the policy's own tokens; tool and environment output stands between turns. The teacher scores
    turn k with the feedback on it, and earlier turns without:

        student   x            turn 0   tool   turn 1
        teacher   (x, z) [z_0] turn 0   tool   [z_1] turn 1
        contrast  (x', z) [z_0] turn 0  tool   [z_1] turn 1

    Ids of a message belong to the prompt, and `TokenContexts.insert_at` tells the scoring pass where they stand. All
    messages together get `max_reprompt_len` tokens in equal shares; a longer message loses its middle, and is dropped
    where that is not enough.

    Args:
        contexts: contexts with the opening prompt only; `privileged.turns` holds the feedback.
        starts: first column of each turn.
        render: renders the conversation; None for plain text.

    Raises:
        ValueError: a turn does not begin with the template's generation prompt, or see `turn_message`.
    """
    message, opening = turn_message(builder, render)
    feedback = sorted(contexts.privileged.turns.items())
    prompts = [contexts.teacher, *contexts.contrasts]
    inserted: list[int] = []
    columns: list[int] = []
    cut = contexts.cut
    for turn, text in feedback:
        share = builder.config.max_reprompt_len // len(feedback)
        ids, _, fitted = builder.fit(lambda _: message, PrivilegedContext(feedback=text), share)
        cut = cut or fitted.feedback != text
        if ids is None:
            continue
        if starts[turn] == 0:
            ends = [_opening_start(prompt, opening, turn) for prompt in prompts]
            prompts = [prompt[:end] + ids + prompt[end:] for prompt, end in zip(prompts, ends, strict=True)]
        else:
            inserted += ids
            columns += [_opening_start(completion_ids[: starts[turn]], opening, turn)] * len(ids)
    teacher, *contrasts = (prompt + inserted for prompt in prompts)
    insert_at = [[0] * len(prompt) + columns for prompt in prompts]
    return replace(contexts, teacher=teacher, contrasts=contrasts, insert_at=insert_at, cut=cut)


def _opening_start(ids: Sequence[int], opening: list[int], turn: int) -> int:
    """Index at which the generation prompt starts that ends the ids before a turn."""
    start = len(ids) - len(opening)
    if start < 0 or list(ids[start:]) != opening:
        raise ValueError(
            f"Turn {turn} does not begin with the chat template's generation prompt, where its feedback would stand. "
            "Let the `rollout_func` open each turn as the template does, or return `Verdict.feedback`."
        )
    return start
