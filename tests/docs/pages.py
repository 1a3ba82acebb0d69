"""Code blocks of the documentation, found by Sybil, and the files that its pages name."""

import json
import re
import shlex
from pathlib import Path

from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("examples/**/*.md"))]
LANGUAGES = ("python", "bash", "yaml", "json")

QUESTIONS = [{"prompt": [{"role": "user", "content": f"What is {n} + 1?"}], "answer": str(n + 1)} for n in range(8)]
SCIENCE = [
    {
        "question": f"Which is larger than {n}?",
        "choices": {"text": [str(n + 1), str(n), str(n - 1), str(n - 2)], "label": ["A", "B", "C", "D"]},
        "answerKey": "A",
        "type": "mcq-4-choices",
        "domain": domain,
        "details": {"level": "L3"},
    }
    for domain in ("Physics", "Chemistry")
    for n in range(20)
]
CAPITALS = [{"prompt": [{"role": "user", "content": f"Capital {n}?"}], "answer": "Paris"} for n in range(8)]
FILES = {
    "questions.jsonl": QUESTIONS,
    "conversations.jsonl": [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row["answer"]}]} for row in QUESTIONS
    ],
    "capitals.jsonl": CAPITALS,
    "data/physics.jsonl": SCIENCE,
    "data/chemistry.jsonl": SCIENCE,
}


def write_files(folder: Path) -> None:
    """Write the files that pages name into a folder."""
    for name, rows in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


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
    found = []
    for block in blocks_of(page, "bash"):
        for line in re.sub(r"\\\n\s*", " ", block.parsed).splitlines():
            words = shlex.split(re.sub(r"^for .*; do$|^done.*|\$\w+", "1", line), comments=True)
            while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
                words.pop(0)
            if words and words != ["1"]:
                found.append(words)
    return found
