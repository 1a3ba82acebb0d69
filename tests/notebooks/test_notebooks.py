"""The notebooks say what they show.

`make notebooks` runs every notebook with the wheel, by a test in `tests/packaging`.
"""

import re

import pytest

from notebook_outputs import FOLDER, NAMES, code_of, differences, printed, shown

nbformat = pytest.importorskip("nbformat", reason="needs nbclient: pip install 'credit-trl[dev]'")


def read(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


@pytest.mark.parametrize("name", NAMES)
def test_notebook_has_at_most_eight_imports_and_no_error(name):
    cells = [cell for cell in code_of(read(name)) if not cell.source.startswith("%%writefile")]
    imports = [line for cell in cells for line in re.findall(r"^(?:from|import) .*", cell.source, re.M)]
    assert len(imports) <= 8, imports
    assert sum(len(cell.source.splitlines()) for cell in read(name).cells) <= 6 * 45  # lines of a screen
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert not re.search(r"/(home|root|work|tmp)/|https?://(?!github|huggingface)", printed(read(name)))


def notebook_of(text: str):
    cell = nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("stream", text=text)])
    return nbformat.v4.new_notebook(cells=[cell])


def test_changed_outputs_are_noticed_and_times_are_not():
    line = "step 10/40  reward   0.105  s   0.875  seconds verdict 0.0 rollout 1.4\n"
    table = "| arm | seconds a step | ratio | S_t |\n| SDPO | 1.5 | 1.0 | 0.79 |\n"
    text = f"{line}{table}Verdict(reward=0.0, feedback=None)\n"
    changes = {
        "": "",
        "rollout 1.4": "rollout 9.9",
        "1.5 | 1.0": "7.5 | 3.0",
        "0.105": "0.11",
        "10/40": "10/50",
        "0.875": "0.3",
        "0.79": "0.1",
        "None": "'No.'",
        "SDPO": '{"contrastive_coef": 0.0}',
        line: "",
    }
    numbers = [
        bool(differences(notebook_of(text), notebook_of(text.replace(*change, 1)))) for change in changes.items()
    ]
    assert numbers == [False] * 4 + [True] * 6


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
