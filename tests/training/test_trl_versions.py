"""The choice of TRL's versions for `make test-trl`."""

import runpy
from pathlib import Path

import pytest

choose = runpy.run_path(str(Path(__file__).with_name("trl_versions.py")))["choose"]


@pytest.mark.parametrize(
    ("available", "supported", "newer"),
    [
        (["1.16.0", "1.15.0", "1.14.2", "0.9.6"], ["1.15.0", "1.16.0"], []),
        (["1.17.0", "1.16.10", "1.16.9", "1.16.2", "1.15.1", "1.15.0"], ["1.15.0", "1.16.10"], ["1.17.0"]),
        (["2.0.0", "1.19.1", "1.19.0rc1", "1.17.0rc1", "1.15.3"], ["1.15.3", "1.15.3"], ["1.19.1", "2.0.0"]),
    ],
)
def test_oldest_and_newest_are_supported_and_newer_listed(available, supported, newer):
    assert choose(available, ("1.15", "1.16")) == (supported, newer)
