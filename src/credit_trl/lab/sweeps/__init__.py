"""Sweeps over method × C × λ × teacher context × seed; each job resumes in its own directory.

    from credit_trl.lab.sweeps import read_spec, run_sweep

    run_sweep(read_spec("sweep.yaml"), "runs/sweep")

An interrupted sweep continues when it is started again, and several launchers may work on one directory.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from credit_trl.lab.sweeps.job import run_job
    from credit_trl.lab.sweeps.launch import run_sweep
    from credit_trl.lab.sweeps.spec import Arm, SweepSpec, read_spec

__all__ = ["Arm", "SweepSpec", "read_spec", "run_job", "run_sweep"]

_HOMES = {"Arm": "spec", "SweepSpec": "spec", "read_spec": "spec", "run_job": "job", "run_sweep": "launch"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
