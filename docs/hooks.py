"""What the site does beyond mkdocs: formulae as MathML, tables of options, links to the repository, unnamed pages."""

from __future__ import annotations

import ast
import html
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).parents[1]
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")
_REFERENCE = re.compile(r"\[<code>~?([\w.]+)</code>\]")  # the notation of transformers' docstrings
_OPTION = re.compile(r"^(?P<names>[\w, ]+) \((?P<type>[^)]*)\):$")
_SECTION = re.compile(r"^> (?P<title>.+)$")


def on_config(config: Any) -> Any:
    """Pages that the navigation does not name come last, so that a new page is never lost."""
    named = set(re.findall(r"[\w./-]+\.md", str(config.nav)))
    rest = sorted(path.name for path in Path(config.docs_dir).glob("*.md") if path.name not in named)
    if rest:
        config.nav.append({"More": rest})
    return config


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    if page.file.src_uri == "options.md":
        markdown = markdown.replace("<!-- options -->", options_markdown())
    return _LINK.sub(_repository_link, markdown)


def on_page_content(content: str, **kwargs: Any) -> str:
    """Formulae become MathML, which browsers draw by themselves: no script, no fonts."""
    return _REFERENCE.sub(r"<code>\1</code>", _FORMULA.sub(_formula, content))


def _formula(match: re.Match[str]) -> str:
    display = "block" if match[2] == "[" else "inline"
    return convert(html.unescape(match[3]).strip(), display=display)


def _repository_link(match: re.Match[str]) -> str:
    """A file of the repository that is no page: its path, since the site does not hold it."""
    text, path = match[1], match[2]
    if not (ROOT / path).exists():
        raise ValueError(f"A page links to ../{path}, which does not exist.")
    return f"{text} (`{path}`)" if Path(path).name not in text and path not in text else f"`{path}`"


def options_markdown() -> str:
    """Every field that `CreditConfig` adds to TRL's, as its docstring documents it, section by section.

    Raises:
        ValueError: a field that the docstring does not document, or one that it documents and that does not exist.
    """
    from trl import GRPOConfig

    from credit_trl.config import CreditConfig

    inherited = {one.name for one in fields(GRPOConfig)}
    own = {one.name: one for one in fields(CreditConfig) if one.name not in inherited}
    lines: list[str] = []
    documented: set[str] = set()
    for title, options in documented_options():
        lines += ["", f"### {title}", "", "| option | type | default | what it does |", "| --- | --- | --- | --- |"]
        for names, kind, text in options:
            documented |= set(names)
            for name in names:
                lines.append(f"| `{name}` | {_cell(kind)} | {_default(own[name])} | {_cell(text)} |")
    if missing := sorted(own.keys() - documented):
        raise ValueError(f"CreditConfig's docstring does not document {', '.join(missing)}.")
    return "\n".join(lines)


def documented_options() -> list[tuple[str, list[tuple[list[str], str, str]]]]:
    """(section, [(names, type, text)]) of `CreditConfig`'s docstring."""
    tree = ast.parse((ROOT / "src" / "credit_trl" / "config.py").read_text("utf-8"))
    (config,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "CreditConfig")
    docstring = ast.get_docstring(config) or ""
    body = docstring.partition("Parameters:\n")[2].partition("\nRaises:")[0]
    sections: list[tuple[str, list[tuple[list[str], str, str]]]] = []
    for line in (line.strip() for line in body.splitlines()):
        if section := _SECTION.match(line):
            sections.append((section["title"], []))
        elif option := _OPTION.match(line):
            kind = re.sub(r",? ?\*optional\*.*", "", option["type"])
            sections[-1][1].append(([name.strip() for name in option["names"].split(",")], kind, ""))
        elif line:
            names, kind, text = sections[-1][1].pop()
            sections[-1][1].append((names, kind, f"{text} {line}".strip()))
    return sections


def _default(one: Any) -> str:
    value = one.default_factory() if one.default is MISSING else one.default
    return f"`{value!r}`".replace("\\n", "⏎").replace("|", "\\|")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
