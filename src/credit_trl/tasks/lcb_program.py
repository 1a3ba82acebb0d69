"""The program in a response, and the import lines that LiveCodeBench runs before it.

Nothing here parses or compiles the program: hostile text can crash even Python's parser, and this code runs in the
trainer's process.
"""

import functools
import importlib
import re

_PYTHON = re.compile(r"((python|py)[\d.]*)?")  # languages of blocks that can be the program
_MARKS = re.compile(r"`{3,}")
_NAME = r"\w+(?:[.-]\w+)*[+#]*"
# After a fence at the start of a line: nothing, a language, or a language and attributes. After prose: a language.
_INFO = re.compile(rf"({_NAME})(?:[\s:{{][^`]*)?|\s+({_NAME})\s*|(?:\{{[^`]*)?\s*")
_INFO_AFTER_PROSE = re.compile(rf"({_NAME})?()\s*")

# LiveCodeBench runs `from ... import *` of these modules in this order before each program, so that later names win,
# and then `import` of all but the last two.
_STARRED = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
# It also sets these two limits. Older interpreters have no limit of digits.
_ALWAYS = (
    "import sys\nsys.setrecursionlimit(50000)\ngetattr(sys, 'set_int_max_str_digits', lambda digits: None)(50000)\n"
)


def find_program(response: str) -> str | None:
    """Code of the longest fenced block of Python, else of the longest one without a language, or `None`.

    Of equally long blocks it is the last. A block without a language, which may be a sample's output, can be longer.

    A fence is three or more back-quotes. It opens a block at the start of a line or after prose, with or without a
    language. A line that starts with as many back-quotes closes the block, also if prose follows them, and so do
    back-quotes directly after the last line of code. A block that is never closed does not count: the response was cut
    off inside it, or another Python block was begun.
    """
    blocks = [block for block in _fenced_blocks(response) if _PYTHON.fullmatch(block[0]) and block[1].strip()]
    _, program = max(reversed(blocks), key=lambda block: (block[0] != "", len(block[1])), default=("", None))
    return program


def _fenced_blocks(response: str) -> list[tuple[str, str]]:
    """Language (lower case) and code of each closed block, in order."""
    blocks: list[tuple[str, str]] = []
    fence = None
    code: list[str] = []
    for line in response.replace("\r\n", "\n").split("\n"):
        if fence is None:
            fence = _opening(line)
            code = []
            continue
        marks, language, column = fence
        if line.lstrip().startswith(marks):
            following = _opening(line)
            is_named = following is not None and following[1] != ""
            is_python = is_named and _PYTHON.fullmatch(following[1])
            if not is_python:  # a fence of Python abandons the open block
                blocks.append((language, _unindented(code, column)))
                is_named = is_named and line.rstrip().lower().endswith(following[0] + following[1])  # else prose
            fence = following if is_named else None
            code = []
        elif line.rstrip().endswith(marks):
            blocks.append((language, _unindented([*code, line.rstrip().rstrip("`")], column)))
            fence = None
        else:
            code.append(line)
    return blocks


def _opening(line: str) -> tuple[str, str, int] | None:
    """Back-quotes, language and column of the fence with which a line opens a block, if any."""
    runs = list(_MARKS.finditer(line))
    if len(runs) % 2 == 0:  # pairs of fences in a line are code inside prose
        return None
    run = runs[-1]
    form = _INFO_AFTER_PROSE if line[: run.start()].strip() else _INFO
    info = form.fullmatch(line, run.end())
    return info and (run[0], (info[1] or info[2] or "").lower(), run.start())


def _unindented(code: list[str], column: int) -> str:
    """Code of an indented block (in a list) without the fence's indentation, or that of its first line if smaller."""
    first_line = next((line for line in code if line.strip()), "")
    indent = min(column, len(first_line) - len(first_line.lstrip()))
    return "\n".join(line[min(indent, len(line) - len(line.lstrip())) :] for line in code)


def prelude_for(source: str) -> str:
    """The import lines of LiveCodeBench's checker that a program can need.

    All imports together take several times as long as an interpreter takes to start. A program cannot use a name that
    does not occur in its text, except with `exec` and the like, which get all imports.
    """
    words = set(re.findall(r"[^\W\d]\w*", source))
    gets_all = bool(words & {"exec", "eval", "globals", "locals", "vars"})
    modules = [module for module in _STARRED if gets_all or words & _public_names(module)]
    lines = [f"from {module} import *\n" for module in modules]
    lines += [f"import {module}\n" for module in modules if module not in ("builtins", "typing")]
    return _ALWAYS + "".join(lines)


@functools.cache
def _public_names(module: str) -> set[str]:
    """The name of a module and the names that a starred import of it binds."""
    imported = importlib.import_module(module)
    public = getattr(imported, "__all__", None) or [name for name in dir(imported) if not name.startswith("_")]
    return {module, *public}
