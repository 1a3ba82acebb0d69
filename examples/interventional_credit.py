"""Compare the self-distillation reward with interventional credit (the test that Appendix F leaves open).

The task is the embedded one, a tool call with a binary verifier. At the positions of highest entropy, each
likely token is forced and the policy continues many times: the success rates give r^cf. r^z and R_t of the same tokens
come from two forward passes. There are two students and three kinds of feedback:

- `base`: the shipped model, for which verdicts are arbitrary words;
- `exact`: the base fine-tuned on its own graded responses, with and without the verdict in the prompt. Both passes fit
  one joint P(y, z | x) (Assumption 1), and the verdict is the outcome (Corollary 5);
- feedback: the verdict "right", the verdict "wrong", or the letter of the right option. The letter, the task's own
  feedback, depends on the question alone, so Proposition 4 does not apply to it.

The fine-tuned student is measured only if it uses the verdict: the mean of log P(right | y) / P(wrong | y), from its
passes over responses to other prompts, must be higher for successes than for failures by `--gate` nats.

    python examples/interventional_credit.py --csv runs/interventional.csv --seeds 0 1 2 3

Rows of the CSV are the share of candidate pairs with different success rates that a quantity orders as the rates do
(½ is chance), by student, seed, feedback and quantity. Students that are in the file are skipped.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from credit_trl import objective
from credit_trl.contexts.tokens import PrivilegedContext
from credit_trl.evaluation import SamplingConfig
from credit_trl.lab.analysis import interventional as iv
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.responses import Rollout, analysis_config, draw, grade_rollouts, rollout_contexts
from credit_trl.lab.analysis.vocabulary_logps import CreditFormula, RolloutContexts, credit_logps
from credit_trl.tasks import Task, load_task

# One token each in the embedded vocabulary, without a meaning before fine-tuning: failure, success.
VERDICTS = ("Expected.", "Correct.")
STUDENTS = ("base", "exact")
# Name → field of `Branching`, and the formula of R_t.
QUANTITIES: dict[str, tuple[str, CreditFormula]] = {
    "r^z": ("rewards", CreditFormula(0.0)),
    "R_t, subtract, λ = 0.1": ("advantages", CreditFormula(0.1)),
    "R_t, guide, λ = 1": ("advantages", CreditFormula(1.0, "guide")),
    "log π": ("student_logps", CreditFormula(0.0)),
}
COLUMNS = ["student", "seed", "feedback", "quantity", "value"]


@dataclass(frozen=True)
class Graded:
    """Prompts as token ids, one sampled response to each, and whether it succeeds."""

    prompts: list[list[int]]
    responses: list[list[int]]
    outcomes: np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=list(STUDENTS))
    parser.add_argument("--csv", type=Path, default=Path("runs/interventional.csv"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--gate", type=float, default=1.0, help="nats by which the student separates the verdicts")
    parser.add_argument("--questions", type=int, help="rows of the training split (default: all)")
    parser.add_argument("--steps", type=int, default=600, help="steps of fine-tuning the exact student")
    parser.add_argument("--prompts", type=int, default=40, help="test prompts a seed (known and unknown cues)")
    parser.add_argument("--positions", type=int, default=2, help="prefixes of a response")
    parser.add_argument("--candidates", type=int, default=4, help="maximum number of tokens forced after a prefix")
    parser.add_argument("--samples", type=int, default=32, help="rollouts of each candidate; twice as many without")
    args = parser.parse_args()
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    for seed, student in product(args.seeds, args.students):
        stored = pd.read_csv(args.csv) if args.csv.exists() else pd.DataFrame(columns=COLUMNS)
        if not ((stored["student"] == student) & (stored["seed"] == seed)).any():
            rows = pd.DataFrame(run(args, seed, student), columns=COLUMNS)
            rows.to_csv(args.csv, mode="a", header=not args.csv.exists(), index=False)
    summary = pd.read_csv(args.csv).groupby(["student", "feedback", "quantity"], sort=False)["value"]
    print(summary.agg(["mean", "sem", "count"]).round(2).to_string())


def run(args: argparse.Namespace, seed: int, name: str) -> list[tuple[Any, ...]]:
    """Rows of a student; a fine-tuned one that fails the gate has its separation only."""
    task = load_task("quickstart")
    base = Checkpoint.load("quickstart", name="base")
    if name == "base":
        return measure(args, seed, task, base)
    rows = 2 * list(task.build("train", seed=seed))[: args.questions]  # two responses to each
    graded = graded_responses(base, task, rows, seed)
    with_verdicts = [[with_verdict(base, row, z) for row in rows] for z in (0, 1)]
    model = copy.deepcopy(base.student.student).train()
    fine_tune(model, graded, with_verdicts, steps=args.steps, seed=seed)
    student = Checkpoint.from_model(model.eval(), base.tokenizer, name=name)
    unseen = list(task.build("test", groups=("known", "unknown"), seed=seed + 500).take(8 * args.prompts))
    separated = separation(student, graded_responses(base, task, unseen, seed + 500), unseen)
    separation_rows = [(name, seed, "right over wrong", "separation", separated)]
    if separated < args.gate:
        print(f"seed {seed}: the student separates verdicts by {separated:.2f} nats, below --gate {args.gate:g}.")
        return separation_rows
    return separation_rows + measure(args, seed, task, student)


def graded_responses(checkpoint: Checkpoint, task: Task, rows: list[dict[str, Any]], seed: int) -> Graded:
    """One graded response to each row, sampled from the full distribution."""
    prompts = [checkpoint.encode(row["prompt"]) for row in rows]
    responses = checkpoint.generate(prompts, full_sampling(seed), batch_size=256)
    verdicts = grade_rollouts(checkpoint, task, rows, responses)
    return Graded(prompts, responses, np.array([verdict.reward == 1.0 for verdict in verdicts]))


def full_sampling(seed: int) -> SamplingConfig:
    """Sampling from the full distribution."""
    return SamplingConfig(temperature=1.0, top_p=1.0, max_completion_length=32, seed=seed)


def with_verdict(checkpoint: Checkpoint, row: dict[str, Any], z: int) -> list[int]:
    """Token ids of (x, z)."""
    builder = checkpoint.context_builder(analysis_config())
    return builder.encode(row["prompt"], PrivilegedContext(feedback=VERDICTS[z]))


def fine_tune(
    model: nn.Module,
    graded: Graded,
    with_verdicts: list[list[list[int]]],
    *,
    steps: int,
    seed: int,
    batch_size: int = 16,
) -> None:
    """Maximum likelihood of the responses, with the verdict in the prompt with probability 3/4.

    Muon on the matrices and AdamW on the rest, as in the pretraining of the base: with AdamW alone the model ignores
    the verdict.

    Args:
        model: the student, changed in place.
        graded: its training data.
        with_verdicts: token ids of the prompts with the verdict of failure and of success.
        steps: optimizer steps.
        seed: seed of the batches.
        batch_size: responses of a step.
    """
    parameters = list(model.named_parameters())
    matrices = [parameter for name, parameter in parameters if parameter.ndim == 2 and "embed" not in name]
    vectors = [parameter for name, parameter in parameters if parameter.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0),
        torch.optim.AdamW(vectors, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, partial(_schedule, steps=steps)) for o in optimizers]
    draws = random.Random(seed)
    for _ in range(steps):
        batch = []
        for index in draws.sample(range(len(graded.responses)), min(batch_size, len(graded.responses))):
            prompts = with_verdicts[int(graded.outcomes[index])] if draws.random() < 0.75 else graded.prompts
            batch.append((prompts[index], graded.responses[index]))
        loss = -torch.cat(token_logps(model, batch)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def _schedule(step: int, steps: int, warm_up: int = 30) -> float:
    """Learning rate factor: warm-up, constant for 60 % of the steps, then linear decay to 0."""
    return min(1.0, (step + 1) / warm_up, (steps - step) / (0.4 * steps))


def token_logps(model: nn.Module, batch: list[tuple[list[int], list[int]]]) -> list[torch.Tensor]:
    """log π of each response's tokens after its context."""
    ids = pad_sequence([torch.tensor(context + y) for context, y in batch], batch_first=True)
    hidden = model.base_model(input_ids=ids).last_hidden_state
    response_states = torch.cat(
        [hidden[i, len(context) - 1 : len(context) + len(y) - 1] for i, (context, y) in enumerate(batch)]
    )
    targets = torch.tensor([token for _, y in batch for token in y])
    return list(
        (-F.cross_entropy(model.lm_head(response_states), targets, reduction="none")).split([len(y) for _, y in batch])
    )


@torch.no_grad()
def separation(student: Checkpoint, graded: Graded, rows: Sequence[dict[str, Any]]) -> float:
    """Mean log P(right | y) / P(wrong | y) of successes less that of failures, in nats, by the student's passes."""
    sums = []
    for z in (0, 1):
        pairs = list(zip((with_verdict(student, row, z) for row in rows), graded.responses, strict=True))
        parts = [token_logps(student.student.student, pairs[i : i + 64]) for i in range(0, len(pairs), 64)]
        sums.append(np.array([logps.sum().item() for part in parts for logps in part]))
    wrong, right = sums
    odds = right - wrong
    return float(odds[graded.outcomes].mean() - odds[~graded.outcomes].mean())


def measure(args: argparse.Namespace, seed: int, task: Task, student: Checkpoint) -> list[tuple[Any, ...]]:
    """Force the candidates, and compare every quantity with r^cf under each feedback at the same prefixes."""
    dataset = task.build("test", groups=("known", "unknown"), seed=seed)
    rows = list(dataset.take(args.prompts))
    graded = graded_responses(student, task, rows, seed)
    config = analysis_config(contrastive_count=4, seed=seed)
    contrasts = draw([row["prompt"] for row in rows], list(dataset["prompt"]), config)
    letters = [verdict.feedback for verdict in grade_rollouts(student, task, rows, graded.responses)]

    def branchings(texts: list[str], formula: CreditFormula) -> list[iv.Branching]:
        """Prefixes of all responses with their candidates, whose values are those under a feedback."""
        candidates = []
        for question, (row, y, z) in enumerate(zip(rows, graded.responses, texts, strict=True)):
            rollout = Rollout(
                row["id"], row["prompt"], tuple(y), PrivilegedContext(feedback=z), tuple(contrasts[question])
            )
            contexts = rollout_contexts(rollout, config, student)
            candidates += candidates_of(
                student,
                contexts,
                y,
                formula,
                positions=args.positions,
                candidates=args.candidates,
                question=question,
            )
        return candidates

    feedbacks = {"right": [VERDICTS[1]] * len(rows), "wrong": [VERDICTS[0]] * len(rows), "letter": letters}
    forced = branchings(feedbacks["right"], CreditFormula(0.0))
    rollouts = args.samples * sum(len(branching.candidates) + 2 for branching in forced)
    print(f"seed {seed}, {student.name}: {len(forced)} prefixes, {rollouts:,} rollouts", flush=True)
    outcomes = iv.policy_outcomes(student, task, rows, full_sampling(seed + 1000))
    credits = iv.run_branchings(forced, args.samples, 2 * args.samples, outcomes)
    return [
        (student.name, seed, feedback, quantity, rank_agreement(credits, branchings(texts, formula), field))
        for feedback, texts in feedbacks.items()
        for quantity, (field, formula) in QUANTITIES.items()
    ]


def candidates_of(
    checkpoint: Checkpoint,
    contexts: RolloutContexts,
    token_ids: Sequence[int],
    formula: CreditFormula,
    *,
    positions: int,
    candidates: int,
    min_probability: float = 0.01,
    question: int = 0,
) -> list[iv.Branching]:
    """Prefixes of y with the highest entropy of the policy, each with its most likely tokens.

    Args:
        positions: number of prefixes.
        candidates: maximum number of tokens at a prefix.
        min_probability: lowest probability of a candidate under the policy.
        question: index of the question, stored in the branchings.

    Returns:
        Prefixes with two or more candidates, in the order of the response.
    """
    scored: list[tuple[float, iv.Branching]] = []
    for rows, logps in credit_logps(checkpoint, contexts, token_ids, formula.temperature):
        entropy = torch.special.entr(logps.student.exp()).sum(dim=-1)
        top = logps.student.topk(min(candidates, logps.student.shape[-1]), dim=-1)
        advantages = formula.advantages(logps, top.indices)
        rewards = objective.self_distillation_reward(logps.teacher.gather(-1, top.indices), top.values)
        for n in range(len(entropy)):
            likely = top.values[n].exp() >= min_probability
            if likely.sum() > 1:
                prefix = tuple(token_ids[: rows.start + n])
                chosen = tuple(top.indices[n, likely].tolist())
                picked = (values[n, likely].cpu() for values in (rewards, advantages, top.values))
                scored.append((entropy[n].item(), iv.Branching(prefix, chosen, *picked, question)))
    most_uncertain = sorted(scored, key=lambda item: -item[0])[:positions]
    return [branching for _, branching in sorted(most_uncertain, key=lambda item: len(item[1].prefix))]


def rank_agreement(
    credits: Sequence[iv.InterventionalCredit], branchings: Sequence[iv.Branching], field: str
) -> float:
    """Mean `concordance` of r^cf and a field of the branchings, over resolved prefixes; NaN if there is none."""
    agreements = [
        concordance(credit.successes, getattr(branching, field).double().numpy())
        for credit, branching in zip(credits, branchings, strict=True)
        if is_resolved(credit)
    ]
    return float(np.mean(agreements)) if agreements else float("nan")


def is_resolved(credit: iv.InterventionalCredit) -> bool:
    """Whether the rates of the best and the worst candidate differ by more than two standard errors."""
    rates = credit.successes / credit.samples
    spread = rates.max() - rates.min()
    pooled = rates.mean()
    return bool(spread > 2.0 * np.sqrt(2.0 * pooled * (1.0 - pooled) / credit.samples) and spread > 0.0)


def concordance(successes: np.ndarray, values: np.ndarray) -> float:
    """Share of the pairs with different success rates that `values` order alike; its ties count ½, so ½ is chance."""
    difference = np.sign(successes[:, None] - successes[None])
    ordered = np.sign(values[:, None] - values[None])[difference > 0]
    return float((ordered > 0).mean() + 0.5 * (ordered == 0).mean())


if __name__ == "__main__":
    main()
