"""What this package uses of TRL beyond its public names, compared with the tested versions.

Names outside TRL's public namespace are imported from here, on first use: `from credit_trl.trl_compat import pad`.
`trl_hooks.yaml` lists them and the methods that are overridden. An untested minor trains two steps of a small model
first, which decides between a warning and an error.
"""

import ast
import inspect
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from packaging.version import Version

TESTED_TRL = ("1.15", "1.16")  # minors, oldest first; pyproject.toml allows no newer one
PARITY_SECONDS = 600  # ends a hang; the run takes ten
_CHECKED = "CREDIT_TRL_CHECKED_TRL"  # environment variable: a version whose parity run has passed, or is running
_OF_LAUNCHERS = ("ACCELERATE_", "FSDP_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")

_USED = yaml.safe_load(Path(__file__).with_name("trl_hooks.yaml").read_text("utf-8"))
MODULES: dict[str, str] = {name: module for module, names in _USED["names"].items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """A name of `trl_hooks.yaml`, from its module of TRL.

    Raises:
        ImportError: the installed TRL lacks it.
    """
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = MODULES[name]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise unsupported(f"has no module `{error.name}` with `{name}`") from error
    except AttributeError as error:
        raise unsupported(f"has no `{module}.{name}`") from error


def unsupported(problem: str) -> ImportError:
    """The error of a TRL that differs from the tested ones; `problem` follows its name and version."""
    oldest, newest = map(Version, (TESTED_TRL[0], TESTED_TRL[-1]))
    allowed = f"trl>={oldest},<{newest.major}.{newest.minor + 1}"
    return ImportError(f'TRL {version("trl")} {problem}, so credit_trl needs a tested TRL: pip install "{allowed}"')


@dataclass(frozen=True)
class Hook:
    """A method of TRL that this package overrides."""

    owner: str  # its class
    name: str
    parameters: str  # after `self`, separated by spaces; "..." stands for any number
    value_count: int  # number of returned values

    @property
    def label(self) -> str:
        return f"{self.owner}.{self.name}"

    def accepts(self, parameters: str) -> bool:
        """Whether a method with these parameters after `self` can be overridden."""
        required = self.parameters.removesuffix("...")
        return parameters.startswith(required) if required != self.parameters else parameters == required


def _hooks() -> Iterator[Hook]:
    for owner, methods in _USED["hooks"].items():
        for name, text in methods.items():
            parameters, _, values = text.partition("->")
            yield Hook(owner, name, parameters.strip(), max(1, len(values.split())))


HOOKS = {hook.label: hook for hook in _hooks()}


def check_returned(label: str, values: Any) -> Any:
    """Return what the hook `label` of TRL has returned.

    Raises:
        ImportError: these are more or fewer values than in the tested versions.
    """
    expected = HOOKS[label].value_count
    count = len(values) if isinstance(values, tuple) else 1
    if count != expected:
        raise unsupported(f"returns {count} values from `{label}` instead of {expected}")
    return values


@cache
def check_trl() -> None:
    """Compare the overridden methods of the installed TRL with those of the tested versions.

    Raises:
        ImportError: one is missing, or has other parameters or another number of returned values.
    """
    trl = import_module("trl")
    for hook in HOOKS.values():
        owner = getattr(trl, hook.owner, None) or getattr(sys.modules[__name__], hook.owner)
        check_hook(hook, getattr(owner, hook.name, None))


def check_hook(hook: Hook, method: Any) -> None:
    """Compare a hook with the method of the installed TRL; see `check_trl`."""
    if not callable(method):
        raise unsupported(f"has no method `{hook.label}`")
    parameters = " ".join(list(inspect.signature(method).parameters)[1:])
    if not hook.accepts(parameters):
        raise unsupported(f"has `{hook.label}({parameters})` instead of `({hook.parameters})`")
    counts = returned_counts(method) if hook.value_count > 1 else set()  # others have nested functions
    for count in counts - {hook.value_count}:
        raise unsupported(f"returns {count} values from `{hook.label}` instead of {hook.value_count}")


def returned_counts(method: Any) -> set[int]:
    """Numbers of values in the `return` statements of a function that return a tuple display."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(method)))
    except (OSError, TypeError):
        return set()
    returns = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return)]
    return {len(value.elts) for value in returns if isinstance(value, ast.Tuple)}


@cache
def check_behaviour() -> None:
    """On an untested minor of TRL, compare two steps of a small model with TRL's trainer and a dense loss.

    They are computed on the CPU in another process. A warning follows where they agree.

    Raises:
        ImportError: they differ, or the steps fail.
    """
    installed = version("trl")
    parsed = Version(installed)
    if f"{parsed.major}.{parsed.minor}" in TESTED_TRL or os.environ.get(_CHECKED) == installed:
        return
    # Neither the launcher's variables, by which it would join this run, nor a GPU.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    environment |= {_CHECKED: installed, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", f"{__package__}.trl_parity"]
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PARITY_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise unsupported(f"does not end a two-step comparison in {PARITY_SECONDS} seconds") from error
    if ran.returncode != 0:
        lines = ran.stderr.strip().splitlines() or ["no message"]
        raise unsupported(f"fails a two-step comparison with TRL's trainers ({lines[-1].strip().rstrip('.')})")
    os.environ[_CHECKED] = installed  # of the processes that this one starts
    message = (
        f"TRL {installed} is installed, and credit_trl is tested with {' and '.join(TESTED_TRL)}. Two steps of a "
        "small model agree with TRL's trainer and a dense loss."
    )
    warnings.warn_explicit(message, UserWarning, "credit_trl", 0)  # no source line in the output
