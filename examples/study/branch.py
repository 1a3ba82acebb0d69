"""The branch between the planted thought and the specific one: measured on a base, with the rate that it predicts.

At the first token of the thought, A is the planted one and B the cue of the prompt. Log-odds are log p(A) − log p(B):
ℓ of the policy without z, δ how much z raises the teacher's, s how much a contrast raises them above the teacher's,
since B loses under x'. `docs/theory.md` derives the fixed points. `contrastive_swap` decides s: that of another
prompt, that of another privileged context, or 0 where Ĝ is f.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from embedded_base.curriculum import Message, teacher_prompt
from scipy import stats
from scipy.special import expit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from credit_trl.tasks import quickstart

Conversation = list[Message]
# Log-odds of A against the cue at the branch, one for each conversation and its cue.
LogOdds = Callable[[Sequence[Conversation], Sequence[str]], np.ndarray]

BATCH_SIZE = 120
ROWS_PER_CUE = 4


@dataclass(frozen=True)
class Branch:
    """Means over the prompts of a cue, arrays with one entry per cue, in nats.

    Args:
        log_odds: ℓ.
        delta: δ.
        s_input: s of another prompt.
        s_hint: s of another prompt's privileged context.
    """

    log_odds: np.ndarray
    delta: np.ndarray
    s_input: np.ndarray
    s_hint: np.ndarray

    def s_of(self, swap: str) -> np.ndarray:
        """s for a value of `contrastive_swap`."""
        return {"input": self.s_input, "hint": self.s_hint, "self": np.zeros_like(self.delta)}[swap]


@dataclass(frozen=True)
class Prediction:
    """Fixed point ℓ* (infinite where the log-odds drift without bound), its rate, and a 95 % band of the rate."""

    log_odds: float
    rate: float
    low: float
    high: float


def measure_branch(log_odds: LogOdds, rows: Sequence[Mapping[str, Any]], seed: int = 0) -> Branch:
    """Measure ℓ, δ and s on rows of `quickstart.build`, with one contrast for each.

    A contrast is any other prompt, as in training, so a few ask about the same cue.

    Args:
        log_odds: log-odds of the model that serves as student and as teacher.
        rows: prompts with `answer` and `cue`.
        seed: seed of the contrasts.
    """
    rng = random.Random(f"branch/{seed}")
    prompts, cues = [row["prompt"] for row in rows], [row["cue"] for row in rows]
    feedback = [quickstart.verify("", row["answer"]).feedback for row in rows]
    others = [rng.choice([i for i, prompt in enumerate(prompts) if prompt != own]) for own in prompts]

    def given(sources: Sequence[int], hints: Sequence[int]) -> np.ndarray:
        contexts = [teacher_prompt(prompts[i], feedback=feedback[j]) for i, j in zip(sources, hints, strict=True)]
        return log_odds(contexts, cues)

    own = range(len(prompts))
    student, teacher = log_odds(prompts, cues), given(own, own)
    values = (student, teacher - student, given(others, own) - teacher, given(own, others) - teacher)
    return Branch(*(_mean_by_cue(one, cues) for one in values))


def _mean_by_cue(values: np.ndarray, cues: Sequence[str]) -> np.ndarray:
    return np.array([values[[other == cue for other in cues]].mean() for cue in dict.fromkeys(cues)])


def branch_rows() -> list[dict[str, Any]]:
    """Training prompts of every trained cue."""
    return quickstart.build("train", rows_per_cue=ROWS_PER_CUE, seed=1).to_list()


def model_log_odds(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> LogOdds:
    """`LogOdds` of a causal language model."""

    def first_token(thought: str) -> int:
        prefix = tokenizer("Thought:", add_special_tokens=False)["input_ids"]
        ids = tokenizer(f"Thought: {thought}", add_special_tokens=False)["input_ids"]
        if ids[: len(prefix)] != prefix:
            raise ValueError(f"The tokenizer merges 'Thought:' with the start of {thought!r}.")
        return ids[len(prefix)]

    planted = first_token(quickstart.SHORTCUT_THOUGHT)

    @torch.no_grad()
    def log_odds(prompts: Sequence[Conversation], cues: Sequence[str]) -> np.ndarray:
        texts = tokenizer.apply_chat_template(list(prompts), add_generation_prompt=True, tokenize=False)
        found = []
        for start in range(0, len(texts), BATCH_SIZE):
            batch = tokenizer(
                [f"{text}Thought:" for text in texts[start : start + BATCH_SIZE]],
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


def predict(branch: Branch, options: Mapping[str, Any]) -> Prediction | None:
    """Prediction for an arm with these options of `CreditConfig`; None for GRPO, which has no teacher."""
    if options.get("distillation_weight") == 0.0:
        return None
    coef = options.get("contrastive_coef", 0.1)
    s = branch.s_of(options.get("contrastive_swap", "input"))
    if coef > 0.0 and options.get("contrastive_form", "subtract") == "subtract":
        mean, low, high = _interval(branch.delta * (1.0 - coef) / coef - s)
    else:  # the sign of the drift decides
        mean, low, high = (np.inf * np.sign(value) for value in _interval(branch.delta - coef * s))
    return Prediction(float(mean), *(float(expit(value)) for value in (mean, low, high)))


def critical_coef(branch: Branch, form: str = "subtract") -> float:
    """λ_c, above which A loses, for contrasts with another prompt."""
    delta, s = branch.delta.mean(), branch.s_input.mean()
    return float(delta / s if form == "guide" else delta / (delta + s))


def _interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean over cues with its 95 % t interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return values.mean(), values.mean() - half, values.mean() + half
