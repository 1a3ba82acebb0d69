"""Writes an HTML page that needs no network.

Texts of runs are untrusted and are never interpreted as HTML: the data is JSON without `<`, the page's script sets
texts with `textContent` only, and the content security policy blocks every other script, style and connection.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from credit_trl.training.run_directory import without_nan, write_atomically

# `ensure_ascii` escapes U+2028 and U+2029, which end a line in a script.
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def write_html(document: Mapping[str, Any], path: str | Path) -> None:
    """Write the page of a document with any of `curves`, `comparison`, `options`, `rollouts` and `maps`."""
    folder = files(__package__) / "page"
    page = {name: (folder / f"report.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    text = Template(page["html"]).substitute(
        style_hash=_digest(page["css"]),
        script_hash=_digest(page["js"]),
        title=html.escape(document["title"]),
        style=page["css"],
        script=page["js"],
        data=embed_json(document),
    )
    write_atomically(path, text)


def embed_json(document: Any) -> str:
    """JSON that is safe inside a `<script>` element: ASCII, without `<`, `>` and `&`; NaN is null."""
    text = json.dumps(without_nan(document), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_ESCAPES)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
