"""Reading run directories: what was run, its log, and per-prompt scores of every evaluation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from credit_trl.training.run_directory import (
    EVALUATIONS_FILE,
    EVALUATIONS_FOLDER,
    JOB_FILE,
    LOG_FILE,
    RUN_FILE,
    SUMMARY_FILE,
    read_lines,
)

# The result of an evaluation: of one step of a run, or of `trl credit-eval`, whose directory is a run by itself.
RESULT_FILE = "result.json"
SETTINGS_FILE = "settings.json"  # beside it, what the responses were sampled with
SCORE = "score"
MAJORITY = "majority"


@dataclass(frozen=True)
class Run:
    """One training run, or one evaluation of a model by itself.

    Args:
        folder: its directory.
        arm: what it is called in tables; runs of one arm differ in their seed.
        method: GRPO, SDPO, CREDIT or a control.
        task: what it was evaluated on.
        seed: None where it is not known.
        config: the trainer's configuration.
        log: the trainer's logs, in order, each with its `step`.
        log_source: the file that they were read from.
        evaluations: rows of `evaluations.jsonl`, by step.
        finished: whether training came to its end, so that the last evaluation is the final one.
        model: what training began at; "" where it is not known.
    """

    folder: Path
    arm: str
    method: str
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
        """The steps that were evaluated."""
        return [row["step"] for row in self.evaluations]

    def best_step(self) -> int:
        """The evaluated step with the highest avg@k, the earliest of equals."""
        return max(self.evaluations, key=lambda row: (row[SCORE], -row["step"]))["step"]

    def final_step(self) -> int:
        """The last step that was evaluated."""
        return max(self.steps)

    def prompts(self, step: int) -> list[dict[str, Any]]:
        """Per-prompt results of the evaluation at a step: `id`, `group`, `score`, `majority`, `metrics`."""
        path = (self._evaluation(step) / RESULT_FILE).resolve()
        return _prompts(path, path.stat().st_mtime_ns)

    def settings(self, step: int) -> dict[str, Any]:
        """What the responses at a step were sampled with; empty where nothing was written of it."""
        path = self._evaluation(step) / SETTINGS_FILE
        return _json(path) if path.is_file() else {}

    def _evaluation(self, step: int) -> Path:
        inside = self.folder / EVALUATIONS_FOLDER / f"step-{step:06d}"
        return inside if (inside / RESULT_FILE).is_file() else self.folder

    def per_prompt(self, step: int, measure: str = SCORE) -> dict[str, float]:
        """Prompt id → its score, its maj@k, or the mean of a metric of its verdicts.

        Raises:
            ValueError: the run has no such measure.
        """
        values = {prompt["id"]: _measure(prompt, measure) for prompt in self.prompts(step)}
        lacking = [name for name, value in values.items() if value is None]
        if lacking and len(lacking) < len(values):
            raise ValueError(
                f"{self.folder} has {measure!r} of {len(values) - len(lacking)} prompts of {len(values)}, not of "
                f"{lacking[0]!r}: an average would be over other prompts. Let the verifier give it to every response."
            )
        if lacking:
            metrics = sorted({name for prompt in self.prompts(step) for name in prompt["metrics"]})
            raise ValueError(
                f"{self.folder} has no measure {measure!r}; it has {', '.join([SCORE, MAJORITY, *metrics])}."
            )
        return values

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a number in the log, without the steps that lack it."""
        found = [(row["step"], row[name]) for row in self.log if isinstance(row.get(name), int | float)]
        return [step for step, _ in found], [float(value) for _, value in found]


def find_runs(paths: Iterable[str | Path]) -> list[Run]:
    """The runs in these directories, at any depth; a directory inside a run belongs to it.

    Raises:
        FileNotFoundError: a path holds no run.
    """
    runs: dict[Path, Run] = {}
    for path in map(Path, paths):
        folders = sorted(_run_folders(path))
        if not folders:
            raise FileNotFoundError(
                f"{path} holds no run: no {RUN_FILE}, {EVALUATIONS_FILE} or {RESULT_FILE} in it or below. Train with "
                "`trl credit --avg_at_k 16` or an `EvaluationCallback`, or use `trl credit-eval --output_dir`."
            )
        for folder in folders:
            runs.setdefault(folder.resolve(), read_run(folder))
    return list(runs.values())


# What changes a score, whatever the model: the prompts are compared by themselves, and k changes an interval only.
_SAMPLED_WITH = ("temperature", "top_p", "top_k", "max_completion_length", "template")


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """How the final evaluations of a task were sampled, one line for each setting that is not the same in all."""
    lines = []
    for task in dict.fromkeys(run.task for run in runs):
        settings = {run.folder: run.settings(run.final_step()) for run in runs if run.task == task}
        for name in _SAMPLED_WITH:
            runs_with: dict[str, list[str]] = {}
            for folder, found in settings.items():
                if name in found:
                    runs_with.setdefault(json.dumps(found[name], sort_keys=True), []).append(str(folder))
            if len(runs_with) > 1:
                told = "; ".join(f"{value} in {_first_of(folders)}" for value, folders in runs_with.items())
                lines.append(f"{task}, {name}: {told}")
    return lines


# Options of a run that its training does not depend on, or that seeds differ in.
_NOT_TRAINED_WITH = re.compile(
    r"seed|data_seed|run_name|.*_dir|resume_from_checkpoint|disable_tqdm|project|trackio_.*|(dataloader|eval|hub|log|logging|"
    r"push|report|save|wandb)_.*"
)


def differing_options(runs: Sequence[Run]) -> list[str]:
    """Model and options that runs of one arm, which are taken for its seeds, do not share; one line an arm."""
    lines = []
    for arm, task in dict.fromkeys((run.arm, run.task) for run in runs):
        mine = [run for run in runs if (run.arm, run.task) == (arm, task)]
        models = dict.fromkeys(_model_at_any_seed(run) for run in mine if run.model)
        told = [f"model ({', '.join(models)})"] if len(models) > 1 else []
        configs = [run.config for run in mine if run.config]
        for name in sorted({name for config in configs for name in config if not _NOT_TRAINED_WITH.fullmatch(name)}):
            values = dict.fromkeys(json.dumps(config.get(name), sort_keys=True) for config in configs)
            if len(values) > 1:
                told.append(f"{name} ({', '.join(values)})")
        if told:
            lines.append(f"{arm} on {task}: {', '.join(told)}")
    return lines


def has_one_base(runs: Sequence[Run]) -> bool:
    """Whether all runs of one task and seed began at the same model, as far as it is known."""
    first = {(run.task, run.seed): run.model for run in reversed(runs)}
    return all(run.model == first[run.task, run.seed] for run in runs)


def _model_at_any_seed(run: Run) -> str:
    """A sweep may have a base of its own for each seed, such as `bases/seed{seed}`: these are one model."""
    return run.model if run.seed is None else re.sub(rf"(?<!\d){run.seed}(?!\d)", "{seed}", run.model)


def _first_of(folders: Sequence[str]) -> str:
    return folders[0] if len(folders) == 1 else f"{folders[0]} and {len(folders) - 1} more"


def read_run(folder: str | Path) -> Run:
    """Read one run directory.

    Raises:
        FileNotFoundError: there is nothing of a run.
        ValueError: a file is damaged; the message names it.
    """
    folder = Path(folder)
    alone = folder / RESULT_FILE
    if alone.is_file():
        return _read_evaluation(folder, _json(alone))
    described = _json(folder / RUN_FILE) if (folder / RUN_FILE).is_file() else {}
    log, source = _read_log(folder)
    evaluations = sorted(read_lines(folder / EVALUATIONS_FILE), key=lambda row: row["step"])
    if not described and not log and not evaluations:
        raise FileNotFoundError(f"{folder} holds no run.")
    config = described.get("config", {})
    method = described.get("method") or method_of(config)
    return Run(
        folder=folder,
        arm=described.get("arm") or _arm(method, config) or folder.name,
        method=method,
        task=(evaluations[0]["task"] if evaluations else described.get("task")) or "",
        seed=described.get("seed"),
        config=config,
        log=log,
        log_source=source,
        evaluations=evaluations,
        finished=(folder / SUMMARY_FILE).is_file(),
        model=str(described.get("base") or described.get("model") or ""),
    )


def method_of(config: Mapping[str, Any]) -> str:
    """The method that a `CreditConfig` amounts to; "" without one, GRPO for a `GRPOConfig`."""
    if not config:
        return ""
    if config.get("distillation_weight", 0.0) == 0.0:
        return "GRPO"
    if config.get("teacher_hint", "own") == "foreign":
        return "foreign-hint"
    if config.get("contrastive_coef", 0.0) == 0.0:
        return "SDPO"
    return "hint-contrast" if config.get("contrastive_swap", "input") == "hint" else "CREDIT"


# Options of the contrast that a label shows where they are not at their defaults: word and default.
_SHOWN: dict[str, tuple[str, Any]] = {
    "contrastive_form": ("form", "subtract"),
    "contrastive_source": ("source", "batch"),
    "contrastive_baseline": ("baseline", "mean_log"),
    "contrastive_gate": ("gate", 0.0),
    "contrastive_plausibility": ("plausibility", 0.0),
}


def _arm(method: str, config: Mapping[str, Any]) -> str:
    """Method with λ, C and what else is not usual of the contrast, for runs that no sweep named."""
    if method not in ("CREDIT", "hint-contrast", "foreign-hint"):
        return method
    coefficient = config["contrastive_coef"]
    shown = f"λ={coefficient}" if coefficient == "auto" else f"λ={coefficient:g}"
    if coefficient == "auto" and "contrastive_auto_level" in config:
        shown += f" {config.get('contrastive_auto_quantity', 'kl')}={config['contrastive_auto_level']:g}"
    words = [method, shown, f"C={config['contrastive_count']}"]
    words += [f"{word}={config[name]}" for name, (word, usual) in _SHOWN.items() if config.get(name, usual) != usual]
    return " ".join(words)


def _read_evaluation(folder: Path, result: Mapping[str, Any]) -> Run:
    """A model that was evaluated by itself: one evaluation, no training. Two runs may both have a `checkpoint-50`."""
    row = {"step": 0, "task": result["task"], "k": result["k"], SCORE: result["score"]}
    arm = "/".join(Path(result["model"]).parts[-2:]) or result["model"]
    return Run(folder, arm, "", result["task"], None, {}, [], "", [row])


def _read_log(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """The log, from `log.jsonl` or else from the last trainer state there is."""
    if (folder / LOG_FILE).is_file():
        return [row for row in read_lines(folder / LOG_FILE) if "step" in row], LOG_FILE
    states = [folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")]
    states = [(state, _json(state)) for state in states if state.is_file()]
    if not states:
        return [], ""
    path, state = max(states, key=lambda found: found[1].get("global_step", 0))
    return state.get("log_history", []), str(path.relative_to(folder))


def _run_folders(path: Path) -> list[Path]:
    if any((path / name).is_file() for name in (RUN_FILE, EVALUATIONS_FILE, RESULT_FILE)):
        return [path]
    if (path / JOB_FILE).is_file():  # planned, and not begun; the base's evaluation may lie there already
        return []
    below = [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
    return [found for child in below for found in _run_folders(child)]


@lru_cache(maxsize=4096)
def _prompts(path: Path, written: int) -> list[dict[str, Any]]:
    """Of one state of a file, told by when it was written: a notebook compares, trains again, and compares."""
    return _json(path)["prompts"]


def _measure(prompt: Mapping[str, Any], measure: str) -> float | None:
    return prompt.get(measure) if measure in (SCORE, MAJORITY) else prompt.get("metrics", {}).get(measure)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object.")
    return value
