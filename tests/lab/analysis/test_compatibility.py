from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl.lab.analysis import compatibility as compat
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.compatibility import compatibility_metrics, format_compatibility

few = settings(max_examples=25, deadline=None)


def random_teachers(seed: int, records: int, letters: int, focus: float = 4.0) -> tuple[np.ndarray, np.ndarray]:
    """(weights, teachers) with a dominant diagonal, as of a model that follows its feedback."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(records, letters, letters)) + focus * np.eye(letters)
    teachers = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return rng.dirichlet(np.ones(letters), size=records), teachers


def mix(weights: np.ndarray, teachers: np.ndarray) -> np.ndarray:
    return np.array(
        [sum(w * row for w, row in zip(p, t, strict=True)) for p, t in zip(weights, teachers, strict=True)]
    )


def lowest_residual(student: np.ndarray, teachers: np.ndarray) -> float:
    """Minimum of ‖s − Tᵀ P‖₁ over the simplex, by enumeration of vertices.

    The objective is convex and linear between the planes `P_z = 0` and `(Tᵀ P)_l = s_l`, so a minimum lies where
    Z − 1 independent ones of them meet the plane `Σ P = 1`.
    """
    count = len(teachers)
    planes, levels = np.concatenate([np.eye(count), teachers.T]), np.concatenate([np.zeros(count), student])
    found = []
    for chosen in itertools.combinations(range(len(planes)), count - 1):
        system = np.concatenate([planes[list(chosen)], np.ones((1, count))])
        if np.linalg.matrix_rank(system) == count:
            vertex = np.linalg.solve(system, [*levels[list(chosen)], 1.0])
            if (vertex >= -1e-9).all():
                found.append(np.abs(student - teachers.T @ vertex).sum())
    return min(found)


# ----------------------------------------------------------------------------------------------------------- the fit


@few
@given(seed=st.integers(0, 10**6), records=st.integers(1, 20), letters=st.integers(2, 6))
def test_fit_recovers_the_weights_of_a_mixture(seed, records, letters):
    weights, teachers = random_teachers(seed, records, letters)
    posterior, residual = compat.fit_posterior(mix(weights, teachers), teachers)
    assert residual.max() < 1e-8
    np.testing.assert_allclose(posterior, weights, atol=1e-8)


@few
@given(seed=st.integers(0, 10**6), letters=st.integers(2, 5), focus=st.floats(0.0, 6.0))
def test_fit_equals_the_minimum_over_enumerated_vertices(seed, letters, focus):
    _, teachers = random_teachers(seed, 4, letters, focus)
    rng = np.random.default_rng(seed + 1)
    student = rng.dirichlet(np.ones(letters), size=4)
    posterior, residual = compat.fit_posterior(student, teachers)
    assert (posterior >= 0).all()
    np.testing.assert_allclose(posterior.sum(-1), 1.0)
    np.testing.assert_allclose(np.abs(student - mix(posterior, teachers)).sum(-1), residual, atol=1e-12)
    for point in rng.dirichlet(np.ones(letters), size=200):
        assert (residual <= compat.residual(student, teachers, np.tile(point, (4, 1))) + 1e-12).all()
    lowest = [lowest_residual(s, t) for s, t in zip(student, teachers, strict=True)]
    np.testing.assert_allclose(residual, lowest, atol=1e-9)


@pytest.mark.parametrize(
    ("student", "teachers", "message"),
    [
        (np.ones(4) / 4, np.ones((2, 4, 4)) / 4, "Shapes"),
        (np.ones(3) / 3, np.ones((4, 4)) / 4, "differ in the number of letters"),
        (np.ones(4), np.ones((4, 4)) / 4, "distributions"),
        (np.array([np.nan, 0.5, 0.25, 0.25]), np.ones((4, 4)) / 4, "distributions"),
    ],
)
def test_invalid_distributions_are_refused(student, teachers, message):
    with pytest.raises(ValueError, match=message):
        compat.fit_posterior(student, teachers)


# --------------------------------------------------------------------------------------------------- the measurement


def question(number: int, letters: str = "ABCD", gold: str = "A") -> compat.ChoiceQuestion:
    options = "\n".join(f"{letter}: option {letter.lower()}{number}" for letter in letters)
    prompt = [
        {"role": "system", "content": "Choose."},
        {"role": "user", "content": f"Question {number}?\n\n{options}"},
    ]
    return compat.ChoiceQuestion(prompt, tuple(letters), gold, f"q{number}")


def test_letter_probabilities_equal_plain_forward_passes(make_model, tokenizer):
    model = make_model(dtype=torch.float64)
    checkpoint = Checkpoint.from_model(model, tokenizer)
    own = question(3, letters="AB", gold="B")
    [record] = compat.measure_compatibility(checkpoint, [own])

    def letters_of(messages: list[dict[str, str]]) -> torch.Tensor:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) + "<answer>\n"
        logits = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1]
        return logits.softmax(-1)[[tokenizer.convert_tokens_to_ids(letter) for letter in "AB"]]

    def with_feedback(letter: str) -> list[dict[str, str]]:
        system, user = own.prompt
        z = f"\n\nPrevious assessment: The correct answer is \\boxed{{{letter}}}. Now solve this problem step by step."
        return [system, {**user, "content": user["content"] + z}]

    with torch.no_grad():
        student, *teachers = (letters_of(m).numpy() for m in (own.prompt, with_feedback("A"), with_feedback("B")))
    np.testing.assert_allclose(record.student, student / student.sum(), atol=1e-10)
    np.testing.assert_allclose(record.teachers, [t / t.sum() for t in teachers], atol=1e-10)
    assert record.student_mass == pytest.approx(student.sum())
    np.testing.assert_allclose(record.teacher_mass, [t.sum() for t in teachers], atol=1e-10)


def test_table_has_the_rows_of_the_paper():
    """A student that is a mixture of its teachers on every question except number 5."""
    weights, teachers = random_teachers(3, 12, 4)
    students = mix(weights, teachers)
    teachers[5] = teachers[5, :1]
    students[5] = [0.01, 0.01, 0.01, 0.97]
    probabilities = np.concatenate([students[:, None], teachers], axis=1)
    records = [compat.Record.fit(question(n, gold="ABCD"[n % 4]), 0.5 * probabilities[n]) for n in range(12)]
    np.testing.assert_allclose(records[7].posterior, weights[7], atol=1e-8)
    np.testing.assert_allclose(records[7].fidelity, np.diag(teachers[7]))
    numbers = compatibility_metrics(records)
    residuals = np.array([r.residual for r in records])
    uniform = [np.abs(r.student - r.teachers.mean(0)).sum() for r in records]
    fidelity = np.median([np.diag(r.teachers) for r in records], axis=0)
    expected = {
        "# records": 12,
        "Gold balance (A / B / C / D)": "3 / 3 / 3 / 3",
        "Letter-token mass (median)": 0.5,
        "Teacher fidelity (median, worst z)": fidelity.min(),
        "Teacher fidelity (median, best z)": fidelity.max(),
        "LS L1 residual (median)": np.median(residuals),
        "Fraction residual < 0.001": 11 / 12,
        "Uniform-P L1 baseline (median)": np.median(uniform),
        "Self-consistency argmax P̂ = argmax s": np.mean([r.posterior.argmax() == r.student.argmax() for r in records]),
        "P̂ mass on student's argmax (median)": np.median([r.posterior[r.student.argmax()] for r in records]),
    }
    for name, value in expected.items():
        assert numbers[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-6, abs=1e-12)), name
    table = format_compatibility({"one": records, "two": records})
    assert "| Metric | one | two |" in table
    assert "| Fraction residual < 0.001 | 92% | 92% |" in table


# ------------------------------------------------------------------------------------------------------- the questions


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("Which?\n\nA: yes\nB: no\nC: both\nD: none\nPlease reason.", "ABCD"),
        ("Which?\n(A) yes\n(B) no", "AB"),
        ("Which?\nA. yes\nB. no\nC. C is a letter\nE. skipped", "ABC"),
        ("No options here. A colon: none", ""),
        ("E. coli was grown. Which?\nA: yes\nB: no\nC: both\nD: none", "ABCD"),
        ("As in\nA: x\nB: y\nC: z\nnow: which?\nA: yes\nB: no", "AB"),
    ],
)
def test_option_letters_are_read_from_the_prompt(text, letters):
    assert "".join(compat.option_letters(text)) == letters


def test_rows_without_letter_options_are_refused():
    with pytest.raises(ValueError, match="no multiple choice"):
        compat.questions_of([{"prompt": "Which?\nA: yes\nB: no", "answer": "C"}])
    with pytest.raises(ValueError, match="no multiple choice"):
        compat.questions_of([{"prompt": "How many?", "answer": "7"}])
    assert compat.questions_of([{"prompt": "How many?", "answer": "B"}], "ABC")[0].letters == ("A", "B", "C")


def test_balanced_subset_has_equal_counts_of_each_letter():
    questions = [question(n, gold="AAAB"[n % 4]) for n in range(40)] + [question(99, letters="AB", gold="B")]
    with_all = questions + [question(100 + n, gold="CD"[n % 2]) for n in range(30)]
    chosen = compat.balanced(with_all, per_letter=25)
    golds = [q.gold for q in chosen]
    assert {g: golds.count(g) for g in "ABCD"} == dict.fromkeys("ABCD", 10)
    assert "q99" not in {q.identifier for q in chosen}  # its letters differ
    assert chosen == compat.balanced(with_all, per_letter=25)
    assert chosen != compat.balanced(with_all, per_letter=25, seed=1)
