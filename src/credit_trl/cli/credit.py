"""`trl credit`: check the command line, then launch the training module with accelerate.

Accepts the arguments of TRL's training commands: `--config FILE.yaml` with overrides, arguments of `accelerate launch`
and `--accelerate_config`. Arguments that neither the trainer nor accelerate defines fail before the launch.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from credit_trl.cli.arguments import at_least
from credit_trl.cli.credit_init import recipe_names, recipe_path, with_accelerate_file
from credit_trl.cli.errors import USER_ERRORS, report_exit_code, report_failed_process, report_user_error, suggest
from credit_trl.cli.help import print_help
from credit_trl.cli.options_file import config_file, load_yaml, read_options
from credit_trl.cli.training import make_parser, refuse
from credit_trl.tasks.registry import check_name
from credit_trl.training.future_warnings import ignore_future_warnings

if TYPE_CHECKING:
    from trl import TrlParser

# Arguments of the trainer in Python, which the command line has no option for.
_ARGUMENTS = {
    "dataset": "Give `--dataset_path FILE` or `--dataset_name NAME`.",
    "tokenizer": "It is that of `--model_name_or_path`.",
}
TRAINING_MODULE = "credit_trl.cli.training"
PROG = "trl credit"


def run(argv: list[str]) -> int:
    """Check the arguments, launch the run and return its exit code."""
    ignore_future_warnings()
    with ExitStack() as merged:
        try:
            topic = help_topic(argv)
            if topic is not None:
                print_help(make_parser(prog=PROG), topic or None, recipe_names())
                return 0
            argv = merged.enter_context(one_config(argv))
            parser = make_parser(prog=PROG, processes=processes_of(argv))
            script, *_, from_config, from_line = parse(parser, argv)
            if script.task is not None:
                check_name(script.task)
            launched = launch_arguments(argv, from_config, from_line)
        except USER_ERRORS as error:
            return report_user_error(PROG, error, code=2)
        return launch(launched)


def help_topic(argv: list[str]) -> str | None:
    """The word after `--help`, `""` for none, `"all"` for `--help-all`; None for a line that asks for no help."""
    if "--help-all" in argv:
        return "all"
    at = next((at for at, word in enumerate(argv) if word in ("-h", "--help")), None)
    if at is None:
        return None
    following = argv[at + 1 : at + 2]
    return "" if not following or following[0].startswith("-") else following[0]


def launch(launched: Namespace) -> int:
    """Run the processes of `accelerate launch` and return the exit code."""
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from credit_trl.training.preemption import sigterm_to_children

    launched.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"  # not SIGTERM, after which torch kills the processes in 30 s
    launched.quiet = False  # with it, accelerate replaces the exit code
    try:
        with sigterm_to_children():
            launch_command(launched)
    except ValueError as error:  # accelerate's arguments exclude each other
        return report_user_error(PROG, error, code=2)
    except subprocess.CalledProcessError as error:
        return report_exit_code(PROG, error.returncode)
    except ChildFailedError as error:  # one of several processes
        return report_failed_process(PROG, error)
    except (KeyboardInterrupt, SignalException) as error:  # with one process, with several
        print(f"{PROG}: interrupted; `--resume_from_checkpoint latest` continues the run", file=sys.stderr)
        return 128 + getattr(error, "sigval", signal.SIGINT)
    return 0


def parse(parser: TrlParser, argv: list[str]) -> tuple[Any, ...]:
    """Parse a command line into dataclasses, after a check of its argument names.

    Then come the arguments for accelerate: those of the YAML file, and those of the line.
    """
    check_names(parser, argv)
    at = argv.index("--config") if "--config" in argv else len(argv)
    without_file = argv[:at] + argv[at + 2 :]
    _, others = parser.parse_known_args(without_file)
    launch_arguments(without_file, [], others)  # a forgotten `--config` would show as a wrong default
    return parser.parse_args_and_config(argv, return_remaining_strings=True, separate_remaining_strings=True)


def launch_arguments(argv: list[str], from_config: list[str], from_line: list[str]) -> Namespace:
    """Arguments of `accelerate launch` that start the training module, for the arguments after `credit`.

    `from_config` and `from_line` are the arguments of the YAML file and of the line that the training module's parser
    does not define.
    """
    from accelerate.commands.launch import launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument
    from trl.cli.commands.training import _subtract_subsequence

    launcher = launch_command_parser()
    launcher.error = refuse
    options = resolve_accelerate_config_argument(from_config + from_line)
    own = _subtract_subsequence(argv, from_line)
    launched = launcher.parse_args([*map(str, options), "--module", TRAINING_MODULE, *own])
    word = launched.training_script
    if word != TRAINING_MODULE:
        is_file = word.endswith((".yaml", ".yml", ".json"))
        fix = f"did you mean `--config {word}`?" if is_file else "every value follows its option, as in `--task NAME`."
        raise ValueError(f"unexpected `{word}`; {fix}")
    return launched


@contextmanager
def one_config(argv: list[str]) -> Iterator[list[str]]:
    """Merge the files of `--config` and `--recipe` into a temporary one, since TRL's parser reads one.

    Options of a later file override those of an earlier one, variables of `env` each by itself. An accelerate file of
    the package is found from any directory.
    """
    import yaml

    split = (word.split("=", 1) if word.startswith(("--config=", "--recipe=")) else [word] for word in argv)
    words = iter([part for parts in split for part in parts])
    merged: dict[str, Any] = {}
    others = []
    for word in words:
        if word not in ("--config", "--recipe"):
            others.append(word)
            continue
        name = next(words, "--")
        if name.startswith("--"):
            what = "names a YAML file: give its path" if word == "--config" else "names a recipe: give its name"
            raise ValueError(f"`{word}` {what}.")
        options = read_options(recipe_path(name) if word == "--recipe" else name)
        env = {**(merged.get("env") or {}), **(options.get("env") or {})}
        merged |= {**options, "env": env} if env else options
    if len(others) == len(argv):
        yield argv
        return
    with NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(with_accelerate_file(merged), file)
        file.flush()
        yield ["--config", file.name, *others]


def processes_of(argv: list[str]) -> int:
    """Number of processes that accelerate will start, by default one per GPU.

    Of accelerate's configuration file, overridden by the YAML file, overridden by the command line.
    """
    import torch
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse
    in_file = config_file(argv)
    kinds = {"accelerate_config": str, "config_file": str, "num_processes": at_least(1)}
    for name, kind in kinds.items():
        parser.add_argument(f"--{name}", type=kind, default=in_file.get(name))
    given, _ = parser.parse_known_args(argv)
    path = given.accelerate_config or given.config_file
    count = given.num_processes
    if count is None and path is not None:
        _, resolved = resolve_accelerate_config_argument(["--accelerate_config", str(path)])
        count = (load_yaml(Path(resolved).read_text(encoding="utf-8")) or {}).get("num_processes")
    return int(count or max(torch.cuda.device_count(), 1))


def check_names(parser: ArgumentParser, argv: list[str]) -> None:
    """Check that the training module or accelerate defines every argument of a command line and its YAML file.

    Runs before values are parsed, because TRL's errors about values or the machine would hide a misspelt name.
    """
    from accelerate.commands.launch import launch_command_parser

    from credit_trl.config import OTHER_NAMES

    fixes = OTHER_NAMES | _ARGUMENTS
    of_launcher = {*launch_command_parser()._option_string_actions, "--accelerate_config"}
    options = {"--config", *parser._option_string_actions, *of_launcher}
    fields = {action.dest for action in parser._actions} | {"env"}  # the spelling with a dash is for the line
    in_file = [f"--{key}" for key in config_file(argv) if key not in fields and f"--{key}" not in of_launcher]
    on_line = [word.split("=")[0] for word in argv if word.startswith("--") and " " not in word]
    unknown = [
        name
        for name in on_line
        if name not in options and (name[2:] in fixes or not any(option.startswith(name) for option in options))
    ]  # abbreviations are known
    problems = []
    for name in dict.fromkeys([*in_file, *unknown]):
        fix = fixes.get(name[2:])
        problems.append(f"{name}.{suggest(name, options - {name}) if fix is None else f' {fix}'}")
    if problems:
        many = "s" if len(problems) > 1 else ""
        place = "(on the command line or, without the dashes, in the YAML file)"
        raise ValueError(f"unknown argument{many} {place}: {' '.join(problems)}")
