"""LiveCodeBench: programming problems whose tests run in the sandbox.

The data are `livecodebench/code_generation_lite` by release and contest date, or files with the same rows. As in the
paper, the training split has half of each problem's private tests and the test split all of them. The reward of a
response is 1 if its program passes every test, else 0; the feedback shows two failures.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date, datetime
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from credit_trl.rollout.thinking import split_thinking
from credit_trl.rollout.verdict import Verdict, remaining_seconds
from credit_trl.sandbox import Limits, Outcome, Program, Sandbox, open_sandbox
from credit_trl.tasks import lcb_cases
from credit_trl.tasks.lcb_cases import CUT_OFF, FIELDS, WRONG_FORMAT, Answer, Cases, Result, parse_answer, result_of
from credit_trl.tasks.lcb_program import find_program, prelude_for
from credit_trl.tasks.records import Row, dataset_of, hub_rows, read_rows
from credit_trl.tasks.task import BATCH_SECONDS, PROMPTS, response_text

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "livecodebench/code_generation_lite"
EXAMPLES = Path(__file__).parent / "examples" / "problems.jsonl"
_HUB_FILES = ("test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl")
RELEASES = {
    **{f"v{number}": (file,) for number, file in enumerate(_HUB_FILES, 1)},
    **{f"release_v{number}": _HUB_FILES[:number] for number in range(1, 7)},
}
OPTION = ("release", (*RELEASES, "examples"))

TIME_LIMIT = 6.0  # seconds a test, LiveCodeBench's own
MEMORY_BYTES = 1 << 30
COSTLY = ("timeout", "output_limit", "memory")  # statuses after which the other tests of a program are skipped
FAILED_SECONDS = 30.0  # for the other tests, which serve feedback and `pass_fraction`, once a program has failed one
DEBUG_BYTES = 8 << 20  # limit of a program's output besides its answer
PROMPT = PROMPTS.joinpath("livecodebench.txt").read_text("utf-8")
STDIN_FORM = "The program reads its input from standard input and writes its answer to standard output."
FUNCTION_FORM = (
    "The program completes this starter code, which is then called by the tests:\n```python\n{starter}\n```"
)


def build(
    split: str,
    path: str | Path | None = None,
    *,
    release: str = "v6",
    since: str = "2025-02-01",
    until: str = "2025-05-01",
    seed: int = 0,
    hub: str = HUB,
) -> Dataset:
    """Problems as conversational rows: `prompt` (user), `answer` (JSON text with the tests), `task`, `id`.

    Args:
        split: `"train"`: `max(1, n // 2)` of each problem's n private tests, drawn by the seed and the problem's id.
            `"test"`: all of them. Both splits have the same problems.
        path: a file with the hub's rows, or a folder (its subfolder `livecodebench` if it has one) with the hub's
            files. `None` loads from the hub.
        release: files of the hub to read: `"v6"` are the problems that the sixth release added, `"release_v6"` all of
            its problems (several gigabytes), `"examples"` a small set that comes with this package.
        since, until: ISO dates; contests with `since <= date < until` are kept, by default the paper's 131 problems.
        seed: seed of the draw of training tests.
        hub: hub repository, or a local folder in its layout.
    """
    if split not in ("train", "test"):
        raise ValueError(f"LiveCodeBench has no split {split!r}; use train (half the tests) or test (all tests).")
    if release not in OPTION[1]:
        releases = ", ".join(OPTION[1])
        raise ValueError(f"LiveCodeBench has no release {release!r}; use one of {releases}.")
    start = date.fromisoformat(since)
    end = date.fromisoformat(until)
    problems: dict[str, dict[str, Any]] = {}
    for row in _rows(path, release, hub):
        if start <= _contest_date(row) < end:
            problem = _problem(row, split, seed)
            if problem["id"] in problems:
                raise row.error("question_id", f"{row['question_id']!r} occurs before")
            problems[problem["id"]] = problem
    return dataset_of(problems.values(), f"livecodebench:{release} {split}")


def verify(response: str, answer: Answer, *, truncated: bool = False, sandbox: Sandbox | None = None) -> Verdict:
    """Grade one response; see `reward`."""
    return reward([response], [answer], [truncated], sandbox=sandbox)[0]


def reward(
    completions: Sequence[Any],
    answer: Sequence[Answer],
    truncated: Sequence[bool] | None = None,
    *,
    sandbox: Sandbox | None = None,
    **columns: Any,
) -> list[Verdict]:
    """Grade a batch of responses, with all tests of all programs in one sandbox batch; for `reward_funcs`.

    The reward is 1 if the program passes all tests, else 0. It is `None` if no test failed but `BATCH_SECONDS`, or the
    deadline of the call, passed before all had ended. The metrics are `pass_fraction` (of all tests; skipped ones
    count as failed) and `answer_format` (whether a program was found).

    Args:
        answer: `{"inputs": [...], "outputs": [...], "testtype": "stdin" or "functional", "fn_name": name,
            "time_limit": seconds}`, as JSON text or as an object. Outputs stay in this process.
        sandbox: runs the programs; by default one that is opened at the first call and kept (`choose_sandbox`).
    """
    parsed: dict[str, Cases] = {}  # of answers as text, which the rollouts of a prompt share
    programs: list[Program] = []
    tests: list[tuple[Cases, int]] = []
    counts: list[int | None] = []  # of a response's tests; None without a program
    for group, (completion, gold) in enumerate(zip(completions, answer, strict=True)):
        source = find_program(split_thinking(response_text(completion))[1] or "")
        cases = parsed.get(gold) if isinstance(gold, str) else None
        cases = cases or parse_answer(gold)
        if isinstance(gold, str):
            parsed[gold] = cases
        if source is None:
            counts.append(None)
            continue
        programs += _programs(source, cases, group)
        tests += zip(repeat(cases), range(len(cases.inputs)), strict=False)
        counts.append(len(cases.inputs))
    results = iter(_run(sandbox or _sandbox(os.getpid()), programs, tests) if programs else ())
    verdicts = []
    for count, flag in zip(counts, truncated or repeat(False, len(counts)), strict=True):
        verdicts.append(_verdict(None if count is None else list(islice(results, count)), bool(flag)))
    return verdicts


def _run(box: Sandbox, programs: list[Program], tests: list[tuple[Cases, int]]) -> list[Result]:
    """Results of the programs on their tests. Each output is compared when its program ends, and not kept."""
    results = [Result("deadline")] * len(programs)
    limits = {"skip_group_after": COSTLY, "failed_group_seconds": FAILED_SECONDS}
    with tqdm(total=len(programs), desc="tests", delay=5.0, leave=False) as progress:

        def judge(index: int, outcome: Outcome) -> Outcome:
            progress.update()
            results[index] = _result(*tests[index], outcome)
            status = "rejected" if outcome.ok and results[index].status != "passed" else outcome.status
            return replace(outcome, status=status, stdout="", value=None)

        box.run(programs, deadline=remaining_seconds(BATCH_SECONDS), keep=judge, **limits)
    return results


@functools.cache
def _sandbox(process: int) -> Sandbox:
    """The sandbox of a process, which must have opened it itself."""
    opened = open_sandbox()
    atexit.register(opened.close)
    return opened


def _programs(source: str, cases: Cases, group: int) -> list[Program]:
    """One program per test, with limits that follow from the tests."""
    source = source.encode("utf-8", "replace").decode("utf-8")
    longest = 65_536 + 4 * max(len(output.encode("utf-8", "replace")) for output in cases.outputs)
    limits = Limits(
        cpu_seconds=cases.time_limit + 1,  # one second for the interpreter and its imports
        wall_seconds=2 * cases.time_limit + 2,  # allows for a busy machine
        memory_bytes=MEMORY_BYTES,
        answer_bytes=longest,  # a much longer answer than every expected one is wrong
        output_bytes=DEBUG_BYTES + longest,
    )
    common = {"source": source, "prelude": prelude_for(source), "limits": limits, "group": group}
    programs = []
    for text in cases.inputs:
        if cases.is_functional:
            arguments = ", ".join(text.split("\n"))
            programs.append(Program(fn_name=cases.fn_name, arguments=f"[{arguments}]", **common))
        else:
            programs.append(Program(stdin=text, **common))
    return programs


def _result(cases: Cases, place: int, outcome: Outcome) -> Result:
    if outcome.status != "ok":
        return result_of(cases, place, outcome.status, error=outcome.error)
    answer = outcome.value if cases.is_functional else outcome.stdout
    is_same = lcb_cases.same_return_value if cases.is_functional else lcb_cases.same_output
    status = "passed" if is_same(answer, cases.outputs[place]) else "wrong"
    return result_of(cases, place, status, answer)


def _verdict(results: Sequence[Result] | None, truncated: bool) -> Verdict:
    if results is None:
        said = CUT_OFF if truncated else WRONG_FORMAT
        return Verdict(0.0, said, {"pass_fraction": 0.0, "answer_format": 0.0})
    statuses = [result.status for result in results]
    passed = statuses.count("passed")
    if passed + statuses.count("deadline") == len(statuses) != passed:
        return Verdict(None, None, {"undecided": 1.0})
    metrics = {"pass_fraction": passed / len(statuses), "answer_format": 1.0}
    return Verdict(float(passed == len(statuses)), lcb_cases.feedback(results, truncated), metrics)


def _rows(path: str | Path | None, release: str, hub: str) -> Iterable[Row]:
    files = RELEASES.get(release, ())
    if path is None and files and not Path(hub).is_dir():
        return hub_rows(hub, "json", data_files=[f"hf://datasets/{hub}/{file}" for file in files], split="train")
    folder = Path(path or (hub if files else EXAMPLES))
    missing = set(files) - {file.name for file in folder.rglob("*.jsonl")} if folder.is_dir() else None
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(sorted(missing))} for {release}: add it or pass a file.")
    return read_rows("livecodebench", release, folder, hub, [Path(file).stem for file in files])


def _contest_date(row: Row) -> date:
    try:  # a text, or a datetime where `datasets` found that all are ISO dates
        return datetime.fromisoformat(str(row.get("contest_date"))).date()
    except ValueError as error:
        raise row.error("contest_date", str(error)) from error


def _problem(row: Row, split: str, seed: int) -> dict[str, Any]:
    """The row of the data set: the problem's text with the form of its programs, and its tests."""
    identity = row.text("question_id")
    try:
        tests = lcb_cases.decode_cases(row.text("private_test_cases"))
        if split == "train":
            draws = [hashlib.sha256(f"{seed}:{identity}:{index}".encode()).digest() for index in range(len(tests))]
            half = sorted(range(len(tests)), key=draws.__getitem__)[: max(1, len(tests) // 2)]
            tests = [tests[index] for index in sorted(half)]
        metadata = json.loads(row.get("metadata") or "{}")
        [kind] = {test["testtype"] for test in tests}
        inputs = [test["input"] for test in tests]
        outputs = [test["output"] for test in tests]
        values = (inputs, outputs, kind, metadata.get("func_name") or "", TIME_LIMIT)
        answer = json.dumps(dict(zip(FIELDS, values, strict=True)))
        parse_answer(answer)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"of question {identity!r}, {type(error).__name__}: {error}"
        raise row.error("private_test_cases", problem) from error
    starter = (row.get("starter_code") or "").rstrip()
    form = FUNCTION_FORM.format(starter=starter) if starter else STDIN_FORM
    content = PROMPT.format(time_limit=f"{TIME_LIMIT:g}", problem=f"{row.text('question_content')}\n\n{form}")
    turns = [{"role": "user", "content": content}]
    return {"prompt": turns, "answer": answer, "task": "livecodebench", "id": f"livecodebench-{identity}"}
