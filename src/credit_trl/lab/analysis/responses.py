"""Responses to look at: sampled and graded from a task, read from a file, or taken from a running trainer."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from credit_trl.config import CreditConfig
from credit_trl.contexts import contrast
from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.contrast import draw_contrasts
from credit_trl.contexts.privileged import PrivilegedContext, gather_privileged_contexts
from credit_trl.contexts.prompts import Prompt, user_text
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.rollout.batch import GenerationBatch
from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.registry import Task, call_reward


@dataclass(frozen=True)
class ResponseContexts:
    """Token ids of the contexts that a response is read under.

    Args:
        student: x.
        teacher: (x, z).
        contrasts: (x'_k, z), C of them; C may be 0.
        columns: of teacher and contrasts: for each id the position of the response before which it stands; None where
            contexts precede the response. See `credit_trl.contexts.turns`.
    """

    student: list[int]
    teacher: list[int]
    contrasts: list[list[int]]
    columns: list[list[int]] | None = None


@dataclass(frozen=True)
class Response:
    """One rollout and what its credit is measured with.

    Args:
        identifier: unique among the responses that are shown together.
        prompt: x, conversational or plain text.
        token_ids: y, as sampled, the end of turn included.
        privileged: z.
        contrasts: x'_1, …, x'_C; empty where there is no other question.
        reward: of the verifier, or None.
        contexts: the contexts themselves, where a trainer has built them; they win over `prompt`, `privileged` and
            `contrasts`, which are then for the eye.
    """

    identifier: str
    prompt: Prompt
    token_ids: tuple[int, ...]
    privileged: PrivilegedContext
    contrasts: tuple[Prompt, ...] = ()
    reward: float | None = None
    contexts: ResponseContexts | None = None

    @property
    def group(self) -> str:
        """Rollouts of the same prompt form a group."""
        return contrast.prompt_key(self.prompt)

    @property
    def problem(self) -> str:
        return user_text(self.prompt)

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        return {**record, "evidence": record.pop("privileged")}  # the key of version 0.1.0

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Response:
        return cls(
            **{
                **{name: value for name, value in record.items() if name != "evidence"},
                "token_ids": tuple(record["token_ids"]),
                "privileged": PrivilegedContext(**record["evidence"]),
                "contrasts": tuple(record["contrasts"]),
                "contexts": ResponseContexts(**record["contexts"]) if record.get("contexts") else None,
            }
        )


def analysis_config(**overrides: Any) -> CreditConfig:
    """A `CreditConfig` for measuring: the contrasts come from the data set, nothing is trained or reported."""
    quiet = {
        "bf16": False,
        "gradient_accumulation_steps": 2,  # two problems a batch, as sources that draw from one want it
        "gradient_checkpointing": None,
        "report_to": "none",
        "contrastive_source": "dataset",
        "use_cpu": not torch.accelerator.is_available(),
    }
    return CreditConfig("analysis", **{**quiet, **overrides})


def build_contexts(response: Response, config: CreditConfig, checkpoint: Checkpoint) -> ResponseContexts:
    """The contexts of a response: those that it brings, or built as the trainer builds them.

    Raises:
        ValueError: there is neither demonstration nor feedback, so there is no teacher; or none of it fits.
    """
    if response.contexts is not None:
        return response.contexts
    if not response.privileged:
        raise ValueError(
            f"Response {response.identifier!r} has neither feedback nor a demonstration, so it has no teacher and no "
            "credit. Give it feedback, or sample more rollouts of its prompt so that one succeeds."
        )
    builder = ContextBuilder(checkpoint.tokenizer, config, sorted(checkpoint.end_ids()))
    prompts = [response.prompt, *response.contrasts]
    built = builder.build(prompts, response.privileged, checkpoint.render)
    if built.ids is None:
        raise ValueError(
            f"Response {response.identifier!r}: nothing of its feedback fits into `max_reprompt_len="
            f"{config.max_reprompt_len}` beside the prompt. Raise it."
        )
    teacher, *contrasts = built.ids
    return ResponseContexts(checkpoint.encode(response.prompt), teacher, contrasts)


@torch.no_grad()
def generate(
    checkpoint: Checkpoint,
    contexts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 64,
) -> list[list[int]]:
    """Sample a continuation of each context from the student's full distribution; ends of turn are kept.

    The global random state is left as it was.
    """
    model, device = checkpoint.student.student, checkpoint.student.accelerator.device
    ends = checkpoint.end_ids()
    pad = next(i for i in (checkpoint.tokenizer.pad_token_id, *sorted(ends), 0) if i is not None)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    continuations = []
    with torch.random.fork_rng(), checkpoint.student.active():
        torch.manual_seed(seed)
        for start in range(0, len(contexts), batch_size):
            batch = contexts[start : start + batch_size]
            longest = max(map(len, batch))
            padded = torch.tensor([[pad] * (longest - len(c)) + list(c) for c in batch], device=device)
            mask = torch.tensor([[0] * (longest - len(c)) + [1] * len(c) for c in batch], device=device)
            sequences = model.generate(
                input_ids=padded,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(ends) or None,
                pad_token_id=pad,
                **sampling,
            )
            continuations += [_up_to_end(row, ends) for row in sequences[:, longest:].tolist()]
    return continuations


def _up_to_end(ids: list[int], ends: set[int]) -> list[int]:
    for index, token in enumerate(ids):
        if token in ends:
            return ids[: index + 1]
    return ids


def grade(
    checkpoint: Checkpoint, task: Task, rows: Sequence[dict[str, Any]], token_ids: Sequence[Sequence[int]]
) -> list[Verdict]:
    """The task's verdicts of responses, one row of its data set each; the task sees one batch."""
    texts = checkpoint.tokenizer.batch_decode([list(ids) for ids in token_ids], skip_special_tokens=True)
    completions = [
        text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, texts, strict=True)
    ]
    ends = checkpoint.end_ids()
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    columns["truncated"] = [not ids or ids[-1] not in ends for ids in token_ids]
    verdicts = call_reward(task.reward, completions=completions, prompts=[row["prompt"] for row in rows], **columns)
    return [v if isinstance(v, Verdict) else Verdict(v) for v in verdicts]


def sample_responses(
    checkpoint: Checkpoint,
    task: Task,
    rows: Sequence[dict[str, Any]],
    config: CreditConfig,
    *,
    samples: int = 2,
    population: Sequence[Prompt] | None = None,
    batch_size: int = 64,
) -> list[Response]:
    """Roll out, grade, and gather z and contrasts, as one generation batch of the trainer would.

    Args:
        checkpoint: samples the responses.
        task: grades them.
        rows: of the task's data set.
        config: temperature, lengths, seed, which parts of z are used, C, the source of contrasts.
        samples: rollouts of a row.
        population: prompts that the source `"dataset"` draws from; by default those of `rows`. For the other sources
            the sampled rollouts are the batch.

    Returns:
        `len(rows) * samples` responses, groups contiguous. Those without privileged have no teacher.
    """
    repeated = [row for row in rows for _ in range(samples)]
    contexts = [checkpoint.encode(row["prompt"]) for row in repeated]
    options = {"temperature": config.temperature, "seed": config.seed, "batch_size": batch_size}
    token_ids = generate(checkpoint, contexts, max_new_tokens=config.max_completion_length, **options)
    verdicts = grade(checkpoint, task, repeated, token_ids)
    rollouts = GenerationBatch(
        rows=repeated,
        prompts=[row["prompt"] for row in repeated],
        completion_ids=[list(ids) for ids in token_ids],
        rewards=[float(verdict) for verdict in verdicts],
        verdict_feedback=[verdict.feedback for verdict in verdicts],
        first=0,
        group_size=samples,
    )
    decode = lambda ids: checkpoint.tokenizer.batch_decode(ids, skip_special_tokens=True)  # noqa: E731
    privileged = gather_privileged_contexts(rollouts, config, decode)
    population = [row["prompt"] for row in rows] if population is None else population
    contrasts = draw(rollouts.prompts, population, config, [row.get("task") for row in repeated])
    return [
        Response(
            f"{row.get('id', i // samples)}/{i % samples}", row["prompt"], tuple(y), z, tuple(others), verdict.reward
        )
        for i, (row, y, z, others, verdict) in enumerate(
            zip(repeated, token_ids, privileged, contrasts, verdicts, strict=True)
        )
    ]


def draw(
    prompts: Sequence[Prompt],
    population: Sequence[Prompt],
    config: CreditConfig,
    tasks: Sequence[str | None] | None = None,
) -> list[list[Prompt]]:
    """The contrasts of each prompt, as the trainer draws them for one generation batch; with λ = 0 too.

    Args:
        prompts: the batch.
        population: what the source `"dataset"` draws from.
        config: source, C and seed.
        tasks: of each prompt, for the source `"same_task"`.

    Raises:
        ValueError: the source is `"same_task"` and a prompt's task is not known, or the run exchanges hints.
    """
    if config.contrastive_swap == "hint" or config.teacher_hint == "foreign":
        raise ValueError(
            "`contrastive_swap='hint'` and `teacher_hint='foreign'` take hints of the run's own rollouts: map such a "
            "run with `CreditMapCallback` while it trains."
        )
    if config.contrastive_source == "dataset":
        keys = [contrast.prompt_key(prompt) for prompt in prompts]
        draws = contrast.draw_from_dataset(
            population, keys, range(len(prompts)), config.contrastive_count, seed=config.seed, step=0
        )
        return [[population[i] for i in drawn] for drawn in draws]
    if config.contrastive_source == "same_task" and (tasks is None or None in tasks):
        raise ValueError(
            "`contrastive_source='same_task'` needs the task of every prompt: a column `task`, or a field `task` of "
            "each record. Or set `contrastive_source='batch'`."
        )
    config = copy.copy(config)
    config.contrastive_coef = config.contrastive_coef or 1.0
    rows = [{"task": task} for task in tasks or prompts]
    batch = GenerationBatch(rows, list(prompts), [[] for _ in prompts], [], [None for _ in prompts], first=0)
    return draw_contrasts(batch, config, None, step=0)


def read_responses(
    path: str | Path, checkpoint: Checkpoint, config: CreditConfig, population: Sequence[Prompt] = ()
) -> list[Response]:
    """Responses of any origin, from JSON lines.

    A record has `prompt` (text or messages) and `response` (text), `feedback` or `demonstration` or both, and
    optionally `reward`, `id`, `task` and `contrasts` (a list of prompts; by default drawn from `population` and the
    other records, or as the source of `config` says). The response is tokenised here, with an end of turn after it.

    Raises:
        ValueError: a record that is none, told by its line.
    """
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    records = [_record(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    prompts = [record["prompt"] for record in records]
    given = all("contrasts" in record for record in records)
    drawn = (
        [[] for _ in prompts]
        if given
        else draw(prompts, [*population, *prompts], config, [record.get("task") for record in records])
    )
    end = checkpoint.tokenizer.eos_token_id
    return [
        Response(
            str(record.get("id", n)),
            record["prompt"],
            (*checkpoint.tokenizer(record["response"], add_special_tokens=False)["input_ids"], end),
            PrivilegedContext(record.get("demonstration"), record.get("feedback")),
            tuple(record.get("contrasts", others)),
            record.get("reward"),
        )
        for n, (record, others) in enumerate(zip(records, drawn, strict=True))
    ]


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}.") from None
    if not isinstance(record, dict) or not isinstance(record.get("response"), str):
        raise ValueError(f"{where}: a record needs `prompt` (text or messages) and `response` (text).")
    prompt = record.get("prompt")
    is_conversation = isinstance(prompt, list) and all(isinstance(m, dict) and "role" in m for m in prompt)
    if not (isinstance(prompt, str) or (is_conversation and prompt)):
        raise ValueError(f"{where}: `prompt` must be text or a list of messages with `role` and `content`.")
    for name in ("feedback", "demonstration"):
        if not isinstance(record.get(name), str | None):
            raise ValueError(f"{where}: `{name}` must be text.")
    if isinstance(record.get("reward"), bool) or not isinstance(record.get("reward"), int | float | None):
        raise ValueError(f"{where}: `reward` must be a number.")
    contrasts = record.get("contrasts", [])
    if not isinstance(contrasts, list) or not all(isinstance(other, str | list) for other in contrasts):
        raise ValueError(f"{where}: `contrasts` must be a list of prompts, each text or a list of messages.")
    return record
