"""ToolAlpaca: choose tools and their arguments from the documentation of an API.

The reward is SDPO's: the names after `Action:` are compared as a multiset, and the inputs after `Action Input:` are
merged into one dict and compared by Python's `==`. An input ends at its first `}`, so a nested object counts as no
input. The feedback names the expected calls.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.thinking import split_thinking
from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.records import PATH_OPTIONS, Row, dataset_of, read_rows
from credit_trl.tasks.task import PROMPTS

if TYPE_CHECKING:
    from datasets import Dataset

TRAIN_RECORDS = 4046  # published records have the numbers 0 to 4045 (train) and 4046 to 4113 (test)
_STEMS = {"train": ("train", "train_data"), "test": ("test", "eval_simulated")}  # of the files in a folder
MAX_SHOWN = 500  # characters of the response that feedback repeats

# Wording of the published records. A raw documentation ends in a line break.
PROMPT_TEMPLATE = PROMPTS.joinpath("toolalpaca.txt").read_text("utf-8")
FORM = (
    "The calls are right; write each as a line `Action: name` and a line `Action Input: {...}` with one flat JSON "
    "object"
)

Call = tuple[str, dict[str, Any]]  # name and arguments


def build(split: str, path: str | Path | None = None) -> Dataset:
    """Instructions as conversational rows: `prompt` (user), `answer` (JSON text: the golden calls), `task`, `id`.

    Args:
        split: `"train"`, `"test"`, or `"all"`, every record of the files.
        path: a file of SDPO's records (`prompt`, `answer`), or ToolAlpaca's own `eval_simulated.json`, or a folder
            (its subfolder `toolalpaca` if it has one) with one of them for the split. ToolAlpaca's own instructions
            are kept, in order, if the JSON of their golden calls has no `$`, the placeholder for the result of
            another call: 68 of the 100 in `eval_simulated.json`.
    """
    if split not in ("train", "test", "all"):
        raise ValueError(f"ToolAlpaca has no split {split!r}; use train, test or all.")
    if path is None:
        raise ValueError(
            f"ToolAlpaca is not loaded from the hub: pass `path=` ({PATH_OPTIONS}), data/eval_simulated.json of "
            "github.com/tangqiaoyu/ToolAlpaca, or of SDPO's datasets/tooluse folder."
        )
    stems = [*_STEMS["train"], *_STEMS["test"]] if split == "all" else _STEMS[split]
    records: list[tuple[int, dict[str, Any]]] = []  # with their numbers
    for row in read_rows("toolalpaca", split, path, "", stems):
        records += _raw(row, split, len(records)) if "Instructions" in row else _published(row, len(records))
    held_out = [record for record in records if record[0] >= TRAIN_RECORDS]
    if split == "test" and not held_out and len(records) == TRAIN_RECORDS:
        raise ValueError("This file is ToolAlpaca's train part: pass the test file, or split='all' to load it whole.")
    train = [record for record in records if record[0] < TRAIN_RECORDS]
    chosen = {"train": train, "test": held_out or records, "all": records}[split]
    return dataset_of([record for _, record in chosen], f"toolalpaca {split}")


def _published(row: Row, place: int) -> list[tuple[int, dict[str, Any]]]:
    """One of SDPO's records."""
    turns = [{"role": "system", "content": row.text("system")}] if row.get("system") else []
    turns.append({"role": "user", "content": row.text("prompt")})
    answer = row["answer"] if isinstance(row.get("answer"), list) else row.text("answer")
    number = place if row.get("idx") is None else row.integer("idx")
    return [(number, _record(row, "answer", turns, answer, number))]


def _raw(row: Row, split: str, place: int) -> list[tuple[int, dict[str, Any]]]:
    """The instructions of an API in `eval_simulated.json`, without those whose golden calls have a placeholder."""
    if split == "train":
        raise row.error("Golden_Answers", "this is ToolAlpaca's test data; pass SDPO's train file, or split='all'")
    records: list[tuple[int, dict[str, Any]]] = []
    fields = {"name": row.text("Name"), "description": row.text("Description")}
    fields["documentation"] = row.text("NLDocumentation")
    questions = row.texts("Instructions", row["Instructions"])
    answers = row.get("Golden_Answers")
    if not isinstance(answers, list) or len(answers) != len(questions):
        problem = f"expected a list of {len(questions)}, as `Instructions`, got {answers!r:.100}"
        raise row.error("Golden_Answers", problem)
    for question, calls in zip(questions, answers, strict=True):
        prompt = PROMPT_TEMPLATE.format(**fields, question=question)
        number = TRAIN_RECORDS + place + len(records)
        record = _record(row, "Golden_Answers", [{"role": "user", "content": prompt}], calls, number)
        if "$" not in record["answer"]:
            records.append((number, record))
    return records


def _record(row: Row, field: str, turns: list[dict[str, str]], calls: Any, number: int) -> dict[str, Any]:
    try:
        answer = json.dumps(json.loads(calls) if isinstance(calls, str) else calls)
        golden_calls(answer)
    except (ValueError, TypeError, RecursionError) as error:
        raise row.error(field, str(error)) from error
    return {"prompt": turns, "answer": answer, "task": "toolalpaca", "id": f"toolalpaca-{number}"}


def verify(response: str, answer: str | list[dict[str, Any]], *, truncated: bool = False) -> Verdict:
    """Grade one response: reward 1 if its calls, `Action: …` and `Action Input: {…}`, are the golden ones, else 0.

    `answer` has the golden calls, a list of `{"Action": name, "Action_Input": JSON text}` or its JSON text. A
    truncated response is graded like any other. The feedback is the mismatch in the paper's wording. If only the form
    of the calls is wrong, it begins with the form to write.
    """
    golden = golden_calls(answer)
    response = split_thinking(response)[1] or ""
    actions = re.findall(r"Action:\s*(\w+)", response)
    blocks = re.findall(r"Action Input:\s*(\{[^}]*\})", response[: response.rfind("}") + 1])  # cut: linear time
    inputs = list(map(_json_or_none, blocks))
    merged = _merged(inputs)
    names = [name for name, _ in golden]
    expected = _merged(arguments for _, arguments in golden)
    mismatches = []
    if Counter(actions) != Counter(names):
        mismatches.append(_mismatch("Actions", f"[{', '.join(actions)}]", f"[{', '.join(names)}]"))
    if merged != expected:
        written = response.partition("Action Input:")[2].strip()
        is_read = merged or not written or (inputs and None not in inputs)
        predicted = _as_json(merged) if is_read else f"no flat JSON object: {written}"
        mismatches.append(_mismatch("Action inputs", predicted, _as_json(expected)))
    has_other_calls = Counter(actions) not in (Counter(), Counter(names))
    if mismatches and not has_other_calls and _is_right_in_another_form(response, golden):
        mismatches.insert(0, FORM)
    return Verdict(float(not mismatches), "; ".join(mismatches) or None, {"answer_format": float(bool(actions))})


def golden_calls(answer: str | list[dict[str, Any]]) -> list[Call]:
    """Names and inputs of the calls of a row's `answer`. An input that is no JSON object is {}, as in SDPO's code."""
    try:
        calls = json.loads(answer) if isinstance(answer, str) else answer
        golden = []
        for call in calls:
            name, arguments = call["Action"], call["Action_Input"]
            if not (isinstance(name, str) and isinstance(arguments, str | dict)):
                raise TypeError("a name is no text, or an input neither an object nor its text")
            if isinstance(arguments, str):
                arguments = _json_or_none(arguments)
            golden.append((name, arguments if isinstance(arguments, dict) else {}))
        return golden
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        form = "a list of calls with `Action` and `Action_Input`, or its JSON text"
        raise ValueError(f"A ToolAlpaca answer must be {form}, got {answer!r:.100}: {error!r}") from error


def _is_right_in_another_form(response: str, golden: Sequence[Call]) -> bool:
    """Whether a response has the golden names in order, with the golden inputs as flat objects or keywords."""
    if len(response) > 20_000 or not golden:
        return False
    calls = re.findall(r'"name"\s*:\s*"([^"]*)",\s*"(?:arguments|parameters)"|\b(\w+)\((?=\s*\w+\s*=)', response)
    if not set(chain.from_iterable(calls)) <= {"", *(name for name, _ in golden)}:
        return False
    names = [name for name, _ in golden]
    any_name = "|".join(rf"\b{re.escape(name)}\b" for name in names)
    written_names = iter(re.findall(any_name, response))
    if not all(name in written_names for name in names):  # each is searched behind the one before
        return False
    inputs = []
    for match in re.finditer(rf"(?P<object>\{{[^{{}}]*\}})|(?:{any_name})\((?P<keywords>[^(){{}}]*)\)", response):
        pairs = re.findall(r"""\b(\w+)\s*=\s*("[^"]*"|'[^']*'|[^,\s]+)""", match["keywords"] or "")
        written = match["object"] or "{" + ", ".join(f'"{name}": {value}' for name, value in pairs) + "}"
        inputs.append(_json_or_none(written) or _json_or_none(written.replace("'", '"')))
    return inputs == [arguments for _, arguments in golden]


def _merged(inputs: Iterable[Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for call_inputs in inputs:
        merged |= call_inputs or {}
    return merged


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "(nested too deeply to show)"


def _mismatch(what: str, predicted: str, expected: str) -> str:
    excerpt = predicted if len(predicted) <= MAX_SHOWN else f"{predicted[:MAX_SHOWN]}..."
    text = f"{what} mismatch: predicted {excerpt}, expected {expected}"
    return text.encode("utf-8", "replace").decode("utf-8")  # tokenizers reject lone surrogates
