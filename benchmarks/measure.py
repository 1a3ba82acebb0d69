"""Trials in processes of their own, run in turns: what disturbs the machine disturbs all of them alike."""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# Above this share of the machine in other hands, a time says more of them than of the trial.
QUIET = 0.1


@dataclass
class Sample:
    """One measured call.

    Args:
        seconds: wall time.
        peak_mb: the peak of memory in it, above what was held before.
        foreign: share of the machine's processors that other processes used meanwhile; 0 where it cannot be told.
        stages: seconds of parts of it, where the trial tells them apart.
    """

    seconds: float
    peak_mb: float = 0.0
    foreign: float = 0.0
    stages: dict[str, float] | None = None


class Trial:
    """A child process that builds something once and then answers requests.

    Args:
        build: called in the child with `arguments`; returns the function that answers `ask`. Importable by name.
    """

    def __init__(self, build: Callable[..., Callable[..., Any]], *arguments: Any) -> None:
        context = mp.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, build, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, *request: Any) -> Any:
        self.connection.send(request)
        answer = self.connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.connection.close()
        self.process.join(timeout=30)
        if self.process.is_alive():
            self.process.kill()


@contextmanager
def trials(
    build: Callable[..., Callable[..., Any]], arguments: dict[str, tuple[Any, ...]]
) -> Iterator[dict[str, Trial]]:
    """One `Trial` a name, ended with the block."""
    running: dict[str, Trial] = {}
    try:
        for name, of_trial in arguments.items():
            running[name] = Trial(build, *of_trial)
        yield running
    finally:
        for trial in running.values():
            trial.close()


def in_turns(running: dict[str, Trial], rounds: int, *request: Any, patience: float = 0.0) -> dict[str, list[Sample]]:
    """Ask every trial once a round.

    While `patience`, in seconds, lasts, a round starts when other processes leave the machine alone, and is measured
    anew if they did not keep to it and another round still fits. Disturbed rounds are dropped if enough quiet ones
    were found, and kept otherwise.

    Returns:
        For each trial as many samples as rounds were kept.
    """
    deadline, found, length = time.monotonic() + patience, [], 0.0
    while len(found) < rounds or (sum(map(_is_quiet, found)) < rounds and time.monotonic() + length < deadline):
        _wait_until_quiet(deadline)
        started = time.monotonic()
        found.append({name: trial.ask(*request) for name, trial in running.items()})
        length = time.monotonic() - started
    quiet = [samples for samples in found if _is_quiet(samples)]
    kept = quiet if len(quiet) >= min(rounds, 3) else found
    return {name: [samples[name] for samples in kept] for name in running}


def _wait_until_quiet(deadline: float, window: float = 2.0) -> None:
    while time.monotonic() < deadline:
        busy, started = _busy_seconds(), time.monotonic()
        time.sleep(window)
        if _busy_seconds() - busy <= QUIET * os.cpu_count() * (time.monotonic() - started):
            return


def _is_quiet(samples: dict[str, Sample]) -> bool:
    return all(sample.foreign <= QUIET for sample in samples.values())


def seconds(samples: list[Sample]) -> float:
    """Median wall time."""
    return statistics.median(sample.seconds for sample in samples)


def ratio(ours: list[Sample], theirs: list[Sample]) -> float:
    """Median over rounds of the ratio of wall times within a round."""
    return statistics.median(a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True))


@contextmanager
def measured(device: str) -> Iterator[Sample]:
    """Fill in the sample that it yields when the block ends."""
    sample = Sample(0.0)
    before, busy, own = _start_of_peak(device), _busy_seconds(), time.process_time()
    started = time.perf_counter()
    yield sample
    if device == "cuda":
        torch.cuda.synchronize()
    sample.seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")
    sample.peak_mb = (peak - before) / 1e6
    foreign = _busy_seconds() - busy - (time.process_time() - own)
    sample.foreign = max(foreign, 0.0) / (sample.seconds * os.cpu_count())


def _start_of_peak(device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak of resident memory starts anew
    return _status("VmRSS")


def _status(field: str) -> int:
    """A field of this process's status, in bytes."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def _busy_seconds() -> float:
    """Processor seconds that all processes of the machine used."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _serve(connection: Connection, build: Callable[..., Callable[..., Any]], arguments: tuple[Any, ...]) -> None:
    try:
        answer = build(*arguments)
        while True:
            connection.send(answer(*connection.recv()))
    except EOFError:
        return
    except Exception as error:
        connection.send(RuntimeError(f"{build.__name__}{arguments} failed: {error!r}"))
