"""The report of runs: one HTML page without network access, with Markdown and JSON beside it.

from credit_trl.lab.report import ReportCallback, write_report

write_report(["runs/sdpo", "runs/credit"], "comparison.html")
trainer.add_callback(ReportCallback())  # the page of one run, updated while it trains
"""

from credit_trl.lab.report.callback import ReportCallback
from credit_trl.lab.report.token_maps import write_token_maps
from credit_trl.lab.report.write import write_report

__all__ = ["ReportCallback", "write_report", "write_token_maps"]
