"""Token maps as JSON: a list of maps, each with its response, its texts and its scores."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credit_trl.lab.analysis.formula import CreditFormula
from credit_trl.lab.analysis.responses import Rollout
from credit_trl.lab.analysis.tokenmap import ScoredTokens, TokenMap
from credit_trl.lab.analysis.tokentext import TokenText, visible
from credit_trl.training.run_directory import write_atomically

_TENSORS = [field.name for field in fields(ScoredTokens) if field.name not in ("formula", "alternatives")]


def write_maps(maps: Sequence[TokenMap], path: str | Path) -> None:
    """Write maps as JSON, with as many digits as restore the same floats. NaN and infinities are strings."""
    write_atomically(path, json.dumps(list(map(_record, maps)), ensure_ascii=True, separators=(",", ":")))


def read_maps(path: str | Path) -> list[TokenMap]:
    """Read the maps that `write_maps` wrote, in the same order. Texts pass through `visible`.

    Raises:
        ValueError: the file does not hold token maps.
    """
    try:
        records = json.loads(Path(path).read_text("utf-8"))
        return [_token_map(record) for record in records]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} holds no token maps ({problem}). Map the run again.") from error


def scores_record(scores: ScoredTokens, names: Iterable[str]) -> dict[str, Any]:
    """Attributes of scores for JSON, rounded to as many digits as restore the same float."""
    digits = 17 if scores.student_logps.dtype == torch.float64 else 9
    return {name: _rounded(getattr(scores, name).tolist(), digits) for name in names}


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, list):
        return [_rounded(one, digits) for one in value]
    if isinstance(value, int):
        return value
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)


def _record(token_map: TokenMap) -> dict[str, Any]:
    scores = token_map.scores
    return {
        "response": asdict(token_map.response),
        "checkpoint": token_map.checkpoint,
        "tokens": [asdict(token) for token in token_map.tokens],
        "classes": token_map.classes,
        "formula": asdict(scores.formula),
        "dtype": str(scores.student_logps.dtype).removeprefix("torch."),
        "scores": scores_record(scores, _TENSORS),
        "alternatives": {"texts": token_map.alternatives, "scores": scores_record(scores.alternatives, _TENSORS)},
    }


def _token_map(record: dict[str, Any]) -> TokenMap:
    formula = CreditFormula(**record["formula"])
    dtype = {"float32": torch.float32, "float64": torch.float64}[record["dtype"]]
    length = len(record["classes"])
    others = record["alternatives"]
    count = len(others["texts"][0])
    alternatives = ScoredTokens(**_tensors(others["scores"], (length, count), dtype), formula=formula)
    scores = ScoredTokens(**_tensors(record["scores"], (length,), dtype), formula=formula, alternatives=alternatives)
    return TokenMap(
        Rollout.from_json(record["response"]),
        visible(record["checkpoint"]),
        [
            TokenText(visible(t["text"]), t["character"] and visible(t["character"]), t["special"])
            for t in record["tokens"]
        ],
        [visible(name) for name in record["classes"]],
        scores,
        [[visible(text) for text in row] for row in others["texts"]],
    )


def _tensors(scores: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    """Fields of `ScoredTokens`; `contrast_logps` has one more dimension."""
    tensors = {}
    for name in _TENSORS:
        size = (len(scores[name]), *shape) if name == "contrast_logps" else shape
        values = torch.from_numpy(np.array(scores[name], dtype=np.float64).reshape(size))
        tensors[name] = values.to(torch.int64 if name == "ids" else dtype)
    return tensors
