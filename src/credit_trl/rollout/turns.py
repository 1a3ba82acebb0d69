"""Turns of a completion that tools or environments interrupt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def turn_starts(mask: Sequence[bool]) -> list[int]:
    """The columns of a completion at which its turns begin.

    Args:
        mask: (T,), True on the model's own tokens.
    """
    return [column for column, own in enumerate(mask) if own and (column == 0 or not mask[column - 1])]


def set_current_turn(environments: Iterable[Any], turn: int) -> None:
    """Environments that have the attribute `current_turn` find the number of the turn there while its tools run."""
    for environment in environments:
        if hasattr(environment, "current_turn"):
            environment.current_turn = turn
