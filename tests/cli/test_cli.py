"""The `trl` script: TRL's commands unchanged, and the `credit` commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from trl.cli.commands import get_commands

from credit_trl import cli
from credit_trl.cli import credit, training
from credit_trl.sandbox import PACKAGES
from credit_trl.tasks.registry import load_task
from credit_trl.training.preemption import REQUEUE
from tiny import SHARED_DATA

ROOT = Path(__file__).parents[2]


def run(*argv: str, cwd: Path | None = None, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "credit_trl", *argv]
    return subprocess.run(
        command, cwd=cwd or ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_both_scripts_run_the_same_program():
    scripts = {p.name: p.value for p in entry_points(group="console_scripts") if p.value.startswith("credit_trl")}
    assert scripts == {"trl": "credit_trl.cli:main", "credit-trl": "credit_trl.cli:main"}


def test_help_lists_commands_of_trl_and_of_this_package(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out
    for name in [command.name for command in get_commands()] + ["credit", *cli.COMPANIONS]:
        assert f"    {name} " in listed or f"    {name}\n" in listed, name
    assert cli.main([]) == 0
    assert "credit" in capsys.readouterr().out


def test_help_of_companion_commands_loads_neither_torch_nor_trl():
    code = (
        "import argparse, importlib, sys\n"
        f"for module in {[module for module, _ in cli.COMPANIONS.values()]}:\n"
        "    importlib.import_module(module).add_arguments(argparse.ArgumentParser())\n"
        "print([name for name in ('torch', 'trl', 'transformers', 'datasets') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("argv", [["sft", "--help"], ["grpo", "--help"], ["env"]])
def test_trl_commands_receive_the_unchanged_line(monkeypatch, argv):
    given = []
    monkeypatch.setattr("trl.cli.main", lambda line: given.append(line) or 0)
    assert cli.main(argv) == 0
    assert given == [argv]


@pytest.mark.parametrize(
    ("command", "meant"), [("credits", "credit"), ("credit-mapp", "credit-map"), ("grop", "grpo")]
)
def test_misspelt_command_suggests_the_nearest_one(capsys, command, meant):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--config", "run.yaml"])
    assert ended.value.code == 2
    assert f"there is no command {command!r}. Did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.slow
def test_sft_help_equals_that_of_trl():
    ours = run("sft", "--help")
    environment = {**os.environ, "COLUMNS": "200"}
    theirs = subprocess.run(
        [sys.executable, "-c", "import sys; from trl.cli import main; sys.exit(main(['sft', '--help']))"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ours.returncode == theirs.returncode == 0
    assert ours.stdout == theirs.stdout
    assert "usage: trl sft" in ours.stdout


def test_credit_help_shows_options_and_symbols(capsys):
    with pytest.raises(SystemExit):
        credit.run(["--help"])
    shown = capsys.readouterr().out
    assert "usage: trl credit" in shown
    for option in ("--contrastive_coef", "--contrastive_count", "--distillation_support", "--task", "--use_peft"):
        assert option in shown
    assert "λ, the weight of the input-generic baseline" in " ".join(shown.split())


def test_eval_finds_a_task_of_the_working_directory(tmp_path, monkeypatch, capsys):
    (tmp_path / "task_of_this_folder.py").write_text("class Own:\n    build = verify = print\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("credit_trl.evaluation.protocol.evaluate", lambda model, task, **_: load_task(task).name)
    assert cli.main(["credit-eval", "--model", "any", "--task", "task_of_this_folder:Own"]) == 0
    assert capsys.readouterr().out == "task_of_this_folder:Own\n"


@pytest.fixture
def launched(monkeypatch):
    """Arguments of the launches, none of which is started."""
    calls = []
    monkeypatch.setattr("accelerate.commands.launch.launch_command", calls.append)
    return calls


def test_arguments_are_split_between_trainer_and_accelerate(launched, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        "task: quickstart\nuse_cpu: true\nbf16: false\nnum_processes: 2\ngradient_accumulation_steps: 4\n"
    )
    code = credit.run(
        ["--config", str(config), "--contrastive_coef", "0.2", "--mixed_precision", "no", "--output_dir", "out"]
    )
    assert code == 0
    (args,) = launched
    assert args.training_script == "credit_trl.cli.training"
    assert args.module
    assert (args.num_processes, args.mixed_precision) == (2, "no")
    assert args.training_script_args == ["--config", str(config), "--contrastive_coef", "0.2", "--output_dir", "out"]


def test_config_file_after_an_equals_sign_is_read(launched, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("use_cpu: true\nbf16: false\ngradient_accumulation_steps: 4\n")
    assert credit.run([f"--config={config}", "--contrastive_coef=0.2"]) == 0
    assert launched[0].training_script_args == ["--config", str(config), "--contrastive_coef=0.2"]


@pytest.mark.parametrize("command", ["credit", "credit-plan"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{0}/first.yaml", "unexpected `{0}/first.yaml`; did you mean `--config {0}/first.yaml`?"),
        ("train.py --config {0}/first.yaml", "unexpected `train.py`; every value follows its option"),
    ],
)
def test_word_without_an_option_is_no_program(launched, tmp_path, capsys, command, line, message):
    (tmp_path / "first.yaml").write_text("task: quickstart\nuse_cpu: true\nbf16: false\n")
    assert cli.main([command, *line.format(tmp_path).split()]) == 2
    assert message.format(tmp_path) in capsys.readouterr().err
    assert not launched


def test_options_of_several_files_are_merged(monkeypatch, tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("env: {FIRST: a, BOTH: a}\ntask: quickstart\ntop_p: 0.5\nuse_cpu: true\nmax_steps: 5\n")
    second.write_text("env: {BOTH: b}\ntask: null\ntop_p: 0.9\nbf16: false\nmax_steps: 6\nnum_processes: 1\n")
    seen = []
    for name in ("FIRST", "BOTH"):
        monkeypatch.setenv(name, "")

    def read(launched):
        parser, words = training.make_parser(), launched.training_script_args
        script, config, *_ = parser.parse_args_and_config(words, fail_with_unknown_args=False)
        seen.append((script.task, config.top_p, config.max_steps, launched.num_processes))

    monkeypatch.setattr("accelerate.commands.launch.launch_command", read)
    line = ["--config", str(first), "--max_steps", "7", f"--config={second}", "--gradient_accumulation_steps", "4"]
    assert credit.run(line) == 0
    assert seen == [(None, 0.9, 7, 1)]
    assert (os.environ["FIRST"], os.environ["BOTH"]) == ("a", "b")


def test_batches_are_checked_for_the_launched_processes(launched, capsys):
    """Eight rollouts of one process are one prompt, sixteen of two processes are two prompts."""
    line = ["--use_cpu", "true", "--bf16", "false", "--per_device_train_batch_size", "8"]
    assert credit.run([*line, "--num_processes", "2"]) == 0
    assert len(launched) == 1
    assert credit.run(line) == 2
    assert "holds one prompt, so there is no contrast" in capsys.readouterr().err
    assert credit.run([*line, "--num_processes", "two"]) == 2
    assert "invalid whole number value: 'two'" in capsys.readouterr().err
    assert len(launched) == 1


def test_named_accelerate_config_is_resolved_as_by_trl(launched):
    line = ["--accelerate_config", "single_gpu", "--use_cpu", "true", "--bf16", "false"]
    assert credit.run([*line, "--gradient_accumulation_steps", "4"]) == 0
    assert launched[0].config_file.endswith("single_gpu.yaml")


@pytest.mark.parametrize(
    ("yaml", "line", "message"),
    [
        ("contrastive_coeff: 0.1\n", [], "--contrastive_coeff.*Did you mean --contrastive_coef?"),
        ("", ["--contrastive_coef", "2"], "`contrastive_coef` must be in [0, 1], got 2.0"),
        ("", ["--learning_rte", "1"], "Did you mean --learning_rate?"),
        ("task: quickstrat\n", [], "Unknown task 'quickstrat'. Did you mean 'quickstart'? Known tasks"),
        ("- a\n- b\n", [], "must contain a YAML mapping"),
        ("contrastive-coef: 0.1\n", [], "--contrastive-coef.*Did you mean --contrastive_coef?"),
        ("multi_gpu: true\n", [], "unexpected `True`; every value follows its option"),
        ("", ["--accelerate_config", "nowhere"], "neither a file nor a valid config"),
    ],
)
def test_user_errors_are_one_line_and_launch_nothing(launched, tmp_path, capsys, yaml, line, message):
    config = tmp_path / "run.yaml"
    config.write_text(yaml or "task: quickstart\n")
    base = ["--config", str(config), "--use_cpu", "true", "--bf16", "false", "--gradient_accumulation_steps", "4"]
    assert credit.run([*base, *line]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("trl credit: error: ")
    assert printed.count("\n") == 1
    assert all(part in printed for part in message.split(".*"))
    assert not launched


def test_missing_config_file_is_named(launched, capsys):
    assert credit.run(["--config", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(("ended", "code", "printed"), [(3, 3, ""), (-9, 137, "signal 9 (Killed) ended the process")])
def test_failed_run_returns_its_exit_code_without_traceback(monkeypatch, capfd, ended, code, printed):
    def fail(args):
        assert not args.quiet  # accelerate's exit code would be 1
        raise subprocess.CalledProcessError(ended, "python")

    monkeypatch.setattr("accelerate.commands.launch.launch_command", fail)
    line = ["--use_cpu", "true", "--bf16", "false", "--gradient_accumulation_steps", "4", "--quiet"]
    assert credit.run(line) == code
    error = capfd.readouterr().err
    assert printed in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("interruption", "code"), [(KeyboardInterrupt(), 130), (SignalException("one of several", signal.SIGHUP), 129)]
)
def test_interrupted_run_says_in_one_line_how_to_continue(monkeypatch, capfd, interruption, code):
    def interrupt(args):
        raise interruption

    monkeypatch.setattr("accelerate.commands.launch.launch_command", interrupt)
    assert credit.run(["--use_cpu", "true", "--bf16", "false", "--gradient_accumulation_steps", "4"]) == code
    error = capfd.readouterr().err
    assert "--resume_from_checkpoint latest" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("interrupted", ["make_trainer", "train"])
def test_interrupted_training_process_prints_no_traceback(monkeypatch, capfd, interrupted):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "make_trainer", lambda *args: None)
    monkeypatch.setattr(training, interrupted, interrupt)
    assert training.run(["--use_cpu", "true", "--bf16", "false", "--gradient_accumulation_steps", "4"]) == 130
    assert capfd.readouterr().err == ""


def test_interrupted_command_prints_one_line(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("credit_trl.cli.credit_compare.run", interrupt)
    assert cli.main(["credit-compare", "runs"]) == 130
    assert capsys.readouterr().err == "trl credit-compare: interrupted\n"


@pytest.mark.parametrize(("options", "continues"), [([], False), (["--output_dir", "out"], True)])
def test_interrupted_evaluation_with_a_folder_continues(monkeypatch, capsys, options, continues):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("credit_trl.cli.credit_eval.run", interrupt)
    assert cli.main(["credit-eval", "--model", "m", "--task", "t", *options]) == 130
    end = "; the same command continues" if continues else ""
    assert capsys.readouterr().err == f"trl credit-eval: interrupted{end}\n"


def test_arguments_that_accelerate_refuses_are_named_in_one_line(monkeypatch, capfd):
    line = ["--multi_gpu", "--num_processes", "1", "--use_cpu", "true", "--bf16", "false"]
    assert credit.run([*line, "--gradient_accumulation_steps", "4"]) == 2
    error = capfd.readouterr().err
    assert "at least 2 processes" in error
    assert "Traceback" not in error


def test_sigterm_outside_of_steps_ends_with_the_code_to_requeue(monkeypatch):
    monkeypatch.setattr(training, "make_trainer", lambda *args: None)
    monkeypatch.setattr(training, "train", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        training.run(["--use_cpu", "true", "--bf16", "false", "--gradient_accumulation_steps", "4"])
    assert ended.value.code == REQUEUE


def test_evaluation_is_not_written_into_a_training_run(tmp_path, capsys):
    (tmp_path / "run.json").write_text("{}")
    assert cli.main(["credit-eval", "--model", "m", "--task", "quickstart", "--output_dir", str(tmp_path)]) != 0
    assert "is the folder of a training run" in capsys.readouterr().err


def test_missing_data_names_the_options():
    script = training.CreditScriptArguments()
    with pytest.raises(ValueError, match="--task NAME"):
        training.load_data(script, None, wants_eval=False)
    with pytest.raises(ValueError, match="expected a dotted import path"):
        training.import_function("reward")
    with pytest.raises(ValueError, match=r"such as trl\.rewards\.accuracy_reward"):
        training.import_function("accuracy_reward")
    with pytest.raises(ValueError, match="has no `nothing_there`"):
        training.import_function("json.nothing_there")
    with pytest.raises(ValueError, match="give `--model_name_or_path"):
        training.resolve_model(None)


def test_reward_functions_are_imported_by_path(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def always(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    for name in ("my_rewards.always", "my_rewards:always"):
        assert training.import_function(name)(["a", "b"]) == [1.0, 1.0]


def test_string_in_yaml_is_a_list_of_names(monkeypatch, tmp_path):
    monkeypatch.setenv(PACKAGES, "")
    config = tmp_path / "run.yaml"
    config.write_text("reward_funcs: a.b, c.d\nsandbox_packages: numpy, torch\nuse_cpu: true\nbf16: false\n")
    line = ["--config", str(config), "--gradient_accumulation_steps", "4"]
    script, *_ = training.make_parser().parse_args_and_config(line)
    assert script.reward_funcs == ["a.b", "c.d"]
    assert os.environ[PACKAGES] == "numpy, torch"


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the real data in ../shared/data")
def test_example_config_trains_and_evaluates_on_real_questions(tmp_path):
    result = run(
        "credit",
        *("--config", "examples/sciknoweval_cpu.yaml"),
        *("--dataset_path", str(SHARED_DATA / "sciknoweval" / "physics-train.jsonl")),
        *("--eval_dataset_path", str(SHARED_DATA / "sciknoweval" / "physics-test.jsonl")),
        *("--output_dir", str(tmp_path / "run"), "--max_steps", "2", "--eval_steps", "2"),
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "720 kept" in result.stdout + result.stderr
    assert "80 kept" in result.stdout + result.stderr
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    steps = [entry for entry in state["log_history"] if "loss" in entry]
    assert all(entry["credit/frac_with_feedback"] == 1.0 for entry in steps)
    assert "rewards/sciknoweval:physics/mean" in steps[0]
    evaluation = json.loads((tmp_path / "run" / "eval_results.json").read_text())
    assert "eval_reward" in evaluation
    assert (tmp_path / "run" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", cli.COMPANIONS)
def test_every_companion_has_its_own_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: trl {name}" in capsys.readouterr().out


def test_sandbox_option_selects_the_sandbox(monkeypatch, capsys):
    from credit_trl.sandbox import CHOICE

    monkeypatch.setenv(CHOICE, "")
    line = ["--output_dir", "out", "--sandbox", "landlock", "--use_cpu", "--bf16", "false", "--contrastive_coef", "0"]
    script_args, *_ = training.make_parser().parse_args_and_config(line)
    assert (script_args.sandbox, os.environ[CHOICE]) == ("landlock", "landlock")
    with pytest.raises(ValueError, match="--sandbox docker: neither one of auto, bubblewrap"):
        training.make_parser().parse_args_and_config([*line[:3], "docker", *line[4:]])
    for command in ("credit-eval", "credit-map"):
        assert cli.main([command, "--model", "none", "--task", "quickstart", "--sandbox", "docker"]) == 1
        assert "--sandbox docker" in capsys.readouterr().err


def test_version_names_both_packages(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"trl \S+, credit-trl \S+\n", capsys.readouterr().out)


def test_output_whose_reader_ends_is_no_error():
    config = "examples/recipes/sciknoweval_qwen3_8b.yaml"
    line = [sys.executable, "-m", "credit_trl", "credit-plan", "--config", config, "--gpu", "h100"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        process.stdout.close()  # before the command writes
        error = process.stderr.read()
    assert process.returncode == 128 + signal.SIGPIPE
    assert error == ""


@pytest.mark.parametrize("locale", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}])
def test_characters_that_the_locale_lacks_are_spelled_out(locale):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    line = [sys.executable, "-m", "credit_trl", "credit-map", "--help"]
    environment |= {"PYTHONUTF8": "0", **locale}
    result = subprocess.run(line, env=environment, capture_output=True, cwd=ROOT, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-1000:]
    assert b"\\u03bb (default 0.1)" in result.stdout


def test_interruption_before_the_launch_is_one_line(monkeypatch, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(credit, "processes_of", interrupt)
    assert cli.main(["credit", "--task", "quickstart"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "trl credit: interrupted\n"


def test_map_without_matplotlib_fails_before_sampling(monkeypatch, capsys):
    monkeypatch.setattr("credit_trl.cli.credit_map.find_spec", lambda name: None)
    monkeypatch.setattr("credit_trl.cli.credit_map._make_maps", lambda args: pytest.fail("responses were sampled"))
    assert cli.main(["credit-map", "--model", "quickstart", "--task", "quickstart"]) == 1
    assert "pip install matplotlib, or give --pictures 0" in capsys.readouterr().err


@pytest.mark.slow
def test_training_whose_reader_ends_names_how_to_continue(tmp_path):
    options = ["--task", "quickstart", "--model_name_or_path", "quickstart", "--output_dir", str(tmp_path)]
    options += ["--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
    small = ["--per_device_train_batch_size", "4", "--num_generations", "2", "--max_completion_length", "4"]
    line = [sys.executable, "-m", "credit_trl.cli.training", *options, *small, "--max_steps", "1"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        process.stdout.close()  # before the run writes
        error = process.stderr.read()
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in error
    assert "`--resume_from_checkpoint latest` continues it" in error
