"""The distillation loss alone: one student and one teacher, without the models below their heads.

    python benchmarks/pair.py        # on a GPU, at the shape of Liger's published figures

Needs torch and the package's loss; neither TRL nor datasets is imported.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from measure import Sample, Trial, TrialError, measured, none_if_out_of_memory, repeat

# Liger's fused linear distillation loss as published: one student and one teacher on an H100, bf16. Its script halves
# the student's hidden size.
LIGER = {
    "hidden": 4096,
    "student_hidden": 2048,
    "vocabulary": 128_256,
    "tokens": 8192,
    "milliseconds": 60.7,
    "gb": 11.1,
}
# Repetitions on a GPU, each timed with CUDA events.
REPETITIONS = 20


@dataclass(frozen=True)
class Pair:
    """Shape of the hidden states and heads of a student and a teacher.

    A `student_hidden` of 0 is that of the teacher.
    """

    tokens: int = LIGER["tokens"]
    hidden: int = LIGER["hidden"]
    vocabulary: int = LIGER["vocabulary"]
    topk: int = 100
    dtype: str = "bfloat16"
    device: str = "cuda"
    student_hidden: int = 0


def liger_shape() -> Pair:
    """The shape of Liger's own script."""
    return Pair(student_hidden=LIGER["student_hidden"])


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
    sizes = (pair.student_hidden or pair.hidden, pair.hidden)
    student, teacher = (torch.randn(pair.tokens, size, **options) for size in sizes)
    weights = [torch.randn(pair.vocabulary, size, **options).mul_(size**-0.5) for size in sizes]
    student.requires_grad_()
    weights[0].requires_grad_()
    ids = torch.randint(pair.vocabulary, (pair.tokens,), device=pair.device)
    ones = torch.ones(pair.tokens, device=pair.device)
    student_head, teacher_head = (LMHead(weight, kernels=kernels) for weight in weights)
    support = SupportConfig(name, pair.topk)
    states = TeacherStates(teacher, teacher.new_empty(0, *teacher.shape), teacher_head)
    tokens, config = LossTokens(ids, ones, torch.zeros_like(ones)), LossConfig(support, alpha=0.5)

    def update() -> None:
        scores = states if support.in_step else score_tokens(states, ids, support)
        credit_loss(student, student_head, tokens, scores, config).loss.backward()
        student.grad = weights[0].grad = None

    def answer() -> Sample:
        with measured(pair.device) as sample:
            update()
        if pair.device == "cuda":
            sample.seconds = statistics.median(event_seconds(update) for _ in range(REPETITIONS))
        return sample

    return none_if_out_of_memory(answer)


def event_seconds(work: Callable[[], object]) -> float:
    """Seconds of one call on the GPU, between two CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def build_ceilings(pair: Pair) -> Callable[[], dict[str, float]]:
    """Bytes a second of a copy and floating-point operations a second of the head's product, on this machine."""
    options = {"dtype": getattr(torch, pair.dtype), "device": pair.device}
    logits = torch.zeros(min(pair.tokens, 4096), pair.vocabulary, device=pair.device)
    hidden, weight = (torch.randn(n, pair.hidden, **options) for n in (len(logits), pair.vocabulary))
    copied = torch.empty_like(logits)

    def timed(work: Callable[[], object]) -> float:
        work()
        if pair.device == "cuda":
            return statistics.median(event_seconds(work) for _ in range(REPETITIONS))
        with measured(pair.device) as sample:
            work()
        return sample.seconds

    def answer() -> dict[str, float]:
        return {
            "copy_gb_per_second": 2 * logits.nbytes / timed(lambda: copied.copy_(logits)) / 1e9,
            "product_tflops": 2 * hidden.numel() * pair.vocabulary / timed(lambda: hidden @ weight.T) / 1e12,
        }

    return answer


def chunk_size(pair: Pair) -> int:
    """Tokens of a logits chunk that the loss takes on this device now."""
    from credit_trl.loss.blocks import MAX_LOSS_CHUNK, logits_chunk

    return logits_chunk(pair.tokens, pair.vocabulary, torch.float32, torch.device(pair.device), most=MAX_LOSS_CHUNK)


def measure_pairs(pair: Pair, kernels: tuple[str, ...], rounds: int) -> Iterator[tuple[str, dict[str, float] | None]]:
    """Name and seconds, peak and size of the inputs of each trial as it ends, ceilings last; None if out of memory."""
    for kind in pairs(kernels):
        yield kind, _measure_pair(pair, kind, rounds)
    trial = Trial(build_ceilings, pair)
    try:
        yield "ceilings", trial.ask()
    finally:
        trial.close()


def _measure_pair(pair: Pair, kind: str, rounds: int) -> dict[str, float] | None:
    trial = Trial(build_pair, pair, kind)
    try:
        result = repeat(trial.ask, rounds)
    except (TrialError, EOFError, OSError) as error:
        print(f"{kind} failed: {error or 'its process died'}", flush=True)
        return None
    finally:
        trial.close()
    if result is not None:  # published figures count the inputs
        entries = (pair.tokens + pair.vocabulary) * (pair.hidden + (pair.student_hidden or pair.hidden))
        result["inputs_mb"] = entries * getattr(torch, pair.dtype).itemsize / 1e6
        result["chunk_tokens"] = chunk_size(pair)
    return result


def table(result: dict[str, Any]) -> str:
    lines = ["| one student, one teacher | ms | GB, inputs included |", "| --- | --- | --- |"]
    for kind, sample in result.items():
        if kind == "ceilings":
            continue
        gb = (sample["peak_mb"] + sample["inputs_mb"]) / 1000 if sample else 0.0
        cells = f"{1000 * sample['seconds']:.1f} | {gb:.1f}" if sample else "does not fit |"
        lines.append(f"| {kind} | {cells} |")
    lines.append(f"| Liger, as published for an H100 | {LIGER['milliseconds']} | {LIGER['gb']} |")
    ceilings = result.get("ceilings")
    if ceilings:
        copy, product = ceilings["copy_gb_per_second"], ceilings["product_tflops"]
        lines.append(
            f"\nCeilings of this machine: {copy:.0f} GB/s copied, {product:.1f} TFLOP/s in the head's product."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", nargs="+", default=["torch", "triton"], choices=["torch", "triton"])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("the shape needs a GPU, and torch finds none.")
    for shape in (Pair(), liger_shape()):
        print(table(dict(measure_pairs(shape, tuple(arguments.kernels), arguments.rounds))), flush=True)


if __name__ == "__main__":
    main()
