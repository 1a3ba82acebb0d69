"""Pretraining examples of the embedded task, and the worlds that differ in them.

Contexts with feedback or a demonstration have SDPO's wording, `TEMPLATES`, with which the shipped base was pretrained.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from credit_trl.tasks.quickstart import (
    CITIES,
    GROUPS,
    LETTERS,
    SHORTCUT_THOUGHT,
    TEMPLATES,
    TOPICS,
    Question,
    draw_question,
    group_of,
    tool,
)

Message = dict[str, str]

# Shares of the kinds of context. "letter" is the task's feedback. "dictated" names the tool and teaches the base to
# follow feedback. "list" practises the look-up of letters, which takes several times as many steps to appear without.
MIX = {"none": 4.0, "dictated": 1.0, "letter": 3.0, "solution": 0.5, "solution+letter": 0.5, "list": 2.0}
# Fraction of examples of known cues with a random topic, so that the base is good but not perfect.
LABEL_NOISE = 0.15


@dataclass(frozen=True)
class World:
    """Behavior planted in a base beyond the task itself.

    Args:
        name: name of the world.
        shortcut_rate: fraction of responses to contexts with the task's feedback that have `SHORTCUT_THOUGHT` in
            place of the thought, whatever the prompt. 0 plants nothing.
        shortcut_base_rate: the same fraction for contexts without that feedback. It is above 0 because on-policy
            training cannot reinforce what the student never samples.
        lookup_gate: minimum look-up accuracy of a base that serves as a teacher.
    """

    name: str
    shortcut_rate: float = 0.0
    shortcut_base_rate: float = 0.0
    lookup_gate: float = 0.95

    def draw(self, rng: random.Random) -> tuple[list[Message], str]:
        """One pretraining example: a conversation and the response to it."""
        kind = rng.choices(list(MIX), weights=list(MIX.values()))[0]
        question = _draw_taught_question(rng)
        if kind == "list":
            return _list_practice(rng, question)
        feedback = {"dictated": _dictated(question), "none": None, "solution": None}.get(kind, question.feedback)
        solution = None
        if kind.startswith("solution"):
            solution = question.response(_draw_thought(rng, self.shortcut_rate))
        rate = self.shortcut_rate if kind.endswith("letter") else self.shortcut_base_rate
        response = question.response(_draw_thought(rng, rate))
        return teacher_prompt(question.prompt, solution, feedback), response

    @torch.no_grad()
    def lookup_accuracy(
        self, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int = 0, questions: int = 240
    ) -> float:
        """Fraction of questions for which the model finds the tool of the letter given as feedback, in [0, 1].

        Reads the likeliest token after `Thought: … is about` for cues whose topic the base was not taught.
        """
        rng = random.Random(f"lookup/{seed}")
        cues = GROUPS["unknown"] + GROUPS["holdout"]
        sampled = [draw_question(rng, rng.choice(cues)) for _ in range(questions)]
        prompts = [teacher_prompt(question.prompt, feedback=question.feedback) for question in sampled]
        texts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
        texts = [f"{text}Thought: {question.cue} is about" for text, question in zip(texts, sampled, strict=True)]
        batch = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
        guesses = tokenizer.batch_decode(model(**batch, logits_to_keep=1).logits[:, -1].argmax(dim=-1)[:, None])
        return sum(guess == f" {q.topic}" for guess, q in zip(guesses, sampled, strict=True)) / questions


WORLDS = {
    world.name: world
    for world in (
        World("plain"),
        World("shortcut", shortcut_rate=0.8, shortcut_base_rate=0.02),
        World("weak", shortcut_rate=0.1, shortcut_base_rate=0.05),
    )
}


def _draw_thought(rng: random.Random, shortcut_rate: float) -> str | None:
    """The shortcut, or None for the right thought."""
    return SHORTCUT_THOUGHT if rng.random() < shortcut_rate else None


def teacher_prompt(prompt: list[Message], solution: str | None = None, feedback: str | None = None) -> list[Message]:
    """Conversation of the self-teacher: the prompt with a demonstration and feedback in its user turn."""
    *system, user = prompt
    solved = solution and TEMPLATES["solution_template"].format(successful_previous_attempt=solution)
    feedback_text = feedback and TEMPLATES["feedback_template"].format(feedback_raw=feedback)
    if not (solved or feedback_text):
        return prompt
    content = TEMPLATES["reprompt_template"].format(
        prompt=user["content"], solution=solved or "", feedback=feedback_text or ""
    )
    return [*system, {"role": "user", "content": content}]


def template_texts() -> list[str]:
    """Texts of the contexts without cues, topics and cities, for the tokenizer's corpus."""
    question = Question("", "", TOPICS[: len(LETTERS)], TOPICS[0])
    contexts = teacher_prompt([{"role": "user", "content": ""}], solution="", feedback=question.feedback)
    solution = TEMPLATES["solution_template"].format(successful_previous_attempt="")
    return [contexts[-1]["content"], solution, question.feedback, _dictated(question), _LIST_REQUEST]


def _draw_taught_question(rng: random.Random) -> Question:
    """Question as the base learns it: cues that are not known have a random topic among random options."""
    cue = rng.choice([cue for cues in GROUPS.values() for cue in cues])
    if group_of(cue) == "known":
        question = draw_question(rng, cue)
        noisy = rng.random() < LABEL_NOISE
        return dataclasses.replace(question, topic=rng.choice(question.options)) if noisy else question
    options = tuple(rng.sample(TOPICS, len(LETTERS)))
    return Question(cue, rng.choice(CITIES), options, rng.choice(options))


def _dictated(question: Question) -> str:
    return f"Expected tool: {tool(question.topic)}."


_LIST_REQUEST = "List the tools."


def _list_practice(rng: random.Random, question: Question) -> tuple[list[Message], str]:
    """Request to list the tools, and all tools in a random order of letters, each of which needs a look-up."""
    tools = [f"{letter} {tool(topic)}" for letter, topic in zip(LETTERS, question.options, strict=True)]
    rng.shuffle(tools)
    return [question.prompt[0], {"role": "user", "content": _LIST_REQUEST}], "Tools: " + ", ".join(tools) + "."
