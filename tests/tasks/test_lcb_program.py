from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from credit_trl.tasks.lcb_program import find_program, prelude_for

BLOCKS = {  # reason: (response, code)
    "tagged": ("so\n```python\nprint(1)\n```\ndone", "print(1)"),
    "untagged": ("```\nprint(1)\n```", "print(1)"),
    "tag with attributes": ('```python title="a.py"\nprint(1)\n```', "print(1)"),
    "tag after a blank": ("``` python\nprint(1)\n```", "print(1)"),
    "another language": ("```cpp\nint main(){}\n```", None),
    "another language, longer, beside Python": (
        "```text\n" + "x" * 99 + "\n```\n```python\nprint(1)\n```",
        "print(1)",
    ),
    "the longest of two": ("```python\nprint(1)\n```\n```python\nprint(12)\n```\n", "print(12)"),
    "the last of two as long": ("```python\nprint(1)\n```\n```python\nprint(2)\n```\n", "print(2)"),
    "a longer sample beside Python": ("```python\nprint(1)\n```\nIt prints:\n```\n1 2 3 4 5 6\n```\n", "print(1)"),
    "a longer sample before Python": ("The input is\n```\n1 2 3 4 5 6\n```\n```py\nprint(1)\n```\n", "print(1)"),
    "no block": ("print(1)", None),
    "an empty block": ("```python\n```", None),
    "never closed": ("```python\nprint(1)\n", None),
    "the last never closed": ("```python\nprint(1)\n```\n```python\nprint(12345)", "print(1)"),
    "begun twice": ("```python\nprint(\n```python\nprint(2)\n```", "print(2)"),
    "closed behind the code": ("```python\nprint(1)```", "print(1)"),
    "CRLF": ("```python\r\nprint(1)\r\nprint(2)\r\n```\r\n", "print(1)\nprint(2)"),
    "four back-quotes hold three": ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
    "indented in a list": ("1. so:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y"),
    "indented less inside": ("   ```python\n if x:\n   y\n```", "if x:\n  y"),
    "indented in a list, the first line a blank one": ("- \n  ```python\n\n  a\n  b\n  ```", "\na\nb"),
    "in tags": ("<answer>\n```python\nprint(1)\n```</answer>", "print(1)"),
    "opened behind a tag": ("<answer>```python\nprint(1)\n```\n</answer>", "print(1)"),
    "opened behind prose": ("Here is the solution: ```python\nif x:\n    y\n```\n", "if x:\n    y"),
    "opened behind prose, sample behind it": (
        "Here is the solution: ```python\nprint(12)\n```\nIt runs in O(1). For the sample:\n```\n3\n```",
        "print(12)",
    ),
    "opened behind code in prose": ("use ```x``` so: ```python\nprint(1)\n```", "print(1)"),
    "opened behind a list's number": ("1. ```python\n   if x:\n       y\n   ```", "if x:\n    y"),
    "opened behind a list's number, code not indented": ("1. ```python\nif x:\n    y\n```", "if x:\n    y"),
    "closed before prose": ("```python\nprint(1)\n``` This is O(1).", "print(1)"),
    "closed before prose, another behind it": (
        "```python\nprint(1)\n``` First.\nThen:\n```python\nprint(12)\n```",
        "print(12)",
    ),
    "closed by the next block": ("```python\nprint(1)\n```output\n1\n```\nIt prints 1.\n```\n1\n```", "print(1)"),
    "prose behind a fence that opens nothing": ("``` So be it.\n```\nprint(1)\n```", "print(1)"),
    "its wording repeated first": ("a block that starts with ```python.\n```python\nprint(1)\n```", "print(1)"),
    "four back-quotes hold a tagged three": (
        "````python\ns = '''\n```text\n```\n'''\n````",
        "s = '''\n```text\n```\n'''",
    ),
    "tildes": ("~~~python\nprint(1)\n~~~", None),
    "back-quotes in the code": ("```python\nprint('`')\n```", "print('`')"),
    "a form feed is no line": ("```python\na\x0cb\n```", "a\x0cb"),
    "a thousand blocks": ("```python\nx\n```\n" * 1000 + "```python\nlonger\n```", "longer"),
    "a hundred thousand fences": ("```\n" * 100_000, None),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("response", "code"), BLOCKS.values(), ids=BLOCKS)
def test_find_program_takes_longest_python_block(response, code):
    assert find_program(response) == code


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_prelude_has_names_that_the_benchmark_imports():
    source = """
        def f(xs: List[int], memo: Optional[Dict] = None) -> int:
            return sum(accumulate(xs))
        heap = []
        heappush(heap, (inf, deque([1])))
        print(f([1, 2]), Counter("aab"), gcd(4, 6), math.gcd(4, 6), bisect_left([1, 3], 2), defaultdict(int)[0])
        print(reduce(operator.add, [1, 2]), lru_cache(None)(abs)(-1), ascii_lowercase[:3], datetime.date(2025, 2, 1))
        print(pow(2, 3, 5), sys.getrecursionlimit(), mean([1, 3]), loads("[1]"), json.dumps([1]), deepcopy([1]))
        exit()
    """
    lines = bare(textwrap.dedent(source)).split("\n")
    assert lines[0] == "4 Counter({'a': 2, 'b': 1}) 2 2 1 0"
    assert lines[1] == "3 1 abc 2025-02-01"
    assert lines[2] == "3 50000 2 [1] [1] [1]"


def test_program_definitions_override_the_prelude():
    assert bare("def gcd(a, b):\n    return 'mine'\nsqrt = 3\nprint(gcd(1, 2), sqrt)") == "mine 3\n"


@given(source=st.text())
def test_prelude_compiles_for_any_source(source):
    compile(prelude_for(source), "prelude", "exec")
