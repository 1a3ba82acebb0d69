"""TRL's methods that this package overrides, and its attributes that it uses, are there."""

import ast
import dis
import inspect
import warnings

import pytest
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from credit_trl import CreditTrainer
from credit_trl.rollout.vllm import PolicyGeneration, WatchedClient
from credit_trl.training import trl_compat
from credit_trl.training.trl_compat import HOOKS, TESTED_TRL, check_trl

OURS = {GRPOTrainer: CreditTrainer, VLLMGeneration: PolicyGeneration, VLLMClient: WatchedClient}


@pytest.fixture(autouse=True)
def checks_again():
    check_trl.cache_clear()
    yield
    check_trl.cache_clear()


@pytest.mark.parametrize("version", [None, *(f"{minor}.9" for minor in TESTED_TRL)])
def test_installed_trl_and_patch_releases_pass(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_trl(*filter(None, [version]))


@pytest.mark.parametrize("version", ["1.14.2", "2.0.0"])
def test_untested_minor_warns_once(version):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            check_trl(version)
    [warning] = warned
    assert f"TRL {version} is installed" in str(warning.message)


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, hooks in HOOKS.items() for name in hooks])
def test_missing_or_changed_method_is_an_error_that_names_it(monkeypatch, owner, name):
    for method in (None, lambda self, something_else: None):
        if method is not None and HOOKS[owner][name] is None:
            continue
        changed = type(owner.__name__, (owner,), {name: method})
        monkeypatch.setattr(trl_compat, "HOOKS", {changed: HOOKS[owner]})
        check_trl.cache_clear()
        with pytest.raises(
            ImportError, match=rf'`{owner.__name__}\.{name}` of TRL .*pip install "trl=={TESTED_TRL[-1]}'
        ):
            check_trl()


@pytest.mark.parametrize("owner", HOOKS)
def test_overridden_methods_are_those_that_are_compared(owner):
    between = [base for base in OURS[owner].__mro__ if base.__module__.startswith("credit_trl")]
    overridden = [
        name
        for base in between
        for name, value in vars(base).items()
        if inspect.isfunction(value) and hasattr(owner, name) and name != "__init__"
    ]
    assert sorted(overridden) == sorted(set(overridden)), "a method is overridden twice"
    assert set(overridden) == HOOKS[owner].keys()


def attributes_of(owner: type) -> set[str]:
    """Names in a class, and those that its methods set on any object, from their bytecode."""
    methods = [getattr(value, "__func__", value) for base in owner.__mro__ for value in vars(base).values()]
    codes = [method.__code__ for method in methods if inspect.isfunction(method)]
    stored = {step.argval for code in codes for step in dis.get_instructions(code) if step.opname == "STORE_ATTR"}
    return stored | set(dir(owner))


def test_attributes_that_the_trainer_uses_exist():
    """Each `self.name` in our trainer classes is TRL's, or is set or defined by them."""
    attributes = attributes_of(GRPOTrainer) | attributes_of(CreditTrainer)
    classes = [base for base in CreditTrainer.__mro__ if base.__module__.startswith("credit_trl")]
    attributes |= {name for base in classes for name in inspect.get_annotations(base)}
    for base in classes:
        for node in ast.walk(ast.parse(inspect.getsource(base))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                assert node.attr in attributes, f"{base.__name__}: self.{node.attr}"
