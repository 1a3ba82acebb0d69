import json

import numpy as np
import pytest
from datasets import Dataset

from credit_trl.tasks import load_task, sciknoweval
from tables import rows_of


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


# Rewards for the gold letter, and whether the feedback names a wrong form.
DEFAULTS = {"gold": "B", "reward": 0, "answer_format": 0, "is_misspelt": False}


@pytest.mark.parametrize("row", rows_of(__file__, "letters"), ids=lambda row: row["case"])
def test_response_is_graded_by_the_published_rule(row):
    row = DEFAULTS | row
    gold = row["gold"]
    verdict = sciknoweval.verify(row["response"], gold)
    assert (verdict.reward, verdict.metrics) == (row["reward"], {"answer_format": row["answer_format"]})
    assert verdict.feedback.endswith(f"Correct answer: {gold}")
    assert verdict.feedback.startswith("The letter is right; write it as <answer>") == row["is_misspelt"]


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
        other_split = {"train": "test", "test": "train"}[split]
        with pytest.raises(ValueError, match=f"nor its {other_split} part"):
            load_task(f"sciknoweval:{domain}").build(other_split, file)


def test_hub_rows_become_the_published_questions(write_jsonl):
    rows = [hub_row(place, kind=2 + 2 * (place % 2)) for place in range(30)]
    other_rows = [hub_row(30, level="L2"), hub_row(31, domain="Physics"), hub_row(32, type="true_or_false")]
    path = write_jsonl([*rows, *other_rows])
    task = load_task("sciknoweval:biology")
    train, test = task.build("train", path), task.build("test", path)
    assert [len(train), len(test)] == [27, 3]
    assert sorted([*train["id"], *test["id"]]) == sorted(f"biology-{place}" for place in range(30))
    row_of_first_id = next(row for row in [*train, *test] if row["id"] == "biology-0")
    assert row_of_first_id["prompt"] == [
        {"role": "system", "content": sciknoweval.SYSTEM_PROMPT},
        {"role": "user", "content": "Question 0?\n\nA: text A\nB: text B\nPlease reason step by step."},
    ]


FEWER_TEXTS = {"label": ["A", "B", "C", "D"], "text": ["x"]}


MALFORMED = [
    ({"answer": "E"}, "answer"),
    ({"choices": FEWER_TEXTS}, "choices"),
    ({"question": " "}, "question"),
    ({"question": 7}, "question"),
    ({"choices": None}, "choices"),
    ({"choices": ["A: x", "B: y"]}, "choices"),
    ({"choices": {"label": "AB", "text": ["x", "y"]}}, "choices"),
    ({"choices": {"label": ["A", "B"], "text": [1, 2]}}, "choices"),
    ({"choices": {"label": ["A", "B"]}}, "choices"),
    ({"details": "L3"}, "details"),
    ({"type": 4}, "type"),
    ({"domain": None}, "domain"),
    ({"answerKey": 1}, "answerKey"),
]


@pytest.mark.parametrize(("changes", "field"), MALFORMED, ids=str)
def test_malformed_row_raises_with_file_and_row(write_jsonl, changes, field):
    with pytest.raises(ValueError, match=rf"rows\.jsonl, row 1, field '{field}'"):
        load_task("sciknoweval:biology").build("all", write_jsonl([hub_row(0, **changes)]))


@pytest.mark.parametrize(
    ("field", "value"), [("idx", "0"), ("idx", None), ("idx", 0.5), ("prompt", ["A: x"]), ("system", 1)]
)
def test_malformed_published_row_raises_with_file_and_row(write_jsonl, field, value):
    row = {"system": "s", "prompt": "Q?\nA: x\nB: y", "answer": "A", "idx": 0, field: value}
    with pytest.raises(ValueError, match=rf"rows\.jsonl, row 1, field '{field}'"):
        load_task("sciknoweval:biology").build("all", write_jsonl([row]))


def test_unknown_split_and_domain_raise(tmp_path):
    with pytest.raises(ValueError, match="no split 'dev'"):
        sciknoweval.build("dev")
    with pytest.raises(ValueError, match="no domain None; name one, as in sciknoweval:biology"):
        sciknoweval.build("train", tmp_path)
    with pytest.raises(ValueError, match="no domain 'law'"):
        sciknoweval.build("train", domain="law")
