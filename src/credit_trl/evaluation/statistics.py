"""Scores over k samples a prompt, and what resampling prompts and seeds says of their uncertainty.

The sampling unit is the prompt: a prompt's score is the mean over its k samples, and intervals come from resampling
prompts with replacement (2,000 resamples), as in the paper's Appendix A. Where a method was trained with several
seeds, seeds are a second level that is resampled too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

N_RESAMPLES = 2000
CONFIDENCE_LEVEL = 0.95

Array = NDArray[np.float64]


class Interval(NamedTuple):
    """A mean and its confidence interval. `low` and `high` are NaN where one prompt leaves nothing to resample."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


class Difference(NamedTuple):
    """A mean difference, its confidence interval, and the two-sided p-value of no difference."""

    difference: float
    low: float
    high: float
    p_value: float


def pass_at_k(successes: ArrayLike, samples: int, k: int) -> Array:
    """Chance that at least one of k samples succeeds: `1 − C(n − c, k) / C(n, k)`, unbiased in the c of n that did.

    Args:
        successes: c, any shape, whole numbers in [0, samples].
        samples: n, samples drawn a prompt.
        k: in [1, samples].

    Raises:
        ValueError: k or a count out of range.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs 1 ≤ k ≤ {samples}, the samples drawn for each prompt.")
    counts = np.asarray(successes)
    if (counts < 0).any() or (counts > samples).any():
        raise ValueError(f"Successes must be between 0 and {samples}, got {counts.min()} to {counts.max()}.")
    misses = np.array([1.0 - math.comb(samples - c, k) / math.comb(samples, k) for c in range(samples + 1)])
    return misses[counts.astype(int)]


def majority_at_k(answers: Sequence[str | None], gold: str) -> float:
    """maj@k of one prompt: 1 if most of the given answers are `gold`; answers tied for most share it equally.

    `None` is a sample without an answer: it does not vote.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    return 1.0 / len(winners) if gold in winners else 0.0


def bootstrap_ci(
    per_prompt_scores: ArrayLike,
    n_resamples: int = N_RESAMPLES,
    *,
    confidence_level: float = CONFIDENCE_LEVEL,
    seed: int = 0,
) -> Interval:
    """Mean over prompts with its percentile bootstrap interval (`scipy.stats.bootstrap`).

    Args:
        per_prompt_scores: (n,), each the mean over a prompt's samples.
        n_resamples: resamples of the n prompts.
        confidence_level: of the interval.
        seed: of the resampling.

    Returns:
        `(mean, low, high)`. Scores that are all the same have an interval of no width: nothing in them varies.

    Raises:
        ValueError: no scores, more than one dimension, or scores that are not finite.
    """
    scores = _finite(per_prompt_scores, "per_prompt_scores")
    if scores.ndim != 1:
        raise ValueError(f"`per_prompt_scores` has one score a prompt, shape (n,), got {scores.shape}.")
    mean = float(scores.mean())
    if len(scores) == 1:
        return Interval(mean, math.nan, math.nan)
    result = stats.bootstrap(
        (scores,),
        np.mean,
        n_resamples=n_resamples,
        batch=_batch(len(scores)),
        confidence_level=confidence_level,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return Interval(mean, float(result.confidence_interval.low), float(result.confidence_interval.high))


def two_level_ci(
    scores: ArrayLike,
    n_resamples: int = N_RESAMPLES,
    *,
    confidence_level: float = CONFIDENCE_LEVEL,
    seed: int = 0,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Interval:
    """Mean over seeds and prompts, with both resampled; see `paired_bootstrap` for how.

    Args:
        scores: (seeds, prompts), the same prompts for every seed. One seed: its variance is not in the interval.
        n_resamples, confidence_level, seed: as in `bootstrap_ci`.
        bounds: what a mean can be, such as (0, 1) for a rate; the interval is cut there. The deviations are the same
            on both sides of the mean, so near a bound they reach beyond it; a cut takes nothing from the coverage.

    Raises:
        ValueError: scores that are not finite, or outside the bounds.
    """
    matrix = _matrix(scores, "scores")
    if matrix.min() < bounds[0] or matrix.max() > bounds[1]:
        raise ValueError(f"`scores` reach from {matrix.min():g} to {matrix.max():g}, beyond `bounds` {bounds}.")
    mean = float(matrix.mean())
    if matrix.shape[1] == 1:
        return Interval(mean, math.nan, math.nan)
    rng = np.random.default_rng(seed)
    deviations = np.concatenate(
        [
            _deviations(matrix, _draw(rng, size, len(matrix)), _draw(rng, size, matrix.shape[1]))
            for size in _sizes(n_resamples, matrix.shape[1])
        ]
    )
    low, high = _percentiles(deviations, confidence_level)
    return Interval(mean, max(mean + low, bounds[0]), min(mean + high, bounds[1]))


def paired_bootstrap(
    a: ArrayLike,
    b: ArrayLike,
    n_resamples: int = N_RESAMPLES,
    *,
    paired_seeds: bool = False,
    confidence_level: float = CONFIDENCE_LEVEL,
    seed: int = 0,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Difference:
    """Difference of two methods' means on the same prompts: `mean(a) − mean(b)`.

    Each resample draws prompts once for both methods, so a prompt's difficulty cancels; with several seeds a method it
    draws seeds too. To be unbiased at small counts it draws n − 1 of n (the variance of a mean of n − 1 draws from n
    observations is s²/n) and gives each level's deviation the tails of Student's t: it is multiplied by √(ν / χ²_ν), a
    new χ² at each resample, with ν = n − 1 the level's degrees of freedom. With five seeds a plain bootstrap of seeds
    would claim intervals a third too narrow, and small p-values that are far too small. Where seeds matter little the
    test is conservative, since resampling both levels counts what is left of their interaction more than once.

    Args:
        a, b: per-prompt scores, (prompts,) or (seeds, prompts). Column i is the same prompt in both.
        n_resamples: resamples.
        paired_seeds: row s of `a` and of `b` share what the seed decides (base model, data order), so seeds are drawn
            once for both.
        confidence_level: of the interval.
        seed: of the resampling.
        bounds: what a mean can be, as in `two_level_ci`; no difference is larger than they are apart.

    Returns:
        `(difference, low, high, p_value)`; the p-value is the share of resamples, centred on no difference, that are
        as far from it as what was observed, and at least `1 / (n_resamples + 1)`.

    Raises:
        ValueError: different prompts, fewer than two, different numbers of seeds with `paired_seeds`, or scores that
            are not finite.
    """
    left, right = _matrix(a, "a"), _matrix(b, "b")
    if left.shape[1] != right.shape[1]:
        raise ValueError(f"A paired test needs the same prompts: `a` has {left.shape[1]}, `b` {right.shape[1]}.")
    if left.shape[1] < 2:
        raise ValueError("A paired test needs at least two prompts.")
    if paired_seeds and len(left) != len(right):
        raise ValueError(f"`paired_seeds` needs as many seeds in `a` ({len(left)}) as in `b` ({len(right)}).")
    rng = np.random.default_rng(seed)
    parts = []
    for size in _sizes(n_resamples, left.shape[1]):
        prompts = _draw(rng, size, left.shape[1])
        seeds = _draw(rng, size, len(left))
        if paired_seeds:
            parts.append(_deviations(left - right, seeds, prompts))
        else:
            other_seeds = _draw(rng, size, len(right))
            parts.append(_deviations(left, seeds, prompts) - _deviations(right, other_seeds, prompts))
    deviations = np.concatenate(parts)
    difference = float(left.mean() - right.mean())
    low, high = _percentiles(deviations, confidence_level)
    # Equality counts as far; the slack absorbs rounding where the scores are multiples of 1/k.
    extreme = int((np.abs(deviations) >= abs(difference) - 1e-12).sum())
    p_value = (extreme + 1) / (n_resamples + 1)
    most = bounds[1] - bounds[0]
    return Difference(difference, max(difference + low, -most), min(difference + high, most), p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: each is at most the level of the whole family where its adjusted value is."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def _deviations(matrix: Array, seeds: _Draw, prompts: _Draw) -> Array:
    """How far each of B resamples' means is from the mean of `matrix` (S, n), given draws of seeds and of prompts."""
    by_seed, by_prompt = matrix.mean(axis=1), matrix.mean(axis=0)
    seed_part = (seeds.weights - 1.0 / matrix.shape[0]) @ (by_seed - by_seed.mean())
    prompt_part = (prompts.weights - 1.0 / matrix.shape[1]) @ (by_prompt - by_prompt.mean())
    residual = matrix - by_seed[:, None] - by_prompt + matrix.mean()
    both = np.einsum("bs,sn,bn->b", seeds.weights, residual, prompts.weights, optimize=True)
    return seed_part * seeds.tails + prompt_part * prompts.tails + both


class _Draw(NamedTuple):
    """B resamples of one level.

    Args:
        weights: (B, items), the shares of a resample's draws that fall on each item.
        tails: (B,), √(ν / χ²_ν): what makes a normal deviation one of Student's t.
    """

    weights: Array
    tails: Array


def _draw(rng: np.random.Generator, size: int, count: int) -> _Draw:
    """`size` resamples of a level with `count` items, count − 1 draws each; of one item, all of them."""
    if count == 1:
        return _Draw(np.ones((size, 1)), np.ones(size))
    drawn = rng.integers(count, size=(size, count - 1)) + np.arange(size)[:, None] * count
    weights = np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count) / (count - 1)
    return _Draw(weights, np.sqrt((count - 1) / rng.chisquare(count - 1, size)))


def _percentiles(deviations: Array, confidence_level: float) -> tuple[float, float]:
    tail = (1.0 - confidence_level) / 2
    low, high = np.quantile(deviations, [tail, 1.0 - tail])
    return float(low), float(high)


def _batch(count: int) -> int:
    """Resamples that are held at once: some 64 MB."""
    return max(1, 8_000_000 // count)


def _sizes(n_resamples: int, count: int) -> list[int]:
    whole, rest = divmod(n_resamples, _batch(count))
    return [_batch(count)] * whole + ([rest] if rest else [])


def _matrix(scores: ArrayLike, name: str) -> Array:
    array = _finite(scores, name)
    if array.ndim not in (1, 2):
        raise ValueError(f"`{name}` has shape (prompts,) or (seeds, prompts), got {array.shape}.")
    return np.atleast_2d(array)


def _finite(scores: ArrayLike, name: str) -> Array:
    array = np.asarray(scores, dtype=np.float64)
    if array.size == 0:
        raise ValueError(f"`{name}` is empty.")
    if not np.isfinite(array).all():
        raise ValueError(f"`{name}` has {int((~np.isfinite(array)).sum())} scores that are not finite.")
    return array
