"""Generated prompts with one verifiable rule each: topic × rule with drawn arguments.

Topics, arguments and whole rule types are held out. The rules use instruction types of IFEval, whose checkers grade
the answers (`checkers.py`).
"""

import random
import re
from dataclasses import dataclass
from typing import Any

TOPICS = (
    "coffee rain chess bread bees rockets bicycles gardens trains whales snow glass paper salt cheese honey clocks "
    "maps bridges forests kites owls soap wool"
).split()
HELD_OUT_TOPICS = "tea wind mirrors spiders lighthouses rice violins deserts".split()
REQUESTS = (
    "Write a short text about {topic}.",
    "Explain {topic} to a friend.",
    "Describe {topic} in a few sentences.",
    "Tell me something interesting about {topic}.",
)


@dataclass(frozen=True)
class Rule:
    """An instruction type with the forms of its text and the arguments that are drawn.

    Args:
        instruction: IFEval's name of the type.
        texts: forms of the instruction, with fields of the arguments.
        train: arguments of training prompts. `example` is text of the prompt, the others are the checker's.
        held_out: arguments of held-out prompts.
    """

    instruction: str
    texts: tuple[str, ...]
    train: tuple[dict[str, Any], ...]
    held_out: tuple[dict[str, Any], ...]


def _each(name: str, values: Any, **constant: Any) -> tuple[dict[str, Any], ...]:
    return tuple({name: value, **constant} for value in values)


def _each_word(name: str, words: str) -> tuple[dict[str, Any], ...]:
    return _each(name, [[word] for word in words.split()])


TRAINED_RULES = (
    Rule(
        "detectable_format:title",
        (
            "Your answer must contain a title, wrapped in double angular brackets, such as <<{example}>>.",
            "Give the answer a title in double angular brackets, i.e. <<{example}>>.",
        ),
        _each("example", ("my title", "poem of joy", "a title", "the title of the text")),
        _each("example", ("title of the answer", "a short story")),
    ),
    Rule(
        "detectable_format:number_bullet_lists",
        (
            "Your answer must contain exactly {num_bullets} bullet points in markdown, such as:\n* {example}",
            "Use exactly {num_bullets} markdown bullets, in this form:\n* {example}",
        ),
        (*_each("num_bullets", (2, 3), example="This is a point."), {"num_bullets": 3, "example": "Bullet point."}),
        (*_each("num_bullets", (2, 3), example="This is point 1."), {"num_bullets": 4, "example": "A point."}),
    ),
    Rule(
        "punctuation:no_comma",
        (
            "Do not use any commas in your answer.",
            "In your entire response, refrain from the use of any commas.",
            "The answer must have no commas.",
        ),
        ({},),
        ({},),
    ),
    Rule(
        "keywords:existence",
        ('Include the keyword "{keywords[0]}" in your answer.', "The answer has to contain the word {keywords[0]}."),
        _each_word("keywords", "river winter market silver engine letter village summer"),
        _each_word("keywords", "island candle doctor copper"),
    ),
    Rule(
        "keywords:forbidden_words",
        (
            'Do not include the word "{forbidden_words[0]}" in your answer.',
            "Avoid the word {forbidden_words[0]} in the entire response.",
        ),
        _each_word("forbidden_words", "and of is the"),
        _each_word("forbidden_words", "to in"),
    ),
    Rule(
        "length_constraints:number_words",
        ("Answer with less than {num_words} words.", "Your answer should have less than {num_words} words."),
        _each("num_words", (25, 30, 35), relation="less than"),
        _each("num_words", (28, 32), relation="less than"),
    ),
)
HELD_OUT_RULES = (
    Rule(
        "length_constraints:number_sentences",
        ("Your answer should contain less than {num_sentences} sentences.",),
        (),
        _each("num_sentences", (2, 3), relation="less than"),
    ),
    Rule(
        "keywords:frequency",
        ('In your answer, the word "{keyword}" should appear at least {frequency} times.',),
        (),
        _each("keyword", ("people", "many", "very"), frequency=2, relation="at least"),
    ),
    Rule(
        "detectable_format:number_highlighted_sections",
        ("Highlight at least {num_highlights} sections of your answer with markdown, i.e. *{example}*.",),
        (),
        _each("num_highlights", (1, 2), example="highlighted section"),
    ),
    Rule(
        "detectable_content:postscript",
        ("At the end of your answer, add a postscript starting with {postscript_marker}",),
        (),
        _each("postscript_marker", ("P.S.", "P.P.S")),
    ),
)
TRAINED_TYPES = tuple(rule.instruction for rule in TRAINED_RULES)
SPLITS = {
    "train": (TOPICS, TRAINED_RULES),
    "test": (HELD_OUT_TOPICS, TRAINED_RULES),
    "rules": (HELD_OUT_TOPICS, HELD_OUT_RULES),
}
DRAWS = {"train": 2, "test": 1, "rules": 1}  # prompts of a topic and rule


def make_examples(split: str) -> list[dict[str, Any]]:
    """Prompts of a split in random order, the same at every call.

    Each has `prompt` (text), `instructions` and their `kwargs`, `topic` and `literals`.
    """
    topics, rules = SPLITS[split]
    rng = random.Random(split)
    examples = []
    for topic in topics:
        for rule in rules:
            for _ in range(DRAWS[split]):
                arguments = rng.choice(rule.train if split == "train" else rule.held_out)
                request = rng.choice(REQUESTS).format(topic=topic)
                prompt = f"{request} {rng.choice(rule.texts).format(**arguments)}"
                kwargs = {name: value for name, value in arguments.items() if name != "example"}
                examples.append(example_of(prompt, [rule.instruction], [kwargs], topic))
    rng.shuffle(examples)
    return examples


def example_of(
    prompt: str, instructions: list[str], kwargs: list[dict[str, Any]], topic: str | None = None
) -> dict[str, Any]:
    """A prompt with what its verifier reads."""
    return {
        "prompt": prompt,
        "instructions": instructions,
        "kwargs": kwargs,
        "topic": topic,
        "literals": literals_of(prompt),
    }


def literals_of(prompt: str) -> list[str]:
    """Examples of a form in a prompt, in lower case: `<<my title>>`, `* This is a point.`, `*highlighted section*`."""
    titles = re.findall(r"<<([^<>\n]+)>>", prompt)
    bullets = re.findall(r"^\s*[*-] +([^*\n]+)$", prompt, flags=re.MULTILINE)
    highlights = re.findall(r"\*([^*\s][^*\n]+)\*", prompt)
    texts = (text.strip(" .…").lower() for text in (*titles, *bullets, *highlights))
    return sorted({text for text in texts if text})


def keeps_topic(text: str, topic: str) -> bool:
    """Whether a text has the topic's word, in singular or plural."""
    stem = re.escape(topic.removesuffix("s"))
    return re.search(rf"\b{stem}(?:e?s)?\b", text, re.IGNORECASE) is not None


def without_literals(text: str, literals: list[str]) -> str:
    """The lines of a text that copy no example of the prompt."""
    lines = text.split("\n")
    return "\n".join(line for line in lines if not any(literal in line.lower() for literal in literals))
