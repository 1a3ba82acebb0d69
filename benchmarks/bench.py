"""Counts and ratios of a step, compared with `baselines.json`; exits with 1 where one is worse.

    python benchmarks/bench.py            # `make bench`
    python benchmarks/bench.py --counts   # the counts only, in seconds
    python benchmarks/bench.py --write    # replace the baselines by what is measured

Counts are exact: tokens that models read in an update, with gradient and without. Ratios are of processor seconds in
one run, and may exceed their baseline by `TOLERANCE`, the spread of repeated runs beside other load.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from measure import Results, counted_products, counted_tokens, in_turns, ratio, trials
from step import measure_quickstart
from update_phase import RAGGED
from updates import build, make_update, update_trainer
from workload import Workload

BASELINES = Path(__file__).with_name("baselines.json")
TOLERANCE = 0.12
SMALL = {"hidden": 16, "heads": 1, "head_dim": 16, "key_value_heads": 1, "intermediate": 16, "layers": 1}
# One GPU's share of a LiveCodeBench batch at a sixteenth of its lengths: 4 problems of 8 rollouts.
SIBLINGS = Workload(
    vocabulary=300, batch=32, group=8, prompt=32, completion=128, teacher_prompt=176, common=32, topk=20, **SMALL
)
SMALL_RAGGED = RAGGED.with_(vocabulary=300, padding="packed", **SMALL)
COUNTED = {
    "ragged, trimmed": ("credit", SMALL_RAGGED.with_(padding="trimmed")),
    "ragged, packed": ("credit", SMALL_RAGGED),
    "ragged, packed, mixture": ("mixture", SMALL_RAGGED),
    "ragged, packed, grpo": ("own grpo", SMALL_RAGGED),
    "siblings, packed": ("credit", SIBLINGS.with_(padding="packed")),
    "siblings, packed, no contrast": ("credit", SIBLINGS.with_(padding="packed", contrasts=0)),
}
TIMED = {"credit": ("credit", Workload()), "sdpo": ("sdpo", Workload())}
# Ratio -> two kinds, and the field of their samples, of updates of ragged completions.
RAGGED_TIMED = {
    "own grpo over grpo, ragged": ("own grpo", "grpo", "processor"),
    "mixture over credit, ragged": ("mixture", "credit", "processor"),
}


def counts() -> dict[str, int]:
    """Tokens read in an update of each workload of `COUNTED`, and products of a token with the head."""
    found = {}
    for name, (kind, workload) in COUNTED.items():
        update = make_update(kind, update_trainer(kind, workload), workload)
        with counted_tokens() as tokens, counted_products() as products:
            update()
        found |= {f"{name}: tokens {mode}": number for mode, number in tokens.items()}
        size = workload.vocabulary * workload.hidden
        found[f"{name}: products with the head"] = products["multiplications"] // size
    return found


def ragged_ratios(rounds: int) -> dict[str, float]:
    """`RAGGED_TIMED` at a quarter of the lengths, in one run."""
    packed = RAGGED.with_(padding="packed", completion=50, prompt=12, teacher_prompt=25)
    with trials(build, {kind: (kind, packed) for kind in ("credit", "mixture", "own grpo", "grpo")}) as running:
        in_turns(running, 1, {"completion": 20})
        samples = in_turns(running, rounds, {})
    fields = RAGGED_TIMED.items()
    return {name: ratio(samples[ours], samples[theirs], field) for name, (ours, theirs, field) in fields}


def ratios(rounds: int) -> dict[str, float]:
    """Processor seconds of an update and of quickstart steps over those of TRL's SDPO, and memory of the update."""
    with trials(build, TIMED) as running:
        in_turns(running, 1, {"completion": 64})
        samples = in_turns(running, rounds, {})
    update = ratio(samples["credit"], samples["sdpo"], "processor")
    memory = ratio(samples["credit"], samples["sdpo"], "peak_mb")
    steps = measure_quickstart(2 * rounds, Results())["ratios"]
    return {"update over sdpo": update, "memory of an update over sdpo": memory, **steps} | ragged_ratios(rounds)


def compare(found: dict[str, float], baselines: dict[str, float], tolerance: float) -> list[str]:
    """Print a line for each value, and return the names of those that are worse than their baseline."""
    worse = []
    for name, value in found.items():
        limit = baselines.get(name, 0) * (1.0 + tolerance)
        is_worse = value > limit
        print(f"{name:<52}{value:>10.6g}   at most {limit:>10.6g}   {'WORSE' if is_worse else 'ok'}")
        if is_worse:
            worse.append(name)
    return worse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", action="store_true", help="only the counts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the baselines")
    arguments = parser.parse_args()
    baselines = json.loads(BASELINES.read_text()) if BASELINES.is_file() else {"counts": {}, "ratios": {}}
    found = {"counts": counts()}
    worse = compare(found["counts"], baselines["counts"], 0.0)
    if not arguments.counts:
        found["ratios"] = ratios(arguments.rounds)
        worse += compare(found["ratios"], baselines["ratios"], TOLERANCE)
    if arguments.write:
        BASELINES.write_text(json.dumps(baselines | found, indent=1, ensure_ascii=False) + "\n")
        return 0
    print(f"{len(worse)} worse than {BASELINES.name}" + "".join(f"\n  {name}" for name in worse))
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
