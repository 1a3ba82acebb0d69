"""Process that compares answers in a pool of killable workers: JSON lines of pairs in, JSON lines of results out.

A pool forked from this small process imports nothing of the trainer's script and holds none of its memory. A
comparison has limited memory and processor time.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import resource
import sys
from concurrent.futures import TimeoutError as FutureTimeout

from credit_trl.tasks.math_answers import same_answer

CPU_SECONDS = 5
WALL_SECONDS = 60.0
WORKER_BYTES = 2 << 30
TASKS_PER_WORKER = 500  # libraries cache results


def compare(gold: str, given: str) -> bool:
    """Compare in a worker, which the kernel ends after `CPU_SECONDS`."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime + CPU_SECONDS), hard))
    try:
        return same_answer(gold, given)
    except (ArithmeticError, AttributeError, MemoryError, RecursionError, TypeError, ValueError):
        return False  # equality was not shown


def serve(workers: int) -> None:
    from pebble import ProcessExpired, ProcessPool

    resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    same_answer(r"\frac{x}{2}", "0.5x")  # imports what the forked workers need
    context = multiprocessing.get_context("fork")
    with ProcessPool(max_workers=workers, max_tasks=TASKS_PER_WORKER, context=context) as pool:
        print("ready", flush=True)
        for line in sys.stdin:
            pairs, seconds = json.loads(line)
            futures = [pool.schedule(compare, args=pair, timeout=min(seconds, WALL_SECONDS)) for pair in pairs]
            results = []
            for future in futures:
                try:
                    results.append("equal" if future.result() else "different")
                except ProcessExpired:
                    results.append("failed")
                except FutureTimeout:
                    results.append("undecided")
            print(json.dumps(results), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
