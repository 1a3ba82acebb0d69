"""Where a step's time goes, by a clock that the test sets."""

from __future__ import annotations

import pytest

from credit_trl.timing import StageClock


@pytest.fixture
def now(monkeypatch):
    time = [0.0]
    monkeypatch.setattr("credit_trl.timing.time.perf_counter", lambda: time[0])
    return time


def test_the_stage_around_others_has_only_the_time_that_they_have_not(now):
    clock = StageClock()
    with clock.around("update"):
        now[0] += 1
        with clock.stage("rollout"):
            now[0] += 10
        with clock.stage("scores"):
            now[0] += 100
        now[0] += 1000
    assert dict(clock.seconds) == {"rollout": 10, "scores": 100, "update": 1001}


def test_a_report_is_a_mean_over_steps_and_starts_anew(now):
    clock = StageClock()
    with clock.stage("rollout"):
        now[0] += 12
    assert clock.report(4) == {"credit/seconds_rollout": 3}
    with clock.stage("rollout"):
        now[0] += 6
    assert clock.report(6) == {"credit/seconds_rollout": 3}
    assert clock.report(6) == {}


def test_a_stage_that_fails_is_timed_too(now):
    clock = StageClock()

    def fail():
        with clock.around("update"), clock.stage("verdict"):
            now[0] += 2
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert dict(clock.seconds) == {"verdict": 2, "update": 0}
