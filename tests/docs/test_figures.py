"""Figures that docs/make_figures.py draws from committed tables."""

from __future__ import annotations

import runpy

from blocks import ROOT


def test_hero_has_the_same_bases_at_every_step():
    figures = runpy.run_path(str(ROOT / "docs" / "make_figures.py"))
    for by_step in figures["read_rates"](figures["WORLDS_CSV"]).values():
        assert len({len(values) for values in by_step.values()}) == 1
        assert {0, 30, 60, 90} == by_step.keys()
