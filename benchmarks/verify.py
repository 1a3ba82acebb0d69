"""Throughput of verifiers, and overhead of the sandbox.

    python benchmarks/verify.py --out benchmarks/results/verify.json

Verdicts a second of a batch of 256 rollouts, for each task, on one core. A verdict of `livecodebench` runs all tests
of a rollout. The overhead is that of trivial programs in each tier over `python -I -S`; both take turns.
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

ROLLOUTS = 256
TRIVIAL = "print(sum(map(int, input().split())))"
NUMBERS = "1 2 3"
REST = "Let me think about this step by step. " * 20


def batches() -> dict[str, tuple[list[str], list[str]]]:
    """For each task 256 responses, correct and wrong, and their gold answers."""
    letters = [f"<think>{REST}</think><answer>{'ABCD'[n % 4]}</answer>" for n in range(ROLLOUTS)]
    call = json.dumps([{"Action": "getForecast", "Action_Input": json.dumps({"city": "Oslo", "days": 3})}])
    calls = [
        f'Thought: {REST}\nAction: getForecast\nAction Input: {{"city": "Oslo", "days": {n % 4}}}\n'
        for n in range(ROLLOUTS)
    ]
    fractions = [rf"{REST} \boxed{{\frac{{{n}}}{{7}} + x}}" for n in range(ROLLOUTS)]
    # The problems of the package, each with a program that reads its input and prints it
    problems = load_task("livecodebench:examples").build("test")["answer"]
    programs = ["```python\nprint(input())\n```"] * ROLLOUTS
    return {
        "sciknoweval": (letters, ["A"] * ROLLOUTS),
        "toolalpaca": (calls, [call] * ROLLOUTS),
        "math": (fractions, [r"x + \frac{3}{7}"] * ROLLOUTS),
        "livecodebench:examples": (programs, [problems[n % len(problems)] for n in range(ROLLOUTS)]),
    }


def measure_tasks(seconds: float) -> dict[str, float]:
    """Verdicts a second: the median of at least three batches after a warm-up."""
    found = {}
    for task, (responses, answers) in batches().items():
        grade = load_task(task).reward
        completions = [[{"role": "assistant", "content": response}] for response in responses]
        grade(completions[:16], answer=answers[:16])
        times: list[float] = []
        while len(times) < 3 or sum(times) < seconds:
            times.append(timed(partial(grade, completions, answer=answers)))
        found[task] = ROLLOUTS / statistics.median(times)
    return found


def timed(call: Callable[[], Any]) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


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
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each task")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the overhead")
    parser.add_argument("--block", type=int, default=100, help="programs of a round")
    parser.add_argument("--out", type=Path, help="file of the result")
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    result: dict[str, Any] = {"verdicts_per_second": measure_tasks(args.seconds)}
    result["times_without_sandbox"] = measure_overhead(args.rounds, args.block)
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(provenance() | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
