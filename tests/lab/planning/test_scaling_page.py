"""The tables of `docs/scaling.md` equal what `trl credit-plan` computes for their recipe."""

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
NODES = (1, 8, 64)
# Nodes, rollouts per micro-batch, micro-batches per step: 64 rollouts per step on any number of GPUs.
SPLITS = ((1, 2, 4), (2, 2, 2), (4, 2, 1), (8, 1, 1))


@functools.cache
def plan() -> Plan:
    parser = argparse.ArgumentParser()
    credit_plan.add_arguments(parser)
    with chdir(ROOT):
        return credit_plan.plan_of(parser.parse_args(["--gpu", "h20"]), ["--config", RECIPE])


def row(nodes: int, **changes: int) -> list[str]:
    one = plan()
    setup = replace(one.setup, machines=nodes, processes=8 * nodes, **changes)
    work, memory = work_of(one.shape, setup, one.lengths), memory_of(one.shape, setup)
    moved = [work.moved[name] / 1e9 for name in ("scores", "update", "weights to the engine")]
    seconds = [work.seconds[name] for name in ("rollout", "scores", "update")]
    return [
        f"{nodes}",
        f"{setup.generation_batch}",
        *(f"{gigabytes:.0f}" for gigabytes in moved),
        *(f"{s:.0f}" for s in seconds),
        f"{work.tokens['trained'] / sum(work.seconds.values()) / 1e3:.1f}",
        f"{memory.peak[1] / GIB:.0f}",
    ]


def fixed_batch() -> list[list[str]]:
    """The paper's batch on a growing number of nodes."""
    return [row(nodes, per_device=size, accumulation=count) for nodes, size, count in SPLITS]


def growing_batch() -> list[list[str]]:
    """256 rollouts per node."""
    return [row(nodes, generation_batch=256 * nodes) for nodes in NODES]


@pytest.mark.parametrize("table", [fixed_batch, growing_batch])
def test_the_page_has_the_planned_numbers(table):
    lines = [line.strip("|").split("|") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line] for line in lines]
    for expected in table():
        assert expected in rows


def test_more_nodes_receive_more_and_store_less():
    one, many = (replace(plan().setup, machines=n, processes=8 * n, generation_batch=256 * n) for n in (1, 64))
    assert memory_of(plan().shape, one).peak[1] > memory_of(plan().shape, many).peak[1]
    few, most = (work_of(plan().shape, setup, plan().lengths).moved for setup in (one, many))
    assert few["scores"] < most["scores"] < 8 / 7 * few["scores"] * 1.01
