"""The embedded task's base models: a Qwen3 of 0.44 million parameters with its own tokenizer and chat template.

The base of the plain world is part of the package. Bases of other worlds and seeds are pretrained on first use, in two
or three minutes on two CPU cores, and kept in the user's cache directory.

`python -m credit_trl.tasks.quickstart_model --world plain --seed 0 --out DIR` makes any of them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from filelock import FileLock
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

if TYPE_CHECKING:
    from credit_trl.tasks.quickstart_model.pretrain import World

EMBEDDED_MODEL = "quickstart"
SHIPPED_WORLD, SHIPPED_SEED = "plain", 0
SHIPPED = Path(__file__).parent / "plain"

# The files that decide what a base is. A cached base made by others is not used.
_SOURCES = ("../quickstart.py", "architecture.py", "curriculum.py", "pretrain.py")


def model_path(name: str) -> str:
    """Path of the embedded model for `"quickstart"`; any other path or hub name unchanged."""
    return str(base_directory()) if name == EMBEDDED_MODEL else name


def load_model(
    cache_dir: str | Path | None = None, world: str = "plain", seed: int = 0
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """The base of a world, fp32 on the CPU in evaluation mode, and its tokenizer.

    Args:
        cache_dir: where bases that are not shipped are kept; by default `$XDG_CACHE_HOME/credit_trl` or
            `~/.cache/credit_trl`.
        world: "plain", or a base in which the task's feedback makes the same words likely under any input: "shortcut"
            (one thought for all), "style" (an opening before the thought) (`curriculum.WORLDS`).
        seed: of the pretraining; 0 of the plain world is shipped.

    Raises:
        ValueError: an unknown world.
        RuntimeError: pretraining with this seed did not give a usable base.
    """
    return read_base(base_directory(cache_dir, world, seed))


def base_directory(cache_dir: str | Path | None = None, world: str = "plain", seed: int = 0) -> Path:
    """The directory that holds a base, for `model_name_or_path`; made on first use, as in `load_model`.

    Processes that ask for the same base at once wait for the one that makes it. A base appears under its name only
    when it is complete, so an interrupted one leaves nothing that would be taken for it.
    """
    from credit_trl.tasks.quickstart_model.curriculum import WORLDS

    if world not in WORLDS:
        raise ValueError(f"Unknown world {world!r}: choose one of {sorted(WORLDS)}.")
    if (world, seed) == (SHIPPED_WORLD, SHIPPED_SEED):
        return SHIPPED
    root = _cache_root() if cache_dir is None else Path(cache_dir)
    directory = root / "quickstart" / f"{world}-seed{seed}-{_recipe_digest()}"
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            _make_in_place(directory, world, seed)
    return directory


def make_base(
    world: str, seed: int, directory: Path, progress: bool = True
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Pretrain a base, write it and return it as it reads back.

    Raises:
        RuntimeError: the base fails the look-up gate, before or after its weights are rounded to fp16.
    """
    from credit_trl.tasks.quickstart_model.architecture import build_tokenizer
    from credit_trl.tasks.quickstart_model.curriculum import WORLDS, template_texts

    return make_base_of(WORLDS[world], build_tokenizer(template_texts()), seed, directory, progress)


def make_base_of(
    world: World, tokenizer: PreTrainedTokenizerFast, seed: int, directory: Path, progress: bool = True
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """`make_base` for any world: what has `draw` and `lookup_accuracy`, and its tokenizer (`train_tokenizer`)."""
    from credit_trl.tasks.quickstart_model.pretrain import check_gate, pretrain

    _write_base(pretrain(tokenizer, world, seed, progress=progress), tokenizer, directory)
    model, tokenizer = read_base(directory)
    check_gate(world, model, tokenizer, "after rounding the weights to fp16")
    return model, tokenizer


def read_base(directory: str | Path) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Model (fp32, evaluation mode) and tokenizer from a base's directory; safetensors and JSON only."""
    model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(directory, local_files_only=True)


def _write_base(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Weights in fp16, which halves the file; the configuration says fp32, so that everyone computes in that."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(directory)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    weights = {name: tensor.half() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _make_in_place(directory: Path, world: str, seed: int) -> None:
    """Make a base beside `directory` and move it there in one step."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        make_base(world, seed, scratch)
        scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "credit_trl"


def _recipe_digest() -> str:
    digest = hashlib.sha256()
    for source in _SOURCES:
        digest.update((Path(__file__).parent / source).read_bytes())
    return digest.hexdigest()[:12]
