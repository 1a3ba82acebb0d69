"""Unique names for checkpoints and responses of several runs in one view."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from credit_trl.lab.analysis.tokenmap import TokenMap


def short_names(paths: Sequence[str | Path], parts: int = 1) -> list[str]:
    """Shortest unique names: the last `parts` parts of each path, or more where names would be equal."""
    whole = [Path(path).resolve().parts for path in paths]
    for count in range(parts, max(parts + 1, *map(len, whole), 0) + 1):
        names = [Path(*path[-count:]).as_posix() for path in whole]
        if len(set(names)) == len(names):
            return names
    twice = next(name for name in names if names.count(name) > 1)
    raise ValueError(f"{twice} is named twice.")


def unique_maps(files: Sequence[str | Path], maps: Sequence[Sequence[TokenMap]]) -> list[TokenMap]:
    """Maps of several files in one list, with the file's folder in identifiers that would be ambiguous.

    Responses with the same identifier, prompt and tokens are one response, whose maps are shown side by side.
    """
    labels = _differing_parts(short_names(files))
    contents: dict[str, set[Any]] = {}
    for one in itertools.chain(*maps):
        contents.setdefault(one.response.identifier, set()).add(one.response.content)
    labelled = [
        (label, _with_label(one, label) if len(contents[one.response.identifier]) > 1 else one)
        for label, own in zip(labels, maps, strict=True)
        for one in own
    ]
    if len({(one.response.identifier, one.checkpoint) for _, one in labelled}) == len(labelled):
        return [one for _, one in labelled]
    return [replace(one, checkpoint=f"{label}/{one.checkpoint}") for label, one in labelled]


def _with_label(one: TokenMap, label: str) -> TokenMap:
    return replace(one, response=replace(one.response, identifier=f"{label}: {one.response.identifier}"))


def _differing_parts(names: Sequence[str]) -> list[str]:
    """`a/maps/step.parquet` and `b/maps/step.parquet` → `a` and `b`."""
    split = [name.split("/") for name in names]
    while min(map(len, split)) > 1 and len({parts[-1] for parts in split}) == 1:
        split = [parts[:-1] for parts in split]
    return ["/".join(parts) for parts in split]
