"""Groups without a signal are replaced: up to a bound, counted, resumable, the same for any number of processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from credit_trl import CreditTrainer, Verdict
from credit_trl.loss.uses import silent_groups
from credit_trl.rollout.batch import GenerationBatch
from credit_trl.training.dynamic_sampling import Redraws, redraw
from test_trainer_parity import prepared

ROWS = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": i, "works": i >= 6} for i in range(24)]
)


def feedback_on_some(completions, answer, works, **kwargs):
    return [Verdict(0.0, f"It is {a}." if w else None) for a, w in zip(answer, works, strict=True)]


def rewards_on_some(completions, works, **kwargs):
    return [float(w and i % 2) for i, w in enumerate(works)]


@pytest.fixture
def make_trainer(make_model, make_config, tokenizer):
    def make(verifier=feedback_on_some, rows=ROWS, **options):
        config = make_config(**{"dynamic_sampling_rounds": 3, "shuffle_dataset": False, **options})
        return CreditTrainer(make_model(), verifier, config, rows, processing_class=tokenizer)

    return make


def batch(rewards, group_size=2, first=0):
    count = len(rewards) - first
    return GenerationBatch([{}] * count, ["x"] * count, [[1]] * count, rewards, [None] * count, first, group_size=2)


@pytest.mark.parametrize(
    ("options", "teaches", "silent"),
    [  # rewards: 0 0 | 0 1 | 1 1 | 1 1
        ({}, [0, 0, 0, 1, 1, 0, 0, 0], [0, 3]),
        ({"distillation_weight": 0.5}, [0, 0, 0, 0, 1, 0, 0, 0], [0, 3]),
        ({"distillation_weight": 0.0}, [1] * 8, [0, 2, 3]),
        ({"credit_use": "modulate"}, [1] * 8, [0, 2, 3]),
        ({"credit_use": "route"}, [0, 1, 0, 0, 1, 1, 0, 0], [2, 3]),
    ],
)
def test_silent_groups_are_those_without_any_term_of_the_loss(make_config, options, teaches, silent):
    rewards, config = batch([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]), make_config(**options)
    assert silent_groups(rewards, list(map(bool, teaches)), config) == silent


def test_failed_verifiers_do_not_count_as_another_reward(make_config):
    config = make_config(credit_use="modulate")
    assert silent_groups(batch([0.0, float("nan")]), [False] * 2, config) == [0]


def test_silent_groups_are_replaced_and_counted(make_trainer):
    trainer = make_trainer()
    inputs = prepared(trainer, rows=2)  # the first six prompts have no feedback
    assert inputs["teacher_mask"].all()
    assert all(row["works"] for row in trainer._generation_batch.rows)
    assert trainer._metrics["train"]["credit/redrawn_groups"][0] >= 2
    assert trainer._metrics["train"]["credit/silent_groups"] == [0.0]
    assert len(trainer._metrics["train"]["reward"]) == 1
    assert inputs["num_items_in_batch"] == inputs["completion_mask"].sum()


def test_only_the_silent_group_is_replaced(make_trainer, tokenizer):
    trainer = make_trainer(rewards_on_some, credit_use="modulate", contrastive_coef=0.0)
    trainer.train_dataset = ROWS.select([8, 0, *range(9, 24)])
    first = trainer._rollouts([row for row in trainer.train_dataset.select(range(2)) for _ in range(4)])
    kept, generate = [first], trainer._rollouts
    trainer._rollouts = lambda rows: kept.pop() if kept else generate(rows)
    inputs = prepared(trainer, rows=2)
    width = first.output["completion_ids"].shape[1]
    assert torch.equal(inputs["completion_ids"][:4, :width], first.output["completion_ids"][:4])
    texts = tokenizer.batch_decode(
        [p[m.bool()] for p, m in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)]
    )
    shown = [int(re.search(r"(\d+)\?", text)[1]) for text in texts]
    assert shown == [row["answer"] for row in trainer._generation_batch.rows]
    assert shown[:4] == [8] * 4
    assert all(i >= 6 for i in shown)
    assert (inputs["advantages"][4:, 0] != 0).all()


def test_rounds_bound_the_redraws(make_trainer):
    trainer = make_trainer(lambda completions, **kwargs: [Verdict(0.0)] * len(completions), dynamic_sampling_rounds=2)
    calls = []
    trainer._rollouts = lambda rows, real=trainer._rollouts: calls.append(len(rows)) or real(rows)
    prepared(trainer)
    assert calls == [8, 8, 8]
    assert trainer._metrics["train"]["credit/silent_groups"] == [2.0]
    assert trainer._metrics["train"]["credit/redrawn_groups"] == [4.0]


def test_the_drawn_row_depends_on_seed_step_round_and_group_only():
    keys = [(s, t, a, g) for s in (0, 1) for t in (0, 1) for a in (0, 1) for g in (0, 1)]
    rows = [{"i": i} for i in range(10_000)]
    drawn = [Redraws(rows, s, t, 3, 0).row(a, g)["i"] for s, t, a, g in keys]
    assert drawn == [Redraws(rows, s, t, 9, 1).row(a, g)["i"] for s, t, a, g in keys]
    assert len(set(drawn)) == len(keys)


def test_images_are_refused(make_trainer):
    trainer = make_trainer(rewards_on_some, distillation_weight=0.0)
    rollouts = trainer._rollouts([dict(row) for row in ROWS.select([6] * 8)])
    rollouts = replace(rollouts, output={**rollouts.output, "num_images": [1] * 8})
    with pytest.raises(ValueError, match="Set `dynamic_sampling_rounds=0`"):
        redraw(trainer, rollouts)


def test_streamed_datasets_are_refused(make_trainer):
    with pytest.raises(ValueError, match=r"needs a `datasets\.Dataset` for training"):
        make_trainer(rows=ROWS.to_iterable_dataset())


@pytest.mark.slow
def test_a_resumed_run_draws_the_same(make_trainer, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = make_trainer(**options)
    whole.train()
    resumed = make_trainer(**options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    for (name, a), b in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    counts = [
        [row["credit/redrawn_groups"] for row in t.state.log_history if "credit/redrawn_groups" in row]
        for t in (whole, resumed)
    ]
    assert counts[0] == counts[1]
    assert sum(counts[0]) > 0


@pytest.mark.slow
def test_two_processes_replace_the_groups_that_one_does(tmp_path):
    program = Path(__file__).with_name("dynamic_sampling_processes.py")
    found = []
    for processes in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
        done = subprocess.run(
            [*command, str(program), str(tmp_path / f"{processes}")],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(sorted(line for line in done.stdout.splitlines() if line.startswith("group")))
    assert found[0] == found[1]
    assert len(found[0]) == 4
