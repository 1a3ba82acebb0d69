"""Every code block of the documentation is executed. How, by language:

- `python`: the blocks of a page are executed one after another in one namespace, in a folder that holds the files
  which the page speaks of (`page_files.py`). Three things are made small: `Qwen/…` becomes a tiny random model on
  disk, `CreditConfig` gets the options of `SMALL`, and a page of `NEEDS_TRAINER` starts with a trainer.
- `bash`: this project's own commands run here, in this process, to their end: `trl credit` parses, checks and resolves
  its launcher's arguments, and trains a step as a process of its launcher would; the others write what they write.
  Lines of other programs, and launches, run in `test_shell_blocks.py`, `test_installation.py`, `tests/vllm_engine/`.
- `yaml`: a step is trained with it, where no command line names it; a sweep runs.
- `toml`: a package with it is built and installed, and its entry point trains a step.
- `json`: is the record that the page's `credit-map --responses` maps.
- `text`: what the project prints, and a diagram. Each has a test of its own, and none holds a command.

What runs nowhere is in `NOT_RUN` with its reason (`substitutions.py`), and what no rule knows fails
`test_nothing_is_left_out`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import chdir
from itertools import pairwise
from pathlib import Path

import pytest
import tomllib
import yaml
from blocks import (
    BLOCKS,
    COMMANDS,
    INSTALLING,
    PAGES,
    ROOT,
    Block,
    Command,
    blocks_of,
    calling,
    commands_of,
    of_language,
)
from datasets import Dataset
from page_files import MODULES, QUESTIONS, named_blocks
from substitutions import QUESTIONS_OF_THE_HUB, is_left

import credit_trl
from credit_trl import cli
from credit_trl.cli.credit import launch_arguments, parse
from credit_trl.cli.training import make_parser
from credit_trl.config import CreditConfig
from credit_trl.tasks import load_task

OFFLINE = ["--use_cpu", "true", "--bf16", "false"]
SMALL = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_generations": 2,
    "max_completion_length": 4,
    "max_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}
NEEDS_TRAINER = {"docs/evaluation.md", "docs/token_maps.md"}
# What has to run somewhere: language, or program of a command line → the test that does it.
HERE = "docs/test_code_blocks.py::"
SHELL = "docs/test_shell_blocks.py::"
EXECUTED = {
    "python": f"{HERE}test_python_blocks_run_from_top_to_bottom",
    "yaml": f"{HERE}test_yaml_blocks_train_a_step",
    "toml": f"{HERE}test_toml_blocks_make_a_task_of_an_installed_package",
    "json": f"{HERE}test_json_blocks_are_what_the_command_of_their_page_maps",
    "text": f"{HERE}test_text_blocks_are_shown_by_something_and_hide_no_command",
    "$ trl": f"{HERE}test_commands_of_this_project_run_to_their_end",
    "$ credit-trl": f"{HERE}test_commands_of_this_project_run_to_their_end",
    "$ pip": "docs/test_installation.py::test_the_documented_installation_runs_as_it_stands",
    "$ make": f"{SHELL}test_make_targets_are_steps_of_ci_or_run_in_a_copy",
    "$ python": f"{SHELL}test_scripts_run_from_the_line_that_their_page_gives",
    "$ accelerate": f"{SHELL}test_launches_train_a_step",
    "$ sbatch": f"{SHELL}test_launches_train_a_step",
    "$ vllm": "vllm_engine/test_server.py::test_after_every_update_the_server_samples_with_the_policy",
}


def test_nothing_is_left_out():
    """A block of another language, or a line of another program, fails here until it is executed somewhere."""
    programs = {command.program for command in COMMANDS if not is_left(command)}
    kinds = {block.language for block in BLOCKS} - {"bash"} | {f"$ {program}" for program in programs}
    assert kinds == EXECUTED.keys()
    for place in EXECUTED.values():
        file, _, name = place.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text("utf-8"), re.MULTILINE), place
    assert len(BLOCKS) >= 40
    assert len(COMMANDS) >= 40


class Read(Exception):
    """A script has read its line."""


SHELL_LINES = [c for block in BLOCKS if block.language in ("bash", "indented") for c in commands_of(block)]
LEFT = [command for command in SHELL_LINES if is_left(command)]


@pytest.mark.parametrize("command", LEFT, ids=str)
def test_lines_that_are_not_run_are_taken_by_their_scripts(command, monkeypatch):
    folder = (ROOT / command.block.page).parent if command.block.page.startswith("examples") else ROOT
    read = argparse.ArgumentParser.parse_args

    def read_and_stop(parser, *arguments):
        read(parser, *arguments)
        raise Read

    program, script, *options = command.words
    assert program == "python"
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read_and_stop)
    monkeypatch.setattr(sys, "argv", [script, *options])
    path = folder / script
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(Read):
        runpy.run_path(str(path), run_name="__main__")
    for name in {beside.stem for beside in path.parent.glob("*.py")} & sys.modules.keys():
        monkeypatch.delitem(sys.modules, name)


def test_blocks_are_found_however_they_are_written():
    page = "a\n\n```\nls\n```\n\n~~~bash\nmake x\n~~~\n\n    indented\n\n- in a list\n\n  ```yaml\n  a: 1\n  ```\n"
    assert [block.language for block in blocks_of(page, "page")] == ["", "bash", "indented", "yaml"]
    (command,) = commands_of(Block("page", 1, "bash", "A=1 x \\\n  --b 'c d'  # why"))
    assert (command.words, command.environment) == (("x", "--b", "c d"), (("A", "1"),))


PYTHON_PAGES = sorted({block.page for block in of_language("python")})


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python_blocks_run_from_top_to_bottom(page, tiny_model, page_folder, monkeypatch):
    small = functools.partial(_small_config, SMALL)
    monkeypatch.setattr(credit_trl, "CreditConfig", small, raising=False)
    namespace = {"__name__": "__main__"}
    if page in NEEDS_TRAINER:
        namespace["trainer"] = _trainer(tiny_model)
    for block in of_language("python"):
        if block.page != page:
            continue
        source = re.sub(r"(['\"])Qwen/[\w.-]+\1", repr(tiny_model), block.text)
        try:
            exec(compile("\n" * block.line + source, ROOT / page, "exec"), namespace)
        except Exception as error:
            if type(error).__name__ == "SandboxError":
                pytest.skip(f"no sandbox holds on this machine: {error}")
            raise


def test_the_example_of_the_trainers_docstring_trains(tiny_model, page_folder, monkeypatch):
    small = functools.partial(_small_config, SMALL)
    names = {"CreditTrainer": credit_trl.CreditTrainer, "CreditConfig": small, "Verdict": credit_trl.Verdict}
    (block,) = blocks_of(inspect.getdoc(credit_trl.CreditTrainer), "docstring")
    rows = Dataset.from_list(QUESTIONS)
    exec(block.text.replace("Qwen/Qwen3-0.6B", tiny_model), {**names, "dataset": rows})


def _small_config(small, *arguments, **options) -> CreditConfig:
    """What a block asks for, small; it has to be a configuration as it stands too, on this machine."""
    CreditConfig(*arguments, **{**options, "use_cpu": True, "bf16": False, "report_to": "none"})
    return CreditConfig(*arguments, **{**options, **small})


def _trainer(model: str) -> credit_trl.CreditTrainer:
    from tiny import length_verdicts

    return credit_trl.CreditTrainer(model, length_verdicts, CreditConfig("run", **SMALL), Dataset.from_list(QUESTIONS))


STEP = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
STEP += ["--max_train_rows", "8", "--eval_strategy", "no"]
EACH = {  # what makes a command beside `trl credit` small
    "credit-eval": ["--max_prompts", "2", "--k", "2", "--max_completion_length", "4"],
    "credit-map": ["--max_completion_length", "4", "--pictures", "1"],
    "credit-compat": ["--per_letter", "1", "--letters", "ABCD"],
}


def credit_words(arguments: list[str]) -> list[str]:
    """What the training process of `trl credit` would get: names, values and accelerate's arguments are checked."""
    argv = [_existing(word) if word.endswith((".yaml", ".yml")) else word for word in arguments] + OFFLINE
    parser = make_parser(prog="trl credit")
    launcher, arguments = launch_arguments(argv, *parse(parser, argv)[-2:])
    return launcher.parse_args(arguments).training_script_args


def _existing(name: str) -> str:
    """A file of the page's folder or of the repository; an accelerate configuration of TRL's has no folder."""
    if Path(name).exists():
        return name
    assert (ROOT / name).exists(), f"{name} does not exist"
    return str(ROOT / name)


def _is_a_whole_sweep(command: Command) -> bool:
    return command.words[1] == "credit-sweep" and "--dry_run" not in command.words


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=str(command), marks=[pytest.mark.slow] if _is_a_whole_sweep(command) else [])
        for command in calling("trl", "credit-trl")
        if command.block not in INSTALLING  # in the new environment that its block makes: test_installation.py
    ],
)
def test_commands_of_this_project_run_to_their_end(command, tiny_model, page_folder, monkeypatch):
    run_own(command, tiny_model, page_folder, monkeypatch)


def run_own(command: Command, model: str, folder: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(folder)
    name, *arguments = [re.sub(r"^(Qwen|allenai)/.*", model, word) for word in command.words[1:]]
    if name == "credit":
        train_a_step(arguments, model, Path("run"))
        return
    prepare(name, arguments, model)
    if any(word.startswith("sciknoweval:") for word in arguments):
        arguments += ["--path", QUESTIONS_OF_THE_HUB]
    with chdir(ROOT if name == "credit-plan" else folder):  # recipes lie there
        assert cli.main([name, *arguments, *EACH.get(name, [])]) == 0


def train_a_step(arguments: list[str], model: str, output: Path) -> None:
    """What a process of `trl credit` does, on rows that are here where the line names the hub's."""
    from credit_trl.cli import training

    line = [*credit_words(arguments), *STEP, "--model_name_or_path", model, "--output_dir", str(output)]
    if "--dataset_path" not in line and "--reward_funcs" not in line:
        line += ["--dataset_path", QUESTIONS_OF_THE_HUB]
    assert training.run(line) == 0
    assert (output / "model.safetensors").is_file()


def prepare(name: str, arguments: list[str], model: str) -> None:
    """The checkpoint, the maps, the runs or the models that a line speaks of."""
    for option, path in pairwise(arguments):
        if option == "--checkpoint":
            shutil.copytree(model, path)
    for path in (Path(word) for word in arguments if word.endswith(".parquet")):
        own = shutil.copytree(model, path.parts[1])  # maps of one response are told apart by their models
        drawn = ["credit-map", "--model", str(own), "--responses", "mine.jsonl", "--output_dir", "drawn"]
        assert cli.main([*drawn, *EACH[name]]) == 0
        path.parent.mkdir(parents=True)
        shutil.move("drawn/maps.parquet", path)
    if name == "credit-compare":
        methods = {"grpo": ["--distillation_weight", "0"], "sdpo": ["--contrastive_coef", "0"], "credit": []}
        for run in (Path(word) for word in arguments if word.startswith("runs/")):
            line = ["--task", "sciknoweval:physics", "--gradient_accumulation_steps", "8", *methods[run.name]]
            train_a_step([*line, "--avg_at_k", "1", "--max_eval_rows", "2"], model, run)
    if name == "credit-sweep":
        make_small(Path(arguments[0]), model)


def make_small(sweep: Path, model: str) -> None:
    """A sweep's file with every arm that it has, for one seed, one step and a tiny model in this process."""
    spec = yaml.safe_load(sweep.read_text("utf-8"))
    spec["config"] |= {**SMALL, "per_device_train_batch_size": 8}
    spec["evaluation"] |= {"k": 1, "eval_steps": 1, "max_prompts": 2, "keep_best": False}
    spec |= {"model": model, "seeds": spec["seeds"][:1], "data": {"path": QUESTIONS_OF_THE_HUB}, "launcher": "inline"}
    sweep.write_text(yaml.safe_dump(spec), encoding="utf-8")


def test_a_line_with_a_mistake_in_it_fails(tiny_model, page_folder, monkeypatch):
    """The test above can."""
    wrong = [
        "trl credit --task sciknoweval:physics --gradient_accumulation_steps 8 --contrastive_coeff 0.1",
        "trl credit --task sciknoweval:physics --gradient_accumulation_steps 8 --contrastive_coef 2",
        "trl credit-map --modle quickstart",
        "trl credit --config no_such.yaml",
        "trl credits",
    ]
    for line in wrong:
        (command,) = commands_of(Block("page", 1, "bash", line))
        with pytest.raises((AssertionError, ValueError, SystemExit)):
            run_own(command, tiny_model, page_folder, monkeypatch)


NAMED = {word for command in COMMANDS for word in command.words if word.endswith(".yaml")}


def test_every_yaml_block_is_a_file_with_a_name():
    """So that a command line can name it, and the test below knows which none does."""
    assert len(named_blocks()) == len(of_language("yaml"))


@pytest.mark.parametrize("name", [name for name in named_blocks() if name not in NAMED])
def test_yaml_blocks_train_a_step(name, tiny_model, page_folder):
    """What no command line names generates with vLLM: here without, in `tests/vllm_engine` in both modes."""
    options = yaml.safe_load((page_folder / name).read_text("utf-8"))
    assert options["use_vllm"] is True
    line = ["--config", name, "--use_vllm", "false", "--task", "sciknoweval:physics"]
    train_a_step(line, tiny_model, Path("run"))


@pytest.mark.parametrize("block", of_language("toml"), ids=str)
def test_toml_blocks_make_a_task_of_an_installed_package(block: Block, tiny_model, page_folder, monkeypatch):
    pytest.importorskip("hatchling", reason="needs hatchling: pip install 'credit-trl[dev]'")
    ((name, target),) = tomllib.loads(block.text)["project"]["entry-points"]["credit_trl.tasks"].items()
    module, _, attribute = target.partition(":")
    package, _, inner = module.partition(".")
    source = page_folder / "source"
    (source / package).mkdir(parents=True)
    (source / package / "__init__.py").touch()
    own = MODULES["my_task.py"].replace("MyTask", attribute)
    (source / package / f"{inner}.py").write_text(own, encoding="utf-8")
    head = '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
    project = f'[project]\nname = "{package}"\nversion = "0"\n'
    (source / "pyproject.toml").write_text(head + project + block.text, encoding="utf-8")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*install, "--target", "site", "./source"], check=True, timeout=120)
    monkeypatch.syspath_prepend(page_folder / "site")
    importlib.invalidate_caches()
    train_a_step(["--task", name, "--gradient_accumulation_steps", "8"], tiny_model, Path("run"))
    with pytest.raises(ValueError, match=f"Known tasks: {name},"):
        load_task("nobody")


@pytest.mark.parametrize("block", of_language("json"), ids=str)
def test_json_blocks_are_what_the_command_of_their_page_maps(block: Block, tiny_model, page_folder, monkeypatch):
    assert (page_folder / "mine.jsonl").read_text("utf-8").count("\n") == 1  # this block alone
    (command,) = (c for c in calling("trl") if c.block.page == block.page and "mine.jsonl" in c.words)
    run_own(command, tiny_model, page_folder, monkeypatch)
    assert json.loads(block.text)["prompt"] in (page_folder / "credit_map" / "maps.html").read_text("utf-8")


# Output and diagrams: where each is held against what the project does.
SHOWN = {
    "held-out avg@4, %": "cli/test_quickstart_command.py::test_the_readme_shows_what_is_printed",
    "rollout ──► verdict ──► contexts ──► scores ──► objective": f"{HERE}test_the_diagram_names_the_five_stages",
}
OTHER_PROGRAMS = "git docker srun scontrol curl cd export conda uv apt apt-get mkdir torchrun python3 pip3 sh ls"


def test_text_blocks_are_shown_by_something_and_hide_no_command():
    assert [block for block in BLOCKS if block.language in ("", "indented")] == []
    programs = {kind.removeprefix("$ ") for kind in EXECUTED if kind.startswith("$ ")} | set(OTHER_PROGRAMS.split())
    for block in of_language("text"):
        (place,) = (place for beginning, place in SHOWN.items() if block.text.lstrip().startswith(beginning))
        file, _, name = place.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text("utf-8")
        for words in filter(None, map(str.split, block.text.splitlines())):
            assert words[0] not in programs, f"{block} hides a command: label it bash"
            assert not any(re.match(r"--?[a-z]", word) for word in words), f"{block} hides a command"


def test_the_diagram_names_the_five_stages():
    from credit_trl.cli.quickstart import STAGES

    (diagram,) = (block.text for block in of_language("text") if "──►" in block.text)
    named = diagram.splitlines()[0].replace("──►", " ").split()
    assert (*named[:-1], "update") == STAGES  # the objective is what the update minimises


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_relative_links_lead_somewhere(path: Path):
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    folder = ROOT / "docs" if path.name == "findings.md" else path.parent  # report.py makes it a part of a page
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http", "#", "mailto")):
            assert (folder / target.partition("#")[0]).exists(), f"{path.name}: {target}"
