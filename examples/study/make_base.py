"""Pretrain a base of the embedded task: `python examples/study/make_base.py --world shortcut --seed 0`."""

from __future__ import annotations

import argparse
from pathlib import Path

from embedded_base.architecture import build_tokenizer
from embedded_base.curriculum import WORLDS, template_texts
from embedded_base.pretrain import make_base_of

from credit_trl.tasks.quickstart_model import CACHE_FOLDER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", choices=sorted(WORLDS), default="plain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="new directory of the model (default: the user's cache)")
    args = parser.parse_args()
    directory = args.out or CACHE_FOLDER / "quickstart" / f"{args.world}-seed{args.seed}"
    make_base(args.world, args.seed, directory)
    print(directory)


def make_base(world: str, seed: int, directory: Path) -> None:
    """Pretrain the base of a world (a key of `curriculum.WORLDS`) into a new directory.

    Raises:
        RuntimeError: the base fails the look-up gate; another seed may pass.
    """
    make_base_of(WORLDS[world], build_tokenizer(template_texts()), seed, directory)


if __name__ == "__main__":
    main()
