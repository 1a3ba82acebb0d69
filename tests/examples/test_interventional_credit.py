"""`examples/interventional_credit.py` and `examples/compatibility.py` at a small size."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from tiny import save_model

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = "--questions 8 --steps 2 --prompts 3 --positions 1 --candidates 2 --samples 2".split()
TASK_MODULE = """
from datasets import Dataset
from credit_trl.tasks import Task

def build(split, path=None):
    prompt = [{"role": "user", "content": "Which?\\n\\nA: 1\\nB: 2\\nC: 3\\nD: 4"}]
    return Dataset.from_list([{"prompt": prompt, "answer": letter, "id": letter, "task": "t"} for letter in "ABCD"])

TASK = Task("four_letters:TASK", build, None, None)
"""


def call(monkeypatch, name: str, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_student_that_fails_the_gate_is_not_measured(monkeypatch, tmp_path, capsys):
    call(monkeypatch, "interventional_credit", "--output_dir", str(tmp_path), "--seeds", "0", *SMALL)
    printed = capsys.readouterr().out
    assert "the student separates verdicts by" in printed
    assert "| base | letter | log π | 1 |" in printed
    assert "| exact |" not in printed
    assert set(json.loads((tmp_path / "exact-seed0.json").read_text("utf-8"))) == {"separation"}


def test_compatibility_writes_table_and_records(monkeypatch, tmp_path, capsys):
    (tmp_path / "four_letters.py").write_text(TASK_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    model = save_model(tmp_path / "model")
    options = ["--model", model, "--task", "four_letters:TASK", "--per_letter", "1", "--output_dir", str(tmp_path)]
    call(monkeypatch, "compatibility", *options)
    assert "# records" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text("utf-8").splitlines()]
    assert [record["model"] for record in records] == [model] * 4
