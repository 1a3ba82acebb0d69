"""One update on completions of many lengths: `python benchmarks/update_phase.py --preset ragged`.

A generation batch is one optimizer step of several micro-batches, with lognormal lengths. This project runs with TRL's
padding, trimmed and packed; TRL's SDPO and GRPO trainers run on the same batch. On a machine with other
load, use one thread (`OMP_NUM_THREADS=1`) and the ratios of processor seconds.
"""

from __future__ import annotations

from typing import Any

from measure import Results, in_turns, ratio, seconds, trials
from updates import build
from workload import Workload

# Means of 2,000 completion tokens, 500 of a prompt and 1,000 of a teacher's prompt, all divided by 10. The head has a
# third of the parameters, as in Qwen3-0.6B.
WORKLOAD = Workload(
    vocabulary=16_384,
    layers=6,
    batch=16,
    micro_batches=8,
    completion=200,
    prompt=50,
    teacher_prompt=100,
    topk=20,
    spread=1.0,
)
OURS = {"credit, padded": "kept", "credit, trimmed": "trimmed", "credit, packed": "packed"}
THEIRS = ("sdpo", "grpo")


def kinds(wanted: list[str] | None = None) -> dict[str, tuple[str, Workload]]:
    """Name of each trial → arguments of `updates.build`."""
    all_kinds = {name: ("credit", WORKLOAD.with_(padding=padding)) for name, padding in OURS.items()}
    all_kinds |= {name: (name, WORKLOAD) for name in THEIRS}
    return {name: arguments for name, arguments in all_kinds.items() if not wanted or name in wanted}


def measure(rounds: int, results: Results, wanted: list[str] | None = None) -> dict[str, Any]:
    """Seconds, peaks and tokens of each trial, which take turns."""
    with trials(build, kinds(wanted)) as running:
        in_turns(running, 1, {"completion": 20})  # warm up
        samples = in_turns(running, rounds, {}, results=results)
    return {
        "workload": vars(WORKLOAD),
        "samples": {name: [vars(sample) for sample in of] for name, of in samples.items()},
        "seconds": {name: seconds(of) for name, of in samples.items()},
        "ratios": _ratios(samples),
    }


def _ratios(samples: dict[str, list[Any]]) -> dict[str, float]:
    """Ratios of seconds, of the better of our two layouts, and of tokens; those whose trials were measured."""
    found: dict[str, float] = {}
    ours = [name for name in ("credit, packed", "credit, trimmed") if name in samples]
    best = min(ours, key=lambda name: seconds(samples[name]), default=None)
    for key, other in (("padded", "credit, padded"), *((name, name) for name in THEIRS)):
        if best and other in samples:
            found[f"update_ratio_{key}"] = ratio(samples[best], samples[other])
            found[f"processor_ratio_{key}"] = ratio(samples[best], samples[other], "processor")
    for name, of in samples.items():
        tokens = of[0].tokens
        key = name.removeprefix("credit, ")
        if name in OURS:
            found[f"student_token_ratio_{key}"] = (tokens["update"] + tokens["no_grad"]) / tokens["valid"]
            found[f"update_seconds_{key}"] = seconds(of)
            found["no_grad_student_tokens"] = max(found.get("no_grad_student_tokens", 0), tokens["no_grad"])
    return found


def table(result: dict[str, Any]) -> str:
    lines = ["| | seconds | tokens of the student over valid | peak MB over models |", "| --- | --- | --- | --- |"]
    for name, of in result["samples"].items():
        tokens, peak = of[0]["tokens"], max(sample["peak_mb"] for sample in of)
        read = (tokens["update"] + tokens["no_grad"]) / tokens["valid"]
        lines.append(f"| {name} | {result['seconds'][name]:.2f} | {read:.2f} | {peak:.0f} |")
    return "\n".join(lines)
