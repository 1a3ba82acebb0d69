"""The report of runs: one HTML page without network access, with Markdown and JSON beside it.

from credit_trl.lab.report import write_report

write_report(["runs/sdpo", "runs/credit"], "comparison.html")  # a run writes its own page, `report.html`
"""

from credit_trl.lab.report.callback import ReportCallback, run_callbacks
from credit_trl.lab.report.write import write_report, write_token_maps

__all__ = ["ReportCallback", "run_callbacks", "write_report", "write_token_maps"]
