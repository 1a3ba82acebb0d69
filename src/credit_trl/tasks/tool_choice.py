"""Tool choice in English: a task for a small language model such as SmolLM2-135M-Instruct, on a CPU.

A prompt offers four tools under the letters A to D and has a request. The response calls one tool with an argument of
the request, and may have an opening before the call:

    system     Tools: A hotels, B weather, C call, D define. Answer with one call: tool(argument).
    user       Do I need an umbrella in "Oslo"?
    assistant  weather(Oslo)

Twelve tools share four kinds of arguments (cities, words, people, dishes), so the argument does not give the tool
away. Each tool has twelve wordings of its request, each kind 24 arguments. The test split has arguments that training
never has, in two groups: `argument` with wordings of the training split, and `request` with wordings of its own.

The feedback is of one of two kinds, chosen after a colon (`tool_choice:stated`):

- `letter`: "The tool is wrong. The right tool is B." It has to be read together with the prompt;
- `stated`: "The tool is wrong. The correct call is weather(Oslo)." It contains the response.

All data are generated from the tables of this module and a seed, without files or network.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from datasets import Dataset

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.completions import answer_part
from credit_trl.tasks.task import TaskOption, parse_choice

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

OPTION = TaskOption("feedback", ("letter", "stated"), verify=True)
OPTION_LETTERS = "ABCD"
SPLITS = ("train", "test")
TEST_WORDINGS = 3  # of twelve per tool
TEST_ARGUMENTS = 6  # of 24 per kind

ARGUMENTS = {
    "city": "Oslo, Lisbon, Cairo, Boston, Dublin, Madrid, Prague, Vienna, Athens, Denver, Seattle, Toronto, Chicago, "
    "Berlin, Geneva, Naples, Austin, Sydney, Havana, Warsaw, Munich, Venice, Zurich, Nairobi",
    "word": "serendipity, candid, harbor, frugal, lantern, resilient, meadow, obsolete, courage, whisper, velvet, "
    "diligent, horizon, ambiguous, compass, generous, thunder, paradox, gravity, nostalgia, orchard, vivid, ladder, "
    "tranquil",
    "person": "Emma, Daniel, Grandma, Doctor Lee, Sofia, Marcus, Uncle Ben, Olivia, Mr. Carter, Julia, Hannah, Oscar, "
    "Aunt May, Victor, Nora, Professor Kim, Lucas, Maria, Mrs. Hill, Peter, Alice, Henry, Coach Reed, Clara",
    "dish": "lasagna, pancakes, chicken soup, apple pie, fried rice, tomato salad, beef stew, banana bread, sushi, "
    "tacos, mushroom risotto, garlic bread, vegetable curry, cheesecake, onion soup, meatballs, brownies, pizza, "
    "noodles, potato salad, fish tacos, omelette, chili, waffles",
}

# Tool: the kind of its argument, and its wordings.
TOOLS = {
    "weather": (
        "city",
        "Do I need an umbrella in {}?|Is it raining in {} right now?|How warm will {} be tomorrow?|Will it snow in {} "
        "tonight?|Tell me the forecast for {}.|Should I wear a coat in {} today?|Is the sky clear over {}?|How windy "
        "is it in {}?|What is the temperature in {}?|Can I expect sunshine in {}?|Is there a storm coming to {}?|How "
        "cold does {} get this week?",
    ),
    "hotels": (
        "city",
        "Where can I sleep in {} tonight?|Find me a room in {}.|I need a place to stay in {}.|Show me cheap inns in "
        "{}.|Which guesthouses in {} have breakfast?|Reserve two nights for us in {}.|I want a suite with a pool in "
        "{}.|We need beds for four in {}.|Any rooms free in {} this weekend?|Look for lodging in {}.|Where should we "
        "spend the night in {}?|I need accommodation in {}.",
    ),
    "flights": (
        "city",
        "Book me a plane to {}.|How do I fly to {}?|When does the next jet leave for {}?|I need a plane ticket to {}."
        "|Find an airline that goes to {}.|What does it cost to fly to {}?|Get me a window seat to {}.|Is there a "
        "nonstop from here to {}?|I have to land in {} by noon.|Which airport connects to {}?|Show departures to {}.|"
        "Search for airfare to {}.",
    ),
    "define": (
        "word",
        "What does {} mean?|Give me the meaning of {}.|Explain the word {}.|I do not understand the word {}.|What is "
        "meant by {}?|Look up {} in the dictionary.|Describe what {} means.|Is there a definition of {}?|Tell me what "
        "{} stands for.|What is the sense of the word {}?|Help me understand {}.|Clarify the term {}.",
    ),
    "translate": (
        "word",
        "How do you say {} in French?|What is {} in Spanish?|Put {} into German.|Give me the Italian for {}.|I need "
        "{} in Japanese.|What would {} be in Polish?|Turn {} into Portuguese.|Say {} in Dutch.|What is the Greek word "
        "for {}?|How is {} said in Korean?|Write {} in Arabic.|What do the Swedes call {}?",
    ),
    "rhymes": (
        "word",
        "What rhymes with {}?|My poem needs a rhyme for {}.|Find words that sound like {}.|Which words end like {}?|I "
        "am writing a verse that ends in {}.|Help my song: a match for the sound of {}.|Give me rhyming words for {}."
        "|List rhymes of {}.|What goes with {} in a poem?|I need a line that rhymes with {}.|Which word has the same "
        "ending as {}?|Suggest a rhyme with {}.",
    ),
    "call": (
        "person",
        "Phone {} for me.|I want to talk to {}.|Ring {} now.|Dial the number of {}.|Get {} on the line.|Can you "
        "connect me with {}?|I need to speak with {}.|Start a phone conversation with {}.|Give {} a ring.|Let me hear "
        "the voice of {}.|Dial {} please.|Put me through to {}.",
    ),
    "email": (
        "person",
        "Write a letter to {}.|Send my notes to {}.|Forward this file to {}.|Draft a message to the inbox of {}.|"
        "Reply in writing to {}.|Mail the report to {}.|Attach the photos and send them to {}.|Send {} an invitation "
        "in writing.|Compose a note to {}.|Post these documents to {}.|Drop a line to {}.|Send the attachment to {}.",
    ),
    "birthday": (
        "person",
        "When was {} born?|How old is {} turning?|On what day does {} celebrate?|When do we bake a cake for {}?|What "
        "is the age of {}?|When should I buy a present for {}?|Which month was {} born in?|When does {} blow out the "
        "candles?|When is the party of {}?|What year was {} born?|When does {} turn one year older?|When do I send {} "
        "a birthday card?",
    ),
    "recipe": (
        "dish",
        "How do I cook {}?|Teach me to make {}.|What ingredients go into {}?|I want to prepare {} at home.|How long "
        "do I bake {}?|Show me the steps for {}.|What spices belong in {}?|Give me instructions for {}.|How is {} "
        "made?|Help me cook {} tonight.|What do I need for homemade {}?|What is the best way to make {}?",
    ),
    "calories": (
        "dish",
        "Is {} fattening?|How much fat is in {}?|I am on a diet, can I eat {}?|How healthy is {}?|How much energy "
        "does {} have?|How much sugar is in {}?|Will {} make me gain weight?|How much protein does {} contain?|Count "
        "the nutrition of {}.|Is {} too heavy for my diet?|How many carbs are in {}?|What are the nutrition facts of "
        "{}?",
    ),
    "order": (
        "dish",
        "Bring me {} from a restaurant.|I am hungry, deliver {} to my door.|Have {} delivered.|Buy {} for lunch from "
        "the place nearby.|Get {} to my office by noon.|I would like takeout {}.|Two portions of {} to my house, "
        "please.|Can a courier bring {}?|I want {} delivered at six.|Fetch some {} from the diner.|Get us {} to go.|"
        "Please have {} sent to my home.",
    ),
}

_CALL = re.compile(r"\b(?P<tool>\w+)\((?P<argument>[^()\n]*)\)")


def wordings_of(tool: str, split: str) -> tuple[str, ...]:
    """Wordings of a tool's request in a split; `{}` is the place of the argument."""
    return _share(TOOLS[tool][1].split("|"), f"wordings/{tool}", TEST_WORDINGS, split)


def arguments_of(tool: str, split: str) -> tuple[str, ...]:
    """Arguments of a tool in a split."""
    kind, _ = TOOLS[tool]
    return _share(ARGUMENTS[kind].split(", "), f"arguments/{kind}", TEST_ARGUMENTS, split)


def _share(values: Sequence[str], name: str, held_out: int, split: str) -> tuple[str, ...]:
    test = random.Random(f"tool_choice/{name}").sample(values, held_out)
    return tuple(value for value in values if (value in test) == (split == "test"))


@dataclass(frozen=True)
class ToolRequest:
    """One prompt: a request for `tool` with its argument, and four different tools in the order of the letters."""

    tool: str
    argument: str
    text: str
    options: tuple[str, ...]

    @property
    def prompt(self) -> list[dict[str, str]]:
        """Conversation up to the response: a system turn (the tools) and a user turn (the request)."""
        tools = ", ".join(f"{letter} {tool}" for letter, tool in zip(OPTION_LETTERS, self.options, strict=True))
        system = f"Tools: {tools}. Answer with one call: tool(argument)."
        return [{"role": "system", "content": system}, {"role": "user", "content": self.text}]

    @property
    def answer(self) -> str:
        """Gold answer for `verify`, as JSON text."""
        letter = OPTION_LETTERS[self.options.index(self.tool)]
        return json.dumps({"option": letter, "tool": self.tool, "argument": self.argument})


def draw_request(rng: random.Random, tool: str, wordings: str = "train", arguments: str = "train") -> ToolRequest:
    """Draw a request for a tool from the wordings of one split and the arguments of one.

    The argument is quoted, so that its tokens in the request are those of the call. Without quotes a tokenizer merges
    the space before it (` Dublin` is one token, `Dublin` two), and a small model writes Denmark for Denver.
    """
    argument = rng.choice(arguments_of(tool, arguments))
    others = rng.sample([other for other in TOOLS if other != tool], len(OPTION_LETTERS) - 1)
    options = tuple(rng.sample([tool, *others], len(OPTION_LETTERS)))
    return ToolRequest(tool, argument, rng.choice(wordings_of(tool, wordings)).format(f'"{argument}"'), options)


def build(
    split: str,
    path: str | Path | None = None,
    *,
    feedback: str = "letter",
    rows_per_tool: int | None = None,
    seed: int = 0,
) -> Dataset:
    """Generate the requests of a split.

    Args:
        split: "train" or "test".
        path: must be `None`, since the task reads no file.
        feedback: kind of feedback, "letter" or "stated". It changes the name of the task only.
        rows_per_tool: requests per tool, by default 128 for training (1,536 rows) and 8 for the test (96 rows, half of
            them in each group).
        seed: seed of wordings, arguments, options and row order.

    Returns:
        Columns `prompt` (a system and a user message), `answer` (JSON text, for `verify`), `task`, `id`, `group`
        ("train", "argument" or "request") and `tool`.

    Raises:
        ValueError: unknown split or feedback, a path, or `rows_per_tool` below 1.
    """
    if split not in SPLITS:
        raise ValueError(f"Unknown split {split!r}: use one of {', '.join(SPLITS)}.")
    OPTION.check(feedback, "tool_choice")
    if path is not None:
        raise ValueError(f"The task tool_choice is generated and reads no file: remove path={str(path)!r}.")
    rows_per_tool = {"train": 128, "test": 8}[split] if rows_per_tool is None else rows_per_tool
    if rows_per_tool < 1:
        raise ValueError(f"rows_per_tool must be at least 1, got {rows_per_tool}.")
    rng = random.Random(f"tool_choice/{split}/{seed}")
    rows = []
    for index in range(rows_per_tool):
        for tool in TOOLS:
            group = "train" if split == "train" else ("argument", "request")[index % 2]
            request = draw_request(rng, tool, "test" if group == "request" else "train", split)
            rows.append({"prompt": request.prompt, "answer": request.answer, "group": group, "tool": tool})
    rng.shuffle(rows)
    task, prefix = f"tool_choice:{feedback}", f"tool_choice-{split}-{seed}"
    return Dataset.from_list([{**row, "task": task, "id": f"{prefix}-{index}"} for index, row in enumerate(rows)])


def verify(
    response: str, answer: str | Mapping[str, str], *, truncated: bool = False, feedback: str = "letter"
) -> Verdict:
    """Grade one response.

    The reward is 1 for exactly one call, of the right tool with the right argument and with nothing but punctuation
    after it, else 0, as for a truncated response. An opening before the call costs no reward. Thinking, the text up to
    the last `</think>`, is not graded. `feedback` is its kind, "letter" or "stated".

    Returns:
        A `Verdict` with the metrics `format` (1 for exactly one call at the end) and `opening` (1 for text before it).

    Raises:
        ValueError: the answer does not belong to this task, or unknown feedback.
    """
    OPTION.check(feedback, "tool_choice")
    gold = parse_choice(answer, {"option": "A", "tool": "weather", "argument": "Oslo"}, OPTION_LETTERS, "tool_choice")
    graded = answer_part(response)
    calls = list(_CALL.finditer(graded))
    opened = len(re.findall(r"\w\(", graded))  # also calls around the call, as in hotels(weather(Oslo))
    single = opened == len(calls) == 1 and not truncated and not re.search(r"\w", graded[calls[0].end() :])
    problem = _problem(calls[0], gold) if single else NO_CALL
    opening = not calls or re.search(r"\w", graded[: calls[0].start()]) is not None
    words = " ".join(filter(None, [problem, correction(gold, feedback)]))
    corrected = None
    if single and problem:
        thinking = response.removesuffix(graded)
        corrected = f"{thinking}{graded[: calls[0].start()]}{_right_call(gold)}{graded[calls[0].end() :]}"
    metrics = {"format": float(single), "opening": float(opening)}
    return Verdict(float(problem == ""), words, metrics, corrected=corrected)


NO_CALL = "There must be one call, tool(argument), and nothing after it."
WRONG_TOOL = "The tool is wrong."
WRONG_ARGUMENT = "The argument is wrong: copy it from the request."
PROBLEMS = ("", NO_CALL, WRONG_TOOL, WRONG_ARGUMENT)


def correction(gold: Mapping[str, str], feedback: str = "letter") -> str:
    """Sentence of the feedback that says what is right."""
    if feedback == "letter":
        return f"The right tool is {gold['option']}."
    return f"The correct call is {_right_call(gold)}."


def _right_call(gold: Mapping[str, str]) -> str:
    return f"{gold['tool']}({gold['argument']})"


def _problem(call: re.Match[str], gold: Mapping[str, str]) -> str:
    """What is wrong with a call; empty for nothing."""
    if call["tool"] != gold["tool"]:
        return WRONG_TOOL
    return "" if call["argument"].strip(" \"'") == gold["argument"] else WRONG_ARGUMENT


def opening(response: str) -> str:
    """The first three words before the call, in lower case; empty for a response that begins with its call.

    Under feedback the original model opens responses with words such as "the correct answer". `frame_rate` of
    `lab.analysis.openings` counts the openings that no response of the base without feedback has.
    """
    call = _CALL.search(response)
    return " ".join(re.findall(r"\w+", response[: call.start()] if call else response)[:3]).lower()


def token_classes(response_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Class of each token of a response: "opening", "tool", "argument" or "generic" (brackets, control tokens)."""
    starts = [len(tokenizer.decode(list(response_ids[:end]))) for end in range(len(response_ids) + 1)]
    text = tokenizer.decode(list(response_ids))
    call = _CALL.search(text)
    spans = {name: call.span(name) for name in ("tool", "argument")} if call else {}
    spans["opening"] = (0, call.start() if call else len(text))
    special = set(tokenizer.all_special_ids)
    classes = []
    for token, begin, end in zip(response_ids, starts, starts[1:], strict=False):
        inside = [name for name, (low, high) in spans.items() if max(begin, low) < min(end, high)]
        is_word = token not in special and re.search(r"\w", text[begin:end]) is not None
        classes.append(inside[0] if inside and is_word else "generic")
    return classes
