"""results/uses.md: one row per run, kept in a CSV, with Student's intervals over seeds."""

from __future__ import annotations

import sys

import pytest
from scipy import stats

from synthetic_runs import writer

GROUPS = {"k": "known", "u": "unknown", "h": "holdout"}


def test_page_has_means_and_paired_differences_of_all_runs(study, tmp_path, monkeypatch):
    scores = {"GRPO": (0.5, 0.6, 0.4), "modulate": (0.8, 0.7, 0.9)}
    for arm, unknown in scores.items():
        for seed, score in enumerate(unknown):
            write = writer(tmp_path / "runs" / "uses")
            steps = {0: {"k": 1.0, "u": 0.25, "h": 0.3}, 36: {"k": 1.0, "u": score, "h": 0.3}}
            metrics = {"format": 1.0, "shortcut": 0.0}
            write(f"{arm}-{seed}", steps, arm=arm, seed=seed, groups=GROUPS, metrics=metrics)
    (tmp_path / "runs" / "uses_programs" / "grpo").mkdir(parents=True)  # planned, without a run
    line = ["uses.py", "--output_dir", str(tmp_path / "runs"), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", line)
    uses = study("uses")
    uses.main()
    page = (tmp_path / "uses.md").read_text("utf-8")
    assert "| base | 3 | 100.0 [100.0, 100.0] | 25.0 [25.0, 25.0] |" in page
    found = stats.ttest_rel(scores["modulate"], scores["GRPO"])
    low, high = found.confidence_interval(0.95)
    assert f"| modulate − GRPO | +0.0 [+0.0, +0.0] | +30.0 [{100 * low:+.1f}, {100 * high:+.1f}] |" in page
    assert "Not run yet." in page  # the other world
    before = uses.read_rows(tmp_path / "uses.csv", uses.COLUMNS)
    assert before[uses.Key("uses", "GRPO", 1)]["unknown"] == pytest.approx(0.6)
    monkeypatch.setattr(sys, "argv", [*line[:2], str(tmp_path / "none"), *line[3:]])
    uses.main()  # from the table alone
    assert (tmp_path / "uses.md").read_text("utf-8") == page
