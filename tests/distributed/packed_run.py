"""One process of a list of runs: packed GRPO of this trainer and TRL's GRPO, one after the other."""

import json
from pathlib import Path

import torch.distributed as dist
from trl import GRPOConfig

from credit_trl import CreditConfig
from distributed import jobs
from packed_runs import PACKED, REFUSALS, assert_equal, train


def run(folder, rank, processes, port, limit, options):
    """Write `facts_<rank>.json` with how each of the runs `cells` differs, "" where it does not; as `jobs.run`."""
    out = Path(folder)
    jobs.begin(out, rank, limit)
    jobs.join(rank, processes, port)
    sizes = {"per_device_train_batch_size": 4, "ddp_find_unused_parameters": False}
    differences = {}
    for number, (name, given) in enumerate(options["cells"].items()):
        place = out / f"{number}_{rank}"
        differences[name] = difference(place, options["model"], sizes | given)
    (out / f"facts_{rank}.json").write_text(json.dumps({"num_processes": processes, "differences": differences}))
    dist.barrier()
    dist.destroy_process_group()


def difference(folder, model, given):
    try:
        theirs = train(folder, GRPOConfig, given, model)
    except REFUSALS as error:
        return f"TRL refuses it: {error}"
    ours = train(folder, CreditConfig, given | PACKED, model)
    assert ours.trainer.accelerator.num_processes == dist.get_world_size() > 1
    try:
        assert_equal(ours, theirs)
    except AssertionError as error:
        return str(error)
    return "" if ours.trainer.policy_step is not None else "rows are not packed"
