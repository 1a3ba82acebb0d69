"""`trl credit-init`: a folder with a configuration, a verifier and rows that run as they are and are to be edited."""

from __future__ import annotations

import argparse
from pathlib import Path

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
    from credit_trl.cli.recipes import recipe_path

    folder = Path(args.folder)
    if args.recipe is None:
        files = {folder / name: _STARTER / source for source, name in _FILES.items()}
    else:
        source = recipe_path(args.recipe)
        files = {folder / source.name: source}
    existing = [path for path in files if path.exists()]
    if existing:
        raise FileExistsError(f"{existing[0]} exists and is not overwritten. Name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for path, source in files.items():
        path.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
        print(f"wrote {path}")
    config = next(path.name for path in files if path.suffix == ".yaml")
    place = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    print(f"next: {place}trl credit --config {config}")
    return 0
