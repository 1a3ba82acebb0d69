import contextlib
import itertools
import json
import os
import time
from functools import cache

import pytest

from credit_trl import Verdict
from credit_trl.rollout.verdict import deadline_in
from credit_trl.tasks import load_task
from credit_trl.tasks import math as math_task
from tables import rows_of, tables_of

pytest.importorskip("math_verify", reason="needs math-verify and pebble (pip install 'credit-trl[math]')")
pytestmark = pytest.mark.timeout(300)

TABLES = tables_of(__file__)
CASES = rows_of(__file__, "math")

read_once = cache(math_task._canonical)


def compare_here(pairs, deadline):
    """The results of `math_task.compare`, without its processes and limits of time."""
    results = dict.fromkeys(pairs, "failed")
    for pair in pairs:
        with contextlib.suppress(Exception):
            results[pair] = math_task.same_answer(*pair)
    return list(results.values())


@pytest.fixture
def reward(monkeypatch):
    """`math_task.reward` that compares in this process, and reads a text once however many pairs share it."""
    monkeypatch.setattr(math_task, "_canonical", read_once)
    monkeypatch.setattr(math_task, "compare", compare_here)
    return math_task.reward


def grades(reward, pairs):
    """Rewards of boxed answers, graded as one batch."""
    completions = [rf"\boxed{{{given}}}" for _, given in pairs]
    return [verdict.reward for verdict in reward(completions, [gold for gold, _ in pairs])]


def test_no_answer_that_was_graded_wrong_is_rewarded_and_at_most_one_percent_is_missed(reward):
    completions = [case.get("response") or rf"\boxed{{{case['answer']}}}" for case in CASES]
    verdicts = reward(completions, [case["gold"] for case in CASES])
    assert [case for case, verdict in zip(CASES, verdicts, strict=True) if verdict.reward and not case["want"]] == []
    missed = [case for case, verdict in zip(CASES, verdicts, strict=True) if case["want"] and not verdict.reward]
    assert [case for case in missed if case["kind"].startswith("F")] == []
    assert len(missed) <= 0.01 * len(CASES), missed


def pairs_of(name):
    """Lists of answers of a kind, and all pairs within them."""
    lists = [row["answers"] for row in rows_of(__file__, f"math_{name}")]
    return lists, [pair for answers in lists for pair in itertools.permutations(answers, 2)]


def test_no_two_different_answers_are_equal(reward):
    lists, pairs = pairs_of("different")
    pairs += itertools.permutations(dict.fromkeys(answers[0] for answers in lists), 2)
    assert len(pairs) >= 10_000
    assert [pair for pair, grade in zip(pairs, grades(reward, pairs), strict=True) if grade] == []


def test_at_most_five_percent_of_equal_answers_are_missed(reward):
    _, pairs = pairs_of("equal")
    assert len(pairs) >= 300
    missed = [pair for pair, grade in zip(pairs, grades(reward, pairs), strict=True) if not grade]
    assert len(missed) <= 0.05 * len(pairs), missed


@pytest.mark.parametrize(("text", "box"), TABLES["boxes"])
def test_last_box_is_found_with_balanced_braces(text, box):
    assert math_task.last_boxed(text) == box


def test_feedback_names_missing_box_and_truncation():
    wrong, unboxed, cut = math_task.reward([r"\boxed{8}", "it is 8", "let us"], ["7"] * 3, [False, False, True])
    assert wrong == Verdict(0.0, "Correct answer: 7", {"answer_format": 1.0})
    assert unboxed == Verdict(0.0, f"{math_task.NO_BOX}Correct answer: 7", {"answer_format": 0.0})
    assert cut == Verdict(0.0, f"{math_task.TRUNCATED}Correct answer: 7", {"answer_format": 0.0})


def test_expensive_answers_fail_and_the_pool_survives():
    verdicts = math_task.reward([r"\boxed{((9^{999})^{999})^{999}}", r"\boxed{\frac{6}{2}}"], ["3"] * 2)
    assert [verdict.reward for verdict in verdicts] == [0.0, 1.0]
    assert verdicts[0].metrics == {"answer_format": 1.0, "comparison_failed": 1.0}


def test_comparison_has_its_seconds_on_a_processor(monkeypatch):
    def compared(gold, given):
        while given == "works":
            pass
        time.sleep(0.5)
        return True

    monkeypatch.setattr(math_task, "SECONDS_PER_PAIR", 0.2)
    monkeypatch.setattr(math_task, "same_answer", compared)
    assert math_task.compare.__wrapped__([("7", "waits"), ("7", "works")], time.monotonic() + 60.0) == [True, "failed"]


def test_comparisons_after_the_deadline_are_undecided():
    with deadline_in(-2.0):
        verdicts = math_task.reward([r"\boxed{0.5}", r"\boxed{1/2}", "no answer"], ["1/2"] * 3)
    assert [verdict.reward for verdict in verdicts] == [None, 1.0, 0.0]
    assert verdicts[0].metrics == {"undecided": 1.0}


@pytest.mark.parametrize("parts", TABLES["nested"], ids=json.dumps)
def test_any_short_answer_is_compared_in_a_second_of_processor_time(parts):
    answer = "".join(text * count for text, count in parts)
    start = time.process_time()
    for gold in ("7", f"{answer[:-1]}3"):
        with contextlib.suppress(Exception):
            assert not math_task.same_answer(gold, answer)
    assert time.process_time() - start < 1.0


def processor_seconds():
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


@pytest.mark.parametrize("parts", TABLES["megabytes"], ids=json.dumps)
def test_64_megabytes_are_graded_in_two_seconds_of_two_processors(parts):
    response = "".join(text * count for text, count in parts)
    start = processor_seconds()
    verdicts = math_task.reward([f"{response}{number}}}" for number in range(64)], ["-1"] * 64)
    assert {verdict.reward for verdict in verdicts} == {0.0}
    assert processor_seconds() - start < 4.0


@pytest.mark.parametrize("answer", [None, "", " ", 7])
def test_gold_answer_that_is_no_text_raises(answer):
    with pytest.raises(ValueError, match="A math answer must be a text"):
        math_task.verify(r"\boxed{7}", answer)


@pytest.mark.parametrize(("row", "answer"), TABLES["records"])
def test_common_record_forms_are_read(write_jsonl, row, answer):
    built = load_task("math").build("train", write_jsonl([row]))[0]
    assert built["prompt"] == [{"role": "user", "content": f"1+1?\n\n{math_task.INSTRUCTION}"}]
    assert (built["answer"], built["task"], built["id"]) == (answer, "math", "math-1")


@pytest.mark.parametrize("row", TABLES["malformed"])
def test_malformed_row_raises_with_file_and_row(write_jsonl, row):
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 1, field"):
        load_task("math").build("train", write_jsonl([row]))


def test_folder_has_one_file_per_split(tmp_path, write_jsonl):
    write_jsonl([{"problem": "q", "answer": "1"}], "data/test.jsonl")
    write_jsonl([{"problem": "q", "answer": "1"}] * 2, "data/train.jsonl")
    assert len(math_task.build("train", tmp_path / "data")) == 2
    assert len(math_task.build("train", hub=str(tmp_path / "data"))) == 2
    with pytest.raises(FileNotFoundError, match=r"0 files named validation .*test\.jsonl, train\.jsonl"):
        math_task.build("validation", tmp_path / "data")
