"""Figure and tables of `trl credit-quickstart`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from credit_trl.cli.quickstart_tasks import QuickstartTask
from credit_trl.contexts.prompts import user_text
from credit_trl.evaluation.statistics import paired_bootstrap
from credit_trl.lab.analysis.openings import common_openings, frame_rate, own_frame_rate
from credit_trl.tasks.printable import counted, printable
from credit_trl.training.run_directory import (
    EVALUATIONS_FILE,
    EVALUATIONS_FOLDER,
    LOG_FILE,
    RESULT_FILE,
    read_json,
    read_lines,
)

if TYPE_CHECKING:
    from credit_trl.evaluation import Evaluation
    from credit_trl.lab.analysis.tokenmap_summary import ClassShare

STAGES = ("rollout", "verdict", "contexts", "scores", "update")
SHOWN_ANSWERS, ANSWER_WIDTH = 5, 56
FIGURE = "learning_curve.png"
CHANCE = 0.25  # accuracy of a guess among the offered tools


@dataclass(frozen=True)
class HeldOutAnswers:
    """Responses to the held-out prompts before and after training.

    `prompts` has the user turns of the first `SHOWN_ANSWERS`, `pairs` the first response to each before and after
    training, with the rewards.
    """

    prompts: Sequence[str]
    pairs: Sequence[tuple[tuple[str, float], tuple[str, float]]]
    before: Sequence[str]
    after: Sequence[str]


@dataclass(frozen=True)
class QuickstartResult:
    """Measurements of a quickstart run, in `run_directory` with log, evaluations and model.

    Args:
        figure: the learning curve.
        page: token maps of some responses before and after training.
        before, after: avg@k on held-out prompts at temperature 1, by group of prompts.
        credit_before, credit_after: credit by token class under the first and the last teacher.
        stage_seconds: mean seconds per step by stage, without evaluations.
    """

    task: QuickstartTask
    run_directory: Path
    figure: Path
    page: Path
    before: Evaluation
    after: Evaluation
    credit_before: Sequence[ClassShare]
    credit_after: Sequence[ClassShare]
    answers: HeldOutAnswers
    stage_seconds: Mapping[str, float]
    steps: int


def stage_seconds(directory: Path) -> dict[str, float]:
    """Mean seconds per step of every logged stage of a run."""
    logs = read_lines(directory / LOG_FILE)
    logged = {stage: [row.get(f"credit/seconds_{stage}") for row in logs] for stage in STAGES}
    seconds = {stage: [value for value in values if value is not None] for stage, values in logged.items()}
    return {stage: sum(values) / len(values) for stage, values in seconds.items() if values}


def read_evaluation(directory: Path, step: int) -> Evaluation:
    """The evaluation of a run at a step."""
    from credit_trl.evaluation import Evaluation

    return Evaluation.from_dict(read_json(directory / EVALUATIONS_FOLDER / f"step-{step:06d}" / RESULT_FILE))


def read_answers(directory: Path, task: QuickstartTask, first: int, last: int) -> HeldOutAnswers:
    """The responses of a run's evaluations at two steps."""
    from credit_trl.evaluation.samples import SAMPLES_FILE
    from credit_trl.tasks.registry import load_task

    before, after = (
        read_lines(directory / EVALUATIONS_FOLDER / f"step-{step:06d}" / SAMPLES_FILE) for step in (first, last)
    )
    rows = load_task(task.name).build("test", **task.test_rows).to_list()[:SHOWN_ANSWERS]
    shown = [
        [next((one["text"], one["reward"]) for one in samples if one["prompt"] == row["id"]) for row in rows]
        for samples in (before, after)
    ]
    texts = ([one["text"] for one in samples] for samples in (before, after))
    return HeldOutAnswers([user_text(row["prompt"]) for row in rows], list(zip(*shown, strict=True)), *texts)


def draw_curve(directory: Path, task: QuickstartTask) -> Path:
    """Draw held-out accuracy by group with 95 % intervals, and the training reward; return the path of the figure."""
    from matplotlib.figure import Figure

    steps = [row["step"] for row in read_lines(directory / EVALUATIONS_FILE)]
    evaluations, logs = [read_evaluation(directory, step) for step in steps], read_lines(directory / LOG_FILE)
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    rewards = [(row["step"], row["reward"]) for row in logs if row.get("reward") is not None]
    axes.plot(*zip(*rewards, strict=True), color="0.75", linewidth=1, label="reward of the rollouts")
    for (group, title), marker in zip(task.groups.items(), "osD", strict=False):
        found = [evaluation.groups[group] for evaluation in evaluations]
        errors = [[one.mean - one.low for one in found], [one.high - one.mean for one in found]]
        axes.errorbar(steps, [one.mean for one in found], yerr=errors, marker=marker, capsize=2, label=title)
    formats = [evaluation.metrics["format"] for evaluation in evaluations]
    axes.plot(steps, formats, color="black", linestyle=":", label="format")
    axes.axhline(CHANCE, color="0.6", linewidth=0.8, linestyle="--")
    axes.annotate(f"chance, {CHANCE:.0%}", (steps[-1], CHANCE), ha="right", va="bottom", color="0.4", fontsize="small")
    title = f"Task {task.name}"
    axes.set(xlabel="step", ylabel="held-out avg@k, temperature 1", ylim=(0, 1.03), title=title)
    figure.legend(fontsize="small", loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(directory / FIGURE, dpi=150)
    return directory / FIGURE


def format_result(result: QuickstartResult) -> str:
    """Text of a result: tables of accuracy, credit and seconds, then the paths."""
    return "\n\n".join(
        [
            _format_accuracy(result),
            *([_format_answers(result)] if result.task.opening else []),
            _format_credit(result),
            _format_seconds(result.stage_seconds, result.steps),
            f"learning curve  {result.figure}\n"
            f"token maps      {result.page}   (open it in a browser)\n"
            f"run directory   {result.run_directory}",
        ]
    )


def _format_accuracy(result: QuickstartResult) -> str:
    """Table in per cent, with 95 % intervals over prompts."""
    before, after, groups = result.before, result.after, result.task.groups
    lines = [f"held-out avg@{after.k}, %     before -> after   95 % CI after      format before -> after"]
    for group in (name for name in groups if name in after.groups):
        score = after.groups[group]
        interval = f"[{100 * score.low:.1f}, {100 * score.high:.1f}]"
        formats = (before.group_metrics[group]["format"], after.group_metrics[group]["format"])
        lines.append(
            f"  {groups[group]:<20}{100 * before.groups[group].mean:8.1f} -> {100 * score.mean:5.1f}   "
            f"{interval:<16}{100 * formats[0]:9.1f} -> {100 * formats[1]:5.1f}"
        )
    if before.metrics.get("shortcut") or after.metrics.get("shortcut"):
        lines.append(
            f"  planted shortcut    {100 * before.metrics['shortcut']:8.1f} -> {100 * after.metrics['shortcut']:5.1f}"
        )
    if len(after.prompts) == len(before.prompts) and result.task.opening:
        gain = paired_bootstrap(after.per_prompt_scores, before.per_prompt_scores)
        lines.append(
            f"  {'all':<20}{100 * before.score:8.1f} -> {100 * after.score:5.1f}   "
            f"gain {100 * gain.difference:+.1f} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
        )
    return "\n".join(lines)


def _format_answers(result: QuickstartResult) -> str:
    """The first responses before and after side by side, and the frame rate."""
    opening, answers = result.task.opening, result.answers
    lines = [f"{'before':<{ANSWER_WIDTH}}  after"]
    for prompt, pair in zip(answers.prompts, answers.pairs, strict=True):
        before, after = (_one_line(text, reward) for text, reward in pair)
        lines += [f"  {printable(prompt)}", f"{before:<{ANSWER_WIDTH}}  {after}"]
    own = own_frame_rate(answers.before, opening)
    new = frame_rate(answers.before, answers.after, opening)
    lines.append(f"openings that no other response of the base has: {100 * own:.1f} % -> {100 * new:.1f} %")
    common = common_openings(answers.before, answers.after, opening)
    lines += [f"  {count:4d}  {printable(words)} …" for words, count in common]
    return "\n".join(lines)


def _one_line(text: str, reward: float) -> str:
    """A response with + for reward 1 and - for less, cut at `ANSWER_WIDTH`."""
    line = f"{'+' if reward == 1.0 else '-'} {printable(' '.join(text.split()))}"
    return line if len(line) <= ANSWER_WIDTH else line[: ANSWER_WIDTH - 1] + "…"


def _format_credit(result: QuickstartResult) -> str:
    """Table of the mean S_t in nats by token class."""
    both = (result.credit_before, result.credit_after)
    first, last = ({share.name: share for share in shares} for shares in both)
    lines = ["S_t, nats a token          before -> after   share of |S| before"]
    for name in (*result.task.words, "generic"):
        values = [f"{shares[name].mean_specific:z.2f}" if name in shares else "none" for shares in (first, last)]
        share = f"{100 * first[name].share_of_specific:.1f} %" if name in first else ""
        title = "generic (template)" if name == "generic" else name
        lines.append(f"  {title:<20}{values[0]:>8} -> {values[1]:>5}   {share:>12}")
    return "\n".join(lines)


def _format_seconds(seconds: Mapping[str, float], steps: int) -> str:
    total = sum(seconds.values())
    lines = [f"{'seconds a step':<24}{total:6.3f}   ({counted(steps, 'step')} in {steps * total:.0f} s)"]
    return "\n".join([*lines, *(f"  {stage:<22}{value:6.3f}" for stage, value in seconds.items())])
