"""Processor time of `import credit_trl` beside that of TRL."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import pytest

LIMIT = 0.3
# On a slow machine, a share of TRL's own import time is allowed instead.
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
    """Median processor seconds of two consecutive imports in new processes; an earlier run warms the disk cache."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [sys.executable, "-c", TIMED.format(theirs=theirs, ours=ours)]
    taken = []
    for _ in range(repeats):
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        taken.append(json.loads(ran.stdout.splitlines()[-1]))
    theirs_taken, ours_taken = zip(*taken, strict=True)
    return statistics.median(theirs_taken), statistics.median(ours_taken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("import trl", "import credit_trl"),
        (
            "import trl; trl.GRPOTrainer, trl.GRPOConfig",
            "import credit_trl; credit_trl.CreditTrainer, credit_trl.CreditConfig",
        ),
    ],
)
def test_importing_adds_little_to_trl(theirs, ours):
    theirs_taken, ours_taken = seconds(theirs, ours, repeats=3)
    assert ours_taken <= max(LIMIT, SHARE * theirs_taken)


def test_importing_package_loads_neither_trl_nor_torch():
    heavy = ("torch", "trl", "transformers", "datasets", "matplotlib", "scipy")
    code = f"import sys, credit_trl; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"
