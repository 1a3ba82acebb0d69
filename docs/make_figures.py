"""Draw the figures of the README and the documentation.

    python docs/make_figures.py                # one run of the quickstart, two minutes on one idle core
    python docs/make_figures.py --run runs/quickstart   # from an existing quickstart run
    python docs/make_figures.py --hero         # needs: python examples/study/make_base.py --world weak
    python docs/make_figures.py --smollm2      # from examples/smollm/results/runs.csv

`images/learning_curve.png`: held-out accuracy over the steps, as `credit-quickstart` draws it.
`images/token_map.png`: ΔV_t and S_t of one wrong answer of the base model, before and after training.
`images/hero-light.png`, `hero-dark.png`: R_t of SDPO and CREDIT on one answer with the planted thought of the study's
weak world, and the rate of that thought during training, from `examples/study/results/worlds.csv`.
`images/smollm2_arms-light.png`, `smollm2_arms-dark.png`: openings and accuracy of SmolLM2 by arm, one point a seed.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from credit_trl.cli.quickstart_report import draw_curve
from credit_trl.cli.quickstart_run import run_quickstart
from credit_trl.cli.quickstart_tasks import quickstart_task
from credit_trl.lab.analysis.tokenmap_png import draw_png
from credit_trl.lab.comparison.figures import COLOURS, THEMES, Theme
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from credit_trl.lab.analysis import Checkpoint, TokenMap, analysis_config, map_response, sample_rollouts
from credit_trl.lab.analysis.tokenmap import group_scales
from credit_trl.tasks import load_task
from credit_trl.tasks.quickstart import SHORTCUT_THOUGHT
from credit_trl.tasks.quickstart_model import base_directory, load_model, read_base
from credit_trl.training.run_directory import EVALUATIONS_FILE, SUMMARY_FILE, read_lines

IMAGES = Path(__file__).parent / "images"
EXAMPLES = Path(__file__).parents[1] / "examples"
WORLDS_CSV = EXAMPLES / "study" / "results" / "worlds.csv"
SMOLLM2_CSV = EXAMPLES / "smollm" / "results" / "runs.csv"
ARMS = {
    "sdpo": "SDPO",
    "credit-0.05": "λ = 0.05",
    "credit-0.1": "λ = 0.1",
    "credit-0.2": "λ = 0.2",
    "credit-0.5": "λ = 0.5",
    "guide": "guide\nλ = 0.1",
    "temper-only": "temper\nonly",
    "grpo": "GRPO",
}

FONT = 10.0  # points
CELL, LINE = FONT / 72 * 0.602, FONT / 72 * 2.0  # inches of one character of DejaVu Sans Mono, and of one line
COLUMNS = 48  # characters of a line
LIMIT = 1.0  # nats at which colours saturate
LEAST = 0.05  # nats of the least value that is printed


@dataclass(frozen=True)
class Answer:
    """One answer with the planted thought, and the centred R_t of its T tokens for each λ."""

    token_map: TokenMap
    credit: dict[float, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="default: those of the quickstart")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--run", type=Path, default=Path("runs/figures"), help="run directory; a finished run is not repeated"
    )
    parser.add_argument("--hero", action="store_true", help="draw the pair of the weak world instead")
    parser.add_argument("--smollm2", action="store_true", help="draw the arms of the SmolLM2 study instead")
    parser.add_argument("--base", type=Path, help="base of the weak world (default: the one in the user's cache)")
    args = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    if args.hero:
        answer = planted_answer(args.base or base_directory(world="weak"))
        for theme in THEMES:
            draw_hero(answer, read_rates(WORLDS_CSV), theme, IMAGES / f"hero-{theme.name}.png")
        print(f"{IMAGES}: hero-light.png, hero-dark.png")
        return
    if args.smollm2:
        for theme in THEMES:
            draw_arms(SMOLLM2_CSV, theme, IMAGES / f"smollm2_arms-{theme.name}.png")
        print(f"{IMAGES}: smollm2_arms-light.png, smollm2_arms-dark.png")
        return
    if not (args.run / SUMMARY_FILE).is_file():
        run_quickstart(args.run, args.steps, args.seed)
    shutil.copyfile(draw_curve(args.run, quickstart_task("quickstart")), IMAGES / "learning_curve.png")
    steps = read_lines(args.run / EVALUATIONS_FILE)[-1]["step"]
    before, after = token_maps(args.run / "model", f"{steps} steps")
    draw_pair(before, after, IMAGES / "token_map.png", args.run)
    print(f"{IMAGES}: learning_curve.png, token_map.png")


def token_maps(trained: Path, name: str) -> tuple[TokenMap, TokenMap]:
    """Maps of the first wrong answer of the base model, under the base and under the trained model.

    The teacher is the frozen base in both.
    """
    task = load_task("quickstart")
    config = analysis_config(contrastive_count=4, max_completion_length=32, seed=0)
    base = Checkpoint.load("quickstart", name="before")
    dataset = task.build("train", groups=["unknown"])
    rows = list(dataset.take(8))
    responses = sample_rollouts(base, task, rows, config, samples=2, population=list(dataset["prompt"]))
    wrong = next(response for response in responses if response.reward == 0.0)
    model, tokenizer = read_base(trained)
    after = Checkpoint.of(model, tokenizer, teacher=load_model()[0], name=f"after {name}")
    return map_response(base, wrong, config), map_response(after, wrong, config)


def draw_pair(before: TokenMap, after: TokenMap, path: Path, folder: Path) -> None:
    """Draw two maps on one scale, one below the other."""
    scales = group_scales([before, after])[before.response.group]
    pictures = []
    for number, token_map in enumerate((before, after)):
        draw_png(token_map, folder / f"map-{number}.png", scales)
        pictures.append(plt.imread(folder / f"map-{number}.png"))
    width = max(picture.shape[1] for picture in pictures) / 160
    heights = [picture.shape[0] / 160 for picture in pictures]
    figure, rows = plt.subplots(2, 1, figsize=(width, sum(heights) + 0.6), height_ratios=heights, layout="constrained")
    for axes, picture, token_map in zip(rows, pictures, (before, after), strict=True):
        axes.imshow(picture)
        axes.set_title(token_map.checkpoint, fontsize=9, loc="left")
        axes.axis("off")
    figure.savefig(path, dpi=160)


def planted_answer(base: Path) -> Answer:
    """The first right answer of a base of the weak world that has the planted thought, with its credit."""
    task, model = load_task("quickstart"), Checkpoint.load(str(base), name="base")
    options = {"contrastive_count": 4, "max_completion_length": 32, "seed": 0, "use_successful_as_teacher": False}
    dataset = task.build("train", groups=["unknown"])
    found = sample_rollouts(
        model, task, list(dataset.take(256)), analysis_config(**options), samples=2, population=list(dataset["prompt"])
    )
    right = (one for one in found if one.reward == 1.0)
    answer = next(one for one in right if SHORTCUT_THOUGHT in model.tokenizer.decode(list(one.token_ids)))
    maps = {
        coef: map_response(model, answer, analysis_config(contrastive_coef=coef, **options), alternatives=20)
        for coef in (0.0, 0.1)
    }
    return Answer(maps[0.1], {coef: centred_credit(one) for coef, one in maps.items()})


def centred_credit(token_map: TokenMap) -> list[float]:
    """R_t of the sampled tokens minus its mean under the policy: a step raises tokens with a positive value.

    The mean is over the 20 likeliest tokens of each position.
    """
    others = token_map.scores.alternatives
    mean = (torch.softmax(others.student_logps, dim=-1) * others.advantage).sum(dim=-1)
    return (token_map.scores.advantage - mean).tolist()


def read_rates(file: Path) -> dict[str, dict[int, list[float]]]:
    """Rate of the planted thought on unknown cues: arm → step → values of the bases that have every step."""
    rates: dict[str, dict[int, list[float]]] = {"SDPO": {}, "CREDIT λ=0.1": {}}
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["world"] == "weak" and row["arm"] in rates]
    last = str(max(int(row["step"]) for row in rows))
    finished = {(row["arm"], row["seed"]) for row in rows if row["step"] == last}
    for row in rows:
        if (row["arm"], row["seed"]) in finished:
            rates[row["arm"]].setdefault(int(row["step"]), []).append(float(row["thought_unknown"]))
    return rates


def draw_hero(answer: Answer, rates: dict[str, dict[int, list[float]]], theme: Theme, path: Path) -> None:
    """Draw prompt, feedback and reward, the tokens by their R_t under SDPO and CREDIT, and the rate of the thought."""
    response = answer.token_map.response
    figure = Figure(figsize=(9.6, 3.7), facecolor=theme.background)
    width, height = figure.get_size_inches()
    user = response.problem.strip().splitlines()[-1]
    head = f"{user}\nreward {response.reward:.0f}   feedback: {response.privileged.feedback}"
    figure.text(0.25 / width, 1 - 0.18 / height, head, color=theme.ink, fontsize=10, va="top", linespacing=1.5)
    scale = colors.TwoSlopeNorm(0.0, -LIMIT, LIMIT)
    shades = colors.LinearSegmentedColormap.from_list("credit", ["#2166be", theme.background, "#d62f27"])
    titles = {
        0.0: "SDPO:  $R_t = f - \\log\\,\\pi_\\theta$",
        0.1: "CREDIT:  $R_t = f - 0.1\\,\\hat G - \\log\\,\\pi_\\theta$",
    }
    for row, (coef, title) in enumerate(titles.items()):
        bottom = (1.93 - row * 1.25) / height
        axes = figure.add_axes((0.25 / width, bottom, COLUMNS * CELL / width, 3 * LINE / height))
        axes.set_title(title, color=theme.ink, fontsize=9, loc="left", pad=5)
        draw_tokens(axes, answer.token_map, answer.credit[coef], ScalarMappable(scale, shades), theme)
    bar = figure.add_axes((0.45 / width, 0.42 / height, 3.2 / width, 0.09 / height))
    drawn = figure.colorbar(ScalarMappable(scale, shades), cax=bar, orientation="horizontal", extend="both")
    drawn.ax.tick_params(colors=theme.ink, labelsize=7)
    drawn.outline.set_edgecolor(theme.grid)
    drawn.set_label("$R_t$ of the token minus the policy's mean, nats", color=theme.ink, fontsize=8)
    curves = figure.add_axes((0.535, 0.15, 0.445, 0.7))
    draw_rates(curves, rates, theme)
    figure.savefig(path, dpi=160, metadata={"Software": None})


def draw_tokens(axes: Axes, token_map: TokenMap, values: list[float], shade: ScalarMappable, theme: Theme) -> None:
    """Draw the tokens on a grid of characters, coloured by their values, which are printed above them."""
    axes.set(xlim=(0, COLUMNS), ylim=(3, 0))
    axes.axis("off")
    line = column = 0
    for token, value in zip(token_map.tokens, values, strict=True):
        text = token.text.rstrip("\n").replace("↵", "").replace("<|im_end|>", "")
        if text:
            axes.add_patch(Rectangle((column, line + 0.44), len(text), 0.56, color=shade.to_rgba(value), lw=0))
            axes.text(
                column, line + 0.70, text, family="DejaVu Sans Mono", fontsize=FONT, color=theme.ink, va="center"
            )
            if abs(value) >= LEAST:
                number = f"{value:+.2f}".replace("-", "−")
                axes.text(column + len(text) / 2, line + 0.36, number, fontsize=7, color=theme.ink, ha="center")
            column += len(text)
        if token.text.endswith("\n"):
            line, column = line + 1, 0


def draw_rates(axes: Axes, rates: dict[str, dict[int, list[float]]], theme: Theme) -> None:
    """Draw the mean over bases of the rate against the steps, with a thin line for each base."""
    names = {"SDPO": "SDPO", "CREDIT λ=0.1": "CREDIT, λ = 0.1"}
    for colour, (arm, by_step) in zip((COLOURS[1], COLOURS[0]), rates.items(), strict=True):
        steps = sorted(by_step)
        for values in zip(*(by_step[step] for step in steps), strict=True):
            axes.plot(steps, [100 * value for value in values], color=colour, lw=0.7, alpha=0.4)
        means = [100 * statistics.fmean(by_step[step]) for step in steps]
        axes.plot(steps, means, "o-", color=colour, lw=2, ms=4)
        place = {"xytext": (-16, 12), "textcoords": "offset points", "ha": "right"}
        axes.annotate(names[arm], (steps[-2], means[-2]), color=colour, fontsize=9, **place)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step", color=theme.ink, fontsize=9)
    count = len(next(iter(rates["SDPO"].values())))
    title = f"“{SHORTCUT_THOUGHT}” on unknown cues, % ({count} bases)"
    style_axes(axes, title, theme)


def draw_arms(file: Path, theme: Theme, path: Path) -> None:
    """Draw openings and accuracy after training by arm, a point for each seed, their mean and the base."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["setting"] == "average"]
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    figure = Figure(figsize=(9.6, 3.0), facecolor=theme.background, layout="constrained")
    titles = {"opening": "responses with an opening, %", "accuracy": "held-out avg@4, %"}
    for axes, (measure, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for place, arm in enumerate(arms):
            values = [100 * float(row[f"{measure}_after"]) for row in rows if row["arm"] == arm]
            colour = COLOURS[1] if arm == "sdpo" else COLOURS[0] if arm.startswith("credit") else COLOURS[7]
            axes.plot([place - 0.3, place + 0.3], [statistics.fmean(values)] * 2, color=colour, lw=2.5)
            axes.plot([place] * len(values), values, "o", color=colour, ms=5, alpha=0.6, mew=0)
        base = 100 * statistics.fmean(float(row[f"{measure}_before"]) for row in rows)
        axes.axhline(base, color=theme.ink, lw=0.8, ls="--")
        axes.annotate("base", (len(arms) - 0.3, base), color=theme.ink, fontsize=8, va="center", annotation_clip=False)
        axes.set(xticks=range(len(arms)), xlim=(-0.6, len(arms) - 0.4))
        axes.set_xticklabels([ARMS[arm] for arm in arms], color=theme.ink, fontsize=8)
        axes.set_ylim(bottom=0)
        style_axes(axes, title, theme)
    figure.savefig(path, dpi=160, metadata={"Software": None})


def style_axes(axes: Axes, title: str, theme: Theme) -> None:
    axes.set_facecolor(theme.background)
    axes.set_title(title, color=theme.ink, fontsize=9, loc="left")
    axes.tick_params(colors=theme.ink, labelsize=8)
    axes.grid(True, color=theme.grid, lw=0.6)
    for spine in axes.spines.values():
        spine.set_color(theme.grid)


if __name__ == "__main__":
    main()
