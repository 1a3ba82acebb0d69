"""Start the processes of a run and end them at the time limit."""

import json
import os
import signal
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.launching import free_port, log, server

LIMIT = 600.0  # seconds, which end a hang; most runs take 5 s
TYPES = {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
NAMES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}  # on the console
SHARDED = ("fsdp2", "zero3")
# Reason of skipped tests.
DEEPSPEED = "needs DeepSpeed: `make test-slow` installs it, or pip install 'credit-trl[deepspeed]'"


@dataclass(frozen=True)
class Ended:
    """Result of a run."""

    codes: list[int | None]  # of each process; None if the watchdog ended it
    facts: list[dict[str, Any] | None]
    output: str  # its last lines

    @property
    def hung(self) -> bool:
        return None in self.codes


def launch(folder: Path, processes: int, limit: float = LIMIT, job: str = "jobs", **options: Any) -> Ended:
    """Run the `run` of a module, `jobs` or `dense_run`, in several processes; kill them after `limit` seconds."""
    run = import_module(f"distributed.{job}").run
    context, port = server(), free_port()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("facts_*.json"):
        old.unlink()
    started = [
        context.Process(target=run, args=(str(folder), rank, processes, port, limit, options))
        for rank in range(processes)
    ]
    deadline = time.monotonic() + limit
    for process in started:
        process.start()
    try:
        for process in started:
            process.join(max(deadline - time.monotonic(), 0.0))
        codes = [process.exitcode for process in started]
    finally:
        for process in started:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join(5.0)
    files = [folder / f"facts_{rank}.json" for rank in range(processes)]
    return Ended(codes, [json.loads(f.read_text()) if f.is_file() else None for f in files], log(folder))


def finished(ended: Ended) -> list[dict[str, Any]]:
    """Return the facts of a run whose processes all succeeded."""
    assert not ended.hung, f"ended by the watchdog: {ended.codes}\n{ended.output}"
    assert ended.codes == [0] * len(ended.codes), ended.output
    assert [fact["num_processes"] for fact in ended.facts] == [len(ended.codes)] * len(ended.codes)
    return ended.facts


def needs(wrapper: str) -> None:
    """Skip a test of ZeRO without DeepSpeed."""
    if wrapper.startswith("zero"):
        pytest.importorskip("deepspeed", reason=DEEPSPEED)


def assert_wrapped(facts: list[dict[str, Any]], wrapper: str) -> None:
    """The processes were wrapped as asked, and all reached the same collectives."""
    expected = (TYPES[wrapper], int(wrapper[-1]) if wrapper.startswith("zero") else None, wrapper in SHARDED)
    assert {(f["distributed_type"], f["zero_stage"], f["sharded"]) for f in facts} == {expected}
    assert {f.get("wrapping", NAMES[wrapper]) for f in facts} == {NAMES[wrapper]}
    assert facts[0]["collectives"] > 0
    assert {f["collectives"] for f in facts} == {facts[0]["collectives"]}


def losses(facts: list[dict[str, Any]]) -> torch.Tensor:
    """Loss of the batch at each step, the mean over processes with equal numbers of rollouts."""
    return torch.tensor([fact["losses"] for fact in facts], dtype=torch.float64).mean(dim=0)


def weights(folder: Path, rank: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Weights of policy, teacher and engine that a process wrote."""
    return torch.load(folder / f"weights_{rank}.pt", weights_only=True)
