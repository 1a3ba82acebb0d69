"""Write results/methods.md: tables, figures and verdicts, computed from the run directories."""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from claims import claim_controls, claim_count, claim_lambda, claim_methods, claim_rates, claims
from worlds import GROUPS, LAMBDAS, TASK, WORLDS, World, early, late, read_world, step_seconds

from credit_trl.lab.comparison import Comparison
from credit_trl.lab.comparison.compare import FINAL, Contrast
from credit_trl.lab.comparison.figures import THEMES, ablation_figure, curves_figure, scores_figure
from credit_trl.lab.comparison.tables import contrast_row, score_markdown
from credit_trl.training.run_directory import write_atomically

HERE = Path(__file__).parent
TIME_FILE = "time.json"  # run.py's
SEEDS = 5
LONGER = ("forms", "controls")  # sweeps of run.py with the same methods and more steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/study"))
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the page and its figures")
    args = parser.parse_args()
    worlds = {name: read_world(name, args.output_dir / name) for name in WORLDS}
    longer = {}
    if (args.output_dir / "plain-forms").is_dir():
        longer = {name: read_world(name, *(args.output_dir / f"{name}-{s}" for s in LONGER)) for name in WORLDS}
    tokens = json.loads((args.output_dir / "tokens.json").read_text(encoding="utf-8"))
    draw(worlds, args.results)
    timed = args.output_dir / TIME_FILE
    duration = json.loads(timed.read_text(encoding="utf-8")) if timed.is_file() else None
    write_atomically(args.results / "methods.md", page(worlds, tokens, duration, longer))
    print(args.results / "methods.md")


def draw(worlds: Mapping[str, World], folder: Path) -> None:
    """Draw all figures as PNG, in the light and the dark theme."""
    folder.mkdir(parents=True, exist_ok=True)
    for theme in THEMES:
        for world in worlds.values():
            figures = {
                "scores": scores_figure(world.score, theme),
                "curves": curves_figure(world.score, theme),
                "lambda": ablation_figure(lambda_points(world), "λ (0 is SDPO)", theme),
            }
            for name, image in figures.items():
                (folder / f"{world.name}-{name}-{theme.name}.png").write_bytes(image)


def lambda_points(world: World) -> dict[str, list[tuple[float, float, float, float]]]:
    """Score on the unknown cues and S_t at the end of training against λ."""
    arms = {0.0: "SDPO"} | {value: f"CREDIT λ={value:g}" for value in LAMBDAS}
    cells = {value: world.score.cells[arm, f"{TASK}: unknown", FINAL].interval for value, arm in arms.items()}
    specific = {
        value: [late(run, "credit/s_mean") for run in world.runs_of(arm)] for value, arm in arms.items() if value
    }
    points = {
        "score on unknown cues": [(value, *cell) for value, cell in cells.items()],
        "S_t, last ten steps (nats, range over seeds)": [
            (value, statistics.fmean(seeds), min(seeds), max(seeds)) for value, seeds in specific.items()
        ],
    }
    if world.name == "shortcut":
        rates = {v: world.shortcut.cells[a, f"{TASK}: unknown", FINAL].interval for v, a in arms.items()}
        points["rate of the planted thought"] = [(value, *cell) for value, cell in rates.items()]
    return points


def page(
    worlds: Mapping[str, World],
    tokens: Mapping[str, Mapping],
    timed: Mapping[str, Any] | None = None,
    longer: Mapping[str, World] = MappingProxyType({}),
) -> str:
    plain, shortcut = worlds["plain"], worlds["shortcut"]
    parts = [
        "# The embedded study",
        introduction(worlds, timed),
        "## The paper's claims, at this scale",
        *claims(plain, shortcut, tokens),
        *(longer_section(longer) if longer else []),
        findings(),
        "## Plain world",
        world_section(plain),
        "## World with a planted shortcut",
        world_section(shortcut),
        "## Debiasing strength λ",
        "\n\n".join(lambda_table(world) for world in worlds.values()),
        "## Contrast count C (plain world)",
        count_table(plain),
        "## Credit by token class, before training",
        token_tables(tokens),
        "## What has not been run",
        limits(worlds),
    ]
    return "\n\n".join(parts) + "\n"


def longer_section(longer: Mapping[str, World]) -> list[str]:
    """The claims about training, on the longer runs of the sweep `forms`."""
    plain, shortcut = longer["plain"], longer["shortcut"]
    config = plain.runs[0].config
    return [
        f"### The same after {config['max_steps']} steps at {config['learning_rate']:g}",
        "36 steps are early in learning. The sweep `forms` trains the same arms, seeds and bases for longer, and "
        "`controls` adds two controls. All numbers are in [Forms of the contrast, measured](forms.md).",
        claim_methods(plain),
        claim_count(plain),
        claim_lambda(plain, shortcut),
        claim_rates(shortcut),
        *([claim_controls(plain)] if plain.runs_of("foreign-hint λ=0.1") else []),
    ]


def introduction(worlds: Mapping[str, World], timed: Mapping[str, Any] | None) -> str:
    plain, shortcut = worlds["plain"], worlds["shortcut"]
    seeds = sorted({run.seed for run in plain.runs})
    rows = {g: plain.score.prompts[f"{TASK}: {g}"] for g in GROUPS}
    config = plain.runs[0].config
    return "\n\n".join(
        [
            "`examples/study/` trains GRPO, SDPO and CREDIT on the embedded tool-call task. "
            "`examples/study/report.py` writes this page from the run directories, except for the section “Why some "
            "claims do not reproduce here”, which is written by hand.",
            f"**Runs.** {len(plain.runs)} in the plain world ({plain.runs[0].config['max_steps']:g} steps), "
            f"{len(shortcut.runs)} in the shortcut world ({shortcut.runs[0].config['max_steps']:g} steps); seeds "
            f"{', '.join(map(str, seeds))}. Each seed has its own base model, pretrained with that seed, from which "
            "all its arms start; the seed also sets the order of the data. Every arm has the same "
            f"budget: 64 rollouts a step (16 prompts × 4), learning rate {config['learning_rate']:g} after "
            f"{config['warmup_steps']} warm-up steps, EMA rate 0.02, teacher's top 20 **with the tail bucket**.",
            f"**Evaluation.** avg@4 at temperature 0.6 and top-p 0.95 on {sum(rows.values())} test prompts: "
            f"{rows['known']} on cues taught in pretraining, {rows['unknown']} on cues taught only in training, "
            f"{rows['holdout']} on hold-out cues (expected accuracy: chance, 25 %). Scores are those of the last "
            "step unless noted otherwise.",
            " ".join([cost(worlds), *([time_summary(timed)] if timed else [])]),
            "**Uncertainty.** Intervals are 95 % bootstrap intervals over prompts and seeds, with the tails of "
            "Student's t at the seeds' degrees of freedom. Differences are paired by prompt and by seed. p-values "
            "are unadjusted unless Holm's adjustment (over the arms of a column) is named. Prompts on the "
            "same cue are not independent; the seeds' level covers a part of that only.",
        ]
    )


def cost(worlds: Mapping[str, World]) -> str:
    """Training time from the logs of the runs, and the library versions."""
    minutes = sum(row.get("train_runtime", 0.0) for w in worlds.values() for run in w.runs for row in run.log) / 60
    count = sum(len(world.runs) for world in worlds.values())
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "trl"))
    return (
        f"**Cost.** {minutes:.0f} core-minutes for the {count} runs with their evaluations, one thread each. "
        f"{platform.machine()}, Python {platform.python_version()}, {versions}."
    )


def time_summary(timed: Mapping[str, Any]) -> str:
    """Wall-clock time of a complete run of `run.py` (`time.json`), extrapolated to all seeds."""
    seeds = max(len(of) for of in timed["seeds"].values())
    bases, whole = timed["seconds_bases"] / 60, timed["seconds"] / 60
    text = (
        f"Wall-clock time from an empty directory, with {timed['processes']} processes on {timed['cores']} shared "
        f"cores: {whole:.0f} minutes for the comparison of methods with {seeds} of {SEEDS} seeds in "
        f"{len(timed['seeds'])} worlds, {bases:.0f} of them for pretraining the bases"
    )
    return text + (f"; for all seeds that makes {SEEDS / seeds * whole:.0f}." if seeds < SEEDS else ".")


def world_section(world: World) -> str:
    parts = [
        "Reward (final, %):",
        scores_table(world.score, FINAL),
        "Reward, best during training (selected on these prompts, so it flatters):",
        scores_table(world.score, "best"),
        "Format (final, %):",
        scores_table(world.format, FINAL),
    ]
    if world.name == "shortcut":
        parts += ["Rate of the planted thought (final, %; lower is better, so bold is worst):"]
        parts += [scores_table(world.shortcut, FINAL)]
    rows = [c for c in world.score.contrasts if c.when == FINAL and c.domain != f"{TASK}: known"]
    parts += ["Differences from SDPO (reward, final):", contrasts_table(rows)]
    if world.name == "shortcut":
        rates = [c for c in world.shortcut.contrasts if c.when == FINAL and c.domain == f"{TASK}: unknown"]
        parts += ["Differences from SDPO (rate of the planted thought, final):", contrasts_table(rates)]
    parts += [figure(f"{world.name}-{name}") for name in ("scores", "curves", "lambda")]
    return "\n\n".join(parts)


def figure(name: str) -> str:
    """HTML of a figure that follows the reader's light or dark theme."""
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{name}-dark.png">'
    return f'<picture>{dark}<img alt="{name}" src="{name}-light.png"></picture>'


def scores_table(comparison: Comparison, when: str) -> str:
    return score_markdown(comparison, when).replace(f"{TASK}: ", "")


def contrasts_table(contrasts: Sequence[Contrast]) -> str:
    return table(
        ("arm", "prompts", "difference (points)", "95 % interval", "p", "p (Holm)"),
        [[row[0], row[1].rpartition(": ")[2], *row[2:]] for row in map(contrast_row, contrasts)],
    )


def lambda_table(world: World) -> str:
    rows = []
    for value in LAMBDAS:
        runs = world.runs_of(f"CREDIT λ={value:g}")
        begin, end = ([f(run, "credit/s_mean") for run in runs] for f in (early, late))
        rows.append(
            [
                f"{value:g}",
                percent_of(world, f"CREDIT λ={value:g}"),
                f"{statistics.fmean(begin):.3f} [{min(begin):.3f}, {max(begin):.3f}]",
                f"{statistics.fmean(end):.3f} [{min(end):.3f}, {max(end):.3f}]",
            ]
        )
    head = ("λ", "unknown cues, %", "S_t, first 5 steps (range over seeds)", "S_t, last 10 steps (range over seeds)")
    rows.insert(0, ["0 (SDPO)", percent_of(world, "SDPO"), "no contrast computed", "no contrast computed"])
    return f"{world.name.capitalize()} world:\n\n{table(head, rows)}"


def count_table(world: World) -> str:
    rows = []
    reference = {run.seed: step_seconds(run) for run in world.runs_of("SDPO")}
    arms = {"0 (SDPO)": "SDPO", "1": "CREDIT λ=0.1", "2": "CREDIT λ=0.1 C=2", "4": "CREDIT λ=0.1 C=4"}
    for name, arm in arms.items():
        ratios = [step_seconds(run) / reference[run.seed] for run in world.runs_of(arm)]
        spread = [late(run, "credit/s_std") for run in world.runs_of(arm)] if arm != "SDPO" else []
        reward = [late(run, "reward") for run in world.runs_of(arm)]
        rows.append(
            [
                name,
                percent_of(world, arm),
                f"{statistics.fmean(reward):.3f}",
                f"{statistics.fmean(spread):.2f}" if spread else "–",
                f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]",
            ]
        )
    head = ("C", "unknown cues, %", "training reward, last 10 steps", "S_t std", "time a step, ratio to SDPO")
    return (
        table(head, rows)
        + "\n\nTimes are medians over steps, relative to the SDPO run of the same seed, on a shared CPU. "
        "The range over seeds shows how noisy they are."
    )


def token_tables(tokens: Mapping[str, Mapping]) -> str:
    parts = []
    for world in WORLDS:
        bases = [value for name, value in tokens.items() if name.startswith(world)]
        rows = []
        for name in bases[0]["classes"]:
            cells = [
                f"{statistics.fmean(v):+.2f} [{min(v):+.2f}, {max(v):+.2f}]"
                for v in ([base["classes"][name][q] for base in bases] for q in ("delta_v", "S", "G"))
            ]
            rows.append([name, *cells])
        head = ("tokens", "ΔV_t", "S_t", "Ĝ_t")
        parts.append(
            f"{world.capitalize()} world, means in nats over {len(bases)} bases [range]:\n\n{table(head, rows)}"
        )
    rows = []
    bases = [value["branch"] for name, value in tokens.items() if name.startswith("shortcut")]
    for kind, label in (("own", "the input's own word"), ("shortcut", "the planted word")):
        means = {q: statistics.fmean(base[kind][q] for base in bases) for q in ("f", "g", "student")}
        targets = [f"{means['f'] - value * means['g']:+.2f}" for value in (0.0, *LAMBDAS)]
        rows.append([label, *(f"{means[q]:+.2f}" for q in ("f", "g", "student")), *targets])
    head = ("first word of the thought", "f", "g", "log π_θ", *(f"a at λ = {v:g}" for v in (0.0, *LAMBDAS)))
    parts.append(f"Shortcut world, at the choice between the two thoughts (a = f − λ g):\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def findings() -> str:
    """The hand-written section on claims that do not reproduce."""
    path = HERE / "findings.md"
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def limits(worlds: Mapping[str, World]) -> str:
    seeds = len({run.seed for run in worlds["plain"].runs})
    return (
        "On this page: no model above half a million parameters; no vocabulary beyond 752 tokens; one kind of "
        f"feedback and one planted shortcut; {seeds} seeds; C above 4; other divergences than reverse KL (α = 1); "
        "thinking models. The full λ × C grid was not crossed: λ was varied at C = 1 and C at λ = 0.1. The paper's "
        "own benchmarks and models need accelerators and were not run."
    )


def percent_of(world: World, arm: str) -> str:
    interval = world.score.cells[arm, f"{TASK}: unknown", FINAL].interval
    half = "" if math.isnan(interval.half_width) else f" ±{100 * interval.half_width:.1f}"
    return f"{100 * interval.mean:.1f}{half}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


if __name__ == "__main__":
    main()
