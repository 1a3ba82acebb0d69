"""The study of tool choice with SmolLM2: arms by seeds, one row per run in a CSV file, in pieces.

    python examples/smollm/study.py --hours 2                     # runs that are missing, as many as fit
    python examples/smollm/study.py --arms sdpo --seeds 10 11     # some of them
    python examples/smollm/study.py --summary                     # prints the table of the existing rows

Settings: `average`, a base that opens answers under feedback in sentences of the original model, and the average of
the policy as the teacher; `frozen`, the same base, which is also the teacher; `default`, that of the shipped command,
whose base hardly has openings. `frames.py` measures δ, s and λ_c before training. Where a CPU is slow in bf16, runs
compute in fp32 and their setting is `average-fp32`, for example: base and rollouts differ from those in bf16.

A row has held-out accuracy, frame rate, response length, accuracy on real
requests (`--real`, a file of `real_requests.py`), general damage (`unrelated.py`) and the first evaluated step with 15
points more than the base. Runs whose row exists are not repeated. Settings were chosen on seeds below 10.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from real_requests import TASK as REAL
from scipy import stats
from unrelated import answer_prompts, measure_damage

from credit_trl.cli.quickstart_report import QuickstartResult, read_evaluation
from credit_trl.cli.quickstart_run import run_quickstart
from credit_trl.cli.quickstart_tasks import QuickstartTask, load_warmed_up, quickstart_task
from credit_trl.cli.tool_choice_base import WarmUp, has_fast_bf16, mixed_precision
from credit_trl.evaluation import evaluate
from credit_trl.lab.analysis.openings import frame_rate, own_frame_rate
from credit_trl.training.run_directory import EVALUATIONS_FILE, read_lines

ARMS: dict[str, dict[str, Any]] = {
    "grpo": {"distillation_weight": 0.0},
    "sdpo": {"contrastive_coef": 0.0},
    "credit-0.1": {"contrastive_coef": 0.1},
    "guide": {"contrastive_coef": 0.1, "contrastive_form": "guide"},
    "temper-only": {"contrastive_coef": 0.1, "contrastive_swap": "self"},
    "credit-0.05": {"contrastive_coef": 0.05},
    "credit-0.2": {"contrastive_coef": 0.2},
    "credit-0.5": {"contrastive_coef": 0.5},
    "sdpo-paper": {"contrastive_coef": 0.0, "reprompt_style": "paper"},
    "sdpo-stated": {"contrastive_coef": 0.0, "task": "tool_choice:stated"},
    "credit-stated": {"contrastive_coef": 0.1, "task": "tool_choice:stated"},
}
OPENINGS = WarmUp(opening_share=0.4, opening_prompts=144)


@dataclass(frozen=True)
class Setting:
    """Warm-up of the base, and the options of `CreditConfig` that all arms have."""

    warm_up: WarmUp
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> QuickstartTask:
        """The task of the shipped command with this base."""
        return replace(quickstart_task("smollm2"), load=partial(load_warmed_up, settings=self.warm_up))


SETTINGS = {
    "average": Setting(OPENINGS, {"teacher_model_kind": "ema", "teacher_update_rate": 0.05}),
    "frozen": Setting(OPENINGS),  # the base is the teacher, as in the shipped command
    "default": Setting(WarmUp()),
}
SEEDS = (10, 11, 12, 13, 14)
RESULTS = Path(__file__).parent / "results" / "runs.csv"
THRESHOLD = 0.15
# Columns of the summary, and those that are compared with SDPO's.
COLUMNS = (
    "accuracy_after",
    "real_after",
    "accuracy_step20",
    "opening_step20",
    "opening_after",
    "frames_after",
    "length_after",
    "kl",
    "perplexity",
)
PAIRED = ("accuracy_after", "opening_after", "kl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--setting", choices=SETTINGS, default="average")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--hours", type=float, default=2.0, help="start no run that would end later (default 2)")
    parser.add_argument("--real", type=Path, help="records of ToolAlpaca")
    parser.add_argument("--gpu", action="store_true", help="train and measure on a GPU (default: CPU)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/smollm-study"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--summary", action="store_true", help="print the table and run nothing")
    args = parser.parse_args()
    if args.real is not None and not args.real.is_file():
        parser.error(f"--real {args.real}: no such file")
    if args.gpu and not torch.cuda.is_available():
        parser.error("--gpu: torch sees no GPU here")
    if args.threads:
        torch.set_num_threads(args.threads)
    if not args.summary:
        run_missing(args)
    print(summary(read_rows(args.results)))


def run_missing(args: argparse.Namespace) -> None:
    """Run the missing pairs of arm and seed, seeds first, while the longest run so far fits the remaining time."""
    setting = args.setting if has_fast_bf16("cuda" if args.gpu else "cpu") else f"{args.setting}-fp32"
    start, longest = time.monotonic(), 0.0
    for seed in args.seeds:
        for arm in args.arms:
            done = {(row["setting"], row["arm"], int(row["seed"])) for row in read_rows(args.results)}
            if (setting, arm, seed) in done:
                continue
            if time.monotonic() - start + longest > 3600 * args.hours:
                return
            began = time.monotonic()
            append_row(args.results, {"setting": setting, **run_arm(arm, seed, args)})
            longest = max(longest, time.monotonic() - began)


def run_arm(arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm and return its row."""
    setting, directory = SETTINGS[args.setting], args.output_dir / args.setting / f"{arm}-{seed}"
    device = "cuda" if args.gpu else "cpu"
    options = {**setting.options, **ARMS[arm]}
    task = replace(setting.task, name=options.pop("task", setting.task.name))
    options |= {"use_cpu": not args.gpu, "bf16": has_fast_bf16(device)}
    result = run_quickstart(directory, args.steps, seed, task=task, **options)
    row = {"arm": arm, "seed": seed, "steps": result.steps, **measures(result)}
    return {
        **row,
        **damage_and_real(task, directory / "model", args.real, device),
        **versions(),
        "options": json.dumps(options),
    }


def measures(result: QuickstartResult) -> dict[str, Any]:
    """Held-out measures of a run before and after training."""
    opening = result.task.opening
    row: dict[str, Any] = {}
    for name, evaluation in (("before", result.before), ("after", result.after)):
        row[f"accuracy_{name}"] = evaluation.score
        row |= {f"{group}_{name}": interval.mean for group, interval in evaluation.groups.items()}
        row[f"length_{name}"] = evaluation.mean_length
        row |= {f"{metric}_{name}": evaluation.metrics[metric] for metric in ("format", "opening")}
    row["frames_before"] = own_frame_rate(result.answers.before, opening)
    row["frames_after"] = frame_rate(result.answers.before, result.answers.after, opening)
    row |= measures_during(result.run_directory, result.steps)
    row["steps_to_threshold"] = steps_to_threshold(result.run_directory)
    row["seconds_per_step"] = sum(result.stage_seconds.values())
    return row


def measures_during(directory: Path, last: int) -> dict[str, float]:
    """Accuracy and share of openings at the evaluated steps between the first and `last`, as `accuracy_step20`."""
    row = {}
    for line in read_lines(directory / EVALUATIONS_FILE):
        if 0 < line["step"] < last:
            row[f"accuracy_step{line['step']}"] = line["score"]
            row[f"opening_step{line['step']}"] = line["metrics"]["opening"]
    return row


def steps_to_threshold(directory: Path) -> int | None:
    """First evaluated step whose accuracy is 15 points above that of the base, or None."""
    steps = [row["step"] for row in read_lines(directory / EVALUATIONS_FILE)]
    scores = [read_evaluation(directory, step).score for step in steps]
    return next((step for step, score in zip(steps, scores, strict=True) if score >= scores[0] + THRESHOLD), None)


def damage_and_real(task: QuickstartTask, trained: Path, real: Path | None, device: str) -> dict[str, Any]:
    """General damage of a trained model, and the accuracy of base and trained model on real requests."""
    from transformers import AutoModelForCausalLM

    base, tokenizer = task.load("plain")
    base = base.eval().to(device)
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval().to(device)
    with mixed_precision(device):
        damage = measure_damage(base, model, answer_prompts(base, tokenizer))
        row: dict[str, Any] = {
            "kl": damage.kl,
            "perplexity": damage.perplexity,
            "base_perplexity": damage.base_perplexity,
        }
        if real is not None:
            sampling = {"dataset": REAL.build("test", real), "temperature": 1.0, "top_p": 1.0, "progress": False}
            for name, one in (("before", base), ("after", model)):
                found = evaluate(
                    one, REAL, 4, tokenizer=tokenizer, max_completion_length=24, batch_size=16, **sampling
                )
                row[f"real_{name}"] = found.score
    return row


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "trl")}


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row; columns that the file lacks are added, with empty fields in older rows."""
    rows = [*read_rows(path), {name: "" if value is None else value for name, value in row.items()}]
    columns = list(dict.fromkeys(name for one in rows for name in one))
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".tmp")
    with written.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    written.replace(path)


def mean_and_interval(values: Sequence[float]) -> str:
    """Mean with Student's 95 % interval over seeds; a bootstrap of three to five seeds is too narrow."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.3f} [{mean - half:.3f}, {mean + half:.3f}]"


def rows_by_seed(rows: Sequence[Mapping[str, str]], setting: str, arm: str) -> dict[str, Mapping[str, str]]:
    return {row["seed"]: row for row in rows if (row["setting"], row["arm"]) == (setting, arm)}


def column(rows: Mapping[str, Mapping[str, str]], name: str) -> dict[str, float]:
    """Values of a column by seed, of the rows that have one."""
    return {seed: float(row[name]) for seed, row in rows.items() if row.get(name)}


def summary(rows: Sequence[Mapping[str, str]]) -> str:
    """Table of the arms: means over seeds with Student's 95 % intervals, and differences from SDPO's same seeds."""
    columns = ["setting", "arm", "seeds", "gain", *COLUMNS, *(f"{name} − SDPO" for name in PAIRED)]
    lines = [f"| {' | '.join(columns)} |", "| --- | --- |" + " ---: |" * (len(columns) - 2)]
    for setting, arm in dict.fromkeys((row["setting"], row["arm"]) for row in rows):
        own, sdpo = (rows_by_seed(rows, setting, name) for name in (arm, "sdpo"))
        gains = [float(row["accuracy_after"]) - float(row["accuracy_before"]) for row in own.values()]
        values = [gains, *(list(column(own, name).values()) for name in COLUMNS)]
        for name in PAIRED:
            theirs = column(sdpo, name) if arm != "sdpo" else {}
            values.append([value - theirs[seed] for seed, value in column(own, name).items() if seed in theirs])
        cells = (mean_and_interval(one) if one else "" for one in values)
        lines.append(f"| {setting} | {arm} | {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
