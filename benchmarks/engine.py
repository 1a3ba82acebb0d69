"""Seconds of training steps with a colocated vLLM engine on a GPU, and the engine's agreement with the policy.

    python benchmarks/engine.py credit --output gpu_engine.json  # or `sdpo`, `grpo`: the shape of Qwen3-0.6B
    python benchmarks/engine.py check                            # `CreditTrainer.check` at the shape of Qwen3-8B

Models have random weights. In the last `STALE` steps the engine receives no weights: its log-probabilities then differ
more from the policy's, which shows that the updates before arrived.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from measure import Results
from step import GPU_WORKLOAD, in_training
from trainers import half_right, workload_trainer
from update_phase import SHAPES
from workload import Workload, provenance

STEPS = 20
STALE = 3
WARM_UP = 2  # steps that are not timed
DIFFERENCE = "sampling/sampling_logp_difference/mean"  # TRL's metric: |engine − policy| in nats
ENGINE = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.2, "vllm_max_model_length": 2048}
CHECKED = SHAPES["Qwen3-8B"].with_(batch=8, group=4, completion=256)


def run(kind: str, workload: Workload, steps: int) -> dict[str, Any]:
    """Train for a number of steps and `STALE` more; return medians of the timed steps."""
    options = ENGINE | {"logging_steps": 1, "learning_rate": 1e-4, "bf16": workload.device == "cuda"}
    trainer = workload_trainer(kind, workload, half_right, options)
    measure = in_training(trainer, workload.device)
    samples = [measure(None) for _ in range(steps)]
    trainer.vllm_generation.sync_weights = lambda: None
    samples += [measure(None) for _ in range(STALE + 1)]  # the last one lets the one before be logged
    timed = samples[WARM_UP:steps]
    seconds = statistics.median(sample.seconds for sample in timed)
    differences = [row[DIFFERENCE] for row in trainer.state.log_history if DIFFERENCE in row]  # SDPO logs none
    return {
        "seconds": seconds,
        "samples": [sample.seconds for sample in samples],
        "stages": {name: statistics.median(sample.stages[name] for sample in timed) for name in timed[0].stages},
        "trained_tokens_a_second": workload.batch * workload.completion / seconds,
        "peak_mb": max(sample.peak_mb for sample in timed),
        "logp_difference": differences[:steps],
        "logp_difference_stale": differences[steps : steps + STALE],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["credit", "sdpo", "grpo", "check"])
    parser.add_argument("--output", type=Path, default=None, help="path of the JSON")
    arguments = parser.parse_args()
    if arguments.kind == "check":
        options = {"bf16": True, "save_only_model": True, "max_steps": 100}
        workload_trainer("credit", CHECKED, half_right, options).check()
        return
    steps = {arguments.kind: run(arguments.kind, GPU_WORKLOAD, STEPS)}
    Results(arguments.output).merge(provenance() | {"workload": vars(GPU_WORKLOAD), "steps": steps})
    print(json.dumps(steps))


if __name__ == "__main__":
    main()
