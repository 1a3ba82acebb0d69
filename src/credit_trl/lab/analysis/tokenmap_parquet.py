"""Token maps as a Parquet table, one row a token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from credit_trl.lab.analysis.formula import CreditFormula
from credit_trl.lab.analysis.responses import Rollout
from credit_trl.lab.analysis.tokenmap import QUANTITIES, ScoredTokens, TokenMap, TokenScores
from credit_trl.lab.analysis.tokentext import TokenText, visible

_RESPONSES = b"credit_trl.responses"
_STORED = ("student_logps", "teacher_logps", "advantage", "entered_coef")
_OF_TOKENS = tuple(dict.fromkeys((*QUANTITIES, *_STORED)))
_OF_ALTERNATIVES = (*_STORED, "specific")


def write_parquet(maps: Sequence[TokenMap], path: str | Path) -> None:
    """Write maps as one table.

    A row is a token: `checkpoint`, `response`, `position`, `token_id`, `token`, `character`, `special`, `token_class`,
    the quantities `specific`, `delta_v`, `advantage`, `generic`, `student_logps`, `teacher_logps` and `contrast_logps`
    (a list, one entry a contrast prompt) in nats, `contrastive_coef` (λ), `entered_coef` (the λ in this token's R_t),
    `formula` (JSON of `CreditFormula`), and `alternatives`, a list of records with the same numbers. The table's
    metadata holds prompts, privileged contexts and rewards as JSON.

    Raises:
        ValueError: `maps` is empty, or has two maps of one response under one checkpoint.
    """
    if not maps:
        raise ValueError("There is no map to write.")
    check_distinct(maps)
    rows = [row for token_map in maps for row in _rows(token_map)]
    responses = {m.response.identifier: m.response.to_json() for m in maps}
    table = pa.Table.from_pylist(rows, schema=_schema(maps[0].scores.student_logps.dtype))
    pq.write_table(table.replace_schema_metadata({_RESPONSES: json.dumps(responses)}), path, compression="zstd")


def read_parquet(path: str | Path) -> list[TokenMap]:
    """Read the maps that `write_parquet` wrote, in the same order.

    Raises:
        ValueError: the table does not hold token maps.
    """
    table = pq.read_table(path)
    metadata = table.schema.metadata or {}
    if _RESPONSES not in metadata:
        raise ValueError(f"{path} is no table of token maps.")
    responses = {name: Rollout.from_json(r) for name, r in json.loads(metadata[_RESPONSES]).items()}
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        rows.setdefault((row["response"], row["checkpoint"]), []).append(row)
    dtype = torch.float64 if table.schema.field("student_logps").type == pa.float64() else torch.float32
    return [_map_of(own, responses[response], dtype) for (response, _), own in rows.items()]


def check_distinct(maps: Sequence[TokenMap]) -> None:
    """Check that identifiers and checkpoints name each map uniquely."""
    seen: set[tuple[str, str]] = set()
    named: dict[str, Rollout] = {}
    for token_map in maps:
        key = (token_map.response.identifier, token_map.checkpoint)
        if key in seen:
            raise ValueError(f"Two maps of response {key[0]!r} under checkpoint {key[1]!r}: give them other names.")
        seen.add(key)
        if named.setdefault(key[0], token_map.response).content != token_map.response.content:
            raise ValueError(f"Two different responses are called {key[0]!r}: give them other identifiers.")


def _schema(dtype: torch.dtype) -> pa.Schema:
    number = pa.float64() if dtype == torch.float64 else pa.float32()
    alternative = pa.struct(
        [("token_id", pa.int64()), ("token", pa.string())]
        + [(name, number) for name in _OF_ALTERNATIVES]
        + [("contrast_logps", pa.list_(number))]
    )
    return pa.schema(
        [(name, pa.string()) for name in ("checkpoint", "response")]
        + [("position", pa.int64()), ("token_id", pa.int64())]
        + [("token", pa.string()), ("character", pa.string()), ("special", pa.bool_()), ("token_class", pa.string())]
        + [(name, number) for name in _OF_TOKENS]
        + [("contrast_logps", pa.list_(number)), ("contrastive_coef", pa.float64()), ("formula", pa.string())]
        + [("alternatives", pa.list_(alternative))]
    )


def _rows(token_map: TokenMap) -> Iterator[dict[str, Any]]:
    scores, formula = token_map.scores, json.dumps(token_map.scores.formula.to_json())
    own = _numbers(scores, _OF_TOKENS)
    others = _numbers(scores.alternatives, _OF_ALTERNATIVES) | {"token": token_map.alternatives}
    for t, token in enumerate(token_map.tokens):
        yield {
            **{name: values[t] for name, values in own.items()},
            "checkpoint": token_map.checkpoint,
            "response": token_map.response.identifier,
            "position": t,
            "token": token.text,
            "character": token.character,
            "special": token.special,
            "token_class": token_map.classes[t],
            "contrastive_coef": scores.contrastive_coef,
            "formula": formula,
            "alternatives": [
                {name: values[t][a] for name, values in others.items()} for a in range(len(token_map.alternatives[t]))
            ],
        }


def _numbers(scores: ScoredTokens, names: Sequence[str]) -> dict[str, list[Any]]:
    numbers = {"token_id": scores.ids.tolist(), "contrast_logps": scores.contrast_logps.movedim(0, -1).tolist()}
    return numbers | {name: getattr(scores, name).tolist() for name in names}


def _map_of(rows: list[dict[str, Any]], response: Rollout, dtype: torch.dtype) -> TokenMap:
    alternatives = [row["alternatives"] for row in rows]
    shape = (len(rows), len(alternatives[0]))
    flat = [record for own in alternatives for record in own]
    contrasts = len(rows[0]["contrast_logps"])
    run = {
        "contrastive_coef": rows[0]["contrastive_coef"],
        "formula": CreditFormula.from_json(json.loads(rows[0]["formula"])),
    }
    others = ScoredTokens(**_tensors(flat, shape, contrasts, dtype), **run)
    return TokenMap(
        response,
        visible(rows[0]["checkpoint"]),
        [_text_of(row) for row in rows],
        [visible(row["token_class"]) for row in rows],
        TokenScores(**_tensors(rows, shape[:1], contrasts, dtype), **run, alternatives=others),
        [[visible(record["token"]) for record in own] for own in alternatives],
    )


def _text_of(row: dict[str, Any]) -> TokenText:
    """Text of a token; a file from elsewhere may hold control characters."""
    character = row["character"]
    return TokenText(visible(row["token"]), None if character is None else visible(character), row["special"])


def _tensors(
    records: Sequence[dict[str, Any]], shape: tuple[int, ...], contrasts: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Fields of `ScoredTokens` from records in the order of `shape`."""
    read = {name: torch.tensor([r[name] for r in records], dtype=dtype).reshape(shape) for name in _STORED}
    logps = torch.tensor([r["contrast_logps"] for r in records], dtype=dtype).reshape(*shape, contrasts)
    ids = torch.tensor([r["token_id"] for r in records], dtype=torch.int64).reshape(shape)
    return {"ids": ids, "contrast_logps": logps.movedim(-1, 0), **read}
