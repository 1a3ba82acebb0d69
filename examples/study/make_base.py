"""Pretrain a base of the embedded task: `python examples/study/make_base.py --world shortcut --seed 0`."""

from __future__ import annotations

import argparse
from pathlib import Path

from embedded_base import make_base
from embedded_base.curriculum import WORLDS

from credit_trl.tasks.quickstart_model import cache_directory, read_base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", choices=sorted(WORLDS), default="plain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="new directory of the model (default: the user's cache)")
    args = parser.parse_args()
    directory = args.out or cache_directory() / "quickstart" / f"{args.world}-seed{args.seed}"
    make_base(args.world, args.seed, directory)
    model, tokenizer = read_base(directory)
    accuracy = WORLDS[args.world].lookup_accuracy(model, tokenizer, seed=1)
    print(f"{directory}: {model.num_parameters():,} parameters, look-up accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
