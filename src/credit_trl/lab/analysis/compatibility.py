"""Do two forward passes behave like conditionals of one joint? The check of Appendix E at the answer letter.

If a joint P(ŷ, z | x) exists, the student's distribution over letters is a mixture of the teachers' ones, one teacher
for each feedback z = "the answer is A", "… B", …: `s = Tᵀ P` with P = P(z | x). `measure` reads s and T off a model,
`fit_posterior` finds the nearest mixture.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.contexts.prompts import Prompt, user_text
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.passes import Reading, last_position

# The paper's wording of z, for a boxed letter, and the start of the answer that pins the next token to it.
FEEDBACK = "The correct answer is \\boxed{{{letter}}}."
ANSWER_PREFIX = "<answer>\n"
TEMPLATES = {
    "reprompt_template": "{prompt}{solution}{feedback}",
    "feedback_template": "\n\nPrevious assessment: {feedback_raw} Now solve this problem step by step.",
}

_OPTION = re.compile(r"^[(\s]*([A-Z])\s*[:.)]\s", re.MULTILINE)
# The exact fit looks at every vertex; beyond this many it leaves the problem to HiGHS.
_MAX_VERTICES = 5000
# Vertices are clipped to the simplex before they are judged, so this only spares work.
_TOLERANCE = 1e-6

Method = Literal["exact", "highs", "slsqp"]


# ------------------------------------------------------------------------------------------------------------- the fit


def fit_posterior(
    student: Float[NDArray, "*b L"], teachers: Float[NDArray, "*b Z L"], method: Method = "exact"
) -> tuple[Float[NDArray, "*b Z"], Float[NDArray, "*b"]]:
    """The mixture of teachers nearest to the student in L1: `min ‖s − Tᵀ P‖₁` over the simplex.

    Args:
        student: s, a distribution over L letters (in the paper L = Z).
        teachers: T, rows indexed by z.
        method: `"exact"` looks at every vertex of the linear programme, all records at once, up to rounding;
            with more than some six letters it becomes `"highs"`, the solver of `scipy.optimize.linprog` (its
            tolerance is 1e-10). `"slsqp"` is the paper's: iterative, for comparison.

    Returns:
        The posterior P̂, and the residual `‖s − Tᵀ P̂‖₁`.

    Raises:
        ValueError: shapes that do not belong together, or numbers that are no distributions.
    """
    student, teachers = np.asarray(student, dtype=np.float64), np.asarray(teachers, dtype=np.float64)
    if teachers.ndim != student.ndim + 1 or teachers.shape[:-2] != student.shape[:-1]:
        raise ValueError(f"Shapes (..., L) and (..., Z, L) are needed, got {student.shape} and {teachers.shape}.")
    if teachers.shape[-1] != student.shape[-1]:
        raise ValueError(f"Student and teachers have other letters: {student.shape} and {teachers.shape}.")
    for name, rows in (("student", student), ("teachers", teachers)):
        if not (np.isfinite(rows).all() and (rows >= 0).all() and np.allclose(rows.sum(-1), 1.0, atol=1e-4)):
            raise ValueError(f"`{name}` must hold distributions: numbers in [0, 1] that sum to 1 over the letters.")
    batch, (count, letters) = student.shape[:-1], teachers.shape[-2:]
    s, t = student.reshape(-1, letters), teachers.reshape(-1, count, letters)
    if method == "exact" and comb(count + letters, count - 1) <= _MAX_VERTICES:
        posterior = _fit_vertices(s, t)
    elif method in ("exact", "highs"):
        posterior = np.array([_fit_highs(one, rows) for one, rows in zip(s, t, strict=True)]).reshape(len(s), count)
    elif method == "slsqp":
        posterior = np.array([_fit_slsqp(one, rows) for one, rows in zip(s, t, strict=True)]).reshape(len(s), count)
    else:
        raise ValueError(f"`method` must be exact, highs or slsqp, got {method!r}.")
    return posterior.reshape(*batch, count), residual(s, t, posterior).reshape(batch)


def residual(
    student: Float[NDArray, "*b L"], teachers: Float[NDArray, "*b Z L"], posterior: Float[NDArray, "*b Z"]
) -> Float[NDArray, "*b"]:
    """`‖s − Tᵀ P‖₁`."""
    return np.abs(student - np.einsum("...zl,...z->...l", teachers, posterior)).sum(axis=-1)


def _fit_vertices(s: NDArray, t: NDArray) -> NDArray:
    """The best vertex of each record.

    The objective is convex and linear between the planes `P_z = 0` and `s_l = (Tᵀ P)_l`, so a minimum lies where Z − 1
    independent ones of these Z + L planes meet the plane `Σ P = 1`. Each choice is a small linear system.
    """
    records, count, letters = t.shape
    planes = np.concatenate([np.broadcast_to(np.eye(count), (records, count, count)), t.transpose(0, 2, 1)], axis=1)
    levels = np.concatenate([np.zeros((records, count)), s], axis=1)
    best = np.full((records, count), 1.0 / count)
    lowest = residual(s, t, best)
    for chosen in combinations(range(count + letters), count - 1):
        rows = list(chosen)
        system = np.concatenate([planes[:, rows], np.ones((records, 1, count))], axis=1)
        target = np.concatenate([levels[:, rows], np.ones((records, 1))], axis=1)
        vertex, solved = _solve(system, target)
        solved &= (vertex >= -_TOLERANCE).all(axis=-1)
        vertex = np.where(solved[:, None], vertex.clip(min=0.0), best)
        vertex /= vertex.sum(axis=-1, keepdims=True)
        value = residual(s, t, vertex)
        better = value < lowest
        best[better], lowest[better] = vertex[better], value[better]
    return best


def _solve(system: NDArray, target: NDArray) -> tuple[NDArray, NDArray]:
    """Solutions of many small systems, and which of them have one."""
    regular = np.abs(np.linalg.det(system)) > np.finfo(np.float64).tiny
    system = np.where(regular[:, None, None], system, np.eye(system.shape[-1]))
    solution = np.linalg.solve(system, target[..., None])[..., 0]
    return np.nan_to_num(solution, nan=-1.0, posinf=-1.0, neginf=-1.0), regular & np.isfinite(solution).all(axis=-1)


def _fit_highs(s: NDArray, t: NDArray) -> NDArray:
    from scipy.optimize import linprog

    count, letters = t.shape
    identity = np.eye(letters)
    # Variables: P, then one bound u_l ≥ |s_l − (Tᵀ P)_l| for each letter.
    result = linprog(
        np.concatenate([np.zeros(count), np.ones(letters)]),
        A_ub=np.block([[t.T, -identity], [-t.T, -identity]]),
        b_ub=np.concatenate([s, -s]),
        A_eq=np.concatenate([np.ones(count), np.zeros(letters)])[None],
        b_eq=[1.0],
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if result.status != 0:
        raise RuntimeError(f"HiGHS found no fit: {result.message}")
    posterior = result.x[:count].clip(min=0.0)
    return posterior / posterior.sum()


def _fit_slsqp(s: NDArray, t: NDArray) -> NDArray:
    from scipy.optimize import minimize

    count = len(t)
    result = minimize(
        lambda p: np.abs(s - t.T @ p).sum(),
        np.full(count, 1.0 / count),
        method="SLSQP",
        bounds=[(0.0, 1.0)] * count,
        constraints={"type": "eq", "fun": lambda p: p.sum() - 1.0},
        options={"ftol": 1e-12, "maxiter": 500},
    )
    posterior = result.x.clip(min=0.0)
    return posterior / posterior.sum()


# ----------------------------------------------------------------------------------------------------- the measurement


@dataclass(frozen=True)
class Question:
    """One multiple-choice question.

    Args:
        prompt: conversational or plain.
        letters: its options' letters, in order; any words of one token each will do.
        gold: the right one, or None.
        identifier: for the records.
        feedback: z for each letter; by default that of `measure`.
        prefix: forced start of the response; by default that of `measure`.
    """

    prompt: Prompt
    letters: tuple[str, ...]
    gold: str | None = None
    identifier: str = ""
    feedback: tuple[str, ...] | None = None
    prefix: str | None = None


@dataclass(frozen=True)
class Record:
    """What one question showed; Z = L = the number of its letters.

    Args:
        question: which.
        student: s, (Z,), renormalised over the letters.
        teachers: T, (Z, Z), rows indexed by z.
        student_mass, teacher_mass: probability of any letter before that, and (Z,).
        posterior: P̂, (Z,).
        residual: ‖s − Tᵀ P̂‖₁.
        uniform_residual: ‖s − Tᵀ u‖₁ with the uniform mixture u.
    """

    question: Question
    student: Float[NDArray, " Z"]
    teachers: Float[NDArray, "Z Z"]
    student_mass: float
    teacher_mass: Float[NDArray, " Z"]
    posterior: Float[NDArray, " Z"]
    residual: float
    uniform_residual: float

    @property
    def fidelity(self) -> Float[NDArray, " Z"]:
        """T_{z→z}: how far a teacher follows its hint."""
        return np.diagonal(self.teachers)

    @property
    def is_self_consistent(self) -> bool:
        """Whether P̂ and s have the same most likely letter."""
        return int(self.posterior.argmax()) == int(self.student.argmax())

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.question.identifier,
            "letters": list(self.question.letters),
            "gold": self.question.gold,
            "student": self.student.tolist(),
            "teachers": self.teachers.tolist(),
            "student_mass": self.student_mass,
            "teacher_mass": self.teacher_mass.tolist(),
            "posterior": self.posterior.tolist(),
            "residual": self.residual,
            "uniform_residual": self.uniform_residual,
        }


def option_letters(prompt: Prompt) -> tuple[str, ...]:
    """The letters that begin option lines (`A: …`, `(B) …`, `C. …`), as far as they run on from the last A."""
    run: list[str] = []
    for letter in _OPTION.findall(user_text(prompt)):
        if letter == "A":
            run = ["A"]
        elif run and ord(letter) == ord(run[-1]) + 1:
            run.append(letter)
    return tuple(run)


def questions_of(rows: Iterable[dict[str, Any]], letters: Sequence[str] | None = None) -> list[Question]:
    """Rows with `prompt` and `answer` (a letter) as questions.

    Args:
        rows: of a multiple-choice task's data set.
        letters: of every question; None reads them off each prompt.

    Raises:
        ValueError: fewer than two letters, or a gold answer that is none of them.
    """
    questions = []
    for number, row in enumerate(rows):
        own = tuple(letters) if letters is not None else option_letters(row["prompt"])
        name, gold = str(row.get("id", number)), row.get("answer")
        if len(own) < 2 or (gold is not None and gold not in own):
            raise ValueError(f"Question {name}: options {own} and answer {gold!r} are no multiple choice of letters.")
        questions.append(Question(row["prompt"], own, gold, name))
    return questions


def balanced(questions: Sequence[Question], per_letter: int, seed: int = 0) -> list[Question]:
    """As many questions of each gold letter, `per_letter` or what the scarcest letter has, in their order.

    Only questions with the commonest letters take part.

    Raises:
        ValueError: none has one of these letters as its gold answer.
    """
    letters, _ = max(Counter(q.letters for q in questions).items(), key=lambda item: (item[1], len(item[0])))
    order = np.random.default_rng(seed).permutation(len(questions))
    by_gold = {letter: [i for i in order if questions[i].gold == letter] for letter in letters}
    by_gold = {g: [i for i in rows if questions[i].letters == letters] for g, rows in by_gold.items()}
    if without := [letter for letter, rows in by_gold.items() if not rows]:
        raise ValueError(
            f"None of the questions with the options {', '.join(letters)} has {', '.join(without)} as its answer, so "
            "letters cannot be balanced. Take more rows, or another split."
        )
    size = min(per_letter, *(len(rows) for rows in by_gold.values()))
    return [questions[i] for i in sorted(i for rows in by_gold.values() for i in rows[:size])]


def letter_ids(tokenizer: PreTrainedTokenizerBase, letters: Sequence[str]) -> list[list[int]]:
    """For each letter all token ids whose text, stripped, is that letter.

    Raises:
        ValueError: a letter without a token of its own.
    """
    ids: dict[str, list[int]] = {letter: [] for letter in letters}
    for token_id, text in enumerate(tokenizer.batch_decode([[i] for i in range(len(tokenizer))])):
        if text.strip() in ids:
            ids[text.strip()].append(token_id)
    if absent := [letter for letter, own in ids.items() if not own]:
        raise ValueError(f"The tokenizer has no token for {', '.join(absent)}.")
    return list(ids.values())


def measure(
    checkpoint: Checkpoint,
    questions: Sequence[Question],
    builder: ContextBuilder,
    *,
    feedback: str = FEEDBACK,
    prefix: str = ANSWER_PREFIX,
    progress: bool = False,
) -> list[Record]:
    """Student, teachers and fit of every question. A question's contexts are one batched forward pass.

    Both are read off the teacher, which is the model itself where nothing lags: Assumption 1 speaks of one π.

    Args:
        checkpoint: the model.
        questions: with any numbers of letters.
        builder: puts z into a prompt; `TEMPLATES` hold the paper's wording.
        feedback: z, with `{letter}`.
        prefix: the forced start of the response, after which the letter stands.
        progress: whether to show a bar.
    """
    from tqdm.auto import tqdm

    distinct = sorted({letter for q in questions for letter in q.letters})
    ids = dict(zip(distinct, letter_ids(checkpoint.tokenizer, distinct), strict=True))
    read = []
    for question in tqdm(questions, desc="questions", disable=not progress):
        contexts = [checkpoint.encode(question.prompt)]
        for z in question.feedback or [feedback.format(letter=letter) for letter in question.letters]:
            contexts.append(builder.encode(question.prompt, PrivilegedContext(feedback=z), checkpoint.render))
        start = prefix if question.prefix is None else question.prefix
        prefix_ids = checkpoint.tokenizer(start, add_special_tokens=False)["input_ids"]
        logps = last_position(Reading(checkpoint.teacher, contexts), prefix_ids)
        columns = [torch.logsumexp(logps[:, ids[letter]].double(), dim=-1).exp() for letter in question.letters]
        read.append(torch.stack(columns, dim=-1).cpu().numpy())
    return _records(questions, read)


def _records(questions: Sequence[Question], read: Sequence[NDArray]) -> list[Record]:
    """Normalise over the letters and fit, all questions of as many letters at once."""
    records: dict[int, Record] = {}
    for count in sorted({len(q.letters) for q in questions}):
        rows = [i for i, q in enumerate(questions) if len(q.letters) == count]
        probabilities = np.stack([read[i] for i in rows])
        mass = probabilities.sum(axis=-1)
        projected = probabilities / mass[..., None]
        student, teachers = projected[:, 0], projected[:, 1:]
        posterior, residuals = fit_posterior(student, teachers)
        uniform = residual(student, teachers, np.full_like(posterior, 1.0 / count))
        for n, i in enumerate(rows):
            records[i] = Record(
                questions[i],
                student[n],
                teachers[n],
                float(mass[n, 0]),
                mass[n, 1:],
                posterior[n],
                float(residuals[n]),
                float(uniform[n]),
            )
    return [records[i] for i in range(len(questions))]
