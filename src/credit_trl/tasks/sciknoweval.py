"""SciKnowEval, Level 3: multiple-choice questions of biology, chemistry, physics and materials science.

The reward is SDPO's, which the paper adopts: the stripped text between the last `<answer>` and `</answer>` must equal
the gold letter, case-sensitive. The feedback is the correct answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from credit_trl.rollout.thinking import split_thinking
from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.records import Row, dataset_of, read_rows
from credit_trl.tasks.task import PROMPTS

if TYPE_CHECKING:
    from datasets import Dataset

DOMAINS = ("biology", "chemistry", "material", "physics")
OPTION = ("domain", DOMAINS)
HUB = "hicai-zju/SciKnowEval"
WORDS_BEFORE = "the|so|thus|correct|right|best|final|answer|option|choice|letter|is|must|be|text|boxed"
OTHER_ANSWER = r"\W*(?i:or|and|is|\W)\W*(?:[A-Z]\b(?! )|[A-Z]$|(?i:not|wrong|incorrect|false)\b)"
TYPES = ("mcq-4-choices", "mcq-2-choices")
SYSTEM_PROMPT = PROMPTS.joinpath("sciknoweval.txt").read_text("utf-8")  # two-option questions carry it too


def build(split: str, path: str | Path | None = None, *, domain: str | None = None, hub: str = HUB) -> Dataset:
    """Questions of a domain as conversational rows: `prompt` (system, user), `answer` (a letter), `task`, `id`.

    Args:
        split: `"train"` or `"test"` by the published rule (`split_indices`), or `"all"`.
        path: a file or folder with the hub's rows (`question`, `choices`, `answerKey`, `type`, `domain`, `details`),
            or SDPO's of one split, whose `idx` are their places in the whole set. `None` loads from the hub.
        domain: one of `DOMAINS`; optional if `path` is a file.
        hub: hub repository, or a local folder in the hub's layout.
    """
    if split not in ("train", "test", "all"):
        raise ValueError(f"SciKnowEval has no split {split!r}; use train, test or all.")
    if domain not in DOMAINS and (domain is not None or path is None or Path(path).is_dir()):
        choices = ", ".join(f"sciknoweval:{domain_name}" for domain_name in DOMAINS)
        raise ValueError(f"SciKnowEval has no domain {domain!r}; name one, as in {choices}.")
    parts = ("train", "test") if split == "all" else (split,)
    rows = read_rows("sciknoweval", "test", path, hub, [f"{domain}-{part}" for part in parts])
    examples = [example for row in rows if (example := _example(row, domain)) is not None]
    by_place = {example.pop("idx", place): example for place, example in enumerate(examples)}
    if len(by_place) < len(examples):
        raise ValueError("SciKnowEval rows share an `idx`: pass the file of one domain, or name it with `domain`.")
    task = f"sciknoweval:{domain}" if domain else "sciknoweval"
    prefix = f"{domain}-" if domain else ""
    ordered = [{**by_place[place], "task": task, "id": f"{prefix}{place}"} for place in _ordered(by_place, split)]
    return dataset_of(ordered, f"{task} {split}")


def verify(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    """Grade one response: reward 1 if the given answer is the gold letter, else 0.

    The feedback is the correct answer, and for the right letter in a wrong form also how to write it.
    """
    if not isinstance(answer, str) or not re.fullmatch("[A-Z]", answer):
        raise ValueError(f"A SciKnowEval answer must be one capital letter, got {answer!r}.")
    response = split_thinking(response)[1] or ""
    # The stripped text from the last `<answer>` (or the start) to `</answer>` (or the end).
    tagged = response.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    is_tagged = re.search(r"<answer>\s*[A-Z]\s*</answer>\s*\Z", response) is not None
    feedback = f"Correct answer: {answer}"
    written = tagged if "<answer>" in response else tagged.rpartition("\n")[2]
    words_before, no_article = rf"(?:[\W_]|(?:{WORDS_BEFORE})\b)*", r"(?!(?<=[ai]) +[a-z])"
    letter = re.match(rf"{words_before}([a-z])(?!-?[a-z']){no_article}", written[:200], re.IGNORECASE)
    is_named = letter is not None and letter[1].upper() == answer
    # "B or C", "B is wrong"
    if tagged != answer and is_named and not re.match(OTHER_ANSWER, written[letter.end() :]):
        feedback = f"The letter is right; write it as <answer>\n{answer}\n</answer>. {feedback}"
    return Verdict(float(tagged == answer), feedback, {"answer_format": float(is_tagged)})


def split_indices(count: int, split: str) -> list[int]:
    """Positions of a split out of `count`, as in `datasets.Dataset.train_test_split(test_size=0.1, seed=42)`."""
    order = np.random.default_rng(42).permutation(count).tolist()
    held_out = math.ceil(0.1 * count)
    return order[:held_out] if split == "test" else order[held_out:]


def _ordered(places: Collection[int], split: str) -> list[int]:
    """Places of a split in its order, out of those of the whole set or of this split alone."""
    if split == "all":
        return sorted(places)
    for size in range(len(places), 10 * len(places) + 1):
        held_out = math.ceil(0.1 * size)
        if len(places) in (size, held_out if split == "test" else size - held_out):
            order = split_indices(size, split)
            if set(places) in (set(order), set(range(size))):
                return order
    raise ValueError(f"The rows' `idx` are neither the whole set nor its {split} part. Pass the {split} file, or all.")


def _example(row: Row, domain: str | None) -> dict[str, Any] | None:
    """Prompt, answer and, of SDPO's rows, `idx`, in the published wording; `None` for another kind of hub row."""
    place = {}
    if "question" not in row:
        system, prompt, answer = map(row.text, ("system", "prompt", "answer"))
        labels = re.findall(r"(?m)^([A-Z]): ", prompt)
        place["idx"] = row.integer("idx")
    else:
        is_level_3 = row.get("details") is not None and row.object("details").get("level") == "L3"
        if row.text("type") not in TYPES or not is_level_3 or domain not in (None, row.text("domain").lower()):
            return None
        choices = row.object("choices")
        labels = row.texts("choices", choices.get("label"))
        texts = row.texts("choices", choices.get("text"))
        texts = texts[: len(labels)]  # one published row has more texts than labels
        if len(texts) < len(labels):
            raise row.error("choices", f"{len(texts)} texts for {len(labels)} labels")
        options = "\n".join(f"{label}: {text}" for label, text in zip(labels, texts, strict=True))
        prompt = f"{row.text('question')}\n\n{options}\nPlease reason step by step."
        system = SYSTEM_PROMPT
        answer = row.text("answerKey")
    if answer not in labels:
        raise row.error("answer", f"{answer!r} is none of the options {', '.join(labels)}")
    turns = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
    return {"prompt": turns, "answer": answer, **place}
