"""Unprivileged users for programs, where the trainer runs as root: a number per slot, shared with nobody.

Numbers without an entry in the password file suffice. Each is claimed by binding an abstract Unix socket, which the
kernel releases when the pool server ends however it ends, so two trainers on one machine never share a number: a
program could otherwise signal the other's programs, or use up their process limit.
"""

from __future__ import annotations

import itertools
import os
import socket

from credit_trl.sandbox.protocol import SandboxError

# Left free by Debian's, Fedora's and systemd's allocations. The second, for machines of hundreds of cores, is beyond
# what a container's own user namespace maps as a rule.
RANGES = (range(60800, 61184), range(2_000_000_000, 2_000_004_096))


def claim(count: int) -> tuple[list[int], list[socket.socket]]:
    """Claim `count` user numbers. They stay claimed while the returned sockets live.

    Raises:
        SandboxError: fewer are free.
    """
    numbers: list[int] = []
    claims: list[socket.socket] = []
    for number in itertools.chain.from_iterable(filter(_mapped, RANGES)):
        if len(numbers) == count:
            break
        claim_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim_socket.bind(f"\0credit-trl-sandbox-user-{number}")
        except OSError:
            claim_socket.close()
            continue
        numbers.append(number)
        claims.append(claim_socket)
    if len(numbers) < count:
        ranges = ", ".join(f"{numbers.start} to {numbers.stop - 1}" for numbers in RANGES)
        raise SandboxError(
            f"Only {len(numbers)} of {count} user numbers ({ranges}) are free for programs: other sandboxes on this "
            "machine hold the rest, or its user namespace maps no more. Close them, or open it with fewer workers."
        )
    return numbers, claims


def _mapped(numbers: range) -> bool:
    """Whether this process's user namespace knows all these numbers, as users and as groups."""
    return all(
        any(first <= numbers.start and numbers.stop <= first + count for first, _, count in _map(kind))
        for kind in ("uid", "gid")
    )


def _map(kind: str) -> list[list[int]]:
    with open(f"/proc/self/{kind}_map") as lines:
        return [[int(part) for part in line.split()] for line in lines]


def become(number: int) -> None:
    """Give up root for this user, for good: user, group, and all supplementary groups."""
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)
