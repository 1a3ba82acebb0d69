"""What only a GPU can say: `python benchmarks/update_phase.py --preset gpu`.

- One update at Qwen3-8B's and Qwen3-0.6B's shapes, random weights in bf16, gradient checkpointing: this project's with
  torch's and with Triton's kernels and with a renormalised support, TRL's SDPO and GRPO. No optimizer.
- The longest completion that fits for each.
- The distillation loss alone, one student and one teacher, at the shape of Liger's published figures.

Each trial has the GPU to itself: one process after the other. What does not fit is said, and the rest goes on.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import torch
from measure import Sample, Trial, measured
from workload import Workload

# Liger's fused linear distillation loss as published: one student/teacher pair on an H100, bf16.
LIGER = {"hidden": 4096, "vocabulary": 128_256, "tokens": 8192, "milliseconds": 60.7, "gb": 11.1}


def model_shape(name: str, **changes: Any) -> Workload:
    """A workload on the shape of a model that `trl credit-plan` knows."""
    config = json.loads((files("credit_trl.lab.planning") / "models" / f"{name}.json").read_text())
    shape = Workload(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        key_value_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        tied=config["tie_word_embeddings"],
        batch=1,
        dtype="bfloat16",
        device="cuda",
        checkpointing=True,
    )
    return shape.with_(**changes)


@dataclass(frozen=True)
class Pair:
    """A student's and a teacher's hidden states and heads, without the models below them."""

    tokens: int = LIGER["tokens"]
    hidden: int = LIGER["hidden"]
    vocabulary: int = LIGER["vocabulary"]
    topk: int = 100
    dtype: str = "bfloat16"
    device: str = "cuda"


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        models: the shape of each model.
        points: what changes of it at each point. 18,944 tokens are SDPO's own division: a teacher's context of 10,752,
            which holds the prompt of 512, and an answer of 8,192.
        longest: the search's first completion length and its last.
        kernels: of this project's trials.
    """

    models: dict[str, Workload] = field(
        default_factory=lambda: {"Qwen3-0.6B": model_shape("qwen3-0.6b"), "Qwen3-8B": model_shape("qwen3-8b")}
    )
    points: dict[str, dict[str, int]] = field(
        default_factory=lambda: {
            "2,048 tokens": {"completion": 2048},
            "2,048 tokens, C = 16": {"completion": 2048, "contrasts": 16},
            "18,944 tokens": {"prompt": 512, "teacher_prompt": 10_752, "completion": 8192},
        }
    )
    longest: tuple[int, int] = (2048, 131_072)
    pair: Pair = field(default_factory=Pair)
    kernels: tuple[str, ...] = ("torch", "triton")


def measure(plan: Plan, rounds: int) -> dict[str, Any]:
    """All of the plan. Seconds are medians of rounds after a first that is not counted; None is what did not fit."""
    models = {}
    for name, workload in plan.models.items():
        models[name] = {}
        for kind, arguments in kinds(workload, plan.kernels).items():
            models[name][kind] = _measure_kind(plan, arguments, rounds)
            print(name, kind, json.dumps(models[name][kind]), flush=True)
    return {
        "models": models,
        "workloads": {name: vars(workload) for name, workload in plan.models.items()},
        "pair": {kind: _measure_pair(plan.pair, kind, rounds) for kind in pairs(plan.kernels)},
        "liger": LIGER,
        "ratios": ratios(models),
    }


def kinds(workload: Workload, kernels: tuple[str, ...]) -> dict[str, tuple[str, Workload]]:
    """Names of the trials, and what `update_phase.build` takes for each."""
    ours = {f"credit, {name}": ("credit", workload.with_(kernels=name)) for name in kernels}
    renormalized = ("credit", workload.with_(kernels=kernels[-1], tail="renormalize"))
    return {
        **ours,
        f"credit, {kernels[-1]}, renormalize": renormalized,
        "sdpo": ("sdpo", workload),
        "grpo": ("grpo", workload),
    }


def build(kind: str, workload: Workload) -> Callable[[dict[str, Any]], Sample | None]:
    """In the child: `update_phase.build`, that answers None where an update does not fit."""
    from update_phase import build as build_update

    return unless_it_does_not_fit(build_update(kind, workload))


def unless_it_does_not_fit(answer: Callable[..., Sample]) -> Callable[..., Sample | None]:
    def attempt(*request: Any) -> Sample | None:
        try:
            return answer(*request)
        except torch.OutOfMemoryError:
            pass
        # Here and not above: until the exception is gone it holds the tensors of every frame.
        gc.collect()
        torch.cuda.empty_cache()
        return None

    return attempt


def _measure_kind(plan: Plan, arguments: tuple[str, Workload], rounds: int) -> dict[str, Any]:
    trial = Trial(build, *arguments)
    try:
        of_kind: dict[str, Any] = {"points": {}}
        for name, changes in plan.points.items():
            of_kind["points"][name] = _repeat(trial.ask, rounds, changes)
        of_kind["longest_completion"] = longest_that_fits(
            lambda t: trial.ask({"completion": t}) is not None, *plan.longest
        )
    except RuntimeError as error:  # the models alone may be too large
        if "OutOfMemoryError" not in str(error):
            raise
        return {"points": dict.fromkeys(plan.points), "longest_completion": 0}
    finally:
        trial.close()
    return of_kind


def _repeat(ask: Callable[..., Sample | None], rounds: int, *request: Any) -> dict[str, float] | None:
    """Median seconds and the highest peak; the first call compiles, fills caches and is not timed."""
    samples = [ask(*request)]
    for _ in range(rounds if samples[0] is not None else 0):
        samples.append(ask(*request))
    if None in samples:
        return None
    seconds = statistics.median(sample.seconds for sample in samples[1:])
    return {"seconds": seconds, "peak_mb": max(sample.peak_mb for sample in samples)}


def longest_that_fits(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The longest of those lengths up to `most` that fits, to 1/16 of itself; 0 where `start` does not."""
    if not fits(start):
        return 0
    fitting, failing = start, None
    while failing is None and fitting < most:
        longer = min(2 * fitting, most)
        if fits(longer):
            fitting = longer
        else:
            failing = longer
    while failing is not None and (failing - fitting) > max(fitting // 16, 1):
        middle = (fitting + failing) // 2
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting


# ---------------------------------------------------------------------------------------- the distillation loss alone


def pairs(kernels: tuple[str, ...]) -> list[str]:
    return [f"{support}, {name}" for support in ("full", "teacher_topk") for name in kernels]


def build_pair(pair: Pair, kind: str) -> Callable[[], Sample | None]:
    """In the child: scores, loss and gradients of hidden states and head of one student against one teacher.

    `"full"` with α = 0.5 is what Liger's computes, the Jensen-Shannon divergence over the vocabulary.
    """
    from credit_trl.loss import LMHead, TeacherStates, credit_loss, score_tokens

    support, kernels = kind.split(", ")
    torch.manual_seed(0)
    options = {"dtype": getattr(torch, pair.dtype), "device": pair.device}
    student, teacher = (torch.randn(pair.tokens, pair.hidden, **options) for _ in range(2))
    weights = [torch.randn(pair.vocabulary, pair.hidden, **options).mul_(pair.hidden**-0.5) for _ in range(2)]
    student.requires_grad_()
    weights[0].requires_grad_()
    ids = torch.randint(pair.vocabulary, (pair.tokens,), device=pair.device)
    heads = [LMHead(weight, kernels=kernels) for weight in weights]
    ones, no_contrast = torch.ones(pair.tokens, device=pair.device), teacher.new_empty(0, *teacher.shape)

    def answer() -> Sample:
        with measured(pair.device) as sample:
            if support == "full":
                reference = TeacherStates(teacher, no_contrast, heads[1])
            else:
                reference = score_tokens(teacher, no_contrast, heads[1], ids, topk=pair.topk)
            result = credit_loss(
                student,
                heads[0],
                ids,
                ones,
                reference,
                contrastive_coef=torch.zeros_like(ones),
                alpha=0.5,
                support=support,
                topk=pair.topk,
            )
            result.loss.backward()
        student.grad = weights[0].grad = None
        return sample

    return unless_it_does_not_fit(answer)


def _measure_pair(pair: Pair, kind: str, rounds: int) -> dict[str, float] | None:
    """With the inputs' own size, as published figures count it."""
    trial = Trial(build_pair, pair, kind)
    try:
        result = _repeat(trial.ask, rounds)
    finally:
        trial.close()
    if result is not None:
        entries = 2 * (pair.tokens + pair.vocabulary) * pair.hidden
        result["inputs_mb"] = entries * getattr(torch, pair.dtype).itemsize / 1e6
    return result


# -------------------------------------------------------------------------------------------------------------- tables


def ratios(models: dict[str, Any]) -> dict[str, float]:
    """What pays: Triton's kernels over torch's, and each over TRL's SDPO, where both fit."""
    found = {}
    for name, of_model in models.items():
        for point in next(iter(of_model.values()))["points"]:
            seconds = {kind: of["points"][point]["seconds"] for kind, of in of_model.items() if of["points"][point]}
            for kind, over in (("credit, triton", "credit, torch"), *((kind, "sdpo") for kind in of_model)):
                if kind in seconds and over in seconds and kind != over:
                    found[f"{name}, {point}: {kind} over {over}"] = seconds[kind] / seconds[over]
    return found


def table(result: dict[str, Any]) -> str:
    lines = ["| | | seconds | peak MB over models |", "| --- | --- | --- | --- |"]
    for name, of_model in result["models"].items():
        for kind, of in of_model.items():
            for point, sample in of["points"].items():
                cells = f"{sample['seconds']:.3f} | {sample['peak_mb']:.0f}" if sample else "does not fit |"
                lines.append(f"| {name}, {point} | {kind} | {cells} |")
    lines += ["", "| | | longest completion that fits |", "| --- | --- | --- |"]
    for name, of_model in result["models"].items():
        lines += [f"| {name} | {kind} | {of['longest_completion']:,d} |" for kind, of in of_model.items()]
    lines += ["", "| one student, one teacher | ms | GB, inputs included |", "| --- | --- | --- |"]
    for kind, sample in result["pair"].items():
        gb = (sample["peak_mb"] + sample["inputs_mb"]) / 1000 if sample else 0.0
        cells = f"{1000 * sample['seconds']:.1f} | {gb:.1f}" if sample else "does not fit |"
        lines.append(f"| {kind} | {cells} |")
    liger = result["liger"]
    lines.append(f"| Liger, as published for an H100 | {liger['milliseconds']} | {liger['gb']} |")
    return "\n".join(lines)
