"""Short name of a model: `quickstart`, the embedded one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from credit_trl.tasks.quickstart_model import EMBEDDED_MODEL, SHIPPED


def model_path(name: str) -> str:
    """Directory of the model for `"quickstart"`; any other path or hub name unchanged.

    Raises:
        ValueError: the name can only be a path, and there is no such folder.
    """
    if name == EMBEDDED_MODEL:
        return str(SHIPPED)
    is_hub_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not name.startswith((".", "-"))
    if not Path(name).is_dir() and (not is_hub_name or Path(name).exists()):
        raise ValueError(
            f"The model `{name}`: no such folder. Give its path, or a name of the Hub such as owner/model."
        )
    return name


@contextmanager
def naming_model(name: str) -> Iterator[None]:
    """Name the model that is loaded inside in transformers' error of a missing connection."""
    try:
        yield
    except OSError as error:
        if not str(error).startswith("We couldn't connect to"):
            raise
        is_close = difflib.get_close_matches(name, [EMBEDDED_MODEL], n=1)
        near = f"Did you mean `{EMBEDDED_MODEL}`?" if is_close else "A local model is named by its folder."
        raise OSError(f"The model `{name}` is neither a folder nor in the cache. {near} {error}") from error
