"""Analysis of the credit: token maps, mutual information, compatibility, interventional credit, branches.

    from credit_trl.lab.analysis import Checkpoint, map_response, sample_rollouts, write_maps

Names are loaded on first use. No module of this package imports the trainer.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {
    "callback": ("CreditMapCallback",),
    "checkpoints": ("Checkpoint",),
    "compatibility": ("fit_posterior", "measure_compatibility"),
    "responses": ("Rollout", "analysis_config", "read_rollouts", "sample_rollouts"),
    "tokenmap": ("TokenMap", "TokenScores", "map_response", "score_response"),
    "tokenmap_json": ("read_maps", "write_maps"),
    "tokenmap_summary": ("Summary", "format_summary", "summarize_maps"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
