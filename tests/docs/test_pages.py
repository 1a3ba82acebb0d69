"""Blocks of the documentation run: Python as it stands with a tiny model, commands as far as their checks."""

import importlib
import re
from argparse import ArgumentParser
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from pages import PAGES, QUESTIONS, ROOT, blocks_of, commands_of, write_files, write_starter

import credit_trl
from credit_trl.cli import COMPANIONS
from credit_trl.cli.credit import launch_arguments, one_config, own_options
from credit_trl.config import CreditConfig
from tables import tables_of
from tiny import SMALL, length_verdicts, save_model

NEEDS_TRAINER = ("evaluation.md", "token_maps.md")
PROGRAMS = {"trl", "credit-trl", "make", "pip", "python", "sbatch", "accelerate", "vllm", "echo", "credit-report"}
PROGRAMS |= {"git", "gh"}  # of a release


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    from trl.chat_template_utils import qwen3_chat_template

    return save_model(tmp_path_factory.mktemp("model"), qwen3_chat_template)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_files(tmp_path)
    write_starter(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pages_with(*languages: str) -> list[Path]:
    return [page for page in PAGES if page.name != "CHANGELOG.md" and blocks_of(page, *languages)]


def small_config(*arguments, **options) -> CreditConfig:
    """A block's configuration with small sizes; the original must be valid on this machine too."""
    CreditConfig(*arguments, **{**options, "use_cpu": True, "bf16": False, "report_to": "none"})
    return CreditConfig(*arguments, **{**options, **SMALL})


@pytest.mark.parametrize("page", pages_with("python"), ids=lambda page: page.name)
def test_python_blocks_run_from_top_to_bottom(page, tiny_model, folder, monkeypatch):
    monkeypatch.setattr(credit_trl, "CreditConfig", small_config, raising=False)
    namespace = {"__name__": "__main__"}
    if page.name in NEEDS_TRAINER:
        config = CreditConfig("run", **SMALL)
        namespace["trainer"] = credit_trl.CreditTrainer(
            tiny_model, length_verdicts, config, Dataset.from_list(QUESTIONS)
        )
    for block in blocks_of(page, "python"):
        source = re.sub(r"(['\"])Qwen/[\w.-]+\1", repr(tiny_model), block.parsed)
        try:
            exec(compile("\n" * block.line + source, page, "exec"), namespace)
        except Exception as error:
            if type(error).__name__ == "SandboxError":
                pytest.skip(f"no sandbox holds on this machine: {error}")
            raise


@pytest.mark.parametrize("page", pages_with("bash"), ids=lambda page: page.name)
def test_commands_are_accepted_by_their_parsers(page, folder, monkeypatch):
    for block in blocks_of(page, "yaml"):
        if match := re.match(r"# (\w+\.yaml)\n", block.parsed):
            (folder / match[1]).write_text(block.parsed)
    for words in commands_of(page):
        check_command(words, page)


def check_command(words: list[str], page: Path) -> None:
    """Check that the files of a command exist, and that `trl credit` or a companion accepts its arguments."""
    program, *arguments = words
    assert program in PROGRAMS, words
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= {*targets}, words
    elif program in ("python", "sbatch") and not arguments[0].startswith("-"):
        assert (ROOT / arguments[0]).exists() or (page.parent / arguments[0]).exists(), words
    elif program in ("trl", "credit-trl") and arguments[0] == "credit":
        cpu = ["--use_cpu", "true", "--bf16", "false"]
        with one_config(*own_options([*arguments[1:], *cpu])) as line:
            launch_arguments(line)
    elif program in ("trl", "credit-trl"):
        parser = ArgumentParser()
        importlib.import_module(COMPANIONS[arguments[0]][0]).add_arguments(parser)
        parser.parse_args(arguments[1:])


def test_wrong_commands_fail():
    for line in tables_of(__file__)["wrong_commands"]:
        with pytest.raises((AssertionError, ValueError, SystemExit)):
            check_command(line.split(), ROOT / "README.md")


@pytest.mark.parametrize("page", pages_with("yaml"), ids=lambda page: page.name)
def test_yaml_blocks_are_configurations(page, folder):
    for block in blocks_of(page, "yaml"):
        (folder / "block.yaml").write_text(block.parsed)
        assert yaml.safe_load(block.parsed)
        line = ["--config", "block.yaml", "--use_cpu", "true", "--bf16", "false", "--use_vllm", "false"]
        launch_arguments(line)


@pytest.mark.parametrize("path", PAGES, ids=lambda page: page.name)
def test_relative_links_have_a_target(path):
    text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http", "#", "mailto")):
            assert (path.parent / target.partition("#")[0]).exists(), f"{path.name}: {target}"


def test_example_in_trainer_docstring_trains(tiny_model, folder):
    docstring = credit_trl.CreditTrainer.__doc__ or ""
    source = re.search(r"```python\n(.*?)```", docstring, re.DOTALL)[1]
    names = {"CreditTrainer": credit_trl.CreditTrainer, "CreditConfig": small_config, "Verdict": credit_trl.Verdict}
    lines = "\n".join(line.removeprefix("    ") for line in source.splitlines())
    exec(lines.replace("Qwen/Qwen3-0.6B", tiny_model), {**names, "dataset": Dataset.from_list(QUESTIONS)})
