r"""Comparison of two answers as mathematics, in worker processes that can be killed.

A `\boxed{}` written by a model can keep a computer algebra system busy forever (`10^{10^{10}}`) or fill the memory.
The time-outs of `math-verify` are signals, which need the main thread and do not interrupt one long operation. Each
comparison therefore runs in a worker (`python -m credit_trl.tasks.math_worker`) with limited memory and processor
time. A comparison that exceeds the limits or crashes the worker has failed; one that a busy machine does not run in
time is undecided. In both cases the next comparison gets a new worker.
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
import unicodedata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from credit_trl.sandbox.cores import worker_count
from credit_trl.tasks.math_notations import with_fractions, without_units
from credit_trl.tasks.math_operations import moduli, without_moduli

SECONDS = 5.0  # processor time of one comparison
WALL_SECONDS = 60.0  # wall-clock time of one comparison, after which it is undecided
START_SECONDS = 120.0  # wall-clock time for the imports of a worker
WORKER_BYTES = 2 * 1024**3
KEPT_BYTES = 512 * 1024**2  # memory that earlier comparisons may occupy before a worker is replaced
# Signals that end a worker because of its comparison; any other signal came from outside.
_OWN_SIGNALS = {signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
# Groups of three digits with spaces between them, which are no exponent, index or decimals.
_THOUSANDS = re.compile(r"(?<![\w^.])\d{1,3}((\\[,;: ]| )\d{3})+(?!\d)", re.ASCII)
# Notations that math-verify does not read, and the same in TeX that it reads.
_NOTATIONS = [
    (re.compile(pattern), notation)
    for pattern, notation in (
        (r"(?<=[\d})])~|(?<=[^\s\\({])~(?=\\(?:text|math|mbox)|\d)", " "),  # `~p` is a negation
        (r"\\[,;:! ]\\%", r"\\%"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\degree(?![A-Za-z])", r"^{\\circ}"),
        (r"√(\d+(?:\.\d+)?)", r"\\sqrt{\1}"),
        (r"√\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√(?=[A-Za-zπ{])", r"\\sqrt "),
        (r"\\log_ ?(?:e|\{e\})", r"\\ln "),
    )
]
_CHARACTERS = {"°": r"^{\circ}", "∞": r"\infty ", "≡": r"\equiv "} | {
    sign: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", sign).split("\N{FRACTION SLASH}"))
    for sign in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
_BARE_LOG = re.compile(r"\\log(?![A-Za-z])(?! *_)")
_LN = re.compile(r"\\ln(?![A-Za-z])")
_FONT = re.compile(r"\\(?:text|math|mbox|operatorname)[a-z]{0,2}\{([^{}]*)\}")
_LEFT_SIDE = re.compile(r"(?:[A-Za-z] ?(?:\\equiv|\Z))?(?:[\d^{}()+*/!\s-]|\\(?:cdot|times|equiv)(?![A-Za-z]))*")
_BASE = re.compile(r"\d_\{? ?(\d+)", re.ASCII)
LONGEST = 1_000  # characters of an answer above which only equal texts are equal

Equivalence = Literal[
    "equal",
    "different",
    "failed",  # exceeded the processor time, or crashed the worker
    "undecided",  # exceeded the wall-clock time or the deadline, or the worker was killed from outside
]


def equivalent(pairs: Sequence[tuple[str, str | None]], deadline: float | None = None) -> list[Equivalence]:
    """Compare pairs of answers (gold, given) in parallel; a given `None` is different from every answer.

    Equal pairs are compared once. After `deadline` seconds, if given, the remaining pairs are undecided.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("The math task compares answers with math-verify: pip install math-verify.")
    until = None if deadline is None else time.monotonic() + deadline
    verdicts = {pair: _compare_texts(*pair) for pair in pairs}  # rollouts of a group often agree
    open_pairs = [pair for pair, same in verdicts.items() if same is None]
    if open_pairs:
        with ThreadPoolExecutor(max_workers=_WORKERS.limit) as threads:
            found = threads.map(lambda pair: _WORKERS.compare(*pair, until), open_pairs)
            verdicts |= zip(open_pairs, found, strict=True)
    return [verdicts[pair] for pair in pairs]


def _compare_texts(gold: str, given: str | None) -> Equivalence | None:
    r"""Result that needs no mathematics, or `None`.

    `math-verify` ignores moduli and number bases. Answers that state different ones are different; a modulus or base
    that one answer alone states is ignored. Words of capital letters, which `math-verify` reads as products, are
    compared as text: `IV` and `VI` are different, and so are the segments `AB` and `BA`.
    """
    if given is None or not given.strip():
        return "different"
    if gold.strip() == given.strip():
        return "equal"
    if max(len(gold), len(given)) > LONGEST:
        return "different"
    for stated in (moduli, _bases):
        sides = stated(gold), stated(given)
        if all(sides) and sides[0] != sides[1]:
            return "different"
    words = [_capitals(gold), _capitals(given)]
    if not all(words) or not any(re.search("[A-Z]{2}", text) for text in (gold, given)):
        return None
    if not any(text.lstrip("$ ").startswith("(") for text in (gold, given)):  # no tuple
        words = [sorted(side) for side in words]
    return "equal" if words[0] == words[1] else "different"


def _bases(text: str) -> list[str]:
    """Sorted bases of the numbers after the last equality sign: `["2"]` for `10_{10} = 1010_2`."""
    return sorted(_BASE.findall(text.rpartition("=")[2]))


def _capitals(text: str) -> list[str]:
    r"""Items of an answer of capital letters, such as `II and IV`, `\text{BD}` or `\{A, C\}`; empty for others."""
    plain = re.sub(r"\\[ ,;:!]|\s|\bonly\b", " ", _FONT.sub(r"\1", as_tex(text))).strip()
    plain = plain.removeprefix(r"\{").removesuffix(r"\}").removeprefix("(").removesuffix(")")
    items = [item.replace(" ", "") for item in re.split(r"[,;]|\b(?:and|or)\b", plain)]
    words = [item for item in items if item]
    return words if all(re.fullmatch("[A-Z]+", word) for word in words) else []


class Worker:
    """A worker process. It ends with its standard input, or after `is_spent` when `KEPT_BYTES` are occupied."""

    def __init__(self) -> None:
        self.is_spent = False
        self.process = subprocess.Popen(
            [sys.executable, *"-P -s -m credit_trl.tasks.math_worker".split()],  # without the working directory
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            cwd="/",
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal goes to the trainer alone
        )
        if self._line(START_SECONDS) != b"ready\n":
            self.close()
            raise RuntimeError("A math-verify worker did not start; try `python -c 'import math_verify'`.")

    def compare(self, gold: str, given: str, seconds: float) -> Equivalence | None:
        """Compare within `seconds`; `None` if the process was killed from outside.

        After "undecided", "failed" and `None` the process has ended.
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
        return "failed" if -self.process.returncode in _OWN_SIGNALS else None

    def _line(self, seconds: float) -> bytes | None:
        """Next line, which fits a pipe's buffer; empty if the process has ended, `None` on time-out."""
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
    """Pool of at most `limit` workers, which are started when needed and kept for later comparisons."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._slots = threading.BoundedSemaphore(limit)

    def compare(self, gold: str, given: str, until: float | None = None) -> Equivalence:
        """Compare in an idle worker, and once more if that worker was killed from outside.

        The result is "undecided" at `until`, a time of the monotonic clock.
        """
        with self._slots:
            for _ in range(2):
                left = math.inf if until is None else until - time.monotonic()
                if left <= 0:
                    break
                worker, result = self._take(), None
                try:
                    result = worker.compare(gold, given, min(WALL_SECONDS, left))
                finally:
                    if result in ("equal", "different") and not worker.is_spent:
                        self._idle.put(worker)
                    else:
                        worker.close()
                if result is not None:
                    return result
        return "undecided"

    def _take(self) -> Worker:
        """Take an idle worker that is alive, or start one."""
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
    r"""Answer for `math-verify`, which would read `10\,000` as a product and `42.` as no number.

    It has no dollar signs around it, no full stop, no spaces between groups of digits, and `1e-05` is written as
    `1\times 10^{-05}`. Characters such as `√` and `½` are written in TeX. A congruence has no modulus, and its residue
    alone is left of `x \equiv 3 \pmod{7}`. Units of several numbers and repeating decimals are those of
    `math_notations`.
    """
    text = with_fractions(without_units(text.translate(str.maketrans(_CHARACTERS))))
    for pattern, notation in _NOTATIONS:
        text = pattern.sub(notation, text)
    text = _without_stop(_residue(text)).lstrip("$")
    bare = text.rstrip("$")
    if bare.endswith("\\") and bare != text:  # `\$` is a dollar of the answer
        bare += "$"
    text = _THOUSANDS.sub(lambda number: re.sub(r"[^0-9]", "", number[0]), _without_stop(bare))
    number = re.fullmatch(r"([+-]?\d+(?:\.\d*)?)[eE]([+-]?\d+)", text, re.ASCII)
    return text if number is None else rf"{number[1]}\times 10^{{{number[2]}}}"


def _residue(text: str) -> str:
    r"""Text without the moduli of congruences, and without the left side of `x \equiv 3` or `7^{100} \equiv 9`."""
    bare = without_moduli(text)
    left, _, residue = bare.rpartition(r"\equiv")
    return residue if bare != text and _LEFT_SIDE.fullmatch(left.lstrip("$ ")) else bare


def _without_stop(text: str) -> str:
    """Stripped text without the full stop of a sentence; the points of `0.33...` stay."""
    return re.sub(r"(?<![.\\])\.\Z", "", text.strip())


def _environment() -> dict[str, str]:
    """Environment of a worker: this process's import path, without entries that depend on the working directory."""
    path = os.pathsep.join(filter(os.path.isabs, sys.path))
    return {"PATH": os.defpath, "PYTHONPATH": path, "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _is_equal(gold: str, given: str) -> bool:
    """Whether `math-verify` finds two answers equal in one of their readings.

    The limits are the kernel's limit of processor time and the parent's clock.
    """
    from math_verify import parse, verify

    for reading in _readings(as_tex(gold), as_tex(given)):
        sides = [parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in reading]
        if all(sides) and verify(*sides, timeout_seconds=None):
            return True
    return False


def _readings(gold: str, given: str) -> list[tuple[str, str]]:
    r"""Pairs of texts to compare: the answers as they are, and, where needed, with the natural logarithm for `\log`.

    `math-verify` reads a `\log` without a base to base 10. If one answer has only such a `\log` and the other only
    `\ln`, it may be the natural logarithm. It is not if the other has no logarithm: 2 is not `\ln 100`.
    """
    natural = _BARE_LOG.sub(r"\\ln", gold), _BARE_LOG.sub(r"\\ln", given)
    logarithms = [(_BARE_LOG.search(text) is None, _LN.search(text) is None) for text in (gold, given)]
    is_mixed = sorted(logarithms) == [(False, True), (True, False)]
    return [(gold, given), natural] if is_mixed else [(gold, given)]


def _serve() -> None:
    """Main loop of a worker: reads JSON lines [gold, given, seconds, bytes] and writes lines `true` or `false`.

    A line ends with `last`, and the loop with it, once more than `bytes` are occupied, since libraries cache results.
    """
    import resource

    for kind, most in (("AS", WORKER_BYTES), ("CORE", 0), ("FSIZE", 0), ("NOFILE", 64), ("CPU", int(START_SECONDS))):
        number = getattr(resource, f"RLIMIT_{kind}")
        hard = resource.getrlimit(number)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (most, hard if kind == "CPU" else most))
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # output of libraries must not look like a result
    _is_equal("1", "2")  # loads what the first comparison needs, before any time is limited
    first = _address_space()
    print("ready", file=output, flush=True)
    for line in sys.stdin:
        gold, given, seconds, most = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        end = math.ceil(used.ru_utime + used.ru_stime + seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (end if hard == resource.RLIM_INFINITY else min(end, hard), hard))
        try:
            answer = _is_equal(gold, given)
        except Exception:  # an error, out of memory included, means that equality was not shown
            answer = False
        is_spent = _address_space() > first + most
        print(f"{'true' if answer else 'false'}{' last' if is_spent else ''}", file=output, flush=True)
        if is_spent:
            return


def _address_space() -> int:
    """Bytes that count towards `RLIMIT_AS`; 0 on systems without `/proc`."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    _serve()
