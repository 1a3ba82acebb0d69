"""Responses to analyse: sampled and graded from a task, or taken from a running trainer."""

from __future__ import annotations

import base64
import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from typing import Any

import torch

from credit_trl.config import CreditConfig
from credit_trl.contexts.contrast import Contrast, ContrastBatch, draw_contrasts, find_source
from credit_trl.contexts.gather import gather_contrast_batch
from credit_trl.contexts.images import thumbnail
from credit_trl.contexts.prompts import Prompt
from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.evaluation.config import SamplingConfig
from credit_trl.evaluation.generation import read_responses
from credit_trl.evaluation.protocol import distinct_names
from credit_trl.evaluation.verdicts import task_verdicts
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.tokentext import visible
from credit_trl.lab.analysis.vocabulary_logps import RolloutContexts
from credit_trl.rollout.batch import GenerationBatch, prompt_key
from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.registry import Task


@dataclass(frozen=True)
class Rollout:
    """One response with the values that its credit depends on."""

    identifier: str  # unique among the responses of one view
    prompt: Prompt  # x
    token_ids: tuple[int, ...]  # y, the sampled ids, end of turn included
    privileged: PrivilegedContext  # z
    contrasts: tuple[Prompt, ...] = ()  # x'_1, …, x'_C; may be empty
    reward: float | None = None  # of the verifier
    # Prompts that a trainer built; `prompt`, `privileged` and `contrasts` are then only shown.
    contexts: RolloutContexts | None = None
    images: tuple[tuple[str, ...], ...] = ((),)  # `data_url` of those of x and of each x'_k; `prompt` has keys of them

    @property
    def group(self) -> str:
        """Key of the group: rollouts of the same prompt."""
        return prompt_key(self.prompt)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Rollout:
        record = dict(record)
        contexts = record.pop("contexts", None)
        z = record.pop("privileged")
        stored_turns = z.get("turns") or {}
        turns = dict(zip(map(int, stored_turns), stored_turns.values(), strict=True))  # JSON has no integer keys
        return cls(
            token_ids=tuple(record.pop("token_ids")),
            privileged=PrivilegedContext(z.get("demonstration"), z.get("feedback"), turns or None),
            contrasts=tuple(record.pop("contrasts")),
            contexts=None if contexts is None else RolloutContexts(**contexts | {"images": ()}),  # are not stored
            images=tuple(map(tuple, record.pop("images", ((),)))),
            **record,
        )


def data_url(image: Any, size: int = 256) -> str:
    """A picture of at most `size` pixels a side for a page; empty for what is no image of Pillow."""
    if not hasattr(image, "thumbnail"):
        return ""
    buffer = BytesIO()
    thumbnail(image, size).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def feedback_text(response: Rollout) -> str | None:
    """Feedback of a response with that on single turns, control characters spelled out; None without feedback."""
    z = response.privileged
    parts = [] if z.feedback is None else [z.feedback]
    for turn, text in sorted((z.turns or {}).items()):
        parts.append(f"turn {turn}: {text}")
    return "\n".join(map(visible, parts)) if parts else None


def analysis_config(**overrides: Any) -> CreditConfig:
    """`CreditConfig` for measurements: contrast prompts come from the data set, nothing is trained or reported."""
    quiet = {
        "bf16": False,
        "gradient_accumulation_steps": 2,  # two prompts a batch, which `contrastive_source="batch"` requires
        "gradient_checkpointing": None,
        "report_to": "none",
        "contrastive_source": "dataset",
        "use_cpu": not torch.accelerator.is_available(),
    }
    return CreditConfig("analysis", **{**quiet, **overrides})


class NoTeacherError(ValueError):
    """A response has no privileged context that the teacher could read."""


def teacher_contexts(
    responses: Sequence[Rollout], config: CreditConfig, checkpoint: Checkpoint
) -> list[RolloutContexts | None]:
    """`rollout_contexts` of each response; None without tokens or a teacher's prompt.

    Raises:
        ValueError: no response has a contrast prompt that fits `max_reprompt_len`.
    """
    contexts: list[RolloutContexts | None] = [None] * len(responses)
    for position, response in enumerate(responses):
        if response.token_ids:
            with suppress(NoTeacherError):
                contexts[position] = rollout_contexts(response, config, checkpoint)
    built = [prompts for prompts in contexts if prompts is not None]
    if built and not any(prompts.contrasts for prompts in built):
        raise ValueError(
            "The responses have no contrast prompt that fits, which S_t needs. Sample them from more prompts, or "
            "raise `max_reprompt_len`."
        )
    return contexts


def rollout_contexts(response: Rollout, config: CreditConfig, checkpoint: Checkpoint) -> RolloutContexts:
    """Prompts of a response as token ids: `response.contexts`, or built as the trainer builds them.

    Raises:
        NoTeacherError: the response has neither demonstration nor feedback, or nothing of them fits
            `max_reprompt_len`.
    """
    if response.contexts is not None:
        return response.contexts
    if not response.privileged:
        raise NoTeacherError(
            f"Response {response.identifier!r} has neither feedback nor a demonstration, so it has no teacher and no "
            "credit. Add feedback, or sample more rollouts of its prompt until one succeeds."
        )
    config = copy.copy(config)
    config.contrastive_count = len(response.contrasts) or 1
    contrasts = list(map(Contrast, response.contrasts))
    built = checkpoint.context_builder(config).build(response.prompt, response.privileged, contrasts)
    if built.teacher is None:
        raise NoTeacherError(
            f"Response {response.identifier!r}: nothing of its feedback fits into `max_reprompt_len="
            f"{config.max_reprompt_len}` beside the prompt. Raise it."
        )
    return RolloutContexts(checkpoint.encode(response.prompt), built.teacher, built.contrasts)


def grade_rollouts(
    checkpoint: Checkpoint, task: Task, rows: Sequence[dict[str, Any]], token_ids: Sequence[Sequence[int]]
) -> list[Verdict]:
    """Verdicts of sampled ids by one call of the task's reward function; `rows` are the data set rows of each."""
    prompts = [row["prompt"] for row in rows]
    prompt_ids = list(map(checkpoint.encode, prompts))
    ends = checkpoint.end_ids()
    responses = read_responses(checkpoint.tokenizer, prompts, prompt_ids, token_ids, ends, checkpoint.marks)
    return task_verdicts(task, rows, responses)


def sample_rollouts(
    checkpoint: Checkpoint,
    task: Task,
    rows: Sequence[dict[str, Any]],
    config: CreditConfig,
    *,
    samples: int = 2,
    population: Sequence[Prompt] | None = None,
) -> list[Rollout]:
    """Sample and grade responses, and add z and contrast prompts as for one generation batch of the trainer.

    Sample i draws from the random stream `[config.seed, i]`, see `evaluation.generate_ids`.

    Args:
        checkpoint: model that samples the responses.
        task: task that grades them.
        rows: rows of the task's data set.
        config: temperature, lengths, seed, parts of z, C, source of the contrast prompts.
        samples: rollouts of a row.
        population: prompts of `contrastive_source="dataset"`; None takes those of `rows`. Other sources draw from the
            sampled batch.

    Returns:
        `len(rows) * samples` responses, groups contiguous. Those without z have no teacher.
    """
    repeated = [row for row in rows for _ in range(samples)]
    sampling = SamplingConfig(
        config.temperature, top_p=1.0, max_completion_length=config.max_completion_length, seed=config.seed
    )
    prompts = [checkpoint.encode(row["prompt"]) for row in repeated]
    token_ids = checkpoint.generate(prompts, sampling)
    verdicts = grade_rollouts(checkpoint, task, repeated, token_ids)
    return graded_rollouts(checkpoint, rows, token_ids, verdicts, config, population)


def graded_rollouts(
    checkpoint: Checkpoint,
    rows: Sequence[dict[str, Any]],
    token_ids: Sequence[Sequence[int]],
    verdicts: Sequence[Verdict],
    config: CreditConfig,
    population: Sequence[Prompt] | None = None,
) -> list[Rollout]:
    """Rollouts with z and contrast prompts of responses that are sampled and graded; see `sample_rollouts`.

    `token_ids` and `verdicts` have as many entries for each row, those of a row together. Of several processes, each
    has all of them.
    """
    samples = len(token_ids) // len(rows)
    repeated = [row for row in rows for _ in range(samples)]
    population = [row["prompt"] for row in rows] if population is None else population
    batch = GenerationBatch(
        rows=repeated,
        prompts=[row["prompt"] for row in repeated],
        completion_ids=token_ids,
        rewards=[float(verdict) for verdict in verdicts],
        verdict_feedback=[verdict.feedback for verdict in verdicts],
        first=0,
        group_size=samples,
        dataset={"prompt": population},
    )
    gathered = gather_contrast_batch(batch, checkpoint.context_builder(with_contrasts(config)))
    contrasts = _draw(gathered, config)
    ids = []
    for number, row in enumerate(rows):
        identifier = row.get("id")
        ids.append(visible(str(number if identifier is None else identifier)))
    names = distinct_names(ids)
    rollouts = []
    for i, row in enumerate(repeated):
        rollout = Rollout(
            identifier=f"{names[i // samples]}/{i % samples}",
            prompt=row["prompt"],
            token_ids=tuple(token_ids[i]),
            privileged=gathered.privileged[i],
            contrasts=tuple(contrasts[i]),
            reward=verdicts[i].reward,
        )
        rollouts.append(rollout)
    return rollouts


def draw(prompts: Sequence[Prompt], population: Sequence[Prompt], config: CreditConfig) -> list[list[Prompt]]:
    """Contrast prompts of each prompt, drawn as in the trainer's first generation batch, also with λ = 0.

    Args:
        prompts: prompts of the batch.
        population: prompts of the source `"dataset"`.
        config: source, C and seed.
    """
    nothing = [PrivilegedContext()] * len(prompts)
    unknown = [None] * len(prompts)
    return _draw(ContrastBatch(0, 1, prompts, prompts, nothing, nothing, unknown, population), config)


def _draw(batch: ContrastBatch, config: CreditConfig) -> list[list[Prompt]]:
    source = find_source(config.contrastive_source)
    prompts = []
    for sample in range(len(batch.prompts)):
        contrasts = islice(draw_contrasts(source, batch, sample, config.seed), config.contrastive_count)
        prompts.append([contrast.prompt for contrast in contrasts])
    return prompts


def with_contrasts(config: CreditConfig) -> CreditConfig:
    """The configuration with λ ≠ 0: λ = 0 draws no contrast prompts, and S_t needs them."""
    config = copy.copy(config)
    config.contrastive_coef = config.contrastive_coef or 1.0
    return config
