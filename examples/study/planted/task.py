"""Tasks of the planted worlds: `planted.task:TABLES`, `:SKIP`, `:USEFUL` and `:FILLED` for `load_task`.

`tables` needs two hops that are looked up in the prompt, from a letter to its number and from the number to a city:

    system     Numbers: A 3, B 1, C 4, D 2. Places: 1 Oslo, 2 Lima, 3 Rome, 4 Cairo.
    user       Help me with storm for B.
    assistant  Thought: storm for B is 1.
               Action: Oslo

The thought writes out the first hop. The planted alternative is `SKIPPED`, a thought without it. The feedback is the
city. Groups: `known` (tables of numbers that pretraining and training use), `unknown` (those that neither uses, a
quarter of all) and `holdout` (tables with five rows, which training does not use).

`skip` and `useful` need two hops that a base knows by heart, to the topic and from topic and city to a letter:

    user       Help me with airport for Paris.
    assistant  Thought: airport is about travel.
               Action: A

The thought writes out the first hop. In `skip` the planted alternative is `SKIPPED`, a thought without it. In `useful`
it is `STEP` before the thought, after which the base finds the topic more often. The feedback is the letter. Groups:
`known` (pairs of cue and city that pretraining and training use), `unknown` (pairs that neither uses) and `holdout`
(such pairs of cues that training does not use).

`filler` copies cities and ends with the topic of a cue. Its groups are those of the embedded task, but pretraining
teaches the cues of `known` and `unknown` alike:

    user       Help me with airport for Oslo Lima Cairo Rome Quito Tokyo.
    assistant  Action Input: Oslo Lima Cairo Rome Quito Tokyo travel

The planted `FILLER` may precede each city. A response with more than `MAX_FILLERS` of them gets no reward. The
feedback names the tool of the topic.

Feedback is the same for correct and wrong responses.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Any

from datasets import Dataset

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.quickstart import (
    CITIES,
    GROUPS,
    LETTERS,
    SHORTCUT_OPENING,
    SHORTCUT_THOUGHT,
    TOPIC_OF,
    TOPICS,
    tool,
)
from credit_trl.tasks.task import Task, batch_of

TOWNS = CITIES[:8]  # cities of `skip` and `useful`
TRAINED = GROUPS["known"] + GROUPS["unknown"]
TWO_HOP_CUES = {"known": TRAINED, "unknown": TRAINED, "holdout": GROUPS["holdout"]}
SKIPPED, STEP = SHORTCUT_THOUGHT, SHORTCUT_OPENING
FILLER = SHORTCUT_THOUGHT.rstrip(".")
LISTED, MAX_FILLERS = 6, 1
KEYS, NUMBERS = "ABCDE", "12345"  # of `tables`
ROWS, MORE_ROWS = 4, 5  # rows of a table, and of one of the group `holdout`
ROWS_PER_CUE = {"train": 16, "test": 2}

_RESPONSE = re.compile(rf"Thought: (?P<thought>[^\n]+)\nAction: (?P<letter>[{LETTERS}])")
_PLACED = re.compile(r"Thought: (?P<thought>[^\n]+)\nAction: (?P<city>[A-Z][a-z]+)")
Messages = list[dict[str, str]]
Row = dict[str, Any]


@dataclass(frozen=True)
class TwoHops:
    """Prompt of `skip` and `useful`."""

    cue: str
    city: str

    @property
    def letter(self) -> str:
        return letter_of(TOPIC_OF[self.cue], self.city)

    @property
    def prompt(self) -> Messages:
        return [{"role": "user", "content": f"Help me with {self.cue} for {self.city}."}]

    @property
    def feedback(self) -> str:
        return option_feedback(self.letter)

    def response(self, step: str = "", topic: str | None = None) -> str:
        """The response after a step, with the right topic or another one, and the letter of that topic."""
        topic = topic or TOPIC_OF[self.cue]
        return response(f"{step} {self.cue} is about {topic}.".lstrip(), letter_of(topic, self.city))


@dataclass(frozen=True)
class TwoTables:
    """Prompt of `tables`.

    Args:
        cue: a word of the request, which the thought copies.
        key: the letter that is asked for.
        number_of: number of every letter, the first table.
        city_of: city of every number, the second table.
    """

    cue: str
    key: str
    number_of: Mapping[str, str]
    city_of: Mapping[str, str]

    @property
    def number(self) -> str:
        return self.number_of[self.key]

    @property
    def city(self) -> str:
        return self.city_of[self.number]

    @property
    def tables(self) -> tuple[list[str], list[str]]:
        """The rows of both tables."""
        return tuple([f"{key} {value}" for key, value in column.items()] for column in (self.number_of, self.city_of))

    @property
    def system(self) -> Messages:
        numbers, places = map(", ".join, self.tables)
        return [{"role": "system", "content": f"Numbers: {numbers}. Places: {places}."}]

    @property
    def prompt(self) -> Messages:
        return [*self.system, {"role": "user", "content": f"Help me with {self.cue} for {self.key}."}]

    @property
    def feedback(self) -> str:
        return city_feedback(self.city)

    def response(self) -> str:
        return response(f"{self.cue} for {self.key} is {self.number}.", self.city)


@dataclass(frozen=True)
class Copy:
    """Prompt of `filler`: cities to copy, and a cue with its topic."""

    cities: tuple[str, ...]
    cue: str
    topic: str

    @property
    def prompt(self) -> Messages:
        return [{"role": "user", "content": f"Help me with {self.cue} for {' '.join(self.cities)}."}]

    @property
    def feedback(self) -> str:
        return topic_feedback(self.topic)

    def response(self, topic: str | None = None, filled: Sequence[bool] = (False,) * LISTED) -> str:
        """The response, with the filler before the cities that `filled` selects."""
        return f"Action Input:{self._listed(filled)} {topic or self.topic}"

    def beginning(self, cities: int, filled: Sequence[bool]) -> str:
        """The response up to the given number of cities; empty for none."""
        return f"Action Input:{self._listed(filled[:cities])}" if cities else ""

    def _listed(self, filled: Sequence[bool]) -> str:
        pairs = zip(self.cities, filled, strict=False)
        return "".join(f" {FILLER} {city}" if fill else f" {city}" for city, fill in pairs)


def response(thought: str, answer: str) -> str:
    """Response of `tables`, `skip` and `useful`."""
    return f"Thought: {thought}\nAction: {answer}"


def option_feedback(letter: str) -> str:
    return f"Correct option: {letter}."


def city_feedback(city: str) -> str:
    return f"Correct place: {city}."


def topic_feedback(topic: str) -> str:
    return f"Expected tool: {tool(topic)}."


@cache
def letter_of(topic: str, city: str) -> str:
    """Letter of a topic in a city, random but the same in every process."""
    return random.Random(f"planted/{topic}/{city}").choice(LETTERS)


def is_unseen(cue: str, city: str) -> bool:
    """Whether neither pretraining nor training uses a pair (a quarter of the pairs)."""
    return (list(TOPIC_OF).index(cue) + TOWNS.index(city)) % 4 == 0


def draw_two_hops(rng: random.Random, cue: str | None = None, unseen: bool = False) -> TwoHops:
    """Prompt about a cue, by default a random one, and a city that form a seen or an unseen pair."""
    cue = cue or rng.choice(list(TOPIC_OF))
    return TwoHops(cue, rng.choice([city for city in TOWNS if is_unseen(cue, city) == unseen]))


@cache
def number_tables(rows: int, unseen: bool) -> tuple[tuple[str, ...], ...]:
    """The numbers of the letters in each table that pretraining and training use, or that neither uses."""
    tables = enumerate(permutations(NUMBERS[:rows]))
    return tuple(numbers for index, numbers in tables if (index % 4 == 0) == unseen)


def draw_tables(rng: random.Random, cue: str | None = None, unseen: bool = False, rows: int = ROWS) -> TwoTables:
    """Prompt about a cue, by default a random one, with a table of numbers that is seen or unseen."""
    number_of = dict(zip(KEYS, rng.choice(number_tables(rows, unseen)), strict=False))
    city_of = dict(zip(NUMBERS, rng.sample(CITIES, rows), strict=False))
    return TwoTables(cue or rng.choice(TRAINED), rng.choice(list(number_of)), number_of, city_of)


def draw_copy(rng: random.Random, cue: str, topic: str | None = None) -> Copy:
    """Prompt about a cue with its topic, or the given one."""
    return Copy(tuple(rng.sample(CITIES, LISTED)), cue, topic or TOPIC_OF[cue])


def two_hops_row(rng: random.Random, group: str, cue: str) -> Row:
    """Row of `skip` and `useful`."""
    problem = draw_two_hops(rng, cue, group != "known")
    answer = json.dumps({"letter": problem.letter})
    cue_name = f"{cue}-unseen" if group == "unknown" else cue
    return {"prompt": problem.prompt, "answer": answer, "group": group, "cue": cue_name, "specific": cue}


def tables_row(rng: random.Random, group: str, cue: str) -> Row:
    """Row of `tables`."""
    problem = draw_tables(rng, cue, group == "unknown", MORE_ROWS if group == "holdout" else ROWS)
    answer = json.dumps({"city": problem.city})
    return {"prompt": problem.prompt, "answer": answer, "group": group, "cue": f"{cue}-{group}", "specific": cue}


def copy_row(rng: random.Random, group: str, cue: str) -> Row:
    """Row of `filler`."""
    problem = draw_copy(rng, cue)
    answer = json.dumps({"cities": problem.cities, "topic": problem.topic})
    return {"prompt": problem.prompt, "answer": answer, "group": group, "cue": cue, "specific": problem.cities[0]}


def verify_two_hops(text: str, answer: str, *, truncated: bool = False) -> Verdict:
    """Grade a response of `skip` or `useful`: reward 1 for the right letter, whatever the thought.

    Metrics: `format` (both lines are there) and `shortcut` (the thought starts with `STEP`, as `SKIPPED` does too).
    """
    letter = json.loads(answer)["letter"]
    match = None if truncated else _RESPONSE.fullmatch(text.strip())
    shortcut = text.lstrip().startswith(f"Thought: {STEP} ")
    right = match is not None and match["letter"] == letter
    return Verdict(
        float(right), option_feedback(letter), {"format": float(match is not None), "shortcut": float(shortcut)}
    )


def verify_tables(text: str, answer: str, *, truncated: bool = False) -> Verdict:
    """Grade a response of `tables`, as `verify_two_hops` does: reward 1 for the right city, whatever the thought."""
    city = json.loads(answer)["city"]
    match = None if truncated else _PLACED.fullmatch(text.strip())
    right = match is not None and match["city"] == city
    shortcut = text.lstrip().startswith(f"Thought: {SKIPPED}")
    metrics = {"format": float(match is not None and match["city"] in CITIES), "shortcut": float(shortcut)}
    return Verdict(float(right), city_feedback(city), metrics)


def verify_copy(text: str, answer: str, *, truncated: bool = False) -> Verdict:
    """Grade a response of `filler`: reward 1 for all cities in order, the right topic and at most `MAX_FILLERS`.

    Metrics: `format` (the cities and any topic) and `shortcut` (fillers per city to copy, at most 1).
    """
    gold = json.loads(answer)
    fillers = text.count(FILLER)
    words = [] if truncated else text.replace(f"{FILLER} ", "").split()
    is_formed = words[:-1] == ["Action", "Input:", *gold["cities"]] and words[-1] in TOPICS
    right = is_formed and words[-1] == gold["topic"] and fillers <= MAX_FILLERS
    metrics = {"format": float(is_formed), "shortcut": min(1.0, fillers / LISTED)}
    return Verdict(float(right), topic_feedback(gold["topic"]), metrics)


def _task(
    world: str,
    cues: Mapping[str, Sequence[str]],
    row: Callable[..., Row],
    verify: Callable[..., Verdict],
    trained: Sequence[str] = ("known",),
) -> Task:
    """Task of a world, from the cues of each group and the functions of a row and of a verdict.

    Args:
        trained: groups of the split `train`; `test` has all.
    """
    name = f"planted.task:{world}"

    def build(split: str, path: str | None = None, *, rows_per_cue: int | None = None, seed: int = 0) -> Dataset:
        if path is not None:
            raise ValueError(f"The prompts are generated and no file is read: remove path={path!r}.")
        rng = random.Random(f"{name}/{split}/{seed}")
        groups = trained if split == "train" else GROUPS
        selection = [(group, cue) for group in groups for cue in cues[group]] * (rows_per_cue or ROWS_PER_CUE[split])
        rows = [row(rng, *group_and_cue) for group_and_cue in rng.sample(selection, len(selection))]
        return Dataset.from_list(
            [row_fields | {"task": name, "id": f"{name}-{split}-{i}"} for i, row_fields in enumerate(rows)]
        )

    return Task(name, build, verify, batch_of(verify, world.lower()))


TABLES = _task("TABLES", dict.fromkeys(GROUPS, TRAINED), tables_row, verify_tables)
SKIP = _task("SKIP", TWO_HOP_CUES, two_hops_row, verify_two_hops)
USEFUL = _task("USEFUL", TWO_HOP_CUES, two_hops_row, verify_two_hops)
FILLED = _task("FILLED", GROUPS, copy_row, verify_copy, trained=("known", "unknown"))
