"""Draw the figures of the README and the documentation from one run of the quickstart.

    python docs/make_figures.py            # 100 steps, a few minutes on one core
    python docs/make_figures.py --run runs/quickstart    # from an existing quickstart run

`images/learning_curve.png`: held-out accuracy over the steps, as `credit-quickstart` draws it.
`images/token_map.png`: ΔV_t and S_t of one wrong answer of the base model, before and after training.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import matplotlib.pyplot as plt

from credit_trl.cli.quickstart import run_quickstart
from credit_trl.cli.quickstart_report import draw_curve
from credit_trl.cli.quickstart_tasks import quickstart_task
from credit_trl.lab.analysis import Checkpoint, TokenMap, analysis_config, map_response, sample_rollouts
from credit_trl.lab.analysis.tokenmap import group_scales
from credit_trl.lab.analysis.tokenmap_png import draw_png
from credit_trl.tasks import load_task
from credit_trl.training.run_directory import EVALUATIONS_FILE, SUMMARY_FILE, read_lines

IMAGES = Path(__file__).parent / "images"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--run", type=Path, default=Path("runs/figures"), help="run directory; a finished run is not repeated"
    )
    args = parser.parse_args()
    if not (args.run / SUMMARY_FILE).is_file():
        run_quickstart(args.run, args.steps, args.seed)
    IMAGES.mkdir(exist_ok=True)
    shutil.copyfile(draw_curve(args.run, quickstart_task("quickstart")), IMAGES / "learning_curve.png")
    steps = read_lines(args.run / EVALUATIONS_FILE)[-1]["step"]
    before, after = token_maps(args.run / "model", f"{steps} steps")
    draw_pair(before, after, IMAGES / "token_map.png", args.run)
    print(f"{IMAGES}: learning_curve.png, token_map.png")


def token_maps(trained: Path, name: str) -> tuple[TokenMap, TokenMap]:
    """Maps of the first wrong answer of the base model, under the base and under the trained model."""
    task = load_task("quickstart")
    config = analysis_config(contrastive_count=4, max_completion_length=32, seed=0)
    base = Checkpoint.load("quickstart", name="before")
    dataset = task.build("train", groups=["unknown"])
    rows = list(dataset.take(8))
    responses = sample_rollouts(base, task, rows, config, samples=2, population=list(dataset["prompt"]))
    wrong = next(response for response in responses if response.reward == 0.0)
    checkpoints = (base, Checkpoint.load(str(trained), name=f"after {name}"))
    before, after = (map_response(checkpoint, wrong, config) for checkpoint in checkpoints)
    return before, after


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


if __name__ == "__main__":
    main()
