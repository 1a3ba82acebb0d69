"""Compares runs from their directories, offline: the paper's tables and learning curves.

from credit_trl.lab.comparison import compare, write_report

write_report(compare(["runs/grpo", "runs/sdpo", "runs/credit"]), "report")
"""

from credit_trl.lab.comparison.compare import Comparison, compare
from credit_trl.lab.comparison.report import write_report
from credit_trl.lab.comparison.runs import Run, find_runs, read_run

__all__ = ["Comparison", "Run", "compare", "find_runs", "read_run", "write_report"]
