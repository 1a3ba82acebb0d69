"""Writes a comparison as one self-contained HTML page with figures, Markdown tables and JSON."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from credit_trl.lab.comparison.compare import BEST, FINAL, Comparison
from credit_trl.lab.comparison.figures import THEMES, curves_figure, scores_figure
from credit_trl.lab.comparison.runs import Run, differing_options, differing_seeds, has_one_base
from credit_trl.lab.comparison.tables import (
    CONTRAST_COLUMNS,
    STEPS_COLUMNS,
    contrast_markdown,
    contrast_row,
    score_markdown,
    score_rows,
    steps_markdown,
    steps_row,
)
from credit_trl.tasks.printable import plain
from credit_trl.training.run_directory import RUN_FILE, write_atomically, write_json

REPORT_FILE = "report.html"
NUMBERS_FILE = "comparison.json"
TABLES_FILE = "tables.md"
CAPTIONS = {
    FINAL: ("Final score", "The last evaluation of each run, not selected."),
    BEST: (
        "Best during training",
        "Each run at its evaluation with the highest mean reward over all of these prompts, whatever the measure of "
        "the table. A selected reward is biased upwards, more so with more evaluations per run.",
    ),
}
# The page's only script switches between the light and the dark theme.
SCRIPT = (
    'document.getElementById("theme").addEventListener("click",()=>{const r=document.documentElement,'
    'd=r.dataset.theme||(matchMedia("(prefers-color-scheme: dark)").matches?"dark":"light");'
    'r.dataset.theme=d==="dark"?"light":"dark"})'
)


def write_report(comparison: Comparison, folder: str | Path, *, title: str = "Comparison of runs") -> Path:
    """Write `report.html`, `tables.md`, `comparison.json` and the figures as PNG, and return the page's path.

    The page loads nothing over the network, follows the browser's light or dark preference, and escapes all text from
    run directories.

    Raises:
        ImportError: matplotlib is not installed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    figures = _figures(comparison)
    for name, themed in figures.items():
        for theme, image in themed.items():
            (folder / f"{name}-{theme}.png").write_bytes(image)
    write_atomically(folder / TABLES_FILE, tables_markdown(comparison))
    write_json(folder / NUMBERS_FILE, comparison_dict(comparison))
    write_atomically(folder / REPORT_FILE, report_html(comparison, figures, title))
    return folder / REPORT_FILE


def report_html(comparison: Comparison, figures: Mapping[str, Mapping[str, bytes]], title: str) -> str:
    """Render the page; `figures` has PNGs by the name of the figure and of the theme."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    source = files("credit_trl.lab.comparison").joinpath("report.html.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(source)
    return template.render(
        title=title,
        comparison=comparison,
        remarks=remarks(comparison),
        tables=[(*caption, *score_rows(comparison, when)) for when, caption in CAPTIONS.items() if comparison.domains],
        contrasts={when: [contrast_row(c) for c in comparison.contrasts if c.when == when] for when in (FINAL, BEST)},
        contrast_columns=CONTRAST_COLUMNS,
        steps=[steps_row(row) for row in comparison.steps_to],
        steps_columns=STEPS_COLUMNS,
        figures={
            name: {theme: base64.b64encode(image).decode() for theme, image in themed.items()}
            for name, themed in figures.items()
        },
        runs=[_run_row(run) for run in comparison.runs],
        script=Markup(SCRIPT),
        script_hash=base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
    )


def tables_markdown(comparison: Comparison) -> str:
    """Remarks and all tables in Markdown."""
    parts = [f"{plain(remark)}\n" for remark in remarks(comparison)]
    for when, (caption, explanation) in CAPTIONS.items() if comparison.domains else ():
        parts.append(f"## {caption}\n\n{explanation}\n\n{score_markdown(comparison, when)}\n")
        contrasts = [c for c in comparison.contrasts if c.when == when]
        if contrasts:
            parts.append(f"Against {plain(comparison.baseline)}:\n\n{contrast_markdown(contrasts)}\n")
    if comparison.steps_to:
        parts.append(f"## Steps to a score\n\n{steps_markdown(comparison.steps_to)}\n")
    return "\n".join(parts)


def remarks(comparison: Comparison) -> list[str]:
    """Caveats that the report shows before the numbers."""
    found = []
    if comparison.differing_settings:
        found.append(
            "These evaluations use different sampling settings, which can cause a difference in scores: "
            f"{'. '.join(comparison.differing_settings)}. Evaluate with the same settings (`trl credit-eval`)."
        )
    if different := differing_options(comparison.runs):
        found.append(
            "Runs with one name count as seeds of one arm, but these also differ in options, which widens the "
            f"intervals: {'. '.join(different)}. Name the arms (`arm` in {RUN_FILE}), or compare fewer runs."
        )
    if seeds := differing_seeds([run for run in comparison.runs if run.evaluations]):
        found.append(
            f"Arms have different seeds ({'. '.join(seeds)}), so differences between them are not paired by seed. "
            "Train the missing ones (`trl credit-sweep` continues), or compare only runs of common seeds."
        )
    if not has_one_base(comparison.runs):
        found.append("Runs of one seed started from different models, so there is no common base to compare with.")
    if without := [run for run in comparison.runs if not run.evaluations]:
        found.append(f"Without an evaluation, so curves only: {', '.join(str(run.folder) for run in without)}")
    if comparison.unfinished:
        listed = ", ".join(str(run.folder) for run in comparison.unfinished)
        found.append(f"Not compared, because training has not ended: {listed}")
    return found


def comparison_dict(comparison: Comparison) -> dict[str, Any]:
    """All numbers of the report as JSON values."""
    return {
        "measure": comparison.measure,
        "baseline": comparison.baseline,
        "prompts": dict(comparison.prompts),
        "scores": [
            {"arm": arm, "domain": domain, "when": when, **cell.interval._asdict(), "seeds": cell.seeds}
            | {"steps": list(cell.steps), "by_seed": list(cell.by_seed)}
            for (arm, domain, when), cell in comparison.cells.items()
        ],
        "contrasts": [
            {name: value for name, value in vars(contrast).items() if name != "difference"}
            | contrast.difference._asdict()
            for contrast in comparison.contrasts
        ],
        "steps_to": [vars(row) for row in comparison.steps_to],
        "runs": [str(run.folder) for run in comparison.runs],
        "unfinished": [str(run.folder) for run in comparison.unfinished],
        "differing_settings": list(comparison.differing_settings),
        "differing_options": differing_options(comparison.runs),
    }


def _figures(comparison: Comparison) -> dict[str, dict[str, bytes]]:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("The report's figures need matplotlib: pip install matplotlib.") from error
    figures = {}
    if comparison.domains:
        figures["scores"] = {theme.name: scores_figure(comparison, theme) for theme in THEMES}
    if comparison.curves:
        figures["curves"] = {theme.name: curves_figure(comparison, theme) for theme in THEMES}
    return figures


def _run_row(run: Run) -> list[str]:
    last = run.log[-1]["step"] if run.log else run.final_step()
    seed = "–" if run.seed is None else str(run.seed)
    source = run.log_source or "no log"
    return [run.arm, run.task, seed, str(last), str(len(run.evaluations)), source, str(run.folder)]
