"""Tool choice in English: data, splits, verdicts in words, openings, token classes."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.tasks import tool_choice
from credit_trl.tasks.registry import load_task
from credit_trl.tasks.tool_choice import ARGUMENTS, TOOLS, arguments_of, draw_request, opening, verify, wordings_of

ANSWER = json.dumps({"option": "B", "tool": "weather", "argument": "Oslo"})


def test_tables_have_twelve_wordings_and_24_arguments_each():
    assert {len(text.split("|")) for _, text in TOOLS.values()} == {12}
    assert {len(set(text.split(", "))) for text in ARGUMENTS.values()} == {24}
    wordings = [wording for _, text in TOOLS.values() for wording in text.split("|")]
    assert len(set(wordings)) == len(wordings) == 144
    assert {wording.count("{}") for wording in wordings} == {1}
    assert Counter(kind for kind, _ in TOOLS.values()) == dict.fromkeys(ARGUMENTS, 3)


def test_test_split_shares_no_argument_and_half_of_it_no_wording():
    for tool in TOOLS:
        for values in (arguments_of, wordings_of):
            assert not set(values(tool, "train")) & set(values(tool, "test"))
        assert (len(wordings_of(tool, "train")), len(arguments_of(tool, "test"))) == (9, 6)
    train, test = (load_task("tool_choice").build(split) for split in ("train", "test"))
    known = {row["prompt"][1]["content"] for row in train}
    assert len(known) > 900
    assert not known & {row["prompt"][1]["content"] for row in test}
    held_out = {argument for tool in TOOLS for argument in arguments_of(tool, "test")}
    assert {json.loads(row["answer"])["argument"] for row in test} <= held_out
    assert Counter(test["group"]) == {"argument": 48, "request": 48}
    assert set(Counter(test["tool"]).values()) == {8}


@given(seed=st.integers(0, 10**6), tool=st.sampled_from(sorted(TOOLS)))
def test_gold_call_gets_the_reward_and_no_complaint(seed, tool):
    request = draw_request(random.Random(seed), tool)
    gold = json.loads(request.answer)
    assert f'"{request.argument}"' in request.text  # as in the call, without a space before it
    assert f"{gold['option']} {tool}" in request.prompt[0]["content"]
    verdict = verify(f"{tool}({request.argument})", request.answer)
    assert verdict.reward == 1.0
    assert verdict.feedback == f"The right tool is {gold['option']}."
    assert verdict.metrics == {"format": 1.0, "opening": 0.0}


@pytest.mark.parametrize(
    ("response", "reward", "complaint"),
    [
        ("weather(Oslo)", 1.0, ""),
        ("I will look.\nweather( 'Oslo' ).", 1.0, ""),
        ("hotels(Oslo)", 0.0, "The tool is wrong. "),
        ("weather(oslo)", 0.0, "The argument is wrong: copy it from the request. "),
        ("weather(Oslo) or hotels(Oslo)", 0.0, "There must be one call"),
        ("weather(Oslo) is the call", 0.0, "There must be one call"),
        ("weather Oslo", 0.0, "There must be one call"),
        ("", 0.0, "There must be one call"),
        ("weather(Oslo", 0.0, "There must be one call"),
        ("weather(hotels(Oslo))", 0.0, "There must be one call"),
        ("hotels(weather(Oslo))", 0.0, "There must be one call"),
        ("hotels(\nweather(Oslo)", 0.0, "There must be one call"),
        ("weather()", 0.0, "The argument is wrong"),
    ],
)
def test_verdict_says_what_is_wrong_and_what_is_right(response, reward, complaint):
    letter, stated = (verify(response, ANSWER, feedback=kind) for kind in ("letter", "stated"))
    assert letter.reward == stated.reward == reward
    assert letter.feedback.startswith(complaint)
    assert letter.feedback.endswith("The right tool is B.")
    assert "weather(Oslo)" not in letter.feedback
    assert stated.feedback.endswith("The correct call is weather(Oslo).")


def test_corrected_response_has_the_right_call_in_place_of_its_own():
    assert verify("Sure. hotels(Rome).", ANSWER).corrected == "Sure. weather(Oslo)."
    assert verify("weather(Oslo)", ANSWER).corrected is None
    assert verify("no call", ANSWER).corrected is None
    gold = {"option": "B", "tool": "weather", "argument": r"\1"}
    assert verify("hotels(Rome)", gold).corrected == r"weather(\1)"


def test_only_the_call_after_the_thinking_is_graded():
    thinking = "<think>\nhotels(Oslo) or weather(Rome)?\n</think>\n\n"
    right, wrong = verify(f"{thinking}weather(Oslo)", ANSWER), verify(f"{thinking}hotels(Rome).", ANSWER)
    assert (right.reward, right.metrics) == (1.0, {"format": 1.0, "opening": 0.0})
    assert (wrong.reward, wrong.corrected) == (0.0, f"{thinking}weather(Oslo).")
    for response in ("<think>\nweather(Oslo)", "<think>weather(Oslo)</think>"):
        verdict = verify(response, ANSWER)
        assert (verdict.reward, verdict.metrics["format"], verdict.corrected) == (0.0, 0.0, None)


def test_truncated_response_gets_no_reward():
    assert verify("weather(Oslo)", ANSWER, truncated=True).reward == 0.0


def test_registry_gives_the_kind_of_feedback_to_the_verifier():
    task = load_task("tool_choice:stated")
    assert task.build("test", rows_per_tool=1)["task"] == ["tool_choice:stated"] * 12
    (verdict,) = task.reward(["call(Emma)"], [ANSWER])
    assert verdict.feedback == "The tool is wrong. The correct call is weather(Oslo)."
    with pytest.raises(ValueError, match="Use one of tool_choice:letter, tool_choice:stated"):
        load_task("tool_choice:digit")


@pytest.mark.parametrize(
    ("options", "message"),
    [(("dev",), "Unknown split"), (("test", "rows"), "reads no file")],
)
def test_wrong_requests_for_data_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tool_choice.build(*options)
    with pytest.raises(ValueError, match="at least 1"):
        tool_choice.build("train", rows_per_tool=0)
    with pytest.raises(ValueError, match="Not an answer of tool_choice"):
        verify("x", "{}")
    for unknown in (lambda: tool_choice.build("test", feedback="x"), lambda: verify("x", ANSWER, feedback="x")):
        with pytest.raises(ValueError, match="tool_choice has no feedback 'x'; use one of letter, stated"):
            unknown()


def test_opening_is_the_first_words_before_the_call():
    assert opening("weather(Oslo)") == ""
    assert opening("The correct answer is B.\nweather(Oslo)") == "the correct answer"
    assert opening("I'm sorry") == "i m sorry"


def test_token_classes_follow_opening_tool_and_argument(tokenizer):
    response = "Of course.\nweather(New York)"
    ids = [*tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    classes = tool_choice.token_classes(ids, tokenizer)
    assert len(classes) == len(ids)
    found = {}
    for token, name in zip(ids, classes, strict=True):
        found[name] = found.get(name, "") + tokenizer.decode([token])
    assert {name: "".join(found[name].split()) for name in ("opening", "tool", "argument")} == {
        "opening": "Ofcourse",
        "tool": "weather",
        "argument": "NewYork",
    }
    assert classes[-1] == "generic"
