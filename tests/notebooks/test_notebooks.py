"""The notebooks run from top to bottom, and what is committed are the outputs of such a run.

The slow tier runs every notebook as it stands (`make notebooks`); the fast one runs the first with fewer steps.
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


def test_paths_of_the_folder_that_a_run_had_are_not_kept():
    cell = nbformat.v4.new_code_cell(
        "from pathlib import Path\nprint(Path.cwd() / 'run', Path.cwd())\nPath.cwd() / 'run'"
    )
    notebook = nbformat.v4.new_notebook(cells=[cell])
    said = printed(execute(notebook))
    assert "run ." in said
    assert "/tmp" not in said
    assert "PosixPath('run')" in said


def switch(notebook) -> int:
    """Where the marked cell is."""
    (index,) = (i for i, cell in enumerate(notebook.cells) if "switch" in cell.metadata.get("tags", []))
    return index


def after_switch(notebook, source: str):
    """The notebook with one more cell behind the marked one."""
    notebook.cells.insert(switch(notebook) + 1, nbformat.v4.new_code_cell(source))
    return notebook


def printed(notebook) -> str:
    """All that the cells printed or show as text."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            texts.append(output.get("text") or data.get("text/markdown") or data.get("text/plain") or "")
    return "\n".join(texts)


def shown(cell) -> list[tuple[str, ...]]:
    """What a cell shows besides printed lines: for each output its kind and the forms that it comes in."""
    return [
        (output.output_type, *sorted(output.get("data", {})))
        for output in cell.get("outputs", [])
        if output.output_type != "stream"
    ]


def test_all_notebooks_are_tested():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_is_one_whole_run_without_errors_or_paths_of_a_machine(name):
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


def test_the_first_notebook_runs_with_a_few_steps():
    notebook = after_switch(
        read(NAMES[0]),
        "SETTINGS |= {'max_steps': 2, 'per_device_train_batch_size': 16, 'warmup_steps': 0}\n"
        "EVALUATION |= {'eval_steps': 2, 'k': 1, 'max_prompts': 24}",
    )
    said = printed(execute(notebook))
    assert "2 steps in" in said
    assert re.search(r"^unknown +0\.\d+ +0\.\d+", said, flags=re.MULTILINE)
    assert "kB, one file, no network needed" in said


def check_quickstart(said: str) -> None:
    before, after, low, high = map(float, re.search(r"^unknown +(\S+) +(\S+) +\[(\S+), (\S+)\]", said, re.M).groups())
    assert before < low <= after <= high  # it learnt, beyond what other test questions could explain
    assert re.search(r"^city +\d+ +1\d\.\d\d ->", said, re.M)  # S_t of the word that only this question has


def check_own_verifier(said: str) -> None:
    before, after = (float(re.search(rf"^{when} +avg@4 (\S+)", said, re.M)[1]) for when in ("before", "after"))
    assert after > before + 0.2
    for message in (
        "Verdict.feedback must be text or None, got dict",
        "reads the column `answer`, which `train_dataset` lacks",
        "`contrastive_coef` must be in [0, 1]",
        "Training completed.",
    ):
        assert message in said, message


def check_see_the_credit(said: str) -> None:
    assert "Σ Ŝ_t" in said
    assert re.search(r"^C = +1 .*^C = 32 ", said, re.M | re.S)
    assert "r^cf" in said
    shares = {
        name: float(x) for name, x in re.findall(r"^\| (city|cue|generic) \|(?:[^|]*\|){3} *([\d.]+) \|", said, re.M)
    }
    assert shares["city"] + shares["cue"] > 0.5 > 0.1 > shares["generic"]  # of all |S|


def check_ablate(said: str) -> None:
    assert "12 jobs done, 0 failed" in said
    for arm in ("SDPO", "CREDIT λ=0.5", "CREDIT λ=0.1 C=4", "include_environment_feedback=False"):
        assert f"| + {arm}" in said or f"| {arm} |" in said or f"{arm} |" in said, arm
    assert "95 % interval" in said
    assert re.search(r"include_environment_feedback=False +without teacher +[1-9]", said)


def check_moving_over(said: str) -> None:
    assert "largest difference between the two runs' weights: 0.0" in said
    losses = dict(re.findall(r"^(TRL's SDPOTrainer|CreditTrainer, λ = 0) +loss (\S+)", said, re.M))
    ours, theirs = float(losses["CreditTrainer, λ = 0"]), float(losses["TRL's SDPOTrainer"])
    assert ours == pytest.approx(theirs, rel=0.2)  # the first step's, of other rollouts


CHECKS = dict(
    zip(
        NAMES,
        [check_quickstart, check_own_verifier, check_see_the_credit, check_ablate, check_moving_over],
        strict=True,
    )
)


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_outputs_show_what_they_should(name):
    CHECKS[name](printed(read(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_shows_what_is_committed(name):
    committed, run = read(name), execute(read(name))
    for before, now in zip(committed.cells, run.cells, strict=True):
        assert shown(before) == shown(now)
    CHECKS[name](printed(run))


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the real data in ../shared/data (see its README)")
def test_the_switched_notebook_trains_another_model_on_real_questions(tmp_path):
    """On this CPU, with a tiny random model under the switch, which needs neither GPU nor hub."""
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
