"""A training step of SmolLM2 on `tool_choice` on a CPU: transformers' generation, a colocated vLLM engine, FSDP2.

    python benchmarks/engines.py transformers --output benchmarks/results/engines_cpu.json
    .venv-vllm/bin/python benchmarks/engines.py vllm ...    # in the environment that `make test-vllm` makes
    python benchmarks/engines.py fsdp2 --steps 5 ...        # starts two processes

Each run trains the task of `credit-quickstart --model smollm2`, 16 rollouts a step; `--contrastive_coef 0` is SDPO.
vLLM's engine and FSDP2 need the patches of the tests on a CPU. Seconds are medians over the steps after the first;
processor seconds, those of the first process, depend less on other load.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from measure import Results
from transformers import TrainerCallback
from workload import provenance

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "vllm_engine")]

ROLLOUTS = 16
STAGES = ("rollout", "verdict", "contexts", "scores", "update")
KV_CACHE_BYTES = 256 * 2**20  # 5,800 tokens in fp32; a batch has about 1,500
RATIO = "sampling/importance_sampling_ratio"
DIFFERENCE = "sampling/sampling_logp_difference"


class ProcessorSeconds(TrainerCallback):
    """Processor seconds of each step, rollout included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.process_time() - self.started)


def train(engine: str, steps: int, options: dict[str, Any], processes: int = 1) -> list[dict[str, float]]:
    """Train, and return the logged metrics and the processor seconds of each step."""
    if engine == "vllm":
        import cpu_engine

        cpu_engine.KV_CACHE_BYTES = KV_CACHE_BYTES
        cpu_engine.in_process()
        options |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512}
    if engine == "fsdp2":
        from distributed import cpu_fsdp2

        cpu_fsdp2.install()
    from credit_trl import CreditConfig, CreditTrainer
    from credit_trl.cli.quickstart_tasks import quickstart_task
    from credit_trl.tasks.registry import load_task

    task = quickstart_task("smollm2")
    settings = {**task.defaults, "max_steps": steps, "per_device_train_batch_size": ROLLOUTS // processes}
    config = CreditConfig(tempfile.mkdtemp(), **{**settings, **options})
    model, tokenizer = task.load("plain")
    data = load_task(task.name)
    trainer = CreditTrainer(model, data.reward, config, data.build("train"), processing_class=tokenizer)
    clock = ProcessorSeconds()
    trainer.add_callback(clock)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "reward" in row]
    return [row | {"processor_seconds": seconds} for row, seconds in zip(logs, clock.seconds, strict=True)]


def run(rank: int, processes: int, port: int, folder: str, arguments: argparse.Namespace) -> None:
    """One process of a run; the first writes the logged metrics."""
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    if processes > 1:
        from distributed.credit_run import join

        join(rank, processes, port)
    options = {"seed": arguments.seed, "contrastive_coef": arguments.contrastive_coef}
    logs = train(arguments.engine, arguments.steps, options, processes)
    if rank == 0:
        Path(folder, "log.json").write_text(json.dumps(logs))
    if processes > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def summarize(logs: list[dict[str, float]]) -> dict[str, Any]:
    """Median seconds by stage, mean reward, and the range of vLLM's importance ratio.

    Raises:
        ValueError: a logged loss, gradient norm or ratio is not finite.
    """
    watched = ("loss", "grad_norm", f"{RATIO}/min", f"{RATIO}/mean", f"{RATIO}/max", f"{DIFFERENCE}/max")
    for step, row in enumerate(logs, 1):
        for name in watched:
            if name in row and not math.isfinite(row[name]):
                raise ValueError(f"{name} is {row[name]} at step {step}: expected a finite number.")
    later = logs[1:] or logs
    stages = {
        stage: statistics.median(row[f"credit/seconds_{stage}"] for row in later)
        for stage in STAGES
        if f"credit/seconds_{stage}" in later[0]
    }
    summary = {
        "steps": len(logs),
        "seconds": sum(stages.values()),
        "processor_seconds": statistics.median(row["processor_seconds"] for row in later),
        "stages": stages,
        "reward_by_step": [row["reward"] for row in logs],
        "loss_by_step": [row["loss"] for row in logs],
        "grad_norm_by_step": [row["grad_norm"] for row in logs],
    }
    if f"{RATIO}/mean" in logs[0]:
        summary["ratio"] = {
            "min": min(row[f"{RATIO}/min"] for row in logs),
            "mean": statistics.mean(row[f"{RATIO}/mean"] for row in logs),
            "max": max(row[f"{RATIO}/max"] for row in logs),
        }
        summary["logp_difference_by_step"] = [row[f"{DIFFERENCE}/mean"] for row in logs]
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("transformers", "vllm", "fsdp2"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--contrastive_coef", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--output", type=Path, help="JSON file, to which the run is added")
    arguments = parser.parse_args()
    processes = 2 if arguments.engine == "fsdp2" else 1
    with tempfile.TemporaryDirectory() as folder:
        if processes == 1:
            run(0, 1, 0, folder, arguments)
        else:
            from faults.launching import free_port

            mp.spawn(run, (processes, free_port(), folder, arguments), nprocs=processes)
        summary = summarize(json.loads(Path(folder, "log.json").read_text()))
    print(json.dumps(summary, indent=1))
    summary |= {"processes": processes, "rollouts": ROLLOUTS, "seed": arguments.seed} | provenance()
    name = arguments.engine if arguments.contrastive_coef else f"{arguments.engine}, SDPO"
    Results(arguments.output).merge({name: summary})


if __name__ == "__main__":
    main()
