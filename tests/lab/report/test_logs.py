"""One line a log on the console."""

import re
from types import SimpleNamespace

import pytest
import torch

from credit_trl.lab.report.logs import LogLines, log_line
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


@pytest.mark.parametrize(("processes", "line"), [(1, ""), (2, "2 processes on cpu, DDP\n")])
def test_first_line_of_several_processes_says_how_they_wrap_the_model(monkeypatch, capsys, processes, line):
    """With FSDP2 in the configuration too, which accelerate ignores on a CPU."""
    state = SimpleNamespace(distributed_type="MULTI_CPU", fsdp_plugin=SimpleNamespace(fsdp_version=2))
    monkeypatch.setattr("credit_trl.lab.report.logs.AcceleratorState", lambda: state)
    args = SimpleNamespace(world_size=processes, device=torch.device("cpu"))
    LogLines().on_train_begin(args, SimpleNamespace(is_world_process_zero=True), None)
    assert capsys.readouterr().out == line
