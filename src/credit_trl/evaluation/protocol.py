"""The paper's evaluation protocol: k samples a prompt at temperature 0.6 and top-p 0.95, avg@k over prompts.

Every sample has a random stream of its own, made of the seed, the prompt and the sample's number, and is on disk as
soon as it is graded: an evaluation that was interrupted continues, and ends with the files that it would have had.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from credit_trl.contexts.contrast import prompt_key
from credit_trl.evaluation.engines import Engine, Request, Response, Sampling, TransformersEngine, VLLMEngine
from credit_trl.evaluation.result import Evaluation, summarize
from credit_trl.evaluation.samples import SAMPLES_FILE, Sample, SampleFile
from credit_trl.evaluation.statistics import N_RESAMPLES
from credit_trl.evaluation.verdicts import grade
from credit_trl.rollout.verdict import VerifierPolicy
from credit_trl.tasks.registry import Task, load_task
from credit_trl.training.run_directory import write_json

if TYPE_CHECKING:
    from datasets import Dataset

SETTINGS_FILE = "settings.json"
RESULT_FILE = "result.json"


class EvaluationMismatchError(ValueError):
    """The directory to continue in holds an evaluation with other settings, data or weights."""


def evaluate(
    model: Any,
    task: str | Task,
    k: int = 16,
    temperature: float = 0.6,
    top_p: float = 0.95,
    *,
    top_k: int = 0,
    max_completion_length: int = 4096,
    split: str = "test",
    path: str | Path | None = None,
    dataset: Dataset | Sequence[Mapping[str, Any]] | None = None,
    max_prompts: int | None = None,
    group_by: str | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    engine: str = "transformers",
    engine_options: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    output_dir: str | Path | None = None,
    success_threshold: float = 1.0,
    answer_of: Callable[[str], str | None] | None = None,
    policy: VerifierPolicy | None = None,
    n_resamples: int = N_RESAMPLES,
    progress: bool = True,
) -> Evaluation:
    """Sample k answers a prompt, grade them, and average: avg@k with a bootstrap 95 % interval over prompts.

    Args:
        model: a trainer, a model (with `tokenizer`), a hub name or directory, or an [`Engine`].
        task: a name for `load_task`, or a [`Task`].
        k: samples a prompt.
        temperature, top_p, top_k, max_completion_length: see [`Sampling`]. Of a trainer nothing is taken over.
        split, path: what `Task.build` loads.
        dataset: rows to use instead, with the columns of the task.
        max_prompts: only the first so many rows.
        group_by: a column whose values are reported apart; by default `task`, where rows are of several.
        seed: of the samples.
        tokenizer: of a model that is passed as such.
        engine: `"transformers"` or `"vllm"`, for a model given by name.
        engine_options: arguments of the engine, such as `{"chat_template_kwargs": {"enable_thinking": False}}`.
        batch_size: samples generated side by side.
        output_dir: where settings, samples and result are written, and found again; None keeps nothing.
        success_threshold: reward from which a sample counts as a success in pass@k.
        answer_of: reads the answer off a text, for maj@k; by default what stands between `<answer>` tags, where all
            gold answers are single capital letters.
        policy: what is done about a verifier that fails or hangs; by default its error passes through, without limit.
        n_resamples: of the intervals.
        progress: show a bar.

    Returns:
        The [`Evaluation`], on every process of a distributed run.

    Raises:
        ValueError: settings out of range, no rows, or a verifier that does not apply to a row.
        VerifierFailed: the verifier failed, and `policy` is to go on without what it was given.
        EvaluationMismatchError: `output_dir` holds another evaluation; the message says what differs.
    """
    if k < 1:
        raise ValueError(f"`k` must be at least 1, got {k}.")
    if max_prompts is not None and max_prompts < 1:
        raise ValueError(f"`max_prompts` must be at least 1, got {max_prompts}.")
    sampling = Sampling(temperature, top_p, top_k, max_completion_length)
    policy = policy or VerifierPolicy()
    task = load_task(task) if isinstance(task, str) else task
    rows = task_rows(task, split, path, dataset, max_prompts)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
    sampler = make_engine(model, tokenizer, engine, engine_options, batch_size)
    settings = {
        "task": task.name,
        "weights": sampler.identity(),
        "k": k,
        "seed": seed,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_completion_length": max_completion_length,
        "prompts": len(rows),
        "data": data_digest(rows),
        "template": getattr(sampler, "chat_template_kwargs", None) or {},
    }
    folder = None if output_dir is None else Path(output_dir)
    golds = letter_golds(rows) if answer_of is None else {row["id"]: row["answer"] for row in rows}
    read_answer = answer_of or (tagged_letter if golds else None)
    done = _on_main(sampler, lambda: _open(folder, settings, rows, k))
    samples = _sample(sampler, task, rows, k, seed, sampling, done, read_answer, policy, progress)

    def finish() -> Evaluation:
        result = summarize(
            samples,
            task=task.name,
            model=sampler.name,
            settings=settings,
            k=k,
            golds=golds,
            groups=_groups(rows, group_by),
            success_threshold=success_threshold,
            n_resamples=n_resamples,
        )
        if folder is not None:
            write_json(folder / RESULT_FILE, result.to_dict())
        return result

    return _on_main(sampler, finish)


def make_engine(
    model: Any,
    tokenizer: Any = None,
    engine: str = "transformers",
    engine_options: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
) -> Engine:
    """The engine that samples from whatever `evaluate` was given."""
    options = dict(engine_options or {}) | ({} if batch_size is None else {"batch_size": batch_size})
    if engine not in ("transformers", "vllm"):
        raise ValueError(f"`engine` is 'transformers' or 'vllm', got {engine!r}.")
    if isinstance(model, str | Path):
        return (VLLMEngine if engine == "vllm" else TransformersEngine).from_pretrained(str(model), **options)
    if hasattr(model, "accelerator") and hasattr(model, "processing_class"):
        from credit_trl.evaluation.trainer_engine import TrainerEngine

        return TrainerEngine(model, **options)
    if callable(getattr(model, "session", None)):
        return model
    if tokenizer is None:
        raise ValueError("A model that is passed as such needs its `tokenizer`.")
    return TransformersEngine(model, tokenizer, **options)


def task_rows(
    task: Task,
    split: str = "test",
    path: str | Path | None = None,
    dataset: Dataset | Sequence[Mapping[str, Any]] | None = None,
    max_prompts: int | None = None,
) -> list[dict[str, Any]]:
    """The rows to evaluate on, each with an `id` of its own.

    Raises:
        ValueError: no rows.
    """
    dataset = task.build(split, path) if dataset is None else dataset
    rows = list(islice(dataset, max_prompts))
    if not rows:
        raise ValueError(f"Task {task.name!r} has no rows to evaluate on.")
    ids = [str(row.get("id") or hashlib.sha256(prompt_key(row["prompt"]).encode()).hexdigest()[:16]) for row in rows]
    seen: dict[str, int] = {}
    for position, name in enumerate(ids):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            ids[position] = f"{name}#{seen[name]}"
    return [{**row, "id": name} for row, name in zip(rows, ids, strict=True)]


def data_digest(rows: Sequence[Mapping[str, Any]]) -> str:
    """16 hex digits of prompts and answers, order included."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row["id"], prompt_key(row["prompt"]), row.get("answer")]).encode() + b"\n")
    return digest.hexdigest()[:16]


def sample_seed(seed: int, prompt: str, sample: int) -> int:
    """The seed of one sample's random stream, in [0, 2**63)."""
    digest = hashlib.sha256(f"{seed}/{sample}/{prompt}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def letter_golds(rows: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """Prompt id → gold letter, where all gold answers are single capital letters."""
    golds = {row["id"]: row.get("answer") for row in rows}
    letters = all(isinstance(gold, str) and re.fullmatch("[A-Z]", gold) for gold in golds.values())
    return golds if letters else None


def tagged_letter(text: str) -> str | None:
    """The letter that a multiple-choice answer gives, by the field's protocol; None for anything but one letter."""
    from credit_trl.tasks.sciknoweval import given_answer

    given = given_answer(text)
    return given if re.fullmatch("[A-Z]", given) else None


def _open(folder: Path | None, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], k: int) -> SampleFile:
    """The samples that are there already, after checking that they are of this evaluation."""
    units = [(row["id"], sample) for row in rows for sample in range(k)]
    if folder is None:
        return SampleFile(None, units)
    held = folder / SETTINGS_FILE
    if held.is_file():
        before = json.loads(held.read_text(encoding="utf-8"))
        now = json.loads(json.dumps(settings))
        differing = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        if differing:
            told = "; ".join(f"{name}: {before.get(name)!r} there, {now.get(name)!r} now" for name in differing)
            raise EvaluationMismatchError(
                f"{folder} holds another evaluation ({told}). Use another `output_dir`, or remove it."
            )
    else:
        write_json(held, settings)
    return SampleFile(folder / SAMPLES_FILE, units)


def _sample(
    engine: Engine,
    task: Task,
    rows: Sequence[Mapping[str, Any]],
    k: int,
    seed: int,
    sampling: Sampling,
    file: SampleFile,
    read_answer: Callable[[str], str | None] | None,
    policy: VerifierPolicy,
    progress: bool,
) -> list[Sample]:
    """Generate, grade and write what is missing, batch by batch. Only the main process grades."""
    units = [(row, sample) for row in rows for sample in range(k)]
    start = len(file.samples)
    if start == len(units):
        return file.samples
    bar = tqdm(
        total=len(units),
        initial=start,
        desc=f"{task.name} avg@{k}",
        unit="sample",
        disable=not (progress and engine.is_main),
    )
    with bar, engine.session(sampling):
        for position in range(start, len(units), engine.batch_size):
            batch = units[position : position + engine.batch_size]
            requests = [Request(row["prompt"], sample_seed(seed, row["id"], number)) for row, number in batch]
            responses = engine.generate(requests, sampling)

            def write(batch: list[Any] = batch, responses: list[Response] = responses) -> None:
                file.append(grade(task, batch, responses, read_answer, policy))

            _on_main(engine, write)
            bar.update(len(batch))
            if engine.is_main:
                bar.set_postfix_str(f"avg {sum(s.reward for s in file.samples) / len(file.samples):.3f}")
    return file.samples


def _groups(rows: Sequence[Mapping[str, Any]], group_by: str | None) -> dict[str, str | None]:
    if group_by is not None and group_by not in rows[0]:
        raise ValueError(f"`group_by={group_by!r}` is no column; the rows have {', '.join(rows[0])}.")
    name = group_by or "task"
    return {row["id"]: None if row.get(name) is None else str(row[name]) for row in rows}


def _on_main(engine: Engine, function: Callable[[], Any]) -> Any:
    """Run on the main process; its result, or its error, on all of them, so that none waits for ever."""
    result, error = None, None
    if engine.is_main:
        try:
            result = function()
        except Exception as raised:
            error = raised
    result, error = engine.share((result, error))
    if error is not None:
        raise error
    return result
