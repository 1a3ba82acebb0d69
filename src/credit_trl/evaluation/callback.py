"""Evaluation during training, and what a run keeps of it.

`RunLog` writes what every later comparison reads; `EvaluationCallback` measures avg@k every few steps, keeps the best
model and reports best-during-training and final scores side by side, since the first is the largest of several noisy
numbers and so flatters.
"""

from __future__ import annotations

import inspect
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from credit_trl.evaluation.engines import Sampling
from credit_trl.evaluation.protocol import EvaluationMismatchError, evaluate, task_rows
from credit_trl.evaluation.result import Evaluation
from credit_trl.evaluation.trainer_engine import TrainerEngine
from credit_trl.evaluation.verdicts import VerifierFailed
from credit_trl.rollout.verdict import VerifierPolicy
from credit_trl.tasks.registry import Task, load_task
from credit_trl.training.run_directory import (
    BEST_FILE,
    EVALUATIONS_FILE,
    EVALUATIONS_FOLDER,
    LOG_FILE,
    RUN_FILE,
    SUMMARY_FILE,
    append_line,
    keep_up_to,
    read_lines,
    write_json,
)

logger = logging.getLogger(__name__)

# Arguments of `evaluate` that an evaluation during training decides itself.
_OWN = {"model", "tokenizer", "engine", "engine_options", "output_dir", "policy"}
# A run that starts anew in a used directory keeps no line, not even those of step 0.
BEFORE_ANY = -1


class RunLog(TrainerCallback):
    """Writes `run.json` and `log.jsonl` into the output directory, whatever `report_to` says.

    A run that resumes first drops the lines after the step that it resumes from.

    Args:
        **facts: what else `run.json` is to say, such as `task="sciknoweval:chemistry"`.
    """

    def __init__(self, **facts: Any) -> None:
        self.facts = facts

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        model = kwargs.get("model")
        described = {
            "config": args.to_dict(),
            "seed": args.seed,
            "model": getattr(model, "name_or_path", "") or type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()) if model is not None else None,
            **self.facts,
        }
        write_json(Path(args.output_dir) / RUN_FILE, json.loads(json.dumps(described, default=str)))
        keep_up_to(Path(args.output_dir) / LOG_FILE, state.global_step or BEFORE_ANY)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and logs:
            append_line(Path(args.output_dir) / LOG_FILE, {"step": state.global_step, **logs})


class EvaluationCallback(TrainerCallback):
    """avg@k every `eval_steps` optimizer steps, before the first and after the last, with sampling of its own.

    It draws from random streams of its own, so a run trains the same with it and without it. An evaluation that a
    kill interrupted continues where it was if the weights are the same, and starts anew if they are not. The trainer's
    `verifier_timeout` holds here too; with `on_verifier_error="skip"` a step whose verifier fails has no evaluation.

    Example:

    ```python
    trainer.add_callback(EvaluationCallback(trainer, "sciknoweval:chemistry", k=16, eval_steps=5))
    ```

    Args:
        trainer: the trainer that it is added to.
        task: as in `evaluate`.
        k: samples a prompt.
        eval_steps: optimizer steps between two evaluations (the paper: 5).
        keep_best: save the model with the highest avg@k so far, in `<output_dir>/best-step-<step>`; the earliest of
            equals. The one before it is removed once a checkpoint has been saved that does not need it.
        first: evaluate before the first step too, which gives the base model's score.
        batch_size: answers generated side by side on a process, by default `per_device_eval_batch_size`.
        split, path, dataset, max_prompts: the rows, as in `evaluate`.
        **options: further arguments of `evaluate`; `max_completion_length` is the trainer's by default.

    Raises:
        ValueError: `eval_steps` or `k` below 1, a sampling setting out of range, or a trainer with tools or
            environments.
        TypeError: an option that `evaluate` does not have, or that the callback sets itself.
    """

    def __init__(
        self,
        trainer: Any,
        task: str | Task,
        k: int = 16,
        eval_steps: int = 5,
        *,
        keep_best: bool = True,
        first: bool = True,
        batch_size: int | None = None,
        split: str = "test",
        path: str | Path | None = None,
        dataset: Any = None,
        max_prompts: int | None = None,
        **options: Any,
    ) -> None:
        if eval_steps < 1:
            raise ValueError(f"`eval_steps` must be at least 1, got {eval_steps}.")
        check_options(k, options)
        self.trainer = trainer
        self.task = load_task(task) if isinstance(task, str) else task
        self.rows = task_rows(self.task, split, path, dataset, max_prompts)
        self.engine = TrainerEngine(trainer, batch_size=batch_size)
        self.k = k
        self.eval_steps = eval_steps
        self.keep_best = keep_best
        self.first = first
        args = trainer.args
        policy = VerifierPolicy(args.on_verifier_error, args.verifier_timeout) if _has_policy(args) else None
        self.options = {
            "policy": policy,
            "progress": not args.disable_tqdm,
            "max_completion_length": trainer.max_completion_length,
            **options,
        }
        self.folder = Path(trainer.args.output_dir)
        self.history: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take up the evaluations up to the step that the run resumes from; forget those of steps that were lost."""
        if self.engine.is_main:
            keep_up_to(self.folder / EVALUATIONS_FILE, state.global_step or BEFORE_ANY)
            self.history = read_lines(self.folder / EVALUATIONS_FILE)
            (self.folder / SUMMARY_FILE).unlink(missing_ok=True)
            self._point_at_best()
            self._drop_other_models()
        self.history = self.engine.share(self.history)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.first and state.global_step == 0:
            self._evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.eval_steps == 0:
            self._evaluate(state.global_step)
            if args.save_strategy == "no" and self.engine.is_main:
                self._drop_other_models()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.engine.is_main:
            self._drop_other_models()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluate(state.global_step)
        if self.engine.is_main:
            self._drop_other_models()
            if any(row["step"] == state.global_step for row in self.history):
                write_json(self.folder / SUMMARY_FILE, summary(self.history, state.global_step))

    def _evaluate(self, step: int) -> None:
        if any(row["step"] == step for row in self.history):
            return
        try:
            result = self._measure(self.folder / EVALUATIONS_FOLDER / f"step-{step:06d}")
        except VerifierFailed as error:
            logger.warning(f"Step {step} was not evaluated: {error} With `on_verifier_error='skip'` the run goes on.")
            return
        if self.keep_best and all(result.score > row["score"] for row in self.history):
            self._save_model(step)
        self.history.append({"step": step, **_row(result)})
        if self.engine.is_main:
            append_line(self.folder / EVALUATIONS_FILE, self.history[-1])
            self._point_at_best()
        self.trainer.accelerator.wait_for_everyone()
        self._log(result)

    def _log(self, result: Evaluation) -> None:
        """Through the base class: TRL's `log` would also close the averages of the training log here.

        A log clears the flag that this step's training log is due, so it is put back.
        """
        due = self.trainer.control.should_log
        Trainer.log(self.trainer, result.log_metrics())
        self.trainer.control.should_log = due

    def _measure(self, folder: Path) -> Evaluation:
        """Continue the evaluation in `folder` if it is of these weights; else it is what a lost step left."""
        options = {"dataset": self.rows, "output_dir": folder, **self.options}
        try:
            return evaluate(self.engine, self.task, self.k, **options)
        except EvaluationMismatchError:
            if self.engine.is_main:
                shutil.rmtree(folder)
            self.trainer.accelerator.wait_for_everyone()
        return evaluate(self.engine, self.task, self.k, **options)

    def _save_model(self, step: int) -> None:
        folder = self.folder / best_folder(step)
        if self.engine.is_main:
            shutil.rmtree(folder, ignore_errors=True)
        self.trainer.accelerator.wait_for_everyone()
        self.trainer.save_model(str(folder))

    def _point_at_best(self) -> None:
        """Let `best.json` name the best evaluation so far and, where models are kept, its folder."""
        if not self.history:
            (self.folder / BEST_FILE).unlink(missing_ok=True)
            return
        best = best_of(self.history)
        folder = best_folder(best["step"]) if self.keep_best else None
        write_json(self.folder / BEST_FILE, {"folder": folder, **best})

    def _drop_other_models(self) -> None:
        """Remove every kept model but the best one's."""
        named = best_folder(best_of(self.history)["step"]) if self.history else None
        for folder in self.folder.glob("best-step-*"):
            if folder.name != named:
                shutil.rmtree(folder)


def _has_policy(args: Any) -> bool:
    """A `CreditConfig` says what is done about verifiers that fail, a `GRPOConfig` does not."""
    return hasattr(args, "on_verifier_error")


def check_options(k: int, options: Mapping[str, Any]) -> None:
    """What `evaluate` would refuse at the first evaluation, which may be hours away."""
    if k < 1:
        raise ValueError(f"`k` must be at least 1, got {k}.")
    known = inspect.signature(evaluate).parameters.keys() - _OWN
    if unknown := sorted(options.keys() - known):
        listed = ", ".join(sorted(known))
        raise TypeError(f"An evaluation during training has no {', '.join(unknown)}; it has {listed}.")
    Sampling(**{field.name: options[field.name] for field in fields(Sampling) if field.name in options})


def best_folder(step: int) -> str:
    """Where the best model lies in the output directory, if it is that of `step`."""
    return f"best-step-{step}"


def best_of(history: list[dict[str, Any]]) -> dict[str, Any]:
    """The evaluation with the highest score, the earliest of equals."""
    return max(history, key=lambda row: (row["score"], -row["step"]))


def summary(history: list[dict[str, Any]], last_step: int) -> dict[str, Any]:
    """Best-during-training and final scores of a run, each under its own name.

    Args:
        history: rows of `evaluations.jsonl`.
        last_step: the last optimizer step.

    Raises:
        ValueError: the last step was not evaluated.
    """
    final = [row for row in history if row["step"] == last_step]
    if not final:
        raise ValueError(f"Step {last_step} was not evaluated, so there is no final score.")
    return {
        "best_during_training": best_of(history),
        "final": final[0],
        "evaluations": len(history),
        "note": (
            f"best_during_training is the largest of {len(history)} scores on the same prompts and is biased upwards; "
            "final is not selected."
        ),
    }


def _row(result: Evaluation) -> dict[str, Any]:
    return {
        "task": result.task,
        "k": result.k,
        "score": result.score,
        "low": result.low,
        "high": result.high,
        "pass_at_k": result.pass_at[result.k],
        "majority": result.majority,
        "mean_length": result.mean_length,
        "truncated": result.truncated,
        "metrics": dict(result.metrics),
        "groups": {name: interval.mean for name, interval in result.groups.items()},
        "group_metrics": {name: dict(metrics) for name, metrics in result.group_metrics.items()},
    }
