from __future__ import annotations

import json

import numpy as np
import pytest
from datasets import Dataset

from credit_trl.tasks import load_task, sciknoweval


def hub_row(
    place: int, kind: int = 4, level: str = "L3", domain: str = "Biology", answer: str = "A", **changes
) -> dict:
    labels = list("ABCD"[:kind])
    row = {
        "question": f"Question {place}?",
        "choices": {"label": labels, "text": [f"text {label}" for label in labels]},
        "answerKey": answer,
        "type": f"mcq-{kind}-choices",
        "domain": domain,
        "details": {"level": level},
    }
    return row | changes


# reason: (response, reward for the gold letter B, metric answer_format, whether the feedback names a wrong form)
RESPONSES = {
    "right": ("<reasoning>r</reasoning>\n<answer>\nB\n</answer>\n", 1, 1, False),
    "wrong": ("<answer>A</answer>", 0, 1, False),
    "last answer counts": ("<answer>A</answer> <answer>B</answer>", 1, 1, False),
    "letter alone, as published": ("B", 1, 0, False),
    "not closed, as published": ("<answer>B", 1, 0, False),
    "text behind the tag, as published": ("<answer>B</answer> so", 1, 0, False),
    "lower case": ("<answer>b</answer>", 0, 0, True),
    "letter and text": ("<answer>B: text</answer>", 0, 0, True),
    "a word that begins with the letter": ("<answer>Because</answer>", 0, 0, False),
    "parentheses": ("<answer>(B)</answer>", 0, 0, True),
    "bold": ("<answer>**B**</answer>", 0, 0, True),
    "full stop": ("<answer>B.</answer>", 0, 0, True),
    "words before the letter": ("<answer>The correct option is B</answer>", 0, 0, True),
    "a sentence without tags": ("It binds water.\nSo the answer is B.", 0, 0, True),
    "a box": ("It binds water.\n\\boxed{\\text{B}}", 0, 0, True),
    "another letter in a sentence": ("B is close.\nThe answer is (C).", 0, 0, False),
    "another letter in parentheses": ("<answer>(A)</answer>", 0, 0, False),
    "the option's text alone": ("<answer>text B</answer>", 0, 0, True),
}


@pytest.mark.parametrize(("response", "reward", "form", "is_misspelt"), RESPONSES.values(), ids=RESPONSES)
def test_response_is_graded_by_the_published_rule(response, reward, form, is_misspelt):
    verdict = sciknoweval.verify(response, "B")
    assert (verdict.reward, verdict.metrics) == (reward, {"answer_format": form})
    assert verdict.feedback.endswith("Correct answer: B")
    assert verdict.feedback.startswith("The letter is right; write it as <answer>") == is_misspelt


@pytest.mark.parametrize("answer", ["b", "", "AB", None])
def test_answer_that_is_no_letter_raises(answer):
    with pytest.raises(ValueError, match="must be one capital letter"):
        sciknoweval.verify("B", answer)


def test_split_is_that_of_datasets():
    rows = Dataset.from_dict({"place": range(105)}).train_test_split(test_size=0.1, seed=42)
    order = np.random.default_rng(42).permutation(105).tolist()
    assert sciknoweval.split_indices(105, "test") == rows["test"]["place"][:] == order[:11]
    assert sciknoweval.split_indices(105, "train") == rows["train"]["place"][:] == order[11:]


@pytest.mark.parametrize("domain", ["biology", "physics"])
def test_published_files_give_their_rows_in_order(shared_data, domain):
    for split in ("train", "test"):
        file = shared_data / "sciknoweval" / f"{domain}-{split}.jsonl"
        published = [json.loads(line) for line in file.open(encoding="utf-8")]
        built = load_task(f"sciknoweval:{domain}").build(split, shared_data)
        assert built["answer"][:] == [row["answer"] for row in published]
        assert built["id"][:] == [f"{domain}-{row['idx']}" for row in published]
        assert [turns[1]["content"] for turns in built["prompt"]] == [row["prompt"] for row in published]
        assert {turns[0]["content"] for turns in built["prompt"]} == {sciknoweval.SYSTEM_PROMPT}
        other = {"train": "test", "test": "train"}[split]
        with pytest.raises(ValueError, match=f"nor its {other} part"):
            load_task(f"sciknoweval:{domain}").build(other, file)


def test_hub_rows_become_the_published_questions(write_jsonl):
    rows = [hub_row(place, kind=2 + 2 * (place % 2)) for place in range(30)]
    other = [hub_row(30, level="L2"), hub_row(31, domain="Physics"), hub_row(32, type="true_or_false")]
    path = write_jsonl([*rows, *other])
    task = load_task("sciknoweval:biology")
    train, test = task.build("train", path), task.build("test", path)
    assert [len(train), len(test)] == [27, 3]
    assert sorted([*train["id"], *test["id"]]) == sorted(f"biology-{place}" for place in range(30))
    first = next(row for row in [*train, *test] if row["id"] == "biology-0")
    assert first["prompt"] == [
        {"role": "system", "content": sciknoweval.SYSTEM_PROMPT},
        {"role": "user", "content": "Question 0?\n\nA: text A\nB: text B\nPlease reason step by step."},
    ]


MALFORMED = {
    "no such option": hub_row(0, answer="E"),
    "fewer texts than labels": hub_row(0, choices={"label": ["A", "B", "C", "D"], "text": ["x"]}),
    "blank question": hub_row(0, question=" "),
}


@pytest.mark.parametrize("row", MALFORMED.values(), ids=MALFORMED)
def test_malformed_row_raises_with_file_and_row(write_jsonl, row):
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 1, field"):
        load_task("sciknoweval:biology").build("all", write_jsonl([row]))


def test_unknown_split_and_domain_raise(tmp_path):
    with pytest.raises(ValueError, match="no split 'dev'"):
        sciknoweval.build("dev")
    with pytest.raises(ValueError, match="Name a domain"):
        sciknoweval.build("train", tmp_path)
    with pytest.raises(ValueError, match="no domain 'law'"):
        sciknoweval.build("train", domain="law")
