"""ToolAlpaca: choose tools and their arguments from the documentation of an API.

The reward is SDPO's: the names after `Action:` are compared as a multiset, and the inputs after `Action Input:` are
merged into one dict and compared by Python's `==`. An input ends at its first `}`, so a nested object counts as no
input. The feedback names the expected calls.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.records import PATH_OPTIONS, Row, dataset_of, read_rows
from credit_trl.tasks.task import batch_of

if TYPE_CHECKING:
    from datasets import Dataset

TRAIN_RECORDS = 4046  # published records have the numbers 0 to 4045 (train) and 4046 to 4113 (test)
_STEMS = {"train": ("train", "train_data"), "test": ("test", "eval_simulated")}  # of the files in a folder
MAX_SHOWN = 500  # characters of the response that feedback repeats

# Wording of the published records. A raw documentation ends in a line break.
PROMPT_TEMPLATE = (
    "Your task is to answer the user's question using available tools. \n"
    "You have access to the following tools:\n"
    "Name: {name}\nDescription: {description}\nDocumentation:\n{documentation}\n"
    "Use the following format:\n"
    "Thought: you should always think about what to do\n"
    "Action: the action to take, should be one of the tool names.\n"
    "Action Input: the input to the action, must be in JSON format. All of the action input must be realistic and "
    "from the user.\n\n"
    "Begin!\nQuestion: {question}"
)
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

    Raises:
        ValueError: unknown split, no path, a malformed row, no rows, or a file of the other split.
    """
    if split not in ("train", "test", "all"):
        raise ValueError(f"ToolAlpaca has no split {split!r}; use train, test or all.")
    if path is None:
        raise ValueError(
            f"ToolAlpaca is not loaded from the hub: pass `path=` ({PATH_OPTIONS}), data/eval_simulated.json of "
            "github.com/tangqiaoyu/ToolAlpaca, or of SDPO's datasets/tooluse folder."
        )
    stems = [stem for part in _STEMS if split in (part, "all") for stem in _STEMS[part]]
    records = [record for row in read_rows("toolalpaca", split, path, "", stems) for record in _records(row, split)]
    own = [record for record in records if "$" not in record["answer"] or not record["is_simulated"]]
    for place, record in enumerate(own):
        record["number"] = TRAIN_RECORDS + place if record["is_simulated"] else record.get("number", place)
    is_test = [record["number"] >= TRAIN_RECORDS for record in own]
    if split == "test" and not any(is_test) and len(own) == TRAIN_RECORDS:
        raise ValueError("This file is ToolAlpaca's train part: pass the test file, or split='all' to load it whole.")
    if split == "train" or (split == "test" and any(is_test)):
        own = [record for record, other in zip(own, is_test, strict=True) if other == (split == "test")]
    rows = (
        {"prompt": one["prompt"], "answer": one["answer"], "task": "toolalpaca", "id": f"toolalpaca-{one['number']}"}
        for one in own
    )
    return dataset_of(rows, f"toolalpaca {split}")


def _records(row: Row, split: str) -> Iterator[dict[str, Any]]:
    """Records of a row: one of SDPO's, or the instructions of an API in `eval_simulated.json`."""
    if "Instructions" not in row:
        system = [{"role": "system", "content": row.text("system")}] if row.get("system") else []
        number = {} if row.get("idx") is None else {"number": row["idx"]}
        answer = row["answer"] if isinstance(row.get("answer"), list) else row.text("answer")
        yield (
            _record(row, "answer", [*system, {"role": "user", "content": row.text("prompt")}], answer, False) | number
        )
        return
    if split == "train":
        raise row.error("Golden_Answers", "this is ToolAlpaca's test data; pass SDPO's train file, or split='all'")
    for place, (question, calls) in enumerate(zip(row["Instructions"], row["Golden_Answers"], strict=True)):
        prompt = PROMPT_TEMPLATE.format(
            name=row.text("Name"),
            description=row.text("Description"),
            documentation=row.text("NLDocumentation"),
            question=question,
        )
        yield _record(row, f"Golden_Answers[{place}]", [{"role": "user", "content": prompt}], calls, True)


def _record(row: Row, field: str, turns: list[dict[str, str]], calls: Any, is_simulated: bool) -> dict[str, Any]:
    try:
        answer = json.dumps(json.loads(calls) if isinstance(calls, str) else calls)
        golden_calls(answer)
    except ValueError as error:
        raise row.error(field, str(error)) from error
    return {"prompt": turns, "answer": answer, "is_simulated": is_simulated}


def verify(response: str, answer: str | list[dict[str, Any]], *, truncated: bool = False) -> Verdict:
    """Grade one response: reward 1 if its calls, `Action: …` and `Action Input: {…}`, are the golden ones, else 0.

    `answer` has the golden calls, a list of `{"Action": name, "Action_Input": JSON text}` or its JSON text. A
    truncated response is graded like any other.

    Returns:
        A `Verdict` whose feedback is `None` for the correct calls, else the mismatch in the paper's wording. If only
        the form of the calls is wrong, the feedback begins with the form to write.

    Raises:
        ValueError: `answer` is not a list of calls.
    """
    golden = golden_calls(answer)
    actions = re.findall(r"Action:\s*(\w+)", response)
    blocks = re.findall(r"Action Input:\s*(\{[^}]*\})", response[: response.rfind("}") + 1])  # cut: linear time
    merged = _merged(map(_json_or_none, blocks))
    names = [name for name, _ in golden]
    expected = _merged(arguments for _, arguments in golden)
    mismatches = []
    if Counter(actions) != Counter(names):
        mismatches.append(_mismatch("Actions", f"[{', '.join(actions)}]", f"[{', '.join(names)}]"))
    if merged != expected:
        mismatches.append(_mismatch("Action inputs", _as_json(merged), _as_json(expected)))
    if mismatches and _is_right_in_another_form(response, golden):
        mismatches.insert(0, FORM)
    return Verdict(float(not mismatches), "; ".join(mismatches) or None, {"answer_format": float(bool(actions))})


reward = batch_of(verify, "toolalpaca")


def golden_calls(answer: str | list[dict[str, Any]]) -> list[Call]:
    """Names and inputs of the calls of a row's `answer`. An input that is no JSON object is {}, as in SDPO's code."""
    try:
        calls = json.loads(answer) if isinstance(answer, str) else answer
    except (ValueError, RecursionError) as error:
        raise ValueError(f"A ToolAlpaca answer must be the JSON text of a list of calls: {error}") from error
    if not isinstance(calls, list):
        raise ValueError(f"A ToolAlpaca answer must be a list of calls, got {type(calls).__name__}.")
    golden = []
    for place, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(call.get("Action"), str):
            raise ValueError(f"Call {place} is not an object with the text `Action`.")
        given = call.get("Action_Input")
        if not isinstance(given, str | dict):
            raise ValueError(f"Call {place} has no `Action_Input` that is a JSON object or its text.")
        parsed = given if isinstance(given, dict) else _json_or_none(given)
        golden.append((call["Action"], parsed if isinstance(parsed, dict) else {}))
    return golden


def _is_right_in_another_form(response: str, golden: Sequence[Call]) -> bool:
    """Whether a response has the golden names in order, with the golden inputs as flat objects or keywords."""
    if len(response) > 20_000 or not golden:
        return False
    names = [rf"\b{re.escape(name)}\b" for name, _ in golden]
    end = 0
    for name in names:
        named = re.compile(name).search(response, end)
        if named is None:
            return False
        end = named.end()
    form = rf"(?P<object>\{{[^{{}}]*\}})|(?:{'|'.join(names)})\((?P<keywords>[^(){{}}]*)\)"
    inputs = []
    for found in re.finditer(form, response):
        pairs = re.findall(r"""(\w+)\s*=\s*("[^"]*"|'[^']*'|[^,\s]+)""", found["keywords"] or "")
        written = found["object"] or "{" + ", ".join(f'"{name}": {value}' for name, value in pairs) + "}"
        inputs.append(_json_or_none(written) or _json_or_none(written.replace("'", '"')))
    return inputs == [arguments for _, arguments in golden]


def _merged(inputs: Iterable[Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for one in inputs:
        merged.update(one or {})
    return merged


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _as_json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "(nested too deeply to show)"
    return text.encode("utf-8", "replace").decode("utf-8")  # tokenizers reject lone surrogates


def _mismatch(what: str, predicted: str, expected: str) -> str:
    shown = predicted if len(predicted) <= MAX_SHOWN else f"{predicted[:MAX_SHOWN]}..."
    return f"{what} mismatch: predicted {shown}, expected {expected}"
