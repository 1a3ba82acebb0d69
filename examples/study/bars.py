"""The bar: thresholds that a form of the contrast must meet, and tables of the measured values."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import product

from claims import format_contrast
from report import contrasts_table, table
from worlds import GROUPS, World

from credit_trl.evaluation.statistics import Difference
from credit_trl.lab.comparison import Run
from credit_trl.lab.comparison.compare import FINAL

MEASURES = ("shortcut", "known", "unknown", "format unknown", "format holdout")
SHORTCUT_LIMIT = 0.05
LOWER_LIMITS = {"known": 0.97, "format unknown": 0.97, "format holdout": 0.90}
LOSS_LIMIT = 0.02  # in accuracy on unknown and on hold-out cues, against SDPO


def interval(world: World, arm: str, measure: str) -> tuple[float, float, float]:
    """Mean and 95 % interval of one of MEASURES at the end of training."""
    kind, _, group = measure.rpartition(" ")
    comparison = world.shortcut if measure == "shortcut" else getattr(world, kind or "score")
    domain = f"{world.task}: {'unknown' if measure == 'shortcut' else group}"
    found = comparison.cells[arm, domain, FINAL].interval
    return found.mean, found.low, found.high


def bar(world: World, arm: str) -> str:
    """Table of one arm against every threshold. Differences from the sweep's SDPO arms are paired."""
    lines = []
    for measure, relation, limit in limits_of(world):
        mean, low, high = interval(world, arm, measure)
        met = mean <= limit if relation == "<=" else mean >= limit
        lines.append([measure, f"{relation} {limit:g}", f"{mean:.3f} [{low:.3f}, {high:.3f}]", met_or_missed(met)])
    for baseline, group in product(baselines_of(world), GROUPS[1:]):
        found = world.contrast(arm, group, baseline)
        name = f"{group}, against {baseline}"
        lines.append([name, "no lower by more than .02", format_contrast(found), loss_verdict(found.difference)])
    return f"`{arm}`, {world.name} world:\n\n{table(('what', 'bar', 'measured', ''), lines)}"


def limits_of(world: World) -> list[tuple[str, str, float]]:
    limits = [(measure, ">=", limit) for measure, limit in LOWER_LIMITS.items()]
    return limits if world.name == "plain" else [("shortcut", "<=", SHORTCUT_LIMIT), *limits]


def meets(world: World, arm: str) -> bool:
    """Whether the means of an arm meet every threshold."""
    means = [(interval(world, arm, measure)[0], *limit) for measure, *limit in limits_of(world)]
    pairs = product(baselines_of(world), GROUPS[1:])
    losses = [-world.contrast(arm, group, baseline).difference.difference for baseline, group in pairs]
    return all(mean <= limit if relation == "<=" else mean >= limit for mean, relation, limit in means) and all(
        loss <= LOSS_LIMIT for loss in losses
    )


def met_or_missed(met: bool) -> str:
    return "met" if met else "**missed**"


def loss_verdict(difference: Difference, limit: float = LOSS_LIMIT) -> str:
    """Verdict on a difference in a rate against the allowed loss, by its interval and its mean."""
    if difference.low >= -limit:
        return "met"
    if difference.high < -limit:
        return "**missed**"
    return "met by the mean, not by the interval" if difference.difference >= -limit else "missed by the mean"


def measures_of(world: World) -> list[str]:
    return [*MEASURES[1:3], "holdout", *MEASURES[3:]] + ([] if world.name == "plain" else ["shortcut"])


def seeds_table(world: World) -> str:
    """Every arm's mean, with the number of each seed: for few seeds an interval says nothing."""
    names = measures_of(world)
    lines = [[arm, *(by_seed(world, arm, name) for name in names)] for arm in arms_of(world)]
    return f"{world.name.capitalize()} world, %, final, mean (each seed):\n\n{table(('arm', *names), lines)}"


def by_seed(world: World, arm: str, measure: str) -> str:
    values = [final_mean(run, measure) for run in world.runs_of(arm)]
    return f"{100 * statistics.fmean(values):.1f} ({', '.join(f'{100 * value:.0f}' for value in values)})"


def final_mean(run: Run, measure: str) -> float:
    """Mean of one of MEASURES, or of hold-out accuracy, at the end of a run."""
    kind, _, group = measure.rpartition(" ")
    name, group = ("shortcut", "unknown") if measure == "shortcut" else (kind or "score", group)
    final = run.final_step()
    scores = run.per_prompt(final, name)
    return statistics.fmean(scores[prompt["id"]] for prompt in run.prompts(final) if prompt["group"] == group)


def arms_table(world: World) -> str:
    names = measures_of(world)
    lines = []
    for arm in arms_of(world):
        cells = [interval(world, arm, name) for name in names]
        lines.append([arm, *(f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]" for mean, low, high in cells)])
    return f"{world.name.capitalize()} world, %, final:\n\n{table(('arm', *names), lines)}"


def arms_of(world: World) -> Sequence[str]:
    return sorted({run.arm for run in world.runs})


def baselines_of(world: World) -> list[str]:
    """The SDPO arms of a sweep, one per teacher."""
    return [arm for arm in arms_of(world) if arm.split()[0] == "SDPO" and "tail" not in arm]


def against_sdpo(world: World) -> str:
    """Paired differences from SDPO of every arm: reward by group, and the shortcut rate on unknown cues."""
    rows = [c for c in world.score.contrasts if c.when == FINAL and not c.domain.endswith(": known")]
    parts = [f"{world.name.capitalize()} world, reward against SDPO:", contrasts_table(rows)]
    if world.name != "plain":
        rates = [c for c in world.shortcut.contrasts if c.when == FINAL and c.domain.endswith(": unknown")]
        parts += [f"{world.name.capitalize()} world, shortcut against SDPO:", contrasts_table(rates)]
    return "\n\n".join(parts)
