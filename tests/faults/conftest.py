"""The fork server of the runs, and the results of undisturbed runs."""

import pytest

from faults import launching


@pytest.fixture(scope="session")
def context():
    return launching.server()


@pytest.fixture(scope="session")
def uninterrupted(context, tmp_path_factory):
    """(variant, processes) -> result of an uninterrupted run."""
    results = {}

    def get(variant, processes):
        if (variant, processes) not in results:
            folder = tmp_path_factory.mktemp("uninterrupted")
            codes = launching.launch(context, folder, variant, processes=processes)
            assert codes == [0] * processes, launching.log(folder)
            results[variant, processes] = launching.result(folder)
        return results[variant, processes]

    return get
