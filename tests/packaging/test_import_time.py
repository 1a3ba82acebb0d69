"""What `import credit_trl` costs beside TRL, in seconds of this process: waiting for others does not count."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import pytest

LIMIT = 0.3
# Where the machine is slow, TRL is too. A share that is far below what TRL itself takes is no burden either.
SHARE = 0.1
TIMED = """
import json, time
start = time.process_time()
{theirs}
between = time.process_time()
{ours}
print(json.dumps([between - start, time.process_time() - between]))
"""


def seconds(theirs: str, ours: str, *, repeats: int) -> tuple[float, float]:
    """Median processor seconds of two imports, one after the other, in fresh processes; the first warms the disk."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, "-c", TIMED.format(theirs=theirs, ours=ours)]
    taken = []
    for _ in range(repeats):
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        taken.append(json.loads(ran.stdout.splitlines()[-1]))
    theirs_taken, ours_taken = zip(*taken, strict=True)
    return statistics.median(theirs_taken), statistics.median(ours_taken)


def test_the_package_adds_little_to_importing_trl():
    _, ours = seconds("import trl", "import credit_trl", repeats=5)
    assert ours <= LIMIT


@pytest.mark.slow
def test_trainer_and_configuration_add_little_to_importing_trls_trainer():
    theirs, ours = seconds(
        "import trl; trl.GRPOTrainer, trl.GRPOConfig",
        "import credit_trl; credit_trl.CreditTrainer, credit_trl.CreditConfig",
        repeats=3,
    )
    assert ours <= max(LIMIT, SHARE * theirs)


def test_importing_the_package_alone_loads_neither_trl_nor_torch():
    heavy = ("torch", "trl", "transformers", "datasets", "matplotlib", "scipy")
    code = f"import sys, credit_trl; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_measure_tells_light_from_heavy():
    light, heavy = seconds("import credit_trl", "import torch", repeats=1)
    assert heavy > 3 * light
