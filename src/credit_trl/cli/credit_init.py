"""`trl credit-init`: a folder with a configuration, a verifier and rows that run as they are and are to be edited."""

import argparse
from importlib.resources import files
from pathlib import Path

from credit_trl.cli.errors import suggest

_PACKAGE = Path(__file__).parents[1]
# Of recipes and accelerate files: in a wheel beside the modules, in a checkout in `examples`.
_SHIPPED = _PACKAGE if (_PACKAGE / "recipes").is_dir() else _PACKAGE.parents[1] / "examples"
_STARTER = Path(__file__).with_name("starter")
# File of the starter -> its name in the folder. A verifier that ended in .py would be a module of this package.
_FILES = {"run.yaml": "run.yaml", "questions.jsonl": "questions.jsonl", "my_verifier.txt": "my_verifier.py"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write run.yaml, my_verifier.py and questions.jsonl, which train the shipped model on a CPU as they are, to "
        "be edited. With --recipe, write that recipe instead."
    )
    parser.add_argument("folder", nargs="?", default=".", help="default: the working directory")
    parser.add_argument("--recipe", metavar="NAME", help="such as livecodebench_qwen3_8b; see trl credit --help")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    if folder.suffix.strip() in (".yaml", ".yml") and not folder.exists():
        raise ValueError(f"{args.folder.strip()!r} is the name of a file, and a folder is made. Name a folder.")
    sources = {folder / name: _STARTER / source for source, name in _FILES.items()}
    if args.recipe is not None:
        sources = {folder / recipe_path(args.recipe).name: recipe_path(args.recipe)}
    for path in sources:
        if path.exists():
            raise FileExistsError(f"{path} exists and is not overwritten. Name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for path, source in sources.items():
        path.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        print(f"wrote {path}")
    place = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    print(f"next: {place}trl credit --config {next(iter(sources)).name}")
    return 0


def recipe_names() -> list[str]:
    """Names of the recipes, without the suffix of their files."""
    return sorted(path.stem for path in (_SHIPPED / "recipes").glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """File of a recipe.

    Raises:
        ValueError: there is no such recipe; the message names the nearest.
    """
    path = _SHIPPED / "recipes" / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        names = recipe_names()
        raise ValueError(f"there is no recipe {name!r}.{suggest(name, names)} Recipes: {', '.join(names)}.")
    return path


def accelerate_file(name: str) -> str:
    """Path of an accelerate file of the package, so that any directory will do; any other path or name unchanged."""
    shipped = _SHIPPED / "accelerate" / Path(name).name
    return str(shipped) if shipped.is_file() and not Path(name).is_file() else name


def accelerate_names() -> list[str]:
    """Names that `--accelerate_config` knows: files of this package and of TRL."""
    names = []
    for path in (*(_SHIPPED / "accelerate").iterdir(), *files("trl.accelerate_configs").iterdir()):
        if path.name.endswith(".yaml"):
            names.append(path.name.removesuffix(".yaml"))
    return names
