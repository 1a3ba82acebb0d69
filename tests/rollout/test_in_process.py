"""Reward functions in processes of their own: what a thread limit cannot end, is ended; everything else passes."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from pathlib import Path

import pytest
import stubborn
import torch

from credit_trl import CreditTrainer, Verdict, in_process
from credit_trl.rollout.verdict import FAILED, VerdictLog, VerifierPolicy, VerifierTimeout

HANGING = {
    "matches": ["a" * 40 + "b"],
    "one_long_call": ["20000000000"],
    "slow_coroutine": ["hang"],
    "lazy": ["hang"],
}


def call(name, policy, completions, **columns):
    function = getattr(stubborn, name)
    return policy.call(name, function, {"completions": completions, **columns})


@pytest.mark.parametrize(("name", "completions"), HANGING.items())
def test_function_that_keeps_the_interpreter_lock_ends_at_the_timeout(name, completions):
    call(name, VerifierPolicy(), ["1"])  # starts the process
    began = time.monotonic()
    with pytest.raises(VerifierTimeout, match=f"'{name}' has not returned within 1 s"):
        call(name, VerifierPolicy("raise", 1.0), completions)
    assert call(name, VerifierPolicy("skip", 1.0), completions) is FAILED
    assert time.monotonic() - began < 2 * (1.0 + 2.0)
    assert call(name, VerifierPolicy("skip", 30.0), ["1"]) == [1.0 if name != "matches" else 0.0]


def test_processes_that_the_function_has_started_end_with_it(tmp_path):
    noted = tmp_path / "processes"
    assert call("starts_another", VerifierPolicy("skip", 3.0), [str(noted)]) is FAILED
    give_up = time.monotonic() + 5.0
    ids = noted.read_text().split()
    while any(is_running(pid) for pid in ids) and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not any(is_running(pid) for pid in ids)


def is_running(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_columns_loggers_verdicts_and_feedback_pass():
    log, logged = VerdictLog(VerifierPolicy(timeout=60.0)), []
    rewards = log.wrap(stubborn.graded, 0)(
        completions=["7", "8"],
        answer=["7", "7"],
        level=[1, 2],
        truncated=[False, True],
        trainer_state=object(),
        log_extra=print,
        log_metric=lambda name, value: logged.append((name, value)),
    )
    assert rewards == [1.0, 0.0]
    assert log.feedback(2)[0].startswith("['level', 'log_extra', 'truncated'] in ")
    assert logged == [("verifier_calls", 1.0), ("length", 1.0), ("length", 1.0)]


def test_one_process_answers_until_it_ends():
    def number():
        return stubborn.graded(["7"], answer=["7"])[0].feedback

    first = number()
    assert number() == first
    pid = int(first.rpartition(" ")[2])
    subprocess.run(["kill", "-9", str(pid)], check=True)
    with pytest.raises(RuntimeError, match=r"'graded' has ended with exit status -9. The next call starts another"):
        number()
    assert number() != first


@pytest.mark.parametrize(
    ("ending", "error", "message"),
    [
        ("raises", ZeroDivisionError, "division by zero"),
        ("raises its own", RuntimeError, "JudgeError: 503: busy"),  # it cannot be unpickled
        ("connection", ConnectionResetError, "by the judge"),
        ("leaves", RuntimeError, "SystemExit: 0"),
        ("no pickle", Exception, "pickle"),
        ("exits", RuntimeError, "exit status 3"),
        ("crashes", RuntimeError, "exit status -11"),
    ],
)
def test_errors_and_deaths_are_errors_of_the_call(ending, error, message):
    with pytest.raises(error, match=message) as caught:
        call("ends", VerifierPolicy("raise", 60.0), [ending])
    if ending.startswith("raises"):
        assert "stubborn.py" in "".join(getattr(caught.value, "__notes__", ["stubborn.py"]))
    assert call("ends", VerifierPolicy("skip", 60.0), [ending]) is FAILED
    assert call("ends", VerifierPolicy("raise", 60.0), ["fine"]) == [1.0]


def test_argument_that_cannot_be_pickled_is_an_error_and_starts_nothing():
    with pytest.raises(Exception, match="pickle"):
        stubborn.graded(["7"], answer=[(n for n in ())])


class Judge:
    def grade(self, completions, **columns):
        return [0.0] * len(completions)

    def __call__(self, completions, **columns):
        return [0.0] * len(completions)


def defined_inside():
    def inner(completions, **columns):
        return [0.0] * len(completions)

    return inner


@pytest.mark.parametrize(
    "function",
    [lambda completions: [0.0], defined_inside(), Judge(), Judge().grade, functools.partial(stubborn.graded)],
    ids=["lambda", "inner function", "object", "method", "partial"],
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
    (tmp_path / "fickle_verifier.py").write_text(
        "import sys\nfrom credit_trl import in_process\n"
        "if 'pytest' not in sys.modules: raise ImportError('no judge here')\n"
        "@in_process\ndef check(completions): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import fickle_verifier

    for _ in range(2):
        with pytest.raises(ImportError, match="no judge here"):
            fickle_verifier.check(completions=["x"])


ORPHAN = """
import os, signal, threading
import stubborn
from credit_trl.rollout.deadline import deadline_in
with deadline_in({seconds}):
    stubborn.matches_aloud([""])
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    stubborn.matches_aloud([{text!r}])
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("text", "seconds"), [("a" * 40 + "b", 1.0), ("", None)], ids=["busy", "idle"])
def test_process_of_a_killed_trainer_ends_at_the_deadline_or_at_once(text, seconds):
    path = [str(Path(stubborn.__file__).parent), *sys.path]
    source = f"import sys; sys.path[:] = {path!r}\n" + ORPHAN.format(text=text, seconds=seconds)
    # Returns when the process, which inherits standard output, has ended too.
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=30)
    assert ended.returncode == -9, ended.stderr
    assert not is_running(ended.stdout.split()[0])


def test_run_goes_on_by_on_verifier_error(make_model, make_config, tokenizer, dataset):
    """A response that hangs the verifier in one step of three costs that step, and no more."""
    steps = iter([["1"], ["20000000000"], ["1"]])

    def rewards(completions, **columns):
        given = next(steps) * len(completions)
        return [Verdict(reward, "Count.") for reward in stubborn.one_long_call(given[:1]) * len(completions)]

    stubborn.one_long_call(["1"])
    config = make_config(max_steps=3, on_verifier_error="skip", verifier_timeout=2.0)
    trainer = CreditTrainer(make_model(), rewards, config, dataset, processing_class=tokenizer)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["credit/frac_verifier_skipped"] for row in logged] == [0.0, 1.0, 0.0]
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
