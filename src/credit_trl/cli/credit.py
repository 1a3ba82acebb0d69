"""`trl credit`: parse like `trl grpo`, then launch the training module through accelerate.

Everything that TRL's own training commands take is taken: `--config FILE.yaml` with overrides, `accelerate launch`
arguments, `--accelerate_config`. What neither the trainer nor accelerate knows is an error here, before anything is
launched.
"""

from __future__ import annotations

import subprocess
from argparse import ArgumentParser
from typing import TYPE_CHECKING, Any

from credit_trl.cli.mistakes import MISTAKES, ignore_renamings, nearest, tell, tell_process
from credit_trl.cli.training import make_parser, refuse
from credit_trl.tasks.registry import check_name

if TYPE_CHECKING:
    from trl import TrlParser

TRAINING_MODULE = "credit_trl.cli.training"
PROG = "trl credit"


def run(argv: list[str]) -> int:
    """Check the arguments, launch, and return the exit code of the run."""
    ignore_renamings()
    argv = separate_config(argv)
    try:
        parser = make_parser(prog=PROG, processes=processes_of(argv))
        script, *_, from_config, from_line = parse(parser, argv)
        if script.task is not None:
            check_name(script.task)
        launcher, arguments = launch_arguments(argv, from_config, from_line)
        launched = launcher.parse_args(arguments)
    except MISTAKES as error:
        return tell(PROG, error, code=2)
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(launched)
    except subprocess.CalledProcessError as error:  # the run has said why
        return error.returncode
    except ChildFailedError as error:  # of several processes
        return tell_process(PROG, error)
    return 0


def parse(parser: TrlParser, argv: list[str]) -> tuple[Any, ...]:
    """Make the dataclasses of a command line, after a look at its names.

    Returns:
        The parser's dataclasses, then two lists of words for accelerate: of the YAML file, and of the line.

    Raises:
        ValueError: an argument that nobody knows, or a value that its dataclass refuses.
        OSError, yaml.YAMLError: a configuration file that cannot be read.
    """
    check_names(parser, argv)
    return parser.parse_args_and_config(argv, return_remaining_strings=True, separate_remaining_strings=True)


def launch_arguments(
    argv: list[str], from_config: list[str], from_line: list[str]
) -> tuple[ArgumentParser, list[str]]:
    """Split a command line between `accelerate launch` and the training module.

    Args:
        argv: the whole line after `credit`.
        from_config, from_line: what the training module's parser did not know of the YAML file and of the line.

    Returns:
        accelerate's parser, and the line for it.

    Raises:
        ValueError: an accelerate configuration that is neither a file nor one of TRL's.
    """
    from accelerate.commands.launch import launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument
    from trl.cli.commands.training import _subtract_subsequence

    launcher = launch_command_parser()
    launcher.error = refuse
    options = resolve_accelerate_config_argument(from_config + from_line)
    return launcher, [*map(str, options), "--module", TRAINING_MODULE, *_subtract_subsequence(argv, from_line)]


def separate_config(argv: list[str]) -> list[str]:
    """`--config=FILE` as two words, the only form that TRL's parser reads a file by."""
    return [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]


def processes_of(argv: list[str]) -> int:
    """How many processes accelerate is told to start, or will by itself: one a GPU."""
    import torch

    return int(launcher_of(argv).get("num_processes") or max(torch.cuda.device_count(), 1))


def launcher_of(argv: list[str]) -> dict[str, Any]:
    """What accelerate is started with: its file, over it the words of the YAML file, over them those of the line.

    Raises:
        ValueError: an accelerate configuration that is neither a file nor one of TRL's.
        OSError, yaml.YAMLError: a file cannot be read.
    """
    from credit_trl.lab.planning.setup import read_launcher

    launch, in_file = ArgumentParser(add_help=False, allow_abbrev=False), config_file(argv)
    launch.error = refuse
    for name, kind in {
        "accelerate_config": str,
        "config_file": str,
        "num_processes": int,
        "num_machines": int,
    }.items():
        launch.add_argument(f"--{name}", type=kind, default=in_file.get(name))
    given, _ = launch.parse_known_args(argv)
    counts = {"num_processes": given.num_processes, "num_machines": given.num_machines}
    return read_launcher(given.accelerate_config or given.config_file, counts)


def check_names(parser: ArgumentParser, argv: list[str]) -> None:
    """Every name on the line and in its YAML file is the training module's or accelerate's.

    Values come later: what TRL says about a value, or about the machine, would hide a name that is misspelt.

    Raises:
        ValueError: one is not; the message suggests the nearest name. Or the file holds no mapping.
        OSError, yaml.YAMLError: the file cannot be read.
    """
    from accelerate.commands.launch import launch_command_parser

    options = {name for one in (parser, launch_command_parser()) for name in one._option_string_actions}
    options |= {"--config", "--accelerate_config"}
    fields = {action.dest for action in parser._actions} | {"env"}
    for key in config_file(argv):
        if key not in fields and f"--{key}" not in options:
            raise ValueError(_unknown(f"--{key}", options))
    for name in (word.split("=")[0] for word in argv if word.startswith("--") and " " not in word):
        if not any(option.startswith(name) for option in options):  # argparse takes beginnings
            raise ValueError(_unknown(name, options))


def config_file(argv: list[str]) -> dict[str, Any]:
    """What the YAML file of a line holds; {} without one."""
    import yaml

    if "--config" not in argv:
        return {}
    path = next(iter(argv[argv.index("--config") + 1 :]), None)
    if path is None or path.startswith("--"):
        raise ValueError("`--config` names a YAML file: give its path.")
    with open(path, encoding="utf-8") as file:
        content = yaml.safe_load(file)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a YAML mapping, `option: value` on each line.")
    return content


def _unknown(name: str, known: set[str]) -> str:
    place = "(on the command line or, without the dashes, in the YAML file)"
    return f"unknown argument {name} {place}.{nearest(name, known)}"
