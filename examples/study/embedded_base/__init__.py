"""Pretraining of the embedded task's base models from random weights.

`architecture` builds the tokenizer and the model, `curriculum` draws the training examples of a world, `pretrain`
trains and writes a base. `make_base.py` in the folder above is the command line.
"""

from __future__ import annotations

from pathlib import Path

from embedded_base.architecture import build_tokenizer
from embedded_base.curriculum import WORLDS, template_texts
from embedded_base.pretrain import make_base_of


def make_base(world: str, seed: int, directory: Path, progress: bool = True) -> None:
    """Pretrain the base of a world of the embedded task (a key of `curriculum.WORLDS`) into a new directory.

    Raises:
        RuntimeError: the base fails the look-up gate; another seed may pass.
    """
    make_base_of(WORLDS[world], build_tokenizer(template_texts()), seed, directory, progress)
