"""Commands of the documentation that cost seconds are run, page by page and in order, with few steps."""

import re
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

import pytest
from pages import FILES, PAGES, ROOT, blocks_of, commands_of

from credit_trl import cli
from credit_trl.cli import training
from credit_trl.cli.credit import launch_arguments, one_config, own_options
from credit_trl.lab.report import run_callbacks
from tables import tables_of

TABLES = tables_of(__file__)
NOT_RUN = re.compile("|".join(TABLES["not_run"]))
FEW_STEPS = TABLES["few_steps"].split()


def pages_to_run() -> list[Path]:
    return [page for page in PAGES if any(not NOT_RUN.match(" ".join(words)) for words in commands_of(page))]


def train(arguments: list[str]) -> None:
    """Train as `trl credit` does, in this process and with few steps."""
    if "--recipe" in arguments:
        arguments = [*arguments, "--small", "--dataset_path", str(FILES / "data" / "chemistry.jsonl")]
    if "--dataset_path" not in arguments and "--config" not in arguments:
        arguments = [*arguments, "--dataset_path", "questions.jsonl"]
    with one_config(*own_options([*arguments, *FEW_STEPS])) as line:
        assert training.run(launch_arguments(line).training_script_args) == 0, arguments


def run(words: list[str]) -> None:
    program, *arguments = words
    if program == "make":
        words = [*words, f"BIN={Path(sys.executable).parent}", "INSTALLED="]
    elif arguments[:2] == ["-m", "pytest"]:
        words = [sys.executable, *arguments, "--collect-only"]
    elif program == "python":
        words = [sys.executable, *arguments]
    elif arguments[0] == "credit":
        return train(arguments[1:])
    else:
        arguments = [path for word in arguments for path in glob(word) or [word]]
        assert cli.main(arguments) == 0, words
        return None
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1000, check=False)
    assert ran.returncode == 0, f"{words}\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}"
    return None


def write_verifiers(page: Path, folder: Path) -> None:
    """Add the verifier that a page shows to the module by which its commands name it."""
    for block in blocks_of(page, "python"):
        shown_function = re.search(r"^def (capital_)?verifier\(.*?\n(?=\S|\Z)", block.parsed + "\n", re.M | re.S)
        if shown_function:
            module = "my_verifier" if shown_function[1] else "my_module"
            names = "".join(re.findall(r"^rivers = .*\n", block.parsed, re.M))
            text = f"from credit_trl import Verdict\n\n{names}{shown_function[0]}"
            with open(folder / f"{module}.py", "a", encoding="utf-8") as file:  # the starter's own function stays
                file.write(text)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("page", pages_to_run(), ids=lambda page: page.name)
def test_commands_run_in_the_order_of_the_page(page, tmp_path, monkeypatch, capsys):
    """In a folder of `trl credit-init`, with the verifier that the page shows."""
    folder = tmp_path / "start"
    assert cli.main(["credit-init", str(folder)]) == 0
    shutil.copy(FILES / "capitals.jsonl", folder)
    write_verifiers(page, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("credit_trl.trainer.run_callbacks", run_callbacks)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    commands = [words for words in commands_of(page) if not NOT_RUN.match(" ".join(words))]
    for run_folder in ("runs/first", "runs/grpo", "runs/sdpo", "runs/credit", "runs/coef-1/seed-1"):
        train(["--config", "run.yaml", "--output_dir", run_folder])
    for words in commands:
        run([re.sub(r"^Qwen/.*", "quickstart", word) for word in words])
        if "credit-init" in words:
            monkeypatch.chdir(folder / words[-1])
    for name in ("my_verifier", "my_module"):
        sys.modules.pop(name, None)
