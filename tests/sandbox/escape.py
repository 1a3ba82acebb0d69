"""The programs of `escapes.toml`, and the names that each of them may use.

Every program limits itself (number of forks, megabytes, seconds), so that it does little harm if it is not isolated. A
program prints `ESCAPED ...` if it detects its escape. The test detects the others on the bait: files, sockets,
descriptors and processes whose names `PRELUDE` defines. An attempt must have no effect: no secret read, no file
changed, no socket reached, no other process touched, nothing left running, and the next programs get right outcomes.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from credit_trl.sandbox import Limits

DATA = tomllib.loads(Path(__file__).with_name("escapes.toml").read_text("utf-8"))
LIMITS = Limits(**DATA["limits"])
PRELUDE: str = DATA["prelude"] + DATA["multiply"]


@dataclass(frozen=True)
class Escape:
    """One program; `escapes.toml` describes its fields."""

    name: str
    source: str
    statuses: Sequence[str] = ("ok",)
    call: str | None = None
    value: str | None = None
    stdin: str = ""
    limits: Limits = LIMITS
    beside: bool = False


def _escape(fields: dict[str, Any]) -> Escape:
    return Escape(**fields | {"limits": replace(LIMITS, **fields.get("limits", {}))})


ESCAPES = [_escape(fields) for programs in DATA["group"].values() for fields in programs]
