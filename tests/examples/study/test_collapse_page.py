"""results/collapse.md: counts of collapsed runs by teacher, with exact intervals and tests."""

from __future__ import annotations

import sys
from math import comb

from synthetic_runs import writer

GROUPS = {"k": "known", "u": "unknown", "h": "holdout"}
KNOWN = {  # accuracy on known cues at the end, by options of the arm
    "teacher_model_kind=ema": (0.1, 0.2, 0.0, 0.9, 0.3, 0.4),
    "teacher_model_kind=base": (0.9, 1.0, 0.95, 0.8, 1.0, 0.6),
}


def test_page_counts_collapses_and_tests_them_exactly(study, tmp_path, monkeypatch):
    write = writer(tmp_path / "runs" / "collapse")
    for arm, known in KNOWN.items():
        for seed, score in enumerate(known):
            steps = {0: {"k": 1.0, "u": 0.3, "h": 0.3}, 60: {"k": score, "u": 0.5, "h": 0.3}}
            write(f"{arm}-{seed}", steps, arm=f"SDPO {arm}", seed=seed, groups=GROUPS, metrics={"format": 1.0})
    line = ["collapse.py", "--output_dir", str(tmp_path / "runs"), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", line)
    collapse = study("collapse")
    collapse.main()
    page = (tmp_path / "collapse.md").read_text("utf-8")
    # Hypergeometric: 5 of 6 against 0 of 6. The other tail, 0 against 5, is as likely.
    p = 2 * comb(6, 5) * comb(6, 0) / comb(12, 5)
    assert f"| SDPO | frozen | 0 of 6 [0, 46] | {p:.2g} |" in page  # 1 − 0.025 ** (1 / 6) = 0.459
    assert "| SDPO | average of the policy | 5 of 6 [36, 100] |" in page
    assert "| trust region | not run |" in page
    monkeypatch.setattr(sys, "argv", [*line[:2], str(tmp_path / "none"), *line[3:]])
    collapse.main()  # from the table alone
    assert (tmp_path / "collapse.md").read_text("utf-8") == page


def test_teachers_of_the_page_are_the_arms_of_the_sweep(study):
    collapse = study("collapse")
    arms = {arm.name for arm in collapse.read_spec(collapse.HERE / "collapse.yaml").arms()}
    assert arms == {f"{method} {options}" for method in collapse.METHODS for options in collapse.TEACHERS}
