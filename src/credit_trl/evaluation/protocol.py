"""Evaluation protocol of the paper: k samples per prompt at temperature 0.6 and top-p 0.95, avg@k over prompts.

Each sample has its own random stream, seeded by the base seed, the prompt's id and the sample's number. Samples are
written to disk as soon as they are graded, so an interrupted evaluation continues and ends with the same files.
"""

import hashlib
import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import nn
from tqdm.auto import tqdm

from credit_trl import run_directory as files
from credit_trl import tasks
from credit_trl.contexts.images import with_local_images
from credit_trl.contexts.prompts import check_rows, row_prompt
from credit_trl.evaluation.config import EvaluationConfig, SamplingConfig, evaluation_config
from credit_trl.evaluation.engines import Engine, TrainerEngine, TransformersEngine, VLLMEngine
from credit_trl.evaluation.result import Evaluation, summarize
from credit_trl.evaluation.verdicts import Sample, Unit, grade
from credit_trl.mistakes import refuse_unknown
from credit_trl.rollout.batch import prompt_key
from credit_trl.rollout.verdict import transferable
from credit_trl.tasks.registry import Task, load_task
from credit_trl.training.checks import check_column_names

SAMPLES_FILE = "samples.jsonl"
_BOUND = (str, int, float, list, tuple, dict)  # values that a verifier depends on


class EvaluationMismatchError(ValueError):
    """`output_dir` holds an evaluation with other settings, data or weights."""


def evaluate(model: Any, task: str | Task, k: int = 16, **options: Any) -> Evaluation:
    """Sample k completions per prompt, grade them and compute avg@k with a 95 % bootstrap interval over prompts.

    Args:
        model: a trainer, a model (with the option `tokenizer`), a hub name or directory, or an [`Engine`]. A
            trainer's own sampling settings are ignored, except `max_completion_length`.
        task: a name for `load_task`, or a [`Task`].
        k: samples per prompt.
        **options: the other fields of [`EvaluationConfig`], such as `temperature` and `top_p`.

    Returns:
        The [`Evaluation`], on every process of a distributed run.

    Raises:
        TypeError: an unknown option.
        ValueError: a setting is out of range, there are no rows, a column is missing or has a reserved name, or the
            verifier does not apply to a row.
        RunLockedError: another process is evaluating in `output_dir`.
        VerifierFailed: the verifier failed and `policy` has `on_error="skip"`.
        EvaluationMismatchError: `output_dir` holds another evaluation; the message lists the differences.
    """
    if hasattr(model, "accelerator"):
        options.setdefault("max_completion_length", model.max_completion_length or 4096)
    config = evaluation_config("evaluate", k=k, **options)
    if isinstance(model, Task) or _has_weights(task):
        kinds = f"`model` is a {type(model).__name__} and `task` a {type(task).__name__}"
        raise TypeError(f"{kinds}. Give the model first, then the task.")
    task = load_task(task)
    rows = task_rows(task, config)
    groups = _groups(rows, config.group_by)
    engine = make_engine(model, config)
    settings = {
        **{option.name: getattr(config, option.name) for option in fields(SamplingConfig)},
        "k": config.k,
        "task": task.name,
        "weights": engine.identity(),
        "prompts": len(rows),
        "data": content_digest([sorted((row | {"prompt": prompt_key(row_prompt(row))}).items()) for row in rows]),
        "verifier": content_digest(task.reward),
        "template": getattr(engine, "chat_template_kwargs", {}),
    }
    folder = None if config.output_dir is None else Path(config.output_dir)
    units = list(itertools.product(rows, range(config.k)))
    with ExitStack() as resources:
        if folder is not None:
            _on_main(engine, lambda: resources.enter_context(files.run_lock(folder)))
        samples = _on_main(engine, _open, folder, settings, units)
        _sample(engine, task, units, config, samples)

    def finish() -> Evaluation:
        result = summarize(samples, engine.name, settings, groups)
        if folder is not None:
            files.write_json(folder / files.RESULT_FILE, result.to_dict())
        return result

    return _on_main(engine, finish)


def _has_weights(value: Any) -> bool:
    """Whether a value is a model, a trainer or an engine."""
    return isinstance(value, nn.Module) or hasattr(value, "accelerator") or callable(getattr(value, "session", None))


def make_engine(model: Any, config: EvaluationConfig) -> Engine:
    """The engine for the `model` argument of `evaluate`."""
    options = dict(config.engine_options or {})
    if config.batch_size is not None:
        options["batch_size"] = config.batch_size
    if isinstance(model, str | Path):
        start = VLLMEngine if config.engine == "vllm" else TransformersEngine.from_pretrained
        return _started(start, str(model), options=options)
    if hasattr(model, "accelerator") and hasattr(model, "processing_class"):
        return _started(TrainerEngine, model, options=options)
    if callable(getattr(model, "session", None)):
        return model
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(
            f"`model` must be a trainer, a model, or the name or folder of one, got {kind}. Give the model first."
        )
    if config.tokenizer is None:
        raise ValueError("Evaluating a model in memory needs its tokenizer: pass `tokenizer`.")
    return _started(TransformersEngine, model, config.tokenizer, options=options)


def _started(start: Callable[..., Engine], *arguments: Any, options: Mapping[str, Any]) -> Engine:
    """The engine with these options.

    Raises:
        TypeError: an option is unknown.
    """
    parameters = inspect.signature(start).parameters.values()
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        refuse_unknown("engine_options", "option", options, names)
    return start(*arguments, **options)


def task_rows(task: Task, config: EvaluationConfig) -> list[dict[str, Any]]:
    """The rows to evaluate, each with a unique `id`."""
    dataset = config.dataset
    if dataset is None:
        dataset = task.build(config.split, config.path)
    rows = list(itertools.islice(with_local_images(dataset), config.max_prompts))
    if not rows:
        raise ValueError(f"Task {task.name!r} has no rows to evaluate.")
    check_column_names(f"The data of task {task.name!r}", set().union(*rows))
    check_rows(f"the data of task {task.name!r}", (row.get("prompt") for row in rows))
    ids = []
    for row in rows:
        key = prompt_key(row_prompt(row)).encode()
        ids.append(str(row.get("id") or hashlib.sha256(key).hexdigest()[:16]))
    return [{**row, "id": name} for row, name in zip(rows, distinct_names(ids), strict=True)]


def distinct_names(names: Sequence[str]) -> list[str]:
    """The names, with `#2`, `#3`, … after the second and later occurrences of one, skipping names that occur."""
    used = set(names)
    numbers = dict.fromkeys(names, 1)
    distinct: dict[str, None] = {}
    for name in names:
        unique = name
        while unique in distinct or (unique != name and unique in used):
            numbers[name] += 1
            unique = f"{name}#{numbers[name]}"
        distinct[unique] = None
    return list(distinct)


def content_digest(content: Any) -> str:
    """16 hex digits that change with the content, whose values may be functions.

    A function counts with its source, closure, defaults and public attributes, a task of the package with all tasks.
    """
    described_values: list[Any] = []

    def described(value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return sorted(map(str, value))
        if hasattr(value, "tolist"):  # arrays
            return value.tolist()
        if not callable(value) or any(value is item for item in described_values):
            return re.sub(" at 0x[0-9a-f]+", "", str(value))
        described_values.append(value)
        value = inspect.unwrap(value)
        code = value if inspect.isroutine(value) else type(value)
        bound = [item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")]
        bound += [getattr(value, name, None) for name in ("__defaults__", "__self__", "func", "args", "keywords")]
        source = None
        with suppress(OSError, TypeError, ValueError):  # no source, an empty cell
            bound += [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
            module = None if code.__module__ == "__main__" else sys.modules.get(code.__module__)
            source = inspect.getsource(module or code)
        if (code.__module__ or "").startswith("credit_trl.tasks") and code.__module__ != Task.__module__:
            source = [file.read_text("utf-8") for file in sorted(Path(tasks.__file__).parent.glob("*.[py]*[ly]"))]
        return [code.__qualname__, source, [item for item in bound if callable(item) or isinstance(item, _BOUND)]]

    text = json.dumps(content, default=described, skipkeys=True, check_circular=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sample_seed(seed: int, prompt: str, sample: int) -> int:
    """The seed of one sample's random stream, in [0, 2**63)."""
    text = f"{seed}/{sample}/{prompt}"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _open(folder: Path | None, settings: Mapping[str, Any], units: Sequence[Unit]) -> list[Sample]:
    """The samples on disk, after checking that they belong to this evaluation."""
    if folder is None:
        return []
    stored = files.read_lines(folder / SAMPLES_FILE)
    path = folder / files.SETTINGS_FILE
    if path.is_file() and stored:
        stored_settings = files.read_json(path)
        current = json.loads(json.dumps(settings))
        changes = []
        for name in sorted(stored_settings.keys() | current.keys()):
            values = (stored_settings.get(name), current.get(name))
            if values[0] != values[1]:
                changes.append(f"{name}: {values[0]!r} there, {values[1]!r} now")
        if changes:
            raise EvaluationMismatchError(
                f"{folder} holds another evaluation ({'; '.join(changes)}). Use another `output_dir`, or remove it."
            )
    elif path.is_file() and "weights" not in files.read_json(path):
        raise FileExistsError(f"{path} was not written by an evaluation. Use another `output_dir`.")
    else:
        files.write_json(path, settings)
    path = folder / SAMPLES_FILE
    expected = [(row["id"], number) for row, number in units[: len(stored)]]
    if [(sample.get("prompt"), sample.get("sample")) for sample in stored] != expected:
        raise ValueError(f"{path} holds samples of another evaluation. Use another `output_dir`, or remove it.")
    files.keep_up_to(path, sys.maxsize)  # without an incomplete last line of a killed process
    return [Sample(**sample) for sample in stored]


def _sample(
    engine: Engine, task: Task, units: Sequence[Unit], config: EvaluationConfig, samples: list[Sample]
) -> None:
    """Generate, grade and append the missing samples in batches. Only the main process grades and writes."""
    start = len(samples)
    if start == len(units):
        return
    progress = {"desc": f"{task.name} avg@{config.k}", "unit": "sample"}
    bar = tqdm(total=len(units), initial=start, disable=not (config.progress and engine.is_main), **progress)

    def write(batch: Sequence[Unit], responses: Sequence[Any]) -> None:
        graded = grade(task, batch, responses, config.policy)
        if config.output_dir is not None:
            files.append_lines(Path(config.output_dir) / SAMPLES_FILE, map(asdict, graded))
        samples.extend(graded)
        bar.set_postfix_str(f"avg {sum(s.reward for s in samples) / len(samples):.3f}")

    with bar, engine.session(config):
        for position in range(start, len(units), engine.batch_size):
            batch = units[position : position + engine.batch_size]
            prompts = []
            seeds = []
            for row, number in batch:
                prompts.append(row_prompt(row))
                seeds.append(sample_seed(config.seed, row["id"], number))
            responses = engine.generate(prompts, seeds, config)
            _on_main(engine, write, batch, responses)
            bar.update(len(batch))


def _groups(rows: Sequence[Mapping[str, Any]], group_by: str | None) -> dict[str, str | None]:
    if group_by is not None and group_by not in rows[0]:
        columns = ", ".join(rows[0])
        raise ValueError(f"`group_by={group_by!r}` is not a column; the rows have {columns}.")
    groups: dict[str, str | None] = {}
    for row in rows:
        value = row.get(group_by or "task")
        groups[row["id"]] = None if value is None else str(value)
    return groups


def _on_main(engine: Engine, function: Callable[..., Any], *args: Any) -> Any:
    """Call on the main process; return its result, or raise its error, on all processes so that none hangs."""
    result, error = None, None
    if engine.is_main:
        try:
            result = function(*args)
        except Exception as raised:
            error = raised
    result, shared = engine.share((result, transferable(error)))
    if shared is not None:
        raise shared if error is None else error
    return result
