"""A tiny model and a folder with the files that the pages speak of."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_files import write_files

from tiny import save_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """A random Qwen3 on disk; its chat template knows tools."""
    from trl.chat_template_utils import qwen3_chat_template

    return save_model(tmp_path_factory.mktemp("model"), qwen3_chat_template)


@pytest.fixture
def page_folder(tmp_path, monkeypatch) -> Path:
    """An empty working directory, but for the files that the pages speak of."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
