import base64
import json
import pickle
import sys
import textwrap
import zlib
from contextlib import nullcontext
from functools import partial

import pytest
from datasets import Dataset

from credit_trl import Verdict
from credit_trl.rollout.thinking import use_marks
from credit_trl.rollout.verdict import FAILED, VerifierPolicy, deadline_in
from credit_trl.sandbox import Outcome, Program, open_sandbox
from credit_trl.tasks import livecodebench, load_task
from credit_trl.tasks.lcb_cases import CUT_OFF, WRONG_FORMAT
from tables import rows_of, tables_of

TABLES = tables_of(__file__)


def hub_row(number: int = 0, private: int = 6, **changes) -> dict:
    cases = [{"input": f"{place}\n", "output": f"{2 * place}\n", "testtype": "stdin"} for place in range(private)]
    row = {"question_content": f"Problem {number}: double a number.", "question_id": f"q{number}"}
    return TABLES["hub_row"] | row | {"private_test_cases": json.dumps(cases)} | changes


FUNCTIONAL = TABLES["functional"]


def inputs_of(row: dict) -> list[str]:
    return json.loads(row["answer"])["inputs"]


def test_problems_become_conversations_with_tests(write_jsonl):
    rows = livecodebench.build("test", write_jsonl([hub_row(0, private=2), hub_row(1, **FUNCTIONAL)]))
    contents = [turn["content"] for (turn,) in rows["prompt"]]
    assert "Problem 0: double a number.\n\nThe program reads its input from standard input" in contents[0]
    assert f"```python\n{FUNCTIONAL['starter_code'].rstrip()}\n```" in contents[1]
    assert rows["answer"][:] == [
        stdin_answer(("0\n", "0\n"), ("1\n", "2\n")),
        functional_answer("turn", *[('[1,2]\n"x"', "[2,1]")] * 2),
    ]
    assert rows["task"][:] == ["livecodebench"] * 2
    assert rows["id"][:] == ["livecodebench-q0", "livecodebench-q1"]


def test_train_split_has_half_of_the_private_tests(write_jsonl):
    counts = (1, 2, 3, 9, 10)
    path = write_jsonl([hub_row(count, private=count) for count in counts])
    train, test = livecodebench.build("train", path), livecodebench.build("test", path)
    assert train["prompt"][:] == test["prompt"][:]
    for count, half, full in zip(counts, train, test, strict=True):
        assert (len(inputs_of(half)), len(inputs_of(full))) == (max(1, int(count / 2)), count)
        assert [test_input for test_input in inputs_of(full) if test_input in inputs_of(half)] == inputs_of(half)


def test_draw_depends_on_seed_and_problem_only(write_jsonl):
    rows = [hub_row(number, private=20) for number in range(8)]
    path, turned = write_jsonl(rows), write_jsonl(rows[::-1][:5], "turned.jsonl")
    drawn_answers = {row["id"]: row["answer"] for row in livecodebench.build("train", path)}
    again = {row["id"]: row["answer"] for row in livecodebench.build("train", turned)}
    with_other_seed = {row["id"]: row["answer"] for row in livecodebench.build("train", path, seed=1)}
    assert again.items() <= drawn_answers.items()
    assert len(set(drawn_answers.values())) > 1
    assert sum(drawn_answers[name] != with_other_seed[name] for name in drawn_answers) >= 7


def test_contest_dates_are_filtered(write_jsonl):
    dates = ["2025-01-31T23:59:59", "2025-02-01T00:00:00", "2025-04-30T23:59:59", "2025-05-01T00:00:00", "2024-06-01"]
    path = write_jsonl([hub_row(number, contest_date=day) for number, day in enumerate(dates)])
    built = livecodebench.build("test", path)
    assert built["id"] == ["livecodebench-q1", "livecodebench-q2"]
    assert len(livecodebench.build("test", path, since="2024-01-01", until="2026-01-01")) == 5


def test_packed_and_parquet_files_give_the_same_rows(tmp_path, write_jsonl):
    rows = [hub_row(number) for number in range(3)]
    plain = livecodebench.build("train", write_jsonl(rows))[:]
    for row in rows:
        data = zlib.compress(pickle.dumps(row["private_test_cases"]))
        row["private_test_cases"] = base64.b64encode(data).decode()
    assert livecodebench.build("train", write_jsonl(rows, "packed.jsonl"))[:] == plain
    Dataset.from_list(rows).to_parquet(tmp_path / "packed.parquet")
    assert livecodebench.build("train", tmp_path / "packed.parquet")[:] == plain


def hub_folder(write_jsonl, tmp_path):
    for version in range(1, 7):
        name = f"test{version}".removesuffix("1")
        write_jsonl([hub_row(10 * version + place) for place in range(2)], f"hub/{name}.jsonl")
    return tmp_path / "hub"


@pytest.mark.parametrize(("release", "count"), [("v6", 2), ("v1", 2), ("release_v1", 2), ("release_v6", 12)])
def test_release_selects_files_of_the_hub(tmp_path, write_jsonl, release, count):
    folder = hub_folder(write_jsonl, tmp_path)
    by_path = livecodebench.build("test", folder, release=release)
    from_hub = livecodebench.build("test", hub=str(folder), release=release)
    assert len(by_path) == count
    assert from_hub[:] == by_path[:]
    if release == "v6":
        assert by_path["id"] == ["livecodebench-q60", "livecodebench-q61"]


@pytest.mark.parametrize(("arguments", "message"), TABLES["invalid"])
def test_invalid_build_arguments_raise(monkeypatch, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=message):
        livecodebench.build(**arguments)


@pytest.mark.parametrize(("row", "field"), TABLES["malformed"].values(), ids=TABLES["malformed"])
def test_malformed_row_raises_with_file_row_and_field(write_jsonl, row, field):
    path = write_jsonl([hub_row(0), hub_row(1) | row], "problems.jsonl")
    with pytest.raises(ValueError, match=rf"problems\.jsonl, row 2, field '{field}'"):
        livecodebench.build("test", path)


def test_oversized_row_is_named_by_its_question(write_jsonl, monkeypatch):
    monkeypatch.setattr(livecodebench.lcb_cases, "LARGEST", 1_000)
    path = write_jsonl([hub_row(0, private=2), hub_row(1, private=200)])
    message = "row 2, field 'private_test_cases': of question 'q1', .* more than 1000 bytes"
    with pytest.raises(ValueError, match=message):
        livecodebench.build("test", path)


@pytest.fixture(scope="module")
def sandbox():
    """A sandbox for the programs of this file, unprotected if necessary, as all are harmless."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the local sandbox needs Linux")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CREDIT_TRL_ALLOW_UNSANDBOXED", "1")
        with open_sandbox() as opened:
            yield opened


def test_program_that_imports_numpy_fails_and_its_feedback_says_so(sandbox):
    """LiveCodeBench's runner has it; see docs/tasks.md."""
    program = "```python\nimport numpy as np\nprint(np.int64(input()) + 1)\n```"
    verdict = livecodebench.verify(program, stdin_answer(("1\n", "2\n")), sandbox=sandbox)
    assert verdict.reward == 0.0
    assert "ModuleNotFoundError: No module named 'numpy'" in verdict.feedback


@pytest.mark.parametrize("of_run", [True, False])
def test_program_in_the_thinking_is_not_graded(sandbox, of_run):
    draft = "```python\nx = int(input())\n# a first idea, wrong and longer than the final program\nprint(x)\n```"
    final = "```python\nprint(int(input()) + 1)\n```"
    answer = stdin_answer(("1\n", "2\n"))
    with use_marks((("<mm:think>", "</mm:think>"),)) if of_run else nullcontext():
        assert livecodebench.verify(f"<mm:think>{draft}</mm:think>\n{final}", answer, sandbox=sandbox).reward == 1.0
        assert livecodebench.verify(f"<mm:think>{final}", answer, sandbox=sandbox).reward == 0.0


def stdin_answer(*pairs: tuple[str, str], fn_name: str = "", time_limit: float = 6.0) -> str:
    inputs, outputs = zip(*pairs, strict=True)
    kind = "functional" if fn_name else "stdin"
    answer = {"inputs": inputs, "outputs": outputs, "testtype": kind, "fn_name": fn_name, "time_limit": time_limit}
    return json.dumps(answer)


def functional_answer(fn_name: str, *pairs: tuple[str, str]) -> str:
    return stdin_answer(*pairs, fn_name=fn_name)


def fenced(code: str, tag: str = "python") -> str:
    return f"Here it is.\n```{tag}\n{textwrap.dedent(code).strip()}\n```"


DOUBLE = stdin_answer(("3\n", "6\n"), ("10\n", "20\n"))
ROWS = stdin_answer(("2\n", "0 0.5\n1 1.5\n"))
TURN = functional_answer("turn", ("[1,2]", "[2,1]"), ("[]", "[]"))
POWER = functional_answer("power", ("5000", f"1{'0' * 5000}"))

RIGHT = "print(2 * int(input()))"
LONG = stdin_answer(("9" * 5_000, f"1{'0' * 5_000}"))
TESTS = {"double": DOUBLE, "turn": TURN, "rows": ROWS, "power": POWER, "long": LONG}
# `program` stands in a block of Python, and `response` is the whole text; by default the reward is 0.
PROGRAMS = [
    *rows_of(__file__, "programs"),
    {"case": "source nested too deeply", "program": "-" * 50_000 + "1"},
    {"case": "integers of 5,001 digits", "program": "print(int(input()) + 1)", "tests": "long", "reward": 1},
]


@pytest.mark.parametrize("row", PROGRAMS, ids=lambda row: row["case"])
def test_rewards_follow_the_benchmark_checker(sandbox, row):
    reward = row.get("reward", 0)
    response = fenced(row["program"]) if "program" in row else row["response"]
    verdict = livecodebench.verify(response, TESTS[row.get("tests", "double")], sandbox=sandbox)
    assert verdict.reward == reward
    assert (verdict.feedback is None) == (reward == 1)
    assert (verdict.metrics["pass_fraction"] == 1.0) == (reward == 1)
    if reward == 0:
        assert len(verdict.feedback) <= 2000
        verdict.feedback.encode("utf-8")


def test_feedback_shows_a_wrong_answer_and_an_error_of_different_tests(sandbox):
    code = "def half(n):\n    return n // (n - 3)\n\nprint(half(int(input())))"
    answer = stdin_answer(("5\n", "1\n"), ("4\n", "4\n"), ("3\n", "1\n"))
    verdict = livecodebench.verify(fenced(code), answer, sandbox=sandbox)
    lines = verdict.feedback.split("\n")
    assert lines[:5] == ["Test 1: Wrong Answer", "Input: 5", "Output: 2", "Expected: 1", ""]
    assert lines[5] == "Test 3: Runtime Error"
    assert lines[6].startswith("ZeroDivisionError: ")
    frames = ["Line 2 in half (program.py)", "    return n // (n - 3)", "Line 4 (program.py)"]
    assert lines[7:] == [*frames, "    print(half(int(input())))", "Input: 3"]
    assert verdict.metrics == {"pass_fraction": 1 / 3, "answer_format": 1.0}


@pytest.mark.parametrize("code", TABLES["slow"].values(), ids=TABLES["slow"])
def test_time_out_is_shown_with_its_limit_and_ends_the_program(sandbox, code):
    answer = stdin_answer(("3\n", "6\n"), ("10\n", "20\n"), ("11\n", "22\n"), time_limit=0.1)
    verdict = livecodebench.verify(fenced(code), answer, sandbox=sandbox)
    place = 2 if "n > 3" in code else 1
    assert verdict.reward == 0.0
    assert verdict.feedback == f"Test {place}: Time Limit Exceeded (0.1 seconds)\nInput: {(3, 10)[place - 1]}"
    assert verdict.metrics == {"pass_fraction": (place - 1) / 3, "answer_format": 1.0}


def test_time_out_leaves_the_other_rollouts_of_the_batch_alone(sandbox):
    answer = stdin_answer(("3\n", "6\n"), ("10\n", "20\n"), time_limit=1)
    responses = [fenced(RIGHT), fenced("while True:\n    pass"), fenced(RIGHT), fenced("print(1)")]
    verdicts = livecodebench.reward(responses, [answer] * 4, sandbox=sandbox)
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 1.0, 0.0]
    assert "Time Limit Exceeded (1 seconds)" in verdicts[1].feedback
    assert "Wrong Answer" in verdicts[3].feedback


@pytest.mark.parametrize(("code", "tests"), TABLES["unlimited"].values(), ids=TABLES["unlimited"])
def test_answers_and_debug_output_have_separate_limits(sandbox, code, tests):
    assert "Output Limit Exceeded" in livecodebench.verify(fenced(code), TESTS[tests], sandbox=sandbox).feedback


@pytest.mark.parametrize("response", ["I think that", f"<think>\n{fenced(RIGHT)}\nWait"])
def test_response_without_program_needs_no_sandbox(monkeypatch, response):
    """Nor does one whose thinking never ends."""
    monkeypatch.setattr(livecodebench, "_sandbox", lambda process: pytest.fail("opened a sandbox"))
    for truncated, said in ((False, WRONG_FORMAT), (True, CUT_OFF)):
        verdict = livecodebench.verify(response, DOUBLE, truncated=truncated)
        assert verdict == Verdict(0.0, said, {"pass_fraction": 0.0, "answer_format": 0.0})


@pytest.mark.parametrize("opening", ["<think>\n", ""], ids=["opened", "opened by the prompt"])
def test_programs_of_drafts_are_not_graded(opening):
    box = RecordingSandbox(ok("6"), ok("20"))
    response = f"{opening}{fenced('print(6)  # a longer draft')}\nNo.\n</think>\n{fenced('print(2)')}"
    assert livecodebench.verify(response, DOUBLE, sandbox=box).reward == 1.0
    assert {program.source for program in box.programs} == {"print(2)"}


def test_solutions_of_the_examples_pass_beside_other_rollouts(sandbox):
    examples = load_task("livecodebench:examples").build("train")
    kinds = [json.loads(answer)["testtype"] for answer in examples["answer"]]
    assert kinds.count("stdin") == kinds.count("functional") == 4
    with open(livecodebench.EXAMPLES.with_name("solutions.jsonl"), encoding="utf-8") as lines:
        solutions = {f"livecodebench-{row['question_id']}": fenced(row["program"]) for row in map(json.loads, lines)}
    wrong = (fenced("print("), "no")
    responses = [text for name in examples["id"] for text in (solutions[name], *wrong, solutions[name])]
    answers = [answer for answer in examples["answer"] for _ in range(4)]
    conversations = [[{"role": "assistant", "content": text}] for text in responses]
    verdicts = livecodebench.reward(conversations, answers, [False] * 32, sandbox=sandbox)
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 0.0, 1.0] * 8


def test_programs_of_a_timed_out_verifier_do_not_block_the_next(sandbox):
    endless, answer = fenced("while True:\n    pass"), stdin_answer(*[("1", "1")] * 5, time_limit=60)
    arguments = {"completions": [endless], "answer": [answer], "sandbox": sandbox}
    assert VerifierPolicy("skip", timeout=0.5).call("tests", livecodebench.reward, arguments) is FAILED
    [outcome] = sandbox.run([Program("print(1)")], deadline=120)
    assert outcome.stdout == "1\n"


def test_sleeping_rollouts_leave_others_their_time(sandbox):
    """Each test of three rollouts sleeps, but passes; together they sleep longer than the deadline."""
    asleep = fenced("import time\ntime.sleep(1)\nprint(2 * int(input()))")
    awake = fenced("print(2 * int(input()))")
    long, short = (stdin_answer(*[(str(n), str(2 * n)) for n in range(count)], time_limit=1) for count in (20, 3))
    with deadline_in(5.0):
        verdicts = livecodebench.reward([asleep] * 3 + [awake] * 6, [long] * 3 + [short] * 6, sandbox=sandbox)
    assert [verdict.reward for verdict in verdicts[3:]] == [1.0] * 6
    assert [verdict.reward for verdict in verdicts[:3]] == [None] * 3


class RecordingSandbox:
    """Returns given outcomes, and records the programs and options of `run`."""

    tier, workers = "recording", 1

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes, self.programs, self.options = list(outcomes), [], {}

    def run(self, programs, keep, **options) -> list[Outcome]:
        self.programs, self.options = list(programs), options
        self.kept = [keep(index, outcome) for index, outcome in enumerate(self.outcomes[: len(self.programs)])]
        return self.kept

    def close(self) -> None:
        pass


def ok(text: str) -> Outcome:
    return Outcome("ok", stdout=text)


@pytest.mark.parametrize("answer", [stdin_answer, partial(functional_answer, "f")], ids=["stdin", "functional"])
def test_expected_outputs_never_reach_the_sandbox(answer):
    secret = "314159265358979"
    box = RecordingSandbox(*[Outcome("ok", stdout="1", value="1")] * 2)
    livecodebench.verify(fenced("print(1)"), answer(("3\n2", secret), ("10\n4", secret)), sandbox=box)
    assert secret not in repr(box.programs)
    inputs = [program.stdin or json.loads(program.arguments) for program in box.programs]
    assert inputs == (["3\n2", "10\n4"] if answer is stdin_answer else [[3, 2], [10, 4]])


def test_wrong_answers_are_rejected_in_the_batch():
    box = RecordingSandbox(ok("6"), ok("21"), ok("6"), Outcome("timeout"))
    livecodebench.reward([fenced("print(6)")] * 2, [DOUBLE, json.loads(DOUBLE)], sandbox=box)
    assert [outcome.status for outcome in box.kept] == ["ok", "rejected", "ok", "timeout"]


@pytest.mark.parametrize("seconds", [500.0, None])
def test_the_deadline_of_the_reward_function_call_applies(seconds):
    box = RecordingSandbox(ok("6"), ok("20"))
    with deadline_in(seconds):
        livecodebench.verify(fenced("print(1)"), DOUBLE, sandbox=box)
    limit = livecodebench.BATCH_SECONDS if seconds is None else seconds + 1
    assert 0.9 * limit < box.options["deadline"] <= limit


@pytest.mark.parametrize(("outcomes", "reward"), TABLES["outcomes"])
def test_undecided_response_has_no_reward(outcomes, reward):
    box = RecordingSandbox(*(Outcome(**outcome) for outcome in outcomes))
    verdict = livecodebench.verify(fenced("print(1)"), DOUBLE, sandbox=box)
    assert verdict.reward == reward
    assert ("undecided" in verdict.metrics) == (reward is None)


def test_each_program_runs_once_per_test():
    box = RecordingSandbox(*[ok("6")] * 9)
    livecodebench.reward([fenced("print(6)"), "none", fenced("print(6)")], [DOUBLE] * 3, sandbox=box)
    groups = [(program.group, program.stdin) for program in box.programs]
    assert groups == [(0, "3\n"), (0, "10\n"), (2, "3\n"), (2, "10\n")]
