"""Reward functions in processes of their own: what a thread limit cannot end, is ended; everything else passes."""

import builtins
import functools
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import stubborn

from credit_trl import in_process
from credit_trl.cli.data import import_function
from credit_trl.rollout.verdict import FAILED, VerdictLog, VerifierPolicy, VerifierTimeout, deadline_in
from tables import tables_of

TABLES = tables_of(__file__)


def call(policy, deed, name="does"):
    return policy.call(name, getattr(stubborn, name), {"completions": [deed]})


HANGING = [("does", "regular expression"), ("does", "long call of C"), ("blocks_its_event_loop", ""), ("yields", "")]


@pytest.mark.parametrize(("name", "deed"), HANGING)
def test_function_that_keeps_the_interpreter_lock_ends_at_the_timeout(name, deed):
    call(VerifierPolicy(), "fine", name)  # starts the process
    began = time.monotonic()
    with pytest.raises(VerifierTimeout, match=f"'{name}' has not returned within 1 s"):
        call(VerifierPolicy("raise", 1.0), deed, name)
    assert time.monotonic() - began < 60.0  # the function runs for minutes
    assert call(VerifierPolicy("skip", 600.0), "fine", name) == [1.0]


def has_ended(pid):
    give_up, stat = time.monotonic() + 60.0, Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def test_processes_that_the_function_has_started_end_with_it(capfd):
    assert call(VerifierPolicy("skip", 2.0), "processes") is FAILED
    assert all(map(has_ended, capfd.readouterr().out.split()))


def test_columns_verdicts_metrics_and_feedback_pass():
    log, logged = VerdictLog(VerifierPolicy(timeout=60.0)), []
    rewards = log.wrap(import_function("stubborn.graded", "--reward_funcs"), 0)(
        completions=["7", "8"],
        answer=["7", "7"],
        level=[1, 2],
        trainer_state=object(),
        log_extra=print,
        log_metric=lambda name, value: logged.append((name, value)),
    )
    assert rewards == [1.0, 0.0]
    assert log.feedback(2)[0].startswith("['level'] in ")
    assert logged == [("length", 1.0), ("length", 1.0)]
    assert call(VerifierPolicy(), "view") == [1.0]  # which has no pickle


def test_one_process_answers_until_it_ends():
    numbers = [stubborn.graded(["7"], answer=["7"])[0].feedback for _ in range(2)]
    assert numbers[0] == numbers[1]
    subprocess.run(["kill", "-9", numbers[0].rpartition(" ")[2]], check=True)
    with pytest.raises(RuntimeError, match=r"'graded' has ended with exit status -9. The next call starts another"):
        stubborn.graded(["7"], answer=["7"])
    assert stubborn.graded(["7"], answer=["7"])[0].feedback != numbers[0]


@pytest.mark.parametrize("deed", TABLES["endings"])
def test_errors_and_deaths_are_errors_of_the_call(deed):
    error, message = TABLES["endings"][deed]
    with pytest.raises(getattr(builtins, error), match=message) as caught:
        call(VerifierPolicy("raise", 60.0), deed)
    if error != "RuntimeError" and deed != "no pickle":
        assert "stubborn.py" in caught.value.__notes__[0]
    assert call(VerifierPolicy("skip", 60.0), deed) is FAILED
    assert call(VerifierPolicy("raise", 60.0), "fine") == [1.0]


def test_call_after_an_interrupt_gets_its_own_answer():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.7, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        stubborn.does(["slow"])
    signal.signal(signal.SIGINT, handler)
    assert stubborn.does(["fine"]) == [1.0]


def test_argument_that_cannot_be_pickled_is_an_error():
    with pytest.raises(TypeError, match="pickle"):
        stubborn.graded(["7"], answer=(n for n in ()))


class Judge:
    def grade(self, completions, **columns):
        return [0.0] * len(completions)


def defined_inside():
    def inner(completions, **columns):
        return [0.0] * len(completions)

    return inner


@pytest.mark.parametrize(
    "function", [lambda completions: [0.0], defined_inside(), Judge(), Judge().grade, functools.partial(max)]
)
def test_function_without_a_name_to_import_is_refused(function):
    with pytest.raises(TypeError, match=r"cannot import by its name.*top level of a module"):
        in_process(function)


def test_function_of_the_main_script_is_refused(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from credit_trl import in_process\n@in_process\ndef check(completions): ...\n")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert "TypeError: `in_process` got <function check" in ended.stderr


def test_module_that_fails_to_import_is_an_error_of_each_call(tmp_path, monkeypatch):
    (tmp_path / "fickle_verifier.py").write_text(TABLES["fickle"])
    monkeypatch.syspath_prepend(str(tmp_path))
    import fickle_verifier

    for _ in range(2):
        with pytest.raises(ImportError, match="no judge here"):
            fickle_verifier.check(completions=["x"])


def test_large_request_during_a_slow_import_ends_at_the_deadline(tmp_path, monkeypatch):
    (tmp_path / "slow_verifier.py").write_text(TABLES["slow"])
    monkeypatch.syspath_prepend(str(tmp_path))
    import slow_verifier

    monkeypatch.setenv("SLOW_IMPORT", "60")
    with deadline_in(0.0), pytest.raises(TimeoutError):
        slow_verifier.check(completions=["x" * 4_000_000])


ORPHAN = (Path(__file__).parent / "cases" / "orphan.txt").read_text()


@pytest.mark.parametrize(("deed", "seconds"), [("regular expression", 2.0), ("fine", None)], ids=["busy", "idle"])
def test_process_of_a_killed_trainer_ends_at_the_deadline_or_at_once(deed, seconds):
    path = [str(Path(stubborn.__file__).parent), *sys.path]
    source = ORPHAN.format(path=path, deed=deed, seconds=seconds)
    # Returns when the process, which inherits standard output, has ended too.
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == -9, ended.stderr
    assert all(map(has_ended, ended.stdout.split()))
