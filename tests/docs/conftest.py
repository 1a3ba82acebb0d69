"""A tiny model and a folder with the files that the pages speak of."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_files import write_files

from tiny import build_model, build_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """A random Qwen3 on disk; its chat template knows tools, and its positions are enough for a page of text."""
    from trl.chat_template_utils import qwen3_chat_template

    path = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    build_model(tokenizer, max_position_embeddings=32768).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def page_folder(tmp_path, monkeypatch) -> Path:
    """An empty working directory, but for the files that the pages speak of."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
