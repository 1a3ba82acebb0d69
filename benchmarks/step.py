"""Seconds of a whole training step by stage, generation included, against the number of contrasts C.

    python benchmarks/step.py                      # C = 0, 1, 2, 8, 16, compared with the paper's Table 2
    python benchmarks/step.py --contrasts 0 1

Each C trains in its own process; the processes take turns step by step. Generation does not depend on C, so the
seconds of the rollout and verdict stages are pooled over all C. Values are medians over steps.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import Sample, in_turns, measured, trials
from transformers import TrainerCallback
from workload import QUESTIONS, Workload, make_tokenizer, provenance

from credit_trl.lab.analysis import CreditMapCallback
from credit_trl.lab.report import ReportCallback

# Table 2: seconds of a step divided by those of C = 0, Qwen3-8B on LiveCodeBench, 8 H20.
PAPER = {0: 1.00, 1: 1.01, 2: 1.03, 8: 1.30, 16: 1.64}
SHARED_STAGES = ("rollout", "verdict")
FEEDBACK = "The result is off by three. Compute the product step by step and check the last digit."


WARM_UP = 16  # tokens of the first step's completions


class Turns(TrainerCallback):
    """Waits before each step for a requested completion length, then measures the step."""

    def __init__(self, trainer: Any, device: str) -> None:
        self.trainer, self.device = trainer, device
        self.asked: queue.Queue[int | None] = queue.Queue()
        self.answers: queue.Queue[Sample | Exception] = queue.Queue()

    def seconds(self) -> dict[str, float]:
        """Seconds by stage up to now; empty for a trainer of TRL."""
        return dict(self.trainer.clock.seconds) if hasattr(self.trainer, "clock") else {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if length := self.asked.get():
            generation = self.trainer.generation_config
            generation.min_new_tokens = generation.max_new_tokens = length
        self.before = self.seconds()
        self.measuring = measured(self.device)
        self.sample = self.measuring.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.measuring.__exit__(None, None, None)
        stages = {name: seconds - self.before.get(name, 0.0) for name, seconds in self.seconds().items()}
        # Optimizer and teacher update
        self.sample.stages = stages | {"other": self.sample.seconds - sum(stages.values())}
        self.answers.put(self.sample)


def build(workload: Workload) -> Callable[[int], Sample]:
    """Start training in the child process; return a function that measures a step of a given completion length."""
    from datasets import Dataset

    from credit_trl import CreditConfig, CreditTrainer, Verdict

    def verdicts(completions: list, **kwargs: Any) -> list[Verdict]:
        return [Verdict(0.0, FEEDBACK) for _ in completions]

    config = CreditConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=workload.device == "cpu",
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        max_steps=1000,
        per_device_train_batch_size=workload.batch,
        num_generations=workload.batch,
        max_completion_length=workload.completion,
        contrastive_source="dataset",
        contrastive_count=max(workload.contrasts, 1),
        contrastive_coef=0.1 if workload.contrasts else 0.0,
        distillation_topk=workload.topk,
        distillation_tail=workload.tail,
    )
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in QUESTIONS]})
    trainer = CreditTrainer(workload.make_model(), verdicts, config, dataset, processing_class=make_tokenizer())
    return in_training(trainer, workload.device)


def in_training(trainer: Any, device: str) -> Callable[[int | None], Sample]:
    """Start training; return a function that measures the next step, with completions of a given or sampled length."""
    turns = Turns(trainer, device)
    trainer.add_callback(turns)
    for kind in (CreditMapCallback, ReportCallback):  # of runs, not of steps
        trainer.remove_callback(kind)

    def train() -> None:
        try:
            trainer.train()
        except Exception as error:
            turns.answers.put(error)

    threading.Thread(target=train, daemon=True).start()

    def answer(completion: int | None) -> Sample:
        turns.asked.put(completion)
        sample = turns.answers.get()
        if isinstance(sample, Exception):
            raise sample
        return sample

    return answer


def measure_steps(workload: Workload, contrasts: list[int], rounds: int) -> dict[str, Any]:
    """Median seconds by stage for each C, and the ratio of their sum to that of C = 0."""
    with trials(build, {str(c): (workload.with_(contrasts=c),) for c in contrasts}) as running:
        in_turns(running, 1, WARM_UP)  # the first step allocates the optimizer states
        samples = in_turns(running, rounds, workload.completion)
    stages = {
        c: {stage: statistics.median(s.stages.get(stage, 0.0) for s in of) for stage in of[0].stages}
        for c, of in samples.items()
    }
    for stage in SHARED_STAGES:
        pooled = statistics.median(s.stages[stage] for of in samples.values() for s in of)
        for of_count in stages.values():
            of_count[stage] = pooled
    totals = {c: sum(of_count.values()) for c, of_count in stages.items()}
    return {
        "workload": vars(workload),
        "samples": {c: [vars(sample) for sample in of] for c, of in samples.items()},
        "stages": stages,
        "seconds": totals,
        "step_ratio": {c: total / totals["0"] for c, total in totals.items()} if "0" in totals else {},
    }


def table(result: dict[str, Any]) -> str:
    names = list(next(iter(result["stages"].values())))
    lines = [
        f"| C | {' | '.join(names)} | step | over C = 0 | paper |",
        "| --- " * (len(names) + 4) + "|",
    ]
    for c, stages in result["stages"].items():
        cells = " | ".join(f"{stages[name]:.2f}" for name in names)
        over = f"{result['step_ratio'][c]:.2f}" if result["step_ratio"] else ""
        paper = f"{PAPER[int(c)]:.2f}" if int(c) in PAPER else ""
        lines.append(f"| {c} | {cells} | {result['seconds'][c]:.2f} | {over} | {paper} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contrasts", type=int, nargs="+", default=[0, 1, 2, 8, 16])
    parser.add_argument("--completion", type=int, default=Workload.completion)
    parser.add_argument("--batch", type=int, default=Workload.batch)
    parser.add_argument("--tail", choices=["bucket", "renormalize"], default=Workload.tail)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON")
    arguments = parser.parse_args()
    started = time.monotonic()
    workload = Workload(batch=arguments.batch, completion=arguments.completion, tail=arguments.tail)
    result = measure_steps(workload, arguments.contrasts, arguments.rounds)
    result = provenance() | result
    result["wall_seconds"] = time.monotonic() - started
    print(table(result))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({f"step_ratio_c{c}": round(r, 3) for c, r in result["step_ratio"].items()}))


if __name__ == "__main__":
    main()
