"""Sandbox for model-written programs: a fresh interpreter per program, in isolation that is probed before use.

with open_sandbox() as sandbox:
    [outcome] = sandbox.run([Program("print(int(input()) + 1)", stdin="41")])
assert outcome.stdout == "42\\n"
"""

import logging
import os
import sys

from credit_trl.sandbox.batch import Sandbox
from credit_trl.sandbox.cgroups import worker_count
from credit_trl.sandbox.protocol import (
    STATUSES,
    Limits,
    Outcome,
    Program,
    ResourcesExhausted,
    SandboxError,
    Status,
    sandbox_error,
)

TIERS = ("auto", "bubblewrap", "landlock", "unprotected")

_REMEDIES = """\
What helps, best first:
  1. bubblewrap: `apt-get install bubblewrap` (Debian, Ubuntu) or `dnf install bubblewrap` (Fedora), and allow
     ordinary users to create user namespaces. Ubuntu 24.04: `sysctl kernel.apparmor_restrict_unprivileged_userns=0`.
     Docker: `--security-opt seccomp=unconfined --security-opt apparmor=unconfined`.
  2. Landlock: Linux 5.13 or newer with `landlock` in /sys/kernel/security/lsm.
  3. a remote sandbox: open_sandbox("http://..."), or --sandbox http://... on the command line.
  4. no protection: open_sandbox("unprotected"), or --allow_unsandboxed on the command line, runs model-written
     programs with resource limits only."""

# Environment variables with the defaults of `open_sandbox`, inherited by child processes.
CHOICE, UNPROTECTED = "CREDIT_TRL_SANDBOX", "CREDIT_TRL_ALLOW_UNSANDBOXED"

_logger = logging.getLogger(__name__)


def open_sandbox(sandbox: str | None = None, workers: int | None = None) -> Sandbox:
    """Open a sandbox after probing that its isolation works on this machine.

    Args:
        sandbox: the address of a remote sandbox, e.g. `"http://127.0.0.1:8080"`, or a tier: `"bubblewrap"`
            (namespaces), `"landlock"` (Landlock and seccomp, for machines without namespaces), `"unprotected"`
            (resource limits only, with a warning), or `"auto"`: the first of bubblewrap and Landlock that passes its
            probe. A tier given by name is never replaced by another. `None` reads the environment variable
            CREDIT_TRL_SANDBOX, and means `"auto"` if it is not set. If no tier works, `"auto"` runs programs
            unprotected only if the environment variable CREDIT_TRL_ALLOW_UNSANDBOXED is `1`; see `choose_sandbox`.
        workers: number of programs that run at the same time. Default: the cores that this process may use, with a
            container's quota, divided by `LOCAL_WORLD_SIZE`; 16 for a remote sandbox.

    Raises:
        SandboxError: no tier works; the message lists the reasons and what to install.
        ResourcesExhausted: this machine or process has no descriptors, processes or memory left for the probe.
        ValueError: neither a tier nor an address, or fewer than one worker.
    """
    chosen = sandbox or os.environ.get(CHOICE) or "auto"
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")
    _check_choice(chosen)
    if chosen not in TIERS:
        from credit_trl.sandbox.remote import RemoteSandbox

        return RemoteSandbox(chosen, workers or 16)
    if not sys.platform.startswith("linux"):
        raise SandboxError(
            'The local sandbox needs Linux. Use a remote one on other systems: open_sandbox("http://...").'
        )
    return _open_local(chosen, workers or worker_count())


def choose_sandbox(sandbox: str | None = None, allow_unsandboxed: bool = False) -> None:
    """Set the defaults of `open_sandbox` for this process and its child processes.

    Args:
        sandbox: a tier, or the address of a remote sandbox; `None` leaves the default as it is.
        allow_unsandboxed: run programs with resource limits only, after a warning, if no better tier works; `False`
            leaves the default as it is.

    Raises:
        ValueError: neither a tier nor an address, or `"unprotected"` without `allow_unsandboxed`.
    """
    if sandbox is not None:
        _check_choice(sandbox)
        if sandbox == "unprotected" and not allow_unsandboxed:
            raise ValueError("--sandbox unprotected: confirm with --allow_unsandboxed.")
        os.environ[CHOICE] = sandbox
    if allow_unsandboxed:
        os.environ[UNPROTECTED] = "1"


def _check_choice(sandbox: str) -> None:
    """Raise `ValueError` for what is neither a tier nor an address. The message shows no credentials."""
    from credit_trl.sandbox.remote import parse_address

    if sandbox.startswith(("http://", "https://")):
        parse_address(sandbox)
    elif sandbox not in TIERS:
        without_user = sandbox.rpartition("@")[2]
        raise ValueError(f"--sandbox {without_user}: expected one of {', '.join(TIERS)}, or an address (http://...).")


def _open_local(tier: str, workers: int) -> Sandbox:
    from credit_trl.sandbox.pool import PoolSandbox
    from credit_trl.sandbox.probe import probe

    reasons: list[str] = []
    candidates = {"auto": ("bubblewrap", "landlock"), "unprotected": ()}.get(tier, (tier,))
    for candidate in candidates:
        try:
            sandbox = PoolSandbox(candidate, workers)
            try:
                probe(sandbox)
            except BaseException:
                sandbox.close()
                raise
        except ResourcesExhausted:  # no fault of the tier
            raise
        except OSError as error:  # of this process, which has nothing to do with the tier
            raise sandbox_error(f"The sandbox could not be opened: {error}.") from error
        except SandboxError as error:
            reasons.append(f"{candidate}: {str(error).rstrip('.')}.")
            continue
        if reasons:
            _logger.warning("Sandbox: %s Using %s instead.", reasons[0], candidate)
        return sandbox
    if tier == "unprotected" or (tier == "auto" and os.environ.get(UNPROTECTED) == "1"):
        # Logged, as Python's warning filters could hide it.
        _logger.warning(
            "Model-written programs run UNPROTECTED: resource limits only, with this machine's files and network. %s",
            " ".join(reasons),
        )
        return PoolSandbox("unprotected", workers)
    listed = "\n".join(f"  - {reason}" for reason in reasons)
    raise SandboxError(f"No sandbox holds on this machine:\n{listed}\n{_REMEDIES}")


__all__ = [
    "STATUSES",
    "Limits",
    "Outcome",
    "Program",
    "ResourcesExhausted",
    "Sandbox",
    "SandboxError",
    "Status",
    "choose_sandbox",
    "open_sandbox",
]
