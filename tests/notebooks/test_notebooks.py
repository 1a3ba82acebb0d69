"""The notebooks run from top to bottom, and their committed outputs are those of such a run.

The slow tests run every notebook (`make notebooks`); the fast ones run the first with fewer steps.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from tiny import SHARED_DATA, save_model

nbformat = pytest.importorskip("nbformat", reason="needs nbclient: pip install 'credit-trl[dev]'")

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = ["01_quickstart", "02_your_own_verifier", "03_see_the_credit", "04_ablate", "05_from_sdpo_or_grpo"]


def read(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(notebook, timeout: int = 280):
    return runpy.run_path(str(FOLDER / "run.py"))["execute"](notebook, timeout=timeout)


def test_paths_in_outputs_are_relative_to_the_run_folder():
    cell = nbformat.v4.new_code_cell(
        "from pathlib import Path\nprint(Path.cwd() / 'run', Path.cwd())\nPath.cwd() / 'run'"
    )
    notebook = nbformat.v4.new_notebook(cells=[cell])
    text = printed(execute(notebook))
    assert "run ." in text
    assert "/tmp" not in text
    assert "PosixPath('run')" in text


def switch(notebook) -> int:
    """Index of the marked cell."""
    (index,) = (i for i, cell in enumerate(notebook.cells) if "switch" in cell.metadata.get("tags", []))
    return index


def after_switch(notebook, source: str):
    """The notebook with one more cell after the marked one."""
    notebook.cells.insert(switch(notebook) + 1, nbformat.v4.new_code_cell(source))
    return notebook


def printed(notebook) -> str:
    """All text that the cells print or show."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            texts.append(output.get("text") or data.get("text/markdown") or data.get("text/plain") or "")
    return "\n".join(texts)


def shown(cell) -> list[tuple[str, ...]]:
    """Kind and formats of every output of a cell except printed lines."""
    return [
        (output.output_type, *sorted(output.get("data", {})))
        for output in cell.get("outputs", [])
        if output.output_type != "stream"
    ]


def test_all_notebooks_are_tested():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs_are_one_run_without_errors_or_paths(name):
    notebook = read(name)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
    assert not re.search(r"/(home|root|work|tmp)/|https?://(?!github|huggingface)", printed(notebook))
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs) or name[:2] in (
        "02",
        "05",
    )


@pytest.mark.parametrize("name", NAMES)
def test_one_marked_cell_switches_to_a_gpu_model(name):
    cell = (notebook := read(name)).cells[switch(notebook)]
    assert cell.source.startswith("GPU = False\n")
    assert sum("GPU = False" in other.source for other in notebook.cells) == 1
    chosen = {}
    for gpu in (False, True):
        names = {}
        exec(cell.source.replace("GPU = False", f"GPU = {gpu}"), names)
        chosen[gpu] = names
    assert chosen[False]["MODEL"] == "quickstart"
    assert chosen[True]["MODEL"] == "Qwen/Qwen3-0.6B"
    assert chosen[False].keys() == chosen[True].keys()


@pytest.fixture
def set_up(tmp_path, monkeypatch):
    """Run the first cell of a notebook in an empty folder without the package; returns the commands that it runs."""

    def run(source: str) -> list[list[str]]:
        commands = []
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        monkeypatch.setattr("subprocess.run", lambda command, **_: commands.append([str(word) for word in command]))
        exec(source, {})
        return commands

    return run


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ending", ["", ".git", "/"])
def test_badge_opens_the_notebook_that_installs_from_there(set_up, tmp_path, name, ending):
    add_badge = runpy.run_path(str(FOLDER / "run.py"))["add_badge"]
    original, notebook = read(name), read(name)
    add_badge(notebook, name, "https://github.com/somebody/else")
    add_badge(notebook, name, f"https://github.com/owner/credit_trl{ending}")
    badge, _, title = notebook.cells[0].source.partition("\n\n")
    assert title == original.cells[0].source
    assert badge.endswith(
        f"(https://colab.research.google.com/github/owner/credit_trl/blob/main/notebooks/{name}.ipynb)"
    )
    clone, _ = set_up(next(cell.source for cell in notebook.cells if cell.cell_type == "code"))
    assert clone[-2:] == ["https://github.com/owner/credit_trl", str(tmp_path / "credit_trl_checkout")]


@pytest.mark.parametrize(
    "address", ["owner/credit_trl", "https://gitlab.com/owner/credit_trl", "https://github.com/owner"]
)
def test_badge_needs_a_github_address(address):
    add_badge = runpy.run_path(str(FOLDER / "run.py"))["add_badge"]
    with pytest.raises(ValueError, match=r"github\.com/OWNER/NAME"):
        add_badge(read("01_quickstart"), "01_quickstart", address)


def test_first_cells_are_equal_but_for_the_environment():
    cells = [next(c.source for c in read(name).cells if c.cell_type == "code") for name in NAMES]
    assert len({re.sub(r"import os\n|os\.environ.*\n", "", cell) for cell in cells}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_first_cell_installs_from_wheel_checkout_or_repository(set_up, tmp_path, name):
    source = next(cell.source for cell in read(name).cells if cell.cell_type == "code")
    with pytest.raises(ImportError, match="Set REPOSITORY"):
        set_up(source)
    wheel = tmp_path / "credit_trl-0.3.0-py3-none-any.whl"
    wheel.touch()
    assert set_up(source)[-1][-2:] == ["-q", f"{wheel}[viz]"]
    wheel.unlink()
    cloned = tmp_path / "credit_trl_checkout"
    clone, install = set_up(source.replace('REPOSITORY = ""', 'REPOSITORY = "https://host/credit.git"'))
    assert clone == ["git", "clone", "-q", "--depth", "1", "https://host/credit.git", str(cloned)]
    assert install[-1] == f"{cloned}[viz]"
    (tmp_path / "src" / "credit_trl").mkdir(parents=True)
    (installed,) = set_up(source)
    assert installed[-1] == f"{tmp_path}[viz]"


def test_first_notebook_runs_with_a_few_steps():
    notebook = after_switch(
        read(NAMES[0]),
        "SETTINGS |= {'max_steps': 2, 'per_device_train_batch_size': 16, 'warmup_steps': 0}\n"
        "SETTINGS |= {'lr_scheduler_type': 'constant', 'lr_scheduler_kwargs': None}\n"
        "EVALUATION |= {'eval_steps': 2, 'k': 1, 'max_prompts': 24}",
    )
    text = printed(execute(notebook))
    assert "2 steps in" in text
    assert re.search(r"^unknown +0\.\d+ +0\.\d+", text, flags=re.MULTILINE)
    assert "kB, one file, no network needed" in text


def check_quickstart(text: str) -> None:
    before, after, low, high = map(float, re.search(r"^unknown +(\S+) +(\S+) +\[(\S+), (\S+)\]", text, re.M).groups())
    assert before < low <= after <= high  # the intervals do not overlap
    assert re.search(r"^city +\d+ +1\d\.\d\d ->", text, re.M)  # S_t of the word of the prompt


def check_own_verifier(text: str) -> None:
    before, after = (float(re.search(rf"^{when} +avg@4 (\S+)", text, re.M)[1]) for when in ("before", "after"))
    assert after > before + 0.2
    for message in (
        "Verdict.feedback must be text or None, got dict",
        "needs the column `answer`, which `train_dataset` does not have",
        "`contrastive_coef` must be in [0, 1]",
        "Training completed.",
    ):
        assert message in text, message


def check_see_the_credit(text: str) -> None:
    assert "Σ Ŝ_t" in text
    assert re.search(r"^C = +1 .*^C = 32 ", text, re.M | re.S)
    assert "r^cf" in text
    shares = {
        name: float(x) for name, x in re.findall(r"^\| (city|cue|generic) \|(?:[^|]*\|){3} *([\d.]+) \|", text, re.M)
    }
    assert shares["city"] + shares["cue"] > 0.5 > 0.1 > shares["generic"]  # of all |S|


def check_ablate(text: str) -> None:
    assert "12 jobs done, 0 failed" in text
    for arm in ("SDPO", "CREDIT λ=0.5", "CREDIT λ=0.1 C=4", "include_environment_feedback=False"):
        assert f"| + {arm}" in text or f"| {arm} |" in text or f"{arm} |" in text, arm
    assert "95 % interval" in text
    assert re.search(r"include_environment_feedback=False +without teacher +[1-9]", text)


def check_moving_over(text: str) -> None:
    assert "largest difference between the two runs' weights: 0.0" in text
    losses = dict(re.findall(r"^(TRL's SDPOTrainer|CreditTrainer, λ = 0) +loss (\S+)", text, re.M))
    ours, theirs = float(losses["CreditTrainer, λ = 0"]), float(losses["TRL's SDPOTrainer"])
    assert ours == pytest.approx(theirs, rel=0.2)  # of the first step, with other rollouts


CHECKS = dict(
    zip(
        NAMES,
        [check_quickstart, check_own_verifier, check_see_the_credit, check_ablate, check_moving_over],
        strict=True,
    )
)


@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs_show_the_expected_results(name):
    CHECKS[name](printed(read(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebook_reproduces_its_committed_outputs(name):
    committed, run = read(name), execute(read(name))
    for before, now in zip(committed.cells, run.cells, strict=True):
        assert shown(before) == shown(now)
    CHECKS[name](printed(run))


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the real data in ../shared/data (see its README)")
def test_switched_notebook_trains_on_real_questions(tmp_path):
    """Runs on a CPU with a tiny random model in place of the GPU model."""
    save_model(tmp_path)
    notebook = read(NAMES[0])
    cell = notebook.cells[switch(notebook)]
    cell.source = cell.source.replace("GPU = False", "GPU = True")
    data = json.dumps(str((SHARED_DATA / "sciknoweval" / "physics-train.jsonl").resolve()))
    test = json.dumps(str((SHARED_DATA / "sciknoweval" / "physics-test.jsonl").resolve()))
    notebook = after_switch(
        notebook,
        f"MODEL, TASK, DATA = {str(tmp_path)!r}, 'sciknoweval:physics', {data}\n"
        "SETTINGS |= dict(per_device_train_batch_size=4, gradient_accumulation_steps=1, num_generations=2,\n"
        "    max_completion_length=8, max_steps=1, use_cpu=True, bf16=False, gradient_checkpointing=False)\n"
        "EVALUATION |= dict(k=1, eval_steps=1, max_prompts=2)",
    )
    for other in notebook.cells:
        other.source = other.source.replace("task, path=DATA,", f"task, path={test},")
    assert "1 steps in" in printed(execute(notebook))
