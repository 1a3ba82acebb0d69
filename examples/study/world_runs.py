"""Runs of a world with a predicted outcome: base, measurement, prediction, then one arm after another, into one CSV.

For every base the file gets a row per arm with step 0, the prediction and the base's own rates, before any arm is
trained. A finished arm appends a row per evaluated step. Arms that are in the file are skipped, so an interrupted run
continues when it is started again, and several processes share the work.
"""

from __future__ import annotations

import csv
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from branch import Branch, branch_rows, measure_branch, model_log_odds, predict
from filelock import FileLock, Timeout
from predicted import PREDICTED
from transformers import PrinterCallback, TrainerCallback

from credit_trl.evaluation import evaluate
from credit_trl.lab.sweeps import Arm, SweepSpec
from credit_trl.lab.sweeps.job import build_trainer, read_job
from credit_trl.lab.sweeps.launch import plan_sweep
from credit_trl.tasks.quickstart import GROUPS
from credit_trl.tasks.quickstart_model import read_base

KEY = ("world", "seed", "arm", "step")
RATES = tuple(f"{measure}_{group}" for measure in ("thought", "accuracy") for group in GROUPS)
COLUMNS = (
    *("world", "seed", "arm", "lambda", "step", "teacher_fidelity", *RATES, "format", "log_odds"),
    *("predicted_log_odds", "predicted_rate", "predicted_low", "predicted_high", "delta", "s"),
    *("log_odds_given", "length"),
)
PREDICTION = COLUMNS[COLUMNS.index("predicted_log_odds") : COLUMNS.index("s") + 1]
_OF_CALLBACK = ("eval_steps", "keep_best", "first")  # options of `EvaluationCallback` alone
_WAIT_SECONDS = 5.0

Row = dict[str, Any]


@dataclass(frozen=True)
class WorldRuns:
    """The runs of one world.

    Args:
        world: name of the world.
        spec: arms and settings; the model is that of `base_of`.
        seeds: seeds of the bases and of the training.
        folder: directory of the runs.
        csv: file of the rows.
        base_of: the directory of a seed's base, which it pretrains if it is missing.
        minutes: no arm is started that would probably end later; None for no limit.
    """

    world: str
    spec: SweepSpec
    seeds: Sequence[int]
    folder: Path
    csv: Path
    base_of: Callable[[int], Path]
    minutes: float | None = None

    def run(self) -> bool:
        """Run what is missing, base by base. Returns whether all rows are there; False after `minutes`."""
        begun, finished = time.monotonic(), 0
        self.folder.mkdir(parents=True, exist_ok=True)
        pending = list(self._missing())
        at_first = len(pending)
        while pending:
            busy = []
            for seed, arm in pending:
                elapsed = (time.monotonic() - begun) / 60
                if self.minutes is not None and elapsed + elapsed / max(finished, 1) > self.minutes:
                    print(f"{self.world}: stopped after {elapsed:.0f} min, {len(list(self._missing()))} runs left")
                    return False
                try:
                    finished += self._run_arm(seed, arm)
                except Timeout:
                    busy.append((seed, arm))
                    continue
                self._print_progress(begun, at_first)
            if len(busy) == len(pending):
                time.sleep(_WAIT_SECONDS)
            pending = [one for one in busy if one in self._missing()]
        return True

    def _missing(self) -> Iterator[tuple[int, Arm]]:
        """Seeds and arms without a row for the last step."""
        last, found = self.spec.config["max_steps"], set(read_rows(self.csv))
        for seed in self.seeds:
            yield from ((s, a) for s, a in ((seed, a) for a in self.spec.arms()) if self._key(s, a, last) not in found)

    def _key(self, seed: int, arm: Arm, step: int) -> tuple[str, int, str, int]:
        return self.world, seed, arm.name, step

    def _run_arm(self, seed: int, arm: Arm) -> bool:
        """Train one arm and write its rows; False if they are there. Raises `Timeout` if another process does it."""
        with FileLock(self.folder / f"{arm.slug}-seed{seed}.lock", timeout=0):
            if (seed, arm) not in self._missing():
                return False
            with FileLock(self.folder / f"base-seed{seed}.lock", timeout=0):
                base = self.base_of(seed)
                known = read_rows(self.csv)
                if any(self._key(seed, one, 0) not in known for one in self.spec.arms()):
                    self._append(self._predicted_rows(seed, base))
            begins = read_rows(self.csv)[self._key(seed, arm, 0)]
            predicted = {name: begins[name] for name in PREDICTION}
            self._append([row | predicted for row in self._train(seed, arm, base)])
        return True

    def _predicted_rows(self, seed: int, base: Path) -> list[Row]:
        """Rows of step 0: the base's rates and every arm's prediction."""
        model, tokenizer = read_base(base)
        world = PREDICTED[self.world]
        branch = measure_branch(model_log_odds(model, tokenizer, world.point), branch_rows(world.task, world.point))
        options = {name: value for name, value in self.spec.evaluation.items() if name not in _OF_CALLBACK}
        length = self.spec.config["max_completion_length"]
        found = evaluate(
            model, world.task, tokenizer=tokenizer, max_completion_length=length, progress=False, **options
        )
        measured = {
            "teacher_fidelity": world.fidelity(model, tokenizer),
            "log_odds": branch.log_odds.mean(),
            "log_odds_given": (branch.log_odds + branch.delta).mean(),
            **rates(found),
        }
        return [self._row(seed, arm, 0) | measured | prediction_columns(branch, arm) for arm in self.spec.arms()]

    def _train(self, seed: int, arm: Arm, base: Path) -> list[Row]:
        """Train one arm; a row per evaluated step."""
        spec = dataclasses.replace(self.spec, model=str(base), seeds=[seed])
        (folder,) = (one for one in plan_sweep(spec, self.folder) if one.parent.name == arm.slug)
        trainer = build_trainer(read_job(folder), folder)
        trainer.remove_callback(PrinterCallback)
        (evaluation,) = (c for c in trainer.callback_handler.callbacks if hasattr(c, "history"))
        branch = BranchCallback(trainer, self.world, self.spec.evaluation["eval_steps"])
        trainer.add_callback(branch)
        trainer.train()
        at = {row["step"]: row for row in evaluation.history}
        return [self._row(seed, arm, step) | branch.rows[step] | row_rates(at[step]) for step in sorted(branch.rows)]

    def _append(self, rows: Sequence[Row]) -> None:
        with FileLock(self.folder / "csv.lock"):
            append_rows(self.csv, rows)

    def _row(self, seed: int, arm: Arm, step: int) -> Row:
        return dict(zip(KEY, self._key(seed, arm, step), strict=True)) | {"lambda": coefficient(arm)}

    def _print_progress(self, begun: float, at_first: int) -> None:
        """Print the number of finished runs and the time left, of all processes; `at_first` runs were missing then."""
        left, minutes = len(list(self._missing())), (time.monotonic() - begun) / 60
        if left < at_first:
            total = len(self.seeds) * len(self.spec.arms())
            remaining = left * minutes / (at_first - left)
            print(f"{self.world}: {total - left} of {total} runs, about {remaining:.0f} min left", flush=True)


class BranchCallback(TrainerCallback):
    """Measures the policy's log-odds at the branch, without and with feedback, and the teacher's fidelity.

    Fidelity is the share of probes whose feedback the teacher reads right. GRPO has no teacher.
    """

    def __init__(self, trainer: Any, world: str, every: int) -> None:
        self.trainer, self.world, self.every = trainer, PREDICTED[world], every
        self.rows: dict[int, Row] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            model, tokenizer = self.trainer.accelerator.unwrap_model(self.trainer.model), self.trainer.processing_class
            rows = branch_rows(self.world.task, self.world.point)
            was_training = model.training
            model.eval()
            log_odds = model_log_odds(model, tokenizer, self.world.point)
            self.rows[state.global_step] = {
                "log_odds": log_odds(rows.prompts, rows.specific).mean(),
                "log_odds_given": log_odds(rows.given, rows.specific).mean(),
                "teacher_fidelity": self._fidelity(tokenizer),
            }
            model.train(was_training)

    def _fidelity(self, tokenizer: Any) -> float | None:
        if self.trainer.args.distillation_weight == 0.0:
            return None
        with self.trainer.teacher.active() as teacher:
            return self.world.fidelity(self.trainer.teacher.unwrapped(teacher), tokenizer)


def coefficient(arm: Arm) -> float | None:
    """λ of an arm, 0 for SDPO and None for GRPO."""
    return None if arm.method == "GRPO" else arm.options.get("contrastive_coef", 0.1)


def prediction_columns(branch: Branch, arm: Arm) -> Row:
    """Prediction for an arm with the δ and s that it rests on."""
    s = branch.s_of(arm.options.get("contrastive_swap", "input"))
    found = predict(branch, arm.options)
    names = ("log_odds", "rate", "low", "high")
    values = {f"predicted_{name}": None if found is None else getattr(found, name) for name in names}
    return values | {"delta": branch.delta.mean(), "s": s.mean()}


def rates(result: Any) -> Row:
    """Rate columns of an `Evaluation`."""
    accuracy = {name: interval.mean for name, interval in result.groups.items()}
    values = {"groups": accuracy, "group_metrics": result.group_metrics, "metrics": result.metrics}
    return row_rates(values | {"mean_length": result.mean_length})


def row_rates(row: Mapping[str, Any]) -> Row:
    """Rate columns of a line of `evaluations.jsonl`."""
    thoughts = {f"thought_{group}": row["group_metrics"][group]["shortcut"] for group in GROUPS}
    accuracies = {f"accuracy_{group}": row["groups"][group] for group in GROUPS}
    return thoughts | accuracies | {"format": row["metrics"]["format"], "length": row["mean_length"]}


def read_rows(file: Path) -> dict[tuple[str, int, str, int], Row]:
    """Rows by world, seed, arm and step, with numbers as floats and None for empty cells."""
    if not file.is_file():
        return {}
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [
            {name: row[name] if name in KEY else (float(row[name]) if row.get(name) else None) for name in COLUMNS}
            for row in csv.DictReader(lines)
        ]
    return {(row["world"], int(row["seed"]), row["arm"], int(row["step"])): row for row in rows}


def append_rows(file: Path, rows: Sequence[Row]) -> None:
    """Append the rows that the file does not have. Processes that share the file must lock it."""
    known = read_rows(file)
    new = [row for row in rows if tuple(row[name] for name in KEY) not in known]
    file.parent.mkdir(parents=True, exist_ok=True)
    has_columns = file.is_file() and file.read_text(encoding="utf-8").startswith(",".join(COLUMNS))
    with file.open("a" if has_columns else "w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
        if not has_columns:  # also the rows of a file with fewer columns
            writer.writeheader()
            new = [*known.values(), *new]
        writer.writerows({name: _text(row[name]) for name in COLUMNS} for row in new)


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
