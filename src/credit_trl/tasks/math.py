r"""Mathematics with a final `\boxed{}` answer, compared by `math_answers` on top of math-verify.

The reward is 1 if the last box after the thinking equals the gold answer, as text or as mathematics, else 0; the
feedback is the correct answer. Expressions written by a model are compared in killable processes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.deadline import remaining_seconds
from credit_trl.rollout.thinking import answer_part
from credit_trl.rollout.verdict import Verdict
from credit_trl.sandbox.cores import worker_count
from credit_trl.tasks.records import Row, dataset_of, read_rows
from credit_trl.tasks.responses import response_text

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "trl-lib/DeepMath-103K"
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
QUESTION_FIELDS = ("problem", "question", "prompt")
ANSWER_FIELDS = ("answer", "final_answer", "solution")
LONGEST = 400  # characters of an answer above which only equal texts are equal
LONGEST_SOLUTION = 300  # characters of a `solution` that is a final answer itself
DEADLINE_SECONDS = 900.0

NO_BOX = r"No final answer was found. The final answer must be given in the format \boxed{answer}."
TRUNCATED = "The response was cut off because it reached the maximum length."


def build(
    split: str,
    path: str | Path | None = None,
    *,
    question_field: str | None = None,
    answer_field: str | None = None,
    instruction: str = INSTRUCTION,
    hub: str = HUB,
) -> Dataset:
    r"""Problems as conversational rows: `prompt`, `answer` (the final answer alone), `task`, `id`.

    Args:
        split: split of the hub data set, or stem of the file in a folder; ignored for a single file.
        path: a file, or a folder (its subfolder `math` if it has one) with `<split>.*` or its shards; `None` loads
            from the hub.
        question_field: field of the question, text or messages; by default the first of `QUESTION_FIELDS` present.
        answer_field: field of the answer; by default the first of `ANSWER_FIELDS` present. The answer of a worked
            solution is its last box, or the text after its last `####` (GSM8K).
        instruction: text appended to the question; "" for none.
        hub: hub data set, or a local folder in its layout.

    Raises:
        ValueError: no rows, a row without a question or a final answer, or an unreadable file or data set.
    """

    def convert(row: Row) -> dict[str, Any]:
        question = row.first(question_field, QUESTION_FIELDS)
        turns = row[question]
        if isinstance(turns, str):
            turns = [{"role": "user", "content": row.text(question)}]
        if not isinstance(turns, list) or not turns or turns[-1].get("role") != "user":
            raise row.error(question, "not a text or a list of messages that ends with a user message")
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
        if instruction:
            turns[-1]["content"] += f"\n\n{instruction}"
        field = row.first(answer_field, ANSWER_FIELDS)
        gold = _gold(row, field)
        identity = next((row[name] for name in ("id", "idx", "unique_id") if row.get(name) is not None), row.number)
        return {"prompt": turns, "answer": gold, "task": "math", "id": f"math-{identity}"}

    return dataset_of(map(convert, read_rows("math", split, path, hub)), f"math {split}")


def _gold(row: Row, field: str) -> str:
    text = str(row[field]) if isinstance(row[field], int | float) else row.text(field)
    marked = last_boxed(text) or (text.rpartition("####")[2] if "####" in text else None)
    gold = (text if marked is None else marked).strip()
    is_solution = "\n\n" in gold or (field == "solution" and marked is None and len(gold) > LONGEST_SOLUTION)
    if not gold or is_solution:
        raise row.error(field, r"no final answer: neither \boxed{...} nor ####; pass the `answer_field` of answers")
    return gold


def verify(
    response: str, answer: str, *, truncated: bool = False, deadline: float | None = DEADLINE_SECONDS
) -> Verdict:
    """Grade one response by its last box; see `reward`."""
    return reward([response], [answer], [truncated], deadline=deadline)[0]


def reward(
    completions: Sequence[Any],
    answer: Sequence[str],
    truncated: Sequence[bool] | None = None,
    *,
    deadline: float | None = DEADLINE_SECONDS,
    **columns: Any,
) -> list[Verdict]:
    """Grade a batch of texts or conversations, with parallel comparisons; for `reward_funcs`.

    A response that is not compared within `deadline` seconds has the reward `None` and the metric `undecided` alone.
    Others have the metric `answer_format` (1 if there is a box), and `comparison_failed` if comparing the answer
    exceeded its processor time or crashed.
    """
    for gold in answer:
        if not isinstance(gold, str) or not gold.strip():
            raise ValueError(f"A math answer must be a text that is not blank, got {gold!r}.")
    flags = [False] * len(completions) if truncated is None else truncated
    boxes = [last_boxed(answer_part(response_text(completion)) or "") for completion in completions]
    compared = compare(list(zip(answer, boxes, strict=True)), remaining_seconds(deadline))
    verdicts = []
    for gold, box, result, flag in zip(answer, boxes, compared, flags, strict=True):
        if result == "undecided":
            verdicts.append(Verdict(None, None, {"undecided": 1.0}))
            continue
        metrics = {"answer_format": float(box is not None)}
        if result == "failed":
            metrics["comparison_failed"] = 1.0
        remark = f"{TRUNCATED} " if flag else f"{NO_BOX} " if box is None else ""
        verdicts.append(Verdict(float(result == "equal"), f"{remark}Correct answer: {gold}", metrics))
    return verdicts


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, `\fbox{...}` or `\boxed 7`; `None` without one or where it is not closed."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    box = re.compile(r"\\(?:boxed|fbox)\s*(\{?)").match(text, start) if start >= 0 else None
    if box is None:
        return None
    if not box[1]:
        bare = re.compile(r"[^\s$]*").match(text, box.end())[0].rstrip(".,;:)")
        return bare.removesuffix("\\") or None
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, box.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth < 0:
            return text[box.end() : brace.start()].strip()
    return None


def compare(pairs: Sequence[tuple[str, str | None]], seconds: float | None) -> list[str]:
    """Compare pairs of a gold and a given answer: "equal", "different", "failed" or, after `seconds`, "undecided".

    A given `None` is different from every answer. Equal pairs are compared once.
    """
    results: dict[tuple[str, str | None], str] = {}
    for gold, given in pairs:
        if given is None or gold.strip() == given.strip() or max(len(gold), len(given)) > LONGEST or not given:
            results[gold, given] = "equal" if given is not None and gold.strip() == given.strip() else "different"
    unread = [pair for pair in dict.fromkeys(pairs) if pair not in results]
    if unread:
        results |= zip(unread, _COMPARER.ask(unread, seconds), strict=True)
    return [results[pair] for pair in pairs]


class _Comparer:
    """Process of `math_worker`, started when needed and again after it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, pairs: list[tuple[str, str | None]], seconds: float | None) -> list[str]:
        limit = DEADLINE_SECONDS if seconds is None else seconds
        until = time.monotonic() + limit
        if limit <= 0 or not self._lock.acquire(timeout=limit):
            return ["undecided"] * len(pairs)
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            self._process.stdin.write(json.dumps([pairs, limit]).encode() + b"\n")
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                line = self._process.stdout.readline() if selector.select(until - time.monotonic()) else b""
            if line:
                return json.loads(line)
            self.close()
            return ["undecided"] * len(pairs)
        finally:
            self._lock.release()

    def _start(self) -> None:
        path = os.pathsep.join(filter(os.path.isabs, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, *"-P -s -m credit_trl.tasks.math_worker".split(), str(worker_count())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.defpath, "PYTHONPATH": path, "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal goes to the trainer alone
        )
        if self._process.stdout.readline() != b"ready\n":
            self.close()
            raise ImportError("The math task needs math-verify and pebble: pip install 'credit-trl[math]'.")

    def close(self) -> None:
        """End the process and its workers."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


_COMPARER = _Comparer()
atexit.register(_COMPARER.close)
