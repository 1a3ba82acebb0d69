"""Imported packages are declared dependencies, in an extra where only some parts import them."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tables import tables_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "credit_trl"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TABLES = tables_of(__file__)
MODULES = sorted(PACKAGE.rglob("*.py"))
PINNED = (ROOT / "constraints.txt").read_text("utf-8")


@cache
def distributions_of_packages() -> dict[str, list[str]]:
    """Package -> the distributions that have it."""
    return dict(packages_distributions())


def declared(requirements: list[str]) -> set[str]:
    """Canonical names of the required distributions."""
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def imported(path: Path) -> set[str]:
    """Names of the packages that a module imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"credit_trl"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_are_declared(path):
    distributions = distributions_of_packages()
    extras = PROJECT["optional-dependencies"]
    part = path.relative_to(PACKAGE).parts[0]
    for name in imported(path):
        if part in TABLES["undeclared"].get(name, ()):
            continue
        extra, parts = TABLES["optional"].get(name, (None, ()))
        allowed = declared(PROJECT["dependencies"])
        if part in parts:
            allowed |= declared(extras[extra])
        owners = {canonicalize_name(owner) for owner in distributions.get(name, [name])}
        assert owners & allowed, f"{path} imports {name}, which no requirement names"


def test_declared_dependencies_are_imported():
    distributions = distributions_of_packages()
    names = set.union(*map(imported, MODULES))
    owners = {canonicalize_name(owner) for name in names for owner in distributions.get(name, [name])}
    assert declared(PROJECT["dependencies"]) <= owners


def test_constraints_pin_allowed_versions():
    pins = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)$", PINNED))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    for text in PROJECT["dependencies"]:
        requirement = Requirement(text)
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier, text
