"""Sweeps over method × C × λ × teacher context × seed; each job resumes in its own directory.

    from credit_trl.lab.sweeps import read_spec, run_sweep

    run_sweep(read_spec("sweep.yaml"), "runs/sweep")

An interrupted sweep continues when it is started again, and several launchers may work on one directory.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULE_OF = {"Arm": "spec", "SweepSpec": "spec", "read_spec": "spec", "run_job": "job", "run_sweep": "launch"}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
