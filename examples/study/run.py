"""Run the study: pretrain one base a world and seed, then every arm of a sweep. Resumable at any moment.

Three sweeps a world: `methods` (the paper's claims), `choice` (forms of the contrast on seeds of their own, to choose
from) and `forms` (what was chosen, and what `docs/contrast.md` claims, on the seeds that are reported).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

if TYPE_CHECKING:
    from credit_trl.sweeps import SweepSpec

os.environ["OMP_NUM_THREADS"] = "1"  # one thread a process is the fastest way to use two cores here

HERE = Path(__file__).parent
WORLDS = ("plain", "shortcut", "style")
REPORTED = WORLDS[:2]  # what report.py and forms.py read
SWEEPS = ("methods", "choice", "forms")


def main() -> None:
    args = arguments()
    workers = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--processes", "1"])
        for _ in range(args.processes - 1)
    ]
    failed = 0
    for world in args.worlds:
        spec = read_sweep(args.sweep, world)
        seeds = list(spec.seeds)[: args.seeds]
        make_bases(args.output_dir / "bases", world, seeds)
        failed += run_world(args.output_dir, sweep_folder(args.sweep, world), world, spec, seeds, args.steps)
    failed += sum(worker.wait() for worker in workers)
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
    from credit_trl.sweeps import read_spec

    return read_spec(HERE / f"{world if sweep == 'methods' else sweep}.yaml")


def make_bases(folder: Path, world: str, seeds: Sequence[int]) -> None:
    """Pretrain the bases that are missing, each by one launcher."""
    folder.mkdir(parents=True, exist_ok=True)
    for timeout in (0, -1):  # first those that no other launcher is at, then wait for the rest
        for seed in seeds:
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
    from credit_trl.tasks.quickstart_model import make_base

    for attempt in range(5):
        with tempfile.TemporaryDirectory(dir=base.parent, prefix=f".{base.name}.") as scratch:
            try:
                make_base(world, seed + 100 * attempt, Path(scratch) / "base", progress=False)
            except RuntimeError as error:
                print(f"{base.name}, attempt {attempt + 1}: {error}", file=sys.stderr)
                continue
            (Path(scratch) / "base").rename(base)
            print(f"{base} pretrained (seed {seed + 100 * attempt})")
            return
    raise RuntimeError(f"No base of the {world} world for seed {seed}.")


def run_world(
    output_dir: Path, folder: str, world: str, spec: SweepSpec, seeds: Sequence[int], steps: int | None
) -> int:
    """All arms of a world's sweep; how many jobs failed."""
    import torch

    from credit_trl.sweeps import run_sweep

    torch.set_num_threads(1)
    config = dict(spec.config) | ({} if steps is None else {"max_steps": steps})
    model = str(output_dir / "bases" / f"{world}-seed{{seed}}")
    report = run_sweep(dataclasses.replace(spec, model=model, seeds=seeds, config=config), output_dir / folder)
    print(f"{folder}: {report}")
    return len(report.failed)


if __name__ == "__main__":
    main()
