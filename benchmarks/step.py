"""Seconds of whole training steps.

    python benchmarks/step.py                      # by stage against the number of contrasts C, as the paper's Table 2
    python benchmarks/step.py --preset quickstart  # the embedded task, with one thread, beside TRL's SDPO and GRPO
    python benchmarks/step.py --preset gpu         # the shape of Qwen3-0.6B on a GPU, beside TRL's SDPO and GRPO

Each trainer trains in its own process; the processes take turns step by step. Values are medians over steps.

On the CPU generation is included, and the seconds of the rollout and verdict stages are pooled over all C, since they
do not depend on it. On the GPU random completions take the place of generation.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import Results, Sample, counted_tokens, in_turns, measured, ratio, trials
from trainers import all_wrong, half_right, make_trainer, options_of, workload_trainer
from transformers import TrainerCallback
from update_phase import SHAPES
from workload import Workload, provenance

from credit_trl import CreditConfig
from credit_trl.cli.quickstart import OPTIONS, read_options
from credit_trl.lab.analysis import CreditMapCallback
from credit_trl.lab.report import ReportCallback
from credit_trl.tasks import quickstart

# Table 2: seconds of a step divided by those of C = 0, Qwen3-8B on LiveCodeBench, 8 H20.
PAPER = {0: 1.00, 1: 1.01, 2: 1.03, 8: 1.30, 16: 1.64}
SHARED_STAGES = ("rollout", "verdict")
WARM_UP = 16  # tokens of the first step's completions

# Name of each trial → options of this project's trainer; TRL's have none. The kind comes before the comma.
QUICKSTART = {
    "credit": {"contrastive_coef": 0.1, "packed": True},
    "credit, padded": {"contrastive_coef": 0.1, "packed": False},
    "credit, λ = 0": {"contrastive_coef": 0.0, "packed": True},
    "sdpo": {},
    "grpo": {},
}
GPU = {
    "credit": {"contrastive_coef": 0.1},
    "credit, λ = 0": {"contrastive_coef": 0.0},
    "sdpo": {},
    "grpo": {},
}
GPU_WORKLOAD = SHAPES["Qwen3-0.6B"].with_(batch=64, micro_batches=8, group=8, completion=512, checkpointing=False)
DENSE_BF16 = 989e12  # FLOP/s of an H100 or H200 by the datasheet


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


def build_contrasts(workload: Workload) -> Callable[[int], Sample]:
    """Train CREDIT with the workload's C."""
    of_credit = {
        "contrastive_source": "dataset",
        "contrastive_count": max(workload.contrasts, 1),
        "contrastive_coef": 0.1 if workload.contrasts else 0.0,
    }
    return in_training(workload_trainer("credit", workload, all_wrong, of_credit=of_credit), workload.device)


def build_quickstart(name: str) -> Callable[[None], Sample]:
    """Train the embedded model with the options of `trl credit-quickstart`; TRL's SDPO reads the same feedback."""
    torch.set_num_threads(1)
    options = options_of(Workload()) | read_options(OPTIONS) | {"logging_steps": 1000}
    of_distillation = {key: options.pop(key) for key in ("teacher_model_kind", "distillation_alpha")}
    of_credit = {key: options.pop(key) for key in ("packed", "scoring_batch_tokens")}
    topk = CreditConfig.__dataclass_fields__["distillation_topk"].default
    kind = name.partition(",")[0]
    own = {
        "credit": of_distillation | of_credit | quickstart.TEMPLATES | QUICKSTART[name],
        "sdpo": of_distillation | {"distillation_topk": topk},
        "grpo": {},
    }
    model, tokenizer = quickstart.load_model()
    rows = quickstart.build("train")
    trainer = make_trainer(kind, lambda: model, tokenizer, rows, quickstart.reward, options, own[kind])
    return in_training(trainer, "cpu")


def build_gpu(name: str, workload: Workload) -> Callable[[int], Sample]:
    """Train on random completions. The sample's tokens are those that models read, and those that are trained."""
    options = {"bf16": workload.device == "cuda", "learning_rate": 1e-6}
    trainer = workload_trainer(name.partition(",")[0], workload, half_right, options, GPU[name])
    trainer.model.generate = partial(_random_completions, trainer.generation_config)
    measure = in_training(trainer, workload.device)

    def answer(completion: int) -> Sample:
        with counted_tokens() as tokens:
            sample = measure(completion)
        sample.tokens = tokens | {"trained": workload.batch * completion}
        return sample

    return answer


def _random_completions(config: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Prompts with random completions of the length that the configuration asks for, in place of generation."""
    shape = (len(input_ids), config.max_new_tokens)
    return torch.cat([input_ids, torch.randint(3, 259, shape, device=input_ids.device)], dim=1)


def measure_contrasts(contrasts: list[int], workload: Workload, rounds: int, results: Results) -> dict[str, Any]:
    """Median seconds by stage for each C, and the ratio of their sum to that of C = 0."""
    with trials(build_contrasts, {str(c): (workload.with_(contrasts=c),) for c in contrasts}) as running:
        in_turns(running, 1, WARM_UP)  # the first step allocates the optimizer states
        samples = in_turns(running, rounds, workload.completion, results=results)
    stages = {
        c: {stage: statistics.median(s.stages.get(stage, 0.0) for s in of) for stage in of[0].stages}
        for c, of in samples.items()
    }
    for stage in SHARED_STAGES:
        pooled = statistics.median(s.stages[stage] for of in samples.values() for s in of)
        for of_count in stages.values():
            of_count[stage] = pooled
    totals = {c: sum(of_count.values()) for c, of_count in stages.items()}
    over_none = {c: total / totals["0"] for c, total in totals.items()} if "0" in totals else {}
    return {"workload": vars(workload), "stages": stages, "seconds": totals, "step_ratio": over_none}


def table(result: dict[str, Any]) -> str:
    """The seconds by stage for each C, beside the paper's ratios."""
    names = list(next(iter(result["stages"].values())))
    lines = [f"| C | {' | '.join(names)} | step | over C = 0 | paper |", "| --- " * (len(names) + 4) + "|"]
    for c, stages in result["stages"].items():
        cells = " | ".join(f"{stages[name]:.2f}" for name in names)
        over = f"{result['step_ratio'][c]:.2f}" if result["step_ratio"] else ""
        paper = f"{PAPER[int(c)]:.2f}" if int(c) in PAPER else ""
        lines.append(f"| {c} | {cells} | {result['seconds'][c]:.2f} | {over} | {paper} |")
    return "\n".join(lines)


def measure_quickstart(rounds: int, results: Results) -> dict[str, Any]:
    """Ratios of processor seconds to TRL's SDPO. Completions are sampled, so lengths differ between trainers."""
    with trials(build_quickstart, {name: (name,) for name in QUICKSTART}) as running:
        in_turns(running, 2, None)  # warm up
        samples = in_turns(running, rounds, None, results=results)
    pairs = {f"{name} over sdpo": (name, "sdpo") for name in QUICKSTART if name != "sdpo"}
    pairs["packed over padded"] = ("credit", "credit, padded")
    return {"ratios": {key: ratio(samples[a], samples[b], "processor") for key, (a, b) in pairs.items()}}


def measure_gpu(names: list[str], workload: Workload, rounds: int, results: Results) -> dict[str, Any]:
    """Medians of seconds, trained tokens a second and MFU of each trainer."""
    parameters = sum(p.numel() for p in workload.with_(device="meta").make_model().parameters())
    with trials(build_gpu, {name: (name, workload) for name in names}) as running:
        in_turns(running, 2, workload.completion)  # warm up
        samples = in_turns(running, rounds, workload.completion, results=results)
    return {"workload": vars(workload), "steps": {name: summary(of, parameters) for name, of in samples.items()}}


def summary(samples: list[Sample], parameters: int) -> dict[str, Any]:
    """Medians over the steps of a trainer.

    MFU counts 2 FLOP a parameter and token in a forward pass and 4 in a backward pass, without recomputation and
    attention.
    """
    seconds = statistics.median(s.seconds for s in samples)
    tokens = samples[0].tokens
    flops = 2 * parameters * (3 * tokens["with gradient"] + tokens["without"])
    return {
        "seconds": seconds,
        "stages": samples[-1].stages,
        "tokens": tokens,
        "trained_tokens_a_second": tokens["trained"] / seconds,
        "mfu": flops / seconds / DENSE_BF16,
        "peak_mb": max(s.peak_mb for s in samples),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=["contrasts", "quickstart", "gpu"], default="contrasts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--completion", type=int, default=512, help="tokens of a completion, but for the quickstart")
    parser.add_argument("--contrasts", type=int, nargs="+", default=list(PAPER), help="values of C")
    parser.add_argument("--trainers", nargs="+", choices=list(GPU), default=list(GPU), help="trials of the GPU preset")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON, written sample by sample")
    arguments = parser.parse_args()
    results = Results(arguments.output)
    results.merge(provenance())
    if arguments.preset == "contrasts":
        workload = Workload(group=Workload.batch, completion=arguments.completion)
        results.merge(measure_contrasts(arguments.contrasts, workload, arguments.rounds, results))
        print(table(results.values))
        print(json.dumps({f"step_ratio_c{c}": round(r, 3) for c, r in results.values["step_ratio"].items()}))
    elif arguments.preset == "quickstart":
        results.merge(measure_quickstart(arguments.rounds, results))
        print(json.dumps(results.values["ratios"], indent=1, ensure_ascii=False))
    else:
        workload = GPU_WORKLOAD.with_(completion=arguments.completion)
        results.merge(measure_gpu(arguments.trainers, workload, arguments.rounds, results))
        print(json.dumps(results.values["steps"], indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
