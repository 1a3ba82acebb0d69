"""Start runs of `faulty_run`, wait for them, and end remaining processes."""

import json
import multiprocessing
import os
import signal
import socket
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
LIMIT = 600.0  # seconds for a run, which end a hang; most take 2 s
# Seconds in which the other processes may notice that one has died, before they are killed as by a launcher.
GRACE = 5.0


def server() -> multiprocessing.context.ForkServerContext:
    """Return a fork server that has imported the modules of a run."""
    paths = [str(HERE.parents[1] / "src"), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults.faulty_run"])
    with mock.patch.dict(os.environ, variables):
        forkserver.ensure_running()  # it keeps these variables, which this process does not
    return context


def launch(context, folder: Path, variant: str = "", fault=None, processes: int = 1) -> list[int]:
    """Run to the end or to the fault; return the exit codes, -9 for a process that killed itself."""
    from faults import faulty_run

    port = free_port()
    started = [
        context.Process(target=faulty_run.run, args=(str(folder), variant, fault, rank, processes, port))
        for rank in range(processes)
    ]
    for process in started:
        process.start()
    awaited = started if fault is None else [started[fault.rank]]
    try:
        for process in awaited:
            process.join(LIMIT)
        codes = [process.exitcode for process in awaited]
        for process in started:
            process.join(GRACE)
    finally:
        for process in started:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join(LIMIT)
    return codes


def result(folder: Path) -> dict:
    return json.loads((folder / "final.json").read_text())


def log(folder: Path) -> str:
    return "".join(path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("log_*.txt")))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
