"""ToolAlpaca: choose tools and their arguments from the documentation of an API.

Data: the raw files of `tangqiaoyu/ToolAlpaca` (`data/train_data.json`, `data/eval_simulated.json`), or the prepared
records that SDPO trains on; the wording is the same. Rewards follow one of two protocols (`toolalpaca_protocols`): the
published one, for comparable numbers, or a strict one. The feedback names the expected calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from credit_trl.rollout.verdict import Verdict
from credit_trl.tasks.records import PATH_OPTIONS, Row, Tally, accept, data_files, dataset_of, read_rows, task_folder
from credit_trl.tasks.task import TaskOption
from credit_trl.tasks.toolalpaca_protocols import GRADE_BY, golden_calls

if TYPE_CHECKING:
    from datasets import Dataset

SPLITS = ("train", "test", "all")
OPTION = TaskOption(keyword="protocol", values=tuple(GRADE_BY), verify=True)

TRAIN_RECORDS = 4046  # published records have the numbers 0 to 4045 (train) and 4046 to 4113 (test)
RAW_FILES = {"train": "train_data", "test": "eval_simulated"}

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


@dataclass(frozen=True)
class _Record:
    """One instruction with its unchecked golden calls, from `field` of `row`."""

    row: Row
    field: str
    prompt: str
    calls: Any
    system: str | None = None
    idx: int | None = None


def build(
    split: str, path: str | Path | None = None, *, protocol: str = "field", on_malformed: str = "raise"
) -> Dataset:
    """Instructions as conversational rows: `prompt` (user), `answer` (JSON text: the golden calls), `task`, `id`.

    Args:
        split: `"train"`, `"test"`, or `"all"`, every record of the files.
        path: a raw file (a list of APIs: with `Instances` for training, with `Golden_Answers` for testing), a
            prepared file (`prompt`, `answer`, `idx`), or a folder (its subfolder `toolalpaca` if it has one) with the
            prepared `<split>.*` or the raw file. Raw instructions are kept, in order, if the JSON of their golden
            calls has no `$`, the placeholder for the result of another call: 68 of the 100 in `eval_simulated.json`. A
            prepared file may contain both parts, which its `idx` distinguishes.
        protocol: protocol of the verifier that the column `task` names, `"field"` or `"strict"`.
        on_malformed: `"raise"`, or `"drop"` to print, count and drop malformed rows.

    Raises:
        ValueError: unknown split or protocol, no path, no rows left, or a file of the other split.
        RowError: a malformed row, with file, row and field.
    """
    if split not in SPLITS:
        raise ValueError(f"ToolAlpaca has no split {split!r}; use one of {', '.join(SPLITS)}.")
    OPTION.check(protocol, "ToolAlpaca")
    name = "toolalpaca" if protocol == "field" else f"toolalpaca:{protocol}"
    tally = Tally(f"{name} {split}")
    expanded = accept(_rows(path, split), partial(_expand, split=split, tally=tally), tally, on_malformed)
    records = _of_split([record for records in expanded for record in records], split, tally)
    examples = accept(records, lambda record: _example(record, name, protocol, tally), tally, on_malformed)
    return dataset_of(list(examples), tally)


def verify(
    response: str, answer: str | list[dict[str, Any]], *, truncated: bool = False, protocol: str = "field"
) -> Verdict:
    """Grade one response: reward 1 if its calls, `Action: …` and `Action Input: {…}`, are the golden ones, else 0.

    `answer` has the golden calls, a list of `{"Action": name, "Action_Input": JSON text}` or its JSON text. A
    truncated response is graded like any other. The protocols are those of `toolalpaca_protocols`.

    Returns:
        A `Verdict` whose feedback is `None` for the correct calls, else the mismatch in the paper's wording.

    Raises:
        ValueError: `answer` is not a list of calls, or the protocol is unknown.
    """
    OPTION.check(protocol, "ToolAlpaca")
    return GRADE_BY[protocol](response, golden_calls(answer))


def _rows(path: str | Path | None, split: str) -> Iterable[Row]:
    if path is None:
        raise ValueError(
            f"ToolAlpaca is not loaded from the hub: pass `path=` ({PATH_OPTIONS}), a copy of data/train_data.json or "
            "data/eval_simulated.json from github.com/tangqiaoyu/ToolAlpaca, or of SDPO's datasets/tooluse folder."
        )
    path = Path(path)
    if not path.is_dir():
        return read_rows(path)
    path = task_folder(path, "toolalpaca")
    wanted = ("train", "test") if split == "all" else (split,)
    return (row for part in wanted for row in read_rows(_file_of(path, part)))


def _file_of(folder: Path, part: str) -> Path:
    """File of a part in a folder: prepared (`<part>`, `toolalpaca-<part>`) before raw."""
    files = {file.stem: file for file in reversed(data_files(folder, "toolalpaca"))}
    for stem in (part, f"toolalpaca-{part}", RAW_FILES[part]):
        if stem in files:
            return files[stem]
    raise FileNotFoundError(
        f"{folder} has no {part} part: add {part}.jsonl (prepared) or {RAW_FILES[part]}.json (raw), or pass a file. "
        f"It contains {', '.join(sorted(files)) or 'no data file'}."
    )


def _expand(row: Row, split: str, tally: Tally) -> list[_Record]:
    """Records of a row: one of a prepared row, one per instruction of a raw API."""
    if "Golden_Answers" in row.data:
        return [*_test_records(row)]
    if "Instances" in row.data:
        return [*_train_records(row, tally)]
    calls = row.parsed("answer") if isinstance(row.data.get("answer"), str) else row.get("answer", list)
    system = None if row.data.get("system") is None else row.text("system")
    idx = row.get("idx", int) if "idx" in row.data else None
    return [_Record(row, "answer", row.text("prompt"), calls, system, idx)]


def _prompt(row: Row, question: str) -> str:
    return PROMPT_TEMPLATE.format(
        name=row.text("Name"),
        description=row.text("Description"),
        documentation=row.text("NLDocumentation"),
        question=question,
    )


def _test_records(row: Row) -> Iterator[_Record]:
    instructions, golden = row.get("Instructions", list), row.get("Golden_Answers", list)
    if len(instructions) != len(golden):
        raise row.error("Golden_Answers", f"{len(golden)} answers for {len(instructions)} instructions")
    for place, (question, calls) in enumerate(zip(instructions, golden, strict=True)):
        if not isinstance(question, str) or not question.strip():
            raise row.error(f"Instructions[{place}]", "not a text, or blank")
        yield _Record(row, f"Golden_Answers[{place}]", _prompt(row, question), calls)


def _train_records(row: Row, tally: Tally) -> Iterator[_Record]:
    """Records of the instances that call a tool, with the calls of their steps as golden calls.

    A step is `[[tool, input, text], observation]`. The question is the instance's input without the help that the
    user agent appends for the generating agent, as in ToolAlpaca's training data.
    """
    for place, instance in enumerate(row.get("Instances", list)):
        steps = instance.get("intermediate_steps") if isinstance(instance, dict) else None
        if not steps:  # the generating agent failed or never called a tool
            tally.drop("without a call")
            continue
        field = f"Instances[{place}]"
        try:
            calls = [{"Action": step[0][0], "Action_Input": step[0][1]} for step in steps]
            question = instance["input"].rsplit("\nHint: ", 1)[0]
        except (TypeError, LookupError, AttributeError) as error:
            problem = f"no `input` text, or steps that are not [[tool, input, ...], observation]: {error}"
            raise row.error(field, problem) from error
        yield _Record(row, f"{field}.intermediate_steps", _prompt(row, question), calls)


def _of_split(records: Sequence[_Record], split: str, tally: Tally) -> list[_Record]:
    """Records of a split, numbered as the published ones; other records are tallied."""
    kinds = {record.field.partition("[")[0] for record in records}
    wrong = {"train": "Golden_Answers", "test": "Instances"}.get(split)
    if wrong in kinds:
        needed = "Instances" if split == "train" else "Golden_Answers"
        raise ValueError(
            f"This is not ToolAlpaca's {split} data: its APIs have `{wrong}` instead of `{needed}`. Pass "
            f"{RAW_FILES[split]}.json, a prepared file, or split='all'."
        )
    numbered = _prepared_of_split([record for record in records if record.field == "answer"], split, tally)
    starts = {"Instances": 0, "Golden_Answers": TRAIN_RECORDS}
    for kind, start in starts.items():
        raw = [record for record in records if record.field.partition("[")[0] == kind]
        whole = [record for record in raw if "$" not in json.dumps(record.calls)]
        tally.drop("with a placeholder ($) in the golden calls", len(raw) - len(whole))
        numbered += [replace(record, idx=start + place) for place, record in enumerate(whole)]
    return numbered


def _prepared_of_split(records: Sequence[_Record], split: str, tally: Tally) -> list[_Record]:
    """Prepared records of a split, by their `idx` if the file contains both parts."""
    numbered = [replace(one, idx=place) if one.idx is None else one for place, one in enumerate(records)]
    test = [record for record in numbered if record.idx >= TRAIN_RECORDS]
    train = [record for record in numbered if record.idx < TRAIN_RECORDS]
    if split == "train":
        tally.drop("of the test part", len(test))
        return train
    if split == "test" and test:
        tally.drop("of the train part", len(train))
        return test
    if split == "test" and len(train) == TRAIN_RECORDS:
        raise ValueError(
            "This file is ToolAlpaca's train part: pass the test file, or split='all' to load it without a split."
        )
    return numbered


def _example(record: _Record, name: str, protocol: str, tally: Tally) -> dict[str, Any] | None:
    """Row of the data set, with checked golden calls."""
    answer = json.dumps(record.calls)
    try:
        calls = golden_calls(answer)
    except ValueError as error:
        raise record.row.error(record.field, str(error)) from error
    if not all(call.readable for call in calls):
        # The data are written by models. The field protocol compares such an input with {}.
        if protocol == "strict":
            return tally.drop("whose golden input is not a JSON object")
        tally.notes["whose golden input is not a JSON object, compared as {}"] += 1
    system = [{"role": "system", "content": record.system}] if record.system else []
    prompt = [*system, {"role": "user", "content": record.prompt}]
    return {"prompt": prompt, "answer": answer, "task": name, "id": f"toolalpaca-{record.idx}"}
