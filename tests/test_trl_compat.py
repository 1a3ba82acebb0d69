"""TRL's methods that this package overrides, and its names that it uses, are those of the tested versions."""

import ast
import dis
import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import trl
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from trl import GRPOTrainer

from credit_trl import CreditTrainer, trl_compat
from credit_trl.rollout.vllm import PolicyGeneration, WatchedClient
from credit_trl.trl_compat import HOOKS, MODULES, TESTED_TRL, check_behaviour, check_hook, check_returned, check_trl
from tables import tables_of

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
OURS = {"GRPOTrainer": CreditTrainer, "VLLMGeneration": PolicyGeneration, "VLLMClient": WatchedClient}
# One sentence with the name of TRL, its version and the command that mends it.
ADVICE = r'^TRL \d\S* [^\n]*, so credit_trl needs a tested TRL: pip install "trl>=1\.15,<1\.17"$'


@pytest.fixture(autouse=True)
def uncached_checks(monkeypatch):
    monkeypatch.delenv("CREDIT_TRL_CHECKED_TRL", raising=False)
    for check in (check_trl, check_behaviour):
        check.cache_clear()
    yield
    for check in (check_trl, check_behaviour):
        check.cache_clear()


@pytest.mark.parametrize("version", [None, *(f"{minor}.9" for minor in TESTED_TRL)])
def test_tested_minors_and_their_patches_pass(monkeypatch, version):
    if version is not None:
        monkeypatch.setattr(trl_compat, "version", lambda name: version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_trl()
        check_behaviour()


def test_requirements_end_at_the_newest_tested_minor():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["vllm"]]
    allowed = [re.sub(r"^trl(\[vllm\])?", "", text) for text in requirements if re.match(r"trl\W", text)]
    assert len(allowed) == 2
    oldest, newest = map(Version, (TESTED_TRL[0], TESTED_TRL[-1]))
    for specifiers in map(SpecifierSet, allowed):
        assert all(f"{minor}.0" in specifiers for minor in TESTED_TRL)
        assert f"{newest.major}.{newest.minor + 1}.0" not in specifiers
        assert f"{oldest.major}.{oldest.minor - 1}.9" not in specifiers
    with pytest.raises(ImportError, match=re.escape(allowed[0])):
        raise trl_compat.unsupported("is not tested")


@pytest.mark.parametrize("label", HOOKS)
def test_missing_or_changed_hook_is_an_error_that_names_it(label):
    hook = HOOKS[label]

    def renamed(self, something_else):
        return None

    changes = [None] if hook.parameters == "..." else [None, renamed]
    for method in changes:
        with pytest.raises(ImportError, match=ADVICE) as raised:
            check_hook(hook, method)
        assert f"`{label}" in str(raised.value)


@pytest.mark.parametrize("label", HOOKS)
def test_another_number_of_returned_values_is_an_error(label):
    count = HOOKS[label].value_count
    values = tuple(range(count)) if count > 1 else {}
    assert check_returned(label, values) is values
    for wrong in (tuple(range(count + 1)), tuple(range(count - 1))):
        with pytest.raises(ImportError, match=ADVICE) as raised:
            check_returned(label, wrong)
        assert f"returns {len(wrong)} values from `{label}`" in str(raised.value)


@pytest.mark.parametrize("name", ["_generate", "_generate_single_turn", "_calculate_rewards", "_prepare_inputs"])
def test_trainer_refuses_one_more_returned_value(monkeypatch, make_trainer, name):
    method = getattr(GRPOTrainer, name)

    def with_one_more(self, *args, **kwargs):
        values = method(self, *args, **kwargs)
        return (*values, None) if isinstance(values, tuple) else (values, None)

    monkeypatch.setattr(GRPOTrainer, name, with_one_more)
    with pytest.raises(ImportError, match=ADVICE) as raised:
        make_trainer().train()
    assert f"`GRPOTrainer.{name}`" in str(raised.value)


@pytest.mark.parametrize(("name", "module"), MODULES.items())
def test_renamed_private_name_is_an_error_that_names_it(monkeypatch, name, module):
    value = getattr(trl_compat, name)
    monkeypatch.delattr(import_module(module), name)
    with pytest.raises(ImportError, match=ADVICE) as raised:
        exec(f"from credit_trl.trl_compat import {name}")
    assert f"`{module}.{name}`" in str(raised.value)
    monkeypatch.undo()
    assert getattr(trl_compat, name) is value


def test_moved_module_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setitem(MODULES, "identity", "trl.trainer.moved_utils")
    with pytest.raises(ImportError, match=ADVICE) as raised:
        _ = trl_compat.identity
    assert "`trl.trainer.moved_utils` with `identity`" in str(raised.value)


def test_private_names_of_trl_are_imported_in_one_module():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [module for module in modules if module.startswith("trl.")], f"{path}:{node.lineno}"
            if isinstance(node, ast.ImportFrom) and node.module == "trl":
                assert {alias.name for alias in node.names} <= set(trl.__all__ or dir(trl)), path


@pytest.mark.parametrize("owner", OURS)
def test_overridden_methods_are_those_that_are_compared(owner):
    base = getattr(trl, owner, None) or getattr(trl_compat, owner)
    between = [cls for cls in OURS[owner].__mro__ if cls.__module__.startswith("credit_trl")]
    overridden = [
        name
        for cls in between
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and hasattr(base, name) and name != "__init__"
    ]
    assert sorted(overridden) == sorted(set(overridden)), "a method is overridden twice"
    assert {f"{owner}.{name}" for name in overridden} == {hook.label for hook in HOOKS.values() if hook.owner == owner}


def attributes_of(owner: type) -> set[str]:
    """Names in a class, and those that its methods set on any object, from their bytecode."""
    methods = [getattr(value, "__func__", value) for base in owner.__mro__ for value in vars(base).values()]
    codes = [method.__code__ for method in methods if inspect.isfunction(method)]
    stored = {step.argval for code in codes for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return stored | set(dir(owner))


def test_attributes_that_the_trainer_uses_exist():
    """Each `self.name` in our trainer classes is TRL's, or is set or defined by them."""
    known_names = attributes_of(GRPOTrainer) | attributes_of(CreditTrainer)
    classes = [base for base in CreditTrainer.__mro__ if base.__module__.startswith("credit_trl")]
    known_names |= {name for base in classes for name in inspect.get_annotations(base)}
    for base in classes:
        for node in ast.walk(ast.parse(inspect.getsource(base))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                assert node.attr in known_names, f"{base.__name__}: self.{node.attr}"


TABLES = tables_of(__file__)
CHANGES = TABLES["changes"]


@pytest.fixture
def next_trl(tmp_path):
    """A function that writes a copy of the installed TRL as 1.17.0 with changes, and returns its folder."""

    def write(changes):
        package = Path(trl.__file__).parent
        shutil.copytree(
            package, tmp_path / "trl", ignore=shutil.ignore_patterns("__pycache__"), copy_function=os.symlink
        )
        for name, old, new in changes:
            source = (tmp_path / "trl" / name).read_text("utf-8")
            assert old in source, f"{name} has no {old!r}"
            (tmp_path / "trl" / name).unlink(missing_ok=True)
            (tmp_path / "trl" / name).write_text(source.replace(old, new), "utf-8")
        metadata = tmp_path / "trl-1.17.0.dist-info"
        metadata.mkdir()
        text = importlib.metadata.distribution("trl").read_text("METADATA")
        (metadata / "METADATA").write_text(re.sub(r"(?m)^Version: .*", "Version: 1.17.0", text), "utf-8")
        return tmp_path

    return write


def run_with(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python with the TRL of a folder."""
    paths = [str(folder), str(SOURCE), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=800)


def test_comparison_that_hangs_is_an_error(monkeypatch):
    monkeypatch.setattr(trl_compat, "version", lambda name: "1.17.0")
    monkeypatch.setattr(trl_compat, "PARITY_SECONDS", 0.01)
    with pytest.raises(ImportError, match=ADVICE):
        check_behaviour()


@pytest.mark.slow
def test_loss_of_another_size_in_the_next_minor_is_an_error(next_trl):
    """Without the imports of `trl credit`, which take as long as the comparison."""
    folder = next_trl(TABLES["loss of another size"])
    ran = run_with(folder, "-c", "from credit_trl.trl_compat import check_behaviour; check_behaviour()")
    error = ran.stderr.strip().splitlines()[-1].removeprefix("ImportError: ")
    assert re.match(ADVICE, error), ran.stderr
    assert "fails a two-step comparison with TRL's trainers (AssertionError: the distillation loss is" in error


@pytest.mark.slow
def test_minor_before_the_oldest_ends_in_one_sentence(tmp_path):
    """With the wheel of TRL 1.14, from Python and from the command line."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), "trl==1.14.2"]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=800)
    if installed.returncode != 0:
        pytest.skip(f"pip installs no TRL 1.14.2: {installed.stderr[-300:]}")
    runs = {
        "ImportError": ["-c", "from credit_trl import CreditTrainer"],
        "trl credit: error": ["-m", "credit_trl", "credit", *TABLES["run"].split()],
    }
    for prefix, arguments in runs.items():
        error = run_with(tmp_path, *arguments).stderr.strip().splitlines()[-1]
        assert error.startswith(f"{prefix}: TRL 1.14.2 has `GRPOTrainer."), error
        assert re.match(ADVICE, error.removeprefix(f"{prefix}: ")), error


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_next_minor_ends_in_one_sentence_or_a_warning(next_trl, change):
    """One step of `trl credit` with a changed copy of TRL."""
    case = CHANGES[change]
    ran = run_with(next_trl(case["edits"]), "-m", "credit_trl", "credit", *TABLES["run"].split())
    if case["says"] is None:
        assert ran.returncode == 0, ran.stderr
        assert "TRL 1.17.0 is installed, and credit_trl is tested with 1.15 and 1.16" in ran.stderr
        return
    assert ran.returncode == 2, ran.stderr
    error = ran.stderr.strip().splitlines()[-1]
    command_name, _, sentence = error.partition(": error: ")
    assert command_name == "trl credit", ran.stderr
    assert re.match(ADVICE, sentence), sentence
    assert case["says"] in sentence
    assert "Traceback" not in ran.stderr
