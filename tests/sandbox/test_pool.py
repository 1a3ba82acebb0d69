"""Local sandboxes: input, output, return values, errors and limits of programs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from observing import run_one

from credit_trl.sandbox import Limits, Outcome, Program

MIB = 1024 * 1024


def test_outcomes_keep_program_order(any_sandbox) -> None:
    programs = [Program(f"import time; time.sleep({(7 * n) % 5 / 100}); print({n})") for n in range(12)]
    assert [outcome.stdout for outcome in any_sandbox.run(programs)] == [f"{n}\n" for n in range(12)]


def test_keep_replaces_each_outcome(any_sandbox) -> None:
    lengths: dict[int, int] = {}

    def keep(index: int, outcome: Outcome) -> Outcome:
        lengths[index] = len(outcome.stdout)
        return replace(outcome, stdout="")

    outcomes = any_sandbox.run([Program(f"print('x' * {n})") for n in range(5)], keep=keep)
    assert lengths == {n: n + 1 for n in range(5)}
    assert [(outcome.status, outcome.stdout) for outcome in outcomes] == [("ok", "")] * 5


def test_error_in_keep_propagates(any_sandbox) -> None:
    with pytest.raises(ZeroDivisionError):
        any_sandbox.run([Program("print(1)")] * 3, keep=lambda index, outcome: 1 // 0)
    assert run_one(any_sandbox, "print(2)").stdout == "2\n"


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_stdin_round_trips_any_text(sandbox, text: str) -> None:
    echo = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
    assert run_one(sandbox, echo, stdin=text).stdout == text


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=12,
    )
)
def test_call_round_trips_any_json_value(sandbox, value: object) -> None:
    outcome = run_one(sandbox, "def same(x): return x", fn_name="same", arguments=json.dumps([value]))
    assert outcome.status == "ok"
    assert json.loads(outcome.value) == value


def test_lone_surrogates_and_invalid_utf8(sandbox) -> None:
    assert run_one(sandbox, "print(ascii(input()))", stdin="\ud800").status == "ok"
    assert run_one(sandbox, "'\ud800'").status == "runtime_error"
    assert run_one(sandbox, r"import sys; sys.stdout.buffer.write(b'\xff\n')").stdout == "\ufffd\n"


def test_large_input_and_output(sandbox) -> None:
    text = "0123456789abcde\n" * (3 * MIB // 16)
    assert run_one(sandbox, "import sys; sys.stdout.write(sys.stdin.read())", stdin=text).stdout == text


def test_ways_to_read_stdin(sandbox) -> None:
    for source in (
        "print(input())",
        "import sys; print(sys.stdin.readline().strip())",
        "print(open(0).read().strip())",
        "print(open('/dev/stdin').read().strip())",
        "import os; print(os.read(0, 100).decode().strip())",
        "import sys\nfor line in sys.stdin: print(line.strip())",
    ):
        outcome = run_one(sandbox, source, stdin="42\n")
        assert (outcome.status, outcome.stdout) == ("ok", "42\n"), source


def test_solution_method_precedes_function(any_sandbox) -> None:
    both = "def f(): return 'function'\nclass Solution:\n    def f(self): return 'method'"
    other = "def f(): return 'function'\nclass Solution:\n    def g(self): return 'method'"
    assert run_one(any_sandbox, both, fn_name="f").value == '"method"'
    assert run_one(any_sandbox, other, fn_name="f").value == '"function"'
    missing = run_one(any_sandbox, "x = 1", fn_name="f")
    assert (missing.status, missing.error) == ("runtime_error", "NameError: the program defines no function 'f'")


@pytest.mark.parametrize("word", ["exit()", "quit()", "raise SystemExit", "import sys; sys.exit(0)"])
def test_script_may_exit_explicitly(any_sandbox, word: str) -> None:
    outcome = run_one(any_sandbox, f"print(1)\n{word}\nprint(2)")
    assert (outcome.status, outcome.stdout) == ("ok", "1\n")


def test_main_block_runs_in_scripts_only(sandbox) -> None:
    source = "def f(): return __name__\nif __name__ == '__main__':\n    print('main')"
    assert run_one(sandbox, source).stdout == "main\n"
    assert run_one(sandbox, source, fn_name="f").stdout == ""


def test_traceback_is_short_without_paths(sandbox) -> None:
    source = """\
    import json
    def inner(text):
        return json.loads(text)
    inner("{")
    """
    error = run_one(sandbox, source, prelude="a = 1\n" * 50).error
    assert 'File "program.py", line 3, in inner' in error
    assert "JSONDecodeError" in error.splitlines()[-1]
    assert "/" not in error
    deep = run_one(sandbox, "def f(n): return f(n + 1)\nf(0)").error
    assert len(deep.splitlines()) < 25


def test_abnormal_exit_reports_stderr_or_signal(sandbox) -> None:
    ended = run_one(sandbox, "import os, sys\nprint('why', file=sys.stderr, flush=True)\nos._exit(3)")
    assert (ended.status, ended.exit_code, ended.error) == ("runtime_error", 3, "why\nexited with status 3")
    killed = run_one(sandbox, "import os\nos.kill(os.getpid(), 11)")
    assert (killed.exit_code, killed.error) == (-11, "killed by signal SIGSEGV")


def test_each_limit_has_its_status(sandbox) -> None:
    cases = {
        "timeout": ("import time; time.sleep(9)", Limits(wall_seconds=0.3)),
        "memory": ("x = bytearray(300 * 1024 * 1024)", Limits(memory_bytes=192 * MIB)),
        "output_limit": ("while True: print('x' * 1000)", Limits(output_bytes=100_000)),
        "runtime_error": ("open('/tmp/x', 'wb').write(bytes(1 << 20))", Limits(file_bytes=1 << 16)),
    }
    for status, (source, limits) in cases.items():
        outcome = run_one(sandbox, source, limits=limits)
        assert outcome.status == status, outcome
    assert len(run_one(sandbox, "while True: print('x' * 999)", limits=Limits(output_bytes=5000)).stdout) == 5000
    within = run_one(sandbox, "print('x' * 4999)", limits=Limits(output_bytes=5000))
    assert (within.status, len(within.stdout)) == ("ok", 5000)
    one_more = run_one(sandbox, "print('x' * 5000)", limits=Limits(output_bytes=5000))
    assert (one_more.status, len(one_more.stdout)) == ("output_limit", 5000)


def test_answer_bytes_limits_the_answer_only(any_sandbox) -> None:
    limits = Limits(output_bytes=50_000, answer_bytes=5_000)
    aside = run_one(any_sandbox, "import sys\nprint('x' * 40_000, file=sys.stderr)\nprint(1)", limits=limits)
    assert (aside.status, aside.stdout) == ("ok", "1\n")
    call = {"fn_name": "f", "limits": limits}
    noisy = run_one(any_sandbox, "def f():\n    print('x' * 40_000)\n    return 1", **call)
    assert (noisy.status, noisy.value, len(noisy.stdout)) == ("ok", "1", 5_000)
    assert run_one(any_sandbox, "print('x' * 6_000)", limits=limits).error == "more than 5000 bytes of output"
    assert run_one(any_sandbox, "def f():\n    return 'x' * 10_000", **call).error == "more than 5000 bytes of output"
    flood = run_one(any_sandbox, "def f():\n    print('x' * 60_000)\n    return 1", **call)
    assert (flood.status, flood.error) == ("output_limit", "more than 50000 bytes of output")


def test_smallest_limits_run_a_program(sandbox) -> None:
    limits = Limits(cpu_seconds=1, memory_bytes=64 * MIB, processes=1, open_files=16, file_bytes=4096)
    assert run_one(sandbox, "import json; print(json.dumps([1]))", limits=limits).stdout == "[1]\n"
