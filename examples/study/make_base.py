"""Pretrain a base of a world: `python examples/study/make_base.py --world shortcut --seed 0`."""

import argparse
from pathlib import Path

from worlds import WORLDS, pretrain

from credit_trl.tasks.quickstart_model import CACHE_FOLDER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", choices=sorted(WORLDS), default="plain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="new directory of the model (default: the user's cache)")
    args = parser.parse_args()
    directory = args.out or CACHE_FOLDER / "quickstart" / f"{args.world}-seed{args.seed}"
    pretrain(WORLDS[args.world], args.seed, directory)
    print(directory)


if __name__ == "__main__":
    main()
