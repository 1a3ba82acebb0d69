"""Help of `trl credit` in layers: the options people set (`help.txt`), those of a topic, and all."""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from trl import TrlParser

WIDTH = 80


def print_help(parser: TrlParser, topic: str | None, recipes: Iterable[str]) -> None:
    """Print the short help, the options of a topic, or all options for the topic `"all"`.

    Raises:
        ValueError: no option has the word of the topic.
    """
    if topic is None:
        text = Path(__file__).with_name("help.txt").read_text(encoding="utf-8")
        rows = textwrap.wrap(", ".join(recipes), WIDTH - 25, break_on_hyphens=False)
        defaults = {action.dest: action.default for action in parser._actions}
        text = text.format(**defaults, recipes=textwrap.indent("\n".join(rows), " " * 25))
        print(re.sub(r"(?m)^( *--[\w-]+|\w+$)", lambda match: bold(match[0]), text.rstrip()))
        return
    lines = []
    for section, actions in _named(parser, topic.lower()).items():
        lines += ["", bold(section), *(row for action in actions for row in _rows(action))]
    if not lines:
        raise ValueError(f"--help {topic}: no option has this word. All options: trl credit --help-all")
    print("\n".join(lines[1:]))


def _named(parser: TrlParser, word: str) -> dict[str, list[argparse.Action]]:
    """Title -> options that have the word in name or description, or all for `"all"`."""
    from credit_trl.config import CreditConfig

    script, config, model, mixture = parser.dataclass_types
    credit_names = set(CreditConfig.__annotations__)
    classes = {
        "data, verifier and evaluation": {field.name for action in (script, mixture) for field in fields(action)},
        "model": {field.name for field in fields(model)},
        "credit, teacher and feedback": credit_names,
        "training, of TRL and transformers": {field.name for field in fields(config)} - credit_names,
    }
    matching = [
        action for action in parser._actions if word == "all" or word in f"{action.dest} {action.help}".lower()
    ]
    titled = {title: [action for action in matching if action.dest in names] for title, names in classes.items()}
    return {title: actions for title, actions in titled.items() if actions}


def _rows(action: argparse.Action) -> list[str]:
    """An option's name, its wrapped description, and its values and default."""
    default = (
        "" if action.default in (None, argparse.SUPPRESS) else f" (default {action.default})".replace("\n", "\\n")
    )
    values = "|".join(map(str, action.choices)) if action.choices else getattr(action.type, "__name__", "")
    texts = (" ".join((action.help or "").split()), f"{values}{default}".strip())
    wrapped = (textwrap.wrap(text, WIDTH - 6, break_on_hyphens=False) for text in texts)
    return [f"  {bold(f'--{action.dest}')}", *(f"      {row}" for rows in wrapped for row in rows)]


def bold(text: str) -> str:
    """The text in bold where the output is a terminal that has it; `NO_COLOR` switches it off."""
    has_styles = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return f"\x1b[1;36m{text}\x1b[0m" if has_styles else text
