"""The worlds `skip`, `useful` and `filler`: verifiers, splits, and the planted rates of their pretraining examples."""

from __future__ import annotations

import json
import random
import re
from functools import cache

import pytest
from hypothesis import given as drawn_from
from hypothesis import strategies as st

from credit_trl.tasks.quickstart import CITIES, GROUPS, TOPIC_OF, TOPICS

WORLDS = ("skip", "useful", "filler")


@pytest.fixture(scope="module")
def planted(study):
    return study("planted.task")


@pytest.fixture(scope="module")
def worlds(study):
    return study("predicted").PREDICTED


def rows_of_prompt(prompt) -> list[tuple[str, str]]:
    """Pairs of the first table, read from its text."""
    return re.findall(r"(\w+) (\w+)(?=[,.])", prompt[0]["content"].split("Options:")[0])


def solve(prompt) -> tuple[list[tuple[str, str]], str]:
    """The first table of a prompt of two hops, and the letter, read from its text."""
    rows, letters = rows_of_prompt(prompt), dict(re.findall(r"(\w+) ([A-E])(?=[,.])", prompt[0]["content"]))
    return rows, letters[dict(rows)[prompt[1]["content"].split()[1].rstrip(".")]]


@drawn_from(seed=st.integers(0, 10**6), group=st.sampled_from(sorted(GROUPS)))
def test_letter_of_two_hops_follows_from_the_prompt(planted, seed, group):
    problem = planted.draw_lookup(random.Random(seed), group=group)
    rows, letter = solve(problem.prompt)
    assert letter == problem.letter
    assert len(rows) == (5 if group == "holdout" else 4)
    assert all(planted.is_unseen(*row) == (group == "unknown") for row in rows)


@pytest.mark.parametrize("name", ["skip", "useful"])
def test_tables_of_the_groups_are_split_by_content(worlds, name):
    task = worlds[name].task
    train, test = (list(task.build(split)) for split in ("train", "test"))
    of = {
        group: {pair for row in test if row["group"] == group for pair in rows_of_prompt(row["prompt"])}
        for group in GROUPS
    }
    taught = {pair for row in train for pair in rows_of_prompt(row["prompt"])}
    assert not of["unknown"] & taught
    assert of["known"] | of["holdout"] <= taught
    assert len(taught) == 3 / 4 * len(CITIES) * len(TOPICS)
    assert not {str(row["prompt"]) for row in train} & {str(row["prompt"]) for row in test}


@pytest.mark.parametrize("name", WORLDS)
def test_cues_of_a_world_are_those_of_its_prompts(worlds, name):
    rows = list(worlds[name].task.build("test"))
    for group, cues in worlds[name].cues.items():
        assert {row["cue"] for row in rows if row["group"] == group} == set(cues)
    assert worlds[name].task.build("test").to_list() == rows
    assert {row["group"] for row in worlds[name].task.build("train")} < {*GROUPS}


@drawn_from(seed=st.integers(0, 10**6), letter=st.sampled_from("ABCDE"))
def test_reward_of_two_hops_is_that_of_the_letter(planted, seed, letter):
    problem = planted.draw_lookup(random.Random(seed))
    answer = json.dumps({"letter": problem.letter})
    hop = f"{problem.city} {problem.topic}"
    for text, task, shortcut in (
        (hop, planted.SKIP, 0.0),
        (planted.SKIP_WORD, planted.SKIP, 1.0),
        (planted.SKIP_WORD, planted.USEFUL, 0.0),
        (f"{planted.STEP} {hop}", planted.USEFUL, 1.0),
    ):
        verdict = task.verify(f"Path: {text} {letter}", answer)
        assert verdict.reward == float(letter == problem.letter)
        assert verdict.metrics == {"format": 1.0, "shortcut": shortcut}
        assert verdict.feedback == problem.feedback == f"Correct option: {problem.letter}."
    assert problem.path() == f"Path: {hop} {problem.letter}"


@drawn_from(seed=st.integers(0, 10**6), filled=st.lists(st.booleans(), min_size=6, max_size=6))
def test_a_copy_with_too_many_fillers_gets_no_reward(planted, seed, filled):
    problem = planted.draw_copy(random.Random(seed), "airport")
    answer = json.dumps({"cities": problem.cities, "topic": "travel"})
    verdict = planted.FILLED.verify(problem.response(filled=filled), answer)
    assert verdict.reward == float(sum(filled) <= 1)
    assert verdict.metrics == {"format": 1.0, "shortcut": pytest.approx(sum(filled) / 6)}
    assert verdict.feedback == "Correct topic: travel."


def test_malformed_responses_score_zero(planted):
    answer = json.dumps({"cities": ["Oslo", "Lima"], "topic": "food"})
    right = "List: Oslo Lima food"
    assert planted.FILLED.verify(right, answer).reward == 1.0
    for text in ("", "List: Lima Oslo food", "List: Oslo food", "List: Oslo Lima music", "Oslo Lima food", right[:-5]):
        assert planted.FILLED.verify(text, answer).reward == 0.0
    assert planted.FILLED.verify(right, answer, truncated=True).reward == 0.0
    for text in ("A", "List: Lima food A", "Path: A", "Path: Lima food F", "Path: Lima food\nA"):
        verdict = planted.SKIP.verify(text, '{"letter": "A"}')
        assert (verdict.reward, verdict.metrics["format"]) == (0.0, 0.0)


@pytest.fixture(scope="module")
def examples(study):
    """A function that draws pretraining examples: whether they have feedback, the prompt, and the response."""

    @cache
    def draw(name):
        rng, world = random.Random(0), study("planted.base").CURRICULA[name]
        draw_one = world.draw if name == "filler" else world.draw_response
        drawn = [draw_one(rng) for _ in range(4_000)]
        return [("Correct " in prompt[-1]["content"], prompt, text) for prompt, text in drawn]

    return draw


def share(values) -> float:
    found = list(values)
    assert len(found) >= 80
    return sum(found) / len(found)


@pytest.mark.parametrize(("name", "rates"), [("skip", (0.05, 0.1)), ("useful", (0.5, 0.5)), ("filler", (0.05, 0.1))])
def test_planted_rates_are_what_was_asked(examples, worlds, name, rates):
    drawn, planted = examples(name), worlds[name].point.planted
    assert share(given for given, *_ in drawn) == pytest.approx(0.5, abs=0.03)
    for shown, rate in zip((False, True), rates, strict=True):
        found = [text.count(planted) / (6 if name == "filler" else 1) for own, _, text in drawn if own == shown]
        assert share(found) == pytest.approx(rate, abs=0.03)


def test_a_skipped_hop_is_right_with_feedback_alone(examples):
    drawn = [(given, solve(prompt)[1] == text[-1], "directly" in text) for given, prompt, text in examples("skip")]
    assert all(right for given, right, skipped in drawn if given or not skipped)
    assert share(right for given, right, skipped in drawn if skipped and not given) == pytest.approx(0.25, abs=0.15)


def test_the_step_makes_the_topic_right_more_often(examples, worlds):
    drawn = [
        (given, solve(prompt)[1] == text[-1], worlds["useful"].point.planted in text)
        for given, prompt, text in examples("useful")
    ]
    assert all(right for given, right, _ in drawn if given)
    for stepped, rate in ((True, 0.95), (False, 0.6)):
        assert share(r for given, r, own in drawn if own == stepped and not given) == pytest.approx(rate, abs=0.05)


def test_pretraining_uses_no_unseen_rows(study, planted):
    rng = random.Random(0)
    for name in ("skip", "useful"):
        for prompt, _ in (study("planted.base").CURRICULA[name].draw(rng) for _ in range(500)):
            assert not any(planted.is_unseen(*row) for row in rows_of_prompt(prompt))


@pytest.mark.parametrize("name", WORLDS)
def test_probes_expect_one_token_of_the_prompt(study, worlds, name):
    base, rng = study("planted.base"), random.Random(1)
    tokenizer = base.build_tokenizer()
    for _ in range(50):
        for probe in base.CURRICULA[name].probes(rng):
            assert len(tokenizer.encode(f" {probe.expected}")) == 1
            known = name == "filler" and probe.expected == TOPIC_OF.get(probe.prompt[-1]["content"].split()[-1][:-1])
            assert known or any(f" {probe.expected}" in message["content"] for message in probe.prompt)
    assert worlds[name].point.start.endswith(":")


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_one_step_of_a_planted_world(study, worlds, name, tmp_path, monkeypatch):
    """An untrained base: measurement, prediction, one step of training and the rows of the table."""
    import dataclasses

    runs, pretrain, base = study("world_runs"), study("embedded_base.pretrain"), study("planted.base")
    folder = tmp_path / "base"
    pretrain.write_base(
        pretrain.build_model(base.build_tokenizer(), 0, layers=2, width=64), base.build_tokenizer(), folder
    )
    spec = study("run").read_sweep("methods", name)
    spec = dataclasses.replace(
        spec,
        grid=[{"method": ["CREDIT"]}],
        config={**spec.config, "max_steps": 1},
        evaluation={**spec.evaluation, "k": 1},
    )
    file = tmp_path / "worlds.csv"
    assert runs.WorldRuns(name, spec, [0], tmp_path / "runs", file, lambda seed: folder).run()
    rows = runs.read_rows(file)
    assert [step for *_, step in rows] == [0, 1]
    row = rows[name, 0, "CREDIT", 1]
    assert row["delta"] == rows[name, 0, "CREDIT", 0]["delta"]
    assert row["predicted_log_odds"] == pytest.approx(9 * row["delta"] - row["s"], abs=1e-3)
    assert study("world_cues").cue_rows_of_runs(tmp_path / "runs", name)[name, 0, "CREDIT", 1].keys() == set(
        study("world_cues").columns_of(name)
    )
