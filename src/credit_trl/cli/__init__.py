"""Command line: all commands of TRL, unchanged, and the `credit` commands.

TRL has no plug-in point for commands, so this package installs its own `trl` script. `credit-trl` and
`python -m credit_trl` run the same program; no other installation overwrites the name `credit-trl`.

A command is a module with `add_arguments(parser)` and `run(args) -> int`, imported when the command is called.
`continues(args) -> bool`, if there is one, says whether the same command line continues an interrupted one.
"""

import importlib
import os
import shutil
import signal
import sys
from argparse import ArgumentParser, HelpFormatter
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from credit_trl.cli.errors import (
    USER_ERRORS,
    is_user_error,
    remedy_of,
    report_user_error,
    spell_unencodable,
    suggest,
)
from credit_trl.sandbox.protocol import printable

TRAINING = ("credit", "Run the CREDIT training script")

# `credit-…` command -> its module and its line in `trl --help`.
COMPANIONS = {
    "credit-eval": ("credit_trl.cli.credit_eval", "avg@k of a run or a model, with bootstrap intervals"),
    "credit-init": ("credit_trl.cli.credit_init", "Write a first configuration, verifier and rows"),
    "credit-map": ("credit_trl.cli.credit_map", "Draw the credit of every token of a response"),
    "credit-probe": ("credit_trl.cli.credit_probe", "What feedback and each arm would teach, before training"),
    "credit-quickstart": ("credit_trl.cli.quickstart", "Train the embedded task on a CPU and map its credit"),
    "credit-report": ("credit_trl.cli.credit_report", "One HTML page for a run, or for several side by side"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a `credit` command, or pass the command line to TRL unchanged, and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    spell_unencodable()
    command = next((token for token in argv if not token.startswith("-")), None)
    if command is None:
        options = _help_parser().parse_args(argv)  # exits on `--help`
        print(_versions()) if options.version else _help_parser().print_help()
        return 0
    if command not in COMPANIONS and command != TRAINING[0]:
        return _run_trl(command, argv)
    arguments = argv[argv.index(command) + 1 :]
    try:
        if command in COMPANIONS:
            return _run_companion(command, arguments)
        from credit_trl.cli.credit import run

        return run(arguments)
    except KeyboardInterrupt as interrupt:  # before the launch, which reports later ones itself
        print(f"trl {command}: interrupted{interrupt}", file=sys.stderr)
        return 128 + signal.SIGINT


def _run_trl(command: str, argv: list[str]) -> int:
    from credit_trl.trl_compat import get_commands
    from credit_trl.trl_compat import main as trl_main

    command_names = {trl_command.name for trl_command in get_commands()} | {TRAINING[0], *COMPANIONS}
    if command not in command_names:  # TRL's error would not list the commands of this package
        _help_parser().error(
            f"there is no command {command!r}.{suggest(command, command_names)} All commands: trl --help"
        )
    return trl_main(argv)


def _run_companion(name: str, argv: list[str]) -> int:
    try:
        module = importlib.import_module(COMPANIONS[name][0])
    except ImportError as error:  # of a TRL that is not supported
        if not is_user_error(error):
            raise
        return report_user_error(f"trl {name}", error)
    one_row_an_option = partial(HelpFormatter, max_help_position=34)
    parser = ArgumentParser(prog=f"trl {name}", allow_abbrev=False, formatter_class=one_row_an_option)
    module.add_arguments(parser)
    parser.error = partial(_refuse_line, parser.prog)
    parser.usage = parser.prog
    for action in parser._actions:
        if not action.option_strings:
            place = action.metavar or action.dest
            parser.usage += f" {place} [{place} ...]" if action.nargs == "+" else f" [{place}]"
    parser.usage += " [options]"
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        option_names = parser._option_string_actions
        from credit_trl.mistakes import OTHER_NAMES

        problems = []
        for word in [word for word in unknown if word.startswith("-")] or unknown:
            problems.append(f"unknown argument {word}.{remedy_of(word, option_names, OTHER_NAMES)}")
        parser.error(" ".join(problems))
    sys.path.insert(0, os.getcwd())  # tasks of the user's own
    try:
        status = module.run(options)
        sys.stdout.flush()
        return status
    except Exception as error:
        is_bug = not isinstance(error, USER_ERRORS) or isinstance(error, TypeError | RuntimeError)
        if is_bug and not is_user_error(error):
            raise
        return report_user_error(f"trl {name}", error)
    except KeyboardInterrupt:
        continues = getattr(module, "continues", lambda _: False)(options)
        raise KeyboardInterrupt("; the same command continues" if continues else "") from None


def _refuse_line(program: str, message: str) -> NoReturn:
    """End with the error of a parser as one line; argparse's own prints the usage first."""
    print(f"{program}: error: {printable(message).rstrip('.')}. All options: {program} --help", file=sys.stderr)
    sys.exit(2)


def _versions() -> str:
    """Versions of TRL and of this package, and whose script `trl` on the path is: both packages install one."""
    versions = f"trl {version('trl')}, credit-trl {version('credit-trl')}"
    script = shutil.which("trl")
    if script is None:
        return f"{versions}\nno `trl` stands on the path"
    if b"credit_trl" in Path(script).read_bytes():
        return f"{versions}\n{script} is of credit-trl"
    return (
        f"{versions}\n{script} is TRL's own, without `credit`: use `credit-trl credit`, or reinstall credit-trl with "
        "`pip install --force-reinstall --no-deps` or `uv pip install --reinstall --no-deps`"
    )


def _help_parser() -> ArgumentParser:
    """Parser of `trl --help`: the commands of TRL and of this package in alphabetical order."""
    from credit_trl.trl_compat import get_commands

    lines = {command.name: command.help_text for command in get_commands()} | dict([TRAINING])
    lines |= {name: line for name, (_, line) in COMPANIONS.items()}
    parser = ArgumentParser(prog="trl", allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="versions, and which `trl` stands on the path")
    subparsers = parser.add_subparsers(help="available commands", dest="command", metavar="COMMAND")
    for name in sorted(lines):
        subparsers.add_parser(name, help=lines[name])
    return parser
