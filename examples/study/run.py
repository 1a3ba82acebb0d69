"""Run the study: pretrain one base per world and seed, then train every arm of a sweep. Resumable.

Sweeps:
    methods: the paper's claims, within an hour.
    controls: feedback swapped instead of the input, and feedback of another prompt.
    choice, forms: forms of the contrast, chosen on two seeds and reported on five others, for 60 steps.
    cross: forms × λ × sources × gates.
    end_choice, end and long_choice, long: choice and report for runs to the end of learning.
    long_relabelled, settled, confirmed: the chosen setting with hold-out cues tested under every topic.
    subtract_long, subtract_settled: the paper's form at the recipes of long and settled.

Nothing is chosen on the worlds `style` and `programs`. They keep their task and seeds in every sweep.

`--world` runs a world whose outcome is predicted before training instead, base by base, into one CSV file.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

if TYPE_CHECKING:
    from credit_trl.lab.sweeps import SweepSpec

os.environ["OMP_NUM_THREADS"] = "1"  # one thread per process is fastest for a model of this size

HERE = Path(__file__).parent
WORLDS = ("plain", "shortcut", "style", "programs")
REPORTED = WORLDS[:2]
PREDICTED = ("weak", "tables", "skip", "filler", "useful")  # worlds of `--world`
PREDICTED_SEEDS = 5  # number of their seeds unless `--seeds` says otherwise
TIME_FILE = "time.json"  # in the output directory
SWEEPS = (
    *("methods", "controls", "choice", "forms", "cross"),
    *("end_choice", "end", "long_choice", "long", "long_relabelled", "settled", "confirmed"),
    *("subtract_long", "subtract_settled"),
)


def main() -> None:
    args = arguments()
    if args.world:
        sys.exit(0 if run_predicted(args) else 1)
    is_fresh, begun = not args.output_dir.exists(), time.monotonic()
    workers = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--processes", "1"])
        for _ in range(args.processes - 1)
    ]
    specs = {world: read_sweep(args.sweep, world) for world in args.worlds}
    seeds = {world: list(spec.seeds)[: args.seeds] for world, spec in specs.items()}
    make_bases(args.output_dir / "bases", [(world, seed) for world in specs for seed in seeds[world]])
    pretrained = time.monotonic()
    failed = 0
    for world, spec in specs.items():
        folder = sweep_folder(args.sweep, world)
        failed += run_world(args.output_dir, folder, world, spec, seeds[world], args.steps)
    failed += sum(worker.wait() for worker in workers)
    if is_fresh and workers and not failed:
        seconds = {"seconds_bases": pretrained - begun, "seconds": time.monotonic() - begun}
        write_time(args.output_dir / TIME_FILE, seconds, args, seeds)
    sys.exit(1 if failed else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/study"))
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(REPORTED))
    parser.add_argument("--sweep", choices=SWEEPS, default="methods")
    parser.add_argument("--seeds", type=int, help="number of seeds of the sweep (default: all)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: those of the sweep)")
    parser.add_argument("--processes", type=int, default=2, help="processes that share the jobs (default 2)")
    predicted = parser.add_argument_group("a world with a predicted outcome")
    predicted.add_argument("--world", choices=PREDICTED, help="run this world; --worlds and --sweep are ignored")
    predicted.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="processes (default 2)")
    predicted.add_argument("--minutes", type=float, help="start no arm that would probably end later")
    predicted.add_argument(
        "--csv", type=Path, default=HERE / "results" / "worlds.csv", help="table of the rows; existing ones stay"
    )
    return parser.parse_args()


def run_predicted(args: argparse.Namespace) -> bool:
    """Run a world with a predicted outcome; whether all of its rows are in the CSV file."""
    import torch
    from world_runs import WorldRuns

    torch.set_num_threads(1)
    workers = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--jobs", "1"]) for _ in range(args.jobs - 1)
    ]
    spec = read_sweep("methods", args.world)
    if args.steps is not None:
        spec = dataclasses.replace(spec, config={**spec.config, "max_steps": args.steps})

    def base_of(seed: int) -> Path:
        make_bases(args.output_dir / "bases", [(args.world, seed)])
        return args.output_dir / "bases" / f"{args.world}-seed{seed}"

    seeds = list(spec.seeds)[: args.seeds or PREDICTED_SEEDS]
    runs = WorldRuns(args.world, spec, seeds, args.output_dir / args.world, args.csv, base_of, args.minutes)
    is_complete = runs.run()
    return all([is_complete, *(worker.wait() == 0 for worker in workers)])


def sweep_folder(sweep: str, world: str) -> str:
    """Folder of a world's runs of a sweep, below the output directory."""
    return world if sweep == "methods" else f"{world}-{sweep}"


def read_sweep(sweep: str, world: str) -> SweepSpec:
    from credit_trl.lab.sweeps import read_spec

    own = read_spec(HERE / f"{world}.yaml")
    if sweep == "methods":
        return own
    spec = read_spec(HERE / f"{sweep}.yaml")
    return spec if world in REPORTED else dataclasses.replace(spec, task=own.task, seeds=own.seeds)


def make_bases(folder: Path, wanted: Sequence[tuple[str, int]]) -> None:
    """Pretrain the missing bases (world and seed). Each is pretrained by one process."""
    folder.mkdir(parents=True, exist_ok=True)
    for timeout in (0, -1):  # first those that no other process works on, then wait for the rest
        for world, seed in wanted:
            base = folder / f"{world}-seed{seed}"
            if base.exists():
                continue
            try:
                with FileLock(f"{base}.lock", timeout=timeout):
                    if not base.exists():
                        pretrain(base, world, seed)
            except Timeout:
                continue


def pretrain(base: Path, world: str, seed: int) -> None:
    """Pretrain one base and move it into place when complete. Retried with another seed if it fails its gate."""
    make = base_maker(world)
    for attempt in range(5):
        with tempfile.TemporaryDirectory(dir=base.parent, prefix=f".{base.name}.") as scratch:
            try:
                make(seed + 100 * attempt, Path(scratch) / "base", progress=False)
            except RuntimeError as error:
                print(f"{base.name}, attempt {attempt + 1}: {error}", file=sys.stderr)
                continue
            (Path(scratch) / "base").rename(base)
            print(f"{base} pretrained (seed {seed + 100 * attempt})")
            return
    raise RuntimeError(f"Pretraining the base of world {world!r} for seed {seed} failed its gate in five attempts.")


def base_maker(world: str) -> Callable[..., object]:
    """The function of (seed, directory) that pretrains the base of a world."""
    if world == "programs":
        from programs.base import make_programs_base

        return make_programs_base
    if world in PREDICTED:
        import predicted

        return predicted.PREDICTED[world].make_base
    from embedded_base import make_base

    return partial(make_base, world)


def write_time(path: Path, seconds: dict[str, float], args: argparse.Namespace, seeds: dict[str, list[int]]) -> None:
    """Write the wall-clock seconds of a complete run, which report.py prints."""
    from credit_trl.training.run_directory import write_json

    setup = {"sweep": args.sweep, "seeds": seeds, "processes": args.processes, "cores": os.cpu_count()}
    write_json(path, setup | {"steps": args.steps} | seconds)


def run_world(
    output_dir: Path, folder: str, world: str, spec: SweepSpec, seeds: Sequence[int], steps: int | None
) -> int:
    """Train all arms of a sweep in one world; return the number of failed jobs."""
    import torch

    from credit_trl.lab.sweeps import run_sweep

    torch.set_num_threads(1)
    config = dict(spec.config) | ({} if steps is None else {"max_steps": steps})
    model = str(output_dir / "bases" / f"{world}-seed{{seed}}")
    report = run_sweep(dataclasses.replace(spec, model=model, seeds=seeds, config=config), output_dir / folder)
    print(f"{folder}: {report}")
    return len(report.failed)


if __name__ == "__main__":
    main()
