"""`CreditMapCallback` on several processes."""

from pathlib import Path

import pytest
import torch

from credit_trl.lab.analysis.tokenmap import QUANTITIES, TokenMap, read_maps
from distributed.launching import finished, launch


def maps_of(run: Path, step: int) -> dict[tuple[str, str], TokenMap]:
    maps = read_maps(run / "run" / "credit_maps" / f"step-{step:06d}.json")
    return {(token_map.response.identifier, token_map.checkpoint): token_map for token_map in maps}


@pytest.mark.slow
@pytest.mark.parametrize("fsdp2", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_write_the_maps_of_one_process(tmp_path, fsdp2):
    options = {"wrapper": "fsdp2" if fsdp2 else "ddp", "max_steps": 3, "distillation_topk": 8}
    finished(launch(tmp_path / "one", 1, **{**options, "wrapper": ""}, maps=True))
    for name, maps in (("two", True), ("plain", False)):
        facts = finished(launch(tmp_path / name, 2, maps=maps, **options))
        assert [maps_of_one["sharded"] for maps_of_one in facts] == [fsdp2] * 2
    mapped, plain = (torch.load(tmp_path / name / "weights_0.pt")["weights"] for name in ("two", "plain"))
    for name, weight in plain.items():
        assert torch.equal(mapped[name], weight), name
    for step in (1, 2):
        maps_of_one, two = maps_of(tmp_path / "one", step), maps_of(tmp_path / "two", step)
        assert maps_of_one.keys() == two.keys()
        assert 0 < len({name for name, _ in maps_of_one}) < 32  # some rollouts have no teacher, on either process
        for key, token_map in maps_of_one.items():
            assert two[key].tokens == token_map.tokens
            for quantity in QUANTITIES:
                values = two[key].values(quantity), token_map.values(quantity)
                torch.testing.assert_close(*values, atol=2e-3, rtol=1e-3, equal_nan=True)
