"""Verdict: validation and representation. VerdictLog: rewards for TRL, collected feedback."""

from __future__ import annotations

import asyncio
import math

import pytest

from credit_trl import Verdict
from credit_trl.rollout.verdict import VerdictLog, join_feedback


@pytest.mark.parametrize("feedback", [b"bytes", ["a", "list"], 3, {"text": "x"}])
def test_feedback_that_is_not_text_is_refused(feedback):
    with pytest.raises(TypeError, match=r"must be text or None.*json.dumps"):
        Verdict(1.0, feedback)


def test_reward_that_is_not_a_number_is_refused():
    with pytest.raises(TypeError, match="number or None, got str"):
        Verdict("1.0")


@pytest.mark.parametrize("metrics", [{"passed": "half"}, {"passed": None}, {0: 0.5}])
def test_invalid_metrics_are_refused(metrics):
    with pytest.raises(TypeError, match=r"names to numbers, as in .*; got "):
        Verdict(1.0, "x", metrics)


def test_metrics_and_turn_feedback_must_be_mappings():
    with pytest.raises(TypeError, match=r"Verdict.metrics must be a mapping, got float"):
        Verdict(1.0, "x", 0.5)
    with pytest.raises(TypeError, match=r"Verdict.turn_feedback must be a mapping, got list"):
        Verdict(1.0, "x", turn_feedback=["Look."])


def test_verdict_converts_to_its_reward():
    assert float(Verdict(0.5, "x")) == 0.5
    assert math.isnan(float(Verdict(None)))


@pytest.mark.parametrize(
    ("verdict", "shown"),
    [
        (Verdict(0.0), "Verdict(reward=0.0)"),
        (Verdict(None, ""), "Verdict(reward=None)"),
        (Verdict(1.0, "x", {"n": 0.0}), "Verdict(reward=1.0, feedback='x', metrics={'n': 0.0})"),
        (Verdict(0.5, turn_feedback={2: "y"}), "Verdict(reward=0.5, turn_feedback={2: 'y'})"),
    ],
)
def test_repr_shows_reward_and_non_empty_fields(verdict, shown):
    assert repr(verdict) == shown


def test_wrap_returns_floats_and_keeps_feedback_in_order():
    log, logged = VerdictLog(), []
    graded = log.wrap(lambda **_: [Verdict(1, "first", {"m": 0.5}), Verdict(None), 0.25], 0)
    plain = log.wrap(lambda **_: [Verdict(0, "second"), Verdict(0, "only"), None], 1)
    assert plain() == [0, 0, None]
    assert graded(log_metric=lambda name, value: logged.append((name, value))) == [1, None, 0.25]
    assert log.feedback(3) == ["first\n\nsecond", "only", None]
    assert logged == [("m", 0.5)]
    log.clear()
    assert log.feedback(2) == [None, None]


def test_wrapped_coroutine_functions_stay_coroutines():
    class Judge:
        async def __call__(self, **_):
            return [Verdict(1, "async")]

    async def judge(**_):
        return [Verdict(0, "too")]

    for position, func in enumerate((Judge(), judge)):
        log = VerdictLog()
        wrapped = log.wrap(func, position)
        assert asyncio.iscoroutinefunction(wrapped)
        asyncio.run(wrapped())
        assert log.feedback(1)[0] in ("async", "too")


def test_join_feedback_drops_blanks_and_repetitions():
    assert join_feedback([None, " ", "a", "b", "a"]) == "a\n\nb"
    assert join_feedback([None, "", "\n"]) is None
