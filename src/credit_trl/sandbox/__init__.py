"""Sandbox for model-written programs: a fresh interpreter per program, in isolation that is probed before use.

with open_sandbox() as sandbox:
    [outcome] = sandbox.run([Program("print(int(input()) + 1)", stdin="41")])
assert outcome.stdout == "42\\n"
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from credit_trl.sandbox.batch import Sandbox
from credit_trl.sandbox.cores import worker_count
from credit_trl.sandbox.protocol import STATUSES, Limits, Outcome, Program, SandboxError, Status

TIERS = ("auto", "bubblewrap", "landlock", "unprotected", "remote")

_REMEDIES = """\
What helps, best first:
  1. bubblewrap: `apt-get install bubblewrap` (Debian, Ubuntu) or `dnf install bubblewrap` (Fedora), and allow
     ordinary users to create user namespaces. Ubuntu 24.04: `sysctl kernel.apparmor_restrict_unprivileged_userns=0`.
     Docker: `--security-opt seccomp=unconfined --security-opt apparmor=unconfined`.
  2. Landlock: Linux 5.13 or newer with `landlock` in /sys/kernel/security/lsm.
  3. a remote sandbox: open_sandbox(url="http://..."), or --sandbox http://... on the command line.
  4. no protection: open_sandbox(allow_unsandboxed=True), or --allow_unsandboxed on the command line, runs
     model-written programs with resource limits only."""

# Environment variables with the defaults of `open_sandbox`, inherited by child processes.
CHOICE, UNPROTECTED = "CREDIT_TRL_SANDBOX", "CREDIT_TRL_ALLOW_UNSANDBOXED"
PACKAGES = "CREDIT_TRL_SANDBOX_PACKAGES"  # separated by commas

_logger = logging.getLogger(__name__)


def open_sandbox(
    tier: str | None = None,
    workers: int | None = None,
    allow_unsandboxed: bool | None = None,
    url: str | None = None,
    python: str | None = None,
    packages: Sequence[str] | None = None,
) -> Sandbox:
    """Open a sandbox after probing that its isolation works on this machine.

    Args:
        tier: `"bubblewrap"` (namespaces), `"landlock"` (Landlock and seccomp, for machines without namespaces),
            `"remote"` (needs `url`), `"unprotected"` (needs `allow_unsandboxed=True`), or `"auto"`: `"remote"` if
            `url` is given, else the first of bubblewrap and Landlock that passes its probe, else, with
            `allow_unsandboxed=True` and a warning, unprotected. A tier given by name is never replaced by another.
            `None` reads a tier or the address of a remote sandbox from the environment variable CREDIT_TRL_SANDBOX,
            and means `"auto"` if it is not set.
        workers: number of programs that run at the same time. Default: the cores that this process may use, with a
            container's quota, divided by `LOCAL_WORLD_SIZE`; 16 for a remote sandbox.
        allow_unsandboxed: run programs with resource limits only, after a warning, if no better tier works and `tier`
            is `"auto"` or `"unprotected"`. `None` means `False`, unless the environment variable
            CREDIT_TRL_ALLOW_UNSANDBOXED is `1`.
        url: address of a remote sandbox, e.g. `"http://127.0.0.1:8080"`.
        python: interpreter for the programs. Default: the one of this process.
        packages: names of installed distributions, such as `numpy`, that programs may import in addition to the
            standard library, as a list or separated by commas. Their dependencies are not added. `None` reads the
            environment variable CREDIT_TRL_SANDBOX_PACKAGES. A remote sandbox has its own packages.

    Raises:
        SandboxError: no tier works; the message lists the reasons and what to install.
        ValueError: an unknown tier, `"remote"` without `url`, `"unprotected"` without `allow_unsandboxed=True`,
            packages of a remote sandbox, or fewer than one worker.
    """
    tier, url = _choice(tier, url)
    allow_unsandboxed = os.environ.get(UNPROTECTED) == "1" if allow_unsandboxed is None else allow_unsandboxed
    if tier not in TIERS:
        raise _unknown_tier(tier)
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")
    packages = _names(packages)
    if url is not None and packages:
        raise ValueError(
            f"Packages ({', '.join(packages)}) are for local sandboxes; a remote one has those of its service. Remove "
            "packages=, --sandbox_packages, or the environment variable CREDIT_TRL_SANDBOX_PACKAGES."
        )
    if url is not None and tier in ("auto", "remote"):
        from credit_trl.sandbox.remote import RemoteSandbox

        return RemoteSandbox(url, workers or 16)
    if tier == "remote":
        raise ValueError('tier="remote" needs url="http://...", the address of the sandbox.')
    if url is not None:
        raise ValueError(f'url= and tier={tier!r} exclude each other; use tier="auto".')
    if tier == "unprotected" and not allow_unsandboxed:
        raise ValueError('tier="unprotected" runs model-written programs unprotected; confirm allow_unsandboxed=True.')
    if not sys.platform.startswith("linux"):
        raise SandboxError(
            'The local sandbox needs Linux. Use a remote one on other systems: open_sandbox(url="http://...").'
        )
    return _open_local(tier, allow_unsandboxed, workers or worker_count(), python, packages)


def _names(packages: Sequence[str] | None) -> Sequence[str]:
    """A list of names as it is, or the names of a text with commas, by default that of the environment."""
    packages = os.environ.get(PACKAGES, "") if packages is None else packages
    if not isinstance(packages, str):
        return packages
    return [name for one in packages.split(",") if (name := one.strip())]


def _unknown_tier(tier: str) -> ValueError:
    from credit_trl.sandbox.remote import without_credentials  # it may be a misspelt address

    return ValueError(f"Unknown sandbox tier {without_credentials(tier)!r}; choose one of {', '.join(TIERS)}.")


def choose_sandbox(
    sandbox: str | None = None, allow_unsandboxed: bool = False, packages: Sequence[str] | None = None
) -> None:
    """Set the defaults of `open_sandbox` for this process and its child processes.

    Args:
        sandbox: a tier, or the address of a remote sandbox; `None` leaves the default as it is.
        allow_unsandboxed: as in `open_sandbox`; `False` leaves the default as it is.
        packages: as in `open_sandbox`; `None` leaves the default as it is.

    Raises:
        ValueError: neither a tier nor an address, or `"unprotected"` without `allow_unsandboxed`.
    """
    if sandbox is not None:
        if sandbox not in TIERS and not _is_address(sandbox):
            from credit_trl.sandbox.remote import without_credentials

            sandbox = without_credentials(sandbox)
            raise ValueError(f"--sandbox {sandbox}: neither one of {', '.join(TIERS)} nor an address (http://...).")
        if sandbox == "remote":
            raise ValueError("--sandbox remote: give the address instead, as in --sandbox http://127.0.0.1:8080.")
        if sandbox == "unprotected" and not allow_unsandboxed:
            raise ValueError("--sandbox unprotected: confirm with --allow_unsandboxed.")
        if _is_address(sandbox):
            from credit_trl.sandbox.remote import parse_address

            parse_address(sandbox)
        os.environ[CHOICE] = sandbox
    if allow_unsandboxed:
        os.environ[UNPROTECTED] = "1"
    if packages is not None:
        os.environ[PACKAGES] = packages if isinstance(packages, str) else ",".join(packages)


def _choice(tier: str | None, url: str | None) -> tuple[str, str | None]:
    """Tier and address, from the environment if the caller gives neither."""
    if tier is not None or url is not None:
        return tier or "auto", url
    chosen = os.environ.get(CHOICE) or "auto"
    return ("remote", chosen) if _is_address(chosen) else (chosen, None)


def _is_address(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _open_local(
    tier: str, allow_unsandboxed: bool, workers: int, python: str | None, packages: Sequence[str]
) -> Sandbox:
    from credit_trl.sandbox.packages import PackageError, find_packages
    from credit_trl.sandbox.pool import PoolSandbox
    from credit_trl.sandbox.probe import probe

    find_packages(packages, python)  # raises before any tier is tried
    reasons: list[str] = []
    candidates = {"auto": ("bubblewrap", "landlock"), "unprotected": ()}.get(tier, (tier,))
    for candidate in candidates:
        try:
            sandbox = PoolSandbox(candidate, workers, python, packages)
            try:
                probe(sandbox)
            except BaseException:
                sandbox.close()
                raise
        except PackageError:
            raise
        except SandboxError as error:
            reasons.append(f"{candidate}: {error}")
            continue
        if reasons:
            _logger.warning("Sandbox: %s. Using %s instead.", reasons[0], candidate)
        return sandbox
    if allow_unsandboxed and tier in ("auto", "unprotected"):
        # Logged, as Python's warning filters could hide it.
        _logger.warning(
            "Model-written programs run UNPROTECTED: resource limits only, with this machine's files and network. %s",
            " ".join(reasons),
        )
        return PoolSandbox("unprotected", workers, python, packages)
    listed = "\n".join(f"  - {reason}" for reason in reasons)
    raise SandboxError(f"No sandbox holds on this machine:\n{listed}\n{_REMEDIES}")


__all__ = [
    "STATUSES",
    "Limits",
    "Outcome",
    "Program",
    "Sandbox",
    "SandboxError",
    "Status",
    "choose_sandbox",
    "open_sandbox",
]
