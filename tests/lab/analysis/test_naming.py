"""Unique names of checkpoints and responses of several runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from drawn import drawn_map
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.lab.analysis.naming import short_names, unique_maps

PARTS = st.lists(st.sampled_from("abc"), min_size=1, max_size=4)


@given(paths=st.lists(PARTS.map(lambda parts: "/runs/" + "/".join(parts)), min_size=1, max_size=6, unique=True))
def test_short_names_are_the_shortest_unique_ends(paths):
    names = short_names(paths)
    assert len(set(names)) == len(paths)
    assert all(path.endswith(f"/{name}") or path == name for path, name in zip(paths, names, strict=True))
    count = max(len(Path(name).parts) for name in names) - 1
    if count:
        shorter = [Path(*Path(path).parts[-count:]) for path in paths]
        assert len(set(shorter)) < len(paths)


def test_repeated_path_is_refused():
    with pytest.raises(ValueError, match="checkpoint-5 is named twice"):
        short_names(["run/checkpoint-5", "run/checkpoint-5"], parts=2)


def test_checkpoints_of_two_arms_get_distinct_names():
    arms = [f"runs/{arm}/seed-1/checkpoint-5" for arm in ("sdpo", "credit")]
    assert short_names(arms, parts=2) == ["sdpo/seed-1/checkpoint-5", "credit/seed-1/checkpoint-5"]
    assert short_names(arms[:1], parts=2) == ["seed-1/checkpoint-5"]


FILES = ["runs/a/credit_maps/step-000050.parquet", "runs/b/credit_maps/step-000050.parquet"]


def names_of(*tokens, problems=("p", "p")):
    own = {"identifier": "step 50, rollout 0", "checkpoint": "step-50"}
    maps = [[drawn_map(list(text), problem=problem, **own)] for text, problem in zip(tokens, problems, strict=True)]
    return [(one.response.identifier, one.checkpoint) for one in unique_maps(FILES, maps)]


def test_ambiguous_identifiers_get_the_folder_name():
    assert names_of("xy", "xyz") == [
        ("a: step 50, rollout 0", "step-50"),
        ("b: step 50, rollout 0", "step-50"),
    ]
    assert names_of("xy", "xy", problems="pq") == names_of("xy", "xyz")
    assert names_of("xy", "xy") == [("step 50, rollout 0", "a/step-50"), ("step 50, rollout 0", "b/step-50")]
