"""Train the arms of a world on its bases; one CSV file a world.

    python run.py weak                                          # five bases, the arms of the table
    python run.py weak tables --seeds 12 --arms SDPO "CREDIT λ=0.1"
    python run.py weak --arms SDPO --set teacher_update_rate=0.01 max_steps=60
    python run.py weak --first_seed 300 --seeds 12 --measure    # only the rows of step 0, to predict before training

For every base the file gets a row of step 0 an arm, with the δ and s that `law.py` predicts from, before the arm is
trained, then a row per evaluated step. Runs that are in the file are skipped: start the command again to continue it,
and several times to share the work.
"""

import argparse
import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a process is fastest for a model of this size

import pandas as pd
import torch
from arms import ARMS, DEFAULT_ARMS, made_by, make_trainer, read_options, with_options
from branch import BranchRows, branch_rows, measure_branch, model_log_odds
from filelock import FileLock, Timeout
from transformers import PrinterCallback, TrainerCallback
from worlds import COMMON, WORLDS, World, pretrain

from credit_trl import CreditTrainer
from credit_trl.evaluation import EvaluationCallback, evaluate
from credit_trl.quickstart_model import read_base
from credit_trl.tasks.quickstart import GROUPS

HERE = Path(__file__).parent
KEY = ("world", "seed", "arm", "step")
BRANCH = ("delta", "s")  # of the base, which the prediction rests on
PROVENANCE = ("version", "commit", "torch", "transformers", "trl")
COLUMNS = (
    *("world", "seed", "arm", "lambda", "step", "teacher_fidelity"),
    *(f"{measure}_{group}" for measure in ("thought", "accuracy") for group in GROUPS),
    *("format", "log_odds", *BRANCH, "log_odds_given", "length", *PROVENANCE),
    *("teacher_log_odds", "teacher_delta", "teacher_s"),
)
# Rates are those of the policy itself, so nothing is cut from its distribution.
EVALUATION = {"k": 4, "temperature": 1.0, "top_p": 1.0, "batch_size": 288, "group_by": "group"}
Row = dict[str, Any]


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    changes = read_options(args.set)
    for world, seed, arm in product(args.worlds, range(args.first_seed, args.first_seed + args.seeds), args.arms):
        run_arm(WORLDS[world], seed, arm, changes, args.output_dir, args.results, args.measure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worlds", nargs="+", choices=sorted(WORLDS))
    parser.add_argument("--seeds", type=int, default=5, help="number of bases (default 5)")
    parser.add_argument("--first_seed", type=int, default=0, help="seed of the first base (default 0)")
    parser.add_argument("--arms", nargs="+", choices=sorted(ARMS), default=list(DEFAULT_ARMS), metavar="ARM")
    parser.add_argument("--set", nargs="+", default=[], metavar="OPTION=VALUE", help="options of every arm")
    parser.add_argument("--measure", action="store_true", help="write the rows of step 0 and train nothing")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/study"), help="bases and runs")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the tables")
    return parser.parse_args()


def run_arm(
    world: World, seed: int, arm: str, changes: Row, output_dir: Path, results: Path, measure_only: bool = False
) -> bool:
    """Train one arm on one base and append its rows; False if they are there or another process trains it."""
    name, options = with_options(arm, changes)
    options = COMMON | world.options | options
    file = results / f"{world.name}.csv"
    folder = output_dir / world.name / f"{name.replace(' ', '-')}-seed{seed}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(f"{folder}.lock", timeout=0):
            rows = read_rows(file)
            if (world.name, seed, name, options["max_steps"]) in rows:
                return False
            base = base_of(world, seed, output_dir)
            start = rows.get((world.name, seed, name, 0))
            if start is None:
                same_base = (row for key, row in rows.items() if key[:2] == (world.name, seed) and key[3] == 0)
                start = next((row for row in same_base if row["s"]), None) or first_row(world, base, options)
                if arm.startswith("temper-only"):
                    start = start | {"s": 0.0}  # its target has no contrast
                append_rows(file, [start | row_of(world, seed, name, 0, options)])
            if measure_only:
                return True
            branch = {column: start[column] for column in BRANCH}
            trained = train(world, seed, arm, options, base, folder)
            append_rows(file, [row_of(world, seed, name, step, options) | branch | row for step, row in trained])
    except Timeout:
        return False
    print(f"{world.name}, base {seed}: {name}", flush=True)
    return True


def base_of(world: World, seed: int, output_dir: Path) -> Path:
    """Directory of a base, which is pretrained if it is not there, by one process at a time."""
    output_dir.mkdir(parents=True, exist_ok=True)
    base = output_dir / "bases" / f"{world.name}-seed{seed}"
    with FileLock(output_dir / f"base-{world.name}-seed{seed}.lock"):
        if not base.exists():
            pretrain(world, seed, base)
    return base


def first_row(world: World, base: Path, options: Row) -> Row:
    """Rates of the base, and its branch."""
    model, tokenizer = read_base(base)
    length = options["max_completion_length"]
    result = evaluate(
        model, world.task, tokenizer=tokenizer, max_completion_length=length, progress=False, **EVALUATION
    )
    return {
        "teacher_fidelity": world.fidelity(model, tokenizer),
        **measure_branch(model_log_odds(model, tokenizer, world.point), branch_rows(world.task, world.point)),
        **rates(result.to_dict()),
    }


def train(world: World, seed: int, arm: str, options: Row, base: Path, folder: Path) -> Iterator[tuple[int, Row]]:
    """Train one arm; yield a row per evaluated step."""
    model, tokenizer = read_base(base)
    task = world.task
    options = options | {"output_dir": str(folder), "seed": seed}
    trainer = make_trainer(arm, options, model, task.reward, task.build("train"), tokenizer)
    trainer.remove_callback(PrinterCallback)
    eval_steps = min(world.eval_steps, options["max_steps"])
    callback = EvaluationCallback(trainer, task, eval_steps=eval_steps, keep_best=False, first=False, **EVALUATION)
    branch = BranchCallback(trainer, world, eval_steps)
    trainer.add_callback(callback)
    trainer.add_callback(branch)
    trainer.train()
    for evaluation in callback.history:
        yield evaluation["step"], branch.rows[evaluation["step"]] | rates(evaluation)


class BranchCallback(TrainerCallback):
    """Measures the policy's log-odds at the branch, without and with feedback, and the teacher's branch and fidelity.

    Fidelity is the share of probes whose feedback the teacher reads right. GRPO has no teacher.
    """

    def __init__(self, trainer: CreditTrainer, world: World, every: int) -> None:
        self.trainer = trainer
        self.world = world
        self.every = every
        self.rows: dict[int, Row] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every and state.global_step != state.max_steps:
            return
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        tokenizer = self.trainer.processing_class
        rows = branch_rows(self.world.task, self.world.point)
        was_training = model.training
        model.eval()
        log_odds = model_log_odds(model, tokenizer, self.world.point)
        self.rows[state.global_step] = {
            "log_odds": log_odds(rows.prompts, rows.specific).mean(),
            "log_odds_given": log_odds(rows.given, rows.specific).mean(),
            **self._of_teacher(tokenizer, rows),
        }
        model.train(was_training)

    def _of_teacher(self, tokenizer: Any, rows: BranchRows) -> Row:
        if self.trainer.args.distillation_weight == 0.0:
            return {}
        with self.trainer.teacher.active() as active:
            teacher = self.trainer.teacher.unwrapped(active)
            branch = measure_branch(model_log_odds(teacher, tokenizer, self.world.point), rows)
            fidelity = self.world.fidelity(teacher, tokenizer)
        return {"teacher_fidelity": fidelity} | {f"teacher_{name}": branch[name] for name in ("log_odds", *BRANCH)}


def rates(result: Mapping[str, Any]) -> Row:
    """Rate columns of an evaluation, as a dictionary or a line of `evaluations.jsonl`."""
    thoughts = {f"thought_{group}": result["group_metrics"][group]["shortcut"] for group in GROUPS}
    accuracies = {f"accuracy_{group}": mean_of(result["groups"][group]) for group in GROUPS}
    return thoughts | accuracies | {"format": result["metrics"]["format"], "length": result["mean_length"]}


def mean_of(value: Any) -> float:
    """Mean of an interval, or the value itself."""
    return value["mean"] if isinstance(value, Mapping) else float(getattr(value, "mean", value))


def row_of(world: World, seed: int, arm: str, step: int, options: Row) -> Row:
    """Columns that name a row: world, base, arm and step, and the versions that made it."""
    is_grpo = options.get("distillation_weight") == 0.0
    key = dict(zip(KEY, (world.name, seed, arm, step), strict=True))
    coefficient = {"lambda": None if is_grpo else options["contrastive_coef"]}
    return key | coefficient | made_by()


def read_rows(file: Path) -> dict[tuple[str, int, str, int], Row]:
    """Rows by world, seed, arm and step. Cells of numbers are floats, empty ones None."""
    if not file.is_file():
        return {}
    texts = {"world", "arm", *PROVENANCE}
    rows = {}
    with file.open(encoding="utf-8", newline="") as lines:
        for cells in csv.DictReader(lines):
            row = {name: text if name in texts else (float(text) if text else None) for name, text in cells.items()}
            rows[row["world"], int(row["seed"]), row["arm"], int(row["step"])] = row
    return rows


def append_rows(file: Path, rows: Sequence[Row]) -> None:
    """Append the rows that a table does not have, one process at a time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        stored = read_rows(file)
        new = [row for row in rows if tuple(row[name] for name in KEY) not in stored]
        columns = pd.read_csv(file, nrows=0).columns if file.exists() else list(COLUMNS)
        table = pd.DataFrame(new, columns=columns)
        table.to_csv(file, mode="a", header=not file.exists(), index=False, float_format="%.4f")


if __name__ == "__main__":
    main()
