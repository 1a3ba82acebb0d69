"""Runs of one process, to compare with."""

from pathlib import Path

import pytest

from distributed.launching import finished, launch


@pytest.fixture(scope="session")
def one_process(tmp_path_factory):
    """Options -> (folder, facts) of a run in one process without a wrapper; each is made once."""
    cached: dict[str, tuple[Path, dict]] = {}

    def get(**options):
        key = repr(sorted(options.items()))
        if key not in cached:
            folder = tmp_path_factory.mktemp("one")
            (facts,) = finished(launch(folder, 1, **options))
            assert facts["distributed_type"] == "NO"
            cached[key] = folder, facts
        return cached[key]

    return get
