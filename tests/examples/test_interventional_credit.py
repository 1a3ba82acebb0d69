"""`examples/interventional_credit.py` and `examples/compatibility.py` at a small size."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np

from tiny import save_model

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = "--questions 8 --steps 2 --prompts 3 --positions 1 --candidates 2 --samples 2".split()


def call(monkeypatch, name: str, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_student_that_fails_the_gate_is_not_measured(monkeypatch, tmp_path, capsys):
    options = ["--output_dir", str(tmp_path), "--seeds", "0", *SMALL]
    call(monkeypatch, "interventional_credit", *options)
    printed = capsys.readouterr().out
    assert "the student separates verdicts by" in printed
    assert "| base | letter | log π | 1 |" in printed
    assert "| exact |" not in printed
    assert set(json.loads((tmp_path / "exact-seed0.json").read_text("utf-8"))) == {"separation"}
    call(monkeypatch, "interventional_credit", *options)  # nothing is left to measure
    assert "3 prefixes" not in capsys.readouterr().out


def test_mean_over_seeds_skips_missing_values():
    with_error = runpy.run_path(str(EXAMPLES / "interventional_credit.py"))["with_error"]
    values = [0.5, 0.7, 0.9]
    assert with_error([*values, float("nan")]) == f"0.70 ± {np.std(values, ddof=1) / 3**0.5:.2f}"
    assert with_error([0.5]) == "0.50"
    assert with_error([]) == "–"


TASK_MODULE = """
from datasets import Dataset
from credit_trl.tasks import Task

def build(split, path=None):
    options = "A: 1\\nB: 2\\nC: 3\\nD: 4"
    prompt = [{"role": "user", "content": f"Which?\\n\\n{options}"}]
    return Dataset.from_list([{"prompt": prompt, "answer": letter, "id": letter, "task": "t"} for letter in "ABCD"])

TASK = Task("four_letters:TASK", build, None, None)
"""


def test_compatibility_writes_table_and_records(monkeypatch, tmp_path, capsys):
    (tmp_path / "four_letters.py").write_text(TASK_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    model = save_model(tmp_path / "model")
    options = ["--model", model, "--task", "four_letters:TASK", "--per_letter", "1", "--output_dir", str(tmp_path)]
    call(monkeypatch, "compatibility", *options)
    assert "# records" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text("utf-8").splitlines()]
    assert [record["model"] for record in records] == [model] * 4
    assert "# records" in (tmp_path / "table.md").read_text("utf-8")
