"""`CreditMapCallback` on several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from credit_trl.lab.analysis.tokenmap import QUANTITIES
from credit_trl.lab.analysis.tokenmap_json import read_maps

TESTS = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("mapped_run.py")


def launch(out: Path, processes: int, *options: str) -> dict:
    out.mkdir()
    path = os.pathsep.join([str(TESTS), str(TESTS / "distributed"), str(TESTS.parent / "src")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [str(SCRIPT), str(out), "--per_device", str(16 // processes), *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    state = torch.load(out / "state.pt", weights_only=True)
    assert state["facts"]["processes"] == processes
    assert state["facts"]["type"].endswith("FSDP" if "--fsdp2" in options else "MULTI_CPU")
    return state["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--fsdp2",)], ids=["ddp", "fsdp2"])
def test_two_processes_write_the_maps_of_one_process(tmp_path, options):
    launch(tmp_path / "one", 1, *[o for o in options if o != "--fsdp2"])
    mapped = launch(tmp_path / "two", 2, *options)
    plain = launch(tmp_path / "plain", 2, "--no_maps", *options)
    for name, weight in plain.items():
        assert torch.equal(mapped[name], weight), name
    for page in ("step-000001.json", "step-000002.json"):
        one, two = (
            {(m.response.identifier, m.checkpoint): m for m in read_maps(tmp_path / run / "credit_maps" / page)}
            for run in ("one", "two")
        )
        assert one.keys() == two.keys()
        assert 0 < len({name for name, _ in one}) < 32  # some rollouts have no teacher, on either process
        for key, token_map in one.items():
            assert two[key].tokens == token_map.tokens
            for quantity in QUANTITIES:
                torch.testing.assert_close(
                    two[key].values(quantity), token_map.values(quantity), atol=2e-3, rtol=1e-3, equal_nan=True
                )
