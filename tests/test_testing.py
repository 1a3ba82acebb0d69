"""Checks for outside weights and tasks: the good ones pass, and each kind of mistake fails. Sources: test_contrast."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from datasets import Dataset

from credit_trl import Verdict
from credit_trl.tasks import quickstart
from credit_trl.tasks.task import batch_of
from credit_trl.testing import check_task, check_weight


def confident(credit):
    return {"distillation": (-credit.entropy).exp()}


def over_its_mean(credit):
    weight = credit.specific.abs().tanh()
    return {"distillation": weight / credit.mean(weight), "grpo": 1.0 + weight}


def test_good_weights_pass():
    check_weight(confident)
    check_weight(over_its_mean)
    check_weight(lambda credit: {"grpo": 1.0 + credit.entropy + credit.mean(credit.entropy, credit.entropy < 0.0)})


@pytest.mark.parametrize("losses", [("distillation",), ("grpo",), ("distillation", "grpo")], ids="+".join)
def test_a_weight_may_weigh_either_loss_or_both(losses):
    check_weight(lambda credit: dict.fromkeys(losses, credit.delta_v.exp()))


def over_the_local_mean(credit):
    weight = (-credit.entropy).exp()
    return {"distillation": weight / weight[credit.mask].mean()}


def over_masked_entries(credit):
    return {"distillation": credit.entropy / credit.entropy.sum()}


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (over_the_local_mean, "Two processes weigh differently"),
        (over_masked_entries, "must be finite"),
        (lambda credit: {"distillation": credit.specific}, "finite and at least 0"),
        (lambda credit: {"distillation": credit.advantages}, "have shape"),
        (lambda credit: {"loss": credit.entropy}, "'distillation' or 'grpo', got 'loss'"),
        (lambda credit: {}, "returned no loss"),
        (lambda credit: {"distillation": torch.rand(credit.mask.shape)}, "differ"),
        (lambda credit: {"grpo": over_the_local_mean(credit)["distillation"]}, "Two processes weigh differently"),
        (lambda credit: {"grpo": -credit.entropy}, "finite and at least 0"),
        (lambda credit: {"grpo": credit.entropy / 0.0}, "finite and at least 0"),
    ],
)
def test_a_wrong_weight_fails(weight, message):
    with pytest.raises((AssertionError, ValueError), match=message):
        check_weight(weight)


def task_with(verify, rows=({"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"},)):
    return SimpleNamespace(
        __name__="sums",
        build=lambda split: Dataset.from_list(list(rows)),
        verify=lambda response, answer, *, truncated=False: verify(response, answer),
    )


def exact(response, answer):
    return Verdict(float(response == answer), None if response == answer else f"It is {answer}.")


@pytest.mark.parametrize("form", ["name", "import name", "module", "module with verify", "object", "class instance"])
def test_good_tasks_pass_in_each_form(form, monkeypatch):
    """A registry name, "module:name", a module with a reward function or with `verify`, and an object."""
    module = ModuleType("sums")
    vars(module).update(vars(task_with(exact)))
    monkeypatch.setitem(sys.modules, "sums", module)
    module.Sums = type("Sums", (), {name: staticmethod(getattr(module, name)) for name in ("build", "verify")})
    forms = {
        "name": "quickstart",
        "import name": "sums:Sums",
        "module": quickstart,
        "module with verify": module,
        "object": task_with(exact),
        "class instance": module.Sums(),
    }
    check_task(forms[form])


def counts_the_batch(completions, answer, **columns):
    return [Verdict(0.0, f"One of {len(completions)}.")] * len(completions)


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        (task_with(lambda text, answer: exact(text.encode().decode(), answer)), UnicodeEncodeError, "surrogates"),
        (task_with(lambda response, answer: Verdict(float(answer in response))), AssertionError, "is successful"),
        (task_with(lambda response, answer: Verdict(float("nan"))), ValueError, "returned the reward nan"),
        (task_with(exact, [{"question": "2+2?"}]), ValueError, "no column `prompt`, `answer`"),
        (task_with(exact, [{"prompt": 3, "answer": "4"}]), AssertionError, "The prompt is 3"),
        (task_with(exact, [{"prompt": "2+2?", "answer": "4", "completions": 1}]), ValueError, "the column `compl"),
        (task_with(lambda response, answer: None), TypeError, "`verify` of the task returned None"),
    ],
)
def test_a_wrong_task_fails(task, error, message):
    with pytest.raises(error, match=message):
        check_task(task)


def test_a_verdict_that_depends_on_its_batch_fails():
    task = task_with(exact)
    task.reward = counts_the_batch
    with pytest.raises(AssertionError, match="another verdict beside other responses"):
        check_task(task)
    task.reward = batch_of(task.verify)
    check_task(task)


def test_rows_after_the_first_are_graded():
    """64 of 541 rows of a task raised, and the first did not."""
    rows = [{"prompt": f"{i}?", "answer": str(i) if i % 9 else None} for i in range(1, 542)]
    broken = task_with(lambda response, answer: Verdict(float(response == answer[:3])), rows)
    with pytest.raises(TypeError) as raised:
        check_task(broken)
    assert any("of the split 'train'" in note for note in raised.value.__notes__)
    check_task(task_with(exact, [row for row in rows if row["answer"]]))


def test_at_most_200_rows_of_the_whole_split_are_graded():
    graded = []
    rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(1000)]
    check_task(task_with(lambda response, answer: graded.append(int(answer)) or exact(response, answer), rows))
    assert len(set(graded)) == 200
    assert (min(graded), max(graded)) == (0, 995)
