"""Recipes of the package: YAML files with options, and the accelerate files that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from credit_trl.cli.errors import suggest

_PACKAGE = Path(__file__).parents[1]
# In a wheel beside the modules, in a checkout in `examples`.
_FOLDERS = (_PACKAGE, _PACKAGE.parents[1] / "examples")


def recipe_names() -> list[str]:
    """Names of the recipes, without the suffix of their files."""
    return sorted(path.stem for path in _folder("recipes").glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """File of a recipe.

    Raises:
        ValueError: there is no such recipe; the message names the nearest.
    """
    path = _folder("recipes") / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        names = recipe_names()
        raise ValueError(f"there is no recipe {name!r}.{suggest(name, names)} Recipes: {', '.join(names)}.")
    return path


def with_accelerate_file(options: dict[str, Any]) -> dict[str, Any]:
    """Options in which an accelerate file of the package has its full path, so that any directory will do."""
    name = options.get("accelerate_config")
    if name is None or Path(name).is_file():
        return options
    shipped = _folder("accelerate") / Path(name).name
    return {**options, "accelerate_config": str(shipped)} if shipped.is_file() else options


def _folder(name: str) -> Path:
    return next((folder / name for folder in _FOLDERS if (folder / name).is_dir()), _PACKAGE / name)
