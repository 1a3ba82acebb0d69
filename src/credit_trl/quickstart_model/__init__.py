"""Embedded base model of the quickstart task: a Qwen3 of 0.45 million parameters with its own tokenizer.

`examples/study/worlds.py` pretrains bases of other worlds and seeds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

EMBEDDED_MODEL = "quickstart"
SHIPPED = Path(__file__).parent / "plain"  # the base of the world "plain" with seed 0
CACHE_FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "credit_trl"


def load_model() -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """The shipped base, in fp32 on the CPU and in evaluation mode, with its tokenizer."""
    return read_base(SHIPPED)


def read_base(directory: str | Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Model (fp32, evaluation mode) and tokenizer from a base's directory; reads safetensors and JSON only."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(directory, local_files_only=True)


def model_path(name: str) -> str:
    """Directory of the model for `"quickstart"`; any other path or hub name unchanged."""
    return str(SHIPPED) if name == EMBEDDED_MODEL else name


@contextmanager
def naming_model(name: str) -> Iterator[None]:
    """Name the model that is loaded inside in errors of a missing connection or of a path that is no hub name."""
    try:
        yield
    except OSError as error:
        if not str(error).startswith(("We couldn't connect to", "Repo id must")):
            raise
        text = f"The model `{name}` is neither a folder nor in the cache, and no hub has it or none is reached."
        raise OSError(f"{text} Give the folder of a saved model, or check name and network.") from error
