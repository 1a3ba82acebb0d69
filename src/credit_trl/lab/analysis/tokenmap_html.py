"""Token maps as one self-contained HTML page.

Texts of responses are untrusted and are never interpreted as HTML: the data is JSON without `<`, the page's script
sets texts with `textContent` only, and the content security policy blocks every other script, style and connection.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import torch
from torch import Tensor

from credit_trl.contexts.prompts import Prompt, user_text
from credit_trl.lab.analysis.responses import Rollout, feedback_text
from credit_trl.lab.analysis.tokenmap import QUANTITIES, TokenMap, group_scales
from credit_trl.lab.analysis.tokenmap_parquet import check_distinct
from credit_trl.lab.analysis.tokenmap_summary import summarize_maps
from credit_trl.lab.analysis.tokentext import visible

# `ensure_ascii` escapes U+2028 and U+2029, which end a line in a script.
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def write_html(maps: Sequence[TokenMap], path: str | Path, *, title: str = "Token credit") -> None:
    """Write a page of maps of any responses and checkpoints; those of one response are shown side by side.

    Raises:
        ValueError: `maps` is empty, or has two maps of one response under one checkpoint.
    """
    Path(path).write_text(render_html(maps, title=title), encoding="utf-8")


def render_html(maps: Sequence[TokenMap], *, title: str = "Token credit") -> str:
    """HTML text of the page; see `write_html`."""
    if not maps:
        raise ValueError("There is no map to draw.")
    check_distinct(maps)
    folder = files(__package__) / "page"
    page = {name: (folder / f"tokenmap.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    return Template(page["html"]).substitute(
        style_hash=_digest(page["css"]),
        script_hash=_digest(page["js"]),
        title=html.escape(visible(title)),
        style=page["css"],
        script=page["js"],
        data=embed_json(_document(maps)),
    )


def embed_json(document: Any) -> str:
    """JSON that is safe inside a `<script>` element: ASCII, without `<`, `>` and `&`."""
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES)


def shown_numbers(values: Tensor) -> list[Any]:
    """Values of a tensor for JSON, rounded to as many digits as restore the same float.

    NaN is `None` and infinities are strings, because JSON has neither.
    """
    digits = 17 if values.dtype == torch.float64 else 9
    return _shown(values.tolist(), f"%.{digits}g")


def _shown(value: Any, form: str = "%.17g") -> Any:
    if isinstance(value, dict):
        return {name: _shown(v, form) for name, v in value.items()}
    if isinstance(value, list):
        return [_shown(v, form) for v in value]
    if not isinstance(value, float):
        return value
    if math.isfinite(value):
        return float(form % value)
    return None if math.isnan(value) else str(value)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class _Strings(dict[str, int]):
    """Distinct texts and their numbers."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def _document(maps: Sequence[TokenMap]) -> dict[str, Any]:
    strings, classes = _Strings(), _Strings()
    checkpoints = list(dict.fromkeys(m.checkpoint for m in maps))
    groups = {group: number for number, group in enumerate(dict.fromkeys(m.response.group for m in maps))}
    scales = group_scales(maps)
    by_response: dict[str, list[TokenMap]] = {}
    for token_map in maps:
        by_response.setdefault(token_map.response.identifier, []).append(token_map)
    responses = [
        {
            **_described(own[0].response),
            **_tokens(own[0], strings, classes),
            "group": groups[own[0].response.group],
            "maps": [next((_numbers(m, strings) for m in own if m.checkpoint == c), None) for c in checkpoints],
        }
        for own in by_response.values()
    ]
    return {
        "quantities": [{"key": key, "symbol": symbol} for key, symbol in QUANTITIES.items()],
        "checkpoints": [visible(name) for name in checkpoints],
        "scales": [scales[group] for group in groups],
        "responses": responses,
        "strings": list(strings),
        "classes": list(classes),
        "summaries": [_shown(asdict(summarize_maps([m for m in maps if m.checkpoint == c]))) for c in checkpoints],
    }


def _described(response: Rollout) -> dict[str, Any]:
    z, reward = response.privileged, response.reward
    return {
        "id": visible(response.identifier),
        "prompt": _turns(response.prompt),
        "feedback": feedback_text(response),
        "demonstration": None if z.demonstration is None else visible(z.demonstration),
        "contrasts": [visible(user_text(prompt)) for prompt in response.contrasts],
        "reward": None if reward is None or not math.isfinite(reward) else float(reward),
    }


def _turns(prompt: Prompt) -> list[dict[str, str]]:
    if isinstance(prompt, str):
        return [{"role": "problem", "text": visible(prompt)}]
    return [{"role": visible(str(t.get("role"))), "text": visible(_content(t.get("content")))} for t in prompt]


def _content(content: Any) -> str:
    """Text of a message; tool calls and other parts that are not text are shown as JSON."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    return "\n".join(
        p["text"] if isinstance(p, dict) and isinstance(p.get("text"), str) else json.dumps(p, default=str)
        for p in parts
        if p is not None
    )


def _tokens(token_map: TokenMap, strings: _Strings, classes: _Strings) -> dict[str, Any]:
    return {
        "ids": list(token_map.response.token_ids),
        "tokens": [strings[token.text] for token in token_map.tokens],
        "special": [int(token.special) for token in token_map.tokens],
        "characters": {i: t.character for i, t in enumerate(token_map.tokens) if t.character is not None},
        "classes": [classes[name] for name in token_map.classes],
    }


def _numbers(token_map: TokenMap, strings: _Strings) -> dict[str, Any]:
    scores, others = token_map.scores, token_map.scores.alternatives
    numbers = {name: getattr(scores, name) for name in (*QUANTITIES, "teacher_logps", "entered_coef")}
    means = {name: _shown(values.double().mean().item()) for name, values in numbers.items()}
    return {
        "coef": scores.contrastive_coef,
        "formula": scores.formula.text,
        "meanings": scores.formula.meanings(),
        "means": means,
        **{name: shown_numbers(values) for name, values in numbers.items()},
        "alternatives": {
            "ids": others.ids.tolist(),
            "tokens": [[strings[text] for text in texts] for texts in token_map.alternatives],
            "student": shown_numbers(others.student_logps),
            "teacher": shown_numbers(others.teacher_logps),
            "specific": shown_numbers(others.specific),
            "advantage": shown_numbers(others.advantage),
        },
    }
