"""Help of `trl credit` in layers: the options people set (`help.txt`), those of a topic, and all."""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import fields
from itertools import chain
from operator import attrgetter
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
        indented = textwrap.indent("\n".join(rows), " " * 25)
        text = text.format(**defaults, recipes=indented)
        names = re.compile(r"^( *--[\w-]+|\w+$)", re.MULTILINE)
        print(names.sub(lambda match: bold(match[0]), text.rstrip()))
        return
    lines = []
    for section, actions in _named(parser, topic.lower()).items():
        lines += ["", bold(section), *chain.from_iterable(map(_rows, actions))]
    if not lines:
        raise ValueError(f"--help {topic}: no option has this word. All options: trl credit --help-all")
    print("\n".join(lines[1:]))


def _named(parser: TrlParser, word: str) -> dict[str, list[argparse.Action]]:
    """Title -> options that have the word in name or description, or all for `"all"`."""
    from credit_trl.config import CreditConfig

    script, config, model, mixture = parser.dataclass_types
    titles = {
        "data, verifier and evaluation": (*fields(script), *fields(mixture)),
        "model": fields(model),
        "training, of TRL and transformers": fields(config),
    }
    section_of: dict[str, str] = {}
    for title, options in titles.items():
        section_of |= dict.fromkeys(map(attrgetter("name"), options), title)
    section_of |= dict.fromkeys(CreditConfig.__annotations__, "credit, teacher and feedback")
    sections: dict[str, list[argparse.Action]] = {}
    for action in sorted(parser._actions, key=lambda action: section_of.get(action.dest, "")):
        if action.dest in section_of and (word == "all" or word in f"{action.dest} {action.help}".lower()):
            sections.setdefault(section_of[action.dest], []).append(action)
    return sections


def _rows(action: argparse.Action) -> list[str]:
    """An option's name, its wrapped description, and its values and default."""
    default = (
        "" if action.default in (None, argparse.SUPPRESS) else f" (default {action.default})".replace("\n", "\\n")
    )
    values = "|".join(map(str, action.choices)) if action.choices else getattr(action.type, "__name__", "")
    rows = [f"  {bold(f'--{action.dest}')}"]
    for text in (" ".join((action.help or "").split()), f"{values}{default}".strip()):
        for row in textwrap.wrap(text, WIDTH - 6, break_on_hyphens=False):
            rows.append(f"      {row}")
    return rows


def bold(text: str) -> str:
    """The text in bold where the output is a terminal that has it; `NO_COLOR` switches it off."""
    has_styles = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return f"\x1b[1;36m{text}\x1b[0m" if has_styles else text
