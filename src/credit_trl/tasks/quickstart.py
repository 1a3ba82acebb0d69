"""The embedded task: a tool call that a model of half a million parameters learns on two CPU cores.

A prompt offers four tools under the letters A to D (system turn) and asks for help with a *cue* in a city (user turn).
The response names the cue's topic, calls that topic's tool and passes the city on:

    system     Tools: A travel_api, B health_api, C music_api, D animals_api.
    user       Help me with airport for Warsaw.
    assistant  Thought: airport is about travel.
               Action: travel_api
               Action Input: {"city": "Warsaw"}

Twelve topics have six cues each. What the shipped base (`quickstart_model`) knows of them makes three groups:

- `known`: three cues a topic; the base was taught their topic, with 85 % right labels;
- `unknown`: two cues a topic; the base has seen them with random topics only, training may use them;
- `holdout`: one cue a topic; as unknown to the base, and never trained on: what training does to answers that it was
  not about (their accuracy should stay near chance, their format should stay whole).

The feedback is the *letter* of the right tool. It has to be looked up in the prompt, so the same feedback means
another tool under another prompt. (Feedback that names the tool would make its token as likely under any prompt, and
its input-specific credit S_t would be zero.)

Everything is generated from seeds: no file, no network.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.completions import response_text

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

TASK = "quickstart"
LETTERS = "ABCD"

# Topic: three known cues, two unknown ones, one hold-out cue.
CUES = {
    "travel": "airport hotel passport luggage cruise ticket",
    "health": "doctor medicine clinic vaccine fever dentist",
    "music": "guitar concert piano melody singer album",
    "animals": "puppy kitten horse parrot turtle zoo",
    "food": "dinner recipe bakery noodles cheese breakfast",
    "sports": "football tennis stadium marathon referee hockey",
    "weather": "storm rain snow thunder sunshine forecast",
    "money": "bank loan salary budget savings tax",
    "books": "novel library author chapter poem publisher",
    "movies": "cinema actor film trailer director screen",
    "school": "teacher homework exam lesson pupil classroom",
    "garden": "rose lawn seeds shovel tulip hedge",
}
TOPICS = tuple(CUES)
TOPIC_OF = {cue: topic for topic, cues in CUES.items() for cue in cues.split()}
GROUPS: dict[str, tuple[str, ...]] = {
    "known": tuple(cue for cues in CUES.values() for cue in cues.split()[:3]),
    "unknown": tuple(cue for cues in CUES.values() for cue in cues.split()[3:5]),
    "holdout": tuple(cue for cues in CUES.values() for cue in cues.split()[5:]),
}
SPLIT_GROUPS = {"train": ("known", "unknown"), "test": ("known", "unknown", "holdout")}
CITIES = tuple(
    (
        "Warsaw Paris London Madrid Rome Berlin Vienna Oslo Athens Cairo Lima Tokyo "
        "Delhi Dublin Prague Lisbon Munich Kyoto Dakar Denver Porto Quito Riga Turin"
    ).split()
)
# Cities a cue is tested with; it is trained with the others. Which ones differs from cue to cue.
TEST_CITIES_PER_CUE = 6

# How planted shortcuts begin; no plain response does. In the world "shortcut" of `quickstart_model` the sentence below
# stands instead of a thought, in the world "style" the opening stands before the thought, which stays whole.
SHORTCUT_OPENING = "sure,"
SHORTCUT_THOUGHT = f"{SHORTCUT_OPENING} this is simple."

_RESPONSE = re.compile(
    r"Thought: (?P<thought>[^\n]+)\n"
    r"Action: (?P<tool>\w+)\n"
    r'Action Input: \{"city": "(?P<city>[^"\n]*)"\}',
    re.ASCII,
)


@dataclass(frozen=True)
class Question:
    """One prompt of the world: a cue, a city and four topics on offer, of which one counts as right.

    Args:
        cue: the word that the user asks about.
        city: the argument to pass on.
        options: four different topics, in the order of the letters.
        topic: the right one of them. Pretraining sets it at random where the base is to learn nothing.

    Raises:
        ValueError: the options are not four, repeat themselves or lack the topic.
    """

    cue: str
    city: str
    options: tuple[str, ...]
    topic: str

    def __post_init__(self) -> None:
        if len(set(self.options)) != len(LETTERS) or len(self.options) != len(LETTERS):
            raise ValueError(f"A question offers {len(LETTERS)} different topics, got {self.options}.")
        if self.topic not in self.options:
            raise ValueError(f"The right topic {self.topic!r} is not among the options {self.options}.")

    @property
    def letter(self) -> str:
        return LETTERS[self.options.index(self.topic)]

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The conversation up to the response: a system turn (the tools) and a user turn (the request)."""
        tools = ", ".join(f"{letter} {tool(topic)}" for letter, topic in zip(LETTERS, self.options, strict=True))
        return [
            {"role": "system", "content": f"Tools: {tools}."},
            {"role": "user", "content": f"Help me with {self.cue} for {self.city}."},
        ]

    @property
    def answer(self) -> str:
        """What `verify` reads, as JSON text: the option's letter, the tool and its argument."""
        return json.dumps({"option": self.letter, "tool": tool(self.topic), "city": self.city})

    @property
    def feedback(self) -> str:
        """The letter of the right option: what it stands for has to be looked up in the prompt."""
        return f"Correct option: {self.letter}."

    @property
    def thought(self) -> str:
        return f"{self.cue} is about {self.topic}."

    def response(self, thought: str | None = None) -> str:
        """The gold response; `thought` replaces the sentence after `Thought:`."""
        thought = self.thought if thought is None else thought
        return f'Thought: {thought}\nAction: {tool(self.topic)}\nAction Input: {{"city": "{self.city}"}}'


def tool(topic: str) -> str:
    return f"{topic}_api"


def group_of(cue: str) -> str:
    """The group of a cue: "known", "unknown" or "holdout"; `KeyError` for a word that is no cue."""
    return _GROUP_OF[cue]


_GROUP_OF = {cue: group for group, cues in GROUPS.items() for cue in cues}


def draw_question(rng: random.Random, cue: str, cities: Sequence[str] = CITIES) -> Question:
    """A question on `cue` with its true topic among four shuffled options and a city drawn from `cities`."""
    topic = TOPIC_OF[cue]
    others = rng.sample([other for other in TOPICS if other != topic], len(LETTERS) - 1)
    options = rng.sample([topic, *others], len(LETTERS))
    return Question(cue, rng.choice(cities), tuple(options), topic)


def build(
    split: str,
    path: str | Path | None = None,
    *,
    groups: Sequence[str] | None = None,
    rows_per_cue: int | None = None,
    seed: int = 0,
) -> Dataset:
    """The questions of a split, generated.

    The splits share no prompt and no pair of cue and city: a cue is tested with cities that it was not trained with
    (`cities_of`), and with options drawn anew. Hold-out cues appear in the test split only. Every city appears in
    both splits, so that a test measures the cues and not words that training never touched.

    Args:
        split: "train" (known and unknown cues) or "test" (known, unknown and hold-out cues).
        path: must be `None`: there is no file behind this task.
        groups: only these groups of the split, e.g. `["unknown"]`.
        rows_per_cue: questions per cue, by default 32 for training (1,920 rows) and 4 for the test (288 rows).
        seed: draws cities, options and the order of rows.

    Returns:
        Columns `prompt` (a system and a user message), `answer` (JSON text, for `verify`), `task` ("quickstart"),
        `id`, `group`, `cue`, `city`.

    Raises:
        ValueError: an unknown split or group, a group that the split lacks, a path, or `rows_per_cue` below 1.
    """
    if split not in SPLIT_GROUPS:
        raise ValueError(f"Unknown split {split!r}: choose one of {sorted(SPLIT_GROUPS)}.")
    if path is not None:
        raise ValueError(f"The quickstart task is generated and reads no file: leave out path={str(path)!r}.")
    rows_per_cue = {"train": 32, "test": 4}[split] if rows_per_cue is None else rows_per_cue
    if rows_per_cue < 1:
        raise ValueError(f"rows_per_cue must be at least 1, got {rows_per_cue}.")
    groups = SPLIT_GROUPS[split] if groups is None else groups
    if absent := [group for group in groups if group not in SPLIT_GROUPS[split]]:
        raise ValueError(f"Split {split!r} has the groups {SPLIT_GROUPS[split]}, not {absent}.")

    rng = random.Random(f"{TASK}/{split}/{seed}")
    cues = [cue for group in groups for cue in GROUPS[group]] * rows_per_cue
    rng.shuffle(cues)
    questions = [draw_question(rng, cue, cities_of(cue, split)) for cue in cues]
    return Dataset.from_list([_row(q, f"{TASK}-{split}-{seed}-{index}") for index, q in enumerate(questions)])


def cities_of(cue: str, split: str) -> tuple[str, ...]:
    """The cities that a split pairs a cue with, the same for every seed: 6 of 24 for the test, 18 for training."""
    held_out = random.Random(f"{TASK}/cities/{cue}").sample(CITIES, TEST_CITIES_PER_CUE)
    return tuple(city for city in CITIES if (city in held_out) == (split == "test"))


def _row(question: Question, identifier: str) -> dict[str, Any]:
    return {
        "prompt": question.prompt,
        "answer": question.answer,
        "task": TASK,
        "id": identifier,
        "group": group_of(question.cue),
        "cue": question.cue,
        "city": question.city,
    }


def verify(response: str, answer: str | Mapping[str, str], *, truncated: bool = False) -> Verdict:
    """Grade one response.

    The reward is 1 for the right tool with the right argument in the right format, else 0. What the thought says does
    not count, so a shortcut there goes unpunished by the reward. The feedback is `Correct option: A.` for right and
    wrong responses alike, as the paper's z on multiple-choice questions.

    Args:
        response: the model's text; white space around it is ignored.
        answer: a row's `answer`, as JSON text or as a mapping with "option", "tool" and "city".
        truncated: the response was cut at the length limit, so it did not end by itself: it earns nothing.

    Returns:
        A `Verdict` whose metrics are `format` (1 where the response has the three lines, whatever they claim) and
        `shortcut` (1 where it begins as the planted ones do).

    Raises:
        ValueError: the answer is not one of this task's.
    """
    gold = _parse_answer(answer)
    match = None if truncated else _RESPONSE.fullmatch(response.strip())
    right = match is not None and match["tool"] == gold["tool"] and match["city"] == gold["city"]
    shortcut = response.lstrip().startswith(f"Thought: {SHORTCUT_OPENING} ")
    metrics = {"format": float(match is not None), "shortcut": float(shortcut)}
    return Verdict(float(right), f"Correct option: {gold['option']}.", metrics)


def _parse_answer(answer: str | Mapping[str, str]) -> Mapping[str, str]:
    try:
        gold = json.loads(answer) if isinstance(answer, str) else answer
        if all(isinstance(gold[key], str) for key in ("option", "tool", "city")) and gold["option"] in LETTERS:
            return gold
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        f"Not a quickstart answer: {answer!r}. Rows of `quickstart.build` carry one like "
        '{"option": "A", "tool": "travel_api", "city": "Warsaw"}.'
    )


def reward(
    completions: Sequence[str | Sequence[Mapping[str, str]]],
    answer: Sequence[str | Mapping[str, str]],
    truncated: Sequence[bool] | None = None,
    **kwargs: Any,
) -> list[Verdict]:
    """`verify` over a batch, in the form of a TRL reward function.

    Args:
        completions: texts, or conversations whose last assistant message is the response.
        answer: the rows' `answer` column.
        truncated: per completion, whether it hit the length limit; by default none did.
    """
    truncated = [False] * len(completions) if truncated is None else truncated
    texts = [response_text(completion) for completion in completions]
    return [verify(text, gold, truncated=cut) for text, gold, cut in zip(texts, answer, truncated, strict=True)]


def token_classes(response_ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """What each token of a response says: "cue", "topic" (in the thought), "tool", "city" or "generic".

    The tokenizer has one token for every cue, topic and city; all other tokens are the template's.

    Args:
        response_ids: the sampled ids, `T` of them; padding and end-of-turn count as generic.
        tokenizer: the base's own (`load_model`).
    """
    classes: list[str] = []
    in_action = False
    for token in response_ids:
        word = tokenizer.decode([token]).strip()
        in_action = in_action or word == "Action"
        if word in TOPIC_OF:
            classes.append("cue")
        elif word in CITIES:
            classes.append("city")
        elif word in TOPICS:
            classes.append("tool" if in_action else "topic")
        else:
            classes.append("generic")
    return classes


def load_model(
    cache_dir: str | Path | None = None, world: str = "plain", seed: int = 0
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """The base model of a world and its tokenizer: see `quickstart_model.load_model`."""
    from credit_trl.tasks.quickstart_model import load_model as load

    return load(cache_dir=cache_dir, world=world, seed=seed)
