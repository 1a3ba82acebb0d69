"""TRL's private hooks are checked when the trainer is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
from trl import GRPOTrainer

from credit_trl.trainer import CreditTrainer
from credit_trl.training.trl_compat import HOOKS, check_trl


def test_the_installed_trl_passes():
    check_trl()


@pytest.mark.parametrize("version", ["1.15.0", "1.17.1", "2.0.0", "0.29.1"])
def test_an_untested_minor_version_names_the_one_to_install(version):
    with pytest.raises(ImportError, match=r'pip install "trl==1.16.\*"'):
        check_trl(installed=version)


def test_a_patch_release_of_a_tested_version_passes():
    check_trl(installed="1.16.9")


@pytest.mark.parametrize("name", HOOKS)
def test_a_moved_or_changed_hook_is_named(name):
    moved = type("Moved", (GRPOTrainer,), {name: None})
    changed = type("Changed", (GRPOTrainer,), {name: lambda self, something_else: None})
    for trainer_class in (moved, changed):
        with pytest.raises(ImportError, match=rf"GRPOTrainer.{name}"):
            check_trl(trainer_class)


def test_every_private_method_that_is_overridden_is_among_the_hooks():
    overridden = {
        name for name in vars(CreditTrainer) if callable(getattr(CreditTrainer, name)) and name in dir(GRPOTrainer)
    }
    assert overridden - {"__init__", "__module__", "__doc__"} <= HOOKS.keys()


@pytest.mark.slow
def test_importing_the_trainer_with_an_untested_trl_fails_with_the_message():
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
