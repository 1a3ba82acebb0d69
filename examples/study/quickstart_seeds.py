"""Run the quickstart's shipped setting with several seeds; a row per seed in results/quickstart.csv.

python quickstart_seeds.py                   # seeds 0 to 9, those that the file has are skipped
python quickstart_seeds.py --alpha 1 --seeds 100 101 102 --csv results/quickstart_reverse_kl.csv
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import argparse
import csv
import time
from dataclasses import replace
from pathlib import Path

from embedded_base.curriculum import WORLDS

from credit_trl.cli.errors import ignore_future_warnings
from credit_trl.cli.quickstart_report import QuickstartResult, format_result
from credit_trl.cli.quickstart_run import run_quickstart
from credit_trl.cli.quickstart_tasks import QuickstartTask, quickstart_task
from credit_trl.tasks.quickstart import GROUPS, load_model

FORMATS = tuple(f"format_{group}" for group in GROUPS)
COLUMNS = ("seed", *GROUPS, *FORMATS, "teacher_fidelity", "steps", "processor_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--steps", type=int, help="default: those of the quickstart")
    parser.add_argument("--alpha", type=float, help="`distillation_alpha` (default: that of the quickstart)")
    parser.add_argument("--evaluations", type=int, default=2, help="2: before and after (default); the command has 5")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart_seeds"))
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "quickstart.csv")
    args = parser.parse_args()
    task = replace(quickstart_task("quickstart"), evaluations=args.evaluations)
    options = {} if args.alpha is None else {"distillation_alpha": args.alpha}
    ignore_future_warnings()
    for seed in args.seeds:
        if str(seed) not in {row["seed"] for row in read_rows(args.csv)}:
            begun = time.process_time()
            folder = args.output_dir / f"seed-{seed}"
            result = run_quickstart(folder, args.steps, seed, task=task, progress=False, **options)
            append_row(args.csv, row_of(seed, result, time.process_time() - begun))
            print(f"seed {seed}\n\n{format_result(result)}\n", flush=True)


def row_of(seed: int, result: QuickstartResult, seconds: float) -> dict[str, str]:
    """Row of a run; `seconds` is the processor time of the run with its evaluations and token maps."""
    accuracies = {group: result.after.groups[group].mean for group in GROUPS}
    formats = {f"format_{group}": result.after.group_metrics[group]["format"] for group in GROUPS}
    rates = accuracies | formats | {"teacher_fidelity": teacher_fidelity(result.task)}
    text = {name: f"{rate:.4f}" for name, rate in rates.items()}
    return text | {"seed": str(seed), "steps": str(result.steps), "processor_seconds": f"{seconds:.0f}"}


def teacher_fidelity(task: QuickstartTask) -> float:
    """Share of probes whose feedback the teacher reads right at the end of training.

    Raises:
        ValueError: the shipped setting's teacher is not the frozen base, so that its end is not known here.
    """
    kind = task.defaults["teacher_model_kind"]
    if kind != "base":
        raise ValueError(f"Measure the trained teacher: `teacher_model_kind` is {kind!r}.")
    return WORLDS["plain"].lookup_accuracy(*load_model(), seed=1)


def read_rows(file: Path) -> list[dict[str, str]]:
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def append_row(file: Path, row: dict[str, str]) -> None:
    is_new = not file.is_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
