"""The package imports with its declared dependencies alone, without those of the development tools."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Imports every module and blocks the package's imports of undeclared packages.
PROGRAM = """
import builtins, importlib, json, pkgutil
load = builtins.__import__
def blocking(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and name.split(".")[0] in BLOCKED and (globals or {{}}).get("__name__", "").startswith("credit_trl"):
        raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
    return load(name, globals, locals, fromlist, level)
BLOCKED = set(json.loads({blocked!r}))
builtins.__import__ = blocking
import credit_trl
credit_trl.CreditTrainer, credit_trl.CreditConfig
failed = {{}}
for module in pkgutil.walk_packages(credit_trl.__path__, "credit_trl."):
    if not module.name.endswith((".__main__", ".sandbox.driver")):  # programs
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            failed[module.name] = error.name
print(json.dumps(failed))
"""


# Optional package -> parts of this package that may import it. The trainer imports none.
OPTIONAL = {
    "requests": {"rollout"},  # the extra `vllm`
    "triton": {"loss"},  # a dependency of torch's GPU builds
}
OWN = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]


def declared(name: str) -> list[Requirement]:
    """Requirements of a distribution; for this project those of the checkout."""
    if name != OWN["name"]:
        return [Requirement(text) for text in requires(name) or []]
    extras = OWN["optional-dependencies"].items()
    optional = [f'{text} ; extra == "{extra}"' for extra, texts in extras for text in texts]
    return [Requirement(text) for text in [*OWN["dependencies"], *optional]]


def brought_by(project: str, *extras: str) -> set[str]:
    """Names of the distributions that a project with these extras installs, itself included."""
    found, wanted = set(), [(canonicalize_name(project), frozenset(extras))]
    seen = set()
    while wanted:
        name, chosen = one = wanted.pop()
        if one in seen:
            continue
        seen.add(one)
        found.add(name)
        try:
            requirements = declared(name)
        except PackageNotFoundError:
            continue  # not installed, such as packages of other platforms or extras
        for requirement in requirements:
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in chosen | {""}):
                wanted.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return found


def importing() -> dict[str, str]:
    """Module -> missing package, in an installation without extras."""
    there = brought_by("credit-trl")
    blocked = [
        module
        for module, owners in packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & there
    ]
    program = PROGRAM.format(blocked=json.dumps(blocked))
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_package_imports_with_declared_dependencies_only():
    lacking = importing()
    for module, needed in lacking.items():
        assert module.split(".")[1] in OPTIONAL.get(needed.split(".")[0], ()), f"{module} needs {needed}"
    assert lacking["credit_trl.rollout.vllm_client"] == "requests"


def test_control_undeclared_packages_are_blocked():
    assert "pytest" not in brought_by("credit-trl")
    assert {"torch", "trl", "numpy"} <= brought_by("credit-trl")
    assert "math-verify" in brought_by("credit-trl", "math")
