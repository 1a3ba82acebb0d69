"""The check after each test, on tests that leave something behind."""

import os
import threading
from inspect import unwrap
from pathlib import Path

import pytest
import torch

import isolation

MAY_END = threading.Event()


def init_group() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


# What the check says -> what a test does.
LEFTOVERS = {
    "a process group": init_group,
    "the default dtype torch.float64": lambda: torch.set_default_dtype(torch.float64),
    "the working directory /": lambda: os.chdir("/"),
    "the variable ADDED": lambda: os.environ.update(ADDED="1"),
    "the variable PRESENT": lambda: os.environ.pop("PRESENT"),
    "the thread worker": lambda: threading.Thread(target=MAY_END.wait, name="worker").start(),
}


@pytest.mark.parametrize("leftover", LEFTOVERS)
def test_a_leftover_fails_its_test_and_no_later_one(request, monkeypatch, leftover):
    plugin = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    MAY_END.clear()
    check = unwrap(plugin.leaves_nothing_behind)
    monkeypatch.setenv("PRESENT", "1")
    monkeypatch.setattr(isolation, "MAX_JOIN_SECONDS", 0.1)
    initial = isolation.ProcessState.now()
    of_test = check()
    next(of_test)
    LEFTOVERS[leftover]()
    with pytest.raises(AssertionError, match=f"^The test left {leftover} behind"):
        next(of_test)
    MAY_END.set()
    monkeypatch.setattr(isolation, "MAX_JOIN_SECONDS", 60.0)
    assert initial.differences() == []


def test_each_test_is_checked(request):
    assert "leaves_nothing_behind" in request.fixturenames
