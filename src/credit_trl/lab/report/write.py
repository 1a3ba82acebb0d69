"""Writes the report of runs: an HTML page that needs no network, Markdown and JSON.

Texts of runs are untrusted and are never interpreted as HTML: the data is JSON without `<`, the page's script sets
texts with `textContent` only, and the content security policy blocks every other script, style and connection.
"""

import base64
import hashlib
import html
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from credit_trl.lab.analysis.tokenmap import TokenMap
from credit_trl.lab.analysis.tokentext import visible
from credit_trl.lab.report.answer import answer, change_steps
from credit_trl.lab.report.comparison import compare_arms, curves, training_table
from credit_trl.lab.report.runs import (
    Run,
    arms_of,
    differing_options,
    effective_text,
    load_run,
    read_completions,
    short_names,
)
from credit_trl.lab.report.token_maps import maps_section, read_run_maps, turns
from credit_trl.run_directory import read_json, without_nan, write_atomically, write_json
from credit_trl.sandbox.protocol import excerpt
from credit_trl.tasks.escaping import markdown_table, table_cell

# `ensure_ascii` escapes U+2028 and U+2029, which end a line in a script.
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})
REPORT_FILE = "report.html"
# Characters of a text of a rollout that the page shows.
_LONGEST_TEXT = 20_000
_COLUMNS = (
    "task",
    "arm",
    "runs",
    "step",
    "before",
    "avg@k (%)",
    "95 % interval",
    "best",
    "difference",
    "95 %",
    "p (Holm)",
)
_GROUP_COLUMNS = ("group", "prompts", "before", "after (%)", "95 % interval of after", "difference", "95 % of it")
_TRAINING_COLUMNS = ("arm", "C", "avg@k (%)", "train score, peak", "seconds a step", "ratio", "S_t, mean", "S_t, std")
_TITLE = re.compile(rb"# (?:Run |\d+ runs)")  # of the Markdown
_FACTS = (
    "task",
    "model",
    "distillation_weight",
    "contrastive_coef",
    "contrastive_form",
    "contrastive_source",
    "contrastive_count",
)


def write_report(runs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the report of one run, or of several side by side, as HTML with `.md` and `.json` beside it.

    Args:
        runs: run directories, or directories of `trl credit-eval`. The first one's arm is the baseline.
        output: the HTML file, or a directory for `report.html`; None for the run's directory, or for several runs the
            working directory.

    Returns:
        Path of the HTML file.

    Raises:
        FileNotFoundError: a directory holds no run.
        FileExistsError: the `.md` or `.json` file is not that of an earlier report.
        ValueError: `runs` is empty or names a run twice, or a file of a run is damaged.
    """
    if not runs:
        raise ValueError("`runs` is empty: pass at least one run directory.")
    folders = list(map(Path, runs))
    loaded = list(map(load_run, folders))
    if output is None:
        output = folders[0] / REPORT_FILE if len(folders) == 1 else REPORT_FILE
    output = Path(output)
    if output.is_dir():
        output /= REPORT_FILE
    if output.suffix != ".html":
        output = output.with_name(f"{output.name}.html")
    document = report_document(loaded)
    data, text = output.with_suffix(".json"), output.with_suffix(".md")
    if data.exists():
        is_own = {"arms", "curves"} <= read_json(data).keys()
    else:
        is_own = not text.exists() or _TITLE.match(text.read_bytes())
    if not is_own:
        raise FileExistsError(f"{data} and {text} were not written by a report. Choose another `--output`.")
    write_json(data, document)
    write_atomically(text, report_markdown(document))
    write_html(document | _of_runs(loaded, document["runs"]), output)
    return output


def write_html(document: Mapping[str, Any], path: str | Path) -> None:
    """Write the page of a document with any of `curves`, `comparison`, `options`, `rollouts` and `maps`."""
    folder = files(__package__) / "page"
    template, style, script = (
        folder.joinpath(f"report.{suffix}").read_text("utf-8") for suffix in ("html", "css", "js")
    )
    # Safe inside a `<script>` element: ASCII, without `<`, `>` and `&`; NaN is null.
    data = json.dumps(without_nan(document), allow_nan=False, separators=(",", ":"))
    text = Template(template).substitute(
        style_hash=_digest(style),
        script_hash=_digest(script),
        title=html.escape(document["title"]),
        style=style,
        script=script,
        data=data.translate(_ESCAPES),
    )
    write_atomically(path, text)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def write_token_maps(maps: Sequence[TokenMap], path: str | Path, *, title: str = "Token credit") -> None:
    """Write a page of maps of any responses and checkpoints; those of one response are shown side by side."""
    write_html({"title": visible(title), "maps": maps_section(maps)}, path)


def report_document(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything in the report but rollouts and token maps, as JSON."""
    arms = arms_of(runs)
    names = short_names([run.folder for run in runs])
    comparison = compare_arms(arms)
    return {
        "title": f"Run {visible(names[0])}" if len(runs) == 1 else f"{len(runs)} runs",
        "answer": answer(runs, names, arms, comparison),
        "runs": list(map(visible, names)),
        "arms": list(map(visible, arms)),
        "options": _options(runs, names),
        "curves": curves(arms),
        "changes": change_steps(runs),
        "training": [row | {"arm": visible(row["arm"])} for row in training_table(arms)],
        "comparison": [row | {"task": visible(row["task"]), "arm": visible(row["arm"])} for row in comparison],
    }


def _options(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Options in which several runs differ, or the facts of one: a record for each run."""
    if len(runs) > 1:
        options = differing_options(runs)
    else:
        options = [name for name in _FACTS if name in runs[0].options and effective_text(runs[0], name)]
        options += [name for name in runs[0].changed_options() if name not in options]
    records = []
    for name, run in zip(names, runs, strict=True):
        record: dict[str, Any] = {"run": visible(name), "seed": run.seed}
        for option in options:
            record[visible(option)] = visible(run.text(option))
        records.append(record)
    return records


def _of_runs(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """Rollouts of all runs, and the token maps of the first run that has some."""
    rollouts: list[dict[str, Any]] = []
    document: dict[str, Any] = {"rollouts": rollouts, "written": time.time()}
    for name, run in zip(names, runs, strict=True):
        for row in read_completions(run):
            rollouts.append({"run": name} | _rollout(row))
        maps = [] if "maps" in document else read_run_maps(run.folder)
        if maps:
            document["maps"] = {"run": name} | maps_section(maps)
    return document


def _rollout(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table of completions; every other number is the value of a reward function."""
    record: dict[str, Any] = {"step": row.get("step"), "prompt": [], "completion": [], "rewards": {}}
    for name, value in row.items():
        if name in ("prompt", "completion"):
            record[name] = [turn | {"text": excerpt(turn["text"], _LONGEST_TEXT)} for turn in turns(value)]
        elif name in ("feedback", "teacher_prompt"):
            record[name] = None if value is None else excerpt(visible(str(value)), _LONGEST_TEXT)
        elif name == "images":
            record[name] = list(value)
        elif name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
            record["rewards"][visible(name)] = value if math.isfinite(value) else str(value)
    return record


def report_markdown(document: Mapping[str, Any]) -> str:
    """The answer, scores, differences, training and options as Markdown; the curves are in the JSON file."""
    title = table_cell(document["title"])
    parts = [f"# {title}", *_answer_lines(document["answer"])]
    if document["comparison"]:
        parts.append(markdown_table(_COLUMNS, map(_score_cells, document["comparison"]), left_aligned=2))
    parts.append(markdown_table(_TRAINING_COLUMNS, map(_training_cells, document["training"])))
    options = document["options"]
    rows = []
    for row in options:
        rows.append([table_cell(str(value)) for value in row.values()])
    parts.append(markdown_table(list(map(table_cell, options[0])), rows))
    return "\n\n".join(parts) + "\n"


def _answer_lines(answered: Mapping[str, Any]) -> list[str]:
    """Title, lines, groups, problems and warnings."""
    parts = [f"**{table_cell(answered['title'])}**"]
    for problem in answered["problems"]:
        parts.append(table_cell("{title} {remedy}".format_map(problem)))
    parts += map(table_cell, answered["lines"])
    if answered["groups"]:
        parts.append(markdown_table(_GROUP_COLUMNS, map(_group_cells, answered["groups"])))
    for warning in answered["warnings"]:
        parts.append(table_cell(f"Warning at step {warning['step']}, {warning['time']}: {warning['message']}"))
    return parts


def _group_cells(row: Mapping[str, Any]) -> list[str]:
    return [
        table_cell(row["group"]),
        str(row["prompts"]),
        _percent(row["before"]),
        _percent(row["after"]),
        _interval(row["low"], row["high"]),
        _percent(row["difference"], "+"),
        _interval(row["difference_low"], row["difference_high"], "+"),
    ]


def _score_cells(row: Mapping[str, Any]) -> list[str]:
    return [
        table_cell(row["task"]),
        table_cell(row["arm"]),
        str(row["runs"]),
        str(row["step"]),
        _percent(row.get("before")),
        _percent(row["score"]) + (" (greedy)" if row["greedy"] else ""),
        _interval(row.get("low"), row.get("high")),
        _percent(row["best"]),
        _percent(row.get("difference"), "+"),
        _interval(row.get("difference_low"), row.get("difference_high"), "+"),
        _p_value(row.get("p_holm")),
    ]


def _training_cells(row: Mapping[str, Any]) -> list[str]:
    contrasts = "–" if row["contrasts"] is None else str(row["contrasts"])
    numbers = map(row.get, ("train_score", "seconds", "ratio", "s_mean", "s_std"))
    return [table_cell(row["arm"]), contrasts, _percent(row["score"]), *map(_number, numbers)]


def _p_value(value: float | None) -> str:
    if value is None:
        return "–"
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3f}"


def _percent(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{100 * value:{sign}.1f}"


def _interval(low: float | None, high: float | None, sign: str = "") -> str:
    return "–" if low is None else f"[{_percent(low, sign)}, {_percent(high, sign)}]"
