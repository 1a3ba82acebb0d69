"""`examples/interventional_credit.py` and `examples/compatibility.py` at a small size."""

import csv
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from credit_trl.lab.analysis import interventional as iv
from credit_trl.lab.analysis.compatibility import ChoiceQuestion, Record
from tables import tables_of
from tiny import save_model

TABLES = tables_of(__file__)
EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = "--questions 8 --steps 2 --prompts 3 --positions 1 --candidates 2 --samples 2".split()


def call(monkeypatch, name: str, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_student_that_fails_the_gate_is_not_measured(monkeypatch, tmp_path, capsys):
    table = tmp_path / "rows.csv"
    for _ in range(2):
        call(monkeypatch, "interventional_credit", "--csv", str(table), "--seeds", "0", *SMALL)
    assert capsys.readouterr().out.count("the student separates verdicts by") == 1  # the second call skips it
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    assert [row["quantity"] for row in rows if row["student"] == "exact"] == ["separation"]
    measured = [(row["feedback"], row["quantity"]) for row in rows if row["student"] == "base"]
    assert len(set(measured)) == len(measured) == 12


def test_compatibility_writes_table_and_records(monkeypatch, tmp_path, capsys):
    (tmp_path / "four_letters.py").write_text(TABLES["task"], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    model = save_model(tmp_path / "model")
    options = ["--model", model, "--task", "four_letters:TASK", "--per_letter", "1", "--output_dir", str(tmp_path)]
    call(monkeypatch, "compatibility", *options)
    assert "# records" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text("utf-8").splitlines()]
    assert [record["model"] for record in records] == [model] * 4


@pytest.fixture(scope="module")
def compatibility() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / "compatibility.py")))


@pytest.mark.parametrize(("text", "letters"), TABLES["letters"])
def test_option_letters_are_read_from_the_prompt(compatibility, text, letters):
    assert "".join(compatibility.option_letters(text)) == letters


def test_questions_are_balanced_and_rows_without_options_are_refused(compatibility):
    with pytest.raises(ValueError, match="no multiple choice"):
        compatibility.questions_of([{"prompt": "Which?\nA: yes\nB: no", "answer": "C"}])
    rows = [{"prompt": "Which?", "answer": "ABBC"[n % 4], "id": n} for n in range(40)]
    questions = compatibility.questions_of(rows, "ABC")
    odd = compatibility.questions_of([{"prompt": "Which?", "answer": "B", "id": 99}], "AB")  # its letters differ
    chosen = compatibility.balanced(questions + odd, per_letter=25)
    golds = [question.gold for question in chosen]
    assert {letter: golds.count(letter) for letter in "ABC"} == dict.fromkeys("ABC", 10)
    assert "99" not in {question.identifier for question in chosen}
    assert chosen != compatibility.balanced(questions + odd, per_letter=25, seed=1)


def test_table_has_the_rows_of_the_paper(compatibility):
    """A student that is a mixture of its teachers on every question except number 5."""
    rng = np.random.default_rng(3)
    teachers = rng.dirichlet(np.ones(4), size=(12, 4)) + 2 * np.eye(4)
    teachers /= teachers.sum(-1, keepdims=True)
    students = np.einsum("nz,nzl->nl", rng.dirichlet(np.ones(4), size=12), teachers)
    teachers[5] = teachers[5, :1]
    students[5] = [0.01, 0.01, 0.01, 0.97]
    probabilities = 0.5 * np.concatenate([students[:, None], teachers], axis=1)
    questions = [ChoiceQuestion("Which?", tuple("ABCD"), "ABCD"[n % 4]) for n in range(12)]
    records = [
        Record.fit(question, letter_probabilities)
        for question, letter_probabilities in zip(questions, probabilities, strict=True)
    ]
    metrics = compatibility.compatibility_metrics(records)
    fidelity = np.median(np.diagonal(teachers, axis1=1, axis2=2), axis=0)
    expected = {
        "# records": 12,
        "Letter-token mass (median)": 0.5,
        "Teacher fidelity (median, worst z)": fidelity.min(),
        "Teacher fidelity (median, best z)": fidelity.max(),
        "LS L1 residual (median)": np.median([r.residual for r in records]),
        "Fraction residual < 0.001": 11 / 12,
        "Uniform-P L1 baseline (median)": np.median(np.abs(students - teachers.mean(1)).sum(-1)),
        "Self-consistency argmax P̂ = argmax s": np.mean([r.posterior.argmax() == r.student.argmax() for r in records]),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert metrics["Gold balance (A / B / C / D)"] == "3 / 3 / 3 / 3"
    assert "| Fraction residual < 0.001 | 0.917 | 0.917 |" in compatibility.format_compatibility(
        {"a": records, "b": records}
    )


def test_agreement_uses_resolved_prefixes_and_pairs_with_different_success():
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "interventional_credit.py")))
    branching = iv.Branching((), (0, 1), *torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]))
    noisy, clear = (iv.estimate(branching, np.array(counts), 10, 3, 10) for counts in ([3, 4], [0, 9]))
    assert [example.is_resolved(credit) for credit in (noisy, clear)] == [False, True]
    branchings = [branching, branching]
    assert example.rank_agreement([noisy, clear], branchings, "rewards") == 1.0
    assert example.rank_agreement([clear], [branching], "advantages") == 0.0
    assert np.isnan(example.rank_agreement([noisy], [branching], "rewards"))
    outcomes = np.array([9, 0, 0, 0])
    assert example.concordance(outcomes, np.array([0.25, 0.3, 0.2, 0.1])) == pytest.approx(2 / 3)
    assert example.concordance(outcomes, np.array([0.3, 0.3, 0.2, 0.1])) == pytest.approx(2.5 / 3)
