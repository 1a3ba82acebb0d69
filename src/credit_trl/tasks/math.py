r"""Mathematics with a final `\boxed{}` answer, compared by `math-verify`.

Data: rows with a question and an answer, from files or from the hub. The reward is 1 if the last `\boxed{...}` of the
response equals the gold answer, as text or as mathematics; the feedback is the correct answer. Comparing simplifies
expressions written by a model, so it runs in worker processes with limits (`math_worker`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.completions import response_text
from credit_trl.tasks.math_operations import finished_part
from credit_trl.tasks.math_worker import equivalent
from credit_trl.tasks.printable import printable
from credit_trl.tasks.records import Row, Tally, accept, data_files, dataset_of, hub_rows, read_rows, task_folder

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "trl-lib/DeepMath-103K"
INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
QUESTION_FIELDS = ("problem", "question", "prompt")
ANSWER_FIELDS = ("answer", "final_answer", "solution")
LONGEST_SOLUTION = 300  # maximum characters of a `solution` that is a final answer itself

DEADLINE_SECONDS = 900.0

NO_BOX = r"No final answer was found. The final answer must be given in the format \boxed{answer}."
UNDONE = "The answer leaves an operation undone: the final answer must be its value."
TRUNCATED = "The response was cut off because it reached the maximum length."


def build(
    split: str,
    path: str | Path | None = None,
    *,
    question_field: str | None = None,
    answer_field: str | None = None,
    instruction: str = INSTRUCTION,
    hub: str = HUB,
    on_malformed: str = "raise",
) -> Dataset:
    r"""Problems as conversational rows: `prompt`, `answer` (the final answer alone), `task`, `id`.

    Args:
        split: split of the hub data set, or stem of the file in a folder; ignored for a single file.
        path: a file, or a folder (its subfolder `math` if it has one) with `<split>.*` or all of its shards
            `<split>-00000-of-00002.*`; `None` loads from the hub.
        question_field: field of the question, text or messages; by default the first of `QUESTION_FIELDS` present.
        answer_field: field of the answer; by default the first of `ANSWER_FIELDS` present. The answer of a worked
            solution is its last box (`\boxed{x}`, `\boxed x` or `\fbox{x}`), or the text after its last `####`
            (GSM8K). A `solution` with neither must be a final answer itself.
        instruction: text appended to the question; "" for none.
        hub: hub data set, or a local folder in its layout.
        on_malformed: `"raise"`, or `"drop"` to print, count and drop malformed rows.

    Raises:
        ValueError: no rows left, or the hub data set cannot be loaded.
        RowError: a malformed row, with file, row and field.
    """
    tally = Tally(f"math {split}")

    def convert(row: Row) -> dict[str, Any]:
        question = _field_of(row, question_field, QUESTION_FIELDS)
        answer = _field_of(row, answer_field, ANSWER_FIELDS)
        named = (name for name in ("id", "idx", "unique_id") if row.data.get(name) is not None)
        identity = next((row.get(name, (str, int, float)) for name in named), row.number)
        return {
            "prompt": _prompt(row, question, instruction),
            "answer": _gold(row, answer),
            "task": "math",
            "id": f"math-{identity}",
        }

    rows = hub_rows(hub, split) if path is None else read_rows(_files_of(Path(path), split))
    return dataset_of(list(accept(rows, convert, tally, on_malformed)), tally)


def verify(
    response: str, answer: str, *, truncated: bool = False, deadline: float | None = DEADLINE_SECONDS
) -> Verdict:
    r"""Grade one response by its last `\boxed{...}`; see `reward`."""
    return reward([response], [answer], [truncated], deadline=deadline)[0]


def reward(
    completions: Sequence[Any],
    answer: Sequence[str],
    truncated: Sequence[bool] | None = None,
    *,
    deadline: float | None = DEADLINE_SECONDS,
    **columns: Any,
) -> list[Verdict]:
    """Grade a batch of texts or conversations with parallel comparisons, for `reward_funcs`.

    A response that is not compared within `deadline` seconds, if there is one, has the reward `None` and the metric
    `undecided` alone. Others have the metric `answer_format` (1 if there is a box), and `comparison_failed` if
    comparing the answer exceeded its processor time or crashed.
    """
    flags = [False] * len(completions) if truncated is None else truncated
    for gold in answer:
        if not isinstance(gold, str) or not gold.strip():
            raise ValueError(f"A math answer must be a text that is not blank, got {gold!r}.")
    texts = [response_text(completion) for completion in completions]
    boxes = [last_boxed(text) for text in texts]
    given = [None if box is None else finished_part(gold, box) for gold, box in zip(answer, boxes, strict=True)]
    compared = equivalent(list(zip(answer, given, strict=True)), deadline)
    verdicts = []
    for text, gold, box, part, comparison, flag in zip(texts, answer, boxes, given, compared, flags, strict=True):
        if comparison == "undecided":
            verdicts.append(Verdict(None, None, {"undecided": 1.0}))
            continue
        metrics = {"answer_format": float(box is not None)}
        if comparison == "failed":
            metrics["comparison_failed"] = 1.0
        words = f"{_remark(box, part, bool(flag))}Correct answer: {gold}"
        corrected = None if comparison == "equal" else with_answer(text, gold)
        verdicts.append(Verdict(float(comparison == "equal"), words, metrics, corrected=corrected))
    return verdicts


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, with balanced braces; `None` if there is none or it is not closed."""
    *_, box = [None, *re.finditer(r"\\boxed\s*\{", text)]
    return None if box is None else _braced(text, box.end())


def with_answer(text: str, answer: str) -> str | None:
    """The text with another answer in its last box, `None` if `last_boxed` finds none."""
    content = last_boxed(text)
    if content is None:
        return None
    *_, box = re.finditer(r"\\boxed\s*\{\s*", text)
    return f"{text[: box.end()]}{answer}{text[box.end() + len(content) :]}"


def _braced(text: str, start: int) -> str | None:
    """Stripped text from `start` to the closing brace; `None` if there is no closing brace."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):  # skips `\{`, but not the brace after `\\`
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth < 0:
            return text[start : start + brace.start()].strip()
    return None


def _remark(box: str | None, part: str | None, truncated: bool) -> str:
    """Sentence of the feedback before the correct answer, with a trailing space, or ""."""
    remark = TRUNCATED if truncated else NO_BOX if box is None else UNDONE if part is None else ""
    return f"{remark} ".lstrip()


def _files_of(path: Path, split: str) -> list[Path]:
    """The file of a split or its shards in order, below a folder's subfolder `math`, or anywhere below the folder but
    in subfolders for other tasks.
    """
    if not path.is_dir():
        return [path]
    path = task_folder(path, "math")
    files = data_files(path)
    named = re.compile(rf"{re.escape(split)}(?:-(\d{{5}})-of-(\d{{5}}))?")
    found = {file: name.groups() for file in data_files(path, "math") if (name := named.fullmatch(file.stem))}
    sets = {(file.parent, file.suffix, count) for file, (_, count) in found.items()}
    if len(sets) == 1 and len(found) == int(next(iter(sets))[2] or 1):
        return list(found)
    raise FileNotFoundError(
        f"{path} has {len(found)} files named {split}.jsonl, .json or .parquet or shards of one (it contains "
        f"{', '.join(printable(file.relative_to(path).as_posix()) for file in files) or 'no data file'}); pass one "
        "file, or a folder with one file or all of its shards."
    )


def _field_of(row: Row, wanted: str | None, known: tuple[str, ...]) -> str:
    if wanted is not None:
        return wanted
    for name in known:
        if row.data.get(name) is not None:
            return name
    raise row.error(known[0], f"missing, as are {', '.join(known[1:])}; pass the name of the field to `build`")


def _prompt(row: Row, field: str, instruction: str) -> list[dict[str, str]]:
    value = row.get(field, (str, list))
    turns = [{"role": "user", "content": row.text(field)}] if isinstance(value, str) else list(value)
    if not turns or not all(_is_turn(turn) for turn in turns) or turns[-1]["role"] != "user":
        raise row.error(field, "not a list of messages {role, content} that ends with a user message")
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    if instruction:
        turns[-1]["content"] += f"\n\n{instruction}"
    return turns


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)


def _gold(row: Row, field: str) -> str:
    value = row.get(field, (str, int, float))
    if isinstance(value, float) and not math.isfinite(value):
        raise row.error(field, f"{value} is not a final answer")
    text = row.text(field) if isinstance(value, str) else str(value)
    marked = _marked(text)
    gold = text.strip() if marked is None else marked.strip()
    if not gold:
        raise row.error(field, "contains no final answer")
    if "\n\n" in gold or (field == "solution" and marked is None and _is_prose(gold)):
        raise row.error(field, r"a worked solution without \boxed{...} or ####; pass the `answer_field` of answers")
    return gold


def _marked(text: str) -> str | None:
    r"""Final answer of a worked solution: the last box (also `\fbox{x}` and `\boxed x`), or the text after the last
    `####`. "" if a box is not closed, `None` if there is neither.
    """
    *_, box = [None, *re.finditer(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(\{?)", text)]
    if box is None:
        return text.rpartition("####")[2] if "####" in text else None
    if box[1]:
        return _braced(text, box.end()) or ""
    bare = re.match(r"(?:(?!\\[)\]])[^\s$])*", text[box.end() :])[0].rstrip(".,;:")
    return bare if bare.count("{") == bare.count("}") else ""


def _is_prose(text: str) -> bool:
    r"""Whether a text has too many words or characters for a final answer; words in `\text{...}` are not counted."""
    outside = re.sub(r"\\(?:text|mathrm|mbox|operatorname)\s*\{[^{}]*\}", " ", text)
    words = re.findall(r"(?<![A-Za-z\\])[A-Za-z]{2,}", outside)
    return "\n" in text or len(text) > LONGEST_SOLUTION or len(words) > (3 if text.endswith(".") else 8)
