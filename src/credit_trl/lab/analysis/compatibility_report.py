"""Results of the compatibility check in the paper's form: Table 4 and both panels of its figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from credit_trl.lab.analysis.compatibility import Record
from credit_trl.tasks.printable import markdown_table

# Residuals below it count as compatible, as in the paper.
THRESHOLD = 1e-3
# Residuals below it are rounding; lower bound of the figure's axis and of the ratio's denominator.
_FLOOR = 1e-16


def compatibility_metrics(records: Sequence[Record]) -> dict[str, float | str]:
    """Rows of Table 4 for one model, by the paper's names."""
    if not records:
        raise ValueError("There are no records to summarize.")
    residuals = np.array([r.residual for r in records])
    uniform = np.array([r.uniform_residual for r in records])
    width = max(len(r.fidelity) for r in records)
    fidelity = np.array([np.pad(r.fidelity, (0, width - len(r.fidelity)), constant_values=np.nan) for r in records])
    per_letter = np.nanmedian(fidelity, axis=0)
    letters = _letters(records)
    golds = [r.question.letters.index(r.question.gold) for r in records if r.question.gold is not None]
    return {
        "# records": len(records),
        f"Gold balance ({' / '.join(letters)})": " / ".join(str(golds.count(i)) for i in range(len(letters))),
        "Letter-token mass (median)": float(
            np.median(np.concatenate([[r.student_mass, *r.teacher_mass] for r in records]))
        ),
        "Teacher fidelity (median, worst z)": float(per_letter.min()),
        "Teacher fidelity (median, best z)": float(per_letter.max()),
        "LS L1 residual (median)": float(np.median(residuals)),
        f"Fraction residual < {THRESHOLD:g}": float((residuals < THRESHOLD).mean()),
        "Uniform-P L1 baseline (median)": float(np.median(uniform)),
        "Uniform / LS ratio (median)": float(np.median(uniform / residuals.clip(min=_FLOOR))),
        "Self-consistency argmax P̂ = argmax s": float(np.mean([r.is_self_consistent for r in records])),
        "P̂ mass on student's argmax (median)": float(np.median([r.posterior[r.student.argmax()] for r in records])),
    }


def format_compatibility(models: Mapping[str, Sequence[Record]]) -> str:
    """Markdown table in the layout of Table 4, one column a model."""
    columns = {
        name: {label: _formatted(label, value) for label, value in compatibility_metrics(records).items()}
        for name, records in models.items()
    }
    labels = dict.fromkeys(label for column in columns.values() for label in column)
    rows = ([label, *(column.get(label, "–") for column in columns.values())] for label in labels)
    return markdown_table(["Metric", *columns], rows) + "\n"


def _formatted(label: str, value: float | str) -> str:
    if isinstance(value, str | int):
        return str(value)
    if label.startswith(("LS L1", "Uniform / LS")):
        return f"{value:.1e}"
    return f"{value:.0%}" if label.startswith(("Fraction", "Self-consistency")) else f"{value:.3f}"


def make_figure(models: Mapping[str, Sequence[Record]]) -> Figure:
    """Figure with (a) the residuals of each model and (b) the mean teacher matrix of the one of lowest fidelity."""
    worst = "Teacher fidelity (median, worst z)"
    matrix_of = min(models, key=lambda name: compatibility_metrics(models[name])[worst])
    figure = Figure(figsize=(8.4, 3.3), dpi=160, layout="constrained")
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
    axes.set(xlabel="answer", ylabel="feedback z", title="(b) mean teacher matrix")
    axes.set_xticks(ticks, letters)
    axes.set_yticks(ticks, letters)
    axes.text(0.5, -0.3, name, transform=axes.transAxes, ha="center", fontsize=8, parse_math=False)


def _letters(records: Sequence[Record]) -> tuple[str, ...]:
    """Names of the options, or their positions where questions name them differently."""
    longest = max((r.question.letters for r in records), key=len)
    if all(r.question.letters == longest[: len(r.question.letters)] for r in records):
        return longest
    return tuple(str(position) for position in range(1, len(longest) + 1))
