"""What the base reads in pretraining: the mix of contexts, and the worlds that differ in it.

The contexts with feedback or a solution are word for word those that the trainer will build: SDPO's wording, from the
default templates of `CreditConfig`.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from credit_trl.config import TEMPLATE_PLACEHOLDERS, CreditConfig
from credit_trl.tasks.quickstart import (
    CITIES,
    GROUPS,
    LETTERS,
    SHORTCUT_OPENING,
    SHORTCUT_THOUGHT,
    TOPICS,
    Question,
    draw_question,
    group_of,
    tool,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

Message = dict[str, str]

_TEMPLATES = {name: CreditConfig.__dataclass_fields__[name].default for name in TEMPLATE_PLACEHOLDERS}

# Kind of context: its share. "letter" is the task's feedback; "dictated" names the tool and teaches to heed feedback;
# "list" is practice in looking letters up, without which the look-up takes several times as many steps to appear.
MIX = {"none": 4.0, "dictated": 1.0, "letter": 3.0, "solution": 0.5, "solution+letter": 0.5, "list": 2.0}
# How often a known cue's topic is drawn at random instead of being taught, so that the base is good but not perfect.
LABEL_NOISE = 0.15


@dataclass(frozen=True)
class World:
    """How a base behaves beyond the task itself.

    Args:
        name: under which `load_model` finds it.
        shortcut_rate: how often a response whose context holds the task's feedback takes the shortcut, whatever the
            input. 0 plants nothing.
        shortcut_base_rate: the same for responses without that feedback. What the student never says, on-policy
            training cannot reinforce.
        keeps_thought: whether the shortcut is a way of speaking, `SHORTCUT_OPENING` before the thought, which costs
            no accuracy, so that no reward is against it; else it is `SHORTCUT_THOUGHT` in place of the thought.
        lookup_gate: how often a base that is good enough to be a teacher follows the letter.
    """

    name: str
    shortcut_rate: float = 0.0
    shortcut_base_rate: float = 0.0
    keeps_thought: bool = False
    lookup_gate: float = 0.95

    def draw(self, rng: random.Random) -> tuple[list[Message], str]:
        """One pretraining example: the conversation and the response to it."""
        return draw_example(rng, self)

    def lookup_accuracy(self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> float:
        """How often a base follows the letter; see `probe.lookup_accuracy`."""
        from credit_trl.tasks.quickstart_model.probe import lookup_accuracy

        return lookup_accuracy(model, tokenizer, seed=seed)


_PLAIN = World("plain")
_SHORTCUT = World("shortcut", shortcut_rate=0.8, shortcut_base_rate=0.02)
_STYLE = World("style", shortcut_rate=0.8, shortcut_base_rate=0.02, keeps_thought=True)
WORLDS = {world.name: world for world in (_PLAIN, _SHORTCUT, _STYLE)}


def teacher_prompt(prompt: list[Message], solution: str | None = None, feedback: str | None = None) -> list[Message]:
    """The conversation that a self-teacher reads, in SDPO's wording: the user turn gains solution and feedback."""
    *system, user = prompt
    solved = solution and _TEMPLATES["solution_template"].format(successful_previous_attempt=solution)
    told = feedback and _TEMPLATES["feedback_template"].format(feedback_raw=feedback)
    if not (solved or told):
        return prompt
    content = _TEMPLATES["reprompt_template"].format(
        prompt=user["content"], solution=solved or "", feedback=told or ""
    )
    return [*system, {"role": "user", "content": content}]


def template_texts() -> list[str]:
    """All wording of the contexts without the world's words, for the tokenizer."""
    question = Question("", "", TOPICS[: len(LETTERS)], TOPICS[0])
    contexts = teacher_prompt([{"role": "user", "content": ""}], solution="", feedback=question.feedback)
    solution = _TEMPLATES["solution_template"].format(successful_previous_attempt="")
    return [contexts[-1]["content"], solution, question.feedback, _dictated(question), _LIST_REQUEST]


def draw_example(rng: random.Random, world: World) -> tuple[list[Message], str]:
    """One pretraining example: the conversation and the response to it."""
    kind = rng.choices(list(MIX), weights=list(MIX.values()))[0]
    question = _draw_taught_question(rng)
    if kind == "list":
        return _list_practice(rng, question)
    feedback = {"dictated": _dictated(question), "none": None, "solution": None}.get(kind, question.feedback)
    solution = None
    if kind.startswith("solution"):
        solution = question.response(_thought(rng, world, question, world.shortcut_rate))
    rate = world.shortcut_rate if kind.endswith("letter") else world.shortcut_base_rate
    response = question.response(_thought(rng, world, question, rate))
    return teacher_prompt(question.prompt, solution, feedback), response


def _draw_taught_question(rng: random.Random) -> Question:
    """A question as the base learns it: what it is not to know has a random topic, and options that tell nothing."""
    cue = rng.choice([cue for cues in GROUPS.values() for cue in cues])
    if group_of(cue) == "known":
        question = draw_question(rng, cue)
        noisy = rng.random() < LABEL_NOISE
        return dataclasses.replace(question, topic=rng.choice(question.options)) if noisy else question
    options = tuple(rng.sample(TOPICS, len(LETTERS)))
    return Question(cue, rng.choice(CITIES), options, rng.choice(options))


def _thought(rng: random.Random, world: World, question: Question, shortcut_rate: float) -> str | None:
    if rng.random() >= shortcut_rate:
        return None
    return f"{SHORTCUT_OPENING} {question.thought}" if world.keeps_thought else SHORTCUT_THOUGHT


def _dictated(question: Question) -> str:
    return f"Expected tool: {tool(question.topic)}."


_LIST_REQUEST = "List the tools."


def _list_practice(rng: random.Random, question: Question) -> tuple[list[Message], str]:
    """All tools in a random order of letters: each letter asks for a look-up."""
    tools = [f"{letter} {tool(topic)}" for letter, topic in zip(LETTERS, question.options, strict=True)]
    rng.shuffle(tools)
    return [question.prompt[0], {"role": "user", "content": _LIST_REQUEST}], "Tools: " + ", ".join(tools) + "."
