"""R_t of the analysis against a formula written in probabilities, and in maps of a configuration."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from credit_trl.lab.analysis.responses import analysis_config
from credit_trl.lab.analysis.vocabulary_logps import CreditFormula, CreditLogps
from tables import tables_of


class ByHand:
    """R at one position from probabilities: p, f (V,), g (C, V)."""

    def __init__(self, formula: CreditFormula, p: np.ndarray, f: np.ndarray, g: np.ndarray) -> None:
        self.formula, self.p, self.f, self.g = formula, p, f, g
        self.is_whole = formula.topk is None or formula.topk >= len(p)
        self.tokens = list(range(len(p))) if self.is_whole else list(np.argsort(-f)[: formula.topk])
        self.within = formula.tail == "renormalize" and not self.is_whole

    def target(self, f: float, g: np.ndarray) -> float:
        coef, generic = self.formula.contrastive_coef, np.log(g).mean()
        return (
            math.log(f) + coef * (math.log(f) - generic)
            if self.formula.form == "guide"
            else math.log(f) - coef * generic
        )

    def advantage(self, v: int) -> float:
        def of_token(q: np.ndarray) -> float:
            return q[v] / q[sorted({*self.tokens, v})].sum() if self.within else q[v]

        return self.target(of_token(self.f), np.array([of_token(contrast) for contrast in self.g])) - math.log(
            of_token(self.p)
        )

    def mean(self) -> float:
        """Mean of R over the buckets: the support, and one for the rest."""

        def buckets(q: np.ndarray) -> np.ndarray:
            entry = q[self.tokens]
            return (
                entry / entry.sum() if self.within else entry if self.is_whole else np.append(entry, 1.0 - entry.sum())
            )

        p, f, g = buckets(self.p), buckets(self.f), np.array([buckets(contrast) for contrast in self.g])
        return sum(p[b] * (self.target(f[b], g[:, b]) - math.log(p[b])) for b in range(len(p)))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    form=st.sampled_from(("subtract", "guide")),
    topk=st.one_of(st.none(), st.integers(1, 9)),
    tail=st.sampled_from(("bucket", "renormalize")),
    contrasts=st.integers(1, 3),
    coef=st.floats(0.0, 1.0),
)
def test_advantages_and_their_mean_equal_the_formula_in_probabilities(seed, form, topk, tail, contrasts, coef):
    size = 7
    logits = torch.randn(2 + contrasts, 3, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    student, teacher, *contrast_logps = torch.log_softmax(1.5 * logits, dim=-1)
    formula = CreditFormula(coef, form, topk, tail)
    logps = CreditLogps(student, teacher, torch.stack(contrast_logps))
    got, means = formula.advantages(logps, torch.arange(size).expand(3, size)), formula.policy_mean(logps)
    for t in range(3):
        p, f, *g = (np.exp(x[t].numpy()) for x in (student, teacher, *contrast_logps))
        hand = ByHand(formula, p, f, np.array(g))
        for v in range(size):
            assert got[t, v].item() == pytest.approx(hand.advantage(v), abs=1e-9), (t, v)
        assert means[t].item() == pytest.approx(hand.mean(), abs=1e-6)


def test_advantages_without_contrast_equal_the_reward():
    student, teacher, contrast = torch.log_softmax(torch.randn(3, 4, 9), dim=-1)
    ids = torch.arange(9).expand(4, 9)
    for topk, (contrasts, coef) in itertools.product((3, None), ((contrast[None], 0.0), (contrast[None][:0], 0.5))):
        got = CreditFormula(coef, "guide", topk).advantages(CreditLogps(student, teacher, contrasts), ids)
        torch.testing.assert_close(got, teacher - student)


@pytest.mark.parametrize(("options", "fields"), tables_of(__file__)["formulas"])
def test_formula_is_that_of_the_configuration(options, fields):
    assert CreditFormula.from_config(analysis_config(**options)) == CreditFormula(**fields)
