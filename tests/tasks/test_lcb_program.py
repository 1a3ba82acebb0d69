import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.rollout.thinking import split_thinking
from credit_trl.tasks.lcb_program import find_program, prelude_for
from tables import rows_of

THOUSAND = "```python\nx\n```\n" * 1000 + "```python\nlonger\n```"
BLOCKS = [
    *rows_of(__file__, "blocks"),
    {"case": "a thousand blocks", "response": THOUSAND, "code": "longer"},
    {"case": "a hundred thousand fences", "response": "```\n" * 100_000, "code": None},
]


@pytest.mark.parametrize("row", BLOCKS, ids=lambda row: row["case"])
def test_find_program_takes_longest_python_block(row):
    assert find_program(row["response"]) == row["code"]


CODE = st.lists(st.text(alphabet="ab =()'\t", max_size=6), min_size=1, max_size=4).map("\n".join).filter(str.strip)
LEADS = ["\n", "Here it is: ", "<answer>", "<answer>\n", "1. ", "- "]
TAILS = ["\n", " This is O(1).\n", "</answer>\n", " .\n", "\nFor the sample:\n"]


@given(
    blocks=st.lists(st.tuples(st.sampled_from(LEADS), CODE, st.sampled_from(TAILS)), min_size=1, max_size=4),
    tag=st.sampled_from(["", "python", "py"]),
)
def test_find_program_matches_reference_regex_in_prose(blocks, tag):
    response = "".join(f"{lead}```{tag}\nx{code}\n```{tail}" for lead, code, tail in blocks)
    of_field = [code.removesuffix("\n") for _, code in re.findall(r"```(\w*)\n(.*?)```", response, re.DOTALL)]
    longest = max(map(len, of_field))
    assert find_program(response) == [code for code in of_field if len(code) == longest][-1]


def bare(source: str) -> str:
    """What a program prints after its prelude, in an interpreter without `site`."""
    command = [sys.executable, "-I", "-S", "-c", prelude_for(source) + source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_prelude_has_names_that_the_benchmark_imports():
    source = (Path(__file__).parent / "cases" / "imports.txt").read_text()
    lines = bare(source).split("\n")
    assert lines[0] == "4 Counter({'a': 2, 'b': 1}) 2 2 1 0"
    assert lines[1] == "3 1 abc 2025-02-01"
    assert lines[2] == "3 50000 2 [1] [1] [1]"


def test_program_definitions_override_the_prelude():
    assert bare("def gcd(a, b):\n    return 'mine'\nsqrt = 3\nprint(gcd(1, 2), sqrt)") == "mine 3\n"


@given(source=st.text())
def test_prelude_compiles_for_any_source(source):
    compile(prelude_for(source), "prelude", "exec")


@pytest.mark.parametrize("code", ["'<think>x</think>'", "re.sub(r'a<think>.*</think>', '', x)", '"""\n<think>\n"""'])
def test_tags_in_the_code_of_a_program_are_kept(code):
    program = f"s = {code}\nprint(s)"
    assert find_program(split_thinking(f"<think>draft</think>\n```python\n{program}\n```")[1]) == program
