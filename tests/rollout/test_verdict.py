"""Verdict: validation and representation. VerdictLog: rewards for TRL, collected feedback."""

from __future__ import annotations

import asyncio
import math
from functools import partial

import numpy as np
import pytest
import torch

from credit_trl import Verdict
from credit_trl.rollout.verdict import VerdictLog, VerifierPolicy, join_feedback


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


@pytest.mark.parametrize("name", ["reward", "truncated", "avg@4", "credit/s_mean", "eval_format"])
def test_names_that_are_logged_already_are_refused(name):
    with pytest.raises(ValueError, match=f"{name!r}, a name that the trainer .* Rename it"):
        Verdict(1.0, "x", {name: 1.0})
    assert Verdict(1.0, "x", {f"verifier_{name}": 1.0, "rewarding": 0.0})


def test_metrics_that_are_not_finite_are_not_logged():
    logged = []
    verdicts = [Verdict(1.0, None, {"m": math.nan, "n": 1.0}), Verdict(0.0, None, {"m": 0.5})]
    graded(lambda **_: verdicts, log_metric=lambda *pair: logged.append(pair))
    assert logged == [("n", 1.0), ("m", 0.5)]


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


def graded(reward_func, completions=("a", "b"), **columns):
    """Rewards of a wrapped function."""
    return VerdictLog().wrap(reward_func, 0)(completions=list(completions), **columns)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "'func' returned None; is a `return` missing"),
        (Verdict(1.0), "'func' returned a Verdict instead of a list"),
        (1.0, "'func' returned a float instead of a list"),
        ({"a": 1.0, "b": 0.0}, "'func' returned a dict instead of a list"),
        ("10", "'func' returned a str instead of a list"),
        ([1.0], "'func' returned 1 elements for 2 completions"),
        (([1.0, 0.0], ["f", "g"]), "'func' returned a list for completion 0"),
        ([(1.0, "f"), (0.0, "g")], "'func' returned a tuple for completion 0"),
        ([1.0, {"reward": 1.0}], "'func' returned a dict for completion 1"),
        (np.ones((2, 1)), r"'func' returned a ndarray of shape \(1,\) for completion 0.*squeeze"),
        (torch.ones(2, 3), r"'func' returned a Tensor of shape \(3,\) for completion 0.*squeeze"),
    ],
    ids=["None", "Verdict", "float", "dict", "str", "short", "tuple of lists", "tuples", "dicts", "array", "tensor"],
)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_malformed_results_are_errors_that_name_the_function(result, message, on_error):
    def func(**kwargs):
        return result

    log = VerdictLog(VerifierPolicy(on_error))
    with pytest.raises((TypeError, ValueError), match=message):
        log.wrap(func, 0)(completions=["a", "b"])


def test_sequences_of_numbers_verdicts_and_none_are_accepted():
    assert graded(lambda **_: (1.0, None)) == [1.0, None]
    assert graded(lambda **_: np.array([0.5, 1.0])) == [0.5, 1.0]
    assert graded(lambda **_: torch.tensor([0.5, 1.0])) == [0.5, 1.0]
    assert graded(lambda **_: (Verdict(r) for r in (0.0, 1.0))) == [0.0, 1.0]


def test_truncated_reaches_only_functions_that_accept_it():
    def strict(completions):
        return [0.0] * len(completions)

    def named(completions, truncated):
        return [float(t) for t in truncated]

    columns = {"truncated": [True, False]}
    assert graded(strict, **columns) == [0.0, 0.0]
    assert graded(named, **columns) == [1.0, 0.0]
    assert graded(lambda completions, **kw: [float(t) for t in kw["truncated"]], **columns) == [1.0, 0.0]


def test_partial_of_an_async_callable_is_awaited():
    class Judge:
        async def __call__(self, completions, scale):
            return [scale] * len(completions)

    wrapped = VerdictLog().wrap(partial(Judge(), scale=2.0), 0)
    assert asyncio.run(wrapped(completions=["a", "b"])) == [2.0, 2.0]
