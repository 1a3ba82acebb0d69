"""All escapes, and those that test whether the suite detects an escape."""

from __future__ import annotations

from escapes_grading import GRADING
from escapes_harm import NEIGHBOURS, PROCESSES, RESOURCES
from escapes_reach import FILES, NETWORK, PRIVILEGES, SURROUNDINGS

GROUPS = {
    "files": FILES,
    "surroundings": SURROUNDINGS,
    "network": NETWORK,
    "processes": PROCESSES,
    "resources": RESOURCES,
    "neighbours": NEIGHBOURS,
    "privileges": PRIVILEGES,
    "grading": GRADING,
}
ESCAPES = [escape for group in GROUPS.values() for escape in group]

# These succeed without isolation. The suite runs them unprotected to test its detection.
NOTICED_UNPROTECTED = (
    "list directories outside",
    "connect to a local port",
    "connect to Unix sockets",
    "create a file outside",
    "listen",
    "execute other programs",
    "memory outside the process's count",
    "hide sockets in sockets",
    "memory in pipes",
    "read extended attributes outside",
)
