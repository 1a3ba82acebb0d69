"""Embedded task: a tool call that a model with 0.45 million parameters learns on one CPU core.

A prompt offers four tools under the letters A to D (system turn) and asks for help with a *cue* in a city (user turn).
The response names the cue's topic, calls the tool of that topic and passes the city:

    system     Tools: A travel_api, B health_api, C music_api, D animals_api.
    user       Help me with airport for Warsaw.
    assistant  Thought: airport is about travel.
               Action: travel_api
               Action Input: {"city": "Warsaw"}

Twelve topics have six cues each, in three groups by what the shipped base (`quickstart_model`) was trained on:

- `known`: three cues per topic; the base was trained on their topic, with 85 % correct labels;
- `unknown`: two cues per topic; the base has seen them with random topics only, and training uses them;
- `holdout`: one cue per topic; as unknown to the base, and never trained on: accuracy should stay near chance.

The feedback is the *letter* of the correct tool, which has to be looked up in the prompt. Feedback that names the tool
would make its token equally likely for any prompt, with an input-specific credit S_t of zero. All data are generated
from seeds.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from credit_trl.quickstart_model import load_model as load_model
from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.task import batch_of

TASK = "quickstart"
LETTERS = "ABCD"

_WORDS = json.loads(Path(__file__).with_name("quickstart_words.json").read_text("utf-8"))
CUES = {topic: cues.split() for topic, cues in _WORDS["cues"].items()}  # three known, two unknown, one hold-out
CITIES = tuple(_WORDS["cities"].split())
TOPICS = tuple(CUES)
TOPIC_OF = {cue: topic for topic, cues in CUES.items() for cue in cues}
GROUPS = {
    "known": tuple(cue for cues in CUES.values() for cue in cues[:3]),
    "unknown": tuple(cue for cues in CUES.values() for cue in cues[3:5]),
    "holdout": tuple(cue for cues in CUES.values() for cue in cues[5:]),
}
SPLIT_GROUPS = {"train": ("known", "unknown"), "test": ("known", "unknown", "holdout")}
TEST_CITIES_PER_CUE = 6  # a cue is trained with the others; they differ from cue to cue

# SDPO's wording of the teacher's turn, which the bases were pretrained to read: options of `CreditConfig`.
TEMPLATES: dict[str, str] = _WORDS["templates"]

# Planted shortcuts: the sentence replaces the thought in the bases of the worlds "shortcut" and "weak".
SHORTCUT_OPENING = "sure,"
SHORTCUT_THOUGHT = f"{SHORTCUT_OPENING} this is simple."

_RESPONSE = re.compile(r'Thought: [^\n]+\nAction: (\w+)\nAction Input: \{"city": "([^"\n]*)"\}', re.ASCII)


@dataclass(frozen=True)
class Question:
    """One prompt: a cue, a city and four different topics in the order of the letters, one of which is correct."""

    cue: str
    city: str
    options: tuple[str, ...]
    topic: str

    @property
    def letter(self) -> str:
        return LETTERS[self.options.index(self.topic)]

    @property
    def prompt(self) -> list[dict[str, str]]:
        """Conversation up to the response: a system turn (the tools) and a user turn (the request)."""
        tools = ", ".join(f"{letter} {tool(topic)}" for letter, topic in zip(LETTERS, self.options, strict=True))
        return [
            {"role": "system", "content": f"Tools: {tools}."},
            {"role": "user", "content": f"Help me with {self.cue} for {self.city}."},
        ]

    @property
    def answer(self) -> str:
        """Gold answer for `verify`, as JSON text: the letter, the tool and its argument."""
        return json.dumps({"option": self.letter, "tool": tool(self.topic), "city": self.city})

    @property
    def feedback(self) -> str:
        """Letter of the correct option, which has to be looked up in the prompt."""
        return f"Correct option: {self.letter}."

    def response(self, thought: str | None = None) -> str:
        """Gold response; `thought` replaces the sentence after `Thought:`."""
        thought = f"{self.cue} is about {self.topic}." if thought is None else thought
        return f'Thought: {thought}\nAction: {tool(self.topic)}\nAction Input: {{"city": "{self.city}"}}'


def tool(topic: str) -> str:
    return f"{topic}_api"


def group_of(cue: str) -> str:
    """Group of a cue: "known", "unknown" or "holdout"; raises `KeyError` for any other word."""
    for group, cues in GROUPS.items():
        if cue in cues:
            return group
    raise KeyError(cue)


def draw_question(rng: random.Random, cue: str, cities: Sequence[str] = CITIES) -> Question:
    """Draw a question about `cue` with its true topic among four shuffled options and a city out of `cities`."""
    topic = TOPIC_OF[cue]
    wrong_topics = rng.sample([wrong_topic for wrong_topic in TOPICS if wrong_topic != topic], len(LETTERS) - 1)
    options = rng.sample([topic, *wrong_topics], len(LETTERS))
    return Question(cue, rng.choice(cities), tuple(options), topic)


def build(
    split: str,
    path: str | Path | None = None,
    *,
    groups: Sequence[str] | None = None,
    rows_per_cue: int | None = None,
    seed: int = 0,
) -> Dataset:
    """Generate the questions of a split: `prompt`, `answer` (JSON text), `task`, `id`, `group`, `cue` and `city`.

    The splits share no prompt and no pair of cue and city: a cue is tested with cities that it is not trained with
    (`cities_of`). Hold-out cues are in the test split only, every city is in both.

    Args:
        split: "train" (known and unknown cues) or "test" (known, unknown and hold-out cues).
        path: must be `None`, since the task reads no file.
        groups: groups of the split to include, by default all.
        rows_per_cue: questions per cue, by default 32 for training (1,920 rows) and 4 for the test (288 rows).
        seed: seed of cities, options and row order.
    """
    if split not in SPLIT_GROUPS:
        raise ValueError(f"Unknown split {split!r}: use one of {sorted(SPLIT_GROUPS)}.")
    if path is not None:
        raise ValueError(f"The quickstart task is generated and reads no file: remove path={str(path)!r}.")
    count = {"train": 32, "test": 4}[split] if rows_per_cue is None else rows_per_cue
    groups = SPLIT_GROUPS[split] if groups is None else groups
    if not set(groups) <= set(SPLIT_GROUPS[split]):
        raise ValueError(f"Split {split!r} has the groups {SPLIT_GROUPS[split]}, got {tuple(groups)}.")
    rng = random.Random(f"{TASK}/{split}/{seed}")
    cues = [cue for group in groups for cue in GROUPS[group]] * count
    rng.shuffle(cues)
    rows = []
    for index, cue in enumerate(cues):
        question = draw_question(rng, cue, cities_of(cue, split))
        row = {"prompt": question.prompt, "answer": question.answer, "task": TASK}
        row |= {"id": f"{TASK}-{split}-{seed}-{index}", "group": group_of(cue), "cue": cue, "city": question.city}
        rows.append(row)
    return Dataset.from_list(rows)


def cities_of(cue: str, split: str) -> tuple[str, ...]:
    """Cities that a split pairs with a cue, the same for every seed: 6 of 24 for the test split, 18 for training."""
    held_out = random.Random(f"{TASK}/cities/{cue}").sample(CITIES, TEST_CITIES_PER_CUE)
    return tuple(city for city in CITIES if (city in held_out) == (split == "test"))


def verify(response: str, answer: str | Mapping[str, str], *, truncated: bool = False) -> Verdict:
    """Grade one response.

    The reward is 1 for the correct tool with the correct argument in the correct format, else 0, as for a truncated
    response. The thought is not graded, so a shortcut in it costs no reward. The feedback is `Correct option: A.` for
    correct and wrong responses alike, as in the paper for multiple-choice questions. The metrics are `format` (1 if
    the response has the three lines, whatever their content) and `shortcut` (1 if it starts as planted shortcuts do).
    """
    try:
        gold = json.loads(answer) if isinstance(answer, str) else answer
        expected = (gold["tool"], gold["city"])
        feedback = f"Correct option: {LETTERS[LETTERS.index(gold['option'])]}."
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"Not an answer of {TASK} with `option`, `tool` and `city`: {answer!r:.200}.") from error
    match = None if truncated else _RESPONSE.fullmatch(response.strip())
    right = match is not None and match.groups() == expected
    shortcut = response.lstrip().startswith(f"Thought: {SHORTCUT_OPENING} ")
    metrics = {"format": float(match is not None), "shortcut": float(shortcut)}
    return Verdict(float(right), feedback, metrics)


reward = batch_of(verify)


def token_classes(response_ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Class of each token of a response: "cue", "topic" (in the thought), "tool", "city", or "generic" for others."""
    classes = []
    class_of_topics = "topic"
    for token in response_ids:
        word = tokenizer.decode([token]).strip()
        if word == "Action":
            class_of_topics = "tool"
        if word in TOPICS:
            classes.append(class_of_topics)
        elif word in TOPIC_OF:
            classes.append("cue")
        else:
            classes.append("city" if word in CITIES else "generic")
    return classes
