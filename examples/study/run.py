"""Run the study: pretrain one base a world and seed, then every arm of a sweep. Resumable at any moment.

Sweeps: `methods` (the paper's claims, within an hour), `controls` (another hint swapped or shown), `choice` (forms of
the contrast on seeds of their own), `forms` (what was chosen beside all methods, on the seeds that are reported, for
longer), `cross` (sources and gates beside them), `end_choice` and `end`, `long_choice` and `long` (the same two steps
for runs to the end of learning, each second one on fresh seeds), `long_relabelled`, `settled` and `confirmed` (the
chosen one again, until learning has settled, and at a rate of its own, with hold-out cues tested under every topic).
The worlds that nothing is chosen on, `style` and `programs`, keep their task and their seeds in every sweep.
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

os.environ["OMP_NUM_THREADS"] = "1"  # one thread a process is the fastest way to use two cores here

HERE = Path(__file__).parent
WORLDS = ("plain", "shortcut", "style", "programs")
REPORTED = WORLDS[:2]  # what report.py and forms.py read
TIME_FILE = "time.json"  # in the output directory
SHORT = ("methods", "controls", "choice", "forms", "cross")
SWEEPS = (*SHORT, "end_choice", "end", "long_choice", "long", "long_relabelled", "settled", "confirmed")


def main() -> None:
    args = arguments()
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
    parser.add_argument("--seeds", type=int, help="how many of the sweep's (default: all)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the sweep's)")
    parser.add_argument("--processes", type=int, default=2, help="launchers that share the work (default 2)")
    return parser.parse_args()


def sweep_folder(sweep: str, world: str) -> str:
    """Where a world's runs of a sweep lie, under the output directory."""
    return world if sweep == "methods" else f"{world}-{sweep}"


def read_sweep(sweep: str, world: str) -> SweepSpec:
    from credit_trl.lab.sweeps import read_spec

    own = read_spec(HERE / f"{world}.yaml")
    if sweep == "methods":
        return own
    spec = read_spec(HERE / f"{sweep}.yaml")
    return spec if world in REPORTED else dataclasses.replace(spec, task=own.task, seeds=own.seeds)


def make_bases(folder: Path, wanted: Sequence[tuple[str, int]]) -> None:
    """Pretrain the bases (world and seed) that are missing, each by one launcher."""
    folder.mkdir(parents=True, exist_ok=True)
    for timeout in (0, -1):  # first those that no other launcher is at, then wait for the rest
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
    """One base, in place when it is complete. A pretraining that misses its gate is repeated with another seed."""
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
    raise RuntimeError(f"No base of the {world} world for seed {seed}.")


def base_maker(world: str) -> Callable[..., object]:
    """The function of seed and directory that pretrains a world's base."""
    if world == "programs":
        from programs.base import make_programs_base

        return make_programs_base
    from credit_trl.tasks.quickstart_model import make_base

    return partial(make_base, world)


def write_time(path: Path, seconds: dict[str, float], args: argparse.Namespace, seeds: dict[str, list[int]]) -> None:
    """What a run took from nothing: to its last base, and to its end; report.py tells it."""
    from credit_trl.training.run_directory import write_json

    told = {"sweep": args.sweep, "seeds": seeds, "processes": args.processes, "cores": os.cpu_count()}
    write_json(path, told | {"steps": args.steps} | seconds)


def run_world(
    output_dir: Path, folder: str, world: str, spec: SweepSpec, seeds: Sequence[int], steps: int | None
) -> int:
    """All arms of a world's sweep; how many jobs failed."""
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
