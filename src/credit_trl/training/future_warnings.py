"""Filter of the commands for warnings of dependencies. It imports nothing, so that a command can set it first."""

from __future__ import annotations

import warnings


def ignore_future_warnings() -> None:
    """Ignore transformers' `FutureWarning`s about names that TRL uses. A user of the commands cannot act on them."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
