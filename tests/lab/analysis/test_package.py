from __future__ import annotations

import subprocess
import sys

import pytest

import credit_trl.lab.analysis as analysis


def test_every_public_name_loads():
    for name in analysis.__all__:
        assert getattr(analysis, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = analysis.nothing_of_the_kind


def test_analysis_does_not_import_the_trainer():
    code = (
        "import importlib, pkgutil, sys, credit_trl.lab.analysis as a\n"
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(a.__path__, a.__name__ + '.')]\n"
        "import credit_trl.cli.credit_map, credit_trl.cli.credit_compat\n"
        "sys.exit('credit_trl.trainer' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_page_templates_are_package_data():
    from importlib.resources import files

    names = {entry.name for entry in (files("credit_trl.lab.analysis") / "page").iterdir()}
    assert {"tokenmap.html", "tokenmap.css", "tokenmap.js"} <= names
