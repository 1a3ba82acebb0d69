"""The distillation loss alone: one student and one teacher, without the models below their heads.

    python benchmarks/pair.py        # on a GPU, at the shape of Liger's published figures

Needs torch and `credit_trl.loss` only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from measure import Sample, Trial, measured, none_if_out_of_memory, repeat

# Liger's fused linear distillation loss as published: one student and one teacher on an H100, bf16.
LIGER = {"hidden": 4096, "vocabulary": 128_256, "tokens": 8192, "milliseconds": 60.7, "gb": 11.1}


@dataclass(frozen=True)
class Pair:
    """Shape of the hidden states and heads of a student and a teacher."""

    tokens: int = LIGER["tokens"]
    hidden: int = LIGER["hidden"]
    vocabulary: int = LIGER["vocabulary"]
    topk: int = 100
    dtype: str = "bfloat16"
    device: str = "cuda"


def pairs(kernels: tuple[str, ...]) -> list[str]:
    """Names of the trials: support and kernels."""
    return [f"{support}, {name}" for support in ("full", "teacher_topk") for name in kernels]


def build_pair(pair: Pair, kind: str) -> Callable[[], Sample | None]:
    """Build the inputs in the child process; return a function that measures scores, loss and gradients.

    `"full"` with α = 0.5 computes what Liger does: the Jensen-Shannon divergence over the vocabulary.
    """
    from credit_trl.loss import LMHead, LossConfig, LossTokens, SupportConfig, TeacherStates, credit_loss, score_tokens

    name, kernels = kind.split(", ")
    torch.manual_seed(0)
    options = {"dtype": getattr(torch, pair.dtype), "device": pair.device}
    student, teacher = (torch.randn(pair.tokens, pair.hidden, **options) for _ in range(2))
    weights = [torch.randn(pair.vocabulary, pair.hidden, **options).mul_(pair.hidden**-0.5) for _ in range(2)]
    student.requires_grad_()
    weights[0].requires_grad_()
    ids = torch.randint(pair.vocabulary, (pair.tokens,), device=pair.device)
    ones = torch.ones(pair.tokens, device=pair.device)
    student_head, teacher_head = (LMHead(weight, kernels=kernels) for weight in weights)
    support = SupportConfig(name, pair.topk)
    states = TeacherStates(teacher, teacher.new_empty(0, *teacher.shape), teacher_head)
    tokens, config = LossTokens(ids, ones, torch.zeros_like(ones)), LossConfig(support, alpha=0.5)

    def answer() -> Sample:
        with measured(pair.device) as sample:
            scores = states if support.in_step else score_tokens(states, ids, support)
            credit_loss(student, student_head, tokens, scores, config).loss.backward()
        student.grad = weights[0].grad = None
        return sample

    return none_if_out_of_memory(answer)


def measure_pairs(pair: Pair, kernels: tuple[str, ...], rounds: int) -> dict[str, dict[str, float] | None]:
    """Seconds, peak and size of the inputs by trial; None if out of memory."""
    return {kind: _measure_pair(pair, kind, rounds) for kind in pairs(kernels)}


def _measure_pair(pair: Pair, kind: str, rounds: int) -> dict[str, float] | None:
    trial = Trial(build_pair, pair, kind)
    try:
        result = repeat(trial.ask, rounds)
    finally:
        trial.close()
    if result is not None:  # published figures count the inputs
        entries = 2 * (pair.tokens + pair.vocabulary) * pair.hidden
        result["inputs_mb"] = entries * getattr(torch, pair.dtype).itemsize / 1e6
    return result


def table(result: dict[str, Any]) -> str:
    lines = ["| one student, one teacher | ms | GB, inputs included |", "| --- | --- | --- |"]
    for kind, sample in result.items():
        gb = (sample["peak_mb"] + sample["inputs_mb"]) / 1000 if sample else 0.0
        cells = f"{1000 * sample['seconds']:.1f} | {gb:.1f}" if sample else "does not fit |"
        lines.append(f"| {kind} | {cells} |")
    return "\n".join([*lines, f"| Liger, as published for an H100 | {LIGER['milliseconds']} | {LIGER['gb']} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", nargs="+", default=["torch", "triton"], choices=["torch", "triton"])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the shape needs a GPU, and torch finds none.")
    print(table(measure_pairs(Pair(), tuple(arguments.kernels), arguments.rounds)))


if __name__ == "__main__":
    main()
