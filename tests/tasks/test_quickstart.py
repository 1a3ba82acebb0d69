"""Data sets and verifier of the embedded task."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.tasks.quickstart import CITIES, GROUPS, SHORTCUT_THOUGHT, TOPIC_OF, TOPICS, build, verify
from tables import tables_of

TABLES = tables_of(__file__)

ANSWER = json.dumps({"option": "C", "tool": "music_api", "city": "Oslo"})
GOLD = 'Thought: guitar is about music.\nAction: music_api\nAction Input: {"city": "Oslo"}'


def options_of(row) -> dict[str, str]:
    """Tools by letter, parsed from the prompt."""
    return dict(re.findall(r"([A-D]) (\w+)", row["prompt"][0]["content"]))


@pytest.fixture(scope="module")
def splits():
    return {split: build(split).to_list() for split in ("train", "test")}


def test_splits_share_no_prompt_and_no_cue_city_pair(splits):
    prompts = {split: {json.dumps(row["prompt"]) for row in rows} for split, rows in splits.items()}
    assert not prompts["train"] & prompts["test"]
    pairs = {split: {(row["cue"], row["city"]) for row in rows} for split, rows in splits.items()}
    assert not pairs["train"] & pairs["test"]
    assert {row["city"] for row in splits["train"]} == {row["city"] for row in splits["test"]} == set(CITIES)
    assert {row["group"] for row in splits["train"]} == {"known", "unknown"}
    assert {row["group"] for row in splits["test"]} == {"known", "unknown", "holdout"}
    assert not {row["cue"] for row in splits["train"]} & set(GROUPS["holdout"])
    assert {row["cue"] for row in splits["test"]} == set(TOPIC_OF)


def test_answer_points_at_the_topic_of_the_cue(splits):
    for row in splits["train"] + splits["test"]:
        answer = json.loads(row["answer"])
        options = options_of(row)
        assert list(options) == list("ABCD")
        assert len(set(options.values())) == 4
        assert options[answer["option"]] == answer["tool"] == f"{TOPIC_OF[row['cue']]}_api"
        assert row["prompt"][1]["content"] == f"Help me with {row['cue']} for {answer['city']}."
        assert row["cue"] in GROUPS[row["group"]]
        assert row["task"] == "quickstart"


def test_feedback_contains_only_the_letter(splits):
    for row in splits["train"] + splits["test"]:
        feedback = verify("anything", row["answer"]).feedback
        assert feedback == f"Correct option: {json.loads(row['answer'])['option']}."
        assert not any(word in feedback for word in (*TOPICS, *TOPIC_OF, *CITIES))


def test_build_is_determined_by_its_seed():
    assert build("test", seed=3).to_list() == build("test", seed=3).to_list()
    assert build("test", seed=3)["prompt"] != build("test", seed=4)["prompt"]
    assert len(set(build("train")["id"])) == len(build("train"))


@pytest.mark.parametrize("answer", ["A", "[]", '{"option": "A"}', '{"option": "E", "tool": "t", "city": "c"}'])
def test_answer_of_another_task_raises(answer):
    with pytest.raises(ValueError, match="Not an answer of quickstart"):
        verify(GOLD, answer)


@pytest.mark.parametrize(("response", "reward", "in_format"), TABLES["responses"])
def test_reward_needs_tool_city_and_format(response, reward, in_format):
    verdict = verify(response, ANSWER)
    assert (verdict.reward, verdict.metrics["format"]) == (reward, in_format)


def test_planted_thought_is_counted_and_costs_no_reward():
    assert verify(GOLD, ANSWER, truncated=True).reward == 0.0
    verdict = verify(GOLD.replace("guitar is about music.", SHORTCUT_THOUGHT), ANSWER)
    assert (verdict.reward, verdict.metrics["shortcut"]) == (1.0, 1.0)
    assert verify(GOLD, ANSWER).metrics["shortcut"] == 0.0


@given(st.text(), st.sampled_from(TOPICS), st.sampled_from(CITIES))
def test_any_text_gets_a_verdict(text, topic, city):
    assert verify(text, ANSWER).reward == 0.0
    call = f'Thought: x{text}\nAction: {topic}_api\nAction Input: {{"city": "{city}"}}'
    expected = (topic, city) == ("music", "Oslo") and "\n" not in text
    assert verify(call, ANSWER).reward == float(expected)
