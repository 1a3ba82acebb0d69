"""Embedded base model of the quickstart task: a Qwen3 of 0.45 million parameters with its own tokenizer.

`examples/study/make_base.py` pretrains bases of other worlds and seeds, in two or three minutes on two CPU cores, and
writes them to the user's cache directory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

EMBEDDED_MODEL = "quickstart"
SHIPPED = Path(__file__).parent / "plain"  # the base of the world "plain" with seed 0


def load_model() -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """The shipped base, in fp32 on the CPU and in evaluation mode, with its tokenizer."""
    return read_base(SHIPPED)


def read_base(directory: str | Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Model (fp32, evaluation mode) and tokenizer from a base's directory; reads safetensors and JSON only."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(directory, local_files_only=True)


def cached_directory(world: str, seed: int = 0) -> Path:
    """Place of a base of `make_base.py` in the cache directory, whether or not it exists."""
    return cache_directory() / "quickstart" / f"{world}-seed{seed}"


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/credit_trl`, or `~/.cache/credit_trl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "credit_trl"
