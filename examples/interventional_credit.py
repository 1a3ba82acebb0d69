"""Compare the self-distillation reward with interventional credit (the test that Appendix F leaves open).

The task is the embedded one, a tool call with a binary verifier. At the positions of highest entropy, each
likely token is forced and the policy continues many times: the success rates give r^cf. r^z and R_t of the same tokens
come from two forward passes. There are three students and three kinds of feedback:

- `base`: the shipped model, for which verdicts are arbitrary words;
- `exact`: the base fine-tuned on its own graded responses, with and without the verdict in the prompt. Both passes fit
  one joint P(y, z | x) (Assumption 1), and the verdict is the outcome (Corollary 5);
- `noisy`: `exact` trained further with verdicts that are flipped with probability `--noise` each time they are shown:
  a noisy function of the outcome, as in Assumption 2 and Proposition 4;
- feedback: the verdict "right", the verdict "wrong", or the letter of the right option. The letter, the task's own
  feedback, depends on the question alone, so Proposition 4 does not apply to it.

A fine-tuned student is measured only if it uses the verdict: the mean of log P(right | y) / P(wrong | y), from its two
passes over responses to other prompts, must be higher for successes than for failures by `--gate` nats. Otherwise the
result records that it failed the gate.

    python examples/interventional_credit.py --output_dir runs/interventional --seeds 0 1 2 3
    python examples/interventional_credit.py --model BASE --task tool_choice --students base --seeds 0 --prompts 12

Finished pieces are stored in the directory, where a second call continues; `--pieces 1` runs one piece a call.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student_t
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from credit_trl.contexts.builder import ContextBuilder
from credit_trl.contexts.privileged import PrivilegedContext
from credit_trl.evaluation import SamplingConfig
from credit_trl.lab.analysis import interventional as iv
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.formula import CreditFormula, CreditSettings
from credit_trl.lab.analysis.passes import RolloutContexts
from credit_trl.lab.analysis.responses import Rollout, analysis_config, draw, grade_rollouts, rollout_contexts
from credit_trl.objective import ContrastRule
from credit_trl.tasks.registry import Task, load_task
from credit_trl.training.run_directory import write_json

# One token each in the embedded vocabulary, without a meaning before fine-tuning: failure, success.
VERDICTS = ("Expected.", "Correct.")
STUDENTS = ("base", "exact", "noisy")
FEEDBACKS = ("right", "wrong", "letter")
# Name → field of `Branching`, and settings of R_t.
QUANTITIES: dict[str, tuple[str, CreditSettings]] = {
    "r^z": ("rewards", CreditSettings(0.0)),
    "R_t, subtract, λ = 0.1": ("advantages", CreditSettings(0.1)),
    "R_t, guide, λ = 1": ("advantages", CreditSettings(1.0, CreditFormula(ContrastRule("guide")))),
    "log π": ("student_logps", CreditSettings(0.0)),
}
GAPS = ("gap", "standard_error", "gap_to_theory")
# Options of the held-out rows, by task.
TEST_ROWS = {"quickstart": {"groups": ("known", "unknown")}}
MAX_NEW_TOKENS = 32


@dataclass(frozen=True)
class Graded:
    """Prompts as token ids, one sampled response to each, and whether it succeeds."""

    prompts: list[list[int]]
    responses: list[list[int]]
    outcomes: np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quickstart", help="path of a base of the task")
    parser.add_argument("--task", default="quickstart", help="a task with prompts and rewards of 0 and 1")
    parser.add_argument("--students", nargs="+", choices=STUDENTS, default=list(STUDENTS))
    parser.add_argument("--output_dir", type=Path, default=Path("runs/interventional"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--pieces", type=int, help="stop after this many students fine-tuned or measured")
    parser.add_argument("--noise", type=float, default=0.2, help="probability of a flipped verdict (noisy student)")
    parser.add_argument("--gate", type=float, default=1.0, help="nats; the optimum for noise 0.2 is 2 log 4 = 2.77")
    parser.add_argument("--questions", type=int, help="rows of the training split (default: all)")
    parser.add_argument("--epochs", type=int, default=2, help="responses to each row")
    parser.add_argument("--steps", type=int, default=600, help="steps of fine-tuning the exact student")
    parser.add_argument("--noisy_steps", type=int, default=400, help="further steps with noisy verdicts")
    parser.add_argument("--prompts", type=int, default=40, help="test prompts a seed (known and unknown cues)")
    parser.add_argument("--positions", type=int, default=2, help="prefixes of a response")
    parser.add_argument("--candidates", type=int, default=4, help="maximum number of tokens forced after a prefix")
    parser.add_argument(
        "--samples", type=int, default=32, help="rollouts of each candidate; a prefix gets twice as many"
    )
    args = parser.parse_args()
    for number, (done, piece) in enumerate(missing_pieces(args), 1):
        write_json(done, piece())
        if number == args.pieces:
            return
    result = combine(args)
    write_json(args.output_dir / "result.json", result)
    print(format_result(result))


def missing_pieces(args: argparse.Namespace) -> Iterator[tuple[Path, partial[Any]]]:
    """Yield the output file of each unfinished piece and the function that returns its content."""
    for seed in args.seeds:
        folder = args.output_dir / f"seed-{seed}"
        for name in args.students:
            if name != "base" and not (folder / f"student-{name}.json").exists():
                yield folder / f"student-{name}.json", partial(make_student, args, seed, name)
            if not passes_gate(folder, name):
                print(f"seed {seed}: the {name} student separates verdicts by under {args.gate:g} nats: not measured.")
                break  # the noisy student starts from the exact one
            if not (folder / f"measured-{name}.json").exists():
                yield folder / f"measured-{name}.json", partial(measure, args, seed, name)


def passes_gate(folder: Path, name: str) -> bool:
    return name == "base" or json.loads((folder / f"student-{name}.json").read_text("utf-8"))["passed"]


def make_student(args: argparse.Namespace, seed: int, name: str) -> dict[str, float]:
    """Fine-tune and save a student; returns its statistics and whether it passes the gate."""
    task, base = load_task(args.task), Checkpoint.load(args.model, name="base")
    rows = list(task.build("train", seed=seed))[: args.questions] * args.epochs
    noise, steps, start = (args.noise, args.noisy_steps, "exact") if name == "noisy" else (0.0, args.steps, "base")
    model = copy.deepcopy(load_student(args, seed, start).student.student).train()
    graded = graded_responses(base, task, rows, seed)
    with_verdicts = [[with_verdict(base, row, z) for row in rows] for z in (0, 1)]
    loss = fine_tune(model, graded, with_verdicts, noise=noise, steps=steps, seed=seed)
    student = Checkpoint.of(model.eval(), base.tokenizer, name=name)
    others = list(task.build("test", **TEST_ROWS.get(args.task, {}), seed=seed))[args.prompts :]
    facts = {"base_success": float(graded.outcomes.mean()), "loss": loss}
    facts |= separation(student, base, task, others, seed)
    print(f"seed {seed}, {name}: " + ", ".join(f"{key} {value:.3f}" for key, value in facts.items()), flush=True)
    model.save_pretrained(args.output_dir / f"seed-{seed}" / name)
    return facts | {"passed": facts["separation"] >= args.gate}


def load_student(args: argparse.Namespace, seed: int, name: str) -> Checkpoint:
    base = Checkpoint.load(args.model, name="base")
    if name == "base":
        return base
    model = AutoModelForCausalLM.from_pretrained(args.output_dir / f"seed-{seed}" / name).eval()
    return Checkpoint.of(model, base.tokenizer, name=name)


def graded_responses(checkpoint: Checkpoint, task: Task, rows: list[dict[str, Any]], seed: int) -> Graded:
    """One graded response to each row, sampled from the full distribution."""
    prompts = [checkpoint.encode(row["prompt"]) for row in rows]
    responses = checkpoint.generate(prompts, full_sampling(seed), batch_size=256)
    verdicts = grade_rollouts(checkpoint, task, rows, responses)
    return Graded(prompts, responses, np.array([verdict.reward == 1.0 for verdict in verdicts]))


def full_sampling(seed: int) -> SamplingConfig:
    """Sampling from the full distribution."""
    return SamplingConfig(temperature=1.0, top_p=1.0, max_completion_length=MAX_NEW_TOKENS, seed=seed)


def with_verdict(checkpoint: Checkpoint, row: dict[str, Any], z: int) -> list[int]:
    """Token ids of (x, z)."""
    builder = ContextBuilder(checkpoint.tokenizer, analysis_config(), checkpoint.end_ids())
    return builder.encode(row["prompt"], PrivilegedContext(feedback=VERDICTS[z]), checkpoint.render)


def fine_tune(
    model: nn.Module,
    graded: Graded,
    with_verdicts: list[list[list[int]]],
    *,
    noise: float,
    steps: int,
    seed: int,
    batch_size: int = 16,
) -> float:
    """Maximum likelihood of the responses, with the verdict in the prompt with probability 3/4; returns the last loss.

    Muon on the matrices and AdamW on the rest, as in the pretraining of the base: with AdamW alone the model ignores
    the verdict.

    Args:
        model: the student, changed in place.
        graded: its training data.
        with_verdicts: token ids of the prompts with the verdict of failure and of success.
        noise: probability of a flipped verdict.
        steps: optimizer steps.
        seed: seed of the batches.
        batch_size: responses of a step.
    """
    named = list(model.named_parameters())
    matrices = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    rest = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, partial(_schedule, steps=steps)) for o in optimizers]
    draws, total = random.Random(seed), 0.0
    for _ in range(steps):
        batch = []
        for index in draws.sample(range(len(graded.responses)), min(batch_size, len(graded.responses))):
            z = int(graded.outcomes[index]) ^ (draws.random() < noise)
            prompts = with_verdicts[z] if draws.random() < 0.75 else graded.prompts
            batch.append((prompts[index], graded.responses[index]))
        loss = -torch.cat(token_logps(model, batch)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total = loss.item()
    return total


def _schedule(step: int, steps: int, warm_up: int = 30) -> float:
    """Learning rate factor: warm-up, constant for 60 % of the steps, then linear decay to 0."""
    return min(1.0, (step + 1) / warm_up, (steps - step) / (0.4 * steps))


def token_logps(model: nn.Module, batch: list[tuple[list[int], list[int]]]) -> list[torch.Tensor]:
    """log π of each response's tokens after its context."""
    ids = pad_sequence([torch.tensor(context + y) for context, y in batch], batch_first=True)
    hidden = model.base_model(input_ids=ids).last_hidden_state
    kept = torch.cat([hidden[i, len(context) - 1 : len(context) + len(y) - 1] for i, (context, y) in enumerate(batch)])
    targets = torch.tensor([token for _, y in batch for token in y])
    return list((-F.cross_entropy(model.lm_head(kept), targets, reduction="none")).split([len(y) for _, y in batch]))


@torch.no_grad()
def separation(
    student: Checkpoint, base: Checkpoint, task: Task, rows: list[dict[str, Any]], seed: int
) -> dict[str, float]:
    """Statistics of the student's passes with and without the verdict, on responses of the base to unseen prompts.

    Returns:
        Mean pmi(y; z | x) of successes and of failures for both verdicts, and `separation`, the difference of the mean
        log P(right | y) / P(wrong | y) between successes and failures, all in nats.
    """
    graded = graded_responses(base, task, rows, seed)
    outcomes = graded.outcomes
    sums = []
    for prompts in (graded.prompts, *([with_verdict(base, row, z) for row in rows] for z in (0, 1))):
        pairs = list(zip(prompts, graded.responses, strict=True))
        parts = [token_logps(student.student.student, pairs[i : i + 64]) for i in range(0, len(pairs), 64)]
        sums.append(np.array([logps.sum().item() for part in parts for logps in part]))
    plain, wrong, right = sums
    odds = right - wrong
    return {
        "pmi_right_success": float((right - plain)[outcomes].mean()),
        "pmi_right_failure": float((right - plain)[~outcomes].mean()),
        "pmi_wrong_success": float((wrong - plain)[outcomes].mean()),
        "pmi_wrong_failure": float((wrong - plain)[~outcomes].mean()),
        "separation": float(odds[outcomes].mean() - odds[~outcomes].mean()),
    }


def measure(args: argparse.Namespace, seed: int, name: str) -> dict[str, Any]:
    """r^cf, and every quantity under each feedback at the same prefixes and candidates."""
    task, student = load_task(args.task), load_student(args, seed, name)
    dataset = task.build("test", **TEST_ROWS.get(args.task, {}), seed=seed)
    rows = list(dataset.take(args.prompts))
    graded = graded_responses(student, task, rows, seed)
    contexts = feedback_contexts(student, task, rows, list(dataset["prompt"]), graded, seed)

    def branchings(feedback: str, settings: CreditSettings) -> list[iv.Branching]:
        options = {"positions": args.positions, "candidates": args.candidates}
        return [
            branching
            for question, (own, y) in enumerate(zip(contexts[feedback], graded.responses, strict=True))
            for branching in iv.candidates_of(student, own, y, settings, **options, question=question)
        ]

    plan = iv.BranchPlan(branchings("right", CreditSettings(0.0)), args.samples, 2 * args.samples, MAX_NEW_TOKENS)
    rollouts = iv.policy_rollouts(student, graded.prompts, full_sampling(seed + 1000))
    announce = partial(print, f"seed {seed}, {name}:", flush=True)
    credits = iv.run_plan(plan, rollouts, iv.graded_by(student, task, rows), announce=announce)
    found: dict[str, Any] = {"success": float(graded.outcomes.mean()), "prefixes": len(credits)}
    found["resolved"] = sum(credit.is_resolved for credit in credits)
    for feedback in FEEDBACKS:
        found[feedback] = {"agreement": {}}
        for quantity, (field, settings) in QUANTITIES.items():
            own = branchings(feedback, settings)
            with_quantity = [replace(credit, branching=b) for credit, b in zip(credits, own, strict=True)]
            agreement = iv.rank_agreement(with_quantity, field, resolved=True)
            values = {key: getattr(agreement, key) for key in ("kendall", "spearman", "concordance", "top")}
            found[feedback]["agreement"][quantity] = values
            if quantity == "r^z":
                found[feedback] |= gaps(with_quantity, args.noise if name == "noisy" else 0.0, feedback)
    return found


def feedback_contexts(
    student: Checkpoint,
    task: Task,
    rows: list[dict[str, Any]],
    population: list[Any],
    graded: Graded,
    seed: int,
) -> dict[str, list[RolloutContexts]]:
    """Prompts of every response under each kind of feedback."""
    config = analysis_config(contrastive_count=4, seed=seed)
    contrasts = draw([row["prompt"] for row in rows], population, config)
    letters = [verdict.feedback for verdict in grade_rollouts(student, task, rows, graded.responses)]
    texts = {"right": [VERDICTS[1]] * len(rows), "wrong": [VERDICTS[0]] * len(rows), "letter": letters}
    return {
        feedback: [
            rollout_contexts(
                Rollout(row["id"], row["prompt"], tuple(y), PrivilegedContext(feedback=z), tuple(drawn)),
                config,
                student,
            )
            for row, y, z, drawn in zip(rows, graded.responses, texts[feedback], contrasts, strict=True)
        ]
        for feedback in FEEDBACKS
    }


def gaps(credits: list[iv.InterventionalCredit], noise: float, feedback: str) -> dict[str, float]:
    """Median distances of r^z, in nats, from r^cf and from Eq. 34's affine map of the measured rates."""
    resolved = [credit for credit in credits if credit.is_resolved]
    nothing = dict.fromkeys(GAPS, float("nan"))
    if not resolved:
        return nothing
    rewards = np.concatenate([c.branching.rewards.double().numpy() for c in resolved])
    credit, error = (np.concatenate([getattr(c, key) for c in resolved]) for key in ("credit", "standard_error"))
    found = {"gap": float(np.median(abs(rewards - credit))), "standard_error": float(np.median(error))}
    if feedback == "letter":
        return nothing | found
    q0, q1 = (noise, 1.0 - noise) if feedback == "right" else (1.0 - noise, noise)
    theory = [
        np.log(q0 + (q1 - q0) * iv.smoothed_rate(c.successes, c.samples))
        - np.log(q0 + (q1 - q0) * iv.smoothed_rate(np.array(c.baseline_successes), c.baseline_samples))
        for c in resolved
    ]
    return found | {"gap_to_theory": float(np.median(abs(rewards - np.concatenate(theory))))}


def combine(args: argparse.Namespace) -> dict[str, Any]:
    """Numbers of every seed, and their means with standard errors and 95 % intervals over seeds."""
    seeds = {
        str(seed): {
            path.stem: json.loads(path.read_text("utf-8"))
            for path in sorted((args.output_dir / f"seed-{seed}").glob("*.json"))
        }
        for seed in args.seeds
    }
    measured = {name: [s[f"measured-{name}"] for s in seeds.values() if f"measured-{name}" in s] for name in STUDENTS}
    rows = [
        {"student": student, "feedback": feedback, "quantity": quantity, "seeds": len(measured[student])}
        | {
            measure: over_seeds([one[feedback]["agreement"][quantity][measure] for one in measured[student]])
            for measure in ("concordance", "kendall", "spearman", "top")
        }
        for student in STUDENTS
        for feedback in FEEDBACKS
        for quantity in QUANTITIES
    ]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    settings = {key: value for key, value in vars(args).items() if key not in ("output_dir", "pieces", "model")}
    gaps_over_seeds = [
        {"student": student, "feedback": feedback}
        | {key: over_seeds([one[feedback][key] for one in measured[student]]) for key in GAPS}
        for student in STUDENTS
        for feedback in FEEDBACKS
    ]
    return {
        "commit": commit.stdout.strip() or None,
        "versions": {name: version(name) for name in ("torch", "transformers", "trl", "credit-trl")},
        "settings": settings | {"verdicts": VERDICTS},
        "seeds": seeds,
        "over_seeds": rows,
        "gaps_over_seeds": gaps_over_seeds,
    }


def over_seeds(values: list[float]) -> dict[str, Any]:
    """Mean, standard error and Student's 95 % interval over seeds; None and NaN values are skipped."""
    known = np.array([value for value in values if value is not None and np.isfinite(value)])
    if len(known) < 2:
        return {"mean": float(known.mean()) if len(known) else None, "standard_error": None, "interval": None}
    error = float(known.std(ddof=1) / np.sqrt(len(known)))
    half = float(student_t.ppf(0.975, len(known) - 1)) * error
    mean = float(known.mean())
    return {"mean": mean, "standard_error": error, "interval": [mean - half, mean + half]}


def format_result(result: dict[str, Any]) -> str:
    """Markdown: one row for each student, feedback and quantity, mean ± standard error over seeds."""
    lines = [
        "| student | feedback | quantity | pairs ordered alike | 95 % interval | Kendall τ-b | Spearman ρ | top |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["over_seeds"]:
        if not row["seeds"]:  # the student failed the gate
            continue
        low, high = row["concordance"]["interval"] or (float("nan"), float("nan"))
        cells = [_with_error(row[key]) for key in ("concordance", "kendall", "spearman", "top")]
        head = f"| {row['student']} | {row['feedback']} | {row['quantity']} | {cells[0]} | [{low:.2f}, {high:.2f}] "
        lines.append(f"{head}| {' | '.join(cells[1:])} |")
    return "\n".join(lines)


def _with_error(value: dict[str, Any]) -> str:
    if value["mean"] is None:
        return "–"
    error = value["standard_error"]
    return f"{value['mean']:.2f}" + ("" if error is None else f" ± {error:.2f}")


if __name__ == "__main__":
    main()
