"""Reads run directories, and names the runs by the options in which they differ."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import parquet

from credit_trl import run_directory as files

COMPLETIONS = "completions"
SCORE = "score"  # avg@k in an evaluation
# Options that do not affect training, and the seeds.
_IGNORED_OPTIONS = re.compile(
    r"seed|data_seed|run|run_name|.*_dir|resume_from_checkpoint|disable_tqdm|project|parameters|(trackio|dataloader|eval|hub|"
    r"log|logging|push|report|save|wandb)_.*"
)
# Options without effect on GRPO.
_OF_TEACHER = re.compile(r"(contrastive|distillation|teacher)_(?!weight).*")


@dataclass(frozen=True)
class Run:
    """One run directory, or the directory of one evaluation without training."""

    folder: Path
    options: Mapping[str, Any]  # configuration and facts of `run.json`, such as model and rows; empty without the file
    log: Sequence[Mapping[str, Any]]  # rows of `log.jsonl`
    evaluations: Sequence[Mapping[str, Any]]  # rows of `evaluations.jsonl`, sorted by step
    segments: Sequence[Mapping[str, Any]] = ()  # of `run.json`: steps at which options changed

    @property
    def seed(self) -> int | None:
        return self.options.get("seed")

    @property
    def task(self) -> str:
        """Name of the evaluated task, "" without evaluations."""
        return str(self.evaluations[-1]["task"]) if self.evaluations else ""

    def text(self, option: str) -> str:
        """An option's value as text or JSON, with the steps at which a resumed run changed it."""
        changes = [segment for segment in self.segments[1:] if option in segment["options"]]
        if not changes:
            return _text(self.options.get(option))
        values = [_text(self.segments[0]["options"].get(option))]
        values += [f"from step {segment['step']}: {_text(segment['options'][option])}" for segment in changes]
        return ", ".join(values)

    def changed_options(self) -> list[str]:
        """Names of the options that a resumed run changed."""
        return sorted({name for segment in self.segments[1:] for name in segment["options"]})

    def series(self, name: str) -> dict[int, float]:
        """A logged number by step, or the `SCORE` of the evaluations."""
        rows = self.evaluations if name == SCORE else self.log
        return {row["step"]: float(row[name]) for row in rows if isinstance(row.get(name), int | float)}

    def mean_over_steps(self, prefix: str) -> float | None:
        """Mean over optimizer steps of the sum of all logged numbers whose names begin with `prefix`.

        Each log is a mean over the steps since the log before it. None where nothing was logged.
        """
        values = [(row["step"], [row[name] for name in row if name.startswith(prefix)]) for row in self.log]
        sums = {step: sum(step_values) for step, step_values in values if step_values and None not in step_values}
        if not sums:
            return None
        return float(np.average([*sums.values()], weights=np.diff([0, *sums])))

    def scores(self, step: int) -> dict[str, float]:
        """avg@k of each prompt at an evaluated step; empty where its results are missing."""
        prompts = self._result(step).get("prompts", ())
        return {str(prompt["id"]): float(prompt["score"]) for prompt in prompts}

    def settings(self, step: int) -> dict[str, Any]:
        """Settings of the evaluation at a step; empty where its results are missing."""
        return self._result(step).get("settings", {})

    def _result(self, step: int) -> dict[str, Any]:
        path_of_step = self.folder / files.EVALUATIONS_FOLDER / f"step-{step:06d}" / files.RESULT_FILE
        path = path_of_step if path_of_step.is_file() else self.folder / files.RESULT_FILE
        return files.read_json(path) if path.is_file() else {}


def load_run(folder: str | Path) -> Run:
    """Read one directory.

    Raises:
        FileNotFoundError: it contains no file of a run.
        ValueError: a file is damaged; the message names it.
    """
    folder = Path(folder)
    evaluations = [row for row in files.read_steps(folder / files.EVALUATIONS_FILE) if row.get("score") is not None]
    evaluations.sort(key=lambda row: row["step"])
    log = files.read_steps(folder / files.LOG_FILE)
    described = files.read_run_file(folder) if (folder / files.RUN_FILE).exists() else {}
    if not (evaluations or log or described) and (folder / files.RESULT_FILE).is_file():
        result = files.read_json(folder / files.RESULT_FILE)
        described = {"model": result.get("model")}
        evaluations = [{"step": 0, **result}]
    if not (evaluations or log or described):
        raise FileNotFoundError(
            f"{folder} holds no run: none of run.json, log.jsonl, evaluations.jsonl and result.json. Pass the "
            "`output_dir` of a run, or that of `trl credit-eval`."
        )
    segments = described.pop("segments", None) or []
    described.pop("saved", None)
    data = described.pop("data", None)
    if data is not None:
        described["reward_funcs"] = ", ".join(
            function["name"] or function["called"] for function in data["reward_funcs"]
        )
        rows = data["train"] or {}
        described["rows"] = (rows.get("sha256") or "")[:8] or rows.get("name")  # of a file, or of the hub
    return Run(folder, {**described.pop("config", {}), **described}, log, evaluations, segments)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def arms_of(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by the options in which they differ from each other, which name them; seeds of one arm share a name.

    Without such an option the first run's folder names them. Runs with equal options and seeds are named with their
    folders too.
    """
    arms: dict[str, list[Run]] = {}
    options = differing_options(runs)
    for run, folder in zip(runs, short_names([run.folder for run in runs]), strict=True):
        differing = {option: effective_text(run, option) for option in options}
        name = ", ".join(f"{option}={text}" for option, text in differing.items() if text)
        name = name or runs[0].folder.resolve().name
        is_twin = any(twin.seed == run.seed for twin in arms.get(name, ()))
        arms.setdefault(f"{name} ({folder})" if is_twin else name, []).append(run)
    return arms


def differing_options(runs: Sequence[Run]) -> list[str]:
    """Options that differ among the runs that use them, without seeds and those that do not affect training."""
    names = sorted({name for run in runs for name in run.options if not _IGNORED_OPTIONS.fullmatch(name)})
    return [name for name in names if len({effective_text(run, name) for run in runs} - {""}) > 1]


def short_names(paths: Sequence[str | Path], parts: int = 1) -> list[str]:
    """Shortest unique names: the last `parts` parts of each path, or more where names would be equal."""
    full_parts = [Path(path).resolve().parts for path in paths]
    for count in range(parts, max(parts + 1, *map(len, full_parts), 0) + 1):
        names = [Path(*path[-count:]).as_posix() for path in full_parts]
        if len(set(names)) == len(names):
            return names
    twice = next(name for name in names if names.count(name) > 1)
    raise ValueError(f"{twice} is named twice.")


def read_completions(run: Run, steps: int = 12, rows: int = 8) -> list[dict[str, Any]]:
    """Rows of TRL's tables of completions: the first `rows` of each of at most `steps` steps, evenly spaced."""
    paths = sorted((run.folder / COMPLETIONS).glob("completions_*.parquet"))
    count = min(steps, len(paths))
    chosen = [paths[round(i * (len(paths) - 1) / max(1, count - 1))] for i in range(count)]
    completions: list[dict[str, Any]] = []
    for path in chosen:
        try:
            completions += parquet.read_table(path).slice(0, rows).to_pylist()
        except (OSError, ValueError):  # not written completely
            continue
    return completions


def effective_text(run: Run, option: str) -> str:
    """Text of an option, "" for one without effect; the run's seed in the model's path is no part.

    The seed follows `seed` or `s` there, or is a whole part of the path: `bases/seed3`, `base-s3`, `bases/3`.
    """
    is_grpo = run.options.get("distillation_weight") == 0.0
    is_idle = option.startswith("vllm_") and not run.options.get("use_vllm")
    is_evaluation = "seed" not in run.options  # of a model without a run
    if is_evaluation and option not in run.options:
        return ""
    if is_idle or (is_grpo and _OF_TEACHER.fullmatch(option)):
        return ""
    text = run.text(option)
    if option == "model" and run.seed is not None:
        return re.sub(rf"(?i)((?:seeds?|(?<![a-z0-9])s)[-_=/]?|(?<=/))0*{run.seed}(?![\w.])", r"\1{seed}", text)
    return text
