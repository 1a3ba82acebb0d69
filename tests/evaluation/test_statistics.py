"""Statistics: coverage of intervals, closed forms, level and power of the paired test."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from credit_trl.evaluation import bootstrap_ci, paired_bootstrap, pass_at_k, statistics
from credit_trl.evaluation.statistics import holm
from tables import tables_of

ALPHA = 0.05


def half_width(interval) -> float:
    return (interval.high - interval.low) / 2


def simulated_prompts(rng, prompts: int, k: int, a: float, b: float):
    """Per-prompt means of k Bernoulli samples with success probabilities from Beta(a, b)."""
    return rng.binomial(k, rng.beta(a, b, prompts)) / k


def coverage(prompts: int, k: int, a: float, b: float, simulations: int) -> float:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(simulations):
        _, low, high = bootstrap_ci(simulated_prompts(rng, prompts, k, a, b))
        hits += low <= a / (a + b) <= high
    return hits / simulations


# ToolAlpaca's 68 prompts at avg@16, and LiveCodeBench's 131 at avg@4.
@pytest.mark.parametrize(("prompts", "k", "a", "b"), [(68, 16, 2.0, 2.0), (131, 4, 0.5, 0.5)])
def test_bootstrap_ci_covers_at_its_level(prompts, k, a, b):
    assert 0.92 <= coverage(prompts, k, a, b, simulations=400) <= 0.97


def test_bootstrap_ci_has_normal_width_and_shrinks_with_root_n():
    rng = np.random.default_rng(1)
    scores = rng.random(100)
    narrow, wide = bootstrap_ci(np.tile(scores, 16)), bootstrap_ci(scores)
    assert narrow.mean == pytest.approx(scores.mean())
    assert half_width(wide) / half_width(narrow) == pytest.approx(4.0, rel=0.1)
    normal = 1.96 * scores.std() / math.sqrt(len(scores))
    assert half_width(wide) == pytest.approx(normal, rel=0.06)


@pytest.mark.parametrize("count", [3, 7, 10, 333])
@pytest.mark.parametrize("score", [1 / 3, 0.1, 16 / 17])
def test_bootstrap_ci_of_equal_scores_contains_their_mean(score, count):
    mean, low, high = bootstrap_ci([score] * count, 50)
    assert low <= mean <= high
    assert high - low < 1e-12


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(samples, data):
    successes = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    outcomes = [1] * successes + [0] * (samples - successes)
    subsets = list(itertools.combinations(outcomes, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k([successes], samples, k)[0] == pytest.approx(share)


def rejections(make_pair, simulations: int, **options) -> float:
    rng = np.random.default_rng(2)
    is_rejected = [paired_bootstrap(*make_pair(rng), seed=i, **options).p_value <= ALPHA for i in range(simulations)]
    return float(np.mean(is_rejected))


def is_at_most_level(rate: float, simulations: int) -> bool:
    """Whether a rejection rate is within two standard errors of the level."""
    return rate <= ALPHA + 2 * math.sqrt(ALPHA * (1 - ALPHA) / simulations)


def test_paired_test_keeps_its_level():
    def same(rng):
        p = rng.beta(0.7, 0.7, 200)
        return rng.binomial(16, p) / 16, rng.binomial(16, p) / 16

    assert is_at_most_level(rejections(same, 400), 400)


def test_paired_test_detects_five_points_at_200_prompts():
    def five_points(rng):
        p = rng.beta(0.7, 0.7, 200) * 0.95
        return rng.binomial(16, p + 0.05) / 16, rng.binomial(16, p) / 16

    assert rejections(five_points, 50) >= 0.95


@pytest.mark.parametrize("paired_seeds", [True, False])
def test_two_level_test_includes_the_variance_of_seeds(paired_seeds):
    """Seed effects without a difference between the methods are not significant."""

    def seeds_differ(rng):
        p = rng.beta(2, 2, 60)
        shift = rng.normal(0, 0.1, (2, 3, 1))
        draw = rng.binomial(16, np.clip(p + shift, 0, 1)) / 16
        return draw[0], draw[1]

    assert is_at_most_level(rejections(seeds_differ, 200, paired_seeds=paired_seeds), 200)

    def pooled(rng):
        a, b = seeds_differ(rng)
        return a.mean(0), b.mean(0)

    assert rejections(pooled, 100) > 0.2  # resampling prompts only rejects too often


def test_resamples_as_far_as_the_difference_count():
    """Of two prompts each resample draws one, so the deviations are ± 1/2 times a tail, here 1."""
    tails = np.ones(8)
    shares = np.eye(2)[[0, 1] * 4]
    resample = lambda rng, size, count: (shares, tails) if count == 2 else (np.ones((8, 1)), tails)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_resample", resample)
        tested = paired_bootstrap([1.0, 0.0], [0.0, 0.0], 8)
    assert tested.difference == 0.5
    assert tested.p_value == 1.0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(-0.5, 0.5))
def test_paired_difference_is_antisymmetric_and_shift_exact(seed, shift):
    rng = np.random.default_rng(seed)
    a, b = rng.random(20), rng.random(20)
    forth, back = paired_bootstrap(a, b, 400), paired_bootstrap(b, a, 400)
    assert forth.difference == pytest.approx(-back.difference) == pytest.approx(a.mean() - b.mean())
    assert forth.p_value == back.p_value
    shifted = paired_bootstrap(a + shift, a, 400)
    assert shifted.low == pytest.approx(shift, abs=1e-12)
    assert shifted.high == pytest.approx(shift, abs=1e-12)


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_interval_over_seeds_is_students_t(count):
    """Rows that differ by a constant have variance between seeds only, where the t interval is exact."""
    by_seed = np.linspace(0.0, 1.0, count)
    scores = np.repeat(by_seed[:, None], 4, axis=1)
    expected = stats.t.ppf(0.975, count - 1) * by_seed.std(ddof=1) / math.sqrt(count)
    interval = paired_bootstrap(scores, np.zeros(4), 40_000)
    assert half_width(interval) == pytest.approx(expected, rel=0.3 if count == 2 else 0.12)


@pytest.mark.parametrize(("function", "arguments", "options", "message"), tables_of(__file__)["invalid"])
def test_invalid_scores_are_named(function, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(statistics, function)(*arguments, **options)


def test_holm_adjusts_in_steps():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
