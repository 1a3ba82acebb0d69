"""Functions of the user change neither their arguments in the trainer nor the state of the process."""

import json
import os
import random
import re
import signal
import sys  # noqa: F401 - used by the cases
import threading

import numpy as np
import pytest
import torch
from transformers import set_seed

from credit_trl.rollout.verdict import VerdictLog, VerifierPolicy
from credit_trl.sandbox.user_code import copied, explained_errors, undisturbed
from tables import tables_of
from tiny import length_verdicts

TABLES = tables_of(__file__)


def editing(code: str):
    """A verifier that runs a line of Python with its arguments after it has graded."""

    def verifier(prompts, completions, completion_ids, answer, trainer_state, **columns):
        verdicts = length_verdicts(completions, answer)
        exec(code, globals() | locals())
        return verdicts

    return verifier


def log_of(trainer) -> list:
    """What two steps log, without times."""
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    names = [name for name in rows[0] if "second" not in name and "time" not in name]
    return [(name, row.get(name)) for row in rows for name in names]


@pytest.fixture(scope="module")
def unedited():
    return {}


@pytest.mark.parametrize("code", TABLES["edits"].splitlines())
def test_edits_of_a_reward_function_do_not_reach_the_run(make_trainer, unedited, code):
    if not unedited:
        unedited["log"] = log_of(make_trainer(editing("pass")))
    assert log_of(make_trainer(editing(code))) == unedited["log"]


@pytest.mark.parametrize("code", TABLES["source_edits"].splitlines())
def test_edits_of_a_source_do_not_reach_the_teacher(make_trainer, monkeypatch, tmp_path, code):
    (tmp_path / f"source_{abs(hash(code))}.py").write_text(TABLES["source"].format(code=code))
    monkeypatch.syspath_prepend(tmp_path)
    with_edits = log_of(make_trainer(contrastive_source=f"source_{abs(hash(code))}:edits", max_steps=1))
    without = log_of(make_trainer(contrastive_source=f"source_{abs(hash(code))}:leaves", max_steps=1))
    assert with_edits == without


def test_edits_of_a_token_weight_do_not_reach_the_loss(make_trainer):
    def edits(credit):
        for name in ("teacher_logps", "generic_logps", "specific", "delta_v", "entropy", "advantages", "mask"):
            getattr(credit, name).zero_()
        return leaves(credit)

    def leaves(credit):
        return {"distillation": torch.ones_like(credit.entropy)}

    assert log_of(make_trainer(token_weight=edits)) == log_of(make_trainer(token_weight=leaves))


def test_functions_of_a_task_do_not_see_the_edits_of_each_other():
    def edits(completions, answer):
        completions[0].clear()
        answer.clear()
        return [0.0]

    log = VerdictLog()
    arguments = {"completions": [[{"role": "assistant", "content": "a"}]], "answer": ["a"]}
    log.wrap(edits, 0)(**arguments)
    assert log.wrap(length_verdicts, 1)(**arguments) == [1.0]


def test_a_copy_keeps_what_is_shared_and_what_cannot_be_copied():
    image, lock = np.zeros(2), threading.Lock()
    copies = copied({"a": [image], "b": [image], "locks": [lock], "environments": [image]})
    assert copies["a"][0] is copies["b"][0] is not image
    assert copies["locks"][0] is lock
    assert copies["environments"][0] is image


def values() -> list:
    settings = [os.getcwd(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), np.geterr()]
    handlers = [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGTERM)]
    return [*settings, json.dumps, *handlers, signal.getitimer(signal.ITIMER_REAL)[0] > 0]


@pytest.mark.parametrize("code", TABLES["changes"].splitlines())
def test_settings_of_the_process_are_restored(code):
    signal.setitimer(signal.ITIMER_REAL, 0)  # of the plugin that limits the time of a test
    expected, texts = values(), []
    with undisturbed([1], texts.append):
        exec(code)
    assert values() == expected
    assert bool(texts) == ("signal" not in code)


def draws() -> list:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


@pytest.mark.parametrize("code", ["draws()", "torch.manual_seed(0), random.seed(0), np.random.seed(0)", "pass"])
def test_generators_of_a_function_are_its_own(code):
    set_seed(1)
    expected = draws()
    set_seed(1)
    with undisturbed([1, 2], print):
        exec(code)
    assert draws() == expected


def test_draws_of_a_function_depend_on_the_batch_alone():
    draws_of_keys = []
    for key in ([1, 0], [1, 1], [1, 0]):
        with undisturbed(key, print):
            draws_of_keys.append(draws())
        draws()
    assert draws_of_keys[0] == draws_of_keys[2] != draws_of_keys[1]


def test_a_verifier_that_seeds_changes_no_later_rollout(make_trainer):
    seeds = editing("torch.manual_seed(0), random.seed(0), np.random.seed(0)")
    assert log_of(make_trainer(seeds)) == log_of(make_trainer(editing("pass")))


@pytest.mark.parametrize("code", ["os._exit(0)", "sys.exit(0)", "from posix import _exit; _exit(0)"])
def test_a_function_that_ends_the_process_is_an_error(code):
    with (
        pytest.raises(RuntimeError, match=r"The reward function 'f' called `sys\.exit"),
        undisturbed([1], print),
    ):
        VerifierPolicy().call("f", lambda: exec(code), {})


def test_children_of_a_function_may_exit():
    with undisturbed([1], print):
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_timer_in_a_thread_is_refused_with_the_remedy():
    def parses():
        try:
            signal.signal(signal.SIGALRM, lambda *_: None)
        except ValueError:  # as math_verify does
            return [0.0]
        return [1.0]

    with (
        pytest.raises(ValueError, match=r"'verifier parses' sets a signal.*`credit_trl\.in_process`"),
        undisturbed([1], print),
    ):
        VerifierPolicy(timeout=30.0).call("parses", parses, {})
    with undisturbed([1], print):
        assert VerifierPolicy().call("parses", parses, {}) == [1.0]


@pytest.mark.parametrize(
    "error", [KeyError("solution"), OSError(2, "gone"), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")]
)
def test_an_error_of_a_function_is_one_line_of_its_type(error):
    with (
        pytest.raises(type(error)) as caught,
        explained_errors("The reward function 'f'", "Correct it."),
    ):
        raise error
    text = str(caught.value)
    assert re.match(r"The reward function 'f' failed \(test_user_code\.py, line \d+\) with ", text)
    assert f"with {type(error).__name__}: {str(error).rstrip('.')}. Correct it." in text
    assert "\n" not in text
