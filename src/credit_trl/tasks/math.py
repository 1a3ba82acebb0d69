r"""Mathematics with a final `\boxed{}` answer, compared by `math_answers`.

The reward is 1 if the last box of the response's answer part equals the gold answer, as text or as mathematics, else
0; the feedback is the correct answer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.deadline import remaining_seconds
from credit_trl.rollout.in_process import in_process
from credit_trl.rollout.thinking import answer_part
from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks import math_answers
from credit_trl.tasks.records import Row, dataset_of, read_rows
from credit_trl.tasks.task import BATCH_SECONDS, response_text

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "trl-lib/DeepMath-103K"
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
LONGEST = 250  # characters of an answer above which only equal texts are equal
NO_BOX = r"No final answer was found. The final answer must be given in the format \boxed{answer}. "
TRUNCATED = "The response was cut off because it reached the maximum length. "
_compare = in_process(math_answers.compare)


def build(split: str, path: str | Path | None = None, *, instruction: str = INSTRUCTION, hub: str = HUB) -> Dataset:
    r"""Problems as conversational rows: `prompt`, which ends with `instruction`, `answer`, `task` and `id`.

    Questions are texts, or messages that end with a user's. The answer of a worked solution is its last box, or the
    text after `####`. See `records.read_rows` for `split`, `path` and `hub`; a row without these is a `ValueError`.
    """

    def convert(row: Row) -> dict[str, Any]:
        field = row.first(("problem", "question", "prompt"))
        turns = [{"role": "user", "content": row[field]}] if isinstance(row[field], str) else row[field]
        if turns[-1]["role"] != "user" or not turns[-1]["content"].strip():
            raise row.error(field, "no question: neither a text nor messages that end with a user's")
        question = {"role": "user", "content": f"{turns[-1]['content']}\n\n{instruction}".rstrip()}
        source = row.first(("answer", "final_answer", "solution"))
        text = str(row[source])
        gold = (last_boxed(text) or text.rpartition("####")[2]).strip()
        if not gold or "\n\n" in gold:
            raise row.error(source, r"no final answer: neither \boxed{...} nor ####, nor a line")
        identity = next((row[name] for name in ("id", "idx", "unique_id") if row.get(name) is not None), row.number)
        return {"prompt": [*turns[:-1], question], "answer": gold, "task": "math", "id": f"math-{identity}"}

    return dataset_of(map(convert, read_rows("math", split, path, hub)), f"math {split}")


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
    boxes = [last_boxed(answer_part(response_text(completion)) or "") for completion in completions]
    pairs = list(zip(answer, boxes, strict=True))
    results = {(gold, box): "equal" if gold.strip() == box else "different" for gold, box in pairs}
    unread = [pair for pair in results if results[pair] != "equal" and pair[1] and max(map(len, pair)) <= LONGEST]
    seconds = remaining_seconds(BATCH_SECONDS) - 1.0  # to answer before `in_process` ends the process
    results |= dict.fromkeys(unread, "undecided")
    if unread and seconds > 0:
        results |= zip(unread, _compare(unread, time.monotonic() + seconds), strict=True)
    flags = truncated or [False] * len(pairs)
    return [_verdict(results[pair], *pair, flag) for pair, flag in zip(pairs, flags, strict=True)]


def _verdict(result: str, gold: str, box: str | None, truncated: bool) -> Verdict:
    if result == "undecided":
        return Verdict(None, None, {"undecided": 1.0})
    metrics = {"answer_format": float(box is not None)}
    if result == "failed":
        metrics["comparison_failed"] = 1.0
    remark = TRUNCATED if truncated else NO_BOX if box is None else ""
    return Verdict(float(result == "equal"), f"{remark}Correct answer: {gold}", metrics)


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, `\fbox{...}` or `\boxed 7`; `None` without one or where it is not closed."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    box = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([^\s{$]+))").match(text, max(start, 0))
    if box is None or box[1]:
        return box and box[1].rstrip(".,;:)\\")
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, box.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth < 0:
            return text[box.end() : brace.start()].strip()
    return None
