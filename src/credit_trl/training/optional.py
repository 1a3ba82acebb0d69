"""Parts of a run whose failures do not end it."""

import functools
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class OptionalEvents:
    """Base of a callback whose failures do not end the run: the first one is a warning, later ones are ignored.

    That holds for each of its events, and for each `attempt` inside one, after which the event goes on.
    """

    _has_warned = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, event in vars(cls).items():
            if name.startswith("on_"):
                setattr(cls, name, _optional(event))

    def warn(self, text: str) -> None:
        """Log a warning, unless this callback has."""
        if not self._has_warned:
            logger.warning(f"{type(self).__name__}: {text}. Training continues.")
        self._has_warned = True

    def attempt(self, function: Callable[[], Any]) -> Any:
        """The result of a function without arguments; None, with a warning the first time, if it fails."""
        try:
            return function()
        except Exception as error:
            self.warn(f"{type(error).__name__}: {error}")
            return None


def _optional(event: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(event)
    def attempted(self: OptionalEvents, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self.attempt(functools.partial(event, self, args, state, control, **kwargs))

    return attempted
