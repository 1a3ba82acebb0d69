"""Comparison of TRL's private methods that this package overrides with those of the tested versions."""

import inspect
import warnings
from functools import cache
from importlib.metadata import version
from pathlib import Path

import yaml
from packaging.version import Version
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

TESTED_TRL = ("1.15", "1.16")

# Class of TRL -> overridden method -> its parameters after `self`; None for any.
_TABLE = yaml.safe_load(Path(__file__).with_name("trl_hooks.yaml").read_text("utf-8"))
HOOKS: dict[type, dict[str, str | None]] = {
    owner: _TABLE[owner.__name__] for owner in (GRPOTrainer, VLLMGeneration, VLLMClient)
}


@cache
def check_trl(installed: str | None = None) -> None:
    """Raise an `ImportError` where an overridden method is missing or changed; warn once of an untested minor."""
    installed = installed or version("trl")
    for owner, methods in HOOKS.items():
        for name, expected in methods.items():
            method = getattr(owner, name, None)
            found = " ".join(list(inspect.signature(method).parameters)[1:]) if callable(method) else "missing"
            if not callable(method) or expected not in (None, found):
                raise ImportError(
                    f"`{owner.__name__}.{name}` of TRL {installed}, which credit_trl overrides, has the parameters "
                    f'"{found}" instead of "{expected}". Install a tested one: pip install "trl=={TESTED_TRL[-1]}.*".'
                )
    if "{0.major}.{0.minor}".format(Version(installed)) not in TESTED_TRL:
        message = f"TRL {installed} is installed, and credit_trl is tested with {' and '.join(TESTED_TRL)}."
        warnings.warn_explicit(message, UserWarning, "credit_trl", 0)  # no source line in the output
