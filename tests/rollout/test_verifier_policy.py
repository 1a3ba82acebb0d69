"""Error and timeout policy for reward functions, in VerifierPolicy, VerdictLog and the trainer."""

import asyncio
import itertools
import re
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from credit_trl.rollout.batch import mask_skipped_rewards, mask_skipped_tokens
from credit_trl.rollout.verdict import FAILED, VerdictLog, VerifierPolicy, VerifierTimeout, remaining_seconds
from tiny import length_verdicts


def call(policy, reward_func, **arguments):
    """Call a plain or an async function under a policy."""
    if asyncio.iscoroutinefunction(reward_func):
        return asyncio.run(policy.call_async("f", reward_func, arguments))
    return policy.call("f", reward_func, arguments)


RELEASED = threading.Event()


@pytest.fixture(autouse=True)
def released():
    """Threads that a policy has abandoned end with their test."""
    RELEASED.clear()
    yield
    RELEASED.set()


def forever():
    RELEASED.wait()


async def forever_async():
    await asyncio.sleep(3600)


def fails():
    raise TimeoutError("read timed out")


async def fails_async():
    raise TimeoutError("read timed out")


def exits():
    sys.exit(3)


async def exits_async():
    sys.exit(3)


@pytest.mark.parametrize("timeout", [None, 30.0], ids=["unlimited", "limited"])
@pytest.mark.parametrize("func", [fails, fails_async, exits, exits_async])
def test_an_error_propagates_or_is_skipped(func, timeout, caplog):
    """A judge behind a slow network may raise a TimeoutError; since Python 3.11 it equals asyncio's class."""
    says = "read timed out" if func in (fails, fails_async) else "'f' called `sys.exit(3)`"
    with pytest.raises((TimeoutError, RuntimeError), match=re.escape(says)) as caught:
        call(VerifierPolicy("raise", timeout), func)
    assert not isinstance(caught.value, VerifierTimeout)
    assert call(VerifierPolicy("skip", timeout), func) is FAILED
    assert says in caplog.text
    assert call(VerifierPolicy("skip", timeout), lambda n: [n], n=3) == [3]


@pytest.mark.parametrize("func", [forever, forever_async])
def test_a_hanging_verifier_is_abandoned_after_the_timeout(func):
    with pytest.raises(VerifierTimeout, match=r"'f' has not returned within 0\.2 s.*on_verifier_error='skip'"):
        call(VerifierPolicy("raise", 0.2), func)
    assert call(VerifierPolicy("skip", 0.2), func) is FAILED


def one_long_call():
    """Keeps the interpreter lock, so that the thread which waits cannot run when the timeout comes."""
    return [float(sum(itertools.repeat(1, 60_000_000)))]


async def blocking_async():
    time.sleep(0.5)
    return [1.0]


def yields_forever():
    forever()
    yield 1.0


@pytest.mark.parametrize("func", [one_long_call, blocking_async, yields_forever])
def test_a_late_result_is_rejected(func):
    with pytest.raises(VerifierTimeout, match="has not returned within"):
        call(VerifierPolicy("raise", 0.1), func)
    assert call(VerifierPolicy("skip", 0.1), func) is FAILED


def test_late_coroutine_is_cancelled():
    async def grade():
        assert await VerifierPolicy("skip", 0.1).call_async("f", forever_async, {}) is FAILED
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(grade())


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

    log = VerdictLog(VerifierPolicy("skip", 2.0))
    graded = log.wrap(verifier, 0)
    for completion in ("late", "fails", "fine"):
        loggers = {
            "log_extra": lambda **arguments: logged.append(arguments),
            "log_metric": lambda *arguments: logged.append(arguments),
        }
        graded(completions=[completion], **loggers)
    may_continue.set()
    assert is_over.wait(30)
    assert logged == [{"column": "seen", "values": ["fine"]}]


def test_deadline_follows_verifier_timeout():
    async def later():
        return await asyncio.to_thread(remaining_seconds, 900.0)

    policy = VerifierPolicy(timeout=500.0)
    seconds_left = [call(policy, remaining_seconds, limit=900.0), call(policy, remaining_seconds), call(policy, later)]
    assert all(400.0 < seconds <= 501.0 for seconds in seconds_left)  # one second after the timeout
    assert call(policy, lambda: remaining_seconds(2.0)) == 2.0
    assert call(VerifierPolicy(), lambda: remaining_seconds(None)) is None
    assert remaining_seconds(900.0) == 900.0


def test_verifier_thread_uses_device_of_process(monkeypatch):
    """torch stores the current device per thread, at first device 0."""
    device = threading.local()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: getattr(device, "index", 0))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: setattr(device, "index", index))
    torch.accelerator.set_device_index(1)
    assert call(VerifierPolicy(timeout=30.0), torch.accelerator.current_device_index) == 1


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


def test_skipped_rollouts_are_counted_and_do_not_train(make_trainer, recwarn):
    verifiers = [length_verdicts, Flaky(2)]  # one that fails skips the rollouts
    trainer = make_trainer(verifiers, max_steps=3, on_verifier_error="skip")
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["credit/frac_verifier_skipped"] for row in logged] == [0.0, 1.0, 0.0]
    assert [(row["loss"], row["grad_norm"]) != (0.0, 0.0) for row in logged] == [True, False, True]
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert not [w for w in recwarn if "has a teacher" in str(w.message)]


def test_tokens_of_a_skipped_process_are_not_counted():
    """The other of two processes has three tokens, and its verifier fails or does not."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    tool_mask = torch.tensor([[1, 0, 1], [1, 1, 1]])

    def gather(tensor):
        return torch.stack([tensor, torch.tensor(3)])

    for is_skipped, expected in ((False, 4 + 3), (True, 3)):
        output = {"completion_mask": mask, "tool_mask": tool_mask, "num_items_in_batch": torch.tensor(7)}
        mask_skipped_tokens(output, is_skipped, SimpleNamespace(gather=gather))
        assert output["num_items_in_batch"] == expected
        assert torch.equal(output["completion_mask"], mask * (not is_skipped))


def test_rewards_of_a_skipped_process_are_missing():
    rewards = torch.arange(8.0).view(4, 2)
    accelerator = SimpleNamespace(num_processes=2, gather=lambda own: torch.cat([torch.tensor([False, False]), own]))
    assert mask_skipped_rewards(rewards, True, accelerator) == 0.5
    assert torch.equal(rewards.isnan().any(dim=1), torch.tensor([False, False, True, True]))
    assert torch.equal(rewards[:2], torch.arange(4.0).view(2, 2))


def test_failing_verifier_ends_the_run_by_default(make_trainer):
    with pytest.raises(ConnectionError, match="judge"):
        make_trainer(Flaky(1)).train()
