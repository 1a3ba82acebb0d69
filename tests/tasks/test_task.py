import threading
from contextlib import nullcontext

import pytest
from datasets import Dataset

from credit_trl import Verdict
from credit_trl.rollout.thinking import use_marks
from credit_trl.rollout.verdict import deadline_in, remaining_seconds
from credit_trl.tasks import Task, batch_of, sciknoweval, toolalpaca
from credit_trl.tasks.task import call_reward, response_text


def exact(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    return Verdict(float(response == answer), f"expected {answer}{' (cut)' if truncated else ''}")


def test_batch_grades_texts_and_conversations_alike():
    reward = batch_of(exact)
    completions = ["yes", [{"role": "assistant", "content": "yes"}], [{"role": "assistant", "content": "no"}]]
    verdicts = reward(completions=completions, answer=["yes"] * 3, truncated=[False, True, False], prompts=["?"] * 3)
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0, 0.0]
    assert [verdict.feedback for verdict in verdicts] == ["expected yes", "expected yes (cut)", "expected yes"]


@pytest.mark.parametrize("of", [str, lambda text: [{"role": "assistant", "content": text}]], ids=["text", "messages"])
def test_response_of_ten_million_characters_is_cut_in_the_middle_and_marked(of):
    text = response_text(of("a" * 5_000_000 + "b" * 5_000_000))
    assert text == "a" * 100_000 + "\n[... 9,800,000 characters dropped ...]\n" + "b" * 100_000
    assert response_text(of("a" * 200_000)) == "a" * 200_000


MARKS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<mm:think>", "</mm:think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|reasoning|>", "<|/reasoning|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
]
CALLS = '[{"Action": "find", "Action_Input": "{}"}]'
GRADED = {  # the verifier, its answer, and a right and a wrong response
    "sciknoweval": (sciknoweval.verify, "B", "<answer>B</answer>", "<answer>A</answer>"),
    "toolalpaca": (toolalpaca.verify, CALLS, "Action: find\nAction Input: {}", "Action: drop\nAction Input: {}"),
}


@pytest.mark.parametrize("task", GRADED)
@pytest.mark.parametrize(("opening", "closing"), MARKS)
@pytest.mark.parametrize("of_run", [True, False])
def test_only_the_answer_behind_the_thinking_is_graded(task, opening, closing, of_run):
    verify, answer, right, wrong = GRADED[task]
    with use_marks(((opening, closing),)) if of_run else nullcontext():
        assert verify(f"{opening}Perhaps {right}? I should check", answer).reward == 0.0
        assert verify(f"{opening}Perhaps {wrong}{closing}\n{right}", answer).reward == 1.0
        assert verify(f"Perhaps {wrong}{closing}\n{right}", answer).reward == 1.0
        assert (
            verify(f"{opening}Perhaps{closing}It stands behind the tag {opening} here: {right}", answer).reward == 1.0
        )


def test_tags_that_the_run_does_not_declare_are_text():
    with use_marks((("<mm:think>", "</mm:think>"),)):
        assert sciknoweval.verify("<thinking>B, as <think> said.<answer>B</answer>", "B").reward == 1.0


def test_asynchronous_reward_has_the_deadline_in_a_daemon_thread():
    """A thread that is not a daemon keeps the process of a verifier that hangs alive."""

    async def reward(completions, **columns):
        return [remaining_seconds(), threading.current_thread().daemon]

    with deadline_in(500.0):
        seconds, daemon = call_reward(reward, completions=["x"])
    assert 400.0 < seconds <= 501.0
    assert daemon


def length(completions, **columns):
    return [float(len(completion)) for completion in completions]


def matches(completions, gold, **columns):
    return [Verdict(float(c == g), f"It is {g}.") for c, g in zip(completions, gold, strict=True)]


def test_data_set_with_reward_functions_is_a_task():
    rows = Dataset.from_list([{"prompt": "1+1?", "gold": "2"}])
    task = Task.from_dataset({"train": rows}, [length, matches])
    assert task.build("train") is rows
    assert task.reward(["2", "30"], gold=["2", "2"]) == [Verdict(2.0, "It is 2."), Verdict(2.0, "It is 2.")]
    assert task.verify("2", gold="2").reward == 2.0
    with pytest.raises(ValueError, match="no split 'test'; use one of train"):
        task.build("test")


def test_verify_takes_columns_of_the_row_by_name():
    def verify(response, answer, *, tolerance, unit="m", truncated=False):
        return Verdict(float(abs(float(response) - answer) <= tolerance), unit)

    columns = {"tolerance": [0.5, 0.1], "other": ["a", "b"], "trainer_state": None}
    verdicts = batch_of(verify)(["3.2", "3.2"], [3.0, 3.0], truncated=[False, False], **columns)
    assert verdicts == [Verdict(1.0, "m"), Verdict(0.0, "m")]
    assert batch_of(verify)(["3"], [3.0], tolerance=[0.0], unit=["km"]) == [Verdict(1.0, "km")]
