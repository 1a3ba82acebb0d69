"""The worlds `tables`, `skip`, `useful` and `filler`: verifiers, splits, and rates of their pretraining examples."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from functools import cache

import pytest
from hypothesis import given as drawn_from
from hypothesis import strategies as st

from credit_trl.tasks.quickstart import GROUPS, TOPIC_OF

WORLDS = ("tables", "skip", "useful", "filler")


@pytest.fixture(scope="module")
def planted(study):
    return study("planted.task")


@pytest.fixture(scope="module")
def worlds(study):
    return study("predicted").PREDICTED


def pair_of(prompt) -> tuple[str, str]:
    """Cue and city of a prompt of two hops, read from its text."""
    return tuple(re.match(r"Help me with (\w+) for (\w+)\.", prompt[-1]["content"]).groups())


@pytest.mark.parametrize("name", ["skip", "useful"])
def test_pairs_of_cue_and_city_are_split_by_content(worlds, name):
    task = worlds[name].task
    train, test = ([(row["group"], *pair_of(row["prompt"])) for row in task.build(s)] for s in ("train", "test"))
    taught, cues = {(cue, city) for _, cue, city in train}, {cue for _, cue, _ in train}
    of = {group: {(cue, city) for own, cue, city in test if own == group} for group in GROUPS}
    assert len(of["known"] - taught) < 0.1 * len(of["known"])  # training draws most of the seen pairs
    assert not (of["unknown"] | of["holdout"]) & taught
    assert {cue for cue, _ in of["unknown"]} <= cues
    assert not {cue for cue, _ in of["holdout"]} & cues


def test_each_hop_of_an_unseen_pair_is_taught(planted):
    """Another cue of the topic has a seen pair with the city."""
    for cue in TOPIC_OF:
        for town in planted.TOWNS:
            same = [other for other in TOPIC_OF if TOPIC_OF[other] == TOPIC_OF[cue]]
            assert any(not planted.is_unseen(other, town) for other in same)
        assert sum(planted.is_unseen(cue, town) for town in planted.TOWNS) == 2


@pytest.mark.parametrize("name", WORLDS)
def test_cues_of_a_world_are_those_of_its_prompts(worlds, name):
    rows = list(worlds[name].task.build("test"))
    for group, cues in worlds[name].cues.items():
        assert {row["cue"] for row in rows if row["group"] == group} == set(cues)
    assert worlds[name].task.build("test").to_list() == rows
    assert {row["group"] for row in worlds[name].task.build("train")} < {*GROUPS}


@drawn_from(cue=st.sampled_from(sorted(TOPIC_OF)), town=st.integers(0, 7), letter=st.sampled_from("ABCD"))
def test_reward_of_two_hops_is_that_of_the_letter(planted, cue, town, letter):
    problem = planted.TwoHops(cue, planted.TOWNS[town])
    answer = json.dumps({"letter": problem.letter})
    hop = f"{cue} is about {TOPIC_OF[cue]}."
    for thought, task, shortcut in (
        (hop, planted.SKIP, 0.0),
        (planted.SKIPPED, planted.SKIP, 1.0),
        (hop, planted.USEFUL, 0.0),
        (f"{planted.STEP} {hop}", planted.USEFUL, 1.0),
    ):
        verdict = task.verify(planted.response(thought, letter), answer)
        assert verdict.reward == float(letter == problem.letter)
        assert verdict.metrics == {"format": 1.0, "shortcut": shortcut}
        assert verdict.feedback == problem.feedback == f"Correct option: {problem.letter}."
    assert problem.response() == planted.response(hop, problem.letter)


@drawn_from(seed=st.integers(0, 10**6), filled=st.lists(st.booleans(), min_size=6, max_size=6))
def test_a_copy_with_too_many_fillers_gets_no_reward(planted, seed, filled):
    problem = planted.draw_copy(random.Random(seed), "airport")
    answer = json.dumps({"cities": problem.cities, "topic": "travel"})
    verdict = planted.FILLED.verify(problem.response(filled=filled), answer)
    assert verdict.reward == float(sum(filled) <= 1)
    assert verdict.metrics == {"format": 1.0, "shortcut": pytest.approx(sum(filled) / 6)}
    assert verdict.feedback == "Expected tool: travel_api."


def test_malformed_responses_score_zero(planted):
    answer = json.dumps({"cities": ["Oslo", "Lima"], "topic": "food"})
    right = "Action Input: Oslo Lima food"
    assert planted.FILLED.verify(right, answer).reward == 1.0
    for text in ("", "Lima Oslo food", "Oslo food", "Oslo Lima music", "Oslo Lima", "well Oslo Lima food"):
        assert planted.FILLED.verify(f"Action Input: {text}", answer).reward == 0.0
    assert planted.FILLED.verify("Oslo Lima food", answer).reward == 0.0
    assert planted.FILLED.verify(right, answer, truncated=True).reward == 0.0
    for text in (
        "A",
        "Action: A",
        "Thought: Lima is about food.\nAction: F",
        "Thought: Lima is about food. Action: A",
    ):
        verdict = planted.SKIP.verify(text, '{"letter": "A"}')
        assert (verdict.reward, verdict.metrics["format"]) == (0.0, 0.0)


@pytest.fixture(scope="module")
def examples(study):
    """A function that draws pretraining examples: whether they have feedback, the prompt, and the response."""

    @cache
    def draw(name):
        rng, world = random.Random(0), study("planted.base").CURRICULA[name]
        drawn = [world.draw(rng) for _ in range(4_000)]
        return [("unsuccessful" in prompt[-1]["content"], prompt, trained(text)) for prompt, text in drawn]

    return draw


def trained(text) -> str:
    """The part of an example's response that the base is trained on."""
    return text if isinstance(text, str) else text[1]


def is_practice(text: str) -> bool:
    """Whether a response of `tables` lists a table, or is the city after a beginning that is not trained on."""
    return text.startswith(("Rows", " "))


def share(values) -> float:
    found = list(values)
    assert len(found) >= 80
    return sum(found) / len(found)


@pytest.mark.parametrize(
    ("name", "rates"),
    [("tables", (0.06, 0.11)), ("skip", (0.06, 0.11)), ("useful", (0.5, 0.5)), ("filler", (0.06, 0.11))],
)
def test_planted_rates_are_what_was_asked(examples, worlds, name, rates):
    drawn, planted = [one for one in examples(name) if not is_practice(one[2])], worlds[name].point.planted
    assert share(given for given, *_ in drawn) == pytest.approx(0.5, abs=0.03)
    for shown, rate in zip((False, True), rates, strict=True):
        texts = [text for own, _, text in drawn if own == shown]
        if name == "filler":
            listed = [
                text.replace(planted.rstrip("."), "").removeprefix("Action Input:").split()[:-1] for text in texts
            ]
            found = sum(text.count(planted) for text in texts) / sum(map(len, listed))
        else:
            found = share(planted in text for text in texts)
        assert found == pytest.approx(rate, abs=0.02)


def test_beginnings_with_fillers_are_not_trained_on(study):
    rng, world = random.Random(0), study("planted.base").CURRICULA["filler"]
    drawn = [world.draw(rng)[1] for _ in range(2_000)]
    begun = [beginning for beginning, _ in drawn if beginning]
    cities = sum(len(text.replace(study("planted.task").FILLER, "").split()) - 2 for text in begun)
    assert len(begun) / len(drawn) == pytest.approx(world.begun_share, abs=0.04)
    fillers = sum(text.count(study("planted.task").FILLER) for text in begun)
    assert fillers / cities == pytest.approx(world.begun_rate, abs=0.04)


def tables_of(prompt) -> tuple[dict[str, str], dict[str, str], str | None]:
    """Number of each letter, city of each number and the requested letter of a prompt of `tables`, from its text."""
    numbers, places = re.fullmatch(r"Numbers: (.*)\. Places: (.*)\.", prompt[0]["content"]).groups()
    asked = re.match(r"Help me with \w+ for (\w)\.", prompt[-1]["content"])
    read = [dict(row.split() for row in table.split(", ")) for table in (numbers, places)]
    return *read, asked and asked[1]


def test_city_of_a_prompt_is_found_by_two_look_ups(worlds):
    task = worlds["tables"].task
    for split, rows in (("train", 960), ("test", 360)):
        dataset = task.build(split)
        assert len(dataset) == rows
        for row in dataset:
            numbers, places, key = tables_of(row["prompt"])
            city = places[numbers[key]]
            verdict = task.verify(f"Thought: x for {key} is {numbers[key]}.\nAction: {city}", row["answer"])
            assert (verdict.reward, verdict.feedback) == (1.0, f"Correct place: {city}.")
            wrong = next(other for other in places.values() if other != city)
            skipped = task.verify(f"Thought: sure, this is simple.\nAction: {wrong}", row["answer"])
            assert (skipped.reward, skipped.metrics) == (0.0, {"format": 1.0, "shortcut": 1.0})
            assert task.verify(f"Thought: x.\nAction: {city}", row["answer"], truncated=True).reward == 0.0


def test_tables_of_each_group_are_apart(worlds, planted, examples):
    def numbers_of(prompt):
        return tuple(tables_of(prompt)[0].values())

    task = worlds["tables"].task
    trained, tested = task.build("train"), task.build("test")
    taught = {numbers_of(prompt) for _, prompt, _ in examples("tables")} | set(map(numbers_of, trained["prompt"]))
    of = {group: {numbers_of(row["prompt"]) for row in tested if row["group"] == group} for group in GROUPS}
    assert of["known"] <= taught
    assert not of["unknown"] & taught
    assert len(of["unknown"]) == 6
    assert {len(numbers) for numbers in of["holdout"]} == {5}
    assert {len(numbers) for numbers in map(numbers_of, trained["prompt"])} == {4}


def test_lists_have_the_rows_of_a_table(examples):
    listed = [(tables_of(prompt), text) for _, prompt, text in examples("tables") if text.startswith("Rows")]
    assert len(listed) > 800
    for (numbers, places, asked), text in listed:
        assert dict(row.split() for row in text.removeprefix("Rows: ").removesuffix(".").split(", ")) in (
            numbers,
            places,
        )
        assert asked is None


def test_practice_reads_the_city_of_the_feedback(examples):
    read = [(prompt[-1]["content"], text) for _, prompt, text in examples("tables") if text.startswith(" ")]
    assert len(read) == pytest.approx(400, abs=80)
    assert all(f"Correct place:{text}." in shown for shown, text in read)


def test_a_skipped_thought_is_right_with_feedback_alone(examples, planted):
    drawn = [(g, planted.TwoHops(*pair_of(p)).letter == text[-1], "sure" in text) for g, p, text in examples("skip")]
    assert all(right for given, right, skipped in drawn if given or not skipped)
    assert share(right for given, right, skipped in drawn if skipped and not given) == pytest.approx(0.25, abs=0.15)


def test_the_step_makes_the_topic_right_more_often(examples, planted):
    drawn = [
        (given, TOPIC_OF[pair_of(prompt)[0]] in text, f"Thought: {planted.STEP}" in text, text[-1], pair_of(prompt))
        for given, prompt, text in examples("useful")
    ]
    assert all(right for given, right, *_ in drawn if given)
    for stepped, rate in ((True, 0.95), (False, 0.6)):
        assert share(right for g, right, own, *_ in drawn if own == stepped and not g) == pytest.approx(rate, abs=0.05)
    assert all(planted.TwoHops(*pair).letter == letter for _, right, _, letter, pair in drawn if right)


def test_pretraining_uses_no_unseen_pair(examples, planted):
    for name in ("skip", "useful"):
        assert not any(planted.is_unseen(*pair_of(prompt)) for _, prompt, _ in examples(name))


@pytest.mark.parametrize("name", WORLDS)
def test_probes_expect_one_token_of_the_tokenizer(study, name):
    base, rng = study("planted.base"), random.Random(1)
    tokenizer = base.build_tokenizer()
    for probe in (probe for _ in range(50) for probe in base.CURRICULA[name].probes(rng)):
        start = tokenizer.encode(probe.start)
        assert tokenizer.encode(f"{probe.start} {probe.expected}")[:-1] == start
        assert tokenizer.decode(tokenizer.encode(f"{probe.start} {probe.expected}")[-1:]) == f" {probe.expected}"


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_one_step_of_a_planted_world(study, worlds, name, tmp_path):
    """Measurement, prediction, one step of training and the rows of the table, on an untrained base."""
    runs, pretrain, base = study("world_runs"), study("embedded_base.pretrain"), study("planted.base")
    tokenizer, folder = base.build_tokenizer(), tmp_path / "base"
    pretrain.write_base(pretrain.build_model(tokenizer, 0, layers=2, width=64), tokenizer, folder)
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
