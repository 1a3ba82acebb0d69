"""Draw the figures of the README and the documentation, each for light and dark pages.

    python docs/make_figures.py predicted
    python docs/make_figures.py hero --base DIRECTORY
    python docs/make_figures.py learning_curve --run runs/quickstart

`predicted`: predicted against measured change of the log-odds, a point for each row of `predicted.csv` (`law.py`).
`hero`: R_t of SDPO and CREDIT on one answer of a base of the world weak (examples/study/make_base.py), and the rate of
its planted thought by step. `learning_curve`: test accuracy by step of a run of `credit-quickstart`.
"""

from __future__ import annotations

import argparse
import csv
import math
from functools import partial
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from credit_trl.lab.analysis import Checkpoint, TokenMap, analysis_config, map_response, sample_rollouts
from credit_trl.tasks import load_task
from credit_trl.tasks.quickstart import SHORTCUT_THOUGHT, TEMPLATES
from credit_trl.training.run_directory import EVALUATIONS_FILE, read_lines

IMAGES = Path(__file__).parent / "images"
RESULTS = Path(__file__).parents[1] / "examples" / "study" / "results"
# Arm in the tables → its name and color, in the order of legends.
ARMS = {
    "SDPO": ("SDPO", "#D55E00"),
    "CREDIT λ=0.05": ("CREDIT, λ = 0.05", "#56B4E9"),
    "CREDIT λ=0.1": ("CREDIT, λ = 0.1", "#0072B2"),
    "CREDIT λ=0.2": ("CREDIT, λ = 0.2", "#7A6AE0"),
    "CREDIT form=guide λ=0.2": ("guide, λ = 0.2", "#009E73"),
    "temper-only λ=0.1": ("temper-only, λ = 0.1", "#E69F00"),
    "hint-contrast λ=0.1": ("contrast of feedback, λ = 0.1", "#CC79A7"),
    "GRPO": ("GRPO", "#7F7F7F"),
}
THEMES = {"light": ("#ffffff", "#1c1e21", "#d7dade"), "dark": ("#16181c", "#e4e6ea", "#3a3e45")}
COLUMNS = 48  # characters of a line of tokens
LEAST = 0.05  # nats of the least value that is printed


def style(background: str, ink: str, grid: str) -> dict[str, object]:
    """Parameters of matplotlib for the colors of a page."""
    inked = ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "lines.color")
    sizes = {
        "axes.titlesize": 9,
        "axes.labelsize": 9,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 9,
    }
    places = {
        "axes.titlelocation": "left",
        "axes.axisbelow": True,
        "axes.grid": True,
        "legend.frameon": False,
        "legend.fontsize": 9,
    }
    grids = {"grid.color": grid, "grid.linewidth": 0.6, "axes.edgecolor": grid}
    pages = {"figure.facecolor": background, "axes.facecolor": background, "savefig.dpi": 160}
    return {**sizes, **places, **grids, **pages, **dict.fromkeys(inked, ink)}


def read_csv(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def draw_predicted() -> Figure:
    rows = [row for row in read_csv("predicted.csv") if row["measured"]]
    figure = plt.figure(figsize=(7.4, 4.6))
    axes = figure.add_axes((0.1, 0.12, 0.56, 0.8), aspect="equal", adjustable="datalim")
    axes.axline((0, 0), slope=1, lw=0.9, color=mpl.rcParams["text.color"])
    for arm, (name, color) in ARMS.items():
        own = [row for row in rows if row["arm"] == arm]
        changes = [[float(row[key]) - float(row["log_odds_0"]) for row in own] for key in ("predicted", "measured")]
        if own:
            axes.plot(*changes, "o", color=color, ms=3.5, mew=0, alpha=0.7, label=name)
    title = f"change of the log-odds since step 0: {len(rows)} rows of {len({row['world'] for row in rows})} worlds"
    axes.set(title=title, xlabel="predicted from the base, nats", ylabel="measured, nats")
    axes.legend(bbox_to_anchor=(1.02, 1), loc="upper left")
    return figure


def draw_learning_curve(run: Path) -> Figure:
    rows = read_lines(run / EVALUATIONS_FILE)
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for group, color in {"known": "#0072B2", "unknown": "#D55E00", "holdout": "#7F7F7F"}.items():
        scores = [100 * row["groups"][group] for row in rows]
        axes.plot([row["step"] for row in rows], scores, "o-", color=color, lw=2, ms=4, label=f"{group} cues")
    axes.set(ylim=(0, 103), title="test accuracy, %", xlabel="step")
    axes.legend(loc="center right")
    return figure


def planted_maps(base: Path) -> list[TokenMap]:
    """Token maps with λ = 0 and 0.1 of the first right answer of a base with the planted thought."""
    task = load_task("quickstart")
    model = Checkpoint.load(str(base), name="base")
    options = {"contrastive_count": 4, "max_completion_length": 32, "seed": 0, "use_successful_as_teacher": False}
    sdpo, credit = (analysis_config(contrastive_coef=coef, **options, **TEMPLATES) for coef in (0.0, 0.1))
    dataset = task.build("train", groups=["unknown"])
    population = list(dataset["prompt"])
    found = sample_rollouts(model, task, list(dataset.take(256)), credit, samples=2, population=population)
    right = (one for one in found if one.reward == 1.0)
    answer = next(one for one in right if SHORTCUT_THOUGHT in model.tokenizer.decode(list(one.token_ids)))
    return [map_response(model, answer, config, alternatives=20) for config in (sdpo, credit)]


def draw_hero(maps: list[TokenMap]) -> Figure:
    figure = plt.figure(figsize=(9.6, 3.7))
    response = maps[0].response
    user = response.problem.strip().splitlines()[-1]
    head = f"{user}\nreward {response.reward:.0f}   feedback: {response.privileged.feedback}"
    figure.text(0.026, 0.95, head, fontsize=10, va="top", linespacing=1.5)
    ends = ["#2166be", mpl.rcParams["figure.facecolor"], "#d62f27"]
    shade = ScalarMappable(TwoSlopeNorm(0.0, -1.0, 1.0), LinearSegmentedColormap.from_list("credit", ends))
    formulas = ("SDPO:  $R_t = f - \\log\\,\\pi_\\theta$", "CREDIT:  $R_t = f - 0.1\\,\\hat G - \\log\\,\\pi_\\theta$")
    for bottom, formula, token_map in zip((0.52, 0.18), formulas, maps, strict=True):
        axes = figure.add_axes((0.026, bottom, 0.418, 0.225))
        axes.set_title(formula, pad=5)
        draw_tokens(axes, token_map, shade)
    bar = figure.add_axes((0.047, 0.113, 0.333, 0.024))
    drawn = figure.colorbar(shade, cax=bar, orientation="horizontal", extend="both")
    drawn.set_label("$R_t$ of the token minus the policy's mean, nats", fontsize=8)
    bar.tick_params(labelsize=7)
    draw_rates(figure.add_axes((0.535, 0.15, 0.445, 0.75)))
    return figure


def draw_tokens(axes: Axes, token_map: TokenMap, shade: ScalarMappable) -> None:
    """Draw tokens on a grid of characters, colored by R_t minus its mean over the likeliest tokens of the policy."""
    axes.set(xlim=(0, COLUMNS), ylim=(3, 0))
    axes.axis("off")
    others = token_map.scores.alternatives
    mean = (torch.softmax(others.student_logps, dim=-1) * others.advantage).sum(dim=-1)
    line = column = 0
    for token, value in zip(token_map.tokens, (token_map.scores.advantage - mean).tolist(), strict=True):
        text = token.text.rstrip("\n").replace("↵", "").replace("<|im_end|>", "")
        if text:
            axes.add_patch(Rectangle((column, line + 0.44), len(text), 0.56, color=shade.to_rgba(value), lw=0))
            axes.text(column, line + 0.70, text, fontsize=10, family="DejaVu Sans Mono", va="center")
        if text and abs(value) >= LEAST:
            axes.text(column + len(text) / 2, line + 0.36, f"{value:+.2f}", fontsize=7, ha="center")
        column += len(text)
        if token.text.endswith("\n"):
            line += 1
            column = 0


def draw_rates(axes: Axes) -> None:
    """Draw means over the bases that have every step, with the law's predictions dashed."""
    table = read_csv("weak.csv")
    steps = sorted({int(row["step"]) for row in table})
    bases = sorted({row["seed"] for row in table if row["step"] == str(steps[-1])})
    measured = {(row["arm"], row["seed"], int(row["step"])): float(row["thought_unknown"]) for row in table}
    law = [row for row in read_csv("predicted.csv") if row["world"] == "weak"]
    odds = {(row["arm"], row["base"], int(row["step"])): math.exp(float(row["predicted"])) for row in law}
    base = 100 * fmean(measured["SDPO", seed, 0] for seed in bases)
    for arm in ("SDPO", "CREDIT λ=0.1", "GRPO"):
        name, color = ARMS[arm]
        means = [100 * fmean(measured[arm, seed, step] for seed in bases) for step in steps]
        axes.plot(steps, means, "o-", color=color, lw=2, ms=4, label=name)
        if (arm, bases[0], steps[-1]) in odds:
            shares = [fmean(odds[arm, seed, s] / (1 + odds[arm, seed, s]) for seed in bases) for s in steps[1:]]
            axes.plot(steps, [base, *(100 * share for share in shares)], "--", color=color, lw=1.3)
    ink = mpl.rcParams["text.color"]
    axes.plot([], [], "--", color=ink, lw=1.3, label="predicted from the base")
    axes.axhline(base, color=ink, lw=0.8, ls=":", label="base")
    axes.set(ylim=(0, None), title=f"“{SHORTCUT_THOUGHT}” on unknown cues, % ({len(bases)} bases)", xlabel="step")
    axes.legend(loc="upper left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["predicted", "hero", "learning_curve"])
    parser.add_argument("--base", type=Path, help="directory of a base of the world weak, for `hero`")
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"), help="for `learning_curve`")
    args = parser.parse_args()
    if args.figure == "hero" and args.base is None:
        parser.error("`hero` needs `--base`.")
    draw = draw_predicted
    if args.figure == "hero":
        draw = partial(draw_hero, planted_maps(args.base))
    elif args.figure == "learning_curve":
        draw = partial(draw_learning_curve, args.run)
    for theme, page in THEMES.items():
        with mpl.rc_context(style(*page)):
            draw().savefig(IMAGES / f"{args.figure}-{theme}.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
