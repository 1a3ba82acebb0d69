"""The notebooks say what they show, and the first runs with fewer steps.

`make notebooks` runs every notebook with the wheel, by a test in `tests/packaging`.
"""

import re
import runpy

import pytest

from notebook_outputs import FOLDER, NAMES, code_of, printed, shown

nbformat = pytest.importorskip("nbformat", reason="needs nbclient: pip install 'credit-trl[dev]'")


def read(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.fixture(scope="module")
def first_notebook():
    """The first notebook after a run with a few steps, and a last cell that prints paths."""
    notebook = read("01_quickstart")
    (index,) = (i for i, cell in enumerate(notebook.cells) if "switch" in cell.metadata.get("tags", []))
    few = (
        "SETTINGS |= {'max_steps': 2, 'per_device_train_batch_size': 16, 'warmup_steps': 0}\n"
        "SETTINGS |= {'lr_scheduler_type': 'constant', 'lr_scheduler_kwargs': None}\n"
        "EVALUATION |= {'eval_steps': 2, 'k': 1, 'max_prompts': 24}"
    )
    paths = "from pathlib import Path\nprint(Path.cwd() / 'run', Path.cwd())\nPath.cwd() / 'run'"
    notebook.cells.insert(index + 1, nbformat.v4.new_code_cell(few))
    notebook.cells.append(nbformat.v4.new_code_cell(paths))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OMP_NUM_THREADS", "1")  # beside other workers
        return runpy.run_path(str(FOLDER / "run.py"))["execute"](notebook, timeout=800)


@pytest.mark.parametrize("name", NAMES)
def test_notebook_has_at_most_eight_imports_and_no_error(name):
    cells = [cell for cell in code_of(read(name)) if not cell.source.startswith("%%writefile")]
    imports = [line for cell in cells for line in re.findall(r"^(?:from|import) .*", cell.source, re.M)]
    assert len(imports) <= 8, imports
    assert sum(len(cell.source.splitlines()) for cell in read(name).cells) <= 6 * 45  # lines of a screen
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert not re.search(r"/(home|root|work|tmp)/|https?://(?!github|huggingface)", printed(read(name)))


@pytest.mark.parametrize("name", NAMES)
def test_one_marked_cell_switches_to_a_gpu_model(name):
    from credit_trl import CreditConfig

    (cell,) = [cell for cell in code_of(read(name)) if "switch" in cell.metadata.get("tags", [])]
    assert cell.source.startswith("GPU = False\n")
    chosen = []
    for gpu in (False, True):
        names = {}
        exec(cell.source.replace("GPU = False", f"GPU = {gpu}"), names)
        options = names.get("SETTINGS") or names.get("CONFIG") or names["OPTIONS"]
        assert options.keys() <= CreditConfig.__dataclass_fields__.keys()
        chosen.append(names)
    assert [names["MODEL"] for names in chosen] == ["quickstart", "Qwen/Qwen3-0.6B"]
    assert chosen[0].keys() == chosen[1].keys()


def test_first_cells_install_with_one_line():
    first_cells = {code_of(read(name))[0].source for name in NAMES}
    assert first_cells == {"%pip install -q credit-trl matplotlib --find-links ."}
    for text in (cell.source for name in NAMES for cell in read(name).cells):
        assert not re.search(r"colab|git clone|badge", text)  # the repository has no address


@pytest.mark.parametrize("name", NAMES)
def test_notebook_opens_with_what_is_seen_and_ends_with_the_trained_model(name):
    notebook = read(name)
    assert re.search(r"you\s+will\s+see", notebook.cells[0].source, re.IGNORECASE)
    assert shown(notebook, "text/html") + shown(notebook, "image/png") >= 1
    ending = "\n".join(cell.source for cell in code_of(notebook)[-2:])
    for step in ("trainer.save_model(", "pipeline(", 'chat(row["prompt"]', "max_steps", "CreditTrainer("):
        assert step in ending
    assert re.search(r"^  before +'", printed(notebook), re.M)
    assert re.search(r"^  after +'", printed(notebook), re.M)


@pytest.mark.slow  # `make wheel` runs it whole
def test_first_notebook_runs_and_shows_paths_relative_to_its_folder(first_notebook):
    text = printed(first_notebook)
    assert "run ." in text
    assert "/tmp" not in text
    assert "PosixPath('run')" in text
    assert "2 steps in" in text
    assert re.search(r"^unknown +0\.\d+ -> 0\.\d+", text, flags=re.MULTILINE)
    assert shown(first_notebook, "image/png") == 1  # curves
    assert shown(first_notebook, "text/html") >= 1  # the page of maps, and that of the run if the package is installed
