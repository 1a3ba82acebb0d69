"""Code blocks of the documentation and their command lines.

The documentation consists of the Markdown files at the root, in `docs/` and in `examples/`, the Markdown cells of the
notebooks, and the indented usage lines in the module docstrings of `examples/*.py`.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
INDENTED = "indented"  # the language of a block without a fence


@dataclass(frozen=True)
class Block:
    """One code block with its page, line and language."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command line of a shell block: its words and its environment variables."""

    block: Block
    number: int
    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.block}-{self.number}"

    @property
    def program(self) -> str:
        return self.words[0]

    @property
    def text(self) -> str:
        """The command line, quoted for a shell."""
        return " ".join(
            [*(f"{name}={shlex.quote(value)}" for name, value in self.environment), shlex.join(self.words)]
        )


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """Fenced and indented blocks of a Markdown page."""
    for token in MarkdownIt().parse(text):
        if token.type in ("fence", "code_block"):
            language = token.info.strip() if token.type == "fence" else INDENTED
            yield Block(page, token.map[0] + 1, language, token.content)


def _blocks() -> Iterator[Block]:
    for path in PAGES:
        yield from blocks_of(path.read_text("utf-8"), str(path.relative_to(ROOT)))
    for path in NOTEBOOKS:
        for number, cell in enumerate(json.loads(path.read_text("utf-8"))["cells"]):
            if cell["cell_type"] == "markdown":
                yield from blocks_of("".join(cell["source"]), f"{path.relative_to(ROOT)}[{number}]")
    for path in SCRIPTS:
        usage = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        for block in blocks_of(usage, str(path.relative_to(ROOT))):
            yield Block(block.page, block.line, "bash", block.text)


BLOCKS = list(_blocks())


def of_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def commands_of(block: Block) -> list[Command]:
    """Command lines of a shell block, with continuations joined and without comments."""
    commands = []
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        words, environment = shlex.split(line, comments=True), []
        while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0], re.DOTALL):
            environment.append(tuple(words.pop(0).split("=", 1)))
        if words:
            commands.append(Command(block, len(commands), tuple(words), tuple(environment)))
    return commands


COMMANDS = [command for block in of_language("bash") for command in commands_of(block)]


def calling(*programs: str) -> list[Command]:
    return [command for command in COMMANDS if command.program in programs]


# Blocks with `pip`: each runs as a whole in a new environment.
INSTALLING = list(dict.fromkeys(command.block for command in calling("pip")))
