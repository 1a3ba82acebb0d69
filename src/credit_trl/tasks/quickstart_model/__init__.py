"""Embedded base model of the quickstart task: a Qwen3 of 0.45 million parameters with its own tokenizer.

The package ships the weights of the base "plain" with seed 0. `examples/study/make_base.py` pretrains the bases of
other worlds and seeds, in two or three minutes on two CPU cores, and writes them to the user's cache directory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

EMBEDDED_MODEL = "quickstart"
SHIPPED = Path(__file__).parent / "plain"
SHIPPED_BASE = ("plain", 0)  # world and seed
WORLDS = ("plain", "shortcut", "weak")  # that `make_base.py` pretrains


def load_model(
    cache_dir: str | Path | None = None, world: str = "plain", seed: int = 0
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Base model of a world, in fp32 on the CPU and in evaluation mode, with its tokenizer.

    Args:
        cache_dir: directory of the bases that are not shipped, by default `$XDG_CACHE_HOME/credit_trl` or
            `~/.cache/credit_trl`.
        world: `"plain"`, or a world in which feedback makes the same words likely under any prompt: `"shortcut"` (one
            fixed thought) or `"weak"` (the same, less likely).
    """
    return read_base(base_directory(cache_dir, world, seed))


def read_base(directory: str | Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Model (fp32, evaluation mode) and tokenizer from a base's directory; reads safetensors and JSON only."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(directory, local_files_only=True)


def base_directory(cache_dir: str | Path | None = None, world: str = "plain", seed: int = 0) -> Path:
    """Directory of a base, for `model_name_or_path`; takes the arguments of `load_model` and raises the same error."""
    if (world, seed) == SHIPPED_BASE:
        return SHIPPED
    directory = cached_directory(cache_dir, world, seed)
    if not directory.is_dir():
        pretrain = f"python examples/study/make_base.py --world {world} --seed {seed} --out {directory}"
        advice = f"Pretrain it first: {pretrain}" if world in WORLDS else f"Known worlds: {', '.join(WORLDS)}."
        raise FileNotFoundError(f"No base of the world {world!r} with seed {seed} in {directory}. {advice}")
    return directory


def cached_directory(cache_dir: str | Path | None, world: str, seed: int) -> Path:
    """Place of a base in the cache directory, whether or not it exists."""
    return Path(cache_directory() if cache_dir is None else cache_dir) / "quickstart" / f"{world}-seed{seed}"


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/credit_trl`, or `~/.cache/credit_trl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "credit_trl"
