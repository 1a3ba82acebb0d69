"""From a response to a program that can be run: the code block it means, and the names it may take for granted.

Nothing here parses or compiles what the model wrote: even Python's parser can be brought down by hostile text, and
this runs in the trainer's process.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import re
from dataclasses import dataclass

LANGUAGE = re.compile(r"((python|py)[\d.]*)?")
_MARKS = re.compile(r"`{3,}")
_NAME = r"\w+(?:[.-]\w+)*[+#]*"
# Behind a fence at the start of a line: nothing, a language, or a language and attributes.
_INFO = re.compile(rf"({_NAME})(?:[\s:{{][^`]*)?|\s+({_NAME})\s*|(?:\{{[^`]*)?\s*")
_INFO_BEHIND_PROSE = re.compile(rf"({_NAME})?\s*")

# LiveCodeBench runs every program after `from ... import *` of these modules, in this order, and then `import` of all
# but the last two; later names win.
_STARRED = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
_SITE_NAMES = {"exit", "quit", "copyright", "credits", "license", "help"}  # no builtins where `site` is not loaded
# And under these two limits; an older interpreter has no limit of digits.
_ALWAYS = (
    "import sys\nsys.setrecursionlimit(50000)\ngetattr(sys, 'set_int_max_str_digits', lambda digits: None)(50000)\n"
)


def find_program(response: str) -> str | None:
    """The code of the longest fenced block that is Python or says no language, the last of equals; or `None`.

    A fence is three back-quotes or more. It opens a block at the start of a line, or at the end of a line of prose,
    with a language or none behind it. A line that begins with as many closes it, whatever prose follows them;
    back-quotes right behind the last line of code close it too. A block that is never closed is none: the response was
    cut off inside it, or another Python block was begun.
    """
    blocks = [code for language, code in _fenced_blocks(response) if LANGUAGE.fullmatch(language) and code.strip()]
    return max(reversed(blocks), key=len, default=None)


@dataclass(frozen=True)
class _Fence:
    """What opens a block: its back-quotes, the language behind them in lower case, and its place in the line."""

    marks: str
    language: str
    column: int


def _fenced_blocks(response: str) -> list[tuple[str, str]]:
    """Each closed block's language (lower case) and code, in order."""
    blocks: list[tuple[str, str]] = []
    fence: _Fence | None = None
    code: list[str] = []
    for line in response.replace("\r\n", "\n").split("\n"):
        if fence is None:
            fence, code = _opening(line), []
        elif line.lstrip().startswith(fence.marks):
            closes, following = _closing(line)
            if closes:
                blocks.append((fence.language, _unindented(code, fence.column)))
            fence, code = following, []
        elif line.rstrip().endswith(fence.marks):
            blocks.append((fence.language, _unindented([*code, line.rstrip().rstrip("`")], fence.column)))
            fence = None
        else:
            code.append(line)
    return blocks


def _opening(line: str) -> _Fence | None:
    """The fence with which a line opens a block, if it does; pairs of fences in a line are code inside prose."""
    runs = list(_MARKS.finditer(line))
    if len(runs) % 2 == 0:
        return None
    last = runs[-1]
    form = _INFO_BEHIND_PROSE if line[: last.start()].strip() else _INFO
    info = form.fullmatch(line, last.end())
    return info and _Fence(last[0], next(filter(None, info.groups()), "").lower(), last.start())


def _closing(line: str) -> tuple[bool, _Fence | None]:
    """Of a line that begins with the fence of an open block: whether it closes that block, and what it opens.

    Another Python block means that the open one was given up; one of another language follows upon it. What else
    stands there is prose.
    """
    opening = _opening(line)
    if opening is None or not opening.language:
        return True, None
    if LANGUAGE.fullmatch(opening.language):
        return False, opening
    is_prose = not line.rstrip().lower().endswith(opening.marks + opening.language)
    return True, None if is_prose else opening


def _unindented(code: list[str], column: int) -> str:
    """The code of a block whose fence is indented (in a list), without that indentation as far as its first line has
    it.
    """
    first = next((line for line in code if line.strip()), "")
    indent = min(column, len(first) - len(first.lstrip()))
    return "\n".join(line[min(indent, len(line) - len(line.lstrip())) :] for line in code)


def prelude_for(source: str) -> str:
    """Import lines for what LiveCodeBench's checker imports before a program, as far as the program can need it.

    Importing all of it costs several times the start of an interpreter; a name that does not occur in the text
    cannot be used by it, except through `exec` and its like, which get everything.
    """
    words = set(re.findall(r"[^\W\d]\w*", source))
    names = _prelude_names()
    wanted = names.keys() if words & {"exec", "eval", "globals", "locals", "vars"} else words & names.keys()
    modules = [module for module in _STARRED if module in wanted]
    members = {module: sorted(name for name in wanted if names[name] == module != name) for module in _STARRED}
    lines = [
        # the sandbox may run another version of Python, whose modules hold other names
        f"try:\n    from {module} import {', '.join(found)}\nexcept ImportError:\n    from {module} import *"
        for module, found in members.items()
        if found
    ]
    lines += [f"import {module}" for module in modules]
    return _ALWAYS + "".join(f"{line}\n" for line in lines)


@functools.cache
def _prelude_names() -> dict[str, str]:
    """Where each name comes from after all those imports; a module's own name maps to itself."""
    origin: dict[str, str] = {}
    for module in _STARRED:
        found = importlib.import_module(module)
        public = getattr(found, "__all__", None) or [name for name in dir(found) if not name.startswith("_")]
        if module == "builtins":
            own = set(dir(builtins)) - _SITE_NAMES
            origin = {name: source for name, source in origin.items() if name not in own}
        else:
            origin |= dict.fromkeys(public, module)
    return origin | {module: module for module in _STARRED if module not in ("builtins", "typing")}
