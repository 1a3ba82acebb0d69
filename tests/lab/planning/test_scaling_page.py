"""The tables of `docs/scaling.md` are what `trl credit-plan` computes for the recipe that they name."""

from __future__ import annotations

import argparse
import functools
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest

from credit_trl.cli import credit_plan
from credit_trl.lab.planning.memory import memory_of
from credit_trl.lab.planning.report import Plan
from credit_trl.lab.planning.setup import GIB
from credit_trl.lab.planning.work import work_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "scaling.md"
RECIPE = "examples/recipes/livecodebench_qwen3_8b.yaml"
NODES = (1, 2, 4, 8, 16, 32, 64)
# Nodes, rollouts of a micro-batch, micro-batches a step: 64 rollouts a step on any number of GPUs.
SPLITS = ((1, 2, 4), (2, 2, 2), (4, 2, 1), (8, 1, 1))


@functools.cache
def plan() -> Plan:
    parser = argparse.ArgumentParser()
    credit_plan.add_arguments(parser)
    with chdir(ROOT):
        return credit_plan.plan_of(parser.parse_args(["--gpu", "h20"]), ["--config", RECIPE])


def row(nodes: int, **changes: int) -> str:
    one = plan()
    setup = replace(one.setup, machines=nodes, processes=8 * nodes, **changes)
    work, memory = work_of(one.shape, setup, one.lengths), memory_of(one.shape, setup)
    moved = [work.moved[name] / 1e9 for name in ("scores", "update", "weights to the engine")]
    seconds = [work.seconds[name] for name in ("rollout", "scores", "update")]
    cells = [
        f"{nodes}",
        f"{setup.generation_batch}",
        *(f"{gigabytes:.0f}" for gigabytes in moved),
        *(f"{s:.0f}" for s in seconds),
        f"{work.tokens['trained'] / sum(work.seconds.values()) / 1e3:.1f}",
        f"{memory.peak[1] / GIB:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def strong() -> list[str]:
    """The paper's batch on more and more GPUs."""
    return [row(nodes, per_device=size, accumulation=count) for nodes, size, count in SPLITS]


def weak() -> list[str]:
    """As many rollouts a GPU on more and more of them."""
    return [row(nodes, generation_batch=256 * nodes) for nodes in NODES]


@pytest.mark.parametrize("table", [strong, weak])
def test_the_page_shows_what_the_plan_computes(table):
    lines = PAGE.read_text("utf-8").splitlines()
    for expected in table():
        assert expected in lines


def test_more_nodes_receive_more_and_hold_less():
    one, many = (replace(plan().setup, machines=n, processes=8 * n, generation_batch=256 * n) for n in (1, 64))
    assert memory_of(plan().shape, one).peak[1] > memory_of(plan().shape, many).peak[1]
    ours, theirs = (work_of(plan().shape, setup, plan().lengths).moved for setup in (one, many))
    assert ours["scores"] < theirs["scores"] < 8 / 7 * ours["scores"] * 1.01
