"""Compatibility check (Appendix E): are a model's passes with and without feedback conditionals of one joint?

If a joint P(ŷ, z | x) exists, the student's distribution s over the answer letters is a mixture of the teachers'
distributions T, one teacher for each feedback z = "the answer is A", "… B", …: `s = Tᵀ P` with P = P(z | x).
`measure_compatibility` scores s and T with a model; `fit_posterior` finds the nearest mixture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.optimize import linprog
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from credit_trl.contexts.prompts import Prompt
from credit_trl.contexts.tokens import PrivilegedContext, TokenContexts
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.responses import analysis_config
from credit_trl.lab.analysis.vocabulary_logps import next_token_logps

# The paper's wording of z for a boxed letter, and the start of the answer that makes the next token the letter.
FEEDBACK = "The correct answer is \\boxed{{{letter}}}."
ANSWER_PREFIX = "<answer>\n"
# How z is put into the prompt of the teacher.
_TEMPLATES = {
    "reprompt_template": "{prompt}{solution}{feedback}",
    "feedback_template": "\n\nPrevious assessment: {feedback_raw} Now solve this problem step by step.",
}


def fit_posterior(
    student: Float[NDArray, " L"], teachers: Float[NDArray, "Z L"]
) -> tuple[Float[NDArray, " Z"], float]:
    """Fit the mixture of teachers nearest to the student in L1: `min ‖s − Tᵀ P‖₁` over the simplex.

    Solved as a linear program by HiGHS (`scipy.optimize.linprog`) with a tolerance of 1e-10.

    Args:
        student: s, a distribution over L letters (in the paper L = Z).
        teachers: T, rows indexed by z.

    Returns:
        The posterior P̂ and the residual `‖s − Tᵀ P̂‖₁`.

    Raises:
        ValueError: a row is not a distribution.
    """
    for name, rows in (("student", student), ("teachers", teachers)):
        if not (np.isfinite(rows).all() and (rows >= 0).all() and np.allclose(rows.sum(-1), 1.0, atol=1e-4)):
            raise ValueError(f"`{name}` must hold distributions: numbers in [0, 1] that sum to 1 over the letters.")
    count, letters = teachers.shape
    identity = np.eye(letters)
    # Variables: P, then one bound u_l ≥ |s_l − (Tᵀ P)_l| for each letter.
    result = linprog(
        np.concatenate([np.zeros(count), np.ones(letters)]),
        A_ub=np.block([[teachers.T, -identity], [-teachers.T, -identity]]),
        b_ub=np.concatenate([student, -student]),
        A_eq=np.concatenate([np.ones(count), np.zeros(letters)])[None],
        b_eq=[1.0],
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if result.status != 0:
        raise RuntimeError(f"HiGHS found no fit: {result.message}")
    posterior = result.x[:count].clip(min=0.0)
    posterior /= posterior.sum()
    return posterior, residual(student, teachers, posterior)


def residual(student: Float[NDArray, " L"], teachers: Float[NDArray, "Z L"], posterior: Float[NDArray, " Z"]) -> float:
    """`‖s − Tᵀ P‖₁`."""
    return float(np.abs(student - teachers.T @ posterior).sum())


@dataclass(frozen=True)
class ChoiceQuestion:
    """Multiple-choice question."""

    prompt: Prompt
    letters: tuple[str, ...]  # of its options, in order; any texts of one token each are possible
    gold: str | None = None  # right letter
    identifier: str = ""  # name in the records


@dataclass(frozen=True)
class Record:
    """Compatibility of one question; Z = L is its number of letters."""

    question: ChoiceQuestion
    student: Float[NDArray, " Z"]  # s, normalized over the letters
    teachers: Float[NDArray, "Z Z"]  # T, normalized over the letters; rows are indexed by z
    student_mass: float  # probability of any letter before the normalization
    teacher_mass: Float[NDArray, " Z"]  # the same of each teacher
    posterior: Float[NDArray, " Z"]  # P̂
    residual: float  # ‖s − Tᵀ P̂‖₁

    @classmethod
    def fit(cls, question: ChoiceQuestion, probabilities: Float[NDArray, "1+Z Z"]) -> Record:
        """Fit the letter probabilities of the student (first row) and of the teacher of each letter."""
        mass = probabilities.sum(axis=-1)
        student, *teachers = probabilities / mass[:, None]
        teachers = np.array(teachers)
        fitted = fit_posterior(student, teachers)
        return cls(question, student, teachers, float(mass[0]), mass[1:], *fitted)


def letter_ids(tokenizer: PreTrainedTokenizerBase, letters: Iterable[str]) -> dict[str, list[int]]:
    """Ids of all tokens whose text without surrounding white space is the letter, for each letter."""
    ids: dict[str, list[int]] = {letter: [] for letter in letters}
    for token_id, text in enumerate(tokenizer.batch_decode([[i] for i in range(len(tokenizer))])):
        if text.strip() in ids:
            ids[text.strip()].append(token_id)
    if absent := [letter for letter, token_ids in ids.items() if not token_ids]:
        raise ValueError(f"The tokenizer has no token for {', '.join(absent)}.")
    return ids


def measure_compatibility(
    checkpoint: Checkpoint,
    questions: Sequence[ChoiceQuestion],
    *,
    feedback: str = FEEDBACK,
    prefix: str = ANSWER_PREFIX,
    progress: bool = False,
) -> list[Record]:
    """Score the student and the teachers of every question and fit them, one batched forward pass a question.

    Student and teachers are the same weights, those of `checkpoint.teacher`: Assumption 1 is about a single π.

    Args:
        checkpoint: the model.
        questions: multiple-choice questions.
        feedback: z with the field `{letter}`.
        prefix: forced start of the response, right before the letter.
        progress: whether to show a progress bar.
    """
    letters = set().union(*(question.letters for question in questions))
    ids = letter_ids(checkpoint.tokenizer, sorted(letters))
    builder = checkpoint.context_builder(analysis_config(**_TEMPLATES))
    prefix_ids = checkpoint.tokenizer(prefix, add_special_tokens=False)["input_ids"]
    records = []
    for question in tqdm(questions, desc="questions", disable=not progress):
        texts = [feedback.format(letter=letter) for letter in question.letters]
        with_feedback = [builder.encode(question.prompt, PrivilegedContext(feedback=z)) for z in texts]
        prompts = TokenContexts(checkpoint.encode(question.prompt), with_feedback)
        logps = next_token_logps(checkpoint.teacher, prompts, prefix_ids)
        probabilities = logps.double().exp()
        columns = [probabilities[:, ids[letter]].sum(-1) for letter in question.letters]
        fitted = Record.fit(question, torch.stack(columns, dim=-1).cpu().numpy())
        records.append(fitted)
    return records
