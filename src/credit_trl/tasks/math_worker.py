r"""Comparing two answers as mathematics, in worker processes that may be killed.

What a model puts into `\boxed{}` can keep a computer algebra system busy for ever (`10^{10^{10}}`) or fill memory, and
`math-verify`'s own time-outs are signals, which need the main thread and do not interrupt one long operation. So each
comparison runs in a worker (`python -m credit_trl.tasks.math_worker`) with limited memory and processor time. An
answer that uses it up, or crashes the worker, has failed; one that a busy machine did not get to is left undecided.
Either way the next comparison gets a fresh worker.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import math
import os
import queue
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from credit_trl.sandbox.cores import worker_count

SECONDS = 5.0  # of processor time for one comparison
WALL_SECONDS = 60.0  # on the clock, after which the machine is too busy to tell
START_SECONDS = 120.0  # for a worker to import what it needs
MEMORY_BYTES = 2 * 1024**3
KEPT_BYTES = 512 * 1024**2  # more than that left by earlier answers, and a worker ends: later ones would lack it
# What ends a worker that was brought down by what it compares; any other end came from outside.
_OWN_ENDS = {signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
LONGEST = 1_000  # characters of an answer beyond which only equal text is equal

Comparison = Literal[
    "equal",
    "different",
    "failed",  # used up its processor time, or crashed its worker: the answer's doing
    "undecided",  # the clock or the deadline came first, or somebody killed the worker: the machine's
]


def equivalent(pairs: Sequence[tuple[str, str | None]], deadline: float | None = None) -> list[Comparison]:
    """Whether each pair (gold, given) is the same answer; `None` given is never.

    Args:
        pairs: compared side by side, equal pairs once.
        deadline: seconds from now after which what is not compared stays undecided; `None` for no limit.

    Raises:
        ImportError: `math-verify` is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("The math task compares answers with math-verify: pip install 'credit-trl[math]'.")
    until = None if deadline is None else time.monotonic() + deadline
    verdicts = {pair: _plainly(*pair) for pair in pairs}  # the rollouts of a group tend to agree: each pair once
    open_pairs = [pair for pair, same in verdicts.items() if same is None]
    if open_pairs:
        with ThreadPoolExecutor(max_workers=_WORKERS.limit) as threads:
            found = threads.map(lambda pair: _WORKERS.compare(*pair, until), open_pairs)
            verdicts |= zip(open_pairs, found, strict=True)
    return [verdicts[pair] for pair in pairs]


def _plainly(gold: str, given: str | None) -> Comparison | None:
    """What can be said without mathematics; `None` for nothing."""
    if given is None or not given.strip():
        return "different"
    if gold.strip() == given.strip():
        return "equal"
    return "different" if max(len(gold), len(given)) > LONGEST else None


class Worker:
    """One process that compares; it ends when its standard input does, or after a comparison that left too much.

    Args:
        is_spent: whether it has said that it ends.
    """

    def __init__(self) -> None:
        self.is_spent = False
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

    def compare(self, gold: str, given: str, seconds: float) -> Comparison | None:
        """What the worker says within so many seconds, or its end, after which it is of no use; `None` where somebody
        else ended it.
        """
        try:
            self.process.stdin.write(json.dumps([gold, given, SECONDS, KEPT_BYTES]).encode() + b"\n")
            line = self._line(seconds)
        except OSError:
            line = b""
        if line:
            self.is_spent = line.endswith(b" last\n")
            return "equal" if line.startswith(b"true") else "different"
        self.close()
        if line is None:
            return "undecided"
        return "failed" if -self.process.returncode in _OWN_ENDS else None

    def _line(self, seconds: float) -> bytes | None:
        """The worker's next line, empty where it has ended, or `None` if none comes in time.

        Lines are far shorter than a pipe's buffer.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        return self.process.stdout.readline()

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

    def compare(self, gold: str, given: str, until: float | None = None) -> Comparison:
        """Compare in an idle worker, and once more where somebody else ended that one; until then, on the monotonic
        clock, or undecided.
        """
        with self._slots:
            for _ in range(2):
                left = math.inf if until is None else until - time.monotonic()
                if left <= 0:
                    break
                said = self._compare(gold, given, min(WALL_SECONDS, left))
                if said is not None:
                    return said
        return "undecided"

    def _compare(self, gold: str, given: str, seconds: float) -> Comparison | None:
        worker, said = self._take(), None
        try:
            said = worker.compare(gold, given, seconds)
        finally:
            if said in ("equal", "different") and not worker.is_spent:
                self._idle.put(worker)
            else:
                worker.close()
        return said

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


def as_tex(text: str) -> str:
    r"""An answer as `math-verify` reads it: without dollar signs around it, `1e-05` as `1\times 10^{-05}`."""
    text = re.sub(r"^\$+|(?<!\\)\$+$", "", text.strip()).strip()
    number = re.fullmatch(r"([+-]?\d+(?:\.\d*)?)[eE]([+-]?\d+)", text, re.ASCII)
    return text if number is None else rf"{number[1]}\times 10^{{{number[2]}}}"


def _serve() -> None:
    """The worker: one JSON line [gold, given, seconds, bytes] in, a line `true` or `false` out, until the input ends.

    The line goes on with `last` where more bytes are left over than that: libraries keep what they have computed.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # nothing that a library prints may look like a verdict
    from math_verify import parse, verify

    def same(gold: str, given: str) -> bool:
        # no time-outs here: the kernel's limit of processor time and the parent's clock are the limits
        boxed = [rf"\boxed{{{as_tex(text)}}}" for text in (gold, given)]
        sides = [parse(text, parsing_timeout=None) for text in boxed]
        return all(sides) and verify(*sides, timeout_seconds=None)

    same("1", "2")  # the first comparison loads what later ones have: that is no comparison's time
    first = _address_space()
    print("ready", file=output, flush=True)
    for line in sys.stdin:
        gold, given, seconds, most = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        end = math.ceil(used.ru_utime + used.ru_stime + seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (end if hard == resource.RLIM_INFINITY else min(end, hard), hard))
        try:
            answer = same(gold, given)
        except Exception:  # a comparison that fails, or runs out of memory, shows no equality
            answer = False
        is_spent = _address_space() > first + most
        print(f"{'true' if answer else 'false'}{' last' if is_spent else ''}", file=output, flush=True)
        if is_spent:
            return


def _address_space() -> int:
    """Bytes that count towards `RLIMIT_AS`; 0 where the system does not say (no `/proc`)."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    _serve()
