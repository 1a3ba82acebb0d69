"""`trl credit-quickstart`: train the embedded task on this CPU, and show what it learnt and where the credit fell.

Everything is in the package or generated: nothing is downloaded, no accelerator is needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar

from credit_trl.cli.mistakes import ignore_renamings
from credit_trl.training.run_directory import EVALUATIONS_FILE, EVALUATIONS_FOLDER, LOG_FILE, read_lines

if TYPE_CHECKING:
    from credit_trl.evaluation import Evaluation
    from credit_trl.lab.analysis.responses import Response
    from credit_trl.lab.analysis.tokenmap import TokenMap
    from credit_trl.lab.analysis.tokenmap_summary import ClassShare
    from credit_trl.trainer import CreditTrainer

STAGES = ("rollout", "verdict", "contexts", "scores", "update")
GROUPS = ("known", "unknown", "holdout")
WORDS = ("cue", "topic", "tool", "city")  # token classes that name something of the input; the rest is template
FIGURE, PAGE = "learning_curve.png", "token_maps.html"
# Evaluations during training, the ones before and after it included, for the curve.
EVALUATIONS = 5
# Responses whose tokens are scored for the table of S_t, and how many of them the page shows.
SCORED_PROMPTS, SCORED_SAMPLES, SHOWN = 32, 2, 16


@dataclass(frozen=True)
class Outcome:
    """What a quickstart run measured.

    Args:
        run_directory: log, evaluations, model, figure and page.
        figure: the learning curve.
        page: token maps of some first answers, as the model and its teacher read them before and after.
        before, after: avg@4 on held-out prompts at temperature 1, by group of cues.
        credit_before, credit_after: credit by token class under the first and the last teacher.
        stage_seconds: seconds a step by stage, a mean over the steps; evaluations are not in it.
        steps: how many there were.
    """

    run_directory: Path
    figure: Path
    page: Path
    before: Evaluation
    after: Evaluation
    credit_before: Sequence[ClassShare]
    credit_after: Sequence[ClassShare]
    stage_seconds: Mapping[str, float]
    steps: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train the model that the package brings on the task that it brings, on a CPU core in a minute or two, and "
        "print held-out accuracy before and after, S_t by kind of token, and seconds a stage. A learning curve and a "
        "page of token maps are left in --output_dir."
    )
    parser.add_argument("--output_dir", default="runs/quickstart", help="default runs/quickstart")
    parser.add_argument("--steps", type=int, default=DEFAULTS["max_steps"], help="of 64 rollouts each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--world",
        default="plain",
        help="plain (default), or shortcut or style, whose base examples/study/make_base.py pretrains",
    )
    parser.add_argument(
        "--contrastive_coef", type=float, default=DEFAULTS["contrastive_coef"], help="λ; 0 is SDPO (default 0.1)"
    )
    parser.add_argument("--distillation_weight", type=float, default=1.0, help="0 is GRPO (default 1)")


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # a second gains little here, and on a busy machine threads wait for one another
    ignore_renamings()
    disable_progress_bar()  # the libraries', for a file each
    outcome = run_quickstart(
        args.output_dir,
        args.steps,
        args.seed,
        world=args.world,
        contrastive_coef=args.contrastive_coef,
        distillation_weight=args.distillation_weight,
    )
    print(format_outcome(outcome))
    return 0


# The recipe: what of `CreditConfig` differs from its defaults. 16 prompts of 4 rollouts a step; a learning rate for
# half a million parameters, with the warm-up that it needs; a teacher that follows within 50 steps.
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
) -> Outcome:
    """Train the base of a world and measure it before and after.

    Args:
        output_dir: the run's directory; what an earlier quickstart wrote there is written anew.
        steps: optimizer steps of 64 rollouts.
        seed: of data order, rollouts and contrasts.
        world: whose base; see `quickstart_model.load_model`.
        progress: show bars.
        samples: k of the held-out avg@k.
        test_rows_per_cue: held-out prompts a cue.
        **overrides: further options of `CreditConfig`, such as `contrastive_coef=0.0`.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: `steps` below 1, or an option that `CreditConfig` refuses.
    """
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, got {steps}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("The quickstart draws a learning curve: pip install 'credit-trl[viz]'.")
    from credit_trl.config import CreditConfig
    from credit_trl.evaluation import EvaluationCallback
    from credit_trl.evaluation.callback import RunLog
    from credit_trl.lab.analysis.tokenmap_summary import summarize
    from credit_trl.tasks import quickstart
    from credit_trl.trainer import CreditTrainer

    directory = Path(output_dir)
    config = CreditConfig(str(directory), **{**DEFAULTS, "max_steps": steps, "seed": seed, **overrides})
    model, tokenizer = quickstart.load_model(world=world)
    trainer = CreditTrainer(model, quickstart.reward, config, quickstart.build("train"), processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    evaluation = EvaluationCallback(
        trainer,
        quickstart.TASK,
        samples,
        max(1, -(-steps // (EVALUATIONS - 1))),
        dataset=quickstart.build("test", rows_per_cue=test_rows_per_cue),
        keep_best=False,
        batch_size=288,
        temperature=1.0,
        top_p=1.0,
        group_by="group",
        progress=False,
    )
    for callback in (RunLog(task=quickstart.TASK, world=world), evaluation, _Progress(progress)):
        trainer.add_callback(callback)

    maps_before = token_maps(trainer, "before")
    trainer.train()
    maps_after = token_maps(trainer, "after")
    page = draw_maps(trainer, maps_before, directory)
    trainer.save_model(str(directory / "model"))
    trainer.end()
    evaluations = [_evaluation(directory, row["step"]) for row in evaluation.history]
    return Outcome(
        directory,
        draw_curve(directory),
        page,
        evaluations[0],
        evaluations[-1],
        summarize(maps_before).classes,
        summarize(maps_after).classes,
        stage_seconds(directory),
        steps,
    )


def token_maps(trainer: CreditTrainer, name: str, responses: Sequence[Response] | None = None) -> list[TokenMap]:
    """S_t and ΔV_t of responses under the model and its teacher as they are now; of fresh rollouts by default.

    Tokens are of the task's kinds: what names something of the input (cue, topic, tool, city), and the template.
    """
    from credit_trl.lab.analysis.checkpoints import Checkpoint
    from credit_trl.lab.analysis.responses import sample_responses
    from credit_trl.lab.analysis.token_classes import task_classes
    from credit_trl.lab.analysis.tokenmap import map_response
    from credit_trl.tasks.registry import load_task
    from credit_trl.teacher.models import Teacher

    tokenizer, task = trainer.processing_class, load_task("quickstart")
    student = Teacher(trainer.model, trainer.accelerator)
    # GRPO has no teacher: the student is read as its own, as it would be at the first step.
    checkpoint = Checkpoint(name, tokenizer, student, trainer.teacher or student)
    if responses is None:
        rows = trainer.train_dataset.to_list()[:SCORED_PROMPTS]
        responses = sample_responses(checkpoint, task, rows, trainer.args, samples=SCORED_SAMPLES)
    classify = task_classes(task, tokenizer)
    return [map_response(checkpoint, response, trainer.args, classify=classify) for response in responses]


def draw_maps(trainer: CreditTrainer, before: Sequence[TokenMap], directory: Path) -> Path:
    """Put some answers of the start, wrong ones first, beside what the model makes of them now; the page's path."""
    from credit_trl.lab.analysis.tokenmap_html import write_html

    shown = sorted((one for one in before if one.response.privileged), key=lambda one: one.response.reward)[:SHOWN]
    after = token_maps(trainer, "after", [one.response for one in shown])
    write_html([*shown, *after], directory / PAGE, title="Quickstart: the same answers before and after training")
    return directory / PAGE


def stage_seconds(directory: Path) -> dict[str, float]:
    """Seconds a step of each stage that took any, from the run's log."""
    logs = read_lines(directory / LOG_FILE)
    means = {}
    for stage in STAGES:
        seconds = [row[f"credit/seconds_{stage}"] for row in logs if row.get(f"credit/seconds_{stage}") is not None]
        if seconds:
            means[stage] = sum(seconds) / len(seconds)
    return means


def draw_curve(directory: Path) -> Path:
    """Draw held-out accuracy by group, and the reward of the rollouts, over the steps; return the picture's path."""
    from matplotlib.figure import Figure

    evaluations, logs = read_lines(directory / EVALUATIONS_FILE), read_lines(directory / LOG_FILE)
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    rewards = [(row["step"], row["reward"]) for row in logs if row.get("reward") is not None]
    axes.plot(*zip(*rewards, strict=True), color="0.75", linewidth=1, label="reward of the rollouts")
    steps = [row["step"] for row in evaluations]
    for group, marker in zip(GROUPS, "osD", strict=True):
        axes.plot(steps, [row["groups"][group] for row in evaluations], marker=marker, label=f"{group} cues")
    formats = [row["metrics"]["format"] for row in evaluations]
    axes.plot(steps, formats, color="black", linestyle=":", label="format")
    axes.axhline(0.25, color="0.6", linewidth=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="held-out avg@k, temperature 1", ylim=(0, 1.03), title="The embedded task")
    figure.legend(fontsize="small", loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(directory / FIGURE, dpi=150)
    return directory / FIGURE


def format_outcome(outcome: Outcome) -> str:
    """The report of a run as text: three tables and three paths."""
    return "\n\n".join(
        [
            _format_accuracy(outcome.before, outcome.after),
            _format_credit(outcome.credit_before, outcome.credit_after),
            _format_seconds(outcome.stage_seconds, outcome.steps),
            f"learning curve  {outcome.figure}\n"
            f"token maps      {outcome.page}   (open it in a browser)\n"
            f"run directory   {outcome.run_directory}",
        ]
    )


def _format_accuracy(before: Evaluation, after: Evaluation) -> str:
    """Per cent, with 95 % intervals over prompts."""
    lines = [f"held-out avg@{after.k}, %     before -> after   95 % CI after      format before -> after"]
    for group in (name for name in GROUPS if name in after.groups):
        score = after.groups[group]
        interval = f"[{100 * score.low:.1f}, {100 * score.high:.1f}]"
        formats = (before.group_metrics[group]["format"], after.group_metrics[group]["format"])
        lines.append(
            f"  {group + ' cues':<20}{100 * before.groups[group].mean:8.1f} -> {100 * score.mean:5.1f}   "
            f"{interval:<16}{100 * formats[0]:9.1f} -> {100 * formats[1]:5.1f}"
        )
    if before.metrics["shortcut"] or after.metrics["shortcut"]:
        lines.append(
            f"  planted shortcut    {100 * before.metrics['shortcut']:8.1f} -> {100 * after.metrics['shortcut']:5.1f}"
        )
    return "\n".join(lines)


def _format_credit(before: Sequence[ClassShare], after: Sequence[ClassShare]) -> str:
    """Mean S_t in nats of each kind of token that occurred."""
    first, last = ({share.name: share for share in shares} for shares in (before, after))
    lines = ["S_t, nats a token          before -> after   share of |S| before"]
    for name in (*WORDS, "generic"):
        values = [f"{shares[name].mean_specific:.2f}" if name in shares else "none" for shares in (first, last)]
        share = f"{100 * first[name].share_of_specific:.1f} %" if name in first else ""
        title = "generic (template)" if name == "generic" else name
        lines.append(f"  {title:<20}{values[0]:>8} -> {values[1]:>5}   {share:>12}")
    return "\n".join(lines)


def _format_seconds(seconds: Mapping[str, float], steps: int) -> str:
    total = sum(seconds.values())
    lines = [f"{'seconds a step':<24}{total:6.3f}   ({steps} steps in {steps * total:.0f} s)"]
    return "\n".join([*lines, *(f"  {stage:<22}{value:6.3f}" for stage, value in seconds.items())])


def _evaluation(directory: Path, step: int) -> Evaluation:
    from credit_trl.evaluation import Evaluation

    result = directory / EVALUATIONS_FOLDER / f"step-{step:06d}" / "result.json"
    return Evaluation.from_dict(json.loads(result.read_text("utf-8")))


class _Progress(TrainerCallback):
    """One bar over the steps with the reward beside it, in place of TRL's printed logs."""

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
