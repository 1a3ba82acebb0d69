"""Programs that are verified in a second, and overhead of the sandbox.

    python benchmarks/verify.py --out benchmarks/results/verify.json

Both on one core. The overhead is that of trivial programs in each tier over `python -I -S`, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from workload import provenance

from credit_trl.sandbox import Program, SandboxError, open_sandbox
from credit_trl.tasks import load_task

TRIVIAL = "print(sum(map(int, input().split())))"
NUMBERS = "1 2 3"


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def verdicts_a_second() -> float:
    """Programs of `livecodebench:examples`, with all of their tests, that are verified in a second."""
    task = load_task("livecodebench:examples")
    answers = list(task.build("test")["answer"]) * 8
    programs = [[{"role": "assistant", "content": "```python\nprint(input())\n```"}]] * len(answers)
    return len(answers) / timed(partial(task.reward, programs, answer=answers))


def measure_overhead(rounds: int, block: int) -> dict[str, float]:
    """Median over rounds of the time of a block of programs in each tier over that without a sandbox."""
    boxes = []
    for tier in ("bubblewrap", "landlock"):
        try:
            boxes.append(open_sandbox(tier, workers=1))
        except SandboxError as error:
            print(f"{tier} is not available: {str(error).splitlines()[-1]}", file=sys.stderr)
    ratios: dict[str, list[float]] = {box.tier: [] for box in boxes}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(TRIVIAL)
        command = [sys.executable, "-I", "-S", str(path)]

        def run_bare() -> None:
            for _ in range(block):
                subprocess.run(command, input=NUMBERS, capture_output=True, text=True, check=True)

        for _ in range(rounds):
            bare = timed(run_bare)
            for box in boxes:
                ratios[box.tier].append(timed(partial(box.run, [Program(TRIVIAL, stdin=NUMBERS)] * block)) / bare)
    for box in boxes:
        box.close()
    return {tier: statistics.median(of) for tier, of in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the overhead")
    parser.add_argument("--block", type=int, default=100, help="programs of a round")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    ratios = measure_overhead(args.rounds, args.block)
    result = {"verdicts_a_second": verdicts_a_second(), "times_without_sandbox": ratios}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(provenance() | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
