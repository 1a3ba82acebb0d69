"""Check of TRL's version and private hooks."""

from __future__ import annotations

import subprocess
import sys

import pytest
from trl import GRPOTrainer

from credit_trl.trainer import CreditTrainer
from credit_trl.training.trl_compat import HOOKS, check_trl


def test_installed_trl_passes():
    check_trl()


@pytest.mark.parametrize("version", ["1.15.0", "1.17.1", "2.0.0", "0.29.1"])
def test_untested_minor_version_names_version_to_install(version):
    with pytest.raises(ImportError, match=r'pip install "trl==1.16.\*"'):
        check_trl(installed=version)


def test_patch_release_of_tested_version_passes():
    check_trl(installed="1.16.9")


@pytest.mark.parametrize("name", HOOKS)
def test_missing_or_changed_hook_is_named(name):
    moved = type("Moved", (GRPOTrainer,), {name: None})
    changed = type("Changed", (GRPOTrainer,), {name: lambda self, something_else: None})
    for trainer_class in (moved, changed):
        with pytest.raises(ImportError, match=rf"GRPOTrainer.{name}"):
            check_trl(trainer_class)


def test_overridden_methods_are_listed_as_hooks():
    overridden = {
        name for name in vars(CreditTrainer) if callable(getattr(CreditTrainer, name)) and name in dir(GRPOTrainer)
    }
    assert overridden - {"__init__", "__module__", "__doc__"} <= HOOKS.keys()


@pytest.mark.slow
def test_importing_trainer_with_untested_trl_fails():
    code = (
        "import importlib.metadata as m; real = m.version\n"
        "m.version = lambda name: '1.20.0' if name == 'trl' else real(name)\n"
        "import credit_trl\n"
        "try:\n    credit_trl.CreditTrainer\nexcept ImportError as error:\n    print(error)\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "TRL 1.20.0 is installed" in shown
    assert 'pip install "trl==1.16.*"' in shown
