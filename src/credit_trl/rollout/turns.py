"""Turns of completions with tool calls or environments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def turn_starts(mask: Sequence[bool]) -> list[int]:
    """Return the columns of a completion at which the model's turns start.

    Args:
        mask: (T,), True on the model's own tokens.
    """
    return [column for column, own in enumerate(mask) if own and (column == 0 or not mask[column - 1])]


def set_current_turn(environments: Iterable[Any], turn: int) -> None:
    """Set `current_turn` to the turn index on environments that have the attribute, before their tools run."""
    for environment in environments:
        if hasattr(environment, "current_turn"):
            environment.current_turn = turn
