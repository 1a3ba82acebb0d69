"""Committed pages of results/ are those of the committed tables."""

from __future__ import annotations

import shutil
import sys

import pytest


@pytest.mark.parametrize("name", ["uses", "collapse", "settled"])
def test_committed_page_is_that_of_its_committed_table(study, name, tmp_path, monkeypatch):
    module = study(name)
    committed = module.HERE / "results"
    shutil.copy(committed / f"{name}.csv", tmp_path)
    if name == "settled":
        monkeypatch.setattr(module, "THEMES", ())  # no figures
    monkeypatch.setattr(sys, "argv", [name, "--output_dir", str(tmp_path / "none"), "--results", str(tmp_path)])
    module.main()
    assert (tmp_path / f"{name}.csv").read_bytes() == (committed / f"{name}.csv").read_bytes()
    assert (tmp_path / f"{name}.md").read_text("utf-8") == (committed / f"{name}.md").read_text("utf-8")
