"""The fork server of the runs, and the results of undisturbed runs."""

import pytest

from faults import launching


@pytest.fixture(scope="session")
def context():
    return launching.server()


@pytest.fixture(scope="session")
def uninterrupted(context, tmp_path_factory):
    """(variant, processes) -> result of an uninterrupted run."""
    known = {}

    def get(variant, processes):
        if (variant, processes) not in known:
            folder = tmp_path_factory.mktemp("uninterrupted")
            codes = launching.launch(context, folder, variant, processes=processes)
            assert codes == [0] * processes, launching.log(folder)
            known[variant, processes] = launching.result(folder)
        return known[variant, processes]

    return get
