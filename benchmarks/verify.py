"""Throughput of verifiers, overhead of the sandbox, and memory of its worker pool.

    python benchmarks/verify.py                      all parts; several minutes
    python benchmarks/verify.py --parts overhead     one part, written to a file only with --out

Three parts:

- `tasks`: verdicts per second in a batch of 256 rollouts, for each task, on 1, 2, ... cores (by CPU affinity). A
  verdict of `livecodebench` runs all tests of a rollout.
- `overhead`: a thousand trivial programs in each tier and without a sandbox (`python -I -S`). Both take turns, so that
  other load affects both; the ratio is the result.
- `pool`: 256 rollouts of 20 tests in one call: utilisation of the workers, and memory of the pool server over time.

Prints tables. Writes all parts of one run as JSON, with machine, versions and commit, to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("tasks", "overhead", "pool")
TASKS = ("sciknoweval", "toolalpaca", "math", "livecodebench")
MEASURED = ("src/credit_trl/sandbox", "src/credit_trl/tasks", "benchmarks/verify.py")
ROLLOUTS, TESTS = 256, 20
TRIVIAL = "print(sum(map(int, input().split())))"
NUMBERS = "1 2 3"
# A few milliseconds of work and a short output, as in a small test.
WORK = "n = int(input())\ntotal = 0\nfor i in range(100000):\n    total += i % n\nprint(total)"


def cores() -> list[int]:
    """1, 2, 4, ... and the number of cores that this process may use."""
    most = len(os.sched_getaffinity(0))
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def batch_of(task: str) -> tuple[list[str], list[str]]:
    """256 synthetic responses, correct and wrong, and their gold answers."""
    rest = "Let me think about this step by step. " * 20
    if task == "sciknoweval":
        return [f"<think>{rest}</think><answer>{'ABCD'[n % 4]}</answer>" for n in range(ROLLOUTS)], ["A"] * ROLLOUTS
    if task == "toolalpaca":
        gold = json.dumps([{"Action": "getForecast", "Action_Input": json.dumps({"city": "Oslo", "days": 3})}])
        responses = [
            f'Thought: {rest}\nAction: getForecast\nAction Input: {{"city": "Oslo", "days": {n % 4}}}\n'
            for n in range(ROLLOUTS)
        ]
        return responses, [gold] * ROLLOUTS
    if task == "math":
        return [rf"{rest} \boxed{{\frac{{{n}}}{{7}} + x}}" for n in range(ROLLOUTS)], [r"x + \frac{3}{7}"] * ROLLOUTS
    return _programs()


def _programs() -> tuple[list[str], list[str]]:
    """The problems of the package with their solutions; every fourth program is wrong."""
    from credit_trl.tasks import livecodebench, load_task

    rows = load_task("livecodebench:examples").build("test")
    lines = (livecodebench.EXAMPLES.parent / "solutions.jsonl").read_text().splitlines()
    solutions = {row["question_id"]: row["program"] for row in map(json.loads, lines)}
    responses, answers = [], []
    for n in range(ROLLOUTS):
        row = rows[n % len(rows)]
        program = solutions[row["id"].removeprefix("livecodebench-")]
        responses.append(f"```python\n{program if n % 4 else 'print(input())'}\n```")
        answers.append(row["answer"])
    return responses, answers


def grade_for(task: str, count: int, seconds: float) -> dict[str, float]:
    """Verdicts per second on `count` cores: the median of at least three batches after a warm-up."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    from credit_trl.tasks import load_task

    grade = load_task("livecodebench:examples" if task == "livecodebench" else task).reward
    responses, answers = batch_of(task)
    grade(responses[:16], answer=answers[:16])
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        started = time.perf_counter()
        verdicts = grade(responses, answer=answers)
        times.append(time.perf_counter() - started)
    rewarded = sum(verdict.reward or 0 for verdict in verdicts) / len(verdicts)
    return {"verdicts_per_second": len(responses) / statistics.median(times), "rewarded": rewarded}


def measure_tasks(seconds: float) -> list[dict[str, Any]]:
    """Measure each task on each number of cores in a separate process."""
    rows = []
    for task in TASKS:
        for count in cores():
            command = [sys.executable, __file__, "--grade", task, "--cores", str(count), "--seconds", str(seconds)]
            child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append({"task": task, "cores": count, **json.loads(child.stdout.splitlines()[-1])})
    return rows


def run_bare(python: str, path: str, workers: int, count: int) -> None:
    def run(_: int) -> None:
        done = subprocess.run([python, "-I", "-S", path], input=NUMBERS, capture_output=True, text=True, check=True)
        if done.stdout != "6\n":
            raise RuntimeError(f"a program without sandbox failed: {done}")

    with ThreadPoolExecutor(workers) as threads:
        list(threads.map(run, range(count)))


def tiers_here(workers: int) -> list[Any]:
    """Sandboxes of the tiers available on this machine."""
    from credit_trl.sandbox import SandboxError, open_sandbox

    found = []
    for tier in ("bubblewrap", "landlock"):
        try:
            found.append(open_sandbox(tier, workers=workers))
        except SandboxError as error:
            print(f"{tier} is not available: {str(error).splitlines()[1]}", file=sys.stderr)
    return found


def measure_overhead(workers: int, rounds: int = 10, block: int = 100) -> list[dict[str, Any]]:
    """Run `rounds` rounds of `block` programs without a sandbox and in each tier, in turns."""
    from credit_trl.sandbox import Program
    from credit_trl.sandbox.interpreter import find_interpreter

    python = find_interpreter().executable
    program = Program(TRIVIAL, stdin=NUMBERS)
    sandboxes = tiers_here(workers)
    seconds: dict[str, list[float]] = {name: [] for name in ("bare", *(box.tier for box in sandboxes))}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = run()
        seconds[name].append(time.perf_counter() - started)
        return result

    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "program.py")
        Path(path).write_text(TRIVIAL)
        run_bare(python, path, workers, block)
        for _ in range(rounds):
            timed("bare", lambda: run_bare(python, path, workers, block))
            for box in sandboxes:
                outcomes = timed(box.tier, lambda box=box: box.run([program] * block))
                if {outcome.stdout for outcome in outcomes} != {"6\n"}:
                    raise RuntimeError(f"a sandboxed program failed: {outcomes[0]}")
    rows = []
    for name, times in seconds.items():
        ratios = [mine / bare for mine, bare in zip(times, seconds["bare"], strict=True)]
        rows.append(
            {
                "what": name,
                "workers": workers,
                "programs": rounds * block,
                "milliseconds": 1000 * sum(times) / (rounds * block),
                "times_bare": sum(times) / sum(seconds["bare"]),
                "times_bare_median": statistics.median(ratios),
                "times_bare_worst_block": max(ratios),
            }
        )
    for box in sandboxes:
        box.close()
    return rows


def resident_bytes(pid: int | str) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_pool(workers: int) -> list[dict[str, Any]]:
    """Run 256 rollouts of 20 tests in one call per tier; memory is sampled every quarter of a second."""
    from credit_trl.sandbox import Program

    rows = []
    for box in tiers_here(workers):
        with box:
            box.run([Program(WORK, stdin="7")] * 50)  # one-time allocations
            samples: list[tuple[int, int]] = []
            done = threading.Event()
            [server] = box.server_pids

            def sample(server: int = server, samples: list = samples, done: threading.Event = done) -> None:
                while not done.wait(0.25):
                    samples.append((resident_bytes(server), resident_bytes("self")))

            thread = threading.Thread(target=sample)
            thread.start()
            programs = [Program(WORK, stdin=str(n % 9 + 1), group=n // TESTS) for n in range(ROLLOUTS * TESTS)]
            started = time.perf_counter()
            outcomes = box.run(programs, progress=box.tier)
            took = time.perf_counter() - started
            done.set()
            thread.join()
        tenth = max(1, len(samples) // 10)
        early, late = (statistics.median(s for s, _ in part) for part in (samples[:tenth], samples[-tenth:]))
        rows.append(
            {
                "tier": box.tier,
                "workers": workers,
                "programs": len(programs),
                "ok": sum(outcome.ok for outcome in outcomes),
                "seconds": took,
                "programs_per_second": len(programs) / took,
                "workers_busy": sum(outcome.seconds for outcome in outcomes) / (took * workers),
                "server_mib_first_tenth": early / 2**20,
                "server_mib_last_tenth": late / 2**20,
                "server_mib_most": max(server for server, _ in samples) / 2**20,
            }
        )
    return rows


def machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "--", *MEASURED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    bubblewrap = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() + (" with changes" if dirty.stdout.strip() else ""),
        "cpu": model[0].split(":")[1].strip() if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "linux": os.uname().release.split("-")[0],
        "python": platform.python_version(),
        "bubblewrap": bubblewrap.stdout.split()[-1] if bubblewrap.stdout else None,
        "credit_trl": version("credit-trl"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of rows; numbers have three significant digits."""
    if not rows:
        return "(no measurements)"
    cells = [[_cell(value) for value in row.values()] for row in rows]
    header = [name.replace("_", " ") for name in rows[0]]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *cells])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each task on each number of cores")
    parser.add_argument("--out", type=Path, help="result (default: benchmarks/results/verify.json for all parts)")
    parser.add_argument("--grade", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.grade:
        print(json.dumps(grade_for(arguments.grade, arguments.cores, arguments.seconds)))
        return
    report: dict[str, Any] = {"machine": machine()}
    print(json.dumps(report["machine"], indent=2))
    measures = {
        "tasks": lambda: measure_tasks(arguments.seconds),
        "overhead": lambda: [row for workers in cores() for row in measure_overhead(workers)],
        "pool": lambda: measure_pool(cores()[-1]),
    }
    for part in arguments.parts:
        report[part] = measures[part]()
        report["machine"]["load_after"] = os.getloadavg()[0]
        print(f"\n{part}\n\n{table(report[part])}", flush=True)
    out = arguments.out
    if out is None and set(arguments.parts) == set(PARTS):
        out = ROOT / "benchmarks" / "results" / "verify.json"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
