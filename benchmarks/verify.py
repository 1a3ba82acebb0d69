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
from pathlib import Path
from typing import Any

from workload import provenance

ROLLOUTS = 256
TRIVIAL = "print(sum(map(int, input().split())))"
NUMBERS = "1 2 3"
REST = "Let me think about this step by step. " * 20


def batches() -> dict[str, tuple[str, list[str], list[str]]]:
    """For each task its name for `load_task`, 256 responses, correct and wrong, and their gold answers."""
    letters = [f"<think>{REST}</think><answer>{'ABCD'[n % 4]}</answer>" for n in range(ROLLOUTS)]
    call = json.dumps([{"Action": "getForecast", "Action_Input": json.dumps({"city": "Oslo", "days": 3})}])
    calls = [
        f'Thought: {REST}\nAction: getForecast\nAction Input: {{"city": "Oslo", "days": {n % 4}}}\n'
        for n in range(ROLLOUTS)
    ]
    fractions = [rf"{REST} \boxed{{\frac{{{n}}}{{7}} + x}}" for n in range(ROLLOUTS)]
    return {
        "sciknoweval": ("sciknoweval", letters, ["A"] * ROLLOUTS),
        "toolalpaca": ("toolalpaca", calls, [call] * ROLLOUTS),
        "math": ("math", fractions, [r"x + \frac{3}{7}"] * ROLLOUTS),
        "livecodebench": ("livecodebench:examples", *programs()),
    }


def programs() -> tuple[list[str], list[str]]:
    """The problems of the package, each with a program that reads its input and prints it."""
    from credit_trl.tasks import load_task

    rows = list(load_task("livecodebench:examples").build("test"))
    responses = ["```python\nprint(input())\n```"] * ROLLOUTS
    return responses, [rows[n % len(rows)]["answer"] for n in range(ROLLOUTS)]


def measure_tasks(seconds: float) -> dict[str, float]:
    """Verdicts a second: the median of at least three batches after a warm-up."""
    from credit_trl.tasks import load_task

    found = {}
    for task, (name, responses, answers) in batches().items():
        grade = load_task(name).reward
        completions = [[{"role": "assistant", "content": response}] for response in responses]
        grade(completions[:16], answer=answers[:16])
        times: list[float] = []
        while len(times) < 3 or sum(times) < seconds:
            started = time.perf_counter()
            grade(completions, answer=answers)
            times.append(time.perf_counter() - started)
        found[task] = ROLLOUTS / statistics.median(times)
    return found


def measure_overhead(rounds: int, block: int) -> dict[str, float]:
    """Median over rounds of the time of a block of programs in each tier over that without a sandbox."""
    from credit_trl.sandbox import Program, SandboxError, open_sandbox

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
        for _ in range(rounds):
            started = time.perf_counter()
            for _ in range(block):
                subprocess.run(command, input=NUMBERS, capture_output=True, text=True, check=True)
            bare = time.perf_counter() - started
            for box in boxes:
                started = time.perf_counter()
                box.run([Program(TRIVIAL, stdin=NUMBERS)] * block)
                ratios[box.tier].append((time.perf_counter() - started) / bare)
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
