"""Check of TRL's version, of the methods that this package overrides and of the attributes that it reads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import RepeatSampler

import credit_trl
from credit_trl.rollout.vllm import PolicyGeneration
from credit_trl.rollout.vllm_client import WatchedClient
from credit_trl.trainer import CreditTrainer
from credit_trl.training.checkpoints import EpochRepeatSampler, ResumableTrainer
from credit_trl.training.micro_batches import UnpaddedTrainer
from credit_trl.training.reporting import ReportingTrainer
from credit_trl.training.trl_compat import ATTRIBUTES, HOOKS, TESTED_TRL, check_trl, missing_attributes

ROOT = Path(__file__).parents[2]
PACKAGE = Path(credit_trl.__file__).parent
SUBCLASSES = {
    GRPOTrainer: (ResumableTrainer, UnpaddedTrainer, ReportingTrainer, CreditTrainer),
    RepeatSampler: (EpochRepeatSampler,),
    VLLMGeneration: (PolicyGeneration,),
    VLLMClient: (WatchedClient,),
}
# Modules that read attributes of a trainer, of a generation layer and of a client, by the names of their variables.
READERS = {
    GRPOTrainer: (
        "trainer training/checkpoints training/micro_batches training/reporting training/model_card teacher/models "
        "training/drift evaluation/trainer_engine evaluation/callback lab/analysis/callback".split(),
        ("self", "trainer"),
    ),
    RepeatSampler: (["training/checkpoints"], ("self",)),
    VLLMGeneration: (["rollout/vllm", "evaluation/trainer_engine"], ("self", "adopted", "generation")),
    VLLMClient: (["rollout/vllm_client"], ("self", "watched")),
}
# Attributes of those names that `self` of another class in the same modules has.
OTHERS = {GRPOTrainer: {"_evaluate", "epoch", "generator", "seed", "shuffle"}}


def test_installed_trl_passes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_trl()


@pytest.mark.parametrize("version", ["1.14.2", "1.97.1", "2.0.0"])
def test_untested_minor_without_a_difference_warns_once(version):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            check_trl(installed=version)
    (warning,) = warned
    assert f"TRL {version} is installed" in str(warning.message)
    assert f"make test-trl TRL={version}" in str(warning.message)


@pytest.mark.parametrize("minor", TESTED_TRL)
def test_patch_release_of_tested_version_passes(minor):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_trl(installed=f"{minor}.9")


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, hooks in HOOKS.items() for name in hooks])
def test_missing_or_changed_hook_is_named(owner, name):
    moved = type(owner.__name__, (owner,), {name: None})
    changed = type(owner.__name__, (owner,), {name: lambda self, something_else: None})
    for other in (moved, changed) if HOOKS[owner][name] is not None else (moved,):
        with pytest.raises(ImportError, match=rf'{owner.__name__}\.{name}\(.*pip install "trl=={TESTED_TRL[-1]}'):
            check_trl({other: {name: HOOKS[owner][name]}}, {})


def test_missing_attribute_is_named():
    class Renamed:
        shown = 1

        def __init__(self):
            self.kept = self.args.lost = None
            self.moved_to = self.other.read

    assert missing_attributes(Renamed, ("kept", "moved", "moved_to", "read", "shown")) == ["moved", "read"]
    with pytest.raises(ImportError, match=r"`Renamed.moved`, which credit_trl reads"):
        check_trl({}, {Renamed: ("kept", "moved")})


@pytest.mark.parametrize("owner", HOOKS)
def test_overridden_methods_are_listed(owner):
    overridden = {
        name
        for subclass in SUBCLASSES[owner]
        for name, value in vars(subclass).items()
        if callable(value) and hasattr(owner, name) and not (name == "__init__" and owner is GRPOTrainer)
    }
    assert overridden == HOOKS[owner].keys()


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_attributes_that_are_read_are_listed(owner):
    modules, variables = READERS[owner]
    read = {
        node.attr
        for module in modules
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text("utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in variables
    }
    own = {name for subclass in SUBCLASSES[owner] for name in vars(subclass)} | OTHERS.get(owner, set())
    of_trl = read - set(missing_attributes(owner, tuple(read))) - own
    methods = {name for name in of_trl if callable(getattr(owner, name, None))}
    assert of_trl - methods == {name for name in ATTRIBUTES[owner] if not callable(getattr(owner, name, None))}
    assert {name for name in methods if name.startswith("_")} <= {*ATTRIBUTES[owner], *HOOKS[owner]}


def test_design_page_has_a_row_and_a_test_for_each_hook():
    section = (ROOT / "docs" / "design.md").read_text("utf-8").partition("## TRL's hooks")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")
    ]
    listed = [name for row in rows for name in re.findall(r"`([\w.]+)`", row[0])]
    hooks = [name if owner is GRPOTrainer else f"{owner.__name__}.{name}" for owner in HOOKS for name in HOOKS[owner]]
    assert sorted(listed) == sorted(hooks)
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for hook, relies_on, noticed_by in rows:
        assert relies_on, hook
        assert tests.count(f"def {noticed_by.strip('`')}(") == 1, noticed_by


def test_readme_and_requirement_name_the_tested_minors():
    assert f"TRL {' or '.join(TESTED_TRL)}" in (ROOT / "README.md").read_text("utf-8")
    assert f'"trl>={TESTED_TRL[0]},<2"' in (ROOT / "pyproject.toml").read_text("utf-8")


@pytest.mark.slow
def test_importing_trainer_with_untested_trl_warns_once():
    code = (
        "import importlib.metadata as m; real = m.version\n"
        "m.version = lambda name: '1.97.0' if name == 'trl' else real(name)\n"
        "import credit_trl\ncredit_trl.CreditConfig\ncredit_trl.CreditTrainer\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stderr.count("TRL 1.97.0 is installed") == 1
