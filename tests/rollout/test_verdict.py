"""Verdict: validation and representation. VerdictLog: rewards for TRL, collected feedback."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch

from credit_trl import Verdict
from credit_trl.rollout.verdict import VerdictLog, VerifierPolicy

REFUSED = [
    (lambda: Verdict("1.0"), "number or None, got str"),
    (lambda: Verdict(1.0, b"bytes"), "must be text or None, got bytes"),
    *(
        (partial(Verdict, 1.0, "x", {name: 1.0}), f"{name!r}, a name that the trainer .* Rename it")
        for name in ("reward", "truncated", "avg@4", "credit/s_mean", "eval_format")
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_a_malformed_verdict_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_verdict_converts_to_its_reward():
    assert float(Verdict(0.5, "x")) == 0.5
    assert math.isnan(float(Verdict(None)))
    assert Verdict(1.0, "x", {"verifier_reward": 1.0, "rewarding": 0.0})


def test_wrap_returns_floats_and_keeps_feedback_in_order():
    log, logged = VerdictLog(), []
    verdicts = [Verdict(1, "first", {"m": 0.5, "n": math.nan}), Verdict(None), 0.25]
    graded = log.wrap(lambda **_: verdicts, 0)
    plain = log.wrap(lambda **_: [Verdict(0, "second"), Verdict(0, "only"), None], 1)
    assert plain() == [0, 0, None]
    assert graded(log_metric=lambda name, value: logged.append((name, value))) == [1, None, 0.25]
    assert log.feedback(3) == ["first\n\nsecond", "only", None]
    assert logged == [("m", 0.5)]  # without the value that is not finite
    log.clear()
    assert log.feedback(2) == [None, None]


def test_feedback_on_turns_is_joined_by_turn():
    log = VerdictLog()
    for position, texts in enumerate([{0: "a", 2: "c"}, {0: "b"}, {0: "a"}]):
        verdicts = [Verdict(0.0, turn_feedback=texts), Verdict(0.0, turn_feedback={1: " "})]
        log.wrap(lambda verdicts=verdicts, **_: verdicts, position)()
    assert log.turn_feedback(2) == [{0: "a\n\nb", 2: "c"}, {}]


def graded(reward_func, completions=("a", "b"), **columns):
    """Rewards of a wrapped function."""
    return VerdictLog().wrap(reward_func, 0)(completions=list(completions), **columns)


MALFORMED = [
    *((bad, f"'func' returned a {type(bad).__name__} instead of") for bad in (Verdict(1.0), 1.0, {}, "10", {0.0})),
    (itertools.repeat(1.0), "'func' returned more than 2 elements for 2 completions"),
    (([1.0, 0.0], ["f", "g"]), "'func' returned a list for completion 0"),
    ([(1.0, "f"), (0.0, "g")], "'func' returned a tuple for completion 0"),
    ([1.0, {"reward": 1.0}], "'func' returned a dict for completion 1"),
    (np.ones((2, 1)), "'func' returned a ndarray for completion 0"),
    (torch.ones(2, 3), "'func' returned a Tensor for completion 0"),
    ([1.0, math.inf], "'func' returned the reward inf for completion 1"),
]


@pytest.mark.parametrize(("result", "message"), MALFORMED)
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_malformed_results_are_errors_that_name_the_function(result, message, on_error):
    def func(**kwargs):
        return result

    with pytest.raises((TypeError, ValueError), match=message):
        VerdictLog(VerifierPolicy(on_error)).wrap(func, 0)(completions=["a", "b"])


@pytest.mark.parametrize(
    "result", [(0.5, None), np.array([0.5, 1.0]), torch.tensor([0.5, 1.0]), (Verdict(r) for r in (0.5, 1.0))]
)
def test_sequences_of_numbers_verdicts_and_none_are_accepted(result):
    assert graded(lambda **_: result) in ([0.5, 1.0], [0.5, None])
