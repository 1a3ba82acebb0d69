"""`trl`: all of TRL's commands, unchanged, plus `credit` and its companions.

TRL has no plug-in point for commands, so this package installs a `trl` script of its own. `credit-trl` is the same
program under a name that no other installation overwrites, `python -m credit_trl` a third.

A companion command is one module: `add_arguments(parser)` and `run(args) -> int`. It is imported when it is called.
One that sets `TAKES_OTHER_WORDS` gets the words that its parser does not know as a second argument.
"""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentParser
from dataclasses import dataclass


@dataclass(frozen=True)
class Companion:
    """A command beside `credit`: where it lives, and its line in `trl --help`."""

    module: str
    help: str


TRAINING = ("credit", "Run the CREDIT training script")

COMPANIONS: dict[str, Companion] = {
    "credit-compare": Companion("credit_trl.cli.credit_compare", "Compare runs: tables, curves and one HTML report"),
    "credit-compat": Companion("credit_trl.cli.credit_compat", "Check Assumption 1 at the answer letter (Appendix E)"),
    "credit-eval": Companion("credit_trl.cli.credit_eval", "avg@k of a model on a task, with bootstrap intervals"),
    "credit-map": Companion("credit_trl.cli.credit_map", "Draw which tokens of a response get credit, and for what"),
    "credit-plan": Companion("credit_trl.cli.credit_plan", "Memory, tokens and time of a run, before weights load"),
    "credit-quickstart": Companion("credit_trl.cli.quickstart", "Train the embedded task on this CPU, see its credit"),
    "credit-sweep": Companion("credit_trl.cli.credit_sweep", "Run a sweep of methods, options and seeds, resumable"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command of ours, or hand the line to TRL as it is."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = next((token for token in argv if not token.startswith("-")), None)
    if command == TRAINING[0]:
        from credit_trl.cli.credit import run

        return run(argv[argv.index(command) + 1 :])
    if command in COMPANIONS:
        return _run_companion(command, argv[argv.index(command) + 1 :])
    if command is None:
        _parser().parse_args(argv)  # `--help` ends here
        _parser().print_help()
        return 0
    return _run_trls(command, argv)


def _run_trls(command: str, argv: list[str]) -> int:
    from trl.cli import main as trl_main
    from trl.cli.commands import get_commands

    from credit_trl.cli.mistakes import nearest

    known = {one.name for one in get_commands()} | {TRAINING[0], *COMPANIONS}
    if command not in known:  # its own message would not name ours
        _parser().error(f"there is no command {command!r}.{nearest(command, known)} All of them: trl --help")
    return trl_main(argv)


def _run_companion(name: str, argv: list[str]) -> int:
    from credit_trl.cli.mistakes import MISTAKES, is_mistake, nearest, tell

    module = importlib.import_module(COMPANIONS[name].module)
    parser = ArgumentParser(prog=f"trl {name}", description=COMPANIONS[name].help, allow_abbrev=False)
    module.add_arguments(parser)
    parsed = parser.parse_known_args(argv)
    if not getattr(module, "TAKES_OTHER_WORDS", False):
        options, others = parsed
        if others:
            parser.error(f"unknown argument {others[0]}.{nearest(others[0], parser._option_string_actions)}")
        parsed = (options,)
    try:
        return module.run(*parsed)
    except MISTAKES as error:
        if not is_mistake(error):
            raise
        return tell(f"trl {name}", error)


def _parser() -> ArgumentParser:
    """What `trl --help` shows: TRL's commands and ours, in one alphabetical list."""
    from trl.cli.commands import get_commands

    lines = {command.name: command.help_text for command in get_commands()}
    lines |= {name: companion.help for name, companion in COMPANIONS.items()}
    lines[TRAINING[0]] = TRAINING[1]
    parser = ArgumentParser(prog="trl", allow_abbrev=False)
    subparsers = parser.add_subparsers(help="available commands", dest="command")
    for name in sorted(lines):
        subparsers.add_parser(name, help=lines[name])
    return parser
