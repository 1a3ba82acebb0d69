"""The `trl` script: TRL's commands unchanged, the `credit` commands and their help."""

import os
import re
import signal
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from torch.distributed.elastic.multiprocessing import SignalException
from trl.cli.commands import get_commands

from credit_trl import cli
from credit_trl.cli import credit, training
from credit_trl.cli.credit_init import recipe_path
from credit_trl.sandbox import CHOICE
from credit_trl.trl_compat import MODULES
from tables import tables_of

TABLES = tables_of(__file__)

ON_CPU = ["--use_cpu", "true", "--bf16", "false", "--gradient_accumulation_steps", "4"]


def test_help_lists_commands_of_trl_and_of_this_package(capsys):
    assert cli.main([]) == 0
    listed = capsys.readouterr().out
    for name in [command.name for command in get_commands()] + ["credit", *cli.COMPANIONS]:
        assert f"    {name} " in listed or f"    {name}\n" in listed, name
    assert len(listed.splitlines()) <= 40


@pytest.mark.parametrize("line", [["--help"], ["--help-all"], ["--help", "contrastive"]])
def test_rows_of_the_help_are_legible_at_80_columns(line, capsys):
    assert credit.run(line) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "--contrastive_coef" in "\n".join(lines)
    assert "\x1b" not in "\n".join(lines)  # no terminal
    if line == ["--help"]:
        assert len(lines) <= 70
        assert [name for name in ("data", "model", "credit", "teacher", "run") if name not in lines] == []
    if line == ["--help", "contrastive"]:
        assert "λ, the weight of the input-generic baseline" in " ".join(" ".join(lines).split())
        assert "--learning_rate" not in lines


@pytest.mark.parametrize("command", [None, *cli.COMPANIONS])
def test_help_of_commands_fits_a_screen(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([*filter(None, [command]), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_short_help_names_options_with_their_defaults(capsys):
    credit.run(["--help"])
    printed = capsys.readouterr().out
    options = {action.dest: action.default for action in training.make_parser()._actions}
    option_defaults = re.findall(r"^  --(\w+)(?: \(default (.*)\))?$", printed, re.MULTILINE)
    assert len(option_defaults) == 10
    assert {name: default for name, default in option_defaults if default} == {
        name: str(options[name]) for name, _ in option_defaults if options[name] is not None
    }


def test_help_is_coloured_on_a_terminal_only(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    credit.run(["--help"])
    assert "\x1b[1;36m  --task\x1b[0m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    credit.run(["--help"])
    assert "\x1b" not in capsys.readouterr().out


def test_help_of_all_has_every_option(capsys):
    credit.run(["--help-all"])
    printed_options = set(re.findall(r"^  --(\w+)$", capsys.readouterr().out, re.MULTILINE))
    assert {action.dest for action in training.make_parser()._actions} - {"help"} <= printed_options


@pytest.mark.parametrize("argv", [["sft", "--help"], ["grpo", "--help"], ["env"]])
def test_trl_commands_receive_the_unchanged_line(monkeypatch, argv):
    received = []
    monkeypatch.setattr("trl.cli.main", lambda line: received.append(line) or 0)
    assert cli.main(argv) == 0
    assert received == [argv]


def ended(launch):
    """A launch whose processes come to their end."""

    def launch_and_end(launched):
        launch(launched)
        Path(os.environ["CREDIT_TRL_ENDED"]).touch()

    return launch_and_end


@pytest.fixture
def launched(monkeypatch):
    """Arguments of the launches, none of which is started."""
    calls = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", ended(calls.append))
    return calls


def test_arguments_are_split_between_trainer_and_accelerate(launched, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("task: quickstart\nuse_cpu: true\nbf16: false\nnum_processes: 2\ngradient_accumulation_steps: 4")
    line = ["--contrastive_coef=0.2", "--mixed_precision", "no", "--output_dir", "out"]
    assert credit.run([f"--config={config}", *line]) == 0
    (args,) = launched
    assert args.training_script == "credit_trl.cli.training"
    assert (args.module, args.num_processes, args.mixed_precision) == (True, 2, "no")
    assert args.training_script_args[2:] == ["--contrastive_coef=0.2", "--output_dir", "out"]


@pytest.fixture
def parsed(monkeypatch):
    """(arguments of the script, configuration, arguments of the launch) of the launches, none of which is started."""
    calls = []

    def read(launched):
        words = launched.training_script_args
        script, config, *_ = training.make_parser().parse_args_and_config(words, fail_with_unknown_args=False)
        calls.append((script, config, launched))

    monkeypatch.setattr("accelerate.commands.launch.launch_command", ended(read))
    return calls


def test_options_of_several_files_are_merged(parsed, monkeypatch, tmp_path):
    first_file, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first_file.write_text("env: {FIRST: a, BOTH: a}\ntask: quickstart\ntop_p: 0.5\nuse_cpu: true\nsave_strategy: no\n")
    second.write_text("env: {BOTH: b}\ntask: null\ntop_p: 0.9\nbf16: false\nmax_steps: 6\nnum_processes: 1\n")
    for name in ("FIRST", "BOTH"):
        monkeypatch.setenv(name, "")
    line = [
        "--config",
        str(first_file),
        "--max_steps",
        "7",
        f"--config={second}",
        "--gradient_accumulation_steps",
        "4",
    ]
    assert credit.run(line) == 0
    [(script, config, launched)] = parsed
    assert (script.task, config.top_p, config.max_steps, launched.num_processes) == (None, 0.9, 7, 1)
    assert config.save_strategy == "no"  # YAML reads false
    assert (os.environ["FIRST"], os.environ["BOTH"]) == ("a", "b")


def test_recipe_and_its_accelerate_file_are_found_from_any_directory(parsed, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert credit.run(["--recipe", "livecodebench_qwen3_8b", "--use_cpu", "true", "--bf16", "false"]) == 0
    [(script, _, launched)] = parsed
    assert script.task == "livecodebench:v6"
    assert Path(launched.config_file).is_file()
    assert launched.num_processes in (None, 8)


@pytest.mark.parametrize("name", ["livecodebench_qwen3_8b", "qlora_24gb", "sciknoweval_olmo3_7b"])
def test_small_recipe_is_its_method_in_one_process(parsed, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    recipe = yaml.safe_load(recipe_path(name).read_text("utf-8"))
    assert credit.run(["--recipe", name, "--small", "--max_steps", "2"]) == 0
    [(script, config, launched)] = parsed
    assert (launched.config_file, launched.num_processes) == (None, 1)
    assert (config.use_vllm, config.max_steps, config.max_completion_length) == (False, 2, 64)
    method = [option for option in recipe if option.startswith(("contrastive_", "distillation_", "teacher_"))]
    assert {option: getattr(config, option) for option in method} == {option: recipe[option] for option in method}
    assert script.task == recipe["task"]


def test_small_without_a_recipe_is_an_error(parsed, capsys):
    assert credit.run(["--small"]) == 2
    assert "give `--recipe NAME` too" in capsys.readouterr().err
    assert parsed == []


def test_batches_are_checked_for_the_launched_processes(launched, capsys):
    """Eight rollouts of one process are one prompt, sixteen of two processes are two prompts."""
    line = ["--use_cpu", "true", "--bf16", "false", "--per_device_train_batch_size", "8"]
    assert credit.run([*line, "--num_processes", "2"]) == 0
    assert credit.run(line) == 2
    assert "holds one prompt, so there is no contrast" in capsys.readouterr().err
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("raised", "code", "printed"),
    [
        (subprocess.CalledProcessError(3, "python"), 3, ""),
        (subprocess.CalledProcessError(-9, "python"), 137, "signal 9 (Killed) ended the process"),
        (KeyboardInterrupt(), 130, "`--resume_from_checkpoint latest` continues from a saved step"),
        (SignalException("one of several", signal.SIGHUP), 129, "continues from a saved step"),
        (ValueError("You need to use at least 2 processes"), 2, "at least 2 processes"),
    ],
)
def test_ended_launches_return_their_code_without_traceback(monkeypatch, capfd, raised, code, printed):
    def fail(args):
        assert not args.quiet  # accelerate's exit code would be 1
        raise raised

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fail)
    assert credit.run([*ON_CPU, "--quiet"]) == code
    error = capfd.readouterr().err
    assert printed in error
    assert error.count("\n") == bool(printed)


@pytest.mark.parametrize(("line", "module", "printed"), TABLES["interrupted"])
def test_interrupted_command_prints_one_line(monkeypatch, capsys, line, module, printed):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"credit_trl.cli.{module}", interrupt)
    assert cli.main(line.split()) == 130
    assert capsys.readouterr().err == printed


def test_option_of_the_sandbox_selects_it(monkeypatch, tmp_path):
    monkeypatch.setenv(CHOICE, "")
    config = tmp_path / "run.yaml"
    config.write_text("reward_funcs: a.b, c.d\nsandbox: landlock\n")
    script, *_ = training.make_parser().parse_args_and_config(["--config", str(config), *ON_CPU])
    assert script.reward_funcs == ["a.b", "c.d"]  # a text in YAML is a list of names
    assert os.environ[CHOICE] == "landlock"


def test_unsupported_trl_is_one_line_of_a_command(monkeypatch, tmp_path, capsys):
    (tmp_path / "needs_identity.py").write_text("from credit_trl.trl_compat import identity\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMPANIONS, "credit-report", ("needs_identity", ""))
    monkeypatch.setitem(MODULES, "identity", "trl.trainer.moved_utils")
    assert cli.main(["credit-report"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert re.match("trl credit-report: error: TRL .* has no module .*, so .*: pip install", line)


@pytest.mark.parametrize(
    ("module", "says"), [("credit_trl", "is of credit-trl"), ("trl", "is TRL's own"), (None, "no `trl`")]
)
def test_version_says_which_trl_is_on_the_path(monkeypatch, tmp_path, capsys, module, says):
    if module is not None:
        script = tmp_path / "trl"
        script.write_text(f"#!/usr/bin/env python\nfrom {module}.cli import main\nmain()\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["--version"]) == 0
    versions, place = capsys.readouterr().out.splitlines()
    assert versions == f"trl {version('trl')}, credit-trl {version('credit-trl')}"
    assert says in place
    assert module is None or str(tmp_path / "trl") in place
    assert ("reinstall credit-trl with `pip" in place) == (module == "trl")


@pytest.mark.parametrize(("line", "starts"), TABLES["processes"])
def test_as_many_processes_start_as_are_asked_for(line, starts, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    (tmp_path / "fsdp.yaml").write_text(TABLES["fsdp"])
    monkeypatch.chdir(tmp_path)
    launched = credit.launch_arguments([*line.split(), "--task", "quickstart", *ON_CPU])
    assert {name: getattr(launched, name) for name in starts} == starts
