"""Time and memory of one update (scoring, loss, backward), compared with TRL's SDPO and GRPO on identical batches.

    python benchmarks/update_phase.py --preset bar      # two fixed shapes; prints the ratios as JSON
    python benchmarks/update_phase.py --preset smollm2  # SmolLM2's shape, 16 short answers; CREDIT, SDPO, TRL's SDPO
    python benchmarks/update_phase.py --preset ragged   # lognormal lengths, with TRL's padding and without
    python benchmarks/update_phase.py --preset gpu      # on a GPU, with torch and Triton kernels, see gpu.py

Every implementation runs in its own process, and the processes take turns. Ratios are medians of ratios within a
round. Peaks are those of each process, above its loaded models.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import gpu
import ragged
import step
import torch
from measure import RETURNS_MEMORY, Results, Sample, in_turns, ratio, seconds, trials
from updates import build
from workload import Workload, provenance

Kind = tuple[str, Workload]  # arguments of `build`
SMOLLM2 = Workload(
    vocabulary=49_152,
    hidden=576,
    layers=30,
    heads=9,
    key_value_heads=3,
    intermediate=1536,
    tied=True,
    batch=16,
    completion=7,
    prompt=47,
    teacher_prompt=79,
    topk=20,
    padding="packed",
    group=2,
    common=56,
)
LONGEST = 48  # tokens of an answer
PART = 256  # tokens of a forward and backward pass, in the trial that divides the micro-batch


def fixed(kinds: dict[str, Kind], rounds: int, results: Results) -> dict[str, Any]:
    """Time and peak at T = 512, and growth of the peak from T = 128 to T = 1,024."""
    workload = Workload()
    with trials(build, kinds) as running:
        in_turns(running, 1, {"completion": 64})  # warm up
        samples = in_turns(running, rounds, {}, results=results)
        by_completion = {
            name: {t: trial.ask({"completion": t}).peak_mb for t in (128, 1024)} for name, trial in running.items()
        }
    peaks = {name: statistics.median(sample.peak_mb for sample in of) for name, of in samples.items()}
    growth = {name: (of[1024] - of[128]) / (1024 - 128) / workload.batch for name, of in by_completion.items()}
    return {
        "workload": vars(workload),
        "samples": {name: [vars(sample) for sample in of] for name, of in samples.items()},
        "seconds": {name: seconds(of) for name, of in samples.items()},
        "peak_mb": peaks,
        "peak_mb_by_completion": by_completion,
        "mb_per_token": growth,
        "ratios": _ratios_to_trl(samples, peaks, growth),
    }


def _ratios_to_trl(
    samples: dict[str, list[Sample]], peaks: dict[str, float], growth: dict[str, float]
) -> dict[str, float]:
    """Ratios to TRL's SDPO, which computes the same loss."""
    return {
        "time_ratio": ratio(samples["credit"], samples["sdpo"]),
        "time_ratio_renormalize": ratio(samples["credit, renormalize"], samples["sdpo"]),
        "memory_ratio": peaks["credit"] / peaks["sdpo"],
        "memory_slope_ratio": growth["credit"] / growth["sdpo"],
    }


# Names of the ratios of `short_answers`: what each trial adds.
_ENDINGS = {
    "credit": "",
    "credit, recomputed in parts": "_recomputed_in_parts",
    "sdpo, recomputed": "_sdpo_recomputed",
    "sdpo, 8 micro-batches": "_sdpo_8_micro_batches",
}


def short_answers(rounds: int, results: Results) -> dict[str, Any]:
    """Time and peak at the shape of SmolLM2 and `tool_choice`: with and without a contrast, and TRL's SDPO.

    Both also with recomputed activations (gradient checkpointing), this project's then in parts of the micro-batch.
    Peaks are measured in processes of their own, for the mean length of an answer and for `LONGEST`.
    """
    workload = SMOLLM2
    kinds = {"credit": ("credit", workload), "no contrast": ("credit", workload.with_(contrasts=0))}
    recomputed = workload.with_(checkpointing=True)
    kinds |= {
        "credit, recomputed in parts": ("credit", recomputed.with_(update_tokens=PART)),
        "sdpo": ("sdpo", workload),
    }
    kinds |= {"sdpo, recomputed": ("sdpo", recomputed)}
    kinds["sdpo, 8 micro-batches"] = "sdpo", workload.with_(micro_batches=8)
    small = {"batch": 8, "completion": 4}  # a full batch would leave its memory to the first round
    with trials(build, kinds) as running:
        in_turns(running, 1, small)
        samples = in_turns(running, rounds, {}, results=results)
    peaks: dict[str, dict[int, float]] = {}
    with trials(build, kinds, RETURNS_MEMORY) as running:
        in_turns(running, 1, small)
        for name, trial in running.items():
            peaks[name] = {t: trial.ask({"completion": t}).peak_mb for t in (workload.completion, LONGEST)}
    return {
        "workload": vars(workload),
        "samples": {name: [vars(sample) for sample in of] for name, of in samples.items()},
        "seconds": {name: seconds(of) for name, of in samples.items()},
        "peak_mb_by_completion": peaks,
        "ratios": {
            **{"time_ratio" + end: ratio(samples[kind], samples["sdpo"]) for kind, end in _ENDINGS.items()},
            "time_ratio_no_contrast": ratio(samples["no contrast"], samples["sdpo"]),
            "time_ratio_contrast": ratio(samples["credit"], samples["no contrast"]),
            **{
                name + ending: peaks[kind][length] / peaks["sdpo"][length]
                for kind, ending in _ENDINGS.items()
                for name, length in (("memory_ratio", workload.completion), ("memory_ratio_longest", LONGEST))
            },
        },
    }


def table_of_fixed(result: dict[str, Any]) -> str:
    columns = {"seconds": ".2f", "peak_mb": ".0f", "mb_per_token": ".3f"}
    shown = {name: form for name, form in columns.items() if name in result}
    lines = [" | ".join(["| ", *shown]) + " |", "| --- |" + " --- |" * len(shown)]
    for kind in result["seconds"]:
        cells = (f"{result[name][kind]:{form}}" for name, form in shown.items())
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _kinds(workload: Workload) -> dict[str, Kind]:
    return {
        "credit": ("credit", workload),
        "credit, renormalize": ("credit", workload.with_(tail="renormalize")),
        "sdpo": ("sdpo", workload),
        "grpo": ("grpo", workload),
    }


def main() -> None:
    arguments = parse_arguments()
    path = arguments.output.with_suffix(".json") if arguments.output else None
    results = Results(path)
    results.merge(provenance())
    if arguments.preset == "gpu":
        plan = gpu.Plan().only(arguments.models, arguments.kinds, arguments.parts, not arguments.no_longest)
        results.merge(gpu.measure(plan, arguments.rounds, results))
        print(gpu.table(results.values))
    elif arguments.preset == "ragged":
        results.merge(ragged.measure(arguments.rounds, results, arguments.kinds))
        print(ragged.table(results.values))
    elif arguments.preset == "smollm2":
        results.merge(short_answers(arguments.rounds, results))
        print(table_of_fixed(results.values))
    else:
        results.merge(fixed(_kinds(Workload()), arguments.rounds, results))
        print(table_of_fixed(results.values))
        if arguments.step_rounds:
            of_step = step.measure_steps(Workload(), [0, 1, 16], arguments.step_rounds)
            print(step.table(of_step))
            ratios = {f"step_ratio_c{c}": of_step["step_ratio"][str(c)] for c in (1, 16)}
            results.merge({"step": of_step, "ratios": ratios})
    print(json.dumps({name: round(value, 4) for name, value in results.values["ratios"].items()}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=["bar", "smollm2", "ragged", "gpu"], default="bar")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-rounds", type=int, default=2, help="whole steps per C in the bar; 0 for none")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON, without its suffix")
    parser.add_argument("--models", nargs="+", help="models of the GPU preset; default all")
    parser.add_argument("--kinds", nargs="+", help="trials of the GPU and ragged presets, by name; default all")
    parser.add_argument("--parts", nargs="+", choices=gpu.PARTS, help="parts of the GPU preset; default all")
    parser.add_argument("--no-longest", action="store_true", help="skip the search for the longest completion")
    arguments = parser.parse_args()
    if arguments.preset == "gpu" and not torch.cuda.is_available():
        parser.error("--preset gpu needs a GPU, and torch finds none. --preset bar runs on a CPU.")
    return arguments


if __name__ == "__main__":
    main()
