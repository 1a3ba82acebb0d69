"""Analysis of the reward: token maps, mutual information, compatibility and interventional credit.

    from credit_trl.lab.analysis import Checkpoint, map_response, sample_rollouts, write_html

Names are loaded on first use. No module of this package imports the trainer.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {
    "branches": ("find_branches", "format_branches", "summarize_branches"),
    "callback": ("CreditMapCallback",),
    "checkpoints": ("Checkpoint",),
    "compatibility": ("fit_posterior",),
    "responses": ("Rollout", "analysis_config", "read_rollouts", "sample_rollouts"),
    "tokenmap": ("TokenMap", "TokenScores", "group_scales", "map_response", "score_response"),
    "tokenmap_html": ("render_html", "write_html"),
    "tokenmap_parquet": ("read_parquet", "write_parquet"),
    "tokenmap_png": ("draw_png",),
    "tokenmap_summary": ("Summary", "format_summary", "summarize_maps"),
    "tokenmap_terminal": ("print_map",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
