"""The task: generated prompts for training, IFEval's prompts for evaluation, and a verifier with feedback.

    trl credit-eval --model MODEL --task ifeval_task:RULE_NAMED --split rules
    trl credit-eval --model MODEL --task ifeval_task:RULE_NAMED --path input_data.jsonl --group_by type

These run in this folder, or with it in PYTHONPATH.

Splits: `train`; `test` with held-out topics and arguments; `rules` with rule types that are not trained; `official`,
the prompts of IFEval with one instruction; `official_all`. With a path, which is a file in the published form, every
split but `official_all` is `official`; without one IFEval's prompts come from the hub.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkers import check_arguments, grade
from datasets import Dataset
from prompts import SPLITS, example_of, keeps_topic, make_examples, without_literals

from credit_trl import Verdict
from credit_trl.rollout.thinking import split_thinking
from credit_trl.tasks.records import Row, dataset_of, read_rows

HUB = "google/IFEval"
OFFICIAL = ("official", "official_all")
SUBJECTS = {  # by instruction type: what feedback calls the rule
    "keywords:existence": "the required keywords",
    "keywords:frequency": "the frequency of a keyword",
    "keywords:forbidden_words": "the forbidden words",
    "keywords:letter_frequency": "the frequency of a letter",
    "language:response_language": "the language of the answer",
    "length_constraints:number_sentences": "the number of sentences",
    "length_constraints:number_paragraphs": "the number of paragraphs",
    "length_constraints:number_words": "the number of words",
    "length_constraints:nth_paragraph_first_word": "the paragraphs and their first word",
    "detectable_content:number_placeholders": "the placeholders",
    "detectable_content:postscript": "the postscript",
    "detectable_format:number_bullet_lists": "the number of bullet points",
    "detectable_format:constrained_response": "the permitted answers",
    "detectable_format:number_highlighted_sections": "the highlighted sections",
    "detectable_format:multiple_sections": "the sections",
    "detectable_format:json_format": "the JSON format",
    "detectable_format:title": "the title",
    "combination:two_responses": "the two responses",
    "combination:repeat_prompt": "the repetition of the request",
    "startend:end_checker": "the end of the answer",
    "change_case:capital_word_frequency": "the words in capital letters",
    "change_case:english_capital": "capital letters",
    "change_case:english_lowercase": "lower case letters",
    "punctuation:no_comma": "commas",
    "startend:quotation": "the quotation marks",
}
FOLLOWED = "The answer follows the instruction."


class IFEval:
    """The task, by the feedback and by what its reward counts.

    The reward is 1 if every instruction is followed strictly. Metrics: `strict` and `loose` (IFEval's scores of the
    prompt), `topic` (the topic's word is in the answer), `copied` (an example of the prompt is in the answer), and
    `original`: the instructions are followed without the lines that copy an example, and the topic is kept.

    Args:
        states_mistake: feedback also states what was wrong (style B), for the generated types. Without it, it names
            the rule that is broken (style A).
        rejects_copies: the reward is `original` in place of `strict`.
    """

    def __init__(self, states_mistake: bool = False, rejects_copies: bool = False) -> None:
        self.states_mistake = states_mistake
        self.rejects_copies = rejects_copies

    def build(self, split: str, path: str | Path | None = None) -> Dataset:
        """Rows of a split: `prompt`, `answer` (JSON that the verifier reads), `type` (the first), `task` and `id`."""
        if path is not None and split not in OFFICIAL:
            split = "official"
        if split in OFFICIAL:
            examples = official_examples(path, single=split == "official")
        elif split in SPLITS:
            examples = make_examples(split)
        else:
            raise ValueError(f"IFEval has no split {split!r}; use {', '.join((*SPLITS, *OFFICIAL))}.")
        rows = []
        for number, example in enumerate(examples):
            prompt = [{"role": "user", "content": example["prompt"]}]
            answer = json.dumps({name: value for name, value in example.items() if name not in ("prompt", "key")})
            identifier = str(example.get("key", number))
            rows.append({"prompt": prompt, "answer": answer, "task": "ifeval", "id": f"{split}-{identifier}"})
        types = [example["instructions"][0] for example in examples]
        return dataset_of(rows, f"ifeval {split}").add_column("type", types)

    def verify(self, response: str, answer: str, *, truncated: bool = False) -> Verdict:
        """Grade one response; `truncated` has no effect, as in IFEval."""
        example = json.loads(answer)
        text = split_thinking(response)[1] or ""
        if example["topic"] is not None and not re.search(r"\w", text):
            text = ""  # IFEval's checkers accept a lone symbol for many rules
        instructions, kwargs = example["instructions"], example["kwargs"]
        results = grade(text, instructions, kwargs)
        strict = all(result.strict_pass for result in results)
        remaining = without_literals(text, example["literals"])
        has_copies = remaining != text
        keeps = example["topic"] is None or keeps_topic(remaining, example["topic"])
        original = strict and keeps
        if original and has_copies:
            original = all(result.strict_pass for result in grade(remaining, instructions, kwargs))
        metrics = {
            "strict": float(strict),
            "loose": float(all(result.loose_pass for result in results)),
            "copied": float(has_copies),
            "original": float(original),
        }
        if example["topic"] is not None:
            metrics["topic"] = float(keeps_topic(text, example["topic"]))
        texts = []
        for result, arguments in zip(results, kwargs, strict=True):
            if not result.strict_pass:
                texts.append(self._feedback(result.instruction_id, arguments, text, example["literals"]))
        if self.rejects_copies and strict and not original:
            texts.append("The answer copies an example of the prompt." if keeps else "The answer leaves the topic.")
        is_right = original if self.rejects_copies else strict
        return Verdict(float(is_right), " ".join(texts) or FOLLOWED, metrics)

    def _feedback(self, instruction: str, kwargs: Mapping[str, Any], text: str, literals: Sequence[str]) -> str:
        rule = f"The answer does not follow the instruction about {SUBJECTS[instruction]}."
        if not self.states_mistake:
            return rule
        return f"{rule} {mistake(instruction, kwargs, text, literals)}".rstrip()


def mistake(instruction: str, kwargs: Mapping[str, Any], text: str, literals: Sequence[str]) -> str:
    """What is wrong with an answer that breaks an instruction of a generated type; empty for another type."""
    words = len(re.findall(r"\w+", text))  # as the checker counts them
    match instruction.partition(":")[2]:
        case "title":
            example = f" such as <<{literals[0]}>>" if literals else ""
            return f"It has no text in double angular brackets{example}."
        case "number_bullet_lists":
            bullets = len(re.findall(r"^\s*(?:\*[^*]|-).*$", text, flags=re.MULTILINE))
            return f"It has {bullets} bullet points in place of {kwargs['num_bullets']}."
        case "no_comma":
            return f"It has {text.count(',')} commas."
        case "existence":
            missing = [word for word in kwargs["keywords"] if not re.search(word, text, re.IGNORECASE)]
            return f"It does not have {quoted(missing)}."
        case "forbidden_words":
            used = [word for word in kwargs["forbidden_words"] if re.search(rf"\b{word}\b", text, re.IGNORECASE)]
            return f"It has {quoted(used)}."
        case "number_words":
            return f"It has {words} words in place of {kwargs['relation']} {kwargs['num_words']}."
        case "number_sentences":
            return f"It does not have {kwargs['relation']} {kwargs['num_sentences']} sentences."
        case "frequency":
            count = len(re.findall(kwargs["keyword"], text, re.IGNORECASE))
            return (
                f'It has "{kwargs["keyword"]}" {count} times in place of {kwargs["relation"]} {kwargs["frequency"]}.'
            )
        case "number_highlighted_sections":
            return f"It does not have {kwargs['num_highlights']} texts between asterisks."
        case "postscript":
            return f"It does not have {kwargs['postscript_marker']}"
    return ""


def quoted(words: Sequence[str]) -> str:
    return " and ".join(f'"{word}"' for word in words)


def official_examples(path: str | Path | None, single: bool) -> list[dict[str, Any]]:
    """Prompts of IFEval from a file (or folder with `input_data.jsonl`) or the hub: all, or with one instruction.

    Raises:
        ValueError: a row cannot be graded; the text has file, row and field.
    """
    examples = []
    for row in read_rows("ifeval", "train", path, HUB, ["input_data"]):
        instructions = row.texts("instruction_id_list", row.get("instruction_id_list"))
        if not single or len(instructions) == 1:
            example = example_of(row.text("prompt"), instructions, official_kwargs(row, instructions))
            examples.append(example | {"key": row.integer("key")})
    return examples


def official_kwargs(row: Row, instructions: Sequence[str]) -> list[dict[str, Any]]:
    """Arguments of the instructions of a row without those that are None, which the hub's form adds."""
    values = row.get("kwargs")
    if not isinstance(values, list) or len(values) != len(instructions):
        raise row.error("kwargs", f"expected a list of {len(instructions)} objects, got {values!r:.100}")
    kwargs = []
    for instruction, arguments in zip(instructions, values, strict=True):
        if not isinstance(arguments, dict):
            raise row.error("kwargs", f"expected objects, got {arguments!r:.100}")
        kwargs.append({name: value for name, value in arguments.items() if value is not None})
        try:
            check_arguments(instruction, kwargs[-1])
        except ValueError as error:
            raise row.error("kwargs", str(error)) from error
    return kwargs


RULE_NAMED = IFEval()  # feedback of style A
MISTAKE_STATED = IFEval(states_mistake=True)  # feedback of style B
ORIGINAL_TEXT = IFEval(rejects_copies=True)
