"""IFEval's published checkers, of the package `if-verifiable` (Apache-2.0): `pip install -e ".[ifeval]"`.

Its loader of data needs the hub, its checkers do not. Counts of sentences and of words in capitals need NLTK's table
"punkt_tab" (`python -m nltk.downloader punkt_tab`). Where it is missing it is copied, once, from a wheel that contains
it. The detection of languages is random, so its seed is fixed.
"""

import logging
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from credit_trl.quickstart_model import CACHE_FOLDER

sys.path.append(str(Path(__file__).parents[1] / "smollm"))
from smollm2 import download_wheel

MAX_CHARACTERS = 20_000  # of an answer that is graded: some expressions of the checkers are quadratic
NEEDS_PUNKT = ("length_constraints:number_sentences", "change_case:capital_word_frequency")
PUNKT = "tokenizers/punkt_tab/english"
PUNKT_WHEEL = "llama-index-core==0.14.25"
PUNKT_WHEEL_SHA256 = "caa7d9c5ac9b13dc33400cf8d5e92e689b6d1e4497eb9bfa50d6f52ca2eb22a1"
PUNKT_FOLDER = "llama_index/core/_static/nltk_cache"


@cache
def checker_classes() -> Mapping[str, Any]:
    """Checkers by IFEval's name of the instruction type.

    Raises:
        ImportError: `if-verifiable` is not installed.
    """
    try:
        from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
    except ImportError as error:
        raise ImportError(f'{error}. IFEval\'s checkers: pip install "credit-trl[ifeval]".') from error
    import langdetect
    from if_verifiable.ifeval import instructions

    langdetect.DetectorFactory.seed = 0
    instructions.logging = logging.getLogger("if_verifiable")  # its messages contain the whole answer
    instructions.logging.setLevel(logging.CRITICAL)
    return INSTRUCTION_DICT


def check_arguments(instruction: str, kwargs: Mapping[str, Any]) -> None:
    """Check that an instruction can be graded with these arguments, which a checker would otherwise draw.

    Raises:
        ValueError: the type is unknown, an argument is unknown or missing, or a word is a regular expression.
    """
    if instruction not in checker_classes():
        raise ValueError(f"unknown instruction type {instruction!r}; known types: {', '.join(checker_classes())}")
    checker = checker_classes()[instruction](instruction)
    try:
        checker.build_description(**kwargs)
    except Exception as error:
        raise ValueError(f"{instruction} with the arguments {kwargs!r:.200}: {error}") from error
    required = set(checker.get_instruction_args_keys())
    if required != set(kwargs):
        raise ValueError(f"{instruction} has the arguments {sorted(kwargs)}, expected {sorted(required)}")
    if instruction.startswith("keywords:"):
        words = [kwargs.get("keyword", ""), *kwargs.get("keywords", ()), *kwargs.get("forbidden_words", ())]
        for word in words:
            if any(character in r"\.^$*+?{}[]|()" for character in word):
                raise ValueError(f"{instruction}: {word!r} is not a word")


def grade(response: str, instructions: Sequence[str], kwargs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Results of a response, one for each instruction, with `instruction_id`, `strict_pass` and `loose_pass`.

    An empty response follows no instruction. Only the first `MAX_CHARACTERS` characters are graded.
    """
    from if_verifiable.common import InstructionResult, evaluate_instructions

    if any(instruction in NEEDS_PUNKT for instruction in instructions):
        provide_punkt()
    results = []
    for instruction, arguments in zip(instructions, kwargs, strict=True):
        try:
            graded, _ = evaluate_instructions(
                response[:MAX_CHARACTERS], [instruction], [arguments], "", checker_classes()
            )
        except RecursionError:  # JSON that is nested too deeply
            graded = []
        results += graded or [InstructionResult(instruction, False, False)]
    return results


@cache
def provide_punkt() -> None:
    """Make NLTK's table of sentence boundaries available: installed, copied earlier, or copied from a wheel now."""
    import nltk

    nltk.data.path.append(str(CACHE_FOLDER / "nltk_data"))
    try:
        nltk.data.find(f"{PUNKT}/")
    except LookupError:
        copy_punkt(CACHE_FOLDER / "nltk_data" / PUNKT)


def copy_punkt(folder: Path) -> None:
    """Copy the table, which is text, to a folder that appears when it is complete."""
    print(f"Downloading {PUNKT_WHEEL} (12 MB) for NLTK's punkt_tab.", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".wheel.") as scratch:
        with zipfile.ZipFile(download_wheel(PUNKT_WHEEL, PUNKT_WHEEL_SHA256, Path(scratch))) as archive:
            names = [name for name in archive.namelist() if name.startswith(f"{PUNKT_FOLDER}/{PUNKT}/")]
            archive.extractall(scratch, names)
        (Path(scratch) / PUNKT_FOLDER / PUNKT).rename(folder)
