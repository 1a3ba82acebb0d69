from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl.lab.analysis import compatibility as compat
from credit_trl.lab.analysis.checkpoints import Checkpoint

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
def test_no_mixture_is_nearer_than_the_fit(seed, letters, focus):
    _, teachers = random_teachers(seed, 4, letters, focus)
    rng = np.random.default_rng(seed + 1)
    student = rng.dirichlet(np.ones(letters), size=4)
    posterior, residual = compat.fit_posterior(student, teachers)
    assert (posterior >= 0).all()
    np.testing.assert_allclose(posterior.sum(-1), 1.0)
    np.testing.assert_allclose(np.abs(student - mix(posterior, teachers)).sum(-1), residual, atol=1e-12)
    for scale in (1.0, 0.01):  # anywhere, and near the fit
        for point in rng.dirichlet(np.ones(letters), size=200):
            other = (1 - scale) * posterior + scale * point
            assert (residual <= compat.residual(student, teachers, other) + 1e-9).all()


@pytest.mark.parametrize("student", [np.ones(4), np.array([np.nan, 0.5, 0.25, 0.25])])
def test_invalid_distributions_are_refused(student):
    with pytest.raises(ValueError, match="distributions"):
        compat.fit_posterior(student, np.ones((4, 4)) / 4)


# --------------------------------------------------------------------------------------------------- the measurement


def test_letter_probabilities_equal_plain_forward_passes(make_model, tokenizer):
    model = make_model(dtype=torch.float64)
    checkpoint = Checkpoint.from_model(model, tokenizer)
    prompt = [{"role": "system", "content": "Choose."}, {"role": "user", "content": "Which?\n\nA: one\nB: two"}]
    own = compat.ChoiceQuestion(prompt, ("A", "B"), "B")
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
