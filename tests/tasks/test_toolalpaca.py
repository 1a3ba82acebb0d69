from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl.tasks import load_task, toolalpaca
from credit_trl.tasks.records import RowError


def golden(*calls: tuple[str, dict | str]) -> str:
    return json.dumps(
        [
            {"Action": name, "Action_Input": given if isinstance(given, str) else json.dumps(given)}
            for name, given in calls
        ]
    )


def saying(*calls: tuple[str, str]) -> str:
    return "\n".join(f"Thought: t\nAction: {name}\nAction Input: {given}" for name, given in calls)


def raw_api(**changes) -> dict:
    api = {
        "Name": "Clock",
        "Description": "Tells the time",
        "NLDocumentation": "now: The time.\nParameters: {}\n",
        "Instructions": ["What time is it?", "And in Lima?", "And there?"],
        "Golden_Answers": [
            [{"Action": "now", "Action_Input": "{}"}],
            [{"Action": "now", "Action_Input": '{"city": "Lima"}'}],
            [{"Action": "now", "Action_Input": '{"city": ${city from before}}'}],
        ],
    }
    return api | changes


def training_api(*instances) -> dict:
    api = {key: value for key, value in raw_api().items() if key != "Golden_Answers"}
    return api | {"Instances": list(instances)}


def step(name: str, given: str) -> list:
    return [[name, given, f"thought\nAction: {name}\nAction Input: {given}"], "Status Code: 200"]


PREPARED = {
    "prompt": "Use the tools.\nQuestion: What time is it?",
    "answer": golden(("now", {})),
    "idx": 4046,
    "dataset": "tooluse",
    "kind": "tooluse",
    "system": None,
}

# ---- building ----


def test_raw_test_file_gives_the_68_published_records(shared_data):
    built = load_task("toolalpaca").build("test", shared_data / "toolalpaca" / "eval_simulated.json")
    assert len(built) == 68
    with open(shared_data / "toolalpaca" / "test-first-10.jsonl", encoding="utf-8") as lines:
        published = [json.loads(line) for line in lines]
    for row, record in zip(built, published, strict=False):
        assert row["prompt"] == [{"role": "user", "content": record["prompt"]}]
        assert row["answer"] == record["answer"]
        assert row["id"] == f"toolalpaca-{record['idx']}"
    calls = Counter(len(json.loads(answer)) for answer in built["answer"])
    assert calls[1] == 49
    assert set(calls) == {1, 2, 3, 4, 5}


def test_prepared_and_raw_forms_give_the_same_rows(shared_data):
    raw = toolalpaca.build("test", shared_data / "toolalpaca" / "eval_simulated.json")
    prepared = toolalpaca.build("test", shared_data / "toolalpaca" / "test-first-10.jsonl")
    assert prepared[:] == raw[:10]


def test_folder_prefers_the_prepared_part(tmp_path, shared_data, write_jsonl):
    assert len(toolalpaca.build("test", shared_data / "toolalpaca")) == 68
    write_jsonl([PREPARED], "test.jsonl")
    write_jsonl([PREPARED | {"idx": 0}, PREPARED | {"idx": 1}], "train.json")
    assert [len(toolalpaca.build(split, tmp_path)) for split in ("train", "test", "all")] == [2, 1, 3]


def test_split_all_loads_every_real_api_record(shared_data):
    assert len(toolalpaca.build("all", shared_data / "toolalpaca" / "real-78.jsonl")) == 78


def test_records_with_placeholders_are_dropped_and_counted(write_jsonl, capsys):
    built = toolalpaca.build("test", write_jsonl([raw_api()]))
    assert built["id"] == ["toolalpaca-4046", "toolalpaca-4047"]
    assert "3 read, 2 kept, 1 dropped (1 with a placeholder ($) in the golden calls)" in capsys.readouterr().err


def test_training_instances_become_questions_with_calls(write_jsonl, capsys):
    api = training_api(
        {
            "input": "What time is it in Lima?\nHint: no",
            "intermediate_steps": [step("now", '{"city": "Lima"}'), step("now", "{}")],
        },
        {"input": "Never mind", "intermediate_steps": []},
        {"error": "the agent failed"},
        "the agent failed, as text",
        {"input": "Then there", "intermediate_steps": [step("now", '{"city": ${city}}')]},
        {"input": "And here?", "intermediate_steps": [step("now", "not json")]},
    )
    built = toolalpaca.build("train", write_jsonl([api]))
    line = capsys.readouterr().err
    assert built["id"] == ["toolalpaca-0", "toolalpaca-1"]
    assert built["answer"][0] == golden(("now", {"city": "Lima"}), ("now", {}))
    assert built["prompt"][0][0]["content"].endswith("\n\nBegin!\nQuestion: What time is it in Lima?")
    assert "6 read, 2 kept (1 whose golden input is not a JSON object, compared as {})" in line
    assert "3 without a call" in line
    assert "1 with a placeholder" in line


def test_training_and_test_prompts_have_the_same_wording(shared_data, write_jsonl):
    with open(shared_data / "toolalpaca" / "eval_simulated.json", encoding="utf-8") as file:
        api = json.load(file)[0]
    question = api["Instructions"][0]
    training = {key: api[key] for key in ("Name", "Description", "NLDocumentation")}
    training["Instances"] = [{"input": question, "intermediate_steps": [step("getRandomAxolotlImage", "{}")]}]
    test = toolalpaca.build("test", shared_data / "toolalpaca" / "eval_simulated.json")[0]
    train = toolalpaca.build("train", write_jsonl([training]))[0]
    assert (train["prompt"], train["answer"]) == (test["prompt"], test["answer"])


def test_prepared_records_are_split_by_idx(write_jsonl, capsys):
    path = write_jsonl([PREPARED | {"idx": idx} for idx in (0, 4045, 4046, 4113)])
    for split, ids in {"train": [0, 4045], "test": [4046, 4113], "all": [0, 4045, 4046, 4113]}.items():
        assert toolalpaca.build(split, path)["id"] == [f"toolalpaca-{idx}" for idx in ids]
    assert "2 of the train part" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("split", "rows"),
    [
        ("train", [raw_api()]),
        ("test", [training_api({"input": "q", "intermediate_steps": [step("now", "{}")]})]),
        ("test", [PREPARED | {"idx": 0}] * 4046),
    ],
)
def test_file_of_the_other_split_raises(write_jsonl, split, rows):
    with pytest.raises(ValueError, match=r"split='all'"):
        toolalpaca.build(split, write_jsonl(rows))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"split": "validation"}, ValueError, "train, test, all"),
        ({"split": "test"}, ValueError, r"github.com/tangqiaoyu/ToolAlpaca"),
        ({"split": "test", "path": "no/such.json"}, FileNotFoundError, "no/such.json"),
        ({"split": "test", "protocol": "lenient"}, ValueError, "field, strict"),
    ],
)
def test_invalid_arguments_raise_with_valid_ones(arguments, error, message):
    with pytest.raises(error, match=message):
        toolalpaca.build(**arguments)


def test_folder_without_the_part_names_the_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train\.jsonl .* or train_data\.json"):
        toolalpaca.build("train", tmp_path)


MALFORMED = {
    "fewer golden answers than instructions": (raw_api(Golden_Answers=[]), "Golden_Answers"),
    "instructions a text": (raw_api(Instructions="What?"), "Instructions"),
    "an instruction a number": (raw_api(Instructions=["a", 2, "c"]), "Instructions[1]"),
    "golden calls a text": (raw_api(Golden_Answers=["now", [], []]), "Golden_Answers[0]"),
    "a golden call without a name": (raw_api(Golden_Answers=[[], [{"Action_Input": "{}"}], []]), "Golden_Answers[1]"),
    "a golden call without an input": (raw_api(Golden_Answers=[[], [], [{"Action": "now"}]]), "Golden_Answers[2]"),
    "no documentation": (raw_api(NLDocumentation=None), "NLDocumentation"),
    "no name": (raw_api(Name=" "), "Name"),
    "instances a text": (training_api() | {"Instances": "x"}, "Instances"),
    "a step that is no list": (training_api({"input": "q", "intermediate_steps": [{"a": 1}]}), "Instances[0]"),
    "an instance without input": (training_api({"intermediate_steps": [step("now", "{}")]}), "Instances[0]"),
    "a step's tool a number": (
        training_api({"input": "q", "intermediate_steps": [[[3, "{}"], "o"]]}),
        "Instances[0].intermediate_steps",
    ),
    "prepared, no prompt": (PREPARED | {"prompt": None}, "prompt"),
    "prepared, answer not JSON": (PREPARED | {"answer": "now()"}, "answer"),
    "prepared, answer an object": (PREPARED | {"answer": '{"Action": "now"}'}, "answer"),
    "prepared, answer missing": ({key: PREPARED[key] for key in ("prompt", "idx")}, "answer"),
    "prepared, idx a text": (PREPARED | {"idx": "4046"}, "idx"),
    "prepared, system a list": (PREPARED | {"system": []}, "system"),
}


@pytest.mark.parametrize(("row", "field"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_row_raises_with_file_row_and_field(write_jsonl, row, field):
    good = PREPARED if "prompt" in row else raw_api() if "Golden_Answers" in row else training_api()
    path = write_jsonl([good, row], "tools.jsonl")
    with pytest.raises(RowError, match=r"tools\.jsonl, row 2, field ") as caught:
        toolalpaca.build("all", path)
    assert caught.value.field == field


def test_dropped_malformed_records_keep_other_numbers(write_jsonl, capsys):
    whole = toolalpaca.build("test", write_jsonl([raw_api()]))
    calls = [[{"Action": 7}], *raw_api()["Golden_Answers"][1:]]
    path = write_jsonl([raw_api(Golden_Answers=calls)], "broken.jsonl")
    rest = toolalpaca.build("test", path, on_malformed="drop")
    assert rest[:] == whole[1:]
    printed = capsys.readouterr().err
    assert f"dropped: {path}, row 1, field 'Golden_Answers[0]'" in printed
    assert "1 malformed in 'Golden_Answers[0]'" in printed


# ---- field protocol ----

ONE = golden(("now", {"city": "Lima"}))
TWO = golden(("now", {"city": "Lima"}), ("sun", {"day": 1}))
NESTED = golden(("put", {"user": "u", "data": {"url": "x"}}))
LISTS = golden(("put", {"tags": ["a", "b"]}))

FIELD = {  # reason: (response, answer, reward)
    "right": (saying(("now", '{"city": "Lima"}')), ONE, 1),
    "wrong name": (saying(("later", '{"city": "Lima"}')), ONE, 0),
    "wrong input": (saying(("now", '{"city": "Rome"}')), ONE, 0),
    "name in another case": (saying(("Now", '{"city": "Lima"}')), ONE, 0),
    "value in another case": (saying(("now", '{"city": "lima"}')), ONE, 0),
    "key missing": (saying(("now", "{}")), ONE, 0),
    "key too many": (saying(("now", '{"city": "Lima", "day": 1}')), ONE, 0),
    "keys in another order": (saying(("f", '{"b": 2, "a": 1}')), golden(("f", {"a": 1, "b": 2})), 1),
    "two calls": (saying(("now", '{"city": "Lima"}'), ("sun", '{"day": 1}')), TWO, 1),
    "two calls in another order": (saying(("sun", '{"day": 1}'), ("now", '{"city": "Lima"}')), TWO, 1),
    "inputs at the wrong call": (saying(("now", '{"day": 1}'), ("sun", '{"city": "Lima"}')), TWO, 1),
    "all inputs in one call": (saying(("now", '{"city": "Lima", "day": 1}'), ("sun", "{}")), TWO, 1),
    "one call twice": (saying(("now", '{"city": "Lima"}'), ("now", '{"city": "Lima"}')), ONE, 0),
    "a call too few": (saying(("now", '{"city": "Lima", "day": 1}')), TWO, 0),
    "same key twice across calls, the last counts": (
        saying(("now", '{"city": "Rome"}'), ("now", '{"city": "Lima"}')),
        golden(("now", {"city": "Rome"}), ("now", {"city": "Lima"})),
        1,
    ),
    "same key twice across calls, swapped": (
        saying(("now", '{"city": "Lima"}'), ("now", '{"city": "Rome"}')),
        golden(("now", {"city": "Rome"}), ("now", {"city": "Lima"})),
        0,
    ),
    "duplicate keys, the last counts": (saying(("now", '{"city": "Rome", "city": "Lima"}')), ONE, 1),
    "nested input cannot be read": (saying(("put", '{"user": "u", "data": {"url": "x"}}')), NESTED, 0),
    "nested input, flat guess": (saying(("put", '{"user": "u"}')), NESTED, 0),
    "lists are read": (saying(("put", '{"tags": ["a", "b"]}')), LISTS, 1),
    "lists in another order": (saying(("put", '{"tags": ["b", "a"]}')), LISTS, 0),
    "brace inside a string ends the input": (saying(("f", '{"a": "}"}')), golden(("f", {"a": "}"})), 0),
    "1 is 1.0": (saying(("f", '{"n": 1.0}')), golden(("f", {"n": 1})), 1),
    "1 is true": (saying(("f", '{"n": true}')), golden(("f", {"n": 1})), 1),
    "1 is not '1'": (saying(("f", '{"n": "1"}')), golden(("f", {"n": 1})), 0),
    "NaN passes as one object of Python's reader": (saying(("f", '{"n": NaN}')), golden(("f", '{"n": NaN}')), 1),
    "null": (saying(("f", '{"n": null}')), golden(("f", {"n": None})), 1),
    "single quotes": (saying(("now", "{'city': 'Lima'}")), ONE, 0),
    "trailing comma": (saying(("now", '{"city": "Lima",}')), ONE, 0),
    "comment in the JSON": (saying(("now", '{"city": "Lima" /* here */}')), ONE, 0),
    "unicode escape": (saying(("now", '{"city": "\\u004cima"}')), ONE, 1),
    "cyrillic look-alike in the value": (saying(("now", '{"city": "Lіma"}')), ONE, 0),
    "cyrillic look-alike in the name": (saying(("nоw", '{"city": "Lima"}')), ONE, 0),
    "full-width colon": ("Action： now\nAction Input： {}", golden(("now", {})), 0),
    "CRLF": ('Action: now\r\nAction Input: {"city": "Lima"}\r\n', ONE, 1),
    "input over several lines": ('Action: now\nAction Input: {\n  "city": "Lima"\n}', ONE, 1),
    "name on the next line": ('Action:\nnow\nAction Input:\n{"city": "Lima"}', ONE, 1),
    "no line breaks": ('Action: now Action Input: {"city": "Lima"}', ONE, 1),
    "input before the action": ('Action Input: {"city": "Lima"}\nAction: now', ONE, 1),
    "code fence around the input": ('Action: now\nAction Input: ```{"city": "Lima"}```', ONE, 0),
    "markdown around the labels": ('**Action:** now\n**Action Input:** {"city": "Lima"}', ONE, 0),
    "name in backticks": ('Action: `now`\nAction Input: {"city": "Lima"}', ONE, 0),
    "name with parentheses": ('Action: now()\nAction Input: {"city": "Lima"}', ONE, 1),
    "name with a dot stops at it": ('Action: now.utc\nAction Input: {"city": "Lima"}', ONE, 1),
    "lower-case labels": ('action: now\naction input: {"city": "Lima"}', ONE, 0),
    "an action named in the thought counts": (
        'Thought: the Action: now fits\nAction: now\nAction Input: {"city": "Lima"}',
        ONE,
        0,
    ),
    "words after the input": (saying(("now", '{"city": "Lima"} because')), ONE, 1),
    "an empty input said, none expected": (saying(("now", "{}")), golden(("now", {})), 1),
    "no input said, none expected": ("Action: now", golden(("now", {})), 1),
    "no call, none expected": ("There is no tool for this.", golden(), 1),
    "no call": ("It is noon.", ONE, 0),
    "empty": ("", ONE, 0),
    "action without a name": ('Action: \nAction Input: {"city": "Lima"}', ONE, 0),
    "unclosed input": ('Action: now\nAction Input: {"city": "Lima"', ONE, 0),
    "optional calls cannot be named": (
        saying(("now", "{}"), ("[Optional]sun", "{}")),
        golden(("now", {}), ("[Optional]sun", {})),
        0,
    ),
    "golden input unreadable, compared as empty": (saying(("now", "{}")), golden(("now", "{$}")), 1),
    "a huge number": (saying(("f", '{"n": ' + "9" * 10_000 + "}")), golden(("f", {"n": 9})), 0),
    "very deep lists": (saying(("f", '{"n": ' + "[" * 50_000 + "}")), golden(("f", {"n": []})), 0),
    "deep lists": (saying(("f", '{"n": ' + "[" * 900 + "]" * 900 + "}")), golden(("f", {"n": []})), 0),
    "a hundred thousand unclosed inputs": ("Action Input: {" * 100_000, ONE, 0),
    "a hundred thousand actions": ("Action: now\n" * 100_000, ONE, 0),
    "huge text before": ("x" * 1_000_000 + saying(("now", '{"city": "Lima"}')), ONE, 1),
    "a long run of white space": ("Action:" + " " * 1_000_000 + 'now Action Input: {"city": "Lima"}', ONE, 1),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("response", "answer", "reward"), FIELD.values(), ids=FIELD)
def test_verdicts_follow_the_field_protocol(response, answer, reward):
    verdict = toolalpaca.verify(response, answer)
    assert verdict.reward == reward
    assert toolalpaca.verify(response, answer, truncated=True) == verdict
    assert (verdict.feedback is None) == (reward == 1)
    if reward == 0:
        assert "mismatch: predicted " in verdict.feedback
        verdict.feedback.encode("utf-8")


def by_the_published_patterns(response: str, answer: str) -> bool:
    """The published protocol, with regular expressions only."""
    calls, merged, expected = json.loads(answer), {}, {}
    for block in re.findall(r"Action Input:\s*({.*?})", response, re.DOTALL):
        try:
            merged.update(json.loads(block))
        except ValueError:
            continue
    for call in calls:
        expected.update(json.loads(call["Action_Input"]))
    names = Counter(re.findall(r"Action:\s*(\w+)", response))
    return names == Counter(call["Action"] for call in calls) and merged == expected


PIECES = ["Action:", "Action Input:", " ", "\n", "now", "sun", "{", "}", '{"city": "Lima"}', '{"day": 1}', '"', "x"]


@settings(max_examples=300)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=25), answer=st.sampled_from([ONE, TWO, golden(("now", {}))]))
def test_field_protocol_agrees_with_published_patterns(pieces, answer):
    response = "".join(pieces)
    assert toolalpaca.verify(response, answer).reward == by_the_published_patterns(response, answer)


def perfect(answer: str) -> str:
    return saying(*((call["Action"].removeprefix("[Optional]"), call["Action_Input"]) for call in json.loads(answer)))


def test_perfect_calls_miss_two_records_in_field_protocol(shared_data):
    test = toolalpaca.build("test", shared_data / "toolalpaca" / "eval_simulated.json")
    for protocol, unreachable in {"field": 2, "strict": 0}.items():
        rewards = [toolalpaca.verify(perfect(row["answer"]), row["answer"], protocol=protocol).reward for row in test]
        assert rewards.count(0.0) == unreachable


def test_feedback_has_the_wording_of_the_paper():
    verdict = toolalpaca.verify(
        saying(("searchAxolotlImages", '{"color": "wild"}')), golden(("getRandomAxolotlImage", {}))
    )
    assert verdict.feedback == (
        "Actions mismatch: predicted [searchAxolotlImages], expected [getRandomAxolotlImage]; "
        'Action inputs mismatch: predicted {"color": "wild"}, expected {}'
    )


def test_feedback_names_only_the_mismatch():
    assert toolalpaca.verify(saying(("now", '{"city": "Rome"}')), ONE).feedback == (
        'Action inputs mismatch: predicted {"city": "Rome"}, expected {"city": "Lima"}'
    )


@pytest.mark.parametrize("protocol", ["field", "strict"])
def test_feedback_on_a_wrong_name_does_not_blame_equal_inputs(protocol):
    verdict = toolalpaca.verify(saying(("later", '{"city": "Lima"}')), ONE, protocol=protocol)
    assert verdict.feedback == "Actions mismatch: predicted [later], expected [now]"


@pytest.mark.parametrize("protocol", ["field", "strict"])
def test_feedback_is_short_and_names_the_expected_call(protocol):
    verdict = toolalpaca.verify("Action: now\nAction Input: {}\n" * 10_000, ONE, protocol=protocol)
    assert len(verdict.feedback) < 2_000
    assert "expected [now]" in verdict.feedback


def test_lone_surrogate_does_not_reach_the_feedback():
    verdict = toolalpaca.verify(saying(("now", '{"city": "\\ud800"}')), ONE)
    assert verdict.feedback.encode("utf-8")


# ---- the strict protocol ----

STRICT = {  # reason: (response, answer, reward)
    "right": (saying(("now", '{"city": "Lima"}')), ONE, 1),
    "nested input": (saying(("put", '{"user": "u", "data": {"url": "x"}}')), NESTED, 1),
    "nested input, wrong inside": (saying(("put", '{"user": "u", "data": {"url": "y"}}')), NESTED, 0),
    "brace inside a string": (saying(("f", '{"a": "}"}')), golden(("f", {"a": "}"})), 1),
    "lists": (saying(("put", '{"tags": ["a", "b"]}')), LISTS, 1),
    "lists in another order": (saying(("put", '{"tags": ["b", "a"]}')), LISTS, 0),
    "two calls": (saying(("now", '{"city": "Lima"}'), ("sun", '{"day": 1}')), TWO, 1),
    "two calls in another order": (saying(("sun", '{"day": 1}'), ("now", '{"city": "Lima"}')), TWO, 0),
    "inputs at the wrong call": (saying(("now", '{"day": 1}'), ("sun", '{"city": "Lima"}')), TWO, 0),
    "all inputs in one call": (saying(("now", '{"city": "Lima", "day": 1}'), ("sun", "{}")), TWO, 0),
    "a call too many": (saying(("now", '{"city": "Lima"}'), ("now", '{"city": "Lima"}')), ONE, 0),
    "a call too few": (saying(("now", '{"city": "Lima"}')), TWO, 0),
    "duplicate keys": (saying(("now", '{"city": "Rome", "city": "Lima"}')), ONE, 0),
    "keys in another order": (saying(("f", '{"b": 2, "a": 1}')), golden(("f", {"a": 1, "b": 2})), 1),
    "1 is 1.0": (saying(("f", '{"n": 1.0}')), golden(("f", {"n": 1})), 1),
    "1 is not true": (saying(("f", '{"n": true}')), golden(("f", {"n": 1})), 0),
    "nested 1 is not true": (saying(("f", '{"n": [{"m": true}]}')), golden(("f", {"n": [{"m": 1}]})), 0),
    "1 is not '1'": (saying(("f", '{"n": "1"}')), golden(("f", {"n": 1})), 0),
    "NaN is no JSON": (saying(("f", '{"n": NaN}')), golden(("f", {"n": 0})), 0),
    "null is not missing": (saying(("f", '{"n": null}')), golden(("f", {})), 0),
    "an optional call made": (
        saying(("now", "{}"), ("sun", '{"day": 1}')),
        golden(("now", {}), ("[Optional]sun", {"day": 1})),
        1,
    ),
    "an optional call left out": (saying(("now", "{}")), golden(("now", {}), ("[Optional]sun", {"day": 1})), 1),
    "an optional call made wrongly": (
        saying(("now", "{}"), ("sun", '{"day": 2}')),
        golden(("now", {}), ("[Optional]sun", {"day": 1})),
        0,
    ),
    "an optional call in between left out": (
        saying(("a", "{}"), ("c", "{}")),
        golden(("a", {}), ("[Optional]b", {}), ("c", {})),
        1,
    ),
    "only the optional call": (saying(("sun", "{}")), golden(("now", {}), ("[Optional]sun", {})), 0),
    "the mark copied": (saying(("now", "{}"), ("[Optional]sun", "{}")), golden(("now", {}), ("[Optional]sun", {})), 0),
    "the wrong call first": (saying(("later", "{}"), ("now", '{"city": "Lima"}')), ONE, 0),
    "an action in the thought is no call": (
        'Thought: the Action: now fits\nAction: now\nAction Input: {"city": "Lima"}',
        ONE,
        1,
    ),
    "an action inside an input is no call": (
        saying(("say", '{"text": "\\nAction: now\\nAction Input: {}"}')),
        golden(("say", {"text": "\nAction: now\nAction Input: {}"})),
        1,
    ),
    "CRLF": ('Action: now\r\nAction Input: {"city": "Lima"}\r\n', ONE, 1),
    "indented": ('  Action: now \n  Action Input: {"city": "Lima"}', ONE, 1),
    "input over several lines": ('Action: now\nAction Input:\n{\n  "city": "Lima"\n}', ONE, 1),
    "a blank line between": ('Action: now\n\nAction Input: {"city": "Lima"}', ONE, 1),
    "words between": ('Action: now\nso that\nAction Input: {"city": "Lima"}', ONE, 0),
    "words after the input": (saying(("now", '{"city": "Lima"} because')), ONE, 1),
    "an observation made up": (saying(("now", '{"city": "Lima"}')) + "\nObservation: noon", ONE, 1),
    "name with parentheses": ('Action: now()\nAction Input: {"city": "Lima"}', ONE, 0),
    "name in another case": (saying(("Now", '{"city": "Lima"}')), ONE, 0),
    "no line break": ('Action: now Action Input: {"city": "Lima"}', ONE, 0),
    "input before the action": ('Action Input: {"city": "Lima"}\nAction: now', ONE, 0),
    "no input said": ("Action: now", golden(("now", {})), 0),
    "single quotes": (saying(("now", "{'city': 'Lima'}")), ONE, 0),
    "a list as input": (saying(("now", '[{"city": "Lima"}]')), ONE, 0),
    "unclosed input": ('Action: now\nAction Input: {"city": "Lima"', ONE, 0),
    "cyrillic look-alike": (saying(("nоw", '{"city": "Lima"}')), ONE, 0),
    "no call, none expected": ("There is no tool for this.", golden(), 1),
    "empty": ("", ONE, 0),
    "action without a name": ('Action:\nAction Input: {"city": "Lima"}', ONE, 0),
    "a huge number": (saying(("f", '{"n": ' + "9" * 10_000 + "}")), golden(("f", {"n": 9})), 0),
    "very deep lists": (saying(("f", '{"n": ' + "[" * 50_000)), golden(("f", {"n": []})), 0),
    "a hundred thousand unclosed inputs": ("Action: now\nAction Input: {" * 100_000, ONE, 0),
    "a long run of white space": ("Action: now" + " " * 1_000_000 + '\nAction Input: {"city": "Lima"}', ONE, 1),
    "very many ways to leave calls out": (
        saying(*[("sun", "{}")] * 20, ("now", "{}")),
        golden(*[("[Optional]sun", {})] * 40),
        0,
    ),
    "thousands of calls": (saying(*[("now", "{}")] * 2000), golden(*[("now", {})] * 2000), 1),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("response", "answer", "reward"), STRICT.values(), ids=STRICT)
def test_verdicts_follow_the_strict_protocol(response, answer, reward):
    verdict = toolalpaca.verify(response, answer, protocol="strict")
    assert verdict.reward == reward
    assert (verdict.feedback is None) == (reward == 1)
    if reward == 0:
        verdict.feedback.encode("utf-8")


DRAFT = f"<think>\nI could call\n{saying(('later', '{}'))}\n</think>\n"


def test_strict_protocol_reads_calls_after_the_thinking():
    right, wrong = saying(("now", '{"city": "Lima"}')), saying(("now", '{"city": "Rome"}'))
    grade = partial(toolalpaca.verify, answer=ONE, protocol="strict")
    assert grade(DRAFT + right) == grade(right)
    assert grade(DRAFT + wrong).feedback == grade(wrong).feedback
    assert grade(DRAFT + wrong).corrected == DRAFT + right
    assert grade("draft</think>" + right.removeprefix("Thought: t\n")).reward == 1.0
    for response in (f"<think>{right}", f"<think>{right}</think>", f"<think>{wrong}</think>"):
        verdict = grade(response)
        assert (verdict.reward, verdict.metrics, verdict.corrected) == (0.0, {"answer_format": 0.0}, None)
        assert verdict.feedback.startswith("Actions mismatch: predicted [], expected [now]")


def test_field_protocol_reads_calls_in_the_thinking():
    """As SDPO's verifier does."""
    verdict = toolalpaca.verify(DRAFT + saying(("now", '{"city": "Lima"}')), ONE)
    assert verdict.feedback == "Actions mismatch: predicted [later, now], expected [now]"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["now", "sun", "put"]), st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3)),
    max_size=4,
)


@given(calls=CALLS, indent=st.sampled_from([None, 2]), ascii_only=st.booleans())
def test_strict_protocol_reads_back_any_calls(calls, indent, ascii_only):
    response = saying(*((name, json.dumps(given, indent=indent, ensure_ascii=ascii_only)) for name, given in calls))
    assert toolalpaca.verify(response, golden(*calls), protocol="strict").reward == 1.0


@given(made=CALLS, expected=CALLS)
def test_strict_protocol_passes_only_equal_calls(made, expected):
    response = saying(*((name, json.dumps(given)) for name, given in made))
    same = json.dumps(made, sort_keys=True) == json.dumps(expected, sort_keys=True)
    assert toolalpaca.verify(response, golden(*expected), protocol="strict").reward == same


@pytest.mark.parametrize("protocol", ["field", "strict"])
@pytest.mark.parametrize("style", [{}, {"indent": 2}, {"separators": (",", ":")}])
def test_wrong_call_has_a_corrected_response(protocol, style):
    """In the response's own style and order, so that the first difference is one of content."""
    right = {"city": "Líma", "day": 2, "unit": "C"}
    made = json.dumps({"day": 2, "city": "Oslo", "zone": 1}, ensure_ascii=False, **style)
    response = f"{saying(('forecast', made))}\nDone."
    verdict = toolalpaca.verify(response, golden(("now", right)), protocol=protocol)
    expected = json.dumps({"day": 2, "city": "Líma", "unit": "C"}, ensure_ascii=False, **style)
    assert verdict.reward == 0.0
    assert verdict.corrected == f"{saying(('now', expected))}\nDone."
    fixed = toolalpaca.verify(verdict.corrected, golden(("now", right)), protocol=protocol)
    assert (fixed.reward, fixed.corrected) == (1.0, None)


@pytest.mark.parametrize("protocol", ["field", "strict"])
@pytest.mark.parametrize(
    ("response", "calls"),
    [
        ("no call", [("now", {})]),
        (saying(("now", "{city: Lima}")), [("now", {})]),
        (saying(("now", '{ "odd" :1}')), [("now", {})]),
        (saying(("now", '{"a": 1}'), ("now", '{"a": 2}')), [("now", {})]),
        (saying(("now", '{"a": 1}')) + "\nAction: then", [("now", {})]),
        (saying(("now", '{"a": 1}')) + '\nAction Input: {"a": 2}', [("now", {})]),
        (saying(("now", '{"a": 1}')), [("now", {}), ("then", {})]),
    ],
)
def test_response_without_one_counterpart_is_not_corrected(protocol, response, calls):
    assert toolalpaca.verify(response, golden(*calls), protocol=protocol).corrected is None


def test_protocol_in_the_name_reaches_verify_and_reward():
    response = saying(("put", '{"user": "u", "data": {"url": "x"}}'))
    for name, expected in {"toolalpaca": 0.0, "toolalpaca:field": 0.0, "toolalpaca:strict": 1.0}.items():
        task = load_task(name)
        assert task.verify(response, NESTED).reward == expected
        assert task.reward(completions=[response], answer=[NESTED], prompts=["p"])[0].reward == expected


def test_task_column_names_the_protocol(write_jsonl, capsys):
    path = write_jsonl([PREPARED])
    assert load_task("toolalpaca:strict").build("test", path)["task"] == ["toolalpaca:strict"]
    assert load_task("toolalpaca:field").build("test", path)["task"] == ["toolalpaca"]


def test_golden_calls_can_be_a_list():
    assert toolalpaca.verify(saying(("now", '{"city": "Lima"}')), json.loads(ONE)).reward == 1.0


@pytest.mark.parametrize("answer", [None, "", "now", "{}", "[1]", '[{"Action": 1}]', '[{"Action": "now"}]'])
def test_golden_answer_that_is_not_a_list_of_calls_raises(answer):
    with pytest.raises(ValueError, match=r"Call 0|ToolAlpaca answer"):
        toolalpaca.verify("Action: now", answer)
