"""Unprivileged user ids for programs of a server that is root: one per slot, claimed within a network namespace.

An id needs no entry in the password file. Each is claimed by binding an abstract Unix socket, which the kernel
releases when the server ends in any way. Two trainers in a namespace thus never share an id: a program could otherwise
signal the other's programs, or use up their process limit. Containers with networks of their own do not see each
other's claims, so ids are tried from a random one on.
"""

from __future__ import annotations

import itertools
import os
import random
import socket

from credit_trl.sandbox.protocol import SandboxError

# Not allocated by Debian, Fedora or systemd. User namespaces of containers usually do not map the second range, which
# machines with hundreds of cores need.
RANGES = (range(60800, 61184), range(2_000_000_000, 2_000_004_096))


def claim(count: int) -> tuple[list[int], list[socket.socket]]:
    """Claim free user ids, and return them with the sockets that hold the claims until they are closed."""
    numbers: list[int] = []
    claims: list[socket.socket] = []
    for number in itertools.chain.from_iterable(map(_rotated, filter(_mapped, RANGES))):
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
            f"Only {len(numbers)} of {count} user ids ({ranges}) are free for programs: other sandboxes on this "
            "machine have the rest, or its user namespace maps no more. Close them, or open it with fewer workers."
        )
    return numbers, claims


def _rotated(numbers: range) -> list[int]:
    """The numbers from a random one on."""
    start = random.randrange(len(numbers))
    return [*numbers[start:], *numbers[:start]]


def _mapped(numbers: range) -> bool:
    """Whether this process's user namespace maps all these ids, as users and as groups."""
    for kind in ("uid", "gid"):
        with open(f"/proc/self/{kind}_map") as lines:
            mapped = [tuple(map(int, line.split())) for line in lines]
        if not any(first <= numbers.start and numbers.stop <= first + count for first, _, count in mapped):
            return False
    return True


def become(number: int) -> None:
    """Change from root to this user and group for good, without supplementary groups."""
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)
