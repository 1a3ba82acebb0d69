"""The run of `trl credit-quickstart`: train a task on a CPU and measure accuracy and credit before and after."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers import PrinterCallback, TrainerCallback

from credit_trl.cli.quickstart_report import (
    QuickstartResult,
    draw_curve,
    read_answers,
    read_evaluation,
    stage_seconds,
)
from credit_trl.cli.quickstart_tasks import QuickstartTask, quickstart_task

if TYPE_CHECKING:
    from credit_trl.config import CreditConfig
    from credit_trl.evaluation import EvaluationCallback
    from credit_trl.lab.analysis.responses import Rollout
    from credit_trl.lab.analysis.tokenmap import TokenMap
    from credit_trl.trainer import CreditTrainer

PAGE = "token_maps.html"
SAMPLES = 4  # k of the held-out avg@k
SHOWN = 16  # responses on the page of token maps


def run_quickstart(
    output_dir: str | Path,
    steps: int | None = None,
    seed: int = 0,
    *,
    task: QuickstartTask | None = None,
    world: str = "plain",
    progress: bool = True,
    use_peft: bool = False,
    **overrides: Any,
) -> QuickstartResult:
    """Train the base of a task, by default the embedded one, and evaluate it before and after.

    Args:
        world: world of the base; see `quickstart_model.load_model`.
        use_peft: train LoRA adapters of rank 16 on all linear layers, at ten times the learning rate.
        **overrides: further options of `CreditConfig`, such as `contrastive_coef=0.0`.
    """
    task = task or quickstart_task("quickstart")
    if steps is not None and steps < 1:
        raise ValueError(f"`steps` must be at least 1, got {steps}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("The quickstart draws a learning curve: pip install matplotlib.")
    from credit_trl.config import CreditConfig

    if task.threads:
        torch.set_num_threads(task.threads)
    options = {**task.defaults, "seed": seed}
    options["max_steps"] = steps or options["max_steps"]
    options["learning_rate"] *= 10 if use_peft else 1
    trainer = quickstart_trainer(CreditConfig(str(output_dir), **{**options, **overrides}), task, world, use_peft)
    return _train_and_measure(trainer, task, _evaluate_during_training(trainer, task, world), progress)


def _train_and_measure(
    trainer: CreditTrainer, task: QuickstartTask, evaluation: EvaluationCallback, progress: bool
) -> QuickstartResult:
    from credit_trl.lab.analysis.tokenmap_summary import summarize_maps

    directory = Path(trainer.args.output_dir)
    trainer.add_callback(_Progress(progress))
    maps_before = token_maps(trainer, task, "before")
    trainer.train()
    maps_after = token_maps(trainer, task, "after")
    page = draw_maps(trainer, task, maps_before, directory)
    trainer.save_model(str(directory / "model"))
    trainer.accelerator.end_training()
    first, last = evaluation.history[0]["step"], evaluation.history[-1]["step"]
    return QuickstartResult(
        task=task,
        run_directory=directory,
        figure=draw_curve(directory, task),
        page=page,
        before=read_evaluation(directory, first),
        after=read_evaluation(directory, last),
        credit_before=summarize_maps(maps_before).classes,
        credit_after=summarize_maps(maps_after).classes,
        answers=read_answers(directory, task, first, last),
        stage_seconds=stage_seconds(directory),
        steps=trainer.args.max_steps,
    )


def quickstart_trainer(
    config: CreditConfig, task: QuickstartTask, world: str = "plain", use_peft: bool = False
) -> CreditTrainer:
    """The trainer of a task's base, without evaluations; the arguments are those of `run_quickstart`."""
    from credit_trl.tasks.registry import load_task
    from credit_trl.trainer import CreditTrainer

    model, tokenizer = task.load(world)
    adapters = None
    if use_peft:
        from peft import LoraConfig

        adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    data = load_task(task.name)
    trainer = CreditTrainer(
        model, data.reward, config, data.build("train"), processing_class=tokenizer, peft_config=adapters
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _evaluate_during_training(trainer: CreditTrainer, task: QuickstartTask, world: str) -> EvaluationCallback:
    """Add the held-out evaluations of a task to a trainer."""
    from credit_trl.evaluation import EvaluationCallback
    from credit_trl.tasks.registry import load_task

    evaluation = EvaluationCallback(
        trainer,
        task.name,
        SAMPLES,
        max(1, -(-trainer.args.max_steps // (task.evaluations - 1))),
        dataset=load_task(task.name).build("test", **task.test_rows),
        keep_best=False,
        batch_size=task.evaluation_batch,
        temperature=1.0,
        top_p=1.0,
        group_by="group",
        progress=False,
    )
    trainer.run_log.facts.update(task=task.name, world=world)
    trainer.add_callback(evaluation)
    return evaluation


def token_maps(
    trainer: CreditTrainer, task: QuickstartTask, name: str, responses: Sequence[Rollout] | None = None
) -> list[TokenMap]:
    """Token maps of responses under the current model and teacher, by default of new rollouts.

    Tokens have the classes of the task: words of the input (such as topic, tool, city) and the template.
    """
    from credit_trl.lab.analysis.checkpoints import Checkpoint
    from credit_trl.lab.analysis.responses import sample_rollouts
    from credit_trl.lab.analysis.token_classes import task_classes
    from credit_trl.lab.analysis.tokenmap import map_response
    from credit_trl.tasks.registry import load_task
    from credit_trl.teacher.models import Teacher

    tokenizer, data = trainer.processing_class, load_task(task.name)
    student = Teacher(trainer.model, trainer.accelerator)
    # GRPO has no teacher. Its student scores itself, as an EMA teacher would at the first step.
    checkpoint = Checkpoint(name, tokenizer, student, trainer.teacher or student)
    if responses is None:
        prompts, samples = task.scored
        rows = trainer.train_dataset.to_list()[:prompts]
        responses = sample_rollouts(checkpoint, data, rows, trainer.args, samples=samples)
    classify = task_classes(data, tokenizer)
    return [map_response(checkpoint, response, trainer.args, classify=classify) for response in responses]


def draw_maps(trainer: CreditTrainer, task: QuickstartTask, before: Sequence[TokenMap], directory: Path) -> Path:
    """Write the page of `SHOWN` responses before and after training, wrong ones first, and return its path."""
    from credit_trl.lab.analysis.tokenmap_html import write_html

    shown = sorted((one for one in before if one.response.privileged), key=lambda one: one.response.reward)[:SHOWN]
    after = token_maps(trainer, task, "after", [one.response for one in shown])
    write_html([*shown, *after], directory / PAGE, title="Quickstart: the same responses before and after training")
    return directory / PAGE


class _Progress(TrainerCallback):
    """Progress bar over the steps with the reward, in place of TRL's printed logs."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar = tqdm(total=state.max_steps, desc="training", unit="step", disable=not self.enabled)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "reward" in logs:
            self.bar.set_postfix_str(f"reward {logs['reward']:.2f}", refresh=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.close()
