"""Sandboxes of a tier, also as an ordinary user starts them."""

import os

import pytest

ORDINARY_USER = 60799
SYSTEM_PYTHON = "/usr/bin/python3"


def start_as_ordinary_user(patch: pytest.MonkeyPatch) -> None:
    """Start sandbox servers as an unprivileged user, as if the trainer were one. Needs root."""
    from credit_trl.sandbox import pool

    popen = pool.subprocess.Popen

    def as_user(command: list[str], **options: object) -> object:
        return popen(
            [SYSTEM_PYTHON, *command[1:]], user=ORDINARY_USER, group=ORDINARY_USER, extra_groups=[], **options
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
    if ordinary and not (os.path.exists(SYSTEM_PYTHON) and readable_by_others(package)):
        pytest.skip(f"an ordinary user cannot read {SYSTEM_PYTHON} or the package")
    with pytest.MonkeyPatch.context() as patch:
        if ordinary:
            start_as_ordinary_user(patch)
        try:
            return open_sandbox(tier, workers=workers)
        except SandboxError as error:
            pytest.skip(str(error).splitlines()[1])
