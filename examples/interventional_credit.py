"""Does the self-distillation reward rank tokens as an intervention would? The test that Appendix F leaves open.

On the embedded task, a tool call with a binary verifier. At the least certain positions of sampled responses, each
likely token is forced and the policy goes on by itself, many times: the success rates give r^cf. The same tokens'
r^z and R_t come from two forward passes. Three students and three kinds of feedback:

- `base`, as shipped, for which the verdicts are words like any other;
- `exact`, the base fine-tuned on its own graded responses, with and without the verdict in the prompt, so that both
  of its forward passes are fitted to one joint P(y, z | x) (Assumption 1 by construction), the verdict being the
  outcome itself (Corollary 5);
- `noisy`, the same, gone on with verdicts flipped with probability `--noise`, anew each time that one is shown: a
  noisy function of the outcome, as Assumption 2 and Proposition 4 want it;
- the verdict "right", for success; the verdict "wrong", against it; and the task's own feedback, the letter of the
  right option: a function of the question alone, of which Proposition 4 says nothing.

A fine-tuned student counts only if it reads the verdict: log P(right | y) / P(wrong | y), read off its two passes on
responses to other questions, must be higher for successes than for failures by `--gate` nats on average. One that
does not is not measured, and the result says so.

    python examples/interventional_credit.py --output_dir runs/interventional --seeds 0 1 2 3

What is done is kept in the directory, and a second call goes on from there; `--pieces 1` does one piece a call.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import subprocess
from collections.abc import Iterator
from dataclasses import replace
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
from credit_trl.lab.analysis import interventional as iv
from credit_trl.lab.analysis.checkpoints import Checkpoint
from credit_trl.lab.analysis.formula import PAPER, CreditFormula
from credit_trl.lab.analysis.responses import Response, analysis_config, build_contexts, draw, generate, grade
from credit_trl.objective import ContrastRule
from credit_trl.tasks.registry import Task, load_task
from credit_trl.training.run_directory import write_json

# One token each in the embedded vocabulary, and without a meaning there: what they say is learnt here.
VERDICTS = ("Expected.", "Correct.")
STUDENTS = ("base", "exact", "noisy")
FEEDBACKS = ("right", "wrong", "letter")
# Name → which number of a branching, and λ and form where it is R_t.
QUANTITIES: dict[str, tuple[str, float, CreditFormula]] = {
    "r^z": ("rewards", 0.0, PAPER),
    "R_t, subtract, λ = 0.1": ("advantages", 0.1, PAPER),
    "R_t, guide, λ = 1": ("advantages", 1.0, CreditFormula(ContrastRule("guide"))),
    "log π": ("student_logps", 0.0, PAPER),
}
GAPS = ("gap", "standard_error", "gap_to_theory")
MAX_NEW_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quickstart", help="path of a base of the embedded task")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/interventional"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--pieces", type=int, help="stop after so many: a student fine-tuned, or measured")
    parser.add_argument("--noise", type=float, default=0.2, help="of the verdict that the noisy student is told")
    parser.add_argument("--gate", type=float, default=1.0, help="nats; perfect reading of noise 0.2 is 2 log 4 = 2.77")
    parser.add_argument("--questions", type=int, help="of the training split (default: all)")
    parser.add_argument("--epochs", type=int, default=2, help="responses to each of them")
    parser.add_argument("--steps", type=int, default=600, help="of fine-tuning the exact student")
    parser.add_argument("--noisy_steps", type=int, default=400, help="of going on with noisy verdicts")
    parser.add_argument("--prompts", type=int, default=40, help="test questions a seed (known and unknown cues)")
    parser.add_argument("--positions", type=int, default=2, help="prefixes of a response")
    parser.add_argument("--candidates", type=int, default=4, help="tokens tried after a prefix, at most")
    parser.add_argument(
        "--samples", type=int, default=32, help="rollouts of each candidate; twice as many of a prefix"
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
    """What is still to do: the file that says that it is done, and what makes its content."""
    for seed in args.seeds:
        folder = args.output_dir / f"seed-{seed}"
        for name in STUDENTS:
            if name != "base" and not (folder / f"student-{name}.json").exists():
                yield folder / f"student-{name}.json", partial(make_student, args, seed, name)
            if not reads_verdicts(folder, name):
                print(f"seed {seed}: the {name} student reads verdicts by less than {args.gate:g} nats: not measured.")
                break  # the noisy student goes on from the exact one
            if not (folder / f"measured-{name}.json").exists():
                yield folder / f"measured-{name}.json", partial(measure, args, seed, name)


def reads_verdicts(folder: Path, name: str) -> bool:
    return name == "base" or json.loads((folder / f"student-{name}.json").read_text("utf-8"))["passed"]


# ------------------------------------------------------------------------------------- students that read the verdict


def make_student(args: argparse.Namespace, seed: int, name: str) -> dict[str, float]:
    """Fine-tune and save a student; how well it reads the verdict, and whether that passes the gate."""
    task, base = load_task("quickstart"), Checkpoint.load(args.model, name="base")
    rows = list(task.build("train", seed=seed))[: args.questions] * args.epochs
    noise, steps, start = (args.noise, args.noisy_steps, "exact") if name == "noisy" else (0.0, args.steps, "base")
    model = copy.deepcopy(load_student(args, seed, start).student.student).train()
    contexts, responses, outcomes = graded_responses(base, task, rows, seed)
    told = [[with_verdict(base, row, z) for row in rows] for z in (0, 1)]
    loss = fine_tune(model, contexts, told, responses, outcomes, noise, steps, seed)
    student = Checkpoint.of(model.eval(), base.tokenizer, name=name)
    others = list(task.build("test", groups=("known", "unknown"), seed=seed))[args.prompts :]
    facts = {"base_success": float(outcomes.mean()), "loss": loss, **separation(student, base, task, others, seed)}
    print(f"seed {seed}, {name}: " + ", ".join(f"{key} {value:.3f}" for key, value in facts.items()), flush=True)
    model.save_pretrained(args.output_dir / f"seed-{seed}" / name)
    return facts | {"passed": facts["separation"] >= args.gate}


def load_student(args: argparse.Namespace, seed: int, name: str) -> Checkpoint:
    base = Checkpoint.load(args.model, name="base")
    if name == "base":
        return base
    model = AutoModelForCausalLM.from_pretrained(args.output_dir / f"seed-{seed}" / name).eval()
    return Checkpoint.of(model, base.tokenizer, name=name)


def graded_responses(
    checkpoint: Checkpoint, task: Task, rows: list[dict[str, Any]], seed: int
) -> tuple[list[list[int]], list[list[int]], np.ndarray]:
    """TokenContexts, sampled responses and whether each succeeds."""
    contexts = [checkpoint.encode(row["prompt"]) for row in rows]
    responses = generate(checkpoint, contexts, max_new_tokens=MAX_NEW_TOKENS, seed=seed, batch_size=256)
    verdicts = grade(checkpoint, task, rows, responses)
    return contexts, responses, np.array([verdict.reward == 1.0 for verdict in verdicts])


def with_verdict(checkpoint: Checkpoint, row: dict[str, Any], z: int) -> list[int]:
    """Token ids of (x, z)."""
    builder = ContextBuilder(checkpoint.tokenizer, analysis_config(), sorted(checkpoint.end_ids()))
    return builder.encode(row["prompt"], PrivilegedContext(feedback=VERDICTS[z]), checkpoint.render)


def fine_tune(
    model: nn.Module,
    contexts: list[list[int]],
    told: list[list[list[int]]],
    responses: list[list[int]],
    outcomes: np.ndarray,
    noise: float,
    steps: int,
    seed: int,
    batch_size: int = 16,
) -> float:
    """Maximum likelihood of the responses, three times in four with the verdict in the prompt; the last loss.

    Muon on the matrices and AdamW on the rest, as the base was pretrained: with AdamW alone the verdict is ignored.
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
        for index in draws.sample(range(len(responses)), batch_size):
            z = int(outcomes[index]) ^ (draws.random() < noise)
            batch.append((told[z][index] if draws.random() < 0.75 else contexts[index], responses[index]))
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
    """Warm-up, constant for six tenths of the steps, then down to 0."""
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
    """What the student's passes say of the verdict, on responses of the base to questions that it was not trained on.

    Returns:
        Mean pmi(y; z | x) of successes and of failures for both verdicts, and `separation`, how much higher
        log P(right | y) / P(wrong | y) is for successes, less its prior: all in nats.
    """
    contexts, responses, outcomes = graded_responses(base, task, rows, seed)
    read = [contexts, *([with_verdict(base, row, z) for row in rows] for z in (0, 1))]
    sums = []
    for prompts in read:
        pairs = list(zip(prompts, responses, strict=True))
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


# -------------------------------------------------------------------------------------------------------- measurement


def measure(args: argparse.Namespace, seed: int, name: str) -> dict[str, Any]:
    """r^cf once, and every quantity under each feedback, at the same prefixes and candidates."""
    task, student = load_task("quickstart"), load_student(args, seed, name)
    dataset = task.build("test", groups=("known", "unknown"), seed=seed)
    rows = list(dataset.take(args.prompts))
    prompts = [row["prompt"] for row in rows]
    config = analysis_config(contrastive_count=4, seed=seed)
    contexts, responses, outcomes = graded_responses(student, task, rows, seed)
    others = draw(prompts, list(dataset["prompt"]), config)
    letters = [verdict.feedback for verdict in grade(student, task, rows, responses)]
    texts = {"right": [VERDICTS[1]] * len(rows), "wrong": [VERDICTS[0]] * len(rows), "letter": letters}
    read = {
        feedback: [
            build_contexts(
                Response(row["id"], row["prompt"], tuple(y), PrivilegedContext(feedback=z), tuple(drawn)),
                config,
                student,
            )
            for row, y, z, drawn in zip(rows, responses, texts[feedback], others, strict=True)
        ]
        for feedback in FEEDBACKS
    }

    def branchings(feedback: str, coef: float, formula: CreditFormula) -> list[iv.Branching]:
        return [
            branching
            for question, (context, y) in enumerate(zip(read[feedback], responses, strict=True))
            for branching in iv.candidates_of(
                student,
                context,
                y,
                contrastive_coef=coef,
                formula=formula,
                positions=args.positions,
                candidates=args.candidates,
                question=question,
            )
        ]

    plan = iv.BranchPlan(branchings("right", 0.0, PAPER), args.samples, 2 * args.samples, MAX_NEW_TOKENS)
    rollouts = iv.policy_rollouts(student, contexts, max_new_tokens=MAX_NEW_TOKENS, seed=seed + 1000)
    announce = partial(print, f"seed {seed}, {name}:", flush=True)
    credits = iv.run_plan(plan, rollouts, iv.graded_by(student, task, rows), announce=announce)
    found: dict[str, Any] = {"success": float(outcomes.mean()), "prefixes": len(credits)}
    found["resolved"] = sum(credit.is_resolved for credit in credits)
    for feedback in FEEDBACKS:
        found[feedback] = {"agreement": {}}
        for quantity, (field, coef, formula) in QUANTITIES.items():
            own = branchings(feedback, coef, formula)
            read_off = [replace(credit, branching=b) for credit, b in zip(credits, own, strict=True)]
            agreement = iv.rank_agreement(read_off, field, resolved=True)
            values = {key: getattr(agreement, key) for key in ("kendall", "spearman", "concordance", "top")}
            found[feedback]["agreement"][quantity] = values
            if quantity == "r^z":
                found[feedback] |= gaps(read_off, args.noise if name == "noisy" else 0.0, feedback)
    return found


def gaps(credits: list[iv.InterventionalCredit], noise: float, feedback: str) -> dict[str, float]:
    """How far r^z lies from r^cf, and from what Eq. 34's affine map makes of the measured rates; medians, in nats."""
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
    told = [
        np.log(q0 + (q1 - q0) * iv.smoothed_rate(c.successes, c.samples))
        - np.log(q0 + (q1 - q0) * iv.smoothed_rate(np.array(c.baseline_successes), c.baseline_samples))
        for c in resolved
    ]
    return found | {"gap_to_theory": float(np.median(abs(rewards - np.concatenate(told))))}


# ------------------------------------------------------------------------------------------------------ over the seeds


def combine(args: argparse.Namespace) -> dict[str, Any]:
    """Every seed's numbers, and their means with standard errors and 95 % intervals over seeds."""
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
    """Mean, standard error and Student's 95 % interval; None for a seed in which nothing could be ranked."""
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
        if not row["seeds"]:  # a student that was not measured
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
