"""Standard output of the commands: terminals that lack characters, and readers that have ended."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress


def spell_unencodable() -> None:
    """Print characters that the locale lacks, such as λ in Latin-1, as `\\u03bb` instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        fails = getattr(stream, "errors", None) in ("strict", "surrogateescape")  # the latter in the locale C
        if fails and hasattr(stream, "reconfigure"):
            with suppress(OSError, ValueError):  # a descriptor that was replaced, a stream that was closed
                stream.reconfigure(errors="backslashreplace")


def output_is_closed() -> bool:
    """Whether the reader of the output has ended, as `head` does. What is left of the output is then discarded."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
