"""Sandboxes of each tier for the tests, and the bait of the escape suite."""

import os
import sys

import pytest
from observing import PROTECTED

if not sys.platform.startswith("linux"):
    collect_ignore_glob = ["test_*.py"]

ORDINARY_USER = 60799
_SYSTEM_PYTHON = "/usr/bin/python3"

TIERS = [*PROTECTED, *(pytest.param(f"{tier} as an ordinary user", marks=pytest.mark.slow) for tier in PROTECTED)]


def start_as_ordinary_user(patch: pytest.MonkeyPatch) -> None:
    """Start sandbox servers as an unprivileged user, as if the trainer were one. Needs root."""
    from credit_trl.sandbox import pool

    popen = pool.subprocess.Popen

    def as_user(command: list[str], **options: object) -> object:
        return popen(
            [_SYSTEM_PYTHON, *command[1:]], user=ORDINARY_USER, group=ORDINARY_USER, extra_groups=[], **options
        )

    patch.setattr(pool.subprocess, "Popen", as_user)


def open_tier(name: str, workers: int = 2):
    """The sandbox of a tier, or a skip with the reason why this machine has none."""
    import credit_trl
    from credit_trl.sandbox import SandboxError, open_sandbox
    from credit_trl.sandbox.interpreter import readable_by_others

    tier, _, ordinary = name.partition(" as ")
    package = os.path.dirname(os.path.abspath(credit_trl.__file__))
    if ordinary and os.geteuid() != 0:
        pytest.skip("not root: the tier itself already runs as an ordinary user")
    if ordinary and not (os.path.exists(_SYSTEM_PYTHON) and readable_by_others(package)):
        pytest.skip(f"an ordinary user cannot read {_SYSTEM_PYTHON} or the package")
    with pytest.MonkeyPatch.context() as patch:
        if ordinary:
            start_as_ordinary_user(patch)
        try:
            return open_sandbox(tier, workers=workers)
        except SandboxError as error:
            pytest.skip(str(error).splitlines()[1])


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
    if not os.path.exists(_SYSTEM_PYTHON):
        pytest.skip("needs an interpreter that can be copied alone")
    return _SYSTEM_PYTHON
