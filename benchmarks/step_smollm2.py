"""Seconds and memory of a whole training step with SmolLM2, of this project's trainer and of TRL's SDPO, in one run.

    python benchmarks/step_smollm2.py --output benchmarks/results/step_cpu_smollm2.json

All trials have the model, the data and the options of `credit-quickstart --model smollm2`: 8 prompts with 2 answers.
"SDPO" is this project's trainer with λ = 0, "in parts" adds `gradient_checkpointing` and `update_batch_tokens`. TRL's
SDPO reads the feedback from the dataset, of the same wording. A step is generation, rewards, scores, update and
optimizer. The trials take turns step by step. Ratios are medians of ratios within a round. Peaks are those of a step
above the models and the states of the optimizer, measured in processes that return freed memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import RETURNS_MEMORY, Results, Sample, in_turns, ratio, seconds, trials
from step import in_training
from update_phase import PART
from updates import no_reward
from workload import provenance

ANSWER, LONGEST = 7, 24  # tokens of an answer: about the mean of the task, and the quickstart's limit
PARTS = {"gradient_checkpointing": True, "update_batch_tokens": PART}
LAMBDA = 0.1
# Trial: trainer and its options.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "TRL's SDPO": ("trl", {}),
    "TRL's SDPO, recomputed": ("trl", {"gradient_checkpointing": True}),
    "SDPO": ("credit", {"contrastive_coef": 0.0}),
    "CREDIT": ("credit", {"contrastive_coef": LAMBDA}),
    "SDPO, in parts": ("credit", {"contrastive_coef": 0.0, **PARTS}),
    "CREDIT, in parts": ("credit", {"contrastive_coef": LAMBDA, **PARTS}),
}
# Ratio: numerator and denominator.
RATIOS = {
    "in_parts_over_trl": ("CREDIT, in parts", "TRL's SDPO"),
    "in_parts_over_sdpo_in_parts": ("CREDIT, in parts", "SDPO, in parts"),
    "in_parts_over_sdpo": ("CREDIT, in parts", "SDPO"),
    "over_trl": ("CREDIT", "TRL's SDPO"),
    "over_sdpo": ("CREDIT", "SDPO"),
    "trl_recomputed_over_trl": ("TRL's SDPO, recomputed", "TRL's SDPO"),
}


def build(trainer: str, options: dict[str, Any], bf16: bool) -> Callable[[int], Sample]:
    """Start training in the child process; return a function that measures a step of a given completion length."""
    from credit_trl.cli.quickstart_tasks import quickstart_task

    task = quickstart_task("smollm2")
    common = {"max_steps": 1000, "report_to": [], "bf16": bf16, **options}
    built = {"trl": _trl, "credit": _credit}[trainer](task, {**task.defaults, **common})
    return in_training(built, "cpu")


def _credit(task: Any, options: dict[str, Any]) -> Any:
    from credit_trl import CreditConfig
    from credit_trl.cli.quickstart_run import quickstart_trainer

    return quickstart_trainer(CreditConfig(tempfile.mkdtemp(), **options), task)


def _trl(task: Any, options: dict[str, Any]) -> Any:
    """TRL's SDPO with the teacher, the loss and the top K of `CreditConfig`; all rewards 0, so all have feedback."""
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    from credit_trl import CreditConfig
    from credit_trl.tasks import tool_choice
    from credit_trl.tasks.registry import load_task

    ours = {"success_feedback_template", "scoring_packed", "update_packed"}
    config = SDPOConfig(
        tempfile.mkdtemp(),
        **{name: value for name, value in options.items() if name not in ours},
        distillation_mode="topk_logits",
        distillation_topk=CreditConfig.distillation_topk,
        distillation_add_tail=True,
        distillation_alpha=CreditConfig.distillation_alpha,
        temperature=CreditConfig.temperature,
        include_environment_feedback=True,
        model_init_kwargs={"dtype": "float32"},
    )
    data = load_task(task.name).build("train")
    feedback = [tool_choice.WRONG_TOOL + " " + tool_choice.correction(json.loads(a)) for a in data["answer"]]
    model, tokenizer = task.load("plain")
    data = data.add_column("privileged_context", feedback)
    return SDPOTrainer(model.name_or_path, no_reward, config, data, processing_class=tokenizer)


def measure(rounds: int, patience: float, bf16: bool, results: Results) -> dict[str, Any]:
    """Seconds of `rounds` steps of each trial, and peaks for answers of `ANSWER` and `LONGEST` tokens."""
    arguments = {name: (*of, bf16) for name, of in KINDS.items()}
    with trials(build, arguments) as running:
        in_turns(running, 1, ANSWER)  # the first step allocates the states of the optimizer
        samples = in_turns(running, rounds, ANSWER, patience=patience, results=results)
    peaks: dict[str, dict[int, float]] = {}
    for name, of in arguments.items():
        with trials(build, {name: of}, RETURNS_MEMORY) as running:
            in_turns(running, 1, ANSWER)
            peaks[name] = {t: in_turns(running, 1, t)[name][0].peak_mb for t in (ANSWER, LONGEST)}
    return {
        "options": {"bf16": bf16, "answer": ANSWER, "longest": LONGEST, **PARTS, "contrastive_coef": LAMBDA},
        "samples": {name: [vars(sample) for sample in of] for name, of in samples.items()},
        "seconds": {name: seconds(of) for name, of in samples.items()},
        "stages": {name: _stages(of) for name, of in samples.items()},
        "peak_mb": peaks,
        "ratios": {
            **{f"time_{key}": ratio(samples[a], samples[b]) for key, (a, b) in RATIOS.items()},
            **{f"memory_{key}": peaks[a][ANSWER] / peaks[b][ANSWER] for key, (a, b) in RATIOS.items()},
            **{f"memory_longest_{key}": peaks[a][LONGEST] / peaks[b][LONGEST] for key, (a, b) in RATIOS.items()},
        },
    }


def _stages(samples: list[Sample]) -> dict[str, float]:
    names = samples[0].stages or {}
    return {name: statistics.median(sample.stages[name] for sample in samples) for name in names}


def table(result: dict[str, Any]) -> str:
    lines = [
        f"| | seconds a step | peak MB, {ANSWER} tokens | {LONGEST} tokens | seconds of scores, update |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, of in result["seconds"].items():
        peaks, stages = result["peak_mb"][name], result["stages"][name]
        shown = ", ".join(f"{stages[stage]:.2f}" for stage in ("scores", "update") if stage in stages)
        lines.append(f"| {name} | {of:.2f} | {peaks[ANSWER]:.0f} | {peaks[LONGEST]:.0f} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    from credit_trl.cli.tool_choice_base import has_fast_bf16

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for an idle machine")
    parser.add_argument("--fp32", action="store_true", help="also where the quickstart would train in bf16")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON")
    arguments = parser.parse_args()
    results = Results(arguments.output)
    results.merge(provenance())
    bf16 = has_fast_bf16("cpu") and not arguments.fp32
    results.merge(measure(arguments.rounds, arguments.patience, bf16, results))
    print(table(results.values))
    print(json.dumps({name: round(value, 3) for name, value in results.values["ratios"].items()}))


if __name__ == "__main__":
    main()
