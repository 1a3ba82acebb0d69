"""What a reader of the report wants to know first: did it work, on what, compared with what, and what went wrong."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from credit_trl.lab.analysis.tokentext import visible
from credit_trl.lab.report.comparison import SECONDS, gain
from credit_trl.lab.report.runs import Run
from credit_trl.tasks.escaping import pluralized
from credit_trl.training.card import model_name
from credit_trl.training.metrics import harmful_feedback

# Logs at the start or the end of a run that are averaged.
LATEST_LOGS = 5
# Logs at the start of a run over which a fidelity below zero counts, and the least number of them: a frozen teacher
# prefers right answers less than a policy that has learned to give them.
START_LOGS, LEAST_LOGS = 10, 3
# Share of cut completions, and mean reward of groups without a right or a wrong answer, above which all count as such.
ALL_CUT, SOLVED = 0.95, 0.95

# Problem -> what it is and what to do. The report shows them in red, before everything else.
PROBLEMS = {
    "nothing_distilled": (
        "Nothing was distilled: no rollout had a teacher in the last logs.",
        "Return `Verdict(reward, feedback)` from the reward function, fill the column `privileged_context`, or lower "
        "`success_reward_threshold`.",
    ),
    "collapsed": (
        "The run collapsed: the reward fell to {value:.2f}, below half of its best.",
        "Resume from a checkpoint before the fall with a lower learning rate (`resume_changes='allow'`).",
    ),
    "truncated": (
        "The answers are cut: {value:.0%} of them reach the limit of {limit} tokens.",
        "Raise `max_completion_length`, or ask for shorter answers.",
    ),
    "flat": (
        "All groups are flat: every answer to a prompt gets the same reward, {value:.2f} on average.",
        "Look at the rollouts below: the verifier does not tell answers apart, or the model solves no prompt.",
    ),
    "fidelity": (
        "Feedback harms: with a fidelity of {value:.3f} nats the teacher prefers wrong answers.",
        "Change what the verifier returns or the templates, or train with `distillation_weight=0` (GRPO).",
    ),
    "lost_gradient": (
        "Nothing is learned: the loss is not 0 and its gradient is exactly 0.",
        "Check that the forward pass uses the weights that train.",
    ),
}


class Headline(NamedTuple):
    """Whether it worked, in words."""

    status: str  # "good", "bad", "unclear", "unmeasured" or "training"
    title: str
    lines: list[str]
    groups: Sequence[Mapping[str, Any]] = ()


def answer(
    runs: Sequence[Run],
    names: Sequence[str],
    arms: Mapping[str, Sequence[Run]],
    comparison: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The first lines of the report; `comparison` are the rows of `compare_arms`.

    It has `status` (`"good"`, `"bad"`, `"unclear"`, `"unmeasured"` or `"training"`), `title`, `lines` of text, the
    `groups` of the task with their scores, `problems` and `warnings`, each with the name of its run, and `progress`
    of a run that has not reached its last step.
    """
    problems: list[dict[str, str]] = []
    warnings: list[dict[str, Any]] = []
    for run, name in zip(runs, names, strict=True):
        for title, remedy in problems_of(run):
            problems.append({"run": visible(name), "title": title, "remedy": remedy})
        for row in run.warnings:
            message = visible(str(row.get("message") or row["warning"]))
            time = visible(str(row.get("time") or ""))
            warning = {"run": visible(name), "step": row["step"], "time": time, "message": message}
            warnings.append(warning)
    progress = progress_of(runs[0]) if len(runs) == 1 else None
    arm, *further = arms
    headline = _several_arms(comparison) if further else _one_arm(runs, arm, progress)
    for step in change_steps(runs):
        headline = headline._replace(title=f"{headline.title} Its options changed at step {step}, see below.")
    if problems:
        headline = headline._replace(status="bad", title=problems[0]["title"])
    return {
        "status": headline.status,
        "title": visible(headline.title),
        "lines": [visible(line) for line in (*headline.lines, *_changes(runs))],
        "groups": list(headline.groups),
        "problems": problems,
        "warnings": warnings,
        "progress": progress,
    }


def problems_of(run: Run) -> list[tuple[str, str]]:
    """Title and remedy of what keeps a run from learning, by its logs and warnings."""
    values: dict[str, float] = {}
    fidelity = run.series("credit/teacher_fidelity").head(START_LOGS)
    if len(fidelity) >= LEAST_LOGS and fidelity.mean() + 2.0 * fidelity.sem() < 0.0:
        values["fidelity"] = fidelity.mean()
    if run.options.get("distillation_weight") and _latest(run, "credit/frac_without_teacher") == 1.0:
        values["nothing_distilled"] = 1.0
    cut = _latest(run, "completions/clipped_ratio")
    if cut >= ALL_CUT:
        values["truncated"] = cut
    reward = _latest(run, "reward")
    if _latest(run, "frac_reward_zero_std") == 1.0 and reward < SOLVED:
        values["flat"] = reward
    rewards = run.series("reward")
    windows = rewards.rolling(LATEST_LOGS, min_periods=min(LATEST_LOGS, len(rewards)))
    best = windows.mean().max()
    causes = [row["warning"] for row in run.warnings]
    if "drift_collapse" in causes and reward < 0.5 * best:
        values["collapsed"] = reward
    if "lost_gradient" in causes:
        values["lost_gradient"] = 0.0
    problems = []
    harm = harmful_feedback(run.log)
    if harm is not None:
        problems.append(("Feedback harms: with it the teacher prefers wrong answers.", harm))
        values.pop("fidelity", None)
    for name, (title, remedy) in PROBLEMS.items():
        if name in values:
            limit = run.options.get("max_completion_length")
            problems.append((title.format(value=values[name], limit=limit), remedy))
    return problems


def _latest(run: Run, name: str) -> float:
    """Mean of the last logged values; NaN without any."""
    return run.series(name).tail(LATEST_LOGS).mean()


def progress_of(run: Run) -> dict[str, Any] | None:
    """Step, last step and estimated seconds that are left of a run that has not ended; None otherwise."""
    if run.last_step is None or not run.log:
        return None
    step = max(row["step"] for row in run.log)
    has_ended = any("train_runtime" in row and row["step"] == step for row in run.log)
    if has_ended or step >= run.last_step:
        return None
    seconds_left = run.mean_over_steps(SECONDS) * (run.last_step - step)
    return {"step": step, "last_step": run.last_step, "seconds_left": seconds_left}


def _one_arm(runs: Sequence[Run], arm: str, progress: Mapping[str, Any] | None) -> Headline:
    """Of runs that differ in nothing but their seed."""
    subject = _subject(runs, arm)
    result = gain(runs)
    if result is None:
        headline = _without_comparison(runs[-1], subject)
    else:
        name = f"avg@{runs[-1].final.get('k')}"
        status = _status(result["difference_low"], result["difference_high"])
        verdict = {"good": "It worked", "bad": "It got worse", "unclear": "No clear change"}[status]
        after = _percent(result["after"])
        scores = f"{name} {_percent(result['before'])} → {after}"
        change = _difference_text(result["difference"], result["difference_low"], result["difference_high"])
        prompts = pluralized(result["prompts"], "held-out prompt")
        line = f"{subject}: {scores}, {change} against the same model before training, on {prompts}."
        headline = Headline(status, f"{verdict}: {scores}.", [line], _groups(runs))
    if progress is None:
        return headline
    title = f"Step {progress['step']} of {progress['last_step']}. So far: {headline.title}"
    return headline._replace(status="training", title=title)


def _subject(runs: Sequence[Run], arm: str) -> str:
    """Model, data, arm and number of runs."""
    run = runs[-1]
    model = model_name(str(run.options.get("model") or "unknown"))
    data = run.task or run.options.get("task") or run.options.get("rows") or "unknown"
    repeated = f", {len(runs)} seeds" if len(runs) > 1 else ""
    return f"Model {model}, data {data}, {run.method or arm}{repeated}"


def _without_comparison(run: Run, subject: str) -> Headline:
    """Of a run without an evaluation before training."""
    if run.evaluations:
        row = run.final
        score = f"avg@{row.get('k')} {_percent(row['score'])}"
        if row.get("low") is not None and row.get("high") is not None:
            score += f" (95 % interval {100 * row['low']:.1f} to {100 * row['high']:.1f})"
        line = f"{subject}: {score} at step {row['step']}. There is no score before training to compare with."
        return Headline("unmeasured", f"{score}.", [line])
    rewards = run.series("reward")
    if rewards.empty:
        return Headline("unmeasured", "Nothing is logged yet.", [f"{subject}."])
    text = f"training reward {rewards.head(LATEST_LOGS).mean():.2f} → {rewards.tail(LATEST_LOGS).mean():.2f}"
    logs = pluralized(min(LATEST_LOGS, len(rewards)), "log")
    line = (
        f"{subject}: {text}, means of the first and last {logs}. No held-out prompts were evaluated: "
        "`--avg_at_k 4` or `EvaluationCallback` does."
    )
    return Headline("unmeasured", f"Not measured on held-out prompts: {text}.", [line])


def _several_arms(comparison: Sequence[Mapping[str, Any]]) -> Headline:
    """A line for each arm beside the first one: its difference from that."""
    lines = []
    clear = 0
    baselines: dict[str, str] = {}
    for row in comparison:
        baseline = baselines.setdefault(row["task"], row["arm"])
        if row.get("difference") is None:
            continue
        status = _status(row["difference_low"], row["difference_high"])
        clear += status != "unclear"
        verdict = {"good": "better than", "bad": "worse than", "unclear": "no clear difference from"}[status]
        change = _difference_text(row["difference"], row["difference_low"], row["difference_high"])
        score = _percent(row["score"])
        lines.append(f"{row['arm']}: {score} on {row['task']}, {verdict} {baseline}, {change}.")
    if not lines:
        return Headline("unmeasured", "The arms have no scores on shared prompts.", [])
    title = f"{clear} of {pluralized(len(lines), 'difference')} from the first arm clear of zero."
    return Headline("good" if clear else "unclear", title, lines)


def _groups(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Scores of the groups of a task that has several, and the verdict metrics of each run before and after."""
    names = runs[-1].groups(runs[-1].final["step"])
    rows = []
    for name in names if len(names) > 1 else []:
        result = gain(runs, name)
        if result is not None:
            metrics = []
            for run in runs:
                metrics.append([run.group_metrics(0, name), run.group_metrics(run.final["step"], name)])
            rows.append({"group": visible(name), "metrics": metrics} | result)
    return rows


def _changes(runs: Sequence[Run]) -> list[str]:
    """A line for each step from which a resumed run went on with other options."""
    lines = []
    for run in runs:
        for segment in run.segments[1:]:
            texts = "; ".join(f"{name} = {run.text(name)}" for name in segment["options"])
            if texts:
                lines.append(f"Resumed at step {segment['step']} with other options: {texts}.")
    return lines


def change_steps(runs: Sequence[Run]) -> list[int]:
    """Steps at which options of resumed runs changed."""
    steps: set[int] = set()
    for run in runs:
        steps.update(segment["step"] for segment in run.segments[1:])
    return sorted(steps)


def _status(low: float | None, high: float | None) -> str:
    """Whether the interval of a difference lies above zero, below zero, or neither."""
    if low is not None and low > 0.0:
        return "good"
    if high is not None and high < 0.0:
        return "bad"
    return "unclear"


def _difference_text(difference: float, low: float | None, high: float | None) -> str:
    text = f"{100 * difference:+.1f} points"
    if low is not None and high is not None:
        bounds = f"{100 * low:+.1f} to {100 * high:+.1f}"
        text += f" (95 % interval {bounds})"
    return text.replace("-", "−")


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"
