"""`trl credit-quickstart`: train the embedded task on a CPU and report accuracy and credit before and after.

Model and data are part of the package or generated, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from credit_trl.cli.errors import ignore_future_warnings
from credit_trl.cli.quickstart_report import QuickstartResult, draw_curve, format_result, stage_seconds
from credit_trl.training.run_directory import EVALUATIONS_FOLDER

if TYPE_CHECKING:
    from credit_trl.config import CreditConfig
    from credit_trl.evaluation import Evaluation, EvaluationCallback
    from credit_trl.lab.analysis.responses import Rollout
    from credit_trl.lab.analysis.tokenmap import TokenMap
    from credit_trl.trainer import CreditTrainer

PAGE = "token_maps.html"
EVALUATIONS = 5  # during training, including those before the first and after the last step
SCORED_PROMPTS, SCORED_SAMPLES = 32, 2  # responses in the table of S_t
SHOWN = 16  # responses on the page of token maps

# Options of `CreditConfig` that differ from its defaults: 16 prompts of 4 rollouts per step, and a learning rate, a
# warm-up and a teacher update rate for half a million parameters and 100 steps.
DEFAULTS: dict[str, Any] = {
    "max_steps": 100,
    "per_device_train_batch_size": 64,
    "num_generations": 4,
    "max_completion_length": 32,
    "temperature": 1.0,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    "contrastive_coef": 0.1,
    "contrastive_count": 1,
    "distillation_topk": 20,
    "distillation_tail": "bucket",
    "teacher_update_rate": 0.02,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train the embedded model on the embedded task, on one CPU core in a minute or two. Prints held-out accuracy "
        "before and after, S_t by token class, and seconds per stage. Writes a learning curve and a page of token "
        "maps to --output_dir."
    )
    parser.add_argument("--output_dir", default="runs/quickstart", help="default runs/quickstart")
    parser.add_argument("--steps", type=int, default=DEFAULTS["max_steps"], help="steps of 64 rollouts (default 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--world", default="plain", help="plain (default), or a world pretrained before: shortcut, style"
    )
    parser.add_argument(
        "--contrastive_coef", type=float, default=DEFAULTS["contrastive_coef"], help="λ; 0 is SDPO (default 0.1)"
    )
    parser.add_argument("--distillation_weight", type=float, default=1.0, help="0 is GRPO (default 1)")


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # more threads gain little for this model
    ignore_future_warnings()
    disable_progress_bar()  # of the libraries
    result = run_quickstart(
        args.output_dir,
        args.steps,
        args.seed,
        world=args.world,
        contrastive_coef=args.contrastive_coef,
        distillation_weight=args.distillation_weight,
    )
    print(format_result(result))
    return 0


def run_quickstart(
    output_dir: str | Path,
    steps: int = DEFAULTS["max_steps"],
    seed: int = 0,
    *,
    world: str = "plain",
    progress: bool = True,
    samples: int = 4,
    test_rows_per_cue: int = 4,
    **overrides: Any,
) -> QuickstartResult:
    """Train the base of a world and evaluate it before and after.

    Args:
        output_dir: Run directory. Files of an earlier quickstart are overwritten.
        steps: Optimizer steps of 64 rollouts.
        seed: Seed of data order, rollouts and contrast prompts.
        world: World of the base; see `quickstart_model.load_model`.
        progress: Show a progress bar.
        samples: k of the held-out avg@k.
        test_rows_per_cue: Held-out prompts per cue.
        **overrides: Further options of `CreditConfig`, such as `contrastive_coef=0.0`.

    Raises:
        FileNotFoundError: The base of the world is neither shipped nor in the cache.
        ImportError: matplotlib is missing.
        ValueError: `steps` is below 1, or an option of `CreditConfig` is invalid.
    """
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, got {steps}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("The quickstart draws a learning curve: pip install 'credit-trl[viz]'.")
    from credit_trl.config import CreditConfig
    from credit_trl.lab.analysis.tokenmap_summary import summarize_maps

    directory = Path(output_dir)
    config = CreditConfig(str(directory), **{**DEFAULTS, "max_steps": steps, "seed": seed, **overrides})
    trainer = _make_trainer(config, world)
    evaluation = _evaluate_during_training(trainer, samples, test_rows_per_cue, world)
    trainer.add_callback(_Progress(progress))
    maps_before = token_maps(trainer, "before")
    trainer.train()
    maps_after = token_maps(trainer, "after")
    page = draw_maps(trainer, maps_before, directory)
    trainer.save_model(str(directory / "model"))
    trainer.end()
    return QuickstartResult(
        run_directory=directory,
        figure=draw_curve(directory),
        page=page,
        before=_read_evaluation(directory, evaluation.history[0]["step"]),
        after=_read_evaluation(directory, evaluation.history[-1]["step"]),
        credit_before=summarize_maps(maps_before).classes,
        credit_after=summarize_maps(maps_after).classes,
        stage_seconds=stage_seconds(directory),
        steps=steps,
    )


def _make_trainer(config: CreditConfig, world: str) -> CreditTrainer:
    from credit_trl.tasks import quickstart
    from credit_trl.trainer import CreditTrainer

    model, tokenizer = quickstart.load_model(world=world)
    trainer = CreditTrainer(model, quickstart.reward, config, quickstart.build("train"), processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _evaluate_during_training(
    trainer: CreditTrainer, samples: int, rows_per_cue: int, world: str
) -> EvaluationCallback:
    """Add the run log and `EVALUATIONS` held-out evaluations to a trainer."""
    from credit_trl.evaluation import EvaluationCallback
    from credit_trl.evaluation.callback import RunLog
    from credit_trl.tasks import quickstart

    evaluation = EvaluationCallback(
        trainer,
        quickstart.TASK,
        samples,
        max(1, -(-trainer.args.max_steps // (EVALUATIONS - 1))),
        dataset=quickstart.build("test", rows_per_cue=rows_per_cue),
        keep_best=False,
        batch_size=288,
        temperature=1.0,
        top_p=1.0,
        group_by="group",
        progress=False,
    )
    for callback in (RunLog(task=quickstart.TASK, world=world), evaluation):
        trainer.add_callback(callback)
    return evaluation


def token_maps(trainer: CreditTrainer, name: str, responses: Sequence[Rollout] | None = None) -> list[TokenMap]:
    """Token maps of responses under the current model and teacher, by default of new rollouts.

    Tokens have the classes of the task: words of the input (cue, topic, tool, city) and the template.
    """
    from credit_trl.lab.analysis.checkpoints import Checkpoint
    from credit_trl.lab.analysis.responses import sample_rollouts
    from credit_trl.lab.analysis.token_classes import task_classes
    from credit_trl.lab.analysis.tokenmap import map_response
    from credit_trl.tasks.registry import load_task
    from credit_trl.teacher.models import Teacher

    tokenizer, task = trainer.processing_class, load_task("quickstart")
    student = Teacher(trainer.model, trainer.accelerator)
    # GRPO has no teacher. Its student scores itself, as an EMA teacher would at the first step.
    checkpoint = Checkpoint(name, tokenizer, student, trainer.teacher or student)
    if responses is None:
        rows = trainer.train_dataset.to_list()[:SCORED_PROMPTS]
        responses = sample_rollouts(checkpoint, task, rows, trainer.args, samples=SCORED_SAMPLES)
    classify = task_classes(task, tokenizer)
    return [map_response(checkpoint, response, trainer.args, classify=classify) for response in responses]


def draw_maps(trainer: CreditTrainer, before: Sequence[TokenMap], directory: Path) -> Path:
    """Write the page of `SHOWN` responses before and after training, wrong ones first, and return its path."""
    from credit_trl.lab.analysis.tokenmap_html import write_html

    shown = sorted((one for one in before if one.response.privileged), key=lambda one: one.response.reward)[:SHOWN]
    after = token_maps(trainer, "after", [one.response for one in shown])
    write_html([*shown, *after], directory / PAGE, title="Quickstart: the same responses before and after training")
    return directory / PAGE


def _read_evaluation(directory: Path, step: int) -> Evaluation:
    from credit_trl.evaluation import Evaluation

    result = directory / EVALUATIONS_FOLDER / f"step-{step:06d}" / "result.json"
    return Evaluation.from_dict(json.loads(result.read_text("utf-8")))


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
