"""The compatibility check in the paper's form: Table 4, and both panels of its figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from credit_trl.lab.analysis.compatibility import Record

# A residual below it counts as none, as in the paper.
THRESHOLD = 1e-3
# Residuals below it are rounding; the figure and the ratio do not look further.
_FLOOR = 1e-16


def summary(records: Sequence[Record]) -> dict[str, float | str]:
    """The numbers of Table 4 for one model, by the paper's names.

    Raises:
        ValueError: no records.
    """
    if not records:
        raise ValueError("There is no record to summarise.")
    residuals = np.array([r.residual for r in records])
    uniform = np.array([r.uniform_residual for r in records])
    fidelity = _padded([r.fidelity for r in records])
    masses = np.concatenate([[r.student_mass, *r.teacher_mass] for r in records])
    on_argmax = [r.posterior[r.student.argmax()] for r in records]
    letters, golds = _gold_balance(records)
    per_letter = np.nanmedian(fidelity, axis=0)
    return {
        "# records": len(records),
        f"Gold balance ({' / '.join(letters)})": " / ".join(golds),
        "Letter-token mass (median)": float(np.median(masses)),
        "Teacher fidelity (median, worst z)": float(per_letter.min()),
        "Teacher fidelity (median, best z)": float(per_letter.max()),
        "LS L1 residual (median)": float(np.median(residuals)),
        f"Fraction residual < {THRESHOLD:g}": float((residuals < THRESHOLD).mean()),
        "Uniform-P L1 baseline (median)": float(np.median(uniform)),
        "Uniform / LS ratio (median)": float(np.median(uniform / residuals.clip(min=_FLOOR))),
        "Self-consistency argmax P̂ = argmax s": float(np.mean([r.is_self_consistent for r in records])),
        "P̂ mass on student's argmax (median)": float(np.median(on_argmax)),
    }


def format_table(models: Mapping[str, Sequence[Record]]) -> str:
    """Markdown in the layout of Table 4: one column a model."""
    columns = {name: _formatted(records) for name, records in models.items()}
    labels = list(dict.fromkeys(label for column in columns.values() for label in column))
    lines = ["| Metric | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for label in labels:
        lines.append(f"| {label} | " + " | ".join(column.get(label, "–") for column in columns.values()) + " |")
    return "\n".join(lines) + "\n"


def _formatted(records: Sequence[Record]) -> dict[str, str]:
    formatted = {}
    for label, value in summary(records).items():
        if isinstance(value, str | int):
            formatted[label] = str(value)
        elif label.startswith(("LS L1", "Uniform / LS")):
            formatted[label] = f"{value:.1e}"
        elif label.startswith(("Fraction", "Self-consistency")):
            formatted[label] = f"{value:.0%}"
        else:
            formatted[label] = f"{value:.3f}"
    return formatted


def draw_figure(models: Mapping[str, Sequence[Record]], path: str | Path, *, matrix_of: str | None = None) -> None:
    """Write both panels as a picture; see `make_figure`."""
    make_figure(models, matrix_of=matrix_of).savefig(path)


def make_figure(models: Mapping[str, Sequence[Record]], *, matrix_of: str | None = None) -> Figure:
    """Both panels: (a) the distribution of residuals, (b) the mean teacher matrix of one model.

    Args:
        models: records by model.
        matrix_of: the model of panel (b); by default the one with the lowest fidelity.
    """
    if matrix_of is None:
        matrix_of = min(models, key=lambda name: summary(models[name])["Teacher fidelity (median, worst z)"])
    figure = Figure(figsize=(8.4, 3.3), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1.0))
    _draw_residuals(left, models)
    _draw_teachers(right, matrix_of, models[matrix_of])
    return figure


def _draw_residuals(axes: Axes, models: Mapping[str, Sequence[Record]]) -> None:
    for number, (name, records) in enumerate(models.items()):
        residuals = np.sort([r.residual for r in records]).clip(min=_FLOOR)
        shares = np.arange(1, len(residuals) + 1) / len(residuals)
        style = {"color": f"C{number}", "linestyle": ("-", "--", "-.", ":")[number % 4]}
        axes.step(np.append(residuals, 2.0), np.append(shares, 1.0), where="post", label=name, **style)
        axes.axvline(np.median([r.uniform_residual for r in records]), color=f"C{number}", linestyle=":", linewidth=1)
    axes.axvline(THRESHOLD, color="0.6", linewidth=0.8)
    axes.set(xscale="log", xlim=(_FLOOR / 2, 3.0), ylim=(0.0, 1.02))
    axes.set(xlabel="residual of the fit, L1 (dotted: uniform mixture)", ylabel="share of records", title="(a)")
    axes.legend(loc="upper left", fontsize=8)


def _draw_teachers(axes: Axes, name: str, records: Sequence[Record]) -> None:
    letters = _letters(records)
    mean = np.mean([r.teachers for r in records if len(r.teachers) == len(letters)], axis=0)
    axes.imshow(mean, vmin=0.0, vmax=1.0, cmap="Blues")
    for z, row in enumerate(mean):
        for letter, value in enumerate(row):
            weight = "bold" if z == letter else "normal"
            colour = "white" if value > 0.6 else "black"
            axes.text(letter, z, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8, weight=weight)
    ticks = range(len(letters))
    axes.set(xlabel="answer", ylabel="hint z", title="(b) mean teacher matrix")
    axes.set_xticks(ticks, letters)
    axes.set_yticks(ticks, letters)
    axes.text(0.5, -0.3, name, transform=axes.transAxes, ha="center", fontsize=8, parse_math=False)


def _gold_balance(records: Sequence[Record]) -> tuple[tuple[str, ...], list[str]]:
    """Names of the options and how often each is right; their positions where questions name them differently."""
    letters = _letters(records)
    rights = [r.question.letters.index(r.question.gold) for r in records if r.question.gold is not None]
    return letters, [str(rights.count(position)) for position in range(len(letters))]


def _letters(records: Sequence[Record]) -> tuple[str, ...]:
    longest = max((r.question.letters for r in records), key=len)
    if all(r.question.letters == longest[: len(r.question.letters)] for r in records):
        return longest
    return tuple(str(position) for position in range(1, len(longest) + 1))


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of different lengths as one array, NaN where a row has ended."""
    width = max(map(len, rows))
    return np.array([[*row, *[np.nan] * (width - len(row))] for row in rows])
