"""Times of a running program: processor time, and waits for processors that others used."""

import pytest
from observing import parametrize

from credit_trl.sandbox.observe import ProcessorTimes
from credit_trl.sandbox.protocol import Program
from credit_trl.sandbox.running import RunningProgram


def running_program() -> RunningProgram:
    return RunningProgram(0, Program("pass"), pid=1, pipes=(2, 3, 4), group=None, started_at=0.0)


@parametrize("total ran waited delayed", "waits")
def test_waits_for_own_threads_are_no_delay(total: float, ran: dict, waited: dict, delayed: float) -> None:
    run = running_program()
    run.add_times(ProcessorTimes(5.0, dict.fromkeys(ran, 2.0)), now=0.0)
    run.add_times(ProcessorTimes(5.0 + total, {name: 2.0 + ran[name] + waited[name] for name in ran}), now=1.0)
    assert run.delayed == pytest.approx(delayed)
    assert run.is_starved == (total < 0.2)


def test_wait_longer_than_the_interval_of_samples_is_a_delay() -> None:
    run = running_program()
    for now, total, active in ((0.0, 0.0, 0.0), (0.05, 0.0, 0.0), (0.1, 0.0, 0.0), (0.2, 0.02, 0.2)):
        run.add_times(ProcessorTimes(total, {"a": active}), now)
    assert run.delayed == pytest.approx(0.18)


def test_processor_seconds_keep_their_maximum() -> None:
    """A process that nobody has waited for takes its processor time with it."""
    run = running_program()
    for total in (1.0, 4.0, 2.0, 3.0):
        run.add_times(ProcessorTimes(total, {}), now=total)
    assert run.cpu_seconds == 4.0
