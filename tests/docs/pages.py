"""Code blocks of the documentation, found by Sybil, and the files that its pages name."""

import json
import re
import shlex
import shutil
from pathlib import Path

from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser

ROOT = Path(__file__).parents[2]
PATTERNS = ("*.md", "docs/*.md", "examples/**/*.md", "skills/*/SKILL.md")
PAGES = [page for pattern in PATTERNS for page in sorted(ROOT.glob(pattern))]
LANGUAGES = ("python", "bash", "yaml", "json")

FILES = Path(__file__).with_name("files")  # that the pages name
QUESTIONS = [json.loads(line) for line in (FILES / "questions.jsonl").read_text("utf-8").splitlines()]


def write_files(folder: Path) -> None:
    """Write the files that pages name into a folder."""
    shutil.copytree(FILES, folder, dirs_exist_ok=True)


def write_starter(folder: Path) -> None:
    """Write the configuration and the verifier that `trl credit-init` writes."""
    starter = ROOT / "src" / "credit_trl" / "cli" / "starter"
    for source, name in (("run.yaml", "run.yaml"), ("my_verifier.txt", "my_verifier.py")):
        (folder / name).write_text((starter / source).read_text("utf-8"), encoding="utf-8")


def blocks_of(page: Path, *languages: str) -> list[Example]:
    """Fenced blocks of a page in these languages."""
    parsers = [CodeBlockParser(language, lambda example: None) for language in languages or LANGUAGES]
    return list(Sybil(parsers=parsers, path=str(ROOT), pattern="*.md").parse(page).examples())


def commands_of(page: Path) -> list[list[str]]:
    """Words of the command lines of a page, with continuations joined, without comments and variables."""
    commands = []
    for block in blocks_of(page, "bash"):
        for line in re.sub(r"\\\n\s*", " ", block.parsed).splitlines():
            words = shlex.split(re.sub(r"^for .*; do$|^done.*|\$\w+", "1", line), comments=True)
            while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
                words.pop(0)
            if words and words != ["1"]:
                commands.append(words)
    return commands
