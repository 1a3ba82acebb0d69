"""The code blocks of the README and of `docs/`, and the command lines in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    tokens = MarkdownIt().parse(path.read_text("utf-8"))
    page = str(path.relative_to(ROOT))
    return [Block(page, t.map[0] + 1, t.info.strip(), t.content) for t in tokens if t.type == "fence"]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def of_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def commands_of(block: Block) -> list[list[str]]:
    """The command lines of a shell block as lists of words: continuations joined, comments and variables dropped."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    commands = []
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
            words.pop(0)
        if words:
            commands.append(words)
    return commands
