"""`trl credit`: check the command line, then launch the training module with accelerate.

Accepts the arguments of TRL's training commands: `--config FILE.yaml` with overrides, arguments of `accelerate launch`
and `--accelerate_config`. Arguments that neither the trainer nor accelerate defines fail before the launch.
"""

import logging
import os
import signal
import subprocess
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import psutil
import yaml

from credit_trl.cli.credit_init import accelerate_file, accelerate_names, recipe_names, recipe_path
from credit_trl.cli.errors import (
    USER_ERRORS,
    is_user_error,
    report_exit_code,
    report_failed_process,
    report_user_error,
    suggest,
)
from credit_trl.cli.help import print_help
from credit_trl.cli.options_file import config_file, read_options
from credit_trl.cli.training import ENDED, make_parser, refuse
from credit_trl.tasks.registry import check_name

# Arguments of the trainer in Python, which the command line has no option for.
_ARGUMENTS = {
    "dataset": "Give `--dataset_path FILE` or `--dataset_name NAME`.",
    "tokenizer": "It is that of `--model_name_or_path`.",
    "model": "Give `--model_name_or_path NAME`.",
    "data": "Give `--dataset_path FILE` or `--dataset_name NAME`.",
    "verifier": "Give `--reward_funcs my_module.my_function`.",
}
TRAINING_MODULE = "credit_trl.cli.training"
# Options with which processes may run on hosts that do not see the files of this one.
_OTHER_HOSTS = ("mpirun_hostfile", "deepspeed_hostfile", "tpu_use_cluster")
PROG = "trl credit"


def run(argv: list[str]) -> int:
    """Check the arguments, launch the run and return its exit code."""
    with ExitStack() as merged:
        try:
            own_arguments, trl_arguments = own_options(argv)
            if own_arguments.help is not None:
                print_help(make_parser(prog=PROG), own_arguments.help or None, recipe_names())
                return 0
            launched = launch_arguments(merged.enter_context(one_config(own_arguments, trl_arguments)))
        except Exception as error:
            if not (isinstance(error, USER_ERRORS) or is_user_error(error)):
                raise
            return report_user_error(PROG, error, code=2)
        return launch(launched)


def own_options(argv: list[str]) -> tuple[Namespace, list[str]]:
    """(options of this command, words for the training module and accelerate)."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("-h", "--help", nargs="?", const="")
    parser.add_argument("--help-all", dest="help", action="store_const", const="all")
    for option in ("--recipe", "--config"):
        parser.add_argument(option, action="append", nargs="?", default=[])
    parser.add_argument("--small", action="store_true")
    own_arguments, trl_arguments = parser.parse_known_args(argv)
    if own_arguments.small and not own_arguments.recipe:
        raise ValueError("`--small` makes a recipe small: give `--recipe NAME` too.")
    if not all([*own_arguments.config, *own_arguments.recipe]):
        raise ValueError("`--config` names a YAML file, `--recipe` a recipe: give its path, or its name.")
    return own_arguments, trl_arguments


def launch(launched: Namespace) -> int:
    """Run the processes of `accelerate launch`, and return the exit code.

    A process that ended with 0 without the end of `training.run` was ended by `os._exit` in code of the user's.
    """
    is_local = not any(getattr(launched, name, None) for name in _OTHER_HOSTS)
    with TemporaryDirectory() as folder:
        os.environ[ENDED] = f"{folder}/ended"
        code = run_processes(launched)
        del os.environ[ENDED]
        if code != 0 or not is_local or os.listdir(folder):
            return code
    cause = "the process ended with code 0 before its run did, as by `os._exit` in a reward function or a library"
    print(f"{PROG}: error: {cause}. Remove it; `--resume_from_checkpoint latest` continues.", file=sys.stderr)
    return 1


def run_processes(launched: Namespace) -> int:
    """Run the processes of `accelerate launch`, pass SIGTERM on to them, and return the exit code."""
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    def forward(number: int, frame: Any) -> None:
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile
                child.send_signal(number)

    launched.signals_to_handle = "SIGINT,SIGHUP,SIGQUIT"  # on SIGTERM torch would kill the processes after 30 s
    launched.quiet = False  # with it, accelerate replaces the exit code
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)  # six lines of its defaults
    previous = signal.signal(signal.SIGTERM, forward)
    try:
        launch_command(launched)
    except ValueError as error:  # accelerate's arguments exclude each other
        return report_user_error(PROG, error, code=2)
    except subprocess.CalledProcessError as error:
        return report_exit_code(PROG, error.returncode)
    except ChildFailedError as error:  # one of several processes
        return report_failed_process(PROG, error)
    except (KeyboardInterrupt, SignalException) as error:  # with one process, with several
        print(f"{PROG}: interrupted; `--resume_from_checkpoint latest` continues from a saved step", file=sys.stderr)
        return 128 + getattr(error, "sigval", signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def launch_arguments(argv: list[str]) -> Namespace:
    """Arguments of `accelerate launch` that start the training module, for a line of `one_config`.

    Raises:
        ValueError: an argument is unknown or has a wrong value.
    """
    from accelerate.commands.launch import launch_command_parser

    from credit_trl.trl_compat import _subtract_subsequence, resolve_accelerate_config_argument

    parser = make_parser(prog=PROG)
    launcher = launch_command_parser()
    launcher.error = refuse
    option_names = {*parser._option_string_actions, *launcher._option_string_actions}
    check_names(option_names | {"--config", "--accelerate_config", "--env"}, argv)
    on_line = argv[2:] if argv[:1] == ["--config"] else argv
    _, from_line = parser.parse_known_args(on_line)
    in_file = config_file(argv)
    in_file.pop("env", None)
    for action in parser._actions:
        check_type(action, in_file.get(action.dest))
    from_file = parser.set_defaults_with_config(**in_file)  # words for the options that are not the parser's
    try:
        options = resolve_accelerate_config_argument(from_file + from_line)
    except ValueError as error:
        words = [*from_file, *from_line]
        [name] = words[words.index("--accelerate_config") + 1 :][:1] or [""]
        names = accelerate_names()
        advice = suggest(name, names) or f" Names: {', '.join(names)}."
        raise ValueError(f"{error}{advice}") from error
    launched = launcher.parse_args([*options, "--module", TRAINING_MODULE, *_subtract_subsequence(argv, from_line)])
    word = launched.training_script
    if word != TRAINING_MODULE:
        is_file = word.endswith((".yaml", ".yml", ".json"))
        fix = f"did you mean `--config {word}`?" if is_file else "every value follows its option, as in `--task NAME`."
        raise ValueError(f"unexpected `{word}`; {fix}")
    count = processes_of(launched)
    start_processes(launched, count)
    parser = make_parser(prog=PROG, processes=count)
    script, *_ = parser.parse_args_and_config(argv, return_remaining_strings=True)
    if script.task is not None:
        check_name(script.task)
    return launched


@contextmanager
def one_config(own_arguments: Namespace, trl_arguments: list[str]) -> Iterator[list[str]]:
    """Merge the files of `--recipe`, then those of `--config`, into a temporary one, since TRL's parser reads one.

    Options of a later file override those of an earlier one, variables of `env` each by itself. `--small` puts its
    file between them, where null removes an option of the recipe. An accelerate file of the package is found from any
    directory.
    """
    merged: dict[str, Any] = {}
    recipes = [recipe_path(name) for name in own_arguments.recipe]
    overlays = [recipe_path("overlays/small")] if own_arguments.small else []
    for file in (*recipes, *overlays, *own_arguments.config):
        options = read_options(file)
        env = {**(merged.get("env") or {}), **(options.get("env") or {})}
        merged |= {**options, "env": env} if env else options
        if file in overlays:
            merged = {name: value for name, value in merged.items() if value is not None}
    if not merged:
        yield trl_arguments
        return
    if "accelerate_config" in merged:
        merged["accelerate_config"] = accelerate_file(merged["accelerate_config"])
    with NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(merged, file)
        file.flush()
        yield ["--config", file.name, *trl_arguments]


def processes_of(launched: Namespace) -> int:
    """Number of processes that accelerate starts: that of the line or the YAML, of its own file, or one per GPU."""
    import torch

    count = launched.num_processes
    file = accelerate_settings(launched)
    if count is None and file is not None:
        count = file.num_processes
    if count is None:
        count = max(torch.cuda.device_count(), 1)
    for name, number in {"processes": count, "machines": launched.num_machines}.items():
        if number is not None and number < 1:
            raise ValueError(f"--num_{name}: must be at least 1, got {number}")
    return count


def accelerate_settings(launched: Namespace) -> Any:
    """Content of accelerate's file of settings, None without one."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    has_file = os.path.isfile(launched.config_file or default_config_file)
    return load_config_from_file(launched.config_file) if has_file else None


def start_processes(launched: Namespace, count: int) -> None:
    """Let accelerate start `count` processes also where it would start one: on a CPU, or without `--multi_gpu`."""
    from accelerate.utils import DistributedType

    file = accelerate_settings(launched)
    starts_them = ("multi_gpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "tpu", "mpirun_hostfile")
    is_distributed = file is not None and file.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU)
    is_distributed = is_distributed or any(getattr(launched, name, None) for name in starts_them)
    if count == 1 or is_distributed:
        return
    if launched.cpu:
        launched.cpu = False
        os.environ["ACCELERATE_USE_CPU"] = "true"
    launched.multi_gpu = True  # torchrun's processes, which use gloo on a CPU


def check_type(action: Action, value: Any) -> None:
    """Check a number or path of the YAML file, which argparse converts where it is a text."""
    types = {"int": int, "float": int | float}
    kind = "path" if action.dest.endswith("path") else getattr(action.type, "__name__", "")
    is_right = isinstance(value, str | None | types.get(kind, str)) and not isinstance(value, bool)
    if action.nargs is None and kind in (*types, "path") and not is_right:
        raise ValueError(f"`{action.dest}: {value}` in the YAML file: expected one value of type {kind}.")


def check_names(option_names: set[str], argv: list[str]) -> None:
    """Check that the training module or accelerate defines every argument of a command line and its YAML file.

    Runs before values are parsed, because TRL's errors about values or the machine would hide a misspelt name.
    """
    from credit_trl.mistakes import OTHER_NAMES

    fixes = OTHER_NAMES | _ARGUMENTS
    # The spelling with a dash is for the line. An option with an underscore has no abbreviation: it has two spellings.
    in_file = [f"--{key}" for key in config_file(argv) if "-" in key or f"--{key}" not in option_names]
    on_line = [word.split("=")[0] for word in argv if word.startswith("--") and " " not in word]
    unknown = [name for name in on_line if name not in option_names]
    problems = []
    options = config_file(argv)
    for name in dict.fromkeys([*in_file, *unknown]):
        fix = f" {fixes[name[2:]]}" if name[2:] in fixes else suggest(name, option_names - {name})
        if name not in unknown and isinstance(options[name[2:]], dict):
            fix = " It is a mapping, and no option: write its options at the top level of the file."
        problems.append(f"{name}.{fix or ' All options: trl credit --help all.'}")
    if problems:
        many = "s" if len(problems) > 1 else ""
        place = "(on the command line or, without the dashes, in the YAML file)"
        raise ValueError(f"unknown argument{many} {place}: {' '.join(problems)}")
