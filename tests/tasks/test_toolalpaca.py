from __future__ import annotations

import json
import time

import pytest

from credit_trl.tasks import load_task, toolalpaca

GOLD = [{"Action": "get", "Action_Input": '{"city": "Rome", "days": 2}'}]
TWO = [*GOLD, {"Action": "put", "Action_Input": '{"x": true}'}]
RIGHT = 'Thought: t\nAction: get\nAction Input: {"city": "Rome", "days": 2}'

# reason: (response, golden calls, reward by SDPO's rule)
RESPONSES = {
    "right": (RIGHT, GOLD, 1),
    "keys in another order": ('Action: get\nAction Input: {"days": 2, "city": "Rome"}', GOLD, 1),
    "equal as Python values": ('Action: get\nAction Input: {"days": 2.0, "city": "Rome"}', GOLD, 1),
    "another name": (RIGHT.replace("get", "set"), GOLD, 0),
    "one call twice": (f"{RIGHT}\n{RIGHT}", GOLD, 0),
    "two calls in another order": (f'Action: put\nAction Input: {{"x": 1}}\n{RIGHT}', TWO, 1),
    "inputs swapped between calls": (
        'Action: get\nAction Input: {"x": true}\nAction: put\nAction Input: {"city": "Rome", "days": 2}',
        TWO,
        1,
    ),
    "a nested object counts as no input": (
        'Action: get\nAction Input: {"a": {"b": 1}}',
        [{"Action": "get", "Action_Input": '{"a": {"b": 1}}'}],
        0,
    ),
    "no JSON": ("Action: get\nAction Input: {city: Rome}", [{"Action": "get", "Action_Input": "{}"}], 1),
    "no call": ("It is sunny.", GOLD, 0),
}


@pytest.mark.parametrize(("response", "golden", "reward"), RESPONSES.values(), ids=RESPONSES)
def test_calls_are_compared_by_the_published_rule(response, golden, reward):
    verdict = toolalpaca.verify(response, json.dumps(golden))
    assert verdict.reward == reward
    assert (verdict.feedback is None) == bool(reward)
    assert verdict.metrics == {"answer_format": float("Action:" in response)}


def test_feedback_names_the_expected_calls():
    verdict = toolalpaca.verify(RIGHT.replace("get", "set").replace("Rome", "Oslo"), GOLD)
    assert verdict.feedback == (
        "Actions mismatch: predicted [set], expected [get]; Action inputs mismatch: "
        'predicted {"city": "Oslo", "days": 2}, expected {"city": "Rome", "days": 2}'
    )


IN_ANOTHER_FORM = {
    "labels in lower case": 'action: get\naction input: {"city": "Rome", "days": 2}',
    "bold labels": '**Action:** get\n**Action Input:** {"city": "Rome", "days": 2}',
    "name in back-quotes": 'Action: `get`\nAction Input: {"city": "Rome", "days": 2}',
    "a fence around the input": 'Action: get\nAction Input:\n```json\n{"city": "Rome", "days": 2}\n```',
    "single quotes": "Action: get\nAction Input: {'city': 'Rome', 'days': 2}",
    "a tool call in JSON": '{"name": "get", "arguments": {"city": "Rome", "days": 2}}',
    "tags": '<action>get</action><input>{"city": "Rome", "days": 2}</input>',
    "a function call": 'I call get(city="Rome", days=2).',
    "another label for the input": 'Action: get\nInput: {"city": "Rome", "days": 2}',
}
WRONG_CALLS = {
    "another name": '**Action:** set\n**Action Input:** {"city": "Rome", "days": 2}',
    "another value": '**Action:** get\n**Action Input:** {"city": "Oslo", "days": 2}',
    "an argument missing": "get(days=2)",
    "an argument more": '{"name": "get", "arguments": {"city": "Rome", "days": 2, "hours": 1}}',
    "no call": "It is sunny in Rome for 2 days.",
}


@pytest.mark.parametrize("response", IN_ANOTHER_FORM.values(), ids=IN_ANOTHER_FORM)
def test_feedback_on_right_calls_in_a_wrong_form_names_the_form(response):
    verdict = toolalpaca.verify(response, GOLD)
    assert verdict.reward == 0.0
    assert verdict.feedback.startswith("The calls are right; write each as a line `Action: name` and a line `Action")
    assert "mismatch: predicted" in verdict.feedback


@pytest.mark.parametrize("response", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_feedback_on_wrong_calls_names_no_form(response):
    verdict = toolalpaca.verify(response, GOLD)
    assert verdict.reward == 0.0
    assert "The calls are right" not in verdict.feedback


@pytest.mark.parametrize("response", ["get " * 5_000, "get(" * 5_000, "{" * 20_000, 'get(a="' * 2_500, "{'" * 9_000])
def test_the_form_of_any_response_is_read_in_a_second(response):
    start = time.process_time()
    toolalpaca.verify(response, [*GOLD * 5, {"Action": "put", "Action_Input": "{}"}])
    assert time.process_time() - start < 1.0


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
