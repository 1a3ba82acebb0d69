"""Draw the figures of the README and the documentation, each for light and dark pages.

    python docs/make_figures.py predicted
    python docs/make_figures.py hero --base DIRECTORY
    python docs/make_figures.py smollm2_arms
    python docs/make_figures.py learning_curve --run runs/quickstart

`predicted`: predicted against measured change of the log-odds, a point for each row of `predicted.csv` (`law.py`).
`hero`: R_t of SDPO and CREDIT on one answer of a base of the world weak (`worlds.py weak 309 DIRECTORY` in
examples/study), and the rate of its planted thought by step. `smollm2_arms`: openings and accuracy of the runs in
examples/smollm. `learning_curve`: test accuracy by step of a run of `credit-quickstart`.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from credit_trl.contexts.prompts import user_text
from credit_trl.lab.analysis import Checkpoint, TokenMap, analysis_config, map_response, sample_rollouts
from credit_trl.run_directory import EVALUATIONS_FILE, read_lines
from credit_trl.tasks import load_task
from credit_trl.tasks.quickstart import SHORTCUT_THOUGHT, TEMPLATES

STUDY = Path(__file__).parents[1] / "examples" / "study"
sys.path.append(str(STUDY))
from arms import STYLES  # noqa: E402

IMAGES = Path(__file__).parent / "images"
RESULTS = STUDY / "results"
THEMES = {"light": ("#ffffff", "#1c1e21", "#d7dade"), "dark": ("#16181c", "#e4e6ea", "#3a3e45")}


def style(background: str, ink: str, grid: str) -> dict[str, object]:
    """Parameters of matplotlib for the colors of a page."""
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
    colors |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), background)
    layout = {"axes.titlelocation": "left", "axes.axisbelow": True, "axes.grid": True, "legend.frameon": False}
    sizes = {"font.size": 8.5, "axes.titlesize": 9, "grid.linewidth": 0.6, "savefig.dpi": 160}
    return {**colors, **layout, **sizes, "grid.color": grid, "axes.edgecolor": grid}


def draw_predicted() -> Figure:
    rows = pd.read_csv(RESULTS / "predicted.csv").query("rho == 0.05").dropna(subset="measured")
    rows = rows[~rows["arm"].str.startswith("hint")]
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 2.6), sharex=True, sharey=True, layout="constrained")
    ink = mpl.rcParams["text.color"]
    titles = {"predicted": "nothing fitted", "predicted_finite": "one speed of the student, fitted on other bases"}
    for axes, (column, title) in zip(panels, titles.items(), strict=True):
        axes.axline((0, 0), slope=1, lw=0.9, color=ink)
        changes = rows[[column, "measured"]].sub(rows["log_odds_0"], axis=0)
        for arm in (arm for arm in STYLES if arm in set(rows["arm"])):
            name, color = STYLES[arm]
            axes.plot(*changes[rows["arm"] == arm].to_numpy().T, "o", color=color, ms=3, mew=0, alpha=0.75, label=name)
        unseen = changes[rows["seen"] == "no"].to_numpy().T
        axes.plot(*unseen, "o", color="none", mec=ink, ms=4, mew=0.5, label="bases predicted before training")
        axes.set(title=title, xlabel="predicted change of the log-odds, nats", aspect="equal")
    panels[0].set_ylabel("measured, nats")
    title = f"ρ = 0.05, {rows['world'].nunique()} worlds"
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", title=title, alignment="left", markerscale=1.6)
    return figure


def draw_smollm2_arms() -> Figure:
    runs = pd.read_csv(STUDY.parent / "smollm" / "results" / "runs.csv").query("setting == 'average'")
    arms = {"sdpo": "SDPO"} | {f"credit-{coef}": f"CREDIT λ={coef}" for coef in ("0.05", "0.1", "0.2", "0.5")}
    arms |= {"guide": "guide λ=0.1", "temper-only": "temper-only λ=0.1", "grpo": "GRPO"}
    colors = {arm: color for arm, (_, color) in STYLES.items()} | {"guide λ=0.1": "#66C2A5"}  # of this study alone
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.0), layout="constrained")
    titles = {"opening": "responses with an opening, %", "accuracy": "held-out avg@4, %"}
    for axes, (measure, title) in zip(panels, titles.items(), strict=True):
        for at, (arm, name) in enumerate(arms.items()):
            values = 100 * runs.loc[runs["arm"] == arm, f"{measure}_after"]
            axes.plot([at] * len(values), values, "o", color=colors[name], ms=5, mew=0, alpha=0.6)
            axes.hlines(values.mean(), at - 0.33, at + 0.33, color=colors[name], lw=2.5)
        axes.axhline(100 * runs[f"{measure}_before"].mean(), ls=":", lw=1, color=mpl.rcParams["text.color"])
        labels = ("SDPO", "λ = 0.05", "λ = 0.1", "λ = 0.2", "λ = 0.5", "guide\nλ = 0.1", "temper-\nonly", "GRPO")
        axes.set_xticks(range(len(arms)), labels)
        axes.set(ylim=(-2, None), title=f"{title} (40 steps, ρ = 0.05; dotted: base)")
    return figure


def draw_learning_curve(run: Path) -> Figure:
    rows = read_lines(run / EVALUATIONS_FILE)
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    ink = mpl.rcParams["text.color"]  # colors are those of arms
    for group, line in {"known": "o-", "unknown": "o--", "holdout": "o:"}.items():
        scores = [100 * row["groups"][group] for row in rows]
        axes.plot([row["step"] for row in rows], scores, line, color=ink, lw=2, ms=4, label=f"{group} cues")
    axes.set(ylim=(0, 103), title="test accuracy, %", xlabel="step")
    axes.legend(loc="center right", handlelength=4)
    return figure


def planted_maps(base: Path) -> list[TokenMap]:
    """Token maps with λ = 0 and 0.1 of the first right answer of a base with the planted thought."""
    task = load_task("quickstart")
    model = Checkpoint.load(str(base), name="base")
    options = {"contrastive_count": 4, "max_completion_length": 32, "seed": 0, "use_successful_as_teacher": False}
    sdpo, credit = (analysis_config(contrastive_coef=coef, **options, **TEMPLATES) for coef in (0.0, 0.1))
    rows = list(task.build("train", groups=["unknown"]))
    found = sample_rollouts(model, task, rows[:256], credit, samples=2, population=[row["prompt"] for row in rows])
    right = (one for one in found if one.reward == 1.0)
    answer = next(one for one in right if SHORTCUT_THOUGHT in model.tokenizer.decode(list(one.token_ids)))
    return [map_response(model, answer, config) for config in (sdpo, credit)]


def draw_hero(maps: list[TokenMap]) -> Figure:
    figure = plt.figure(figsize=(9.6, 3.7))
    response = maps[0].response
    feedback = f"reward {response.reward:.0f}   feedback: {response.privileged.feedback}"
    head = user_text(response.prompt).strip().splitlines()[-1]
    figure.text(0.026, 0.95, f"{head}\n{feedback}", fontsize=10, va="top", linespacing=1.5)
    ends = ["#2166be", mpl.rcParams["figure.facecolor"], "#d62f27"]
    shade = ScalarMappable(TwoSlopeNorm(0.0, -1.0, 1.0), LinearSegmentedColormap.from_list("credit", ends))
    formulas = ("SDPO:  $R_t = f - \\log\\,\\pi_\\theta$", "CREDIT:  $R_t = f - 0.1\\,\\hat G - \\log\\,\\pi_\\theta$")
    for bottom, formula, token_map in zip((0.52, 0.18), formulas, maps, strict=True):
        axes = figure.add_axes((0.026, bottom, 0.418, 0.225))
        axes.set_title(formula, pad=5)
        draw_tokens(axes, token_map, shade)
    bar = figure.add_axes((0.047, 0.113, 0.333, 0.024))
    title = "$R_t$ of the token minus the policy's mean, nats"
    figure.colorbar(shade, cax=bar, orientation="horizontal", extend="both", ticks=(-1, 0, 1), label=title)
    draw_rates(figure.add_axes((0.535, 0.15, 0.445, 0.75)))
    return figure


def draw_tokens(axes: Axes, token_map: TokenMap, shade: ScalarMappable) -> None:
    """Draw tokens on a grid of characters, colored by R_t minus the mean of the policy."""
    axes.set(xlim=(0, 48), ylim=(3, 0))
    axes.axis("off")
    line = column = 0
    for token, value in zip(token_map.tokens, token_map.scores.centred.tolist(), strict=True):
        text = token.text.rstrip("\n").replace("↵", "").replace("<|im_end|>", "")
        if text:
            axes.add_patch(Rectangle((column, line + 0.44), len(text), 0.56, color=shade.to_rgba(value), lw=0))
            axes.text(column, line + 0.70, text, fontsize=10, family="DejaVu Sans Mono", va="center")
        if text and abs(value) >= 0.05:
            axes.text(column + len(text) / 2, line + 0.36, f"{value:+.2f}", fontsize=7, ha="center")
        is_end = token.text.endswith("\n")
        line += is_end
        column = 0 if is_end else column + len(text)


def draw_rates(axes: Axes) -> None:
    """Draw means over the bases of the world weak, with the law's predictions dashed (nothing fitted)."""
    table = pd.read_csv(RESULTS / "weak.csv").query("step <= 60")
    rates = table.pivot_table("thought_unknown", "step", "arm") * 100
    law = pd.read_csv(RESULTS / "predicted.csv").query("world == 'weak' and seen == 'yes' and step <= 60")
    predicted = law.assign(rate=100 / (1 + np.exp(-law["predicted"]))).pivot_table("rate", "step", "arm")
    base = rates.loc[0, "SDPO"]
    for arm in ("SDPO", "CREDIT λ=0.05", "CREDIT λ=0.1", "GRPO"):
        name, color = STYLES[arm]
        axes.plot(rates.index, rates[arm], "o-", color=color, lw=2, ms=4, label=name)
        if arm in predicted:
            axes.plot([0, *predicted.index], [base, *predicted[arm]], "--", color=color, lw=1.3)
    for name, place, line in (("predicted from step 0", np.nan, "--"), ("base", base, ":")):
        axes.axhline(place, ls=line, lw=1, color=mpl.rcParams["text.color"], label=name)
    title = f"“{SHORTCUT_THOUGHT}” on unknown cues, % ({table['seed'].nunique()} bases, ρ = 0.05)"
    axes.set(ylim=(0, None), title=title, xlabel="step")
    axes.legend(loc="upper left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=["predicted", "hero", "smollm2_arms", "learning_curve"])
    parser.add_argument("--base", type=Path, help="for `hero`")
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"), help="for `learning_curve`")
    args = parser.parse_args()
    draw = {"predicted": draw_predicted, "smollm2_arms": draw_smollm2_arms}
    draw["learning_curve"] = partial(draw_learning_curve, args.run)
    if args.figure == "hero":
        if args.base is None:
            parser.error("hero needs --base")
        draw["hero"] = partial(draw_hero, planted_maps(args.base))
    for theme, page in THEMES.items():
        with mpl.rc_context(style(*page)):
            draw[args.figure]().savefig(IMAGES / f"{args.figure}-{theme}.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
