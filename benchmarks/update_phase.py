"""Time and memory of one update (scoring, loss, backward), compared with TRL's SDPO and GRPO on identical batches.

    python benchmarks/update_phase.py --preset bar     # two fixed shapes; prints the ratios as JSON
    python benchmarks/update_phase.py --preset ragged  # lognormal lengths, with TRL's padding and without
    python benchmarks/update_phase.py --preset gpu     # on a GPU, with torch and Triton kernels, see gpu.py

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
import torch
from measure import Results, Sample, in_turns, ratio, seconds, trials
from updates import build
from workload import Workload, provenance

Kind = tuple[str, Workload]  # arguments of `build`


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
        plan = gpu.Plan().only(arguments.models, arguments.kinds)
        results.merge(gpu.measure(plan, arguments.rounds, results))
        print(gpu.table(results.values))
    elif arguments.preset == "ragged":
        results.merge(ragged.measure(arguments.rounds, results, arguments.kinds))
        print(ragged.table(results.values))
    else:
        results.merge(fixed(_kinds(Workload()), arguments.rounds, results))
        print(table_of_fixed(results.values))
    print(json.dumps({name: round(value, 4) for name, value in results.values["ratios"].items()}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=["bar", "ragged", "gpu"], default="bar")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON, without its suffix")
    parser.add_argument("--models", nargs="+", help="models of the GPU preset; default all")
    parser.add_argument("--kinds", nargs="+", help="trials of the GPU and ragged presets, by name; default all")
    arguments = parser.parse_args()
    if arguments.preset == "gpu" and not torch.cuda.is_available():
        parser.error("--preset gpu needs a GPU, and torch finds none. --preset bar runs on a CPU.")
    return arguments


if __name__ == "__main__":
    main()
