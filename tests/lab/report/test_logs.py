"""One line a log on the console."""

import re

import pytest

from credit_trl.lab.report.logs import log_line
from tables import tables_of

TABLES = tables_of(__file__)


@pytest.mark.parametrize(("logs", "line"), TABLES["lines"])
def test_line_of_a_log_has_its_metrics_and_stages(logs, line):
    assert log_line(logs, 7, 100) == line


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_run_prints_one_line_per_step(run_callbacks, make_trainer, capsys, disable_tqdm):
    make_trainer(disable_tqdm=disable_tqdm).train()
    printed = capsys.readouterr().out
    pattern = r"step (\d)/2  reward .*  s .*  ΔV .*  kl .*  seconds .*rollout.*$"
    steps = re.findall(pattern, printed, re.MULTILINE)
    assert steps == ["1", "2"]
    assert "{" not in printed
