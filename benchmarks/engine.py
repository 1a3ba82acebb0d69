"""Seconds of whole training steps with a colocated vLLM engine on a GPU, and the engine's agreement with the policy.

    python benchmarks/engine.py credit sdpo grpo --output gpu_engine   # the shape of Qwen3-0.6B, random weights
    python benchmarks/engine.py --check                                # `CreditTrainer.check` at the shape of Qwen3-8B

Each trainer trains in its own process, one after the other, since each engine takes its share of the memory at its
start. In the last `STALE` steps the engine receives no weights: its log-probabilities then differ from the policy's,
which shows that they agree before because weights are sent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from measure import Results, Sample, Trial, measured
from step import GPU_WORKLOAD
from trainers import half_right, workload_trainer
from transformers import TrainerCallback
from update_phase import SHAPES
from workload import Workload, provenance

KINDS = ("credit", "sdpo", "grpo")
STALE = 3
WARM_UP = 2  # steps that are not timed
DIFFERENCE = "sampling/sampling_logp_difference/mean"  # TRL's metric: |engine − policy| in nats
ENGINE = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2, "vllm_max_model_length": 2048}
CHECKED = SHAPES["Qwen3-8B"].with_(batch=8, group=8, completion=256)


class StepLog(TrainerCallback):
    """Samples and logged metrics of every step; stops the engine's weight updates before the last `STALE` steps."""

    def __init__(self, trainer: Any, device: str) -> None:
        self.trainer, self.device = trainer, device
        self.samples: list[Sample] = []
        self.differences: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps - STALE:
            self.trainer.vllm_generation.sync_weights = lambda: None
        clock = getattr(self.trainer, "clock", None)
        self.before = dict(clock.seconds) if clock else {}
        self.measuring = measured(self.device)
        self.samples.append(self.measuring.__enter__())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.measuring.__exit__(None, None, None)
        clock = getattr(self.trainer, "clock", None)
        seconds = dict(clock.seconds) if clock else {}
        self.samples[-1].stages = {name: seconds[name] - self.before.get(name, 0.0) for name in seconds}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if DIFFERENCE in logs:
            self.differences.append(logs[DIFFERENCE])


def build(kind: str, workload: Workload, steps: int) -> Any:
    """Return a function that trains `steps` steps and returns their measurements."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    options = ENGINE | {"max_steps": steps, "logging_steps": 1, "learning_rate": 1e-4}
    options |= {"bf16": workload.device == "cuda"}

    def run() -> dict[str, Any]:
        trainer = workload_trainer(kind, workload, half_right, options)
        log = StepLog(trainer, workload.device)
        trainer.add_callback(log)
        trainer.train()
        return summary(log, workload)

    return run


def summary(log: StepLog, workload: Workload) -> dict[str, Any]:
    timed = log.samples[WARM_UP:-STALE]
    seconds = statistics.median(sample.seconds for sample in timed)
    lengths = [row["completions/mean_length"] for row in log.trainer.state.log_history if DIFFERENCE in row]
    trained = workload.batch * statistics.median(lengths[WARM_UP:-STALE])
    return {
        "seconds": seconds,
        "samples": [sample.seconds for sample in log.samples],
        "stages": {name: statistics.median(sample.stages[name] for sample in timed) for name in timed[0].stages},
        "trained_tokens_a_second": trained / seconds,
        "peak_mb": max(sample.peak_mb for sample in timed),
        "logp_difference": log.differences[:-STALE],
        "logp_difference_stale": log.differences[-STALE:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"of {KINDS}")
    parser.add_argument("--steps", type=int, default=20 + STALE)
    parser.add_argument("--check", action="store_true", help="measure one step at the shape of Qwen3-8B")
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON")
    arguments = parser.parse_args()
    results = Results(arguments.output)
    results.merge(provenance())
    for kind in arguments.kinds:
        trial = Trial(build, kind, GPU_WORKLOAD, arguments.steps)
        results.merge({"workload": vars(GPU_WORKLOAD), "steps": {kind: trial.ask()}})
        trial.close()
        print(kind, json.dumps(results.values["steps"][kind]), flush=True)
    if arguments.check:
        options = {"bf16": True, "save_only_model": True, "max_steps": 100}
        workload_trainer("credit", CHECKED, half_right, options).check()


if __name__ == "__main__":
    main()
