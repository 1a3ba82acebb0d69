r"""Mathematics with a final `\boxed{}` answer, compared by `math_answers`.

The reward is 1 if the last box of the response's answer part equals the gold answer, as text or as mathematics, else
0; the feedback is the correct answer.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.deadline import remaining_seconds
from credit_trl.rollout.thinking import answer_part
from credit_trl.rollout.verdict import Verdict
from credit_trl.sandbox.cgroups import worker_count
from credit_trl.tasks.records import Row, dataset_of, read_rows
from credit_trl.tasks.task import BATCH_SECONDS, response_text

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "trl-lib/DeepMath-103K"
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
QUESTION_FIELDS = ("problem", "question", "prompt")
ANSWER_FIELDS = ("answer", "final_answer", "solution")
LONGEST_BOX = 10_000  # characters after which a box that is not closed is none
LONGEST = 250  # characters of an answer above which only equal texts are equal
LONGEST_SOLUTION = 300  # characters of a `solution` that is a final answer itself
NO_BOX = r"No final answer was found. The final answer must be given in the format \boxed{answer}. "
TRUNCATED = "The response was cut off because it reached the maximum length. "


def build(split: str, path: str | Path | None = None, *, instruction: str = INSTRUCTION, hub: str = HUB) -> Dataset:
    r"""Problems as conversational rows: `prompt`, `answer` (the final answer alone), `task`, `id`.

    The question is the first of `QUESTION_FIELDS` that a row has, text or messages, and the answer the first of
    `ANSWER_FIELDS`. The answer of a worked solution is its last box, or the text after its last `####` (GSM8K).

    Args:
        split, path, hub: see `records.read_rows`; `None` loads from the hub.
        instruction: text appended to the question; "" for none.

    Raises:
        ValueError: no rows, a row without a question or a final answer, or an unreadable file or data set.
    """

    def convert(row: Row) -> dict[str, Any]:
        question = row.first(QUESTION_FIELDS)
        turns = row[question]
        if isinstance(turns, str):
            turns = [{"role": "user", "content": row.text(question)}]
        if not isinstance(turns, list) or not turns or turns[-1].get("role") != "user":
            raise row.error(question, "not a text or a list of messages that ends with a user message")
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
        if instruction:
            turns[-1]["content"] += f"\n\n{instruction}"
        identity = next((row[name] for name in ("id", "idx", "unique_id") if row.get(name) is not None), row.number)
        return {"prompt": turns, "answer": _gold(row), "task": "math", "id": f"math-{identity}"}

    return dataset_of(map(convert, read_rows("math", split, path, hub)), f"math {split}")


def _gold(row: Row) -> str:
    field = row.first(ANSWER_FIELDS)
    text = str(row[field]) if isinstance(row[field], int | float) else row.text(field)
    marked = last_boxed(text) or (text.rpartition("####")[2] if "####" in text else None)
    gold = (text if marked is None else marked).strip()
    is_solution = "\n\n" in gold or (field == "solution" and marked is None and len(gold) > LONGEST_SOLUTION)
    if not gold or is_solution:
        raise row.error(field, r"no final answer: neither \boxed{...} nor ####; name the column of answers `answer`")
    return gold


def verify(response: str, answer: str, *, truncated: bool = False) -> Verdict:
    """Grade one response by its last box; see `reward`."""
    return reward([response], [answer], [truncated])[0]


def reward(
    completions: Sequence[Any], answer: Sequence[str], truncated: Sequence[bool] | None = None, **columns: Any
) -> list[Verdict]:
    """Grade a batch of texts or conversations, with parallel comparisons; for `reward_funcs`.

    A response that is not compared within `BATCH_SECONDS`, or before the deadline of the call, has the reward `None`
    and the metric `undecided` alone. Others have the metric `answer_format` (1 if there is a box), and
    `comparison_failed` if comparing the answer took too long or crashed.
    """
    for gold in answer:
        if not isinstance(gold, str) or not gold.strip():
            raise ValueError(f"A math answer must be a text that is not blank, got {gold!r}.")
    texts = map(response_text, completions)
    boxes = [last_boxed(answer_part(text) or "") if "box" in text else None for text in texts]
    results = _compare(list(zip(answer, boxes, strict=True)), remaining_seconds(BATCH_SECONDS))
    verdicts = []
    for gold, box, result, flag in zip(answer, boxes, results, truncated or [False] * len(boxes), strict=True):
        if result == "undecided":
            verdicts.append(Verdict(None, None, {"undecided": 1.0}))
            continue
        metrics = {"answer_format": float(box is not None)}
        if result == "failed":
            metrics["comparison_failed"] = 1.0
        remark = TRUNCATED if flag else NO_BOX if box is None else ""
        verdicts.append(Verdict(float(result == "equal"), f"{remark}Correct answer: {gold}", metrics))
    return verdicts


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, `\fbox{...}` or `\boxed 7`; `None` without one or where it is not closed."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    box = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([^\s{$]+))").match(text, start) if start >= 0 else None
    if box is None or box[1]:
        return box and box[1].rstrip(".,;:)\\")
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, box.end(), box.end() + LONGEST_BOX):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth < 0:
            return text[box.end() : brace.start()].strip()
    return None


def _compare(pairs: list[tuple[str, str | None]], seconds: float) -> list[str]:
    """Compare in a process of its own: "equal", "different", "failed" or, after `seconds`, "undecided"."""
    results = {pair: "equal" if pair[0].strip() == pair[1] else "different" for pair in pairs}
    unread = [pair for pair in results if results[pair] != "equal" and pair[1] and max(map(len, pair)) <= LONGEST]
    if not unread or seconds <= 0:
        results |= dict.fromkeys(unread, "undecided")
        return [results[pair] for pair in pairs]
    path = os.pathsep.join(filter(os.path.isabs, sys.path))
    done = subprocess.run(
        [sys.executable, *"-P -s -m credit_trl.tasks.math_answers".split()],
        input=json.dumps([unread, time.monotonic() + seconds, worker_count()]),
        stdout=subprocess.PIPE,
        env={"PATH": os.defpath, "PYTHONPATH": path, "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        text=True,
    )
    if done.returncode:
        raise RuntimeError(
            f"The process that compares answers ended with status {done.returncode}. It needs math-verify and pebble: "
            "pip install 'credit-trl[math]'."
        )
    results |= zip(unread, json.loads(done.stdout), strict=True)
    return [results[pair] for pair in pairs]
