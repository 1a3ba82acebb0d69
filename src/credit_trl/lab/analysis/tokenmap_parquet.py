"""Token maps as a Parquet table, one row a token, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from credit_trl.lab.analysis.formula import CreditFormula
from credit_trl.lab.analysis.responses import Response
from credit_trl.lab.analysis.tokenmap import QUANTITIES, TokenMap, TokenScores
from credit_trl.lab.analysis.tokentext import TokenText

_RESPONSES = b"credit_trl.responses"
_STORED = ("student_logps", "teacher_logps", "advantage", "entered_coef")


def write_parquet(maps: Sequence[TokenMap], path: str | Path) -> None:
    """Write maps as one table.

    A row is a token: `checkpoint`, `response`, `position`, `token_id`, `token`, `character`, `special`, `token_class`,
    the quantities `specific`, `delta_v`, `advantage`, `generic`, `student_logps` (nats), `teacher_logps`,
    `contrast_logps` (a list, one per contrast), `contrastive_coef` (λ), `entered_coef` (the λ that entered this
    token's R_t), `formula` (all else that R_t depends on, JSON), and `alternatives`, a list of records with the same
    numbers. Prompts, feedback and rewards are JSON in the table's metadata.

    Raises:
        ValueError: nothing to write, or two maps of one response under one checkpoint.
    """
    if not maps:
        raise ValueError("There is no map to write.")
    check_distinct(maps)
    columns: dict[str, list[Any]] = {}
    for token_map in maps:
        for name, values in _columns(token_map).items():
            columns.setdefault(name, []).extend(values)
    responses = {m.response.identifier: m.response.to_json() for m in maps}
    table = pa.table(columns, schema=_schema(maps[0].scores.student_logps.dtype))
    pq.write_table(table.replace_schema_metadata({_RESPONSES: json.dumps(responses)}), path, compression="zstd")


def read_parquet(path: str | Path) -> list[TokenMap]:
    """The maps of a table that `write_parquet` wrote, in its order.

    Raises:
        ValueError: another kind of table.
    """
    table = pq.read_table(path)
    metadata = table.schema.metadata or {}
    if _RESPONSES not in metadata:
        raise ValueError(f"{path} is no table of token maps.")
    responses = {name: Response.from_json(r) for name, r in json.loads(metadata[_RESPONSES]).items()}
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        rows.setdefault((row["response"], row["checkpoint"]), []).append(row)
    dtype = torch.float64 if table.schema.field("student_logps").type == pa.float64() else torch.float32
    return [_map_of(own, responses[response], dtype) for (response, _), own in rows.items()]


def check_distinct(maps: Sequence[TokenMap]) -> None:
    """
    Raises:
        ValueError: two maps of one response under one checkpoint, or one name for two responses.
    """
    seen: dict[tuple[str, str], TokenMap] = {}
    named: dict[str, Response] = {}
    for token_map in maps:
        key = (token_map.response.identifier, token_map.checkpoint)
        if key in seen:
            raise ValueError(f"Two maps of response {key[0]!r} under checkpoint {key[1]!r}: give them other names.")
        seen[key] = token_map
        if named.setdefault(key[0], token_map.response).token_ids != token_map.response.token_ids:
            raise ValueError(f"Two different responses are called {key[0]!r}: give them other identifiers.")


def _schema(dtype: torch.dtype) -> pa.Schema:
    number = pa.float64() if dtype == torch.float64 else pa.float32()
    alternative = pa.struct(
        [("token_id", pa.int64()), ("token", pa.string())]
        + [(name, number) for name in (*_STORED, "specific")]
        + [("contrast_logps", pa.list_(number))]
    )
    return pa.schema(
        [(name, pa.string()) for name in ("checkpoint", "response")]
        + [("position", pa.int64()), ("token_id", pa.int64())]
        + [("token", pa.string()), ("character", pa.string()), ("special", pa.bool_()), ("token_class", pa.string())]
        + [(name, number) for name in dict.fromkeys((*QUANTITIES, *_STORED))]
        + [("contrast_logps", pa.list_(number)), ("contrastive_coef", pa.float64()), ("formula", pa.string())]
        + [("alternatives", pa.list_(alternative))]
    )


def _columns(token_map: TokenMap) -> dict[str, list[Any]]:
    scores, count = token_map.scores, len(token_map.tokens)
    return {
        "checkpoint": [token_map.checkpoint] * count,
        "response": [token_map.response.identifier] * count,
        "position": list(range(count)),
        "token_id": list(token_map.response.token_ids),
        "token": [token.text for token in token_map.tokens],
        "character": [token.character for token in token_map.tokens],
        "special": [token.special for token in token_map.tokens],
        "token_class": list(token_map.classes),
        **{name: getattr(scores, name).tolist() for name in dict.fromkeys((*QUANTITIES, *_STORED))},
        "contrast_logps": scores.contrast_logps.T.tolist(),
        "contrastive_coef": [scores.contrastive_coef] * count,
        "formula": [json.dumps(scores.formula.to_json())] * count,
        "alternatives": _alternatives(token_map),
    }


def _alternatives(token_map: TokenMap) -> list[list[dict[str, Any]]]:
    scores = token_map.scores
    numbers = {
        "token_id": scores.alternative_ids,
        "student_logps": scores.alternative_student_logps,
        "teacher_logps": scores.alternative_teacher_logps,
        "specific": scores.alternative_specific,
        "advantage": scores.alternative_advantages,
        "entered_coef": scores.alternative_entered_coef,
        "contrast_logps": scores.alternative_contrast_logps.permute(1, 2, 0),
    }
    lists = {name: values.tolist() for name, values in numbers.items()} | {"token": token_map.alternatives}
    return [
        [{name: values[t][a] for name, values in lists.items()} for a in range(len(texts))]
        for t, texts in enumerate(token_map.alternatives)
    ]


def _map_of(rows: list[dict[str, Any]], response: Response, dtype: torch.dtype) -> TokenMap:
    alternatives = [row["alternatives"] for row in rows]
    contrasts, width = len(rows[0]["contrast_logps"]), len(alternatives[0])

    def tensor(values: Any, *shape: int) -> Tensor:
        return torch.tensor(values, dtype=dtype).reshape(shape)

    def of_alternatives(name: str, *shape: int) -> Tensor:
        return tensor([[a[name] for a in own] for own in alternatives], len(rows), width, *shape)

    def of_tokens(name: str) -> Tensor:
        return tensor([row[name] for row in rows], len(rows))

    scores = TokenScores(
        of_tokens("student_logps"),
        of_tokens("teacher_logps"),
        tensor([row["contrast_logps"] for row in rows], len(rows), contrasts).T.contiguous(),
        of_tokens("advantage"),
        of_tokens("entered_coef"),
        rows[0]["contrastive_coef"],
        CreditFormula.from_json(json.loads(rows[0]["formula"])),
        torch.tensor([[a["token_id"] for a in own] for own in alternatives]).reshape(len(rows), width),
        of_alternatives("student_logps"),
        of_alternatives("teacher_logps"),
        of_alternatives("contrast_logps", contrasts).permute(2, 0, 1).contiguous(),
        of_alternatives("advantage"),
        of_alternatives("entered_coef"),
    )
    return TokenMap(
        response,
        rows[0]["checkpoint"],
        [TokenText(row["token"], row["character"], row["special"]) for row in rows],
        [row["token_class"] for row in rows],
        scores,
        [[a["token"] for a in own] for own in alternatives],
    )
