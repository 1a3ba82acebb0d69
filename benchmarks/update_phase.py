"""Time and memory of one update (scoring, loss, backward), compared with TRL's SDPO and GRPO on identical batches.

    python benchmarks/update_phase.py --preset bar     # two fixed shapes; prints the ratios as JSON
    python benchmarks/update_phase.py --preset ragged  # lognormal lengths, with TRL's padding and without
    python benchmarks/update_phase.py --preset grpo    # GRPO and the mixture, see `GRPO_WORKLOADS`
    python benchmarks/update_phase.py --preset gpu     # on a GPU

Every implementation runs in its own process. Those of one workload take turns, those of `gpu` run one after the
other. Ratios are medians of ratios within a round. Peaks are those of each process, above its loaded models.

`ragged`: a generation batch is one optimizer step of several micro-batches. On a machine with other load, use one
thread (`OMP_NUM_THREADS=1`) and the ratios of processor seconds.

`gpu`: random weights in bf16, gradient checkpointing, no optimizer. A trial that does not fit is reported, and the
others continue. With PROFILE=1 in the environment each update prints its longest kernels, which makes it slower.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import updates
from measure import Results, Sample, Trial, in_turns, none_if_out_of_memory, ratio, repeat, seconds, trials
from workload import Workload, provenance

Kinds = dict[str, tuple[str, Workload]]  # name of each trial → arguments of `updates.build`

BAR = Workload()
# Means of 2,000 completion tokens, 500 of a prompt and 1,000 of a teacher's prompt, all divided by 10. The head has a
# third of the parameters, as in Qwen3-0.6B.
RAGGED = Workload(
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
# The shape of SmolLM2-135M, with Qwen3's norms, random weights, and the lengths of short answers.
SMOLLM = RAGGED.with_(
    vocabulary=49_152,
    hidden=576,
    layers=30,
    heads=9,
    key_value_heads=3,
    intermediate=1536,
    tied=True,
    completion=48,
    prompt=48,
    teacher_prompt=96,
)
GRPO_WORKLOADS = {
    "ragged": RAGGED,
    "equal lengths": RAGGED.with_(spread=0.0),
    "135M, ragged": SMOLLM,
    "135M, equal lengths": SMOLLM.with_(spread=0.0),
}
_GPU = Workload(
    key_value_heads=8, head_dim=128, batch=1, dtype="bfloat16", device="cuda", checkpointing=True, padding="packed"
)
SHAPES = {
    "Qwen3-0.6B": _GPU.with_(hidden=1024, layers=28, heads=16, intermediate=3072, tied=True),
    "Qwen3-8B": _GPU.with_(hidden=4096, layers=36, heads=32, intermediate=12_288, tied=False),
}
# Changes of a shape's workload. 18,944 tokens are divided as by SDPO: a teacher prompt of 10,752, which contains the
# prompt of 512, and a completion of 8,192.
POINTS = {
    "2,048 tokens": {"completion": 2048},
    "2,048 tokens, C = 16": {"completion": 2048, "contrasts": 16},
    "18,944 tokens": {"prompt": 512, "teacher_prompt": 10_752, "completion": 8192},
}
KINDS: dict[str, Kinds] = {
    "bar": {
        "credit": ("credit", BAR),
        "credit, renormalize": ("credit", BAR.with_(tail="renormalize")),
        "sdpo": ("sdpo", BAR),
        "grpo": ("grpo", BAR),
    },
    "ragged": {
        "credit, padded": ("credit", RAGGED.with_(padding="kept")),
        "credit, trimmed": ("credit", RAGGED),
        "credit, packed": ("credit", RAGGED.with_(padding="packed")),
        "sdpo": ("sdpo", RAGGED),
        "grpo": ("grpo", RAGGED),
    },
}
# Key of a ratio → two trials, and the field of their samples.
RATIOS = {
    "bar": {
        "time_ratio": ("credit", "sdpo", "seconds"),
        "time_ratio_renormalize": ("credit, renormalize", "sdpo", "seconds"),
        "memory_ratio": ("credit", "sdpo", "peak_mb"),
    },
    "ragged": {
        f"{key}_ratio_{other.removeprefix('credit, ')}": ("credit, packed", other, field)
        for other in ("credit, padded", "credit, trimmed", "sdpo", "grpo")
        for key, field in (("update", "seconds"), ("processor", "processor"))
    },
}
GRPO_RATIOS = {
    "grpo_processor": ("own grpo", "grpo", "processor"),
    "grpo_memory": ("own grpo", "grpo", "peak_mb"),
    "mixture_processor": ("mixture", "credit", "processor"),
    "mixture_memory": ("mixture", "credit", "peak_mb"),
    "mixture_over_grpo_processor": ("mixture", "grpo", "processor"),
}


def gpu_kinds(shape: Workload) -> Kinds:
    """Trials of a shape."""
    return {
        "credit": ("credit", shape),
        "credit, renormalize": ("credit", shape.with_(tail="renormalize")),
        "sdpo": ("sdpo", shape),
        "grpo": ("grpo", shape),
    }


def measure_in_turns(preset: str, kinds: Kinds, rounds: int, results: Results) -> dict[str, Any]:
    """Seconds and peaks of trials that take turns; for `bar` also the growth of the peak from T = 128 to T = 1,024."""
    with trials(updates.build, kinds) as running:
        in_turns(running, 1, {"completion": 64 if preset == "bar" else 20})  # warm up
        samples = in_turns(running, rounds, {}, results=results)
        growth = {name: _growth(trial) for name, trial in running.items() if preset == "bar"}
    found = {
        "workload": vars(BAR if preset == "bar" else RAGGED),
        "samples": {name: [vars(sample) for sample in of] for name, of in samples.items()},
        "seconds": {name: seconds(of) for name, of in samples.items()},
        "peak_mb": {name: statistics.median(sample.peak_mb for sample in of) for name, of in samples.items()},
        "tokens_over_valid": {name: _read(of[0].tokens) for name, of in samples.items()},
        "ratios": {
            key: ratio(samples[ours], samples[theirs], field)
            for key, (ours, theirs, field) in RATIOS[preset].items()
            if ours in samples and theirs in samples
        },
    }
    if growth:
        found["mb_per_token"] = growth
    if {"credit", "sdpo"} <= growth.keys():
        found["ratios"]["memory_slope_ratio"] = growth["credit"] / growth["sdpo"]
    return found


def measure_grpo(wanted: list[str], rounds: int, results: Results) -> None:
    """`GRPO_RATIOS` of each workload; the trials of one take turns, and count the tokens that they read."""
    for name in wanted:
        workload = GRPO_WORKLOADS[name].with_(padding="packed")
        kinds = {kind: (kind, workload) for kind in ("credit", "mixture", "own grpo", "grpo")}
        with trials(updates.build, kinds) as running:
            in_turns(running, 1, {"completion": 20})  # warm up
            samples = in_turns(running, rounds, {})
        found = {
            "workload": vars(workload),
            "samples": {kind: [vars(sample) for sample in of] for kind, of in samples.items()},
            "ratios": {
                key: ratio(samples[ours], samples[theirs], of) for key, (ours, theirs, of) in GRPO_RATIOS.items()
            },
        }
        results.merge({"workloads": {name: found}})
        print(name, json.dumps(found["ratios"]), flush=True)


def _growth(trial: Trial) -> float:
    """MB of the peak for each further token."""
    short, long = (trial.ask({"completion": length}).peak_mb for length in (128, 1024))
    return (long - short) / (1024 - 128) / BAR.batch


def _read(tokens: dict[str, int]) -> float:
    """Tokens that the student reads over those that are no padding."""
    return (tokens["with gradient"] + tokens["without"]) / tokens["valid"]


def table_in_turns(result: dict[str, Any]) -> str:
    shown = {"seconds": ".2f", "peak_mb": ".0f", "mb_per_token": ".3f", "tokens_over_valid": ".2f"}
    columns = {name: form for name, form in shown.items() if name in result}
    lines = [" | ".join(["| ", *columns]) + " |", "| --- |" + " --- |" * len(columns)]
    for kind in result["seconds"]:
        cells = (f"{result[name][kind]:{form}}" for name, form in columns.items())
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measure_gpu(models: dict[str, Workload], wanted: list[str] | None, rounds: int, results: Results) -> None:
    """Medians over the rounds after a warm-up; None means that a trial did not fit.

    Each trial is written to `results` when it ends. A trial whose process dies is reported and costs its own entry.
    """
    results.merge({"workloads": {name: vars(shape) for name, shape in models.items()}})
    for name, shape in models.items():
        for kind, arguments in gpu_kinds(shape).items():
            if wanted is None or kind in wanted:
                results.merge({"models": {name: {kind: _measure_points(arguments, rounds)}}})
                print(name, kind, json.dumps(results.values["models"][name][kind]), flush=True)
    results.merge({"ratios": gpu_ratios(results.values.get("models", {}))})


def build_gpu(kind: str, workload: Workload) -> Callable[[dict[str, Any]], Sample | None]:
    """`updates.build` in the child process, with None for an update that does not fit."""
    answer = none_if_out_of_memory(updates.build(kind, workload))
    return partial(_profiled, answer) if "PROFILE" in os.environ else answer


def _profiled(answer: Callable[[dict[str, Any]], Any], changes: dict[str, Any]) -> Any:
    """An answer, whose 25 longest kernels are printed."""
    with torch.profiler.profile() as profile:
        found = answer(changes)
    print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=25), flush=True)
    return found


def _measure_points(arguments: tuple[str, Workload], rounds: int) -> dict[str, Any]:
    trial = Trial(build_gpu, *arguments)
    of_kind: dict[str, Any] = {"points": dict.fromkeys(POINTS), "error": None}
    try:
        for name, changes in POINTS.items():
            of_kind["points"][name] = repeat(trial.ask, rounds, changes)
    except Exception as error:  # the models alone are too large, or the process died
        of_kind["error"] = repr(error)
    finally:
        trial.close()
    return of_kind


def gpu_ratios(models: dict[str, Any]) -> dict[str, float]:
    """Ratios of seconds of each trial over TRL's SDPO, if both fit."""
    found = {}
    for name, of_model in models.items():
        for point in dict.fromkeys(point for of in of_model.values() for point in of["points"]):
            measured = {kind: of["points"].get(point) for kind, of in of_model.items()}
            fitting = {kind: sample["seconds"] for kind, sample in measured.items() if sample}
            if "sdpo" in fitting:
                for kind in fitting.keys() - {"sdpo"}:
                    found[f"{name}, {point}: {kind} over sdpo"] = fitting[kind] / fitting["sdpo"]
    return found


def table_of_gpu(result: dict[str, Any]) -> str:
    lines = ["| | | seconds | peak MB over models |", "| --- | --- | --- | --- |"]
    for name, of_model in result.get("models", {}).items():
        for kind, of in of_model.items():
            for point, sample in of["points"].items():
                cells = f"{sample['seconds']:.3f} | {sample['peak_mb']:.0f}" if sample else "does not fit |"
                lines.append(f"| {name}, {point} | {kind} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    results = Results(arguments.output.with_suffix(".json") if arguments.output else None)
    results.merge(provenance())
    if arguments.preset == "gpu":
        models = {name: shape for name, shape in SHAPES.items() if name in (arguments.models or SHAPES)}
        measure_gpu(models, arguments.kinds, arguments.rounds, results)
        print(table_of_gpu(results.values))
    elif arguments.preset == "grpo":
        measure_grpo(arguments.kinds or list(GRPO_WORKLOADS), arguments.rounds, results)
        return
    else:
        of_preset = KINDS[arguments.preset]
        kinds = {name: kind for name, kind in of_preset.items() if name in (arguments.kinds or of_preset)}
        results.merge(measure_in_turns(arguments.preset, kinds, arguments.rounds, results))
        print(table_in_turns(results.values))
    print(json.dumps({name: round(value, 4) for name, value in results.values["ratios"].items()}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=["bar", "ragged", "grpo", "gpu"], default="bar")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON, without its suffix")
    parser.add_argument("--models", nargs="+", help="models of the GPU preset; default all")
    parser.add_argument("--kinds", nargs="+", help="trials by name, workloads of `grpo`; default all")
    arguments = parser.parse_args()
    if arguments.preset == "gpu" and not torch.cuda.is_available():
        parser.error("--preset gpu needs a GPU, and torch finds none. --preset bar runs on a CPU.")
    return arguments


if __name__ == "__main__":
    main()
