"""GPU measurements: `python benchmarks/update_phase.py --preset gpu`.

One update at the shapes of Qwen3-8B and Qwen3-0.6B, random weights in bf16, gradient checkpointing, no optimizer: this
project with torch and Triton kernels and with a renormalised support, TRL's SDPO and GRPO. Trials run one process at a
time. A trial that does not fit is reported, and the others continue.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import updates
from measure import Results, Sample, Trial, TrialError, none_if_out_of_memory, repeat
from workload import Workload

_GPU = Workload(
    key_value_heads=8, head_dim=128, batch=1, dtype="bfloat16", device="cuda", checkpointing=True, padding="packed"
)
SHAPES = {
    "Qwen3-0.6B": _GPU.with_(hidden=1024, layers=28, heads=16, intermediate=3072, tied=True),
    "Qwen3-8B": _GPU.with_(hidden=4096, layers=36, heads=32, intermediate=12_288, tied=False),
}


@dataclass(frozen=True)
class Plan:
    """Trials to run.

    Args:
        models: Shape of each model.
        points: Changes of the workload at each point. 18,944 tokens are divided as by SDPO: a teacher prompt of
            10,752, which contains the prompt of 512, and a completion of 8,192.
        kernels: Kernels of this project's trials.
        kinds: Names of the trials that run; None for all.
    """

    models: dict[str, Workload] = field(default_factory=lambda: dict(SHAPES))
    points: dict[str, dict[str, int]] = field(
        default_factory=lambda: {
            "2,048 tokens": {"completion": 2048},
            "2,048 tokens, C = 16": {"completion": 2048, "contrasts": 16},
            "18,944 tokens": {"prompt": 512, "teacher_prompt": 10_752, "completion": 8192},
        }
    )
    kernels: tuple[str, ...] = ("torch", "triton")
    kinds: tuple[str, ...] | None = None

    def only(self, models: list[str] | None, kinds: list[str] | None) -> Plan:
        """The plan with the chosen models and trials; None for all."""
        chosen = {name: shape for name, shape in self.models.items() if models is None or name in models}
        return replace(self, models=chosen, kinds=tuple(kinds) if kinds else None)


def measure(plan: Plan, rounds: int, results: Results | None = None) -> dict[str, Any]:
    """Run a plan. Seconds are medians over the rounds after a warm-up; None means that a trial did not fit.

    Each trial is written to `results` when it ends. A trial whose process dies is reported and costs its own entry.
    """
    results = results or Results()
    results.merge({"workloads": {name: vars(shape) for name, shape in plan.models.items()}})
    for name, workload in plan.models.items():
        for kind, arguments in kinds(workload, plan.kernels).items():
            if plan.kinds is None or kind in plan.kinds:
                results.merge({"models": {name: {kind: _measure_kind(plan, arguments, rounds)}}})
                print(name, kind, json.dumps(results.values["models"][name][kind]), flush=True)
    results.merge({"ratios": ratios(results.values.get("models", {}))})
    return results.values


def kinds(workload: Workload, kernels: tuple[str, ...]) -> dict[str, tuple[str, Workload]]:
    """Name of each trial → arguments of `updates.build`."""
    ours = {f"credit, {name}": ("credit", workload.with_(kernels=name)) for name in kernels}
    renormalized = ("credit", workload.with_(kernels=kernels[-1], tail="renormalize"))
    return {
        **ours,
        f"credit, {kernels[-1]}, renormalize": renormalized,
        **{name: (name, workload) for name in ("sdpo", "grpo")},
    }


def build(kind: str, workload: Workload) -> Callable[[dict[str, Any]], Sample | None]:
    """`updates.build` in the child process, with None for an update that does not fit."""
    return none_if_out_of_memory(updates.build(kind, workload))


def _measure_kind(plan: Plan, arguments: tuple[str, Workload], rounds: int) -> dict[str, Any]:
    trial = Trial(build, *arguments)
    of_kind: dict[str, Any] = {"points": dict.fromkeys(plan.points), "error": None}
    try:
        for name, changes in plan.points.items():
            of_kind["points"][name] = repeat(trial.ask, rounds, changes)
    except (TrialError, EOFError, OSError) as error:  # the models alone are too large, or the process died
        of_kind["error"] = str(error) or "its process died"
    finally:
        trial.close()
    return of_kind


def ratios(models: dict[str, Any]) -> dict[str, float]:
    """Ratios of seconds: Triton over torch kernels, and each trial over TRL's SDPO, if both fit."""
    found = {}
    for name, of_model in models.items():
        for point in dict.fromkeys(point for of in of_model.values() for point in of["points"]):
            measured = {kind: of["points"].get(point) for kind, of in of_model.items()}
            seconds = {kind: sample["seconds"] for kind, sample in measured.items() if sample}
            for kind, over in (("credit, triton", "credit, torch"), *((kind, "sdpo") for kind in of_model)):
                if kind in seconds and over in seconds and kind != over:
                    found[f"{name}, {point}: {kind} over {over}"] = seconds[kind] / seconds[over]
    return found


def table(result: dict[str, Any]) -> str:
    lines = ["| | | seconds | peak MB over models |", "| --- | --- | --- | --- |"]
    for name, of_model in result.get("models", {}).items():
        for kind, of in of_model.items():
            for point, sample in of["points"].items():
                cells = f"{sample['seconds']:.3f} | {sample['peak_mb']:.0f}" if sample else "does not fit |"
                lines.append(f"| {name}, {point} | {kind} | {cells} |")
    return "\n".join(lines)
