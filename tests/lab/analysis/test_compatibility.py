import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl.lab.analysis import compatibility as compat
from credit_trl.lab.analysis.checkpoints import Checkpoint

few = settings(max_examples=25, deadline=None)


def random_teachers(seed: int, letters: int, focus: float = 4.0) -> np.ndarray:
    """Rows with a dominant diagonal, as of a model that follows its feedback."""
    logits = np.random.default_rng(seed).normal(size=(letters, letters)) + focus * np.eye(letters)
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


@few
@given(seed=st.integers(0, 10**6), letters=st.integers(2, 6))
def test_fit_recovers_the_weights_of_a_mixture(seed, letters):
    teachers = random_teachers(seed, letters)
    weights = np.random.default_rng(seed + 1).dirichlet(np.ones(letters))
    student = sum(weight * row for weight, row in zip(weights, teachers, strict=True))
    posterior, residual = compat.fit_posterior(student, teachers)
    assert residual < 1e-8
    np.testing.assert_allclose(posterior, weights, atol=1e-8)


@few
@given(seed=st.integers(0, 10**6), letters=st.integers(2, 5), focus=st.floats(0.0, 6.0))
def test_no_mixture_is_nearer_than_the_fit(seed, letters, focus):
    teachers = random_teachers(seed, letters, focus)
    rng = np.random.default_rng(seed + 1)
    student = rng.dirichlet(np.ones(letters))
    posterior, residual = compat.fit_posterior(student, teachers)
    assert (posterior >= 0).all()
    assert posterior.sum() == pytest.approx(1.0)
    assert np.abs(student - posterior @ teachers).sum() == pytest.approx(residual, abs=1e-12)
    points = rng.dirichlet(np.ones(letters), size=200)
    for weights in (points, 0.99 * posterior + 0.01 * points):  # anywhere, and near the fit
        assert (np.abs(student - weights @ teachers).sum(-1) >= residual - 1e-9).all()


def test_letter_probabilities_equal_plain_forward_passes(make_model, tokenizer):
    model = make_model(dtype=torch.float64)
    checkpoint = Checkpoint.from_model(model, tokenizer)
    prompt = [{"role": "system", "content": "Choose."}, {"role": "user", "content": "Which?\n\nA: one\nB: two"}]
    question = compat.ChoiceQuestion(prompt, ("A", "B"), "B")
    [record] = compat.measure_compatibility(checkpoint, [question])

    def letters_of(messages):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) + "<answer>\n"
        logits = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1]
        return logits.softmax(-1)[[tokenizer.convert_tokens_to_ids(letter) for letter in "AB"]]

    def with_feedback(letter):
        system, user = question.prompt
        z = f"\n\nPrevious assessment: The correct answer is \\boxed{{{letter}}}. Now solve this problem step by step."
        return [system, {**user, "content": user["content"] + z}]

    with torch.no_grad():
        student, *teachers = (letters_of(m).numpy() for m in (question.prompt, with_feedback("A"), with_feedback("B")))
    np.testing.assert_allclose(record.student, student / student.sum(), atol=1e-10)
    np.testing.assert_allclose(record.teachers, [t / t.sum() for t in teachers], atol=1e-10)
    assert record.student_mass == pytest.approx(student.sum())
    np.testing.assert_allclose(record.teacher_mass, [t.sum() for t in teachers], atol=1e-10)
