"""Names of checkpoints and responses that come from several places and stand side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from credit_trl.lab.analysis.tokenmap import TokenMap


def short_names(paths: Sequence[str | Path], parts: int = 1) -> list[str]:
    """The last parts of paths, at least so many and as many as tell all of them apart.

    Raises:
        ValueError: a path is named twice.
    """
    whole = [Path(path).resolve().parts for path in paths]
    for count in itertools.count(parts):
        names = [Path(*path[-count:]).as_posix() for path in whole]
        if len(set(names)) == len(names):
            return names
        if count >= max(map(len, whole)):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{twice} is named twice.")
    raise AssertionError("counting does not end")


def tell_apart(files: Sequence[str | Path], maps: Sequence[Sequence[TokenMap]]) -> list[TokenMap]:
    """The maps of several files as one list, with the file's folder in the names that would stand for two things.

    A response with the same tokens in two files is the same one, and its maps stand side by side.

    Args:
        files: where the maps are from.
        maps: those of each file.
    """
    labels = _differing_parts(short_names(files))
    tokens: dict[str, set[tuple[int, ...]]] = {}
    for one in itertools.chain(*maps):
        tokens.setdefault(one.response.identifier, set()).add(tuple(one.response.token_ids))

    def named(one: TokenMap, label: str) -> TokenMap:
        if len(tokens[one.response.identifier]) == 1:
            return one
        return replace(one, response=replace(one.response, identifier=f"{label}: {one.response.identifier}"))

    told = [[named(one, label) for one in own] for own, label in zip(maps, labels, strict=True)]
    keys = [(one.response.identifier, one.checkpoint) for one in itertools.chain(*told)]
    if len(set(keys)) == len(keys):
        return list(itertools.chain(*told))
    return [
        replace(one, checkpoint=f"{label}/{one.checkpoint}")
        for own, label in zip(told, labels, strict=True)
        for one in own
    ]


def _differing_parts(names: Sequence[str]) -> list[str]:
    """`a/maps/step.parquet` and `b/maps/step.parquet` → `a` and `b`."""
    split = [name.split("/") for name in names]
    while min(map(len, split)) > 1 and len({parts[-1] for parts in split}) == 1:
        split = [parts[:-1] for parts in split]
    return ["/".join(parts) for parts in split]
