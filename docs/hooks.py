"""Hooks of the site: pages from the root, the API page, option tables, formulae as MathML, links to the repository."""

from __future__ import annotations

import ast
import html
import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# Page of the site → the file at the repository's root that it shows.
SOURCES = "source"  # folder of the pages that show files of the repository
ROOT_PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
# Sections of the API page: a module or a folder of the package each.
API = {
    "Trainer": "trainer",
    "Objective": "objective",
    "Rollout": "rollout",
    "Contexts": "contexts",
    "Teacher": "teacher",
    "Loss": "loss",
    "Training": "training",
    "Extensions": "testing",
    "Tasks": "tasks",
    "Sandbox": "sandbox.protocol",
    "Evaluation": "evaluation",
    "Analysis": "lab.analysis",
    "Report": "lab.report",
}
# Beginnings of modules of these folders that are internal, or documented elsewhere.
INTERNAL = tuple(
    """
    evaluation.generation evaluation.verdicts lab.analysis.token_classes lab.analysis.tokentext
    lab.analysis.vocabulary_logps lab.report.comparison lab.report.runs lab.report.token_maps
    loss.head loss.projection contexts.prompts
    tasks.escaping tasks.lcb_ tasks.records mistakes run_directory teacher.causal_lm teacher.sharding
    training.check_model trl_compat trl_parity
    """.split()
)

# What people type in the search -> symbol on the pages.
SEARCH_NAMES = {"lambda": "λ", "pi": "π", "delta": "Δ", "alpha": "α", "rho": "ρ", "theta": "θ"}

_UNSEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(\.\./([^)#\s]+)(?:#[^)\s]*)?\)")
_ROOT_LINK = re.compile(r"""(\]\(|src="|srcset=")(?!https?://|#|mailto:)([^)\s"]+)(?=[)"])""")
_REFERENCE = re.compile(r"\[<code>~?([\w.]+)</code>\]")  # the notation of transformers' docstrings
_OPTION = re.compile(r"^(?P<names>[\w, ]+) \((?P<type>[^)]*)\):$")
_SECTION = re.compile(r"^> (?P<title>.+)$")


def on_config(config: Any) -> Any:
    """List pages that the navigation does not name at its end."""
    named = set(re.findall(r"[\w./-]+\.md", str(config.nav)))
    rest = sorted(path.name for path in Path(config.docs_dir).glob("*.md") if path.name not in named)
    if rest:
        config.nav.append({"More": rest})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of `ROOT_PAGES`, and one for each file of the repository that a page links to."""
    for page, source in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=root_page(source)))
    texts = [page.content_string for page in files.documentation_pages()]
    linked = {match[2] for text in texts for match in _LINK.finditer(text)} - {*ROOT_PAGES.values()}
    for path in sorted(linked):
        files.append(File.generated(config, f"{SOURCES}/{path}.md", content=_UNSEARCHED + source_page(path)))
    return files


def source_page(path: str) -> str:
    """Page of a file of the repository: a notebook with its outputs, Markdown without its links, or code.

    A folder shows its own files.

    Raises:
        ValueError: there is no such file.
    """
    source = ROOT / path
    if not source.exists():
        raise ValueError(f"A page links to ../{path}, which does not exist.")
    if source.is_dir():
        shown = [one for one in sorted(source.iterdir()) if one.is_file()]
        return "\n\n".join([f"# {path}", *(_code(one.name, one.read_text("utf-8")) for one in shown)])
    text = source.read_text("utf-8")
    if source.suffix == ".md":
        return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    if source.suffix != ".ipynb":
        return f"# {path}\n\n{_code(source.name, text)}"
    return f"# {path}\n\n" + "\n\n".join(part for cell in json.loads(text)["cells"] for part in _cell_parts(cell))


def _cell_parts(cell: dict[str, Any]) -> list[str]:
    """A cell of a notebook as Markdown, with its outputs of text and pictures."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", source)]
    parts = [_code("cell.py", source)]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            picture = "".join(data["image/png"]).replace("\n", "")
            parts.append(f'<img alt="output" src="data:image/png;base64,{picture}">')
        else:
            parts.append(_code("output.txt", "".join(output.get("text") or data.get("text/plain", ""))))
    return parts


def _code(name: str, text: str) -> str:
    return f'````{{.{Path(name).suffix[1:] or "text"} title="{name}"}}\n{text.rstrip()}\n````'


def api_markdown() -> str:
    """Sections of the API page: every module of `API` but the internal ones. A task shows `build` and `verify`."""
    lines: list[str] = []
    for title, part in API.items():
        lines += ["", f"## {title}"]
        if title == "Sandbox":
            lines += ["", "::: credit_trl.sandbox", "    options: {members: [open_sandbox]}"]
        for module in api_modules(part):
            lines += ["", f"::: credit_trl.{module}"]
            if module == "trainer":
                lines.append("    options: {members: [CreditTrainer]}")
            elif part == "tasks" and module.partition(".")[2] not in ("registry", "task"):
                lines.append("    options: {members: [build, verify], show_root_heading: true}")
    return "\n".join(lines)


def api_modules(part: str) -> list[str]:
    """Documented modules of a folder, or the module itself, as names within the package."""
    package = ROOT / "src" / "credit_trl"
    folder = package.joinpath(*part.split("."))
    found = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    names = (".".join(path.relative_to(package).with_suffix("").parts) for path in sorted(found))
    return [name for name in names if not name.startswith(INTERNAL) and not name.endswith("__init__")]


def root_page(source: str) -> str:
    """Markdown of a file at the repository's root, with its links relative to `docs/`."""
    pages = {file: page for page, file in ROOT_PAGES.items()}

    def relative(match: re.Match[str]) -> str:
        target = match[2]
        return match[1] + (pages.get(target) or (target[5:] if target.startswith("docs/") else f"../{target}"))

    return _ROOT_LINK.sub(relative, (ROOT / source).read_text("utf-8"))


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Insert the option tables and the API reference, and replace links to files that are not pages."""
    if page.file.src_uri == "options.md":
        markdown = markdown.replace("<!-- options -->", options_markdown())
    if page.file.src_uri == "api.md":
        markdown = markdown.replace("<!-- api -->", api_markdown())
    if page.file.src_uri.startswith(SOURCES):
        return markdown
    return _LINK.sub(_repository_link, markdown)


def on_page_content(content: str, **kwargs: Any) -> str:
    """Convert formulae to MathML, which browsers draw without scripts and fonts."""
    return _REFERENCE.sub(r"<code>\1</code>", _FORMULA.sub(_formula, content))


def on_post_build(config: Any) -> None:
    """Let the search find symbols by their names, sections of the options page before all others."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text("utf-8"))
    for entry in index["docs"]:
        names = [name for name, symbol in SEARCH_NAMES.items() if symbol in entry["title"] + entry["text"]]
        entry["text"] += f"<p>{' '.join(names)}</p>"
        if entry["location"].startswith("options"):
            entry["tags"] = names
    path.write_text(json.dumps(index), encoding="utf-8")


def _formula(match: re.Match[str]) -> str:
    display = "block" if match[2] == "[" else "inline"
    return convert(html.unescape(match[3]).strip(), display=display)


def _repository_link(match: re.Match[str]) -> str:
    """Link to the page that shows a file of the repository."""
    pages = {source: page for page, source in ROOT_PAGES.items()}
    return f"[{match[1]}]({pages.get(match[2], f'{SOURCES}/{match[2]}.md')})"


def options_markdown() -> str:
    """Tables of the fields that `CreditConfig` adds to TRL's, from its docstring, one table per section.

    Raises:
        ValueError: a field is missing in the docstring.
        KeyError: the docstring documents a field that does not exist.
    """
    from trl import GRPOConfig

    from credit_trl.config import CreditConfig

    inherited = {one.name for one in fields(GRPOConfig)}
    own = {one.name: one for one in fields(CreditConfig) if one.name not in inherited}
    lines: list[str] = []
    documented: set[str] = set()
    for title, options in documented_options():
        lines += ["", f"### {title}", "", '<div class="options" markdown>', ""]
        lines += ["| option | type | default | meaning |", "| --- | --- | --- | --- |"]
        for names, kind, text in options:
            documented |= set(names)
            for name in names:
                lines.append(f"| `{name}` | {_cell(kind)} | {_default(own[name])} | {_cell(text)} |")
        lines += ["", "</div>"]
    if missing := sorted(own.keys() - documented):
        raise ValueError(f"CreditConfig's docstring does not document {', '.join(missing)}.")
    return "\n".join(lines)


def documented_options() -> list[tuple[str, list[tuple[list[str], str, str]]]]:
    """Sections of `CreditConfig`'s docstring: (title, [(names, type, text)])."""
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
