"""The branch between a planted text and a specific one, measured on a base; `law.py` predicts from it.

At one position of the response, A is the planted text and B that of the prompt. Log-odds are log p(A) − log p(B):
ℓ of the policy without z, δ how much z raises the teacher's, s how much a contrast raises them above the teacher's,
since B loses under x'.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from embedded_base.curriculum import Message, teacher_prompt
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from credit_trl.tasks.registry import Task

Conversation = list[Message]
# Log-odds of A against B at the branch, one for each conversation and its B.
LogOdds = Callable[[Sequence[Conversation], Sequence[str]], np.ndarray]

BATCH_SIZE = 120
ROWS_PER_CUE = 4


@dataclass(frozen=True)
class BranchPoint:
    """Position of a branch in the responses of a task.

    Args:
        start: the response before the branch.
        planted: text A, whose first token is measured.
        column: column of the task's rows with text B.
    """

    start: str
    planted: str
    column: str


@dataclass(frozen=True)
class Branch:
    """Means over the prompts with the same B, arrays with one entry per B, in nats.

    Args:
        log_odds: ℓ.
        delta: δ.
        s: s.
    """

    log_odds: np.ndarray
    delta: np.ndarray
    s: np.ndarray


@dataclass(frozen=True)
class BranchRows:
    """Prompts of a branch, with the feedback and text B of each."""

    prompts: Sequence[Conversation]
    feedback: Sequence[str]
    specific: Sequence[str]

    @property
    def given(self) -> list[Conversation]:
        """The conversations with their feedback, as the teacher reads them."""
        return [teacher_prompt(one, feedback=told) for one, told in zip(self.prompts, self.feedback, strict=True)]


def measure_branch(log_odds: LogOdds, rows: BranchRows, seed: int = 0) -> Branch:
    """Measure ℓ, δ and s on the prompts of a task, with one contrast for each.

    A contrast is any other prompt, as in training, so a few have the same B.

    Args:
        log_odds: log-odds of the model that serves as student and as teacher.
        rows: the prompts.
        seed: seed of the contrasts.
    """
    rng = random.Random(f"branch/{seed}")
    prompts, feedback, cues = rows.prompts, rows.feedback, rows.specific
    others = [rng.choice([i for i, prompt in enumerate(prompts) if prompt != own]) for own in prompts]

    contrasts = [teacher_prompt(prompts[i], feedback=own) for i, own in zip(others, feedback, strict=True)]
    student = log_odds(prompts, cues)
    teacher = log_odds(rows.given, cues)
    values = (student, teacher - student, log_odds(contrasts, cues) - teacher)
    return Branch(*(_mean_by_cue(one, cues) for one in values))


def _mean_by_cue(values: np.ndarray, cues: Sequence[str]) -> np.ndarray:
    return np.array([values[[other == cue for other in cues]].mean() for cue in dict.fromkeys(cues)])


def branch_rows(task: Task, point: BranchPoint, rows_per_cue: int = ROWS_PER_CUE) -> BranchRows:
    """Training prompts of every trained cue."""
    rows = task.build("train", rows_per_cue=rows_per_cue, seed=1).to_list()
    feedback = [task.verify("", row["answer"]).feedback for row in rows]
    return BranchRows([row["prompt"] for row in rows], feedback, [row[point.column] for row in rows])


def model_log_odds(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, point: BranchPoint) -> LogOdds:
    """`LogOdds` of a causal language model."""

    def first_token(text: str) -> int:
        prefix = tokenizer(point.start, add_special_tokens=False)["input_ids"]
        ids = tokenizer(f"{point.start} {text}", add_special_tokens=False)["input_ids"]
        if ids[: len(prefix)] != prefix:
            raise ValueError(f"The tokenizer merges {point.start!r} with the start of {text!r}.")
        return ids[len(prefix)]

    planted = first_token(point.planted)

    @torch.no_grad()
    def log_odds(prompts: Sequence[Conversation], cues: Sequence[str]) -> np.ndarray:
        texts = tokenizer.apply_chat_template(list(prompts), add_generation_prompt=True, tokenize=False)
        found = []
        for start in range(0, len(texts), BATCH_SIZE):
            batch = tokenizer(
                [f"{text}{point.start}" for text in texts[start : start + BATCH_SIZE]],
                padding=True,
                padding_side="left",
                add_special_tokens=False,
                return_tensors="pt",
            )
            logits = model(**batch, logits_to_keep=1).logits[:, -1]
            specific = torch.tensor([first_token(cue) for cue in cues[start : start + BATCH_SIZE]])
            found.append(logits[:, planted] - logits.gather(-1, specific[:, None])[:, 0])
        return torch.cat(found).double().numpy()

    return log_odds
