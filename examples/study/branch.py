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
import pandas as pd
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
class BranchRows:
    """Prompts of a branch, with the feedback and text B of each."""

    prompts: Sequence[Conversation]
    feedback: Sequence[str]
    specific: Sequence[str]

    @property
    def given(self) -> list[Conversation]:
        """The conversations with their feedback, as the teacher reads them."""
        return [
            teacher_prompt(prompt, feedback=told) for prompt, told in zip(self.prompts, self.feedback, strict=True)
        ]


def measure_branch(log_odds: LogOdds, rows: BranchRows, seed: int = 0) -> dict[str, float]:
    """Measure ℓ, ℓ + δ, δ and s in nats on the prompts of a task, with one contrast for each: means over texts B.

    A contrast is any other prompt, as in training, so a few have the same B.

    Args:
        log_odds: log-odds of the model that serves as student and as teacher.
        rows: the prompts.
        seed: seed of the contrasts.
    """
    rng = random.Random(f"branch/{seed}")
    contrast_prompts = []
    for prompt in rows.prompts:
        contrast_prompts.append(rng.choice([candidate for candidate in rows.prompts if candidate != prompt]))
    contrasts = [
        teacher_prompt(contrast, feedback=text) for contrast, text in zip(contrast_prompts, rows.feedback, strict=True)
    ]
    branch = pd.DataFrame({"log_odds": log_odds(rows.prompts, rows.specific)})
    branch["log_odds_given"] = log_odds(rows.given, rows.specific)
    branch["delta"] = branch["log_odds_given"] - branch["log_odds"]
    branch["s"] = log_odds(contrasts, rows.specific) - branch["log_odds_given"]
    return branch.groupby(list(rows.specific)).mean().mean().to_dict()


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
        parts = []
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
            parts.append(logits[:, planted] - logits.gather(-1, specific[:, None])[:, 0])
        return torch.cat(parts).double().numpy()

    return log_odds
