"""Fidelity of the teacher, and alarms for its drift, for lengths and for rewards."""

import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.rollout.batch import GenerationBatch
from credit_trl.training.checkpoints import hash_files, write_manifest
from credit_trl.training.metrics import (
    WINDOW,
    Alarms,
    CreditWarning,
    harmful_feedback,
    teacher_success_weights,
)
from tables import tables_of

TABLES = tables_of(__file__)

FIDELITY = "credit/teacher_fidelity"
LENGTH = "completions/mean_length"
REWARD = "reward"


@given(
    rewards=st.lists(st.sampled_from([0.0, 1.0, math.nan]), min_size=4, max_size=24),
    size=st.sampled_from([2, 4]),
    data=st.data(),
)
def test_success_weights_give_the_mean_gap_of_mixed_groups(rewards, size, data):
    rewards = rewards[: len(rewards) // size * size]
    has_teacher = [data.draw(st.booleans()) for _ in rewards]
    has_tokens = [data.draw(st.booleans()) for _ in rewards]
    is_scored = [has and tokens for has, tokens in zip(has_teacher, has_tokens, strict=True)]
    values = [data.draw(st.floats(-5, 5)) for _ in rewards]
    gaps = []
    for start in range(0, len(rewards), size):
        group = range(start, start + size)
        won = [values[i] for i in group if is_scored[i] and rewards[i] == 1.0]
        lost = [values[i] for i in group if is_scored[i] and rewards[i] == 0.0]
        if won and lost:
            gaps.append(sum(won) / len(won) - sum(lost) / len(lost))
    count = len(rewards)
    batch = GenerationBatch([{}] * count, ["x"] * count, [[1]] * count, rewards, [None] * count, 0, group_size=size)
    contexts = [SimpleNamespace(teacher=[1] if has else None) for has in has_teacher]
    mask = torch.tensor(has_tokens)[:, None]
    weights, mixed, scored = teacher_success_weights(batch, contexts, mask, 1.0)
    assert (mixed, scored) == (len(gaps), sum(is_scored))
    if gaps:
        assert weights @ torch.tensor(values) == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
    else:
        assert weights.isnan().all()


def observe(*, frozen_teacher=False, **series):
    """Alarms after logging the given series of values."""
    alarms = Alarms()
    history = [dict(zip(series, values, strict=True)) for values in zip(*series.values(), strict=True)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for end in range(len(history)):
            alarms.check_drift(history[: end + 1], frozen_teacher=frozen_teacher)
    assert len([w for w in caught if w.category is CreditWarning]) == len(alarms.raised)
    return {cause.removeprefix("drift_") for cause in alarms.raised}


@pytest.mark.parametrize(("name", "first_value", "last_value", "cause"), TABLES["windows"])
def test_alarm_compares_the_latest_with_the_first_window(name, first_value, last_value, cause):
    assert observe(**{name: [first_value] * WINDOW + [last_value] * WINDOW}) == ({cause} if cause else set())
    assert observe(**{name: [first_value] * WINDOW + [last_value] * (WINDOW - 1)}) == set()


def test_noise_without_a_trend_raises_no_alarm():
    rng = np.random.default_rng(0)
    solved = rng.binomial(8, rng.beta(0.3, 0.7, (200, 8))) / 8  # 200 batches of eight problems with eight rollouts
    rewards = solved.mean(axis=1)
    noisy = {REWARD: rewards, FIDELITY: rng.normal(0.1, 0.2, 200), LENGTH: 100 * rewards}
    windows = np.convolve(rewards, np.ones(WINDOW) / WINDOW, "valid")
    assert windows.min() < 0.5 * windows.max()
    assert observe(**noisy) == set()
    assert observe(**{REWARD: [*rewards, *rewards[:40] / 8]}) == {"collapse"}


def test_a_frozen_teacher_raises_no_alarm_of_its_fidelity():
    falling = [2.0] * WINDOW + [0.1] * WINDOW
    assert observe(frozen_teacher=True, **{FIDELITY: falling}) == set()
    assert observe(frozen_teacher=True, **{FIDELITY: falling, REWARD: falling}) == {"collapse"}


def test_resumed_run_compares_with_its_first_values(make_trainer):
    options = {"save_strategy": "steps", "save_steps": 1}
    make_trainer(max_steps=1, **options).train()
    path = Path(make_trainer().args.output_dir) / "checkpoint-1"
    state = json.loads((path / "trainer_state.json").read_text())
    state["log_history"] = [{"step": 1, REWARD: 9.0}, {"step": 1, "eval_reward": 0.0}] * (2 * WINDOW - 1)
    (path / "trainer_state.json").write_text(json.dumps(state))
    write_manifest(path, hash_files(path))
    resumed = make_trainer(max_steps=2 + WINDOW, **options)
    with pytest.warns(CreditWarning, match="mean reward fell from 9.000, its best, to "):
        resumed.train("latest")


def test_fidelity_is_the_gap_of_delta_v_in_mixed_groups(make_trainer):
    trainer = make_trainer(max_steps=1, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    losses = []
    compute = trainer._distillation_loss

    def recording(model, inputs):
        losses.append(inputs)
        return compute(model, inputs)

    seen = []
    trainer._distillation_loss = recording
    add = trainer.token_metrics.add
    trainer.token_metrics.add = lambda mode, loss: seen.append(loss) or add(mode, loss)
    trainer.train()
    expected = 0.0
    for inputs, loss in zip(losses, seen, strict=True):
        mask = inputs["completion_mask"].bool()
        delta = torch.zeros(mask.shape)
        delta[mask] = (loss.terms.teacher_token_logps - loss.terms.token_logps).detach()
        means = delta.sum(1) / mask.sum(1)
        expected += (inputs["success_weights"] * means).sum().item() / len(losses)
    [entry] = [e for e in trainer.state.log_history if "loss" in e]
    assert entry["credit/fidelity_groups"] >= 1
    assert entry[FIDELITY] == pytest.approx(expected, rel=1e-5)


def harmful(fidelity, groups):
    history = [
        {FIDELITY: value, "credit/fidelity_groups": count} for value, count in zip(fidelity, groups, strict=True)
    ]
    return harmful_feedback(history)


@pytest.mark.parametrize("frozen", [True, False])
def test_fidelity_below_zero_from_the_start_is_an_alarm(frozen):
    series = {FIDELITY: [-0.31, -0.28, -0.33], "credit/fidelity_groups": [6, 6, 6]}
    assert observe(frozen_teacher=frozen, **series) == {"harmful_feedback"}


def test_harm_needs_groups_logs_and_a_mean_below_its_error():
    assert harmful([-0.3, -0.3, -0.3], [6, 5, 5]) is not None
    assert harmful([-0.3, -0.3, -0.3], [5, 5, 5]) is None
    assert harmful([-0.3, -0.3], [20, 20]) is None
    assert harmful([-0.9, 0.4, 0.1], [6, 6, 6]) is None
    learned = [0.2] * 10 + [-0.5] * 50  # a frozen teacher, after the policy learned what it shows
    assert harmful(learned, [8] * 60) is None


def test_harm_is_the_weighted_mean_against_its_error():
    rng = np.random.default_rng(0)
    for _ in range(50):
        fidelity = rng.normal(-0.1, 0.1, 5)
        groups = rng.integers(4, 9, 5)
        mean = np.average(fidelity, weights=groups)
        error = np.sqrt(np.sum((groups * (fidelity - mean)) ** 2)) / groups.sum()
        assert (harmful(fidelity.tolist(), groups.tolist()) is not None) == (mean + 2 * error < 0)
