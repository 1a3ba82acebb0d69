"""Pretrain a base of the embedded task: `python examples/study/make_base.py --world shortcut --seed 0`."""

from __future__ import annotations

import argparse
from pathlib import Path

from embedded_base import make_base
from embedded_base.curriculum import WORLDS
from embedded_base.probe import format_probes, probe

from credit_trl.tasks.quickstart_model import cached_directory, read_base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", choices=sorted(WORLDS), default="plain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="new directory for weights, configuration and tokenizer (default: the user's cache)"
    )
    args = parser.parse_args()
    directory = args.out or cached_directory(None, args.world, args.seed)

    make_base(args.world, args.seed, directory)
    model, tokenizer = read_base(directory)
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{directory}: {model.num_parameters():,} parameters, {size / 2**20:.2f} MiB")
    print(f"letter look-up {WORLDS[args.world].lookup_accuracy(model, tokenizer, seed=1):.3f}\n")
    without, given = (probe(model, tokenizer, feedback=feedback) for feedback in (False, True))
    print(format_probes([("without feedback", without), ("with feedback", given)]))


if __name__ == "__main__":
    main()
