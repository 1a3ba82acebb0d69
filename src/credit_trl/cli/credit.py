"""`trl credit`: parse like `trl grpo`, then launch the training module through accelerate.

Everything that TRL's own training commands take is taken: `--config FILE.yaml` with overrides, `accelerate launch`
arguments, `--accelerate_config`. What neither the trainer nor accelerate knows is an error here, before anything is
launched.
"""

from __future__ import annotations

import difflib
import subprocess
import sys
from argparse import ArgumentParser

from credit_trl.cli.training import make_parser

TRAINING_MODULE = "credit_trl.cli.training"
PROG = "trl credit"


def run(argv: list[str]) -> int:
    """Check the arguments, launch, and return the exit code of the run."""
    parser = make_parser(prog=PROG)
    try:
        *_, from_config, from_line = parser.parse_args_and_config(
            argv, return_remaining_strings=True, separate_remaining_strings=True
        )
        launcher, arguments = launch_arguments(parser, argv, from_config, from_line)
    except (ValueError, TypeError, OSError) as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    from accelerate.commands.launch import launch_command

    try:
        launch_command(launcher.parse_args(arguments))
    except subprocess.CalledProcessError as error:  # the run has said why
        return error.returncode
    return 0


def launch_arguments(
    parser: ArgumentParser, argv: list[str], from_config: list[str], from_line: list[str]
) -> tuple[ArgumentParser, list[str]]:
    """Split a command line between `accelerate launch` and the training module.

    Args:
        parser: the training module's.
        argv: the whole line after `credit`.
        from_config, from_line: what the parser did not know of the YAML file and of the line.

    Returns:
        accelerate's parser, and the line for it.

    Raises:
        ValueError: an argument that nobody knows; the message suggests the nearest name.
    """
    from accelerate.commands.launch import launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument
    from trl.cli.commands.training import _subtract_subsequence

    launcher = launch_command_parser()
    check_words(parser, [*from_config, *from_line])
    options = resolve_accelerate_config_argument(from_config + from_line)
    return launcher, [*map(str, options), "--module", TRAINING_MODULE, *_subtract_subsequence(argv, from_line)]


def check_words(parser: ArgumentParser, words: list[str]) -> None:
    """Words that the training module's parser does not know are accelerate's.

    Raises:
        ValueError: one is not; the message suggests the nearest name.
    """
    from accelerate.commands.launch import launch_command_parser

    known = {option for action in launch_command_parser()._actions for option in action.option_strings}
    ours = {option for action in parser._actions for option in action.option_strings}
    for word in words:
        name = word.split("=")[0]
        if name.startswith("--") and name not in known and name != "--accelerate_config":
            raise ValueError(_unknown(name, ours | known))


def _unknown(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f" Did you mean {close[0]}?" if close else ""
    return f"unknown argument {name} (on the command line or, without the dashes, in the YAML file).{hint}"
