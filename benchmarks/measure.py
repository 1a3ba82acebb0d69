"""Trials in separate processes that take turns, so that other load on the machine affects all of them alike."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from credit_trl.loss import head

# Share of the machine used by other processes above which a round counts as disturbed.
QUIET = 0.1


@dataclass
class Sample:
    """One measured call.

    Args:
        seconds: Wall-clock seconds.
        peak_mb: Peak memory during the call, above the memory held before.
        processor: Processor seconds of this process, all threads together.
        foreign: Share of the processors used by other processes.
        stages: Seconds by stage, if the trial measures stages.
        tokens: Tokens that models read, if the trial counts them: "with gradient" and "without".
    """

    seconds: float
    peak_mb: float = 0.0
    processor: float = 0.0
    foreign: float = 0.0
    stages: dict[str, float] | None = None
    tokens: dict[str, int] | None = None


class Trial:
    """A process that builds something at once and then answers requests.

    Args:
        build: Importable function, called in the process with the hashable `arguments`. Returns the function that
            answers `ask`, whose errors `ask` raises.
    """

    def __init__(self, build: Callable[..., Callable[..., Any]], *arguments: Any) -> None:
        self.process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self.built = (build, *arguments)
        self.process.submit(_prepare, self.built)

    def ask(self, *request: Any) -> Any:
        return self.process.submit(_answer, self.built, request).result()

    def close(self) -> None:
        self.process.shutdown()


def _prepare(built: tuple[Any, ...]) -> None:
    """Build; the first request raises an error again."""
    _build(*built)


@cache
def _build(build: Callable[..., Callable[..., Any]], *arguments: Any) -> Callable[..., Any]:
    return build(*arguments)


def _answer(built: tuple[Any, ...], request: tuple[Any, ...]) -> Any:
    return _build(*built)(*request)


@contextmanager
def trials(
    build: Callable[..., Callable[..., Any]], arguments: dict[str, tuple[Any, ...]]
) -> Iterator[dict[str, Trial]]:
    """One `Trial` per name in the block."""
    running = {name: Trial(build, *of_trial) for name, of_trial in arguments.items()}
    try:
        yield running
    finally:
        for trial in running.values():
            trial.close()


class Results:
    """A JSON file of results that grows with each trial, so that an interrupted run keeps what it has measured.

    Args:
        path: the file; None keeps nothing. A part that is measured again replaces the old one, others stay.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.values: dict[str, Any] = json.loads(path.read_text()) if path and path.is_file() else {}

    def merge(self, values: dict[str, Any]) -> None:
        """Add values, dictionaries entry by entry, and write the file."""
        _merge(self.values, values)
        if self.path is not None:
            unfinished = self.path.with_suffix(".part")
            unfinished.write_text(json.dumps(self.values, indent=1) + "\n")
            unfinished.replace(self.path)


def _merge(old: dict[str, Any], new: dict[str, Any]) -> None:
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(name), dict):
            _merge(old[name], value)
        else:
            old[name] = value


def in_turns(
    running: dict[str, Trial], rounds: int, *request: Any, results: Results | None = None
) -> dict[str, list[Sample]]:
    """Ask every trial once per round. Disturbed rounds are dropped if three others or more were measured.

    A trial whose process dies is removed and reported, and the others go on.

    Args:
        results: receives every sample as it is measured, under `"rounds"`.

    Returns:
        For each trial that lives the samples of the kept rounds.
    """
    found: list[dict[str, Sample]] = []
    for number in range(1, rounds + 1):
        found.append({})
        for name, trial in list(running.items()):
            try:
                found[-1][name] = trial.ask(*request)
            except Exception as error:
                print(f"{name} failed: {error!r}", flush=True)
                running.pop(name).close()
                continue
            if results is not None:
                results.merge({"rounds": {f"{number}": {name: vars(found[-1][name])}}})
    quiet = [samples for samples in found if all(sample.foreign <= QUIET for sample in samples.values())]
    kept = quiet if len(quiet) >= min(rounds, 3) else found
    return {name: [samples[name] for samples in kept] for name in running}


def seconds(samples: list[Sample]) -> float:
    """Median wall-clock seconds."""
    return statistics.median(sample.seconds for sample in samples)


def ratio(ours: list[Sample], theirs: list[Sample], of: str = "seconds") -> float:
    """Median over rounds of the ratio of seconds, or of another field, within a round."""
    return statistics.median(getattr(a, of) / getattr(b, of) for a, b in zip(ours, theirs, strict=True))


@contextmanager
def measured(device: str) -> Iterator[Sample]:
    """Measure a block: fill in the yielded sample at its end."""
    sample = Sample(0.0)
    before, busy, own = _start_of_peak(device), _busy_seconds(), time.process_time()
    started = time.perf_counter()
    yield sample
    if device == "cuda":
        torch.cuda.synchronize()
    sample.seconds = time.perf_counter() - started
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")
    sample.peak_mb = (peak - before) / 1e6
    sample.processor = time.process_time() - own
    foreign = _busy_seconds() - busy - sample.processor
    sample.foreign = max(foreign, 0.0) / (sample.seconds * os.cpu_count())


@contextmanager
def counted_tokens(model: nn.Module | None = None) -> Iterator[dict[str, int]]:
    """Tokens that enter the embedding of a model, or of any model, in the block, with gradient and without."""
    tokens = {"with gradient": 0, "without": 0}
    counted = None if model is None else model.get_input_embeddings()

    def count(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is counted or (counted is None and isinstance(module, nn.Embedding)):
            tokens["with gradient" if torch.is_grad_enabled() else "without"] += args[0].numel()

    hook = nn.modules.module.register_module_forward_hook(count)
    try:
        yield tokens
    finally:
        hook.remove()


@contextmanager
def counted_products() -> Iterator[dict[str, int]]:
    """Multiplications of this project's blocks of the LM head in the block, which counts those of one forward."""
    products = {"multiplications": 0}
    multiply = head._multiply

    def count(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, adds: bool) -> None:
        products["multiplications"] += a.shape[0] * a.shape[1] * b.shape[1]
        multiply(a, b, out, adds)

    head._multiply = count
    try:
        yield products
    finally:
        head._multiply = multiply


def none_if_out_of_memory(answer: Callable[..., Sample]) -> Callable[..., Sample | None]:
    """Return None instead of raising `torch.OutOfMemoryError`."""

    def attempt(*request: Any) -> Sample | None:
        try:
            return answer(*request)
        except torch.OutOfMemoryError:
            pass
        # Outside the except block, because the exception holds the tensors of every frame.
        gc.collect()
        torch.cuda.empty_cache()
        return None

    return attempt


def _has_time(measured_: int, started: float) -> bool:
    """On a GPU a short trial is repeated up to 20 times, for five seconds."""
    return torch.cuda.is_available() and measured_ < 20 and time.monotonic() - started < 5.0


def repeat(ask: Callable[..., Sample | None], rounds: int, *request: Any) -> dict[str, float] | None:
    """Median seconds and highest peak, or None if out of memory. The first call warms up and is not timed."""
    samples, started = [ask(*request)], time.monotonic()
    while samples[-1] is not None and (len(samples) <= rounds or _has_time(len(samples) - 1, started)):
        samples.append(ask(*request))
    if None in samples:
        return None
    seconds = statistics.median(sample.seconds for sample in samples[1:])
    return {"seconds": seconds, "peak_mb": max(sample.peak_mb for sample in samples)}


def _start_of_peak(device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak of resident memory
    return _status("VmRSS")


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def _busy_seconds() -> float:
    """Processor seconds used by all processes of the machine."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
