r"""Comparing two answers as mathematics, in worker processes that may be killed.

What a model puts into `\boxed{}` can keep a computer algebra system busy for ever (`10^{10^{10}}`) or fill memory, and
`math-verify`'s own time-outs are signals, which need the main thread and do not interrupt one long operation. So each
comparison runs in a worker (`python -m credit_trl.tasks.math_worker`) with limited memory and a wall clock that kills
it; a killed worker's comparison counts as different, and the next comparison gets a fresh worker.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from credit_trl.cores import worker_count

SECONDS = 5.0  # for one comparison, on the clock
START_SECONDS = 120.0  # for a worker to import what it needs
MEMORY_BYTES = 2 * 1024**3
LONGEST = 1_000  # characters of an answer beyond which only equal text is equal


def equivalent(pairs: Sequence[tuple[str, str | None]]) -> list[bool]:
    """Whether each pair (gold, given) is the same answer; `None` given is never.

    Raises:
        ImportError: `math-verify` is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("The math task compares answers with math-verify: pip install 'credit-trl[math]'.")
    verdicts = {pair: _plainly(*pair) for pair in pairs}  # the rollouts of a group tend to agree: each pair once
    open_pairs = [pair for pair, same in verdicts.items() if same is None]
    if open_pairs:
        with ThreadPoolExecutor(max_workers=_WORKERS.limit) as threads:
            verdicts |= zip(open_pairs, threads.map(lambda pair: _WORKERS.compare(*pair), open_pairs), strict=True)
    return [bool(verdicts[pair]) for pair in pairs]


def _plainly(gold: str, given: str | None) -> bool | None:
    """What can be said without mathematics; `None` for nothing."""
    if given is None or not given.strip():
        return False
    if gold.strip() == given.strip():
        return True
    return False if max(len(gold), len(given)) > LONGEST else None


class Worker:
    """One process that compares; it ends when its standard input does."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "credit_trl.tasks.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUTF8": "1"},
            bufsize=0,
            start_new_session=True,  # the terminal's Ctrl-C is the trainer's
        )
        if self._line(START_SECONDS) != b"ready\n":
            self.close()
            raise RuntimeError("A math-verify worker did not start; try `python -c 'import math_verify'`.")

    def compare(self, gold: str, given: str) -> bool | None:
        """Whether the two are equal; `None` where the worker took too long or died, after which it is of no use."""
        try:
            self.process.stdin.write(json.dumps([gold, given]).encode() + b"\n")
        except OSError:
            return None
        line = self._line(SECONDS)
        return None if line is None else line == b"true\n"

    def _line(self, seconds: float) -> bytes | None:
        """The next line of the worker, or `None` if none comes in time. Lines are far shorter than a pipe's buffer."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        return self.process.stdout.readline() or None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Workers:
    """Idle workers, started as they are needed and kept for the next comparison.

    Args:
        limit: how many may compare at the same time.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._slots = threading.BoundedSemaphore(limit)

    def compare(self, gold: str, given: str) -> bool:
        with self._slots:
            worker, same = self._take(), None
            try:
                same = worker.compare(gold, given)
            finally:
                if same is None:
                    worker.close()
                else:
                    self._idle.put(worker)
        return bool(same)

    def _take(self) -> Worker:
        """An idle worker that is still alive, or a new one."""
        while True:
            try:
                worker = self._idle.get_nowait()
            except queue.Empty:
                return Worker()
            if worker.process.poll() is None:
                return worker
            worker.close()

    def close(self) -> None:
        while not self._idle.empty():
            self._idle.get().close()


_WORKERS = Workers(limit=worker_count())
atexit.register(_WORKERS.close)


def _serve() -> None:
    """The worker: one JSON line [gold, given] in, one line `true` or `false` out, until the input ends."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # nothing that a library prints may look like a verdict
    from math_verify import parse, verify

    def same(gold: str, given: str) -> bool:
        # no time-outs here: the parent's clock is the limit
        boxed = [rf"\boxed{{{text.strip().strip('$')}}}" for text in (gold, given)]
        sides = [parse(text, parsing_timeout=None) for text in boxed]
        return all(sides) and verify(*sides, timeout_seconds=None)

    same("1", "2")  # the first comparison loads what later ones have: that is no comparison's time
    print("ready", file=output, flush=True)
    for line in sys.stdin:
        try:
            answer = same(*json.loads(line))
        except Exception:  # a comparison that fails, or runs out of memory, shows no equality
            answer = False
        print("true" if answer else "false", file=output, flush=True)


if __name__ == "__main__":
    _serve()
