"""Comparing runs: the paper's tables and curves from run directories, offline.


write_report(compare(["runs/grpo", "runs/sdpo", "runs/credit"]), "report")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from credit_trl.lab.comparison.compare import Comparison, compare
from credit_trl.lab.comparison.runs import Run, find_runs, read_run

if TYPE_CHECKING:
    from credit_trl.lab.comparison.report import write_report

__all__ = ["Comparison", "Run", "compare", "find_runs", "read_run", "write_report"]


def __getattr__(name: str) -> Any:
    if name != "write_report":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.report").write_report
