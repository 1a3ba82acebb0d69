"""Fixtures: a tiny model, and a folder with the files that the pages name."""

from __future__ import annotations

from pathlib import Path

import pytest
from blocks import ROOT
from page_files import write_files

from tiny import save_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Path of a tiny random Qwen3 whose chat template supports tools."""
    from trl.chat_template_utils import qwen3_chat_template

    return save_model(tmp_path_factory.mktemp("model"), qwen3_chat_template)


@pytest.fixture
def page_folder(tmp_path, monkeypatch) -> Path:
    """Working directory with the files that the pages name, and the examples."""
    write_files(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path
