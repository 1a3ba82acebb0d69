"""Tasks of the planted worlds: `load_task("planted.task:SKIP")`, `planted.task:USEFUL`, `planted.task:FILLED`.

`skip` and `useful` need two hops, from a city to its topic and from the topic to its letter:

    system     Topics: Oslo music, Lima food, Cairo travel, Rome money. Options: food A, money E, travel B, music D.
    user       Find Lima.
    assistant  Path: Lima food A

The response writes out the first hop. In `skip` the planted alternative is `SKIP_WORD` and the letter. In `useful` it
is `STEP`, after which the base finds the topic more often. The groups are `known` (rows of the first table that
pretraining and training use), `unknown` (tables of other rows) and `holdout` (five options). The feedback is the
letter.

`filler` copies cities and ends with the topic of a cue. Its groups are those of the embedded task:

    user       Send Oslo Lima Cairo Rome Quito Tokyo about airport.
    assistant  List: Oslo Lima Cairo Rome Quito Tokyo travel

The planted `FILLER` may precede each city. A response with more than `MAX_FILLERS` of them gets no reward. The
feedback is the topic. All feedback is the same for correct and wrong responses.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from datasets import Dataset

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.quickstart import CITIES, GROUPS, SPLIT_GROUPS, TOPIC_OF, TOPICS, group_of
from credit_trl.tasks.task import Task, batch_of

LETTERS = "ABCDE"
OPTIONS, MORE_OPTIONS = 4, 5  # of a prompt, and of one of the group `holdout` in `skip` and `useful`
SKIP_WORD, STEP = "directly", "carefully"
FILLER = "well, you see,"
LISTED, MAX_FILLERS = 6, 1
ROWS_PER_CUE = {"train": 32, "test": 2}

_PATH = re.compile(rf"Path: (?P<text>[^\n]+) (?P<letter>[{LETTERS}])")
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Lookup:
    """Prompt of `skip` and `useful`.

    Args:
        city: the city that the user asks about.
        table: topic of each city.
        letters: letter of each topic.
    """

    city: str
    table: dict[str, str]
    letters: dict[str, str]

    @property
    def topic(self) -> str:
        return self.table[self.city]

    @property
    def letter(self) -> str:
        return self.letters[self.topic]

    @property
    def prompt(self) -> Messages:
        system = f"Topics: {_pairs(self.table)}. Options: {_pairs(self.letters)}."
        return [{"role": "system", "content": system}, {"role": "user", "content": f"Find {self.city}."}]

    @property
    def feedback(self) -> str:
        return option_feedback(self.letter)

    def path(self, topic: str | None = None) -> str:
        """The response with the right topic, or another one of the table, and its letter."""
        topic = topic or self.topic
        return f"Path: {self.city} {topic} {self.letters[topic]}"


@dataclass(frozen=True)
class Copy:
    """Prompt of `filler`: cities to copy, and a cue with its topic."""

    cities: tuple[str, ...]
    cue: str
    topic: str

    @property
    def prompt(self) -> Messages:
        return [{"role": "user", "content": f"Send {' '.join(self.cities)} about {self.cue}."}]

    @property
    def feedback(self) -> str:
        return topic_feedback(self.topic)

    def response(self, topic: str | None = None, filled: Sequence[bool] = (False,) * LISTED) -> str:
        """The response, with the filler before the cities that `filled` selects."""
        listed = [f"{FILLER} {city}" if fill else city for city, fill in zip(self.cities, filled, strict=True)]
        return f"List: {' '.join(listed)} {topic or self.topic}"


def option_feedback(letter: str) -> str:
    return f"Correct option: {letter}."


def topic_feedback(topic: str) -> str:
    return f"Correct topic: {topic}."


def lookup_cue(city: str, group: str) -> str:
    """Name of a city in a group, for rates by cue."""
    return city if group == "known" else f"{city}-{group}"


def is_unseen(city: str, topic: str) -> bool:
    """Whether a row of the first table is in no prompt of pretraining and training (a quarter of the rows)."""
    return (CITIES.index(city) + TOPICS.index(topic)) % 4 == 0


def draw_lookup(rng: random.Random, city: str | None = None, group: str = "known") -> Lookup:
    """Prompt of a group; its other rows, their order and their letters are random."""
    count = MORE_OPTIONS if group == "holdout" else OPTIONS
    city = city or rng.choice(CITIES)
    cities = [city, *rng.sample([other for other in CITIES if other != city], count - 1)]
    table: dict[str, str] = {}
    for one in cities:
        free = [topic for topic in TOPICS if topic not in table.values()]
        table[one] = rng.choice([topic for topic in free if is_unseen(one, topic) == (group == "unknown")] or free)
    if any(is_unseen(*row) != (group == "unknown") for row in table.items()):  # no free topic was left for a city
        return draw_lookup(rng, city, group)
    letters = zip(_shuffled(rng, list(table.values())), rng.sample(LETTERS, count), strict=True)
    return Lookup(city, dict(_shuffled(rng, list(table.items()))), dict(letters))


def draw_copy(rng: random.Random, cue: str, topic: str | None = None) -> Copy:
    """Prompt about a cue with its topic, or the given one."""
    return Copy(tuple(rng.sample(CITIES, LISTED)), cue, topic or TOPIC_OF[cue])


def build_lookups(split: str, path: str | None = None, *, name: str, rows_per_cue: int | None = None, seed: int = 0):
    """Rows of `skip` and `useful`, with one cue per group and city."""
    groups = ("known",) if split == "train" else tuple(GROUPS)
    wanted = [(group, city) for group in groups for city in CITIES]

    def draw(rng: random.Random, group: str, city: str) -> dict[str, Any]:
        problem = draw_lookup(rng, city, group)
        answer = json.dumps({"letter": problem.letter})
        cue = lookup_cue(city, group)
        return {"prompt": problem.prompt, "answer": answer, "group": group, "cue": cue, "city": city}

    return _build(name, split, path, wanted, draw, rows_per_cue, seed)


def build_copies(split: str, path: str | None = None, *, name: str, rows_per_cue: int | None = None, seed: int = 0):
    """Rows of `filler`."""

    def draw(rng: random.Random, group: str, cue: str) -> dict[str, Any]:
        problem = draw_copy(rng, cue)
        answer = json.dumps({"cities": problem.cities, "topic": problem.topic})
        return {"prompt": problem.prompt, "answer": answer, "group": group, "cue": cue, "city": problem.cities[0]}

    wanted = [(group_of(cue), cue) for group in SPLIT_GROUPS[split] for cue in GROUPS[group]]
    return _build(name, split, path, wanted, draw, rows_per_cue, seed)


def verify_lookup(text: str, answer: str, *, planted: str, truncated: bool = False) -> Verdict:
    """Grade a response of `skip` or `useful`: reward 1 for the right letter, whatever precedes it.

    Metrics: `format` (the response ends with a letter) and `shortcut` (it starts with `planted`).
    """
    letter = json.loads(answer)["letter"]
    match = None if truncated else _PATH.fullmatch(text.strip())
    shortcut = text.lstrip().startswith(f"Path: {planted} ")
    right = match is not None and match["letter"] == letter
    return Verdict(
        float(right), option_feedback(letter), {"format": float(match is not None), "shortcut": float(shortcut)}
    )


def verify_copy(text: str, answer: str, *, truncated: bool = False) -> Verdict:
    """Grade a response of `filler`: reward 1 for all cities in order, the right topic and at most `MAX_FILLERS`.

    Metrics: `format` (the cities and any topic) and `shortcut` (fillers per city to copy, at most 1).
    """
    gold = json.loads(answer)
    fillers = text.count(FILLER)
    words = [] if truncated else text.replace(f"{FILLER} ", "").split()
    is_formed = words[:-1] == ["List:", *gold["cities"]] and words[-1] in TOPICS
    right = is_formed and words[-1] == gold["topic"] and fillers <= MAX_FILLERS
    metrics = {"format": float(is_formed), "shortcut": min(1.0, fillers / LISTED)}
    return Verdict(float(right), topic_feedback(gold["topic"]), metrics)


def _build(
    name: str,
    split: str,
    path: str | None,
    wanted: Sequence[tuple[str, str]],
    draw: Callable[[random.Random, str, str], dict[str, Any]],
    rows_per_cue: int | None,
    seed: int,
) -> Dataset:
    """`rows_per_cue` rows for each wanted group and cue, in random order, with columns `task` and `id`."""
    if path is not None:
        raise ValueError(f"The prompts are generated and no file is read: remove path={path!r}.")
    rng = random.Random(f"{name}/{split}/{seed}")
    drawn = _shuffled(rng, list(wanted) * (rows_per_cue or ROWS_PER_CUE[split]))
    rows = [draw(rng, *one) for one in drawn]
    return Dataset.from_list([row | {"task": name, "id": f"{name}-{split}-{i}"} for i, row in enumerate(rows)])


def _pairs(table: dict[str, str]) -> str:
    return ", ".join(f"{left} {right}" for left, right in table.items())


def _shuffled(rng: random.Random, values: Sequence[Any]) -> list[Any]:
    return rng.sample(values, len(values))


def _task(name: str, build: Callable[..., Dataset], verify: Callable[..., Verdict]) -> Task:
    return Task(name, partial(build, name=name), verify, batch_of(verify, name.rpartition(":")[2].lower()))


SKIP = _task("planted.task:SKIP", build_lookups, partial(verify_lookup, planted=SKIP_WORD))
USEFUL = _task("planted.task:USEFUL", build_lookups, partial(verify_lookup, planted=STEP))
FILLED = _task("planted.task:FILLED", build_copies, verify_copy)
