"""Help of `trl credit` in layers: the options people set, those of a topic, and all."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trl import TrlParser

WIDTH = 80

# Section -> its options: name and a description of at most one row.
SECTIONS = {
    "data": {
        "task": "dataset and verifier: quickstart, sciknoweval:physics, my.module:Task",
        "dataset_path": "or your own rows with a column `prompt`: JSONL, CSV, Parquet",
        "reward_funcs": "and what grades the answers: my_module.my_reward",
    },
    "model": {"model_name_or_path": "hub name or folder, or `quickstart` for the shipped one"},
    "credit": {
        "contrastive_coef": "λ: weight of the input-generic baseline; 0 is SDPO",
        "distillation_topk": "K_v: tokens of the teacher that carry the loss",
    },
    "teacher": {"teacher_model_kind": "average of the policy (ema), live, base, or another model"},
    "run": {
        "output_dir": "folder of log, checkpoints, report and final model",
        "learning_rate": "peak of the schedule",
        "max_completion_length": "tokens of a rollout",
    },
}

USAGE = """\
usage: trl credit --config FILE.yaml [--option value ...]
       trl credit --recipe NAME      [--option value ...]
       trl credit --task NAME --model_name_or_path NAME [--option value ...]

Trains a language model with CREDIT: rewards and feedback of a verifier, and
credit for each token from a teacher that reads the feedback. Options stand on
the line or in the YAML file; those of `accelerate launch` may stand beside
them. A first folder to edit is written by `trl credit-init`.
"""

MORE = """\
more
  --help contrastive     options whose name or description has the word
                         (contrastive, distillation, teacher, template, vllm,
                         eval, dataset, save, lora, ...)
  --help-all             all options
  --config FILE          YAML file of options; repeat to override earlier ones
  --recipe NAME          a YAML file of the package:"""


def print_help(parser: TrlParser, topic: str | None, recipes: Iterable[str]) -> None:
    """Print the short help, the options of a topic, or all options for the topic `"all"`.

    Raises:
        ValueError: no option has the word of the topic.
    """
    actions = {action.dest: action for action in parser._actions}
    lines = USAGE.splitlines() if topic is None else []
    for section, options in (SECTIONS if topic is None else _named(parser, topic.lower())).items():
        lines += ["", bold(section)]
        for name, text in options.items():
            lines += _row(actions[name], text, is_short=topic is None)
    if topic is None:
        names = textwrap.wrap(", ".join(recipes), WIDTH - 25, break_on_hyphens=False)
        lines += ["", *MORE.splitlines(), *(f"{'':25}{row}" for row in names)]
    elif not lines:
        raise ValueError(f"--help {topic}: no option has this word. All options: trl credit --help-all")
    print("\n".join(lines).lstrip("\n"))


def _named(parser: TrlParser, word: str) -> dict[str, dict[str, str]]:
    """Title -> name and description of the options that have the word, or of all for `"all"`."""
    from credit_trl.config import CreditConfig

    script, config, model, mixture = parser.dataclass_types
    own = set(CreditConfig.__annotations__)
    classes = {
        "data, verifier and evaluation": {field.name for one in (script, mixture) for field in fields(one)},
        "model": {field.name for field in fields(model)},
        "credit, teacher and feedback": own,
        "training, of TRL and transformers": {field.name for field in fields(config)} - own,
    }
    texts = {action.dest: " ".join((action.help or "").split()) for action in parser._actions}
    found = [name for name, text in texts.items() if word == "all" or word in f"{name} {text}".lower()]
    titled = {title: {name: texts[name] for name in found if name in names} for title, names in classes.items()}
    return {title: options for title, options in titled.items() if options}


def _row(action: argparse.Action, text: str, *, is_short: bool) -> list[str]:
    """An option's name, its wrapped description, and its values and default; in short its name with its default."""
    head = f"  {bold(f'--{action.dest}')}"
    default = action.default
    shown = "" if default in (None, argparse.SUPPRESS) else f" (default {default})".replace("\n", "\\n")
    if is_short:
        return [f"{head}{shown}", f"      {text}"]
    values = "|".join(map(str, action.choices)) if action.choices else getattr(action.type, "__name__", "")
    wrapped = (textwrap.wrap(part, WIDTH - 6, break_on_hyphens=False) for part in (text, f"{values}{shown}".strip()))
    return [head, *(f"      {row}" for rows in wrapped for row in rows)]


def bold(text: str) -> str:
    """The text in bold where the output is a terminal that has it; `NO_COLOR` switches it off."""
    has_styles = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return f"\x1b[1;36m{text}\x1b[0m" if has_styles else text
