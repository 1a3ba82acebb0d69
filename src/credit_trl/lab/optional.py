"""Callbacks whose failures do not end a run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

logger = logging.getLogger(__name__)


class OptionalCallback(TrainerCallback):
    """Callback whose failures do not end the run: the first one is a warning, later ones are ignored."""

    _has_warned = False

    def attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function; None, with a warning the first time, if it fails."""
        try:
            return function(*arguments)
        except Exception as error:
            if not self._has_warned:
                name = type(self).__name__
                logger.warning(f"{name} failed, and training continues without it: {type(error).__name__}: {error}")
            self._has_warned = True
            return None
