"""Sandboxes of each tier for the tests, and the bait of the escape suite."""

import os
import sys

import pytest
from observing import PROTECTED
from tiers import ORDINARY_USER, SYSTEM_PYTHON, open_tier

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]

TIERS = [*PROTECTED, *(pytest.param(f"{tier} as an ordinary user", marks=pytest.mark.slow) for tier in PROTECTED)]


@pytest.fixture(scope="module", params=PROTECTED)
def sandbox(request):
    with open_tier(request.param) as opened:
        yield opened


@pytest.fixture(scope="module", params=[*PROTECTED, "remote"])
def any_sandbox(request):
    """A sandbox of each protecting tier that this machine has, and a remote one."""
    from service import running_service

    from credit_trl.sandbox import open_sandbox

    if request.param != "remote":
        with open_tier(request.param) as opened:
            yield opened
        return
    with running_service() as service, open_sandbox(service.url, workers=2) as opened:
        yield opened


@pytest.fixture(scope="module", params=TIERS)
def opened_tier(request):
    """A sandbox of each tier, also as started by an ordinary user, and its bait."""
    from bait import Bait

    user = ORDINARY_USER if "ordinary" in request.param else None
    with open_tier(request.param) as opened, Bait(user) as bait:
        yield opened, bait


@pytest.fixture
def system_python():
    """Path of an interpreter that can be copied alone."""
    if not os.path.exists(SYSTEM_PYTHON):
        pytest.skip("needs an interpreter that can be copied alone")
    return SYSTEM_PYTHON
