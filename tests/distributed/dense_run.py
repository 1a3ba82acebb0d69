"""One process of a dense problem: its half of the samples, and the average of gradients over the processes."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tiny
from credit_trl import CreditConfig
from dense import gradients, step_problem
from distributed import jobs


def run(folder: str, rank: int, processes: int, port: int, limit: float, options: dict[str, Any]) -> None:
    """Write `gradients_<rank>.pt`: loss and gradients of `CreditStep`, averaged as DDP does, as `jobs.run`."""
    out = Path(folder)
    jobs.begin(out, rank, limit)
    jobs.join(rank, processes, port)
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    config = CreditConfig(str(out), use_cpu=True, bf16=False, report_to="none", packed=False, **options)

    def summed(values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values)
        return values

    share = 8 // processes
    samples = range(rank * share, (rank + 1) * share)
    problem = step_problem(tiny.build_tokenizer(), config, samples=samples, processes=processes, reduce=summed)
    loss = problem.step.loss(problem.policy, problem.tensors).terms.loss
    policy_gradients = gradients(loss, problem.policy)
    policy_gradients = {name: summed(gradient) / processes for name, gradient in policy_gradients.items()}
    torch.save(
        {"loss": summed(loss.detach()) / processes, "gradients": policy_gradients}, out / f"gradients_{rank}.pt"
    )
    (out / f"facts_{rank}.json").write_text('{"num_processes": ' + str(processes) + "}")
    dist.destroy_process_group()
