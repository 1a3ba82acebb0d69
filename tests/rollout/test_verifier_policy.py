"""A verifier that hangs, raises or answers late ends the run, or its rollouts are left out, as configured."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from credit_trl import CreditTrainer, Verdict
from credit_trl.rollout.deadline import remaining_seconds
from credit_trl.rollout.verdict import VerdictLog, VerifierPolicy, VerifierTimeout
from tiny import length_verdicts


def call(policy, reward_func, **arguments):
    return policy.call("f", reward_func, arguments)


def test_a_verifier_that_is_in_time_is_not_touched():
    assert call(VerifierPolicy(timeout=30.0), lambda n: [n], n=3) == [3]
    assert asyncio.run(VerifierPolicy(timeout=30.0).call_async("f", _later, {"seconds": 0.0})) == ["late"]


async def _later(seconds):
    await asyncio.sleep(seconds)
    return ["late"]


@pytest.mark.parametrize("timeout", [None, 30.0], ids=["unlimited", "in a thread"])
def test_what_a_verifier_raises_passes_through_or_is_skipped(timeout, caplog):
    def raises():
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer"):
        call(VerifierPolicy("raise", timeout), raises)
    assert call(VerifierPolicy("skip", timeout), raises) is None
    assert "KeyError" in caplog.text


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_a_time_out_of_the_verifiers_own_is_told_as_it_is(timeout, caplog):
    """A judge behind a slow network raises one; on Python 3.11 and later it is asyncio's too."""

    async def slow_network():
        raise TimeoutError("read timed out")

    with pytest.raises(TimeoutError, match="read timed out") as caught:
        asyncio.run(VerifierPolicy("raise", timeout).call_async("f", slow_network, {}))
    assert not isinstance(caught.value, VerifierTimeout)
    assert asyncio.run(VerifierPolicy("skip", timeout).call_async("f", slow_network, {})) is None
    assert "read timed out" in caplog.text


def test_a_coroutine_that_is_late_is_cancelled():
    ended = []

    async def late():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def grade():
        assert await VerifierPolicy("skip", 0.1).call_async("f", late, {}) is None
        await asyncio.sleep(0)
        assert ended == [True]

    asyncio.run(grade())


def test_a_verifier_that_hangs_is_abandoned_after_its_time():
    forever, started = threading.Event(), time.perf_counter()
    with pytest.raises(VerifierTimeout, match=r"'f' has not returned within 0\.2 s.*on_verifier_error='skip'"):
        call(VerifierPolicy("raise", 0.2), forever.wait)
    assert call(VerifierPolicy("skip", 0.2), forever.wait) is None
    assert time.perf_counter() - started < 10.0
    assert asyncio.run(VerifierPolicy("skip", 0.2).call_async("f", _later, {"seconds": 3600})) is None
    with pytest.raises(VerifierTimeout):
        asyncio.run(VerifierPolicy("raise", 0.2).call_async("f", _later, {"seconds": 3600}))
    forever.set()


def test_what_a_verifier_says_too_late_reaches_nobody():
    logged, may_go_on, is_over = [], threading.Event(), threading.Event()

    def late(log_metric):
        log_metric("in time", 1.0)
        may_go_on.wait(30)
        log_metric("late", 1.0)
        is_over.set()
        return [1.0]

    assert call(VerifierPolicy("skip", 0.3), late, log_metric=lambda *words: logged.append(words)) is None
    may_go_on.set()
    assert is_over.wait(30)
    assert logged == [("in time", 1.0)]


def test_a_batch_of_a_verifier_that_is_given_up_ends_with_its_time():
    left = []

    async def later():
        left.append(await asyncio.to_thread(remaining_seconds, 900.0))

    assert remaining_seconds(900.0) == 900.0
    call(VerifierPolicy(timeout=30.0), lambda: left.append(remaining_seconds(900.0)))
    call(VerifierPolicy(timeout=30.0), lambda: left.append(remaining_seconds(None)))
    asyncio.run(VerifierPolicy(timeout=30.0).call_async("f", later, {}))
    assert len(left) == 3
    assert all(25.0 < seconds <= 31.0 for seconds in left)  # a second after it was given up
    assert call(VerifierPolicy(timeout=30.0), lambda: remaining_seconds(2.0)) == 2.0
    assert call(VerifierPolicy(), lambda: remaining_seconds(None)) is None


def test_a_verifier_with_a_limit_runs_on_the_device_of_its_process(monkeypatch):
    """Each thread of torch has a current device of its own, which begins as the first."""
    device = threading.local()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: getattr(device, "index", 0))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: setattr(device, "index", index))
    torch.accelerator.set_device_index(1)
    assert call(VerifierPolicy(timeout=30.0), torch.accelerator.current_device_index) == 1


def test_a_failed_function_marks_every_sample_until_the_next_batch():
    log = VerdictLog(VerifierPolicy("skip"))

    def fails_on_three(completions, **kwargs):
        if len(completions) == 3:
            raise RuntimeError("down")
        return [Verdict(1.0, "good")] * len(completions)

    graded = log.wrap(fails_on_three, 0)
    assert graded(completions=["a"] * 3) == [0.0] * 3
    assert log.skipped(3) == [True] * 3
    log.clear()
    assert graded(completions=["a"] * 2) == [1.0] * 2
    assert log.skipped(2) == [False] * 2


class Flaky:
    """A verifier that fails on the calls that are named."""

    __name__ = "flaky"

    def __init__(self, *fails_on: int) -> None:
        self.calls, self.fails_on = 0, fails_on

    def __call__(self, completions, answer, **kwargs):
        self.calls += 1
        if self.calls in self.fails_on:
            raise ConnectionError("the judge is away")
        return length_verdicts(completions, answer)


def test_a_run_goes_on_without_the_rollouts_of_a_failed_call_and_counts_them(
    make_model, make_config, tokenizer, dataset
):
    config = make_config(max_steps=3, on_verifier_error="skip")
    trainer = CreditTrainer(make_model(), Flaky(2), config, dataset, processing_class=tokenizer)
    weights = []

    def step(original=trainer.training_step):
        def run(*args, **kwargs):
            loss = original(*args, **kwargs)
            gradients = [p.grad.abs().sum().item() for p in trainer.model.parameters() if p.grad is not None]
            weights.append((loss.item(), sum(gradients)))
            return loss

        return run

    trainer.training_step = step()
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["credit/frac_verifier_skipped"] for row in logged] == [0.0, 1.0, 0.0]
    assert weights[1] == (0.0, 0.0)  # nothing of the second batch is in the loss
    assert all(gradient > 0.0 for _, gradient in (weights[0], weights[2]))
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_a_failed_function_beside_one_that_works_skips_the_rollouts_too(make_model, make_config, tokenizer, dataset):
    config = make_config(max_steps=1, on_verifier_error="skip")
    trainer = CreditTrainer(make_model(), [length_verdicts, Flaky(1)], config, dataset, processing_class=tokenizer)
    trainer.train()
    assert trainer.state.log_history[0]["credit/frac_verifier_skipped"] == 1.0
    assert trainer.state.log_history[0]["grad_norm"] == 0.0


def test_by_default_a_failing_verifier_ends_the_run(make_model, make_config, tokenizer, dataset):
    trainer = CreditTrainer(make_model(), Flaky(1), make_config(), dataset, processing_class=tokenizer)
    with pytest.raises(ConnectionError, match="judge"):
        trainer.train()


@pytest.mark.parametrize("options", [{"on_verifier_error": "ignore"}, {"verifier_timeout": 0.0}])
def test_the_policy_is_checked_at_construction(make_config, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        make_config(**options)
