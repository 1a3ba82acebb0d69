"""Trainer callback: avg@k during training, with its files of the run directory."""

import logging
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from credit_trl import run_directory as files
from credit_trl.evaluation.config import evaluation_config
from credit_trl.evaluation.engines import TrainerEngine
from credit_trl.evaluation.protocol import EvaluationMismatchError, evaluate, task_rows
from credit_trl.evaluation.result import Evaluation, score_text
from credit_trl.evaluation.verdicts import VerifierFailed
from credit_trl.rollout.verdict import VerifierPolicy
from credit_trl.tasks.registry import Task, load_task

logger = logging.getLogger(__name__)


class EvaluationCallback(TrainerCallback):
    """Evaluates avg@k every `eval_steps` generation batches, before the first step and after the last.

    Evaluation uses its own random streams, so training is bitwise the same with and without it. An interrupted
    evaluation continues if the weights are the same and otherwise restarts. The trainer's `verifier_timeout` applies;
    with `on_verifier_error="skip"` a step whose verifier fails is not evaluated. Another failure ends the run, whose
    processes would wait for one that has left an evaluation.

    Args:
        trainer: the trainer the callback is added to.
        task: a name for `load_task`, or a [`Task`].
        k: samples per prompt.
        eval_steps: generation batches between evaluations (5 in the paper).
        keep_best: save the model with the highest avg@k so far, the earliest of equals, in
            `<output_dir>/best-step-<step>`, in place of the previous one.
        first: also evaluate before the first step.
        **options: other fields of [`EvaluationConfig`]. `max_completion_length` is the trainer's by default,
            `batch_size` (per process) its `per_device_eval_batch_size`.

    Raises:
        ValueError: an option is out of range, or the trainer has tools or environments.
        TypeError: an unknown option, or one that the callback sets itself.
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
        **options: Any,
    ) -> None:
        if eval_steps < 1:
            raise ValueError(f"`eval_steps` must be at least 1, got {eval_steps}.")
        if not isinstance(trainer, Trainer):
            kind = type(trainer).__name__
            raise TypeError(f"`trainer` must be a trainer, got {kind}. The order of the arguments is trainer, task.")
        args = trainer.args
        self.folder = Path(args.output_dir)
        on_error = getattr(args, "on_verifier_error", "raise")
        policy = VerifierPolicy(on_error, getattr(args, "verifier_timeout", None))
        fixed = {"engine_options": None, "output_dir": self.folder / files.EVALUATIONS_FOLDER, "policy": policy}
        defaults = {"progress": not args.disable_tqdm, "max_completion_length": trainer.max_completion_length}
        options = defaults | options
        config = evaluation_config(type(self).__name__, k=k, **fixed, **options)
        self.trainer = trainer
        self.task = load_task(task)
        self.config = replace(config, dataset=task_rows(self.task, config))
        self.engine = TrainerEngine(trainer, batch_size=config.batch_size)
        micro_batches = eval_steps * args.steps_per_generation * args.num_iterations
        self.updates = max(1, micro_batches // args.gradient_accumulation_steps)  # between evaluations
        self.keep_best = keep_best
        self.first = first
        self.history: list[dict[str, Any]] = []
        self._has_begun = False
        # Of the evaluation before the first update: whether its row is not written yet, and its files meanwhile.
        self._is_unwritten = False
        self._temporary: tempfile.TemporaryDirectory | None = None

    def __str__(self) -> str:
        """One line for each evaluation so far."""
        return "\n".join(f"step {row['step']:4}  {score_text(row)}" for row in self.history)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the evaluations up to the step of the checkpoint."""
        self._has_begun = False
        self._is_unwritten = False
        if self.engine.is_main:
            step = self.trainer.run_log.continued_step()
            rows = [] if step is None else files.read_steps(self.folder / files.EVALUATIONS_FILE)
            self.history = [row for row in rows if row["step"] <= step]
        self.history = self.engine.share(self.history)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate before the first step, and where a run resumes from a step that ended before its evaluation."""
        step = state.global_step
        resumes = not self._has_begun
        self._has_begun = True
        if (self.first and step == 0) or (resumes and step > 0 and step % self.updates == 0):
            self._evaluate(step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the evaluation before the first update, once the run has taken over its directory."""
        if not self._is_unwritten:
            return
        self._is_unwritten = False
        if self._temporary is not None:
            shutil.copytree(self._temporary.name, self._place(state.global_step))
            self._temporary.cleanup()
            self._temporary = None
        self._write(state.global_step, saves=not args.deepspeed)  # which has updated the weights by now

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.updates == 0 and not control.should_training_stop:
            self._evaluate(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate after the last step, once its checkpoint is saved and before dashboards close."""
        if control.should_training_stop:
            self._evaluate(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluate(state.global_step)

    def _evaluate(self, step: int) -> None:
        if any(row["step"] == step for row in self.history):
            return
        is_early = not self.trainer.run_log.has_begun and step < self.trainer.state.max_steps
        place = self._place(step)
        if is_early and self.engine.is_main and self._is_in_earlier_run():
            self._temporary = tempfile.TemporaryDirectory(prefix="evaluation-")
            place = Path(self._temporary.name)
        try:
            result = self._measure(self.engine.share(place))
        except VerifierFailed as error:
            logger.warning(f"Step {step} was not evaluated: {error} Training continues (`on_verifier_error='skip'`).")
            return
        self.history.append({"step": step, **_row(result)})
        self._is_unwritten = is_early
        if not is_early:
            self._write(step, saves=True)
        # TRL's `log` would also reset the averages of the training log, and any log clears `should_log`.
        due = self.trainer.control.should_log
        Trainer.log(self.trainer, result.log_metrics())
        self.trainer.control.should_log = due

    def _place(self, step: int) -> Path:
        return self.folder / files.EVALUATIONS_FOLDER / f"step-{step:06d}"

    def _is_in_earlier_run(self) -> bool:
        """Whether the directory has files of an earlier run, which stay as they are until the first update."""
        return self.trainer.run_log.continued_step() is None and files.holds_run(self.folder)

    def _write(self, step: int, *, saves: bool) -> None:
        """Save the model of the last evaluation if it is the best, and add its row to the history's file."""
        *earlier, latest = self.history
        is_best = all(latest["score"] > row["score"] for row in earlier)
        if saves and self.keep_best and is_best:
            self._save_best(step)
        if self.engine.is_main:
            files.append_lines(self.folder / files.EVALUATIONS_FILE, [latest])
        self.trainer.accelerator.wait_for_everyone()

    def _measure(self, folder: Path) -> Evaluation:
        """Continue the evaluation in `folder` if it has the same weights; otherwise replace it."""
        options = {**vars(self.config), "output_dir": folder}
        try:
            return evaluate(self.engine, self.task, **options)
        except EvaluationMismatchError:
            if self.engine.is_main:
                shutil.rmtree(folder)
            self.trainer.accelerator.wait_for_everyone()
        return evaluate(self.engine, self.task, **options)

    def _save_best(self, step: int) -> None:
        """Save the model of a step, then remove that of an earlier one."""
        self.trainer.save_model(str(self.folder / f"best-step-{step}"))
        self.trainer.accelerator.wait_for_everyone()
        for folder in self.folder.glob("best-step-*") if self.engine.is_main else ():
            saved_step = folder.name.removeprefix("best-step-")
            if saved_step.isdecimal() and int(saved_step) != step and folder.is_dir():
                shutil.rmtree(folder)


def _row(result: Evaluation) -> dict[str, Any]:
    """A row of `evaluations.jsonl`."""
    row = {name: value for name, value in result.to_dict().items() if name not in ("model", "settings", "prompts")}
    groups = {name: interval.mean for name, interval in result.groups.items()}
    return row | {"pass_at_k": row.pop("pass_at")[result.k], "groups": groups}
