import json
import time

import pytest

from credit_trl.tasks import load_task, toolalpaca
from tables import rows_of

GOLD = [{"Action": "get", "Action_Input": '{"city": "Rome", "days": 2}'}]
RIGHT = 'Thought: t\nAction: get\nAction Input: {"city": "Rome", "days": 2}'

# Rewards by SDPO's rule, and whether the feedback begins with the form of right calls in a wrong form.
DEFAULTS = {"golden": GOLD, "reward": 0, "is_misspelt": False, "answer_format": 1.0}


@pytest.mark.parametrize("row", rows_of(__file__, "tool_calls"), ids=lambda row: row["case"])
def test_calls_are_compared_by_the_published_rule(row):
    row = DEFAULTS | row
    verdict = toolalpaca.verify(row["response"], json.dumps(row["golden"]))
    assert verdict.reward == row["reward"]
    assert (verdict.feedback is None) == bool(row["reward"])
    assert verdict.metrics == {"answer_format": row["answer_format"]}
    form = "The calls are right; write each as a line `Action: name` and a line `Action Input: {...}`"
    assert (verdict.feedback or "").startswith(form) == row["is_misspelt"]
    assert row["reward"] or "mismatch: predicted" in verdict.feedback


def test_feedback_names_the_expected_calls():
    verdict = toolalpaca.verify(RIGHT.replace("get", "set").replace("Rome", "Oslo"), GOLD)
    assert verdict.feedback == (
        "Actions mismatch: predicted [set], expected [get]; Action inputs mismatch: "
        'predicted {"city": "Oslo", "days": 2}, expected {"city": "Rome", "days": 2}'
    )

    nested = toolalpaca.verify("Action: get\nAction Input: {'city': 'Rome'}", GOLD).feedback
    assert "Action inputs mismatch: predicted no flat JSON object: {'city': 'Rome'}, expected" in nested


HOSTILE = ["get " * 5_000, "get(" * 5_000, "{" * 20_000, 'get(a="' * 2_500, "{'" * 9_000, f"get({'a' * 19_900})"]


@pytest.mark.parametrize("response", HOSTILE)
def test_the_form_of_any_response_is_read_without_a_hang(response):
    start = time.process_time()
    toolalpaca.verify(response, [*GOLD * 5, {"Action": "put", "Action_Input": "{}"}])
    assert time.process_time() - start < 20.0


def test_raw_simulated_set_gives_the_68_published_records(shared_data):
    folder = shared_data / "toolalpaca"
    built = load_task("toolalpaca").build("test", folder)
    assert built["id"][:] == [f"toolalpaca-{4046 + place}" for place in range(68)]
    published = toolalpaca.build("test", folder / "test-first-10.jsonl")
    assert built["prompt"][:10] == published["prompt"][:]
    assert [json.loads(a) for a in built["answer"][:10]] == [json.loads(a) for a in published["answer"]]
    with pytest.raises(ValueError, match="test data"):
        toolalpaca.build("train", folder / "eval_simulated.json")


def test_file_of_both_parts_is_split_by_idx(write_jsonl):
    rows = [{"prompt": f"q{n}", "answer": json.dumps(GOLD), "idx": n} for n in (0, 4045, 4046, 4113)]
    path = write_jsonl(rows)
    assert toolalpaca.build("train", path)["id"][:] == ["toolalpaca-0", "toolalpaca-4045"]
    assert toolalpaca.build("test", path)["id"][:] == ["toolalpaca-4046", "toolalpaca-4113"]
    assert len(toolalpaca.build("all", path)) == 4


@pytest.mark.parametrize("answer", ["{", '{"a": 1}', '[{"Action": 1}]', '[{"Action": "f"}]', "[[]]"])
def test_answer_that_is_no_list_of_calls_raises(answer, write_jsonl):
    with pytest.raises(ValueError, match=r"ToolAlpaca answer must be|Call 0"):
        toolalpaca.verify("", answer)
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 1, field 'answer'"):
        toolalpaca.build("train", write_jsonl([{"prompt": "q", "answer": answer}]))


RAW = {"Name": "n", "Description": "d", "NLDocumentation": "doc", "Instructions": ["q"], "Golden_Answers": [GOLD]}
MALFORMED = [
    ({"prompt": "q", "answer": "[]", "idx": "0"}, "idx"),
    ({"prompt": 7, "answer": "[]"}, "prompt"),
    ({"prompt": "q", "answer": 7}, "answer"),
    ({"prompt": "q", "answer": "[]", "system": ["s"]}, "system"),
    (RAW | {"Instructions": "q"}, "Instructions"),
    (RAW | {"Instructions": [1]}, "Instructions"),
    (RAW | {"Golden_Answers": None}, "Golden_Answers"),
    (RAW | {"Golden_Answers": [GOLD, GOLD]}, "Golden_Answers"),
    (RAW | {"Golden_Answers": [7]}, "Golden_Answers"),
    (RAW | {"Name": 7}, "Name"),
]


@pytest.mark.parametrize(("row", "field"), MALFORMED, ids=str)
def test_malformed_row_raises_with_file_and_row(write_jsonl, row, field):
    with pytest.raises(ValueError, match=rf"rows\.jsonl, row 1, field '{field}'"):
        toolalpaca.build("all", write_jsonl([row]))
