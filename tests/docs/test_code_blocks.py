"""Run every code block of the documentation, by language:

- `python`: the blocks of a page run in order in one namespace, in a folder with the files that the page names
  (`page_files.py`). `Qwen/…` is replaced by a tiny random model on disk, `CreditConfig` gets the options of `SMALL`,
  and pages in `NEEDS_TRAINER` start with a trainer.
- `bash`: commands of this project run in this process. `trl credit` parses, checks and resolves its launcher's
  arguments and trains one step as a process of its launcher would. Lines of other programs, and launches, run in
  `test_shell_blocks.py`, `test_installation.py` and `tests/vllm_engine/`.
- `yaml`: one step is trained with it, unless a command line names it; a sweep runs.
- `toml`: a package with it is built and installed, and its entry point trains one step.
- `json`: the record that the page's `credit-map --responses` maps.
- `text`: output of the project, or a diagram. Each has its own test, and none contains a command.

Lines that are not run are in `NOT_RUN` with a reason (`substitutions.py`). A block that no rule covers fails
`test_every_kind_of_block_is_run`.
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
import tomllib
from contextlib import chdir
from itertools import pairwise
from pathlib import Path

import pytest
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
from substitutions import HUB_ROWS, NOT_RUN_INLINE, is_not_run

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
# Language, or program of a command line → the test that runs it.
HERE = "docs/test_code_blocks.py::"
SHELL = "docs/test_shell_blocks.py::"
EXECUTED = {
    "python": f"{HERE}test_python_blocks_run_from_top_to_bottom",
    "yaml": f"{HERE}test_yaml_blocks_train_a_step",
    "toml": f"{HERE}test_toml_blocks_register_a_task",
    "json": f"{HERE}test_json_blocks_are_mapped_by_their_page",
    "text": f"{HERE}test_text_blocks_are_tested_and_hide_no_command",
    "$ trl": f"{HERE}test_commands_of_this_project_succeed",
    "$ pip": "docs/test_installation.py::test_documented_installation_runs_unchanged",
    "$ make": f"{SHELL}test_make_targets_run_in_ci_or_in_a_copy",
    "$ python": f"{SHELL}test_documented_script_lines_run",
    "$ accelerate": f"{SHELL}test_documented_launches_train_a_step",
    "$ sbatch": f"{SHELL}test_documented_launches_train_a_step",
    "$ vllm": "vllm_engine/test_server.py::test_server_samples_with_policy_weights_after_each_update",
}


def test_every_kind_of_block_is_run():
    """Fails for a block of a new language, or a line of a new program, until a test runs it."""
    programs = {command.program for command in COMMANDS if not is_not_run(command)}
    kinds = {block.language for block in BLOCKS} - {"bash"} | {f"$ {program}" for program in programs}
    assert kinds == EXECUTED.keys()
    for place in EXECUTED.values():
        file, _, name = place.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text("utf-8"), re.MULTILINE), place
    assert len(BLOCKS) >= 40
    assert len(COMMANDS) >= 40


# Where a new user comes from → the page to copy from, and its section that reaches a training step.
NEW_USERS = {
    "GRPO": ("docs/moving_over.md", "From TRL's GRPO"),
    "SDPO": ("docs/moving_over.md", "From TRL's SDPO"),
    "GKD or DistillationTrainer": ("docs/moving_over.md", "From TRL's DistillationTrainer or GKD"),
    "own JSONL and verifier": ("docs/verifiers.md", "From the command line"),
    "a node of eight GPUs": ("docs/first_node.md", "First step"),
}


@pytest.mark.parametrize("user", NEW_USERS)
def test_each_new_user_reaches_a_step_on_one_page(user):
    """Other tests run the blocks; this one shows that they train, and that no other command is on the page."""
    page, section = NEW_USERS[user]
    text = (ROOT / page).read_text("utf-8")
    part = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    blocks = list(blocks_of(part, page))
    commands = [command for block in blocks if block.language == "bash" for command in commands_of(block)]
    trains = any("trainer.train()" in block.text for block in blocks if block.language == "python")
    assert trains or any(command.words[:2] == ("trl", "credit") and not is_not_run(command) for command in commands)
    programs = "|".join(sorted({command.program for command in COMMANDS} | {"hf", "python3"}))
    inline = re.findall(rf"`((?:{programs}) [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert [command for command in inline if not command.startswith((*NOT_RUN_INLINE, "trl credit-plan"))] == []


class Parsed(Exception):
    """A script has parsed its arguments."""


SHELL_LINES = [c for block in BLOCKS if block.language in ("bash", "indented") for c in commands_of(block)]
SKIPPED = [command for command in SHELL_LINES if is_not_run(command)]


@pytest.mark.parametrize("command", SKIPPED, ids=str)
def test_lines_that_are_not_run_parse(command, monkeypatch):
    folder = (ROOT / command.block.page).parent if command.block.page.startswith("examples") else ROOT
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, *arguments):
        parse_args(parser, *arguments)
        raise Parsed

    program, script, *options = command.words
    if program == "vllm":
        (runs,) = (line for line in calling("vllm") if not is_not_run(line))
        assert set(runs.words) <= set(command.words)
        return
    assert program == "python"
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [script, *options])
    path = folder / script
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(Parsed):
        runpy.run_path(str(path), run_name="__main__")
    for name in {beside.stem for beside in path.parent.glob("*.py")} & sys.modules.keys():
        monkeypatch.delitem(sys.modules, name)


def test_fenced_indented_and_nested_blocks_are_found():
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


def test_example_in_trainer_docstring_trains(tiny_model, page_folder, monkeypatch):
    small = functools.partial(_small_config, SMALL)
    names = {"CreditTrainer": credit_trl.CreditTrainer, "CreditConfig": small, "Verdict": credit_trl.Verdict}
    (block,) = blocks_of(inspect.getdoc(credit_trl.CreditTrainer), "docstring")
    rows = Dataset.from_list(QUESTIONS)
    exec(block.text.replace("Qwen/Qwen3-0.6B", tiny_model), {**names, "dataset": rows})


def _small_config(small, *arguments, **options) -> CreditConfig:
    """A block's configuration with small sizes; the original must be valid on this machine too."""
    CreditConfig(*arguments, **{**options, "use_cpu": True, "bf16": False, "report_to": "none"})
    return CreditConfig(*arguments, **{**options, **small})


def _trainer(model: str) -> credit_trl.CreditTrainer:
    from tiny import length_verdicts

    return credit_trl.CreditTrainer(model, length_verdicts, CreditConfig("run", **SMALL), Dataset.from_list(QUESTIONS))


STEP = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
STEP += ["--max_train_rows", "8", "--eval_strategy", "no"]
# Of the recipes, in place of vLLM, 256 rollouts, and 16 completions per evaluation.
RECIPE = "--use_vllm false --generation_batch_size 4 --avg_at_k 1 --max_eval_rows 2 --dtype float32".split()
EACH = {  # options that make the other commands small
    "credit-eval": ["--max_prompts", "2", "--k", "2", "--max_completion_length", "4"],
    "credit-map": ["--max_completion_length", "4", "--pictures", "1"],
    "credit-compat": ["--per_letter", "1", "--letters", "ABCD"],
}


def credit_words(arguments: list[str]) -> list[str]:
    """Arguments of the training process of `trl credit`; names, values and accelerate's arguments are checked."""
    argv = [_existing(word) if word.endswith((".yaml", ".yml")) else word for word in arguments] + OFFLINE
    parser = make_parser(prog="trl credit")
    return launch_arguments(argv, *parse(parser, argv)[-2:]).training_script_args


def _existing(name: str) -> str:
    """Path of a file in the page's folder or in the repository."""
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
        if command.block not in INSTALLING  # in test_installation.py
    ],
)
def test_commands_of_this_project_succeed(command, tiny_model, page_folder, monkeypatch):
    run_own(command, tiny_model, page_folder, monkeypatch)


def run_own(command: Command, model: str, folder: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(folder)
    name, *arguments = [re.sub(r"^(Qwen|allenai)/.*", model, word) for word in command.words[1:]]
    if name == "credit":
        train_a_step(arguments, model, Path("run"))
        return
    prepare(name, arguments, model)
    if any(word.startswith("sciknoweval:") for word in arguments):
        arguments += ["--path", HUB_ROWS]
    with chdir(ROOT if name == "credit-plan" else folder):  # for its recipes
        assert cli.main([name, *arguments, *EACH.get(name, [])]) == 0


def train_a_step(arguments: list[str], model: str, output: Path) -> None:
    """Train one step as a process of `trl credit` does, with local rows in place of the hub's."""
    from credit_trl.cli import training

    line = [*credit_words(arguments), *STEP, "--model_name_or_path", model, "--output_dir", str(output)]
    if any(word.endswith("_qwen3_8b.yaml") for word in line):
        line += RECIPE
    if "--dataset_path" not in line and "--reward_funcs" not in line:
        line += ["--dataset_path", HUB_ROWS]
    assert training.run(line) == 0
    assert (output / "model.safetensors").is_file()


def prepare(name: str, arguments: list[str], model: str) -> None:
    """Create the checkpoints, maps, runs and models that a line names."""
    for option, path in pairwise(arguments):
        if option == "--checkpoint":
            shutil.copytree(model, path)
    for path in (Path(word) for word in arguments if word.endswith(".parquet")):
        own = shutil.copytree(model, path.parts[1])  # the model's path distinguishes maps of one response
        draw = ["credit-map", "--model", str(own), "--responses", "mine.jsonl", "--output_dir", "drawn"]
        assert cli.main([*draw, *EACH[name]]) == 0
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
    """Reduce a sweep file to one seed, one step and a tiny model in this process, with all of its arms."""
    spec = yaml.safe_load(sweep.read_text("utf-8"))
    spec["config"] |= {**SMALL, "per_device_train_batch_size": 8}
    spec["evaluation"] |= {"k": 1, "eval_steps": 1, "max_prompts": 2, "keep_best": False}
    spec |= {"model": model, "seeds": spec["seeds"][:1], "data": {"path": HUB_ROWS}, "launcher": "inline"}
    sweep.write_text(yaml.safe_dump(spec), encoding="utf-8")


def test_a_command_line_with_an_error_fails(tiny_model, page_folder, monkeypatch):
    """Shows that `test_commands_of_this_project_succeed` can fail."""
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


def test_every_yaml_block_has_a_file_name():
    """A name lets command lines refer to a block, and shows which blocks no line uses."""
    assert len(named_blocks()) == len(of_language("yaml"))


@pytest.mark.parametrize("name", [name for name in named_blocks() if name not in NAMED])
def test_yaml_blocks_train_a_step(name, tiny_model, page_folder):
    """Blocks without a command line use vLLM: without it here, with it in `tests/vllm_engine`."""
    options = yaml.safe_load((page_folder / name).read_text("utf-8"))
    assert options["use_vllm"] is True
    line = ["--config", name, "--use_vllm", "false", "--task", "sciknoweval:physics"]
    train_a_step(line, tiny_model, Path("run"))


@pytest.mark.parametrize("block", of_language("toml"), ids=str)
def test_toml_blocks_register_a_task(block: Block, tiny_model, page_folder, monkeypatch):
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
def test_json_blocks_are_mapped_by_their_page(block: Block, tiny_model, page_folder, monkeypatch):
    assert (page_folder / "mine.jsonl").read_text("utf-8").count("\n") == 1  # only this block
    (command,) = (c for c in calling("trl") if c.block.page == block.page and "mine.jsonl" in c.words)
    run_own(command, tiny_model, page_folder, monkeypatch)
    assert json.loads(block.text)["prompt"] in (page_folder / "credit_map" / "maps.html").read_text("utf-8")


# Beginning of a text block → the test that compares it with the project.
SHOWN = {
    "step  12/100": "training/test_console.py::test_documented_line_is_what_a_log_prints",
    "held-out avg@4, %": "cli/test_quickstart_command.py::test_readme_shows_the_printed_report",
    "rollout ──► verdict ──► contexts ──► scores ──► objective": f"{HERE}test_diagram_names_the_five_stages",
}
OTHER_PROGRAMS = "git docker srun scontrol curl cd export conda uv apt apt-get mkdir torchrun python3 pip3 sh ls"


def test_text_blocks_are_tested_and_hide_no_command():
    assert [block for block in BLOCKS if block.language in ("", "indented")] == []
    programs = {kind.removeprefix("$ ") for kind in EXECUTED if kind.startswith("$ ")} | set(OTHER_PROGRAMS.split())
    for block in of_language("text"):
        (place,) = (place for beginning, place in SHOWN.items() if block.text.lstrip().startswith(beginning))
        file, _, name = place.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text("utf-8")
        for words in filter(None, map(str.split, block.text.splitlines())):
            assert words[0] not in programs, f"{block} contains a command: label it bash"
            assert not any(re.match(r"--?[a-z]", word) for word in words), f"{block} contains a command"


def test_diagram_names_the_five_stages():
    from credit_trl.cli.quickstart_report import STAGES

    (diagram,) = (block.text for block in of_language("text") if "──►" in block.text)
    named = diagram.splitlines()[0].replace("──►", " ").split()
    assert (*named[:-1], "update") == STAGES  # the update minimises the objective


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_relative_links_have_a_target(path: Path):
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    folder = path.parent
    if path == ROOT / "examples" / "study" / "findings.md":  # report.py includes it in a page of results/
        folder /= "results"
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http", "#", "mailto")):
            assert (folder / target.partition("#")[0]).exists(), f"{path.name}: {target}"
