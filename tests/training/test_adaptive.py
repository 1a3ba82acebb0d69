"""Adaptive λ: convergence of the controller, logging, checkpoints and the trainer."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from credit_trl import CreditTrainer
from credit_trl.cli.training import make_parser
from credit_trl.training.adaptive import CEILING, FLOOR, AdaptiveCoefficient
from tiny import length_verdicts


def adaptive(quantity="kl", level=0.1, start=0.1, rate=0.1, ceiling=10.0):
    return AdaptiveCoefficient(quantity, level, start=start, rate=rate, ceiling=ceiling)


@given(st.floats(0.01, 2), st.floats(0.01, 3), st.floats(0.05, 0.5))
def test_kl_quadratic_in_lambda_converges_to_level(level, curvature, rate):
    """KL(softmax(f + λ s) ‖ f) = λ² Var(s) / 2 + …"""
    wanted = math.sqrt(level / curvature)
    controlled = adaptive(level=level, rate=rate)
    for _ in range(400):
        controlled.observe(curvature * controlled.value**2, 10)
        controlled.update()
    assert controlled.value == pytest.approx(min(max(wanted, FLOOR), 10.0), rel=1e-3)


@given(st.floats(0.02, 0.2))
def test_s_decreasing_in_lambda_converges_to_level(level):
    controlled = adaptive("s", level=level, ceiling=1.0)
    for _ in range(400):
        controlled.observe(0.25 * math.exp(-4 * controlled.value), 10)
        controlled.update()
    assert 0.25 * math.exp(-4 * controlled.value) == pytest.approx(level, rel=1e-3)


@given(st.floats(-1e6, 1e6), st.sampled_from(["kl", "s"]), st.floats(0.01, 1))
def test_update_changes_lambda_by_at_most_exp_rate(observed, quantity, rate):
    controlled = adaptive(quantity, start=0.5, rate=rate)
    controlled.observe(observed, 3)
    controlled.update()
    assert abs(math.log(controlled.value / 0.5)) <= rate + 1e-12
    for _ in range(2000):
        controlled.observe(observed, 3)
        controlled.update()
    assert FLOOR <= controlled.value <= 10.0


def test_observations_are_weighted_by_tokens():
    apart, together = adaptive(), adaptive()
    for mean, tokens in ((0.05, 30), (math.nan, 0), (0.2, 10)):
        apart.observe(mean, tokens)
    together.observe((0.05 * 30 + 0.2 * 10) / 40, 40)
    apart.update()
    together.update()
    assert apart.value == together.value != 0.1
    before = apart.value
    apart.update()  # no new observation
    assert apart.value == before


def test_lambda_round_trips_and_fixed_lambda_is_refused(tmp_path):
    written, read = adaptive(start=1 / 3), adaptive()
    with pytest.raises(FileNotFoundError, match="had a fixed λ"):
        read.load(tmp_path)
    written.save(tmp_path)
    read.load(tmp_path)
    assert read.value == written.value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs `contrastive_auto_level` above 0, got None"),
        ({"contrastive_auto_level": 0.0}, "needs `contrastive_auto_level` above 0, got 0.0"),
        ({"contrastive_auto_level": 0.1, "contrastive_auto_start": 2.0}, r"must be in \[0.001, 1.0\] for"),
        (
            {"contrastive_auto_level": 0.1, "contrastive_auto_rate": 0.0},
            r"`contrastive_auto_rate` must be in \(0, 1\]",
        ),
        ({"contrastive_auto_level": 0.1, "contrastive_auto_quantity": "r"}, "must be one of kl, s"),
        (
            {"contrastive_auto_level": 0.1, "distillation_support": "sampled"},
            "set `contrastive_auto_quantity='s'`",
        ),
        ({"contrastive_auto_level": 0.1, "per_device_train_batch_size": 4}, "holds one prompt"),
    ],
)
def test_invalid_adaptive_options_are_refused(make_config, options, message):
    with pytest.raises(ValueError, match=message):
        make_config(contrastive_coef="auto", **options)


def test_command_line_accepts_numbers_and_auto():
    def parse(*options):
        line = ["--output_dir", "unused", "--report_to", "none", "--bf16", "false", "--use_cpu", *options]
        return make_parser().parse_args_and_config(line)[1].contrastive_coef

    assert parse("--gradient_accumulation_steps", "4") == 0.1
    assert parse("--gradient_accumulation_steps", "4", "--contrastive_coef", "0.25") == 0.25
    chosen = parse(
        "--gradient_accumulation_steps", "4", "--contrastive_coef", "auto", "--contrastive_auto_level", "0.1"
    )
    assert chosen == "auto"


AUTO = {"contrastive_coef": "auto", "contrastive_form": "guide", "contrastive_auto_level": 0.02}


@pytest.fixture
def build(make_model, make_config, tokenizer, dataset):
    def make(**options):
        config = make_config(**{**AUTO, **options})
        return CreditTrainer(make_model(), length_verdicts, config, dataset, processing_class=tokenizer)

    return make


def trajectory(trainer, name="credit/contrastive_coef"):
    return [entry[name] for entry in trainer.state.log_history if "loss" in entry]


def test_lambda_follows_the_logged_divergence(build):
    trainer = build(max_steps=4, contrastive_auto_rate=0.5)
    trainer.train()
    coefs, divergences = trajectory(trainer), trajectory(trainer, "credit/kl_to_teacher")
    assert coefs[0] == 0.1
    expected = [0.1]
    for divergence in divergences:
        error = min(max((divergence - 0.02) / 0.02, -1), 1)
        expected.append(min(max(expected[-1] * math.exp(-0.5 * error), FLOOR), CEILING["guide"]))
    assert coefs == pytest.approx(expected[:-1], rel=1e-6)
    assert trainer.contrastive_coef == pytest.approx(expected[-1], rel=1e-6)
    assert len(set(coefs)) == 4


def test_lambda_changes_only_after_optimizer_steps(build):
    trainer = build(max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    seen = []
    loss = trainer._distillation_loss

    def recording(model, inputs):
        seen.append(trainer.contrastive_coef)
        return loss(model, inputs)

    trainer._distillation_loss = recording
    trainer.train()
    assert len(seen) == 4
    assert seen[0] == seen[1] != seen[2] == seen[3]
    before = trainer.contrastive_coef
    trainer.evaluate(trainer.train_dataset.select(range(4)))
    assert trainer.contrastive_coef == before


def test_resumed_run_has_lambda_and_weights_of_uninterrupted(build, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 5}
    whole = build(max_steps=4, output_dir=str(tmp_path / "whole"), **options)
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    saved = json.loads((checkpoint / "contrastive_coef.json").read_text())["contrastive_coef"]
    assert saved == pytest.approx(trajectory(whole)[2])
    resumed = build(max_steps=4, output_dir=str(tmp_path / "parts"), **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert trajectory(resumed) == trajectory(whole)
    assert resumed.contrastive_coef == whole.contrastive_coef
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
