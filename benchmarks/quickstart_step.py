"""Processor seconds of whole steps on the embedded task, beside TRL's SDPO and GRPO.

    python benchmarks/quickstart_step.py --rounds 10

Each trainer trains the embedded model with the options of `trl credit-quickstart` in its own process, with one thread;
the processes take turns step by step. Completions are sampled, so their lengths differ a little between trainers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Results, Sample, in_turns, ratio, trials
from step import in_training
from workload import provenance

TRIALS = {
    "credit": {"contrastive_coef": 0.1, "packed": True},
    "credit, padded": {"contrastive_coef": 0.1, "packed": False},
    "credit, λ = 0": {"contrastive_coef": 0.0, "packed": True},
    "sdpo": {},
    "grpo": {},
}
OURS_ONLY = ("teacher_model_kind", "scoring_batch_tokens")


def build(name: str, changes: dict[str, Any]) -> Callable[[None], Sample]:
    """Start training in the child process; return a function that measures the next step."""
    torch.set_num_threads(1)
    from credit_trl.cli.quickstart import OPTIONS, read_options

    options = read_options(OPTIONS) | {
        "max_steps": 1000,
        "disable_tqdm": True,
        "output_dir": tempfile.mkdtemp(),
        "logging_steps": 1000,
    }
    trainer = (_ours if name.startswith("credit") else _trl)(name, options | changes)
    return in_training(trainer, "cpu")


def _ours(name: str, options: dict[str, Any]) -> Any:
    from credit_trl import CreditConfig, CreditTrainer
    from credit_trl.tasks import quickstart

    model, tokenizer = quickstart.load_model()
    config = CreditConfig(**quickstart.TEMPLATES, **options)
    return CreditTrainer(model, quickstart.reward, config, quickstart.build("train"), processing_class=tokenizer)


def _trl(name: str, options: dict[str, Any]) -> Any:
    """TRL's trainer on the same prompts; SDPO reads the same feedback from a column."""
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    from credit_trl import CreditConfig
    from credit_trl.tasks import quickstart

    model, tokenizer = quickstart.load_model()
    dataset = quickstart.build("train")
    if name == "sdpo":
        feedback = [quickstart.verify("", answer).feedback for answer in dataset["answer"]]
        dataset = dataset.add_column("privileged_context", feedback)

    def rewards(completions: list[list[dict[str, str]]], answer: list[str], **kwargs: Any) -> list[float]:
        return [quickstart.verify(c[-1]["content"], a).reward for c, a in zip(completions, answer, strict=True)]

    trl_options = {key: value for key, value in options.items() if key not in OURS_ONLY}
    if name == "grpo":
        trl_options.pop("distillation_alpha")
        return GRPOTrainer(model, rewards, GRPOConfig(**trl_options), dataset, processing_class=tokenizer)
    topk = CreditConfig.__dataclass_fields__["distillation_topk"].default
    config = SDPOConfig(
        distillation_mode="topk_logits",
        distillation_topk=topk,
        teacher_model_kind="base",
        include_environment_feedback=True,
        **trl_options,
    )
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)  # SDPOTrainer loads the teacher from the student's path
    return SDPOTrainer(folder, rewards, config, dataset, processing_class=tokenizer)


def measure(rounds: int, results: Results) -> dict[str, Any]:
    """Samples and ratios of processor seconds to TRL's SDPO, medians over rounds."""
    with trials(build, {name: (name, changes) for name, changes in TRIALS.items()}) as running:
        in_turns(running, 2, None)  # warm up
        samples = in_turns(running, rounds, None, results=results)
    pairs = {f"{name} over sdpo": (name, "sdpo") for name in TRIALS if name != "sdpo"}
    pairs["packed over padded"] = ("credit", "credit, padded")
    return {
        "samples": {name: [vars(sample) for sample in of] for name, of in samples.items()},
        "ratios": {key: ratio(samples[a], samples[b], "processor") for key, (a, b) in pairs.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON")
    arguments = parser.parse_args()
    results = Results(arguments.output)
    results.merge(provenance())
    results.merge(measure(arguments.rounds, results))
    print(json.dumps(results.values["ratios"], indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
