"""Reads run directories, and names the runs by the options in which they differ."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from pandas import Series
from pyarrow import parquet

from credit_trl import run_directory as files
from credit_trl.training.card import METHOD_OPTIONS, method_of_run, model_name

COMPLETIONS = "completions"
SCORE = "score"  # avg@k in an evaluation
# Options that do not affect training, and the seeds.
_IGNORED_OPTIONS = re.compile(
    r"seed|data_seed|run|run_name|.*_dir|resume_from_checkpoint|disable_tqdm|project|parameters|(trackio|dataloader|eval|hub|"
    r"log|logging|push|report|save|wandb)_.*"
)
# Options -> words in the name of an arm, where the option's name says less.
_OPTION_WORDS = {
    "include_environment_feedback": "feedback",
    "use_successful_as_teacher": "demonstration",
    "contrastive_count": "contrast prompts",
    "contrastive_source": "contrast prompts from",
    "distillation_topk": "top-K",
    "distillation_alpha": "divergence α",
    "teacher_model_kind": "teacher",
    "reward_funcs": "verifier",
    "rows": "data",
}
# Options without effect on GRPO.
_OF_TEACHER = re.compile(r"(contrastive|distillation|teacher)_(?!weight).*")


def json_text(value: Any) -> str:
    """A text as it is, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def words(value: Any) -> str:
    """A value of an option for the name of an arm: no JSON, at most 60 characters."""
    if isinstance(value, bool):
        text = "on" if value else "off"
    elif value is None:
        text = "none"
    elif isinstance(value, dict):
        text = ", ".join(f"{name} {words(item)}" for name, item in sorted(value.items()))
    elif isinstance(value, list):
        text = ", ".join(map(words, value))
    else:
        text = str(value)
    text = text.replace("_", " ")
    return text if len(text) <= 60 else f"{text[:59]}…"


@dataclass(frozen=True)
class Run:
    """One run directory, or the directory of one evaluation without training."""

    folder: Path
    options: Mapping[str, Any]  # configuration and facts of `run.json`, such as model and rows; empty without the file
    log: Sequence[Mapping[str, Any]]  # rows of `log.jsonl`
    evaluations: Sequence[Mapping[str, Any]]  # rows of `evaluations.jsonl`, sorted by step
    segments: Sequence[Mapping[str, Any]] = ()  # of `run.json`: steps at which options changed
    last_step: int | None = None  # that the run is to reach

    @property
    def seed(self) -> int | None:
        return self.options.get("seed")

    @property
    def task(self) -> str:
        """Name of the evaluated task, "" without evaluations."""
        return str(self.final["task"]) if self.evaluations else ""

    @property
    def method(self) -> str:
        """Name of the method, of a resumed run with the steps at which it changed."""
        return method_of_run(self.options, self.segments)

    @property
    def warnings(self) -> list[Mapping[str, Any]]:
        """Rows of the log that are warnings, one for each cause."""
        rows: dict[str, Mapping[str, Any]] = {}
        for row in self.log:
            if isinstance(row.get("warning"), str):
                rows.setdefault(row["warning"], row)
        return list(rows.values())

    def text(self, option: str, form: Callable[[Any], str] = json_text) -> str:
        """An option's value as text or JSON, with the steps at which a resumed run changed it."""
        changes = [segment for segment in self.segments[1:] if option in segment["options"]]
        if not changes:
            return form(self.options.get(option))
        text = form(self.segments[0]["options"].get(option))
        for segment in changes:
            text += f" up to step {segment['step']}, then {form(segment['options'][option])}"
        return text

    def changed_options(self) -> list[str]:
        """Names of the options that a resumed run changed."""
        return sorted(set().union(*(segment["options"] for segment in self.segments[1:])))

    def series(self, name: str) -> Series:
        """A logged number by step, or the `SCORE` of the evaluations."""
        values: dict[int, float] = {}
        for row in self.evaluations if name == SCORE else self.log:
            if isinstance(row.get(name), int | float):
                values[row["step"]] = row[name]
        return Series(values, dtype=float)

    def mean_over_steps(self, prefix: str) -> float:
        """Mean over optimizer steps of the sum of all logged numbers whose names begin with `prefix`.

        Each log is a mean over the steps since the log before it. NaN where nothing was logged.
        """
        sums: dict[int, float] = {}
        for row in self.log:
            values = [row[name] for name in row if name.startswith(prefix)]
            if values and None not in values:
                sums[row["step"]] = sum(values)
        if not sums:
            return math.nan
        steps = [0, *sums]
        return float(np.average(list(sums.values()), weights=np.diff(steps)))

    def scores(self, step: int, group: str | None = None) -> Series:
        """avg@k of each prompt, or of those of a group, at an evaluated step; empty where its results are missing."""
        scores: dict[str, float] = {}
        for prompt in self._result(step).get("prompts", ()):
            if group is None or prompt.get("group") == group:
                scores[str(prompt["id"])] = prompt["score"]
        return Series(scores, dtype=float)

    @property
    def final(self) -> Mapping[str, Any]:
        """Row of the last evaluation."""
        return self.evaluations[-1]

    def final_scores(self, group: str | None = None) -> Series:
        """`scores` of the last evaluation."""
        return self.scores(self.final["step"], group)

    def groups(self, step: int) -> list[str]:
        """Groups of the task in the evaluation at a step, in the order of the prompts."""
        names: dict[str, None] = {}
        for prompt in self._result(step).get("prompts", ()):
            if isinstance(prompt.get("group"), str):
                names[prompt["group"]] = None
        return list(names)

    def group_metrics(self, step: int, group: str) -> dict[str, float]:
        """Means of the verdicts' metrics over a group in the evaluation at a step."""
        return self._result(step).get("group_metrics", {}).get(group, {})

    def settings(self, step: int) -> dict[str, Any]:
        """Settings of the evaluation at a step; empty where its results are missing."""
        return self._result(step).get("settings", {})

    def _result(self, step: int) -> dict[str, Any]:
        folder_of_step = self.folder / files.EVALUATIONS_FOLDER / f"step-{step:06d}"
        path_of_step = folder_of_step / files.RESULT_FILE
        path = path_of_step if path_of_step.is_file() else self.folder / files.RESULT_FILE
        return files.read_json(path) if path.is_file() else {}


def load_run(folder: str | Path) -> Run:
    """Read one directory.

    Raises:
        FileNotFoundError: it contains no file of a run.
        ValueError: a file is damaged; the message names it.
    """
    folder = Path(folder)
    evaluations = list(
        filter(lambda row: row.get(SCORE) is not None, files.read_steps(folder / files.EVALUATIONS_FILE))
    )
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
    last_step = described.pop("last_step", None)
    data = described.pop("data", None)
    if data is not None:
        functions = [function["name"] or function["called"] for function in data["reward_funcs"]]
        described["reward_funcs"] = ", ".join(functions)
        rows = data["train"] or {}
        described["rows"] = (rows.get("sha256") or "")[:8] or rows.get("name")  # of a file, or of the hub
    options = {**described.pop("config", {}), **described}
    return Run(folder, options, log, evaluations, segments, last_step if isinstance(last_step, int) else None)


def arms_of(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by method and the options in which they differ from most others; seeds of one arm share a name.

    Without either the first run's folder names them. Runs with equal options and seeds are named with their folders
    too.
    """
    arms: dict[str, list[Run]] = {}
    name_of_options: dict[tuple[str, ...], str] = {}
    options = differing_options(runs)
    usual_texts = {option: _text_of_most(runs, option) for option in options}
    for run, folder in zip(runs, short_names([run.folder for run in runs]), strict=True):
        texts = tuple(effective_text(run, option) for option in options)
        name = _arm_name(run, usual_texts) or runs[0].folder.resolve().name
        if texts not in name_of_options and name in name_of_options.values():
            name = f"{name} ({folder})"
        name = name_of_options.setdefault(texts, name)
        if run.seed in map(attrgetter("seed"), arms.get(name, ())):  # a twin
            name = f"{name} ({folder})"
        arms.setdefault(name, []).append(run)
    return arms


def _text_of_most(runs: Sequence[Run], option: str) -> str:
    """Text of an option that more than half of the runs have, or ""."""
    [(text, count)] = Counter(effective_text(run, option) for run in runs).most_common(1)
    return text if 2 * count > len(runs) else ""


def _arm_name(run: Run, usual_texts: Mapping[str, str]) -> str:
    """Method and unusual options in words: `CREDIT λ = 0.1, learning rate 1e-05`."""
    parts = [run.method]
    for option, usual_text in usual_texts.items():
        if option in METHOD_OPTIONS or effective_text(run, option) in ("", usual_text):
            continue
        title = _OPTION_WORDS.get(option, option.replace("_", " "))
        value = run.text(option, words)
        if option == "model":
            value = model_name(effective_text(run, option))
        parts.append(f"{title} {value}")
    return ", ".join(filter(None, parts))


def differing_options(runs: Sequence[Run]) -> list[str]:
    """Options that differ among the runs that use them, without seeds and those that do not affect training."""
    differing = []
    for name in sorted(set().union(*(run.options for run in runs))):
        texts = {effective_text(run, name) for run in runs} - {""}
        if len(texts) > 1 and not _IGNORED_OPTIONS.fullmatch(name):
            differing.append(name)
    return differing


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
    completions: list[dict[str, Any]] = []
    for place in np.linspace(0, len(paths) - 1, min(steps, len(paths))):
        path = paths[round(place)]
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
