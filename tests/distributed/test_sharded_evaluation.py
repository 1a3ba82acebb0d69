"""Evaluation in a sharded run: the processes share the prompts and do not hang."""

from __future__ import annotations

import json

import pytest
import torch

from distributed.launching import assert_wrapped, finished, launch, weights

OPTIONS = {"evaluate": True, "max_steps": 2, "completions": "hashed"}


@pytest.mark.parametrize(
    "lora", [pytest.param(False, id="full"), pytest.param(True, id="lora", marks=pytest.mark.slow)]
)
def test_fsdp2_evaluation_equals_single_process(tmp_path, lora):
    (alone,) = finished(launch(tmp_path / "one", 1, lora=lora, **OPTIONS))
    facts = finished(launch(tmp_path / "two", 2, wrapper="fsdp2", lora=lora, **OPTIONS))
    assert_wrapped(facts, "fsdp2")
    for fact in facts:
        assert [row["step"] for row in fact["evaluations"]] == [0, 2]
        assert [r["eval_avg@3"] for r in fact["evaluations"]] == [r["eval_avg@3"] for r in alone["evaluations"]]
    for step in ("000000", "000002"):
        one, two = (samples(tmp_path / runs / "run" / "evaluations" / f"step-{step}") for runs in ("one", "two"))
        assert len(one) == 9
        assert two == one
    # Evaluation has its own random streams: a run without it ends with the same weights.
    plain = finished(launch(tmp_path / "plain", 2, wrapper="fsdp2", lora=lora, **{**OPTIONS, "evaluate": False}))
    assert plain[0]["evaluations"] == []
    evaluated, without = (weights(tmp_path / runs)["weights"] for runs in ("two", "plain"))
    assert all(torch.equal(evaluated[name], value) for name, value in without.items())


def samples(folder) -> list[str]:
    """Samples of an evaluation in an order that does not depend on the process."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return sorted(json.dumps([row["prompt"], row["sample"], row["text"], row["reward"]]) for row in rows)
