"""Error and timeout policy for reward functions, in VerifierPolicy, VerdictLog and the trainer."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from credit_trl import CreditTrainer, Verdict
from credit_trl.rollout.deadline import remaining_seconds
from credit_trl.rollout.verdict import FAILED, VerdictLog, VerifierPolicy, VerifierTimeout
from tiny import length_verdicts


def call(policy, reward_func, **arguments):
    return policy.call("f", reward_func, arguments)


def test_fast_verifier_returns_its_result():
    assert call(VerifierPolicy(timeout=30.0), lambda n: [n], n=3) == [3]
    assert asyncio.run(VerifierPolicy(timeout=30.0).call_async("f", _later, {"seconds": 0.0})) == ["late"]


async def _later(seconds):
    await asyncio.sleep(seconds)
    return ["late"]


@pytest.mark.parametrize("timeout", [None, 30.0], ids=["unlimited", "in a thread"])
def test_verifier_error_propagates_or_is_skipped(timeout, caplog):
    def raises():
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer"):
        call(VerifierPolicy("raise", timeout), raises)
    assert call(VerifierPolicy("skip", timeout), raises) is FAILED
    assert "KeyError" in caplog.text


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_verifiers_own_timeout_error_is_preserved(timeout, caplog):
    """A judge behind a slow network may raise one; since Python 3.11 it equals asyncio's class."""

    async def slow_network():
        raise TimeoutError("read timed out")

    with pytest.raises(TimeoutError, match="read timed out") as caught:
        asyncio.run(VerifierPolicy("raise", timeout).call_async("f", slow_network, {}))
    assert not isinstance(caught.value, VerifierTimeout)
    assert asyncio.run(VerifierPolicy("skip", timeout).call_async("f", slow_network, {})) is FAILED
    assert "read timed out" in caplog.text


def test_late_coroutine_is_cancelled():
    ended = []

    async def late():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def grade():
        assert await VerifierPolicy("skip", 0.1).call_async("f", late, {}) is FAILED
        await asyncio.sleep(0)
        assert ended == [True]

    asyncio.run(grade())


def test_hanging_verifier_is_abandoned_after_timeout():
    forever = threading.Event()
    with pytest.raises(VerifierTimeout, match=r"'f' has not returned within 0\.2 s.*on_verifier_error='skip'"):
        call(VerifierPolicy("raise", 0.2), forever.wait)
    assert call(VerifierPolicy("skip", 0.2), forever.wait) is FAILED
    assert asyncio.run(VerifierPolicy("skip", 0.2).call_async("f", _later, {"seconds": 3600})) is FAILED
    with pytest.raises(VerifierTimeout):
        asyncio.run(VerifierPolicy("raise", 0.2).call_async("f", _later, {"seconds": 3600}))
    forever.set()


def test_logs_of_a_failed_or_late_call_are_dropped():
    logged, may_continue, is_over = [], threading.Event(), threading.Event()

    def verifier(completions, log_extra, log_metric):
        values = list(completions)
        log_extra(column="seen", values=values)
        values.clear()
        if completions == ["late"]:
            may_continue.wait(30)
            log_metric("late", 1.0)
            is_over.set()
        elif completions == ["fails"]:
            raise RuntimeError("down")
        return [1.0] * len(completions)

    log = VerdictLog(VerifierPolicy("skip", 0.3))
    graded = log.wrap(verifier, 0)
    for completion in ("late", "fails", "fine"):
        loggers = {"log_extra": lambda **own: logged.append(own), "log_metric": lambda *own: logged.append(own)}
        graded(completions=[completion], **loggers)
    may_continue.set()
    assert is_over.wait(30)
    assert logged == [{"column": "seen", "values": ["fine"]}]


def test_deadline_follows_verifier_timeout():
    left = []

    async def later():
        left.append(await asyncio.to_thread(remaining_seconds, 900.0))

    assert remaining_seconds(900.0) == 900.0
    call(VerifierPolicy(timeout=30.0), lambda: left.append(remaining_seconds(900.0)))
    call(VerifierPolicy(timeout=30.0), lambda: left.append(remaining_seconds(None)))
    asyncio.run(VerifierPolicy(timeout=30.0).call_async("f", later, {}))
    assert len(left) == 3
    assert all(25.0 < seconds <= 31.0 for seconds in left)  # one second after the timeout
    assert call(VerifierPolicy(timeout=30.0), lambda: remaining_seconds(2.0)) == 2.0
    assert call(VerifierPolicy(), lambda: remaining_seconds(None)) is None


def test_verifier_thread_uses_device_of_process(monkeypatch):
    """torch stores the current device per thread, at first device 0."""
    device = threading.local()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: getattr(device, "index", 0))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: setattr(device, "index", index))
    torch.accelerator.set_device_index(1)
    assert call(VerifierPolicy(timeout=30.0), torch.accelerator.current_device_index) == 1


def test_failed_function_skips_all_samples_of_the_batch():
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
    """A verifier that fails on the given calls."""

    __name__ = "flaky"

    def __init__(self, *fails_on: int) -> None:
        self.calls, self.fails_on = 0, fails_on

    def __call__(self, completions, answer, **kwargs):
        self.calls += 1
        if self.calls in self.fails_on:
            raise ConnectionError("the judge is unavailable")
        return length_verdicts(completions, answer)


def test_skipped_rollouts_are_counted_and_run_continues(make_model, make_config, tokenizer, dataset):
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
    assert weights[1] == (0.0, 0.0)  # the second batch does not contribute to the loss
    assert all(gradient > 0.0 for _, gradient in (weights[0], weights[2]))
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_one_failed_function_of_two_skips_the_rollouts(make_model, make_config, tokenizer, dataset):
    config = make_config(max_steps=1, on_verifier_error="skip")
    trainer = CreditTrainer(make_model(), [length_verdicts, Flaky(1)], config, dataset, processing_class=tokenizer)
    trainer.train()
    assert trainer.state.log_history[0]["credit/frac_verifier_skipped"] == 1.0
    assert trainer.state.log_history[0]["grad_norm"] == 0.0


def test_failed_verifier_is_not_reported_as_missing_feedback(make_model, make_config, tokenizer, dataset, recwarn):
    config = make_config(max_steps=1, on_verifier_error="skip")
    CreditTrainer(make_model(), Flaky(1), config, dataset, processing_class=tokenizer).train()
    assert not [w for w in recwarn if "has a teacher" in str(w.message)]


def test_failing_verifier_ends_the_run_by_default(make_model, make_config, tokenizer, dataset):
    trainer = CreditTrainer(make_model(), Flaky(1), make_config(), dataset, processing_class=tokenizer)
    with pytest.raises(ConnectionError, match="judge"):
        trainer.train()


@pytest.mark.parametrize("options", [{"on_verifier_error": "ignore"}, {"verifier_timeout": 0.0}])
def test_invalid_policy_options_are_refused(make_config, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        make_config(**options)
