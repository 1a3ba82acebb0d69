"""Imports of the package are declared dependencies, or packages that these bring."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from tables import tables_of

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "credit_trl"
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
# Brought by torch, trl, transformers, datasets or accelerate.
BROUGHT = {"numpy", "packaging", "pandas", "psutil", "pyarrow", "pyyaml", "regex", "safetensors", "tqdm", "xxhash"}
# Optional package -> parts of this package that may import it.
OPTIONAL = tables_of(__file__)["optional"]


def imported(path: Path) -> set[str]:
    """Names of the packages that a module imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"credit_trl"}


def test_imports_are_declared():
    declared = {re.match(r"[\w-]+", text)[0].lower() for text in DECLARED} | BROUGHT
    distributions = packages_distributions()
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0]
        for name in imported(path):
            owners = {owner.lower() for owner in distributions.get(name, [name])}
            assert owners & declared or part in OPTIONAL.get(name, ()), f"{path} needs {name}"
