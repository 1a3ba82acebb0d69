"""Figure and tables of `trl credit-quickstart`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from credit_trl.training.run_directory import EVALUATIONS_FILE, LOG_FILE, read_lines

if TYPE_CHECKING:
    from credit_trl.evaluation import Evaluation
    from credit_trl.lab.analysis.tokenmap_summary import ClassShare

STAGES = ("rollout", "verdict", "contexts", "scores", "update")
CUE_GROUPS = ("known", "unknown", "holdout")
WORDS = ("cue", "topic", "tool", "city")  # token classes of the input's words; the other class is the template
FIGURE = "learning_curve.png"


@dataclass(frozen=True)
class QuickstartResult:
    """Measurements of a quickstart run.

    Args:
        run_directory: Folder of log, evaluations, model, figure and page.
        figure: Path of the learning curve.
        page: Path of the token maps of some responses before and after training.
        before, after: avg@k on held-out prompts at temperature 1, by group of cues.
        credit_before, credit_after: Credit by token class under the first and the last teacher.
        stage_seconds: Mean seconds per step by stage, without evaluations.
        steps: Number of optimizer steps.
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


def stage_seconds(directory: Path) -> dict[str, float]:
    """Mean seconds per step of every logged stage of a run."""
    logs = read_lines(directory / LOG_FILE)
    means = {}
    for stage in STAGES:
        seconds = [row[f"credit/seconds_{stage}"] for row in logs if row.get(f"credit/seconds_{stage}") is not None]
        if seconds:
            means[stage] = sum(seconds) / len(seconds)
    return means


def draw_curve(directory: Path) -> Path:
    """Draw held-out accuracy by group and the training reward over the steps; return the path of the figure."""
    from matplotlib.figure import Figure

    evaluations, logs = read_lines(directory / EVALUATIONS_FILE), read_lines(directory / LOG_FILE)
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    rewards = [(row["step"], row["reward"]) for row in logs if row.get("reward") is not None]
    axes.plot(*zip(*rewards, strict=True), color="0.75", linewidth=1, label="reward of the rollouts")
    steps = [row["step"] for row in evaluations]
    for group, marker in zip(CUE_GROUPS, "osD", strict=True):
        axes.plot(steps, [row["groups"][group] for row in evaluations], marker=marker, label=f"{group} cues")
    formats = [row["metrics"]["format"] for row in evaluations]
    axes.plot(steps, formats, color="black", linestyle=":", label="format")
    axes.axhline(0.25, color="0.6", linewidth=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="held-out avg@k, temperature 1", ylim=(0, 1.03), title="The embedded task")
    figure.legend(fontsize="small", loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(directory / FIGURE, dpi=150)
    return directory / FIGURE


def format_result(result: QuickstartResult) -> str:
    """Text of a result: tables of accuracy, credit and seconds, then the paths."""
    return "\n\n".join(
        [
            _format_accuracy(result.before, result.after),
            _format_credit(result.credit_before, result.credit_after),
            _format_seconds(result.stage_seconds, result.steps),
            f"learning curve  {result.figure}\n"
            f"token maps      {result.page}   (open it in a browser)\n"
            f"run directory   {result.run_directory}",
        ]
    )


def _format_accuracy(before: Evaluation, after: Evaluation) -> str:
    """Table in per cent, with 95 % intervals over prompts."""
    lines = [f"held-out avg@{after.k}, %     before -> after   95 % CI after      format before -> after"]
    for group in (name for name in CUE_GROUPS if name in after.groups):
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
    """Table of the mean S_t in nats by token class."""
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
