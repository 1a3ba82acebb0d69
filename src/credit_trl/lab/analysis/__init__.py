"""What the reward measures: token maps, mutual information, compatibility, interventional credit.

    from credit_trl.lab.analysis import Checkpoint, map_response, sample_responses, write_html

Nothing here imports the trainer. A name is loaded when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "callback": ("CreditMapCallback",),
    "checkpoints": ("Checkpoint",),
    "compatibility": ("fit_posterior",),
    "responses": ("Response", "analysis_config", "read_responses", "sample_responses"),
    "tokenmap": ("TokenMap", "TokenScores", "group_scales", "map_response", "score_response"),
    "tokenmap_html": ("render_html", "write_html"),
    "tokenmap_parquet": ("read_parquet", "write_parquet"),
    "tokenmap_png": ("draw_png",),
    "tokenmap_summary": ("Summary", "format_summary", "summarize"),
    "tokenmap_terminal": ("print_map",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
