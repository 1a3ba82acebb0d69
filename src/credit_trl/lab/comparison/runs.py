"""Reads run directories: configuration, log and the per-prompt scores of every evaluation."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from credit_trl.lab.sweeps.spec import OPTION_LABELS
from credit_trl.tasks.printable import printable
from credit_trl.training.run_directory import (
    EVALUATIONS_FILE,
    EVALUATIONS_FOLDER,
    JOB_FILE,
    LOG_FILE,
    RESULT_FILE,
    RUN_FILE,
    SETTINGS_FILE,
    SUMMARY_FILE,
    read_json,
    read_lines,
)

SCORE = "score"
MAJORITY = "majority"


@dataclass(frozen=True)
class Run:
    """One training run, or one evaluation of a model without training.

    Args:
        folder: the run directory.
        arm: name in tables; runs of one arm differ in their seed only.
        task: name of the evaluated task.
        seed: training seed, None if unknown.
        config: the trainer's configuration.
        log: the trainer's logs in order, each with its `step`.
        log_source: file that the log was read from.
        evaluations: rows of `evaluations.jsonl`, sorted by step.
        finished: whether training ended, so that the last evaluation is the final one.
        model: model that training started from, "" if unknown.
    """

    folder: Path
    arm: str
    task: str
    seed: int | None
    config: Mapping[str, Any]
    log: Sequence[Mapping[str, Any]]
    log_source: str
    evaluations: Sequence[Mapping[str, Any]]
    finished: bool = True
    model: str = ""

    @property
    def steps(self) -> list[int]:
        """Evaluated steps."""
        return [row["step"] for row in self.evaluations]

    def best_step(self) -> int:
        """Evaluated step with the highest avg@k; the earliest on a tie."""
        return max(self.evaluations, key=lambda row: (row[SCORE], -row["step"]))["step"]

    def final_step(self) -> int:
        """Last evaluated step."""
        return max(self.steps)

    def prompts(self, step: int) -> list[dict[str, Any]]:
        """Per-prompt results of the evaluation at a step: `id`, `group`, `score`, `majority`, `metrics`.

        Raises:
            ValueError: the evaluation has no results, or they are damaged.
        """
        path = (self._evaluation(step) / RESULT_FILE).resolve()
        if not path.is_file():
            inside = Path(EVALUATIONS_FOLDER, _step_folder(step), RESULT_FILE)
            raise ValueError(f"{self.folder} lacks {inside}, the scores of step {step}. Copy the whole run directory.")
        return _prompts(path, path.stat().st_mtime_ns)

    def settings(self, step: int) -> dict[str, Any]:
        """Sampling settings of the evaluation at a step, empty if none were recorded."""
        path = self._evaluation(step) / SETTINGS_FILE
        return read_json(path) if path.is_file() else {}

    def _evaluation(self, step: int) -> Path:
        inside = self.folder / EVALUATIONS_FOLDER / _step_folder(step)
        return inside if (inside / RESULT_FILE).is_file() else self.folder

    def per_prompt(self, step: int, measure: str = SCORE) -> dict[str, float]:
        """Map prompt ids to a score.

        Args:
            step: an evaluated step.
            measure: `"score"`, `"majority"` for maj@k, or the name of a verdict metric, averaged over the samples.

        Raises:
            ValueError: the measure is missing for some or all prompts.
        """
        prompts = self.prompts(step)
        if measure in (SCORE, MAJORITY):
            values = {prompt["id"]: prompt.get(measure) for prompt in prompts}
        else:
            values = {prompt["id"]: prompt.get("metrics", {}).get(measure) for prompt in prompts}
        missing = [name for name, value in values.items() if value is None]
        if missing and len(missing) < len(values):
            raise ValueError(
                f"{self.folder} has {measure!r} of {len(values) - len(missing)} prompts of {len(values)}, not of "
                f"{missing[0]!r}, so averages would cover different prompts. Return it for every response."
            )
        if missing:
            metrics = sorted({name for prompt in prompts for name in prompt.get("metrics", {})})
            names = ", ".join([SCORE, MAJORITY, *metrics])
            raise ValueError(printable(f"{self.folder} has no measure {measure!r}; it has {names}."))
        return values

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a logged number; steps without it are skipped."""
        found = [(row["step"], row[name]) for row in self.log if isinstance(row.get(name), int | float)]
        return [step for step, _ in found], [float(value) for _, value in found]


def _step_folder(step: int) -> str:
    return f"step-{step:06d}"


def find_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Read all runs in some directories, at any depth. Directories inside a run belong to that run.

    Raises:
        FileNotFoundError: a path contains no run.
    """
    runs: dict[Path, Run] = {}
    for path in map(Path, paths):
        folders = sorted(_run_folders(path, set()))
        if not folders:
            raise FileNotFoundError(
                f"{path} holds no run: no {RUN_FILE}, {EVALUATIONS_FILE} or {RESULT_FILE} at any depth. Train with "
                "`trl credit --avg_at_k 16` or an `EvaluationCallback`, or use `trl credit-eval --output_dir`."
            )
        for folder in folders:
            runs.setdefault(folder.resolve(), read_run(folder))
    return list(runs.values())


# Settings that change scores. Prompts are compared separately, and k changes only the width of an interval.
_SAMPLING_SETTINGS = ("temperature", "top_p", "top_k", "max_completion_length", "template")


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Sampling settings that differ among the final evaluations of a task, one line per setting."""
    lines = []
    for task in dict.fromkeys(run.task for run in runs):
        settings = {run.folder: run.settings(run.final_step()) for run in runs if run.task == task}
        for name in _SAMPLING_SETTINGS:
            folders: dict[str, list[Path]] = {}
            for folder, found in settings.items():
                if name in found:
                    folders.setdefault(json.dumps(found[name], sort_keys=True), []).append(folder)
            if len(folders) > 1:
                values = (
                    f"{value} in {first}" + (f" and {len(others)} more" if others else "")
                    for value, (first, *others) in folders.items()
                )
                lines.append(f"{task}, {name}: {'; '.join(values)}")
    return lines


# Options that do not affect training, and the seeds.
_IGNORED_OPTIONS = re.compile(
    r"seed|data_seed|run_name|.*_dir|resume_from_checkpoint|disable_tqdm|project|trackio_.*|(dataloader|eval|hub|log|logging|"
    r"push|report|save|wandb)_.*"
)


def differing_options(runs: Sequence[Run]) -> list[str]:
    """Models and options that differ among the seeds of an arm, one line per arm and task."""
    arms: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        arms.setdefault((run.arm, run.task), []).append(run)
    found = {key: differing(seeds) for key, seeds in arms.items()}
    return [f"{arm} on {task}: {', '.join(options)}" for (arm, task), options in found.items() if options]


def differing(runs: Sequence[Run]) -> list[str]:
    """Model and training options that differ among runs, each with its values."""
    models = dict.fromkeys(run.model for run in runs if run.model)
    found = [] if _differ_in_the_seed_only(runs) else [f"model ({', '.join(models)})"]
    configs = [run.config for run in runs if run.config]
    for name in sorted({name for config in configs for name in config if not _IGNORED_OPTIONS.fullmatch(name)}):
        values = dict.fromkeys(json.dumps(config.get(name), sort_keys=True) for config in configs)
        if len(values) > 1:
            found.append(f"{name} ({', '.join(values)})")
    return found


def _differ_in_the_seed_only(runs: Sequence[Run]) -> bool:
    """Whether the models have one name, but for the seed: a sweep may use one base per seed (`bases/seed{seed}`)."""
    known = [run for run in runs if run.model]
    parts = [re.split(r"(\d+)", run.model) for run in known]
    seeds = [str(run.seed) for run in known]
    return len({*map(len, parts)}) < 2 and all(
        len({*column}) == 1 or list(column) == seeds for column in zip(*parts, strict=False)
    )


def differing_seeds(runs: Sequence[Run]) -> list[str]:
    """Seeds of each arm, one line per task whose arms have different ones."""
    lines = []
    for task in dict.fromkeys(run.task for run in runs):
        seeds: dict[str, list[int]] = {}
        for run in runs:
            if run.task == task and run.seed is not None:
                seeds.setdefault(run.arm, []).append(run.seed)
        if len({frozenset(own) for own in seeds.values()}) > 1:
            listed = (f"{arm} {', '.join(map(str, sorted(own)))}" for arm, own in seeds.items())
            lines.append(f"{task}: {'; '.join(listed)}")
    return lines


def has_one_base(runs: Sequence[Run]) -> bool:
    """Whether all runs of a task and seed started from the same model, as far as it is recorded."""
    first = {(run.task, run.seed): run.model for run in reversed(runs)}
    return all(run.model == first[run.task, run.seed] for run in runs)


def read_run(folder: str | Path) -> Run:
    """Read one run directory, or the directory of one `trl credit-eval`.

    Raises:
        FileNotFoundError: the directory contains no file of a run.
        ValueError: a file is damaged; the message names it.
    """
    folder = Path(folder)
    is_run = (folder / RUN_FILE).is_file() or (folder / EVALUATIONS_FILE).is_file()
    if (folder / RESULT_FILE).is_file() and not is_run:
        return _evaluated_model(folder, read_json(folder / RESULT_FILE))
    described = read_json(folder / RUN_FILE) if (folder / RUN_FILE).is_file() else {}
    log, source = _read_log(folder)
    evaluations = _read_evaluations(folder / EVALUATIONS_FILE)
    if not described and not log and not evaluations:
        raise FileNotFoundError(f"{folder} holds no run.")
    config = described.get("config", {})
    method = described.get("method") or method_of(config)
    return Run(
        folder=folder,
        arm=described.get("arm") or _arm_name(method, config) or folder.name,
        task=(evaluations[0]["task"] if evaluations else described.get("task")) or "",
        seed=described.get("seed"),
        config=config,
        log=log,
        log_source=source,
        evaluations=evaluations,
        finished=(folder / SUMMARY_FILE).is_file(),
        model=str(described.get("base") or described.get("model") or ""),
    )


def _read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Rows of `evaluations.jsonl`, sorted by step."""
    rows = read_lines(path)
    for number, row in enumerate(rows, 1):
        for name, is_valid in (("step", _is_step), (SCORE, _is_number), ("task", lambda task: isinstance(task, str))):
            if not is_valid(row.get(name)):
                raise ValueError(printable(f"{path}, line {number}: `{name}` is {row.get(name)!r}. Remove the line."))
    return sorted(rows, key=lambda row: row["step"])


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def method_of(config: Mapping[str, Any]) -> str:
    """The method that a `CreditConfig` selects: "" for an empty one, GRPO for a `GRPOConfig`."""
    if not config:
        return ""
    if config.get("distillation_weight", 0.0) == 0.0:
        return "GRPO"
    if (use := config.get("credit_use", "distill")) != "distill":
        return "modulate-s" if config.get("credit_weight") == "s" else use
    if config.get("teacher_hint", "own") == "foreign":
        return "foreign-hint"
    if config.get("contrastive_coef", 0.0) == 0.0:
        return "SDPO"
    return {"hint": "hint-contrast", "self": "temper-only"}.get(config.get("contrastive_swap", "input"), "CREDIT")


# Options of the contrast that an arm's name shows when they differ from these defaults.
_DEFAULTS: dict[str, Any] = {
    "contrastive_form": "subtract",
    "contrastive_source": "batch",
    "contrastive_baseline": "mean_log",
    "contrastive_gate": 0.0,
    "contrastive_plausibility": 0.0,
}


def _arm_name(method: str, config: Mapping[str, Any]) -> str:
    """Method, λ, C and non-default options of the contrast, for runs that no sweep named."""
    if method not in ("CREDIT", "hint-contrast", "temper-only", "foreign-hint"):
        return method
    coefficient = config["contrastive_coef"]
    shown = f"λ={coefficient}" if isinstance(coefficient, str) else f"λ={coefficient:g}"  # 0.1.0 had "auto"
    options = [name for name, default in _DEFAULTS.items() if config.get(name, default) != default]
    changed = [f"{OPTION_LABELS[name]}={config[name]}" for name in options]
    return " ".join([method, shown, f"C={config['contrastive_count']}", *changed])


def _evaluated_model(folder: Path, result: Mapping[str, Any]) -> Run:
    """The run of an evaluation without training, named by the last two parts of the model's path."""
    if missing := {"model", "task", "k", SCORE} - result.keys():
        path = folder / RESULT_FILE
        raise ValueError(f"{path} is no result of `trl credit-eval`: it has no {', '.join(sorted(missing))}. Move it.")
    return Run(
        folder=folder,
        arm="/".join(Path(result["model"]).parts[-2:]) or result["model"],
        task=result["task"],
        seed=None,
        config={},
        log=[],
        log_source="",
        evaluations=[{"step": 0, "task": result["task"], "k": result["k"], SCORE: result["score"]}],
    )


def _read_log(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """(rows, file) of `log.jsonl`, or else of the trainer state with the highest step."""
    if (folder / LOG_FILE).is_file():
        return [row for row in read_lines(folder / LOG_FILE) if _is_step(row.get("step"))], LOG_FILE
    paths = [folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")]
    states = {path: read_json(path) for path in paths if path.is_file()}
    if not states:
        return [], ""
    last = max(states, key=lambda path: states[path].get("global_step", 0))
    return states[last].get("log_history", []), str(last.relative_to(folder))


def _run_folders(path: Path, seen: set[Path]) -> list[Path]:
    """Runs in a directory at any depth. Directories in `seen` are skipped, as a link may lead back to them."""
    if path.resolve() in seen:
        return []
    seen.add(path.resolve())
    if any((path / name).is_file() for name in (RUN_FILE, EVALUATIONS_FILE)):
        return [path]
    if (path / JOB_FILE).is_file():  # a planned job without a run; it may already hold the base's evaluation
        return []
    below = [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
    below.sort(key=lambda child: (child.is_symlink(), child.name))  # a run is named by its own path
    own = [path] if (path / RESULT_FILE).is_file() else []  # an evaluation of a model, which may lie above runs
    return own + [found for child in below for found in _run_folders(child, seen)]


@lru_cache(maxsize=4096)
def _prompts(path: Path, modified_ns: int) -> list[dict[str, Any]]:
    """Prompts of a result file; the modification time makes a rewritten file another key of the cache."""
    prompts = read_json(path).get("prompts")
    if not isinstance(prompts, list) or not prompts or not all(map(_is_prompt, prompts)):
        raise ValueError(f"{path} has no list `prompts` with `id`, `group` and `score` of each. Evaluate again.")
    return prompts


def _is_prompt(value: Any) -> bool:
    return isinstance(value, dict) and {"id", "group", SCORE} <= value.keys() and isinstance(value["id"], str)
