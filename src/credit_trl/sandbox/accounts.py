"""Unprivileged user ids for programs of a server that is root: one per slot, claimed within a network namespace.

An id needs no entry in the password file. Each is claimed by binding an abstract Unix socket, which the kernel
releases when the server ends in any way. Two trainers in a namespace thus never share an id: a program could otherwise
signal the other's programs, or use up their process limit. Containers with networks of their own do not see each
other's claims, so ids are tried from a random one on.
"""

from __future__ import annotations

import random
import socket

from credit_trl.sandbox.protocol import SandboxError

USERS = range(60800, 61184)  # not allocated by Debian, Fedora or systemd


def claim(count: int) -> tuple[list[int], list[socket.socket]]:
    """Claim free user ids, and return them with the sockets that hold the claims until they are closed."""
    numbers: list[int] = []
    claims: list[socket.socket] = []
    start = random.randrange(len(USERS))
    for number in (*USERS[start:], *USERS[:start]) if _are_mapped() else ():
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
        raise SandboxError(
            f"Only {len(numbers)} of {count} user ids ({USERS.start} to {USERS.stop - 1}) are free for programs: "
            "other sandboxes on this machine have the rest, or its user namespace maps none. Close them, or open this "
            "one with fewer workers."
        )
    return numbers, claims


def _are_mapped() -> bool:
    """Whether this process's user namespace maps all these ids, as users and as groups."""
    for kind in ("uid", "gid"):
        with open(f"/proc/self/{kind}_map") as lines:
            mapped = [tuple(map(int, line.split())) for line in lines]
        if not any(first <= USERS.start and USERS.stop <= first + count for first, _, count in mapped):
            return False
    return True
