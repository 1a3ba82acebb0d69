"""Statistics over k samples per prompt: pass@k, maj@k, bootstrap intervals and paired tests.

The sampling unit is the prompt. A prompt's score is the mean over its k samples, and intervals come from 2,000
bootstrap resamples of the prompts, as in the paper's Appendix A. With several seeds per method, seeds are resampled as
a second level.

The two-level bootstrap is corrected for small counts. A resample draws n − 1 of n items with replacement, since the
variance of a mean of n − 1 draws is s²/n, and each level's deviation is multiplied by √(ν / χ²_ν) with ν = n − 1 and a
new χ² per resample, which gives it the tails of Student's t. With five seeds an uncorrected bootstrap would give
intervals a third too narrow. The test is conservative where seeds have little effect, because resampling both levels
counts their interaction more than once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import multimode
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

N_RESAMPLES = 2000
CONFIDENCE_LEVEL = 0.95
UNBOUNDED = (-math.inf, math.inf)

Array = NDArray[np.float64]


class Interval(NamedTuple):
    """A mean and its confidence interval; `low` and `high` are NaN for a single prompt."""

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
    """Unbiased probability that at least one of k samples succeeds, `1 − C(n − c, k) / C(n, k)`.

    Args:
        successes: c, any shape, integers in [0, samples].
        samples: n, samples per prompt.
        k: in [1, samples].

    Raises:
        ValueError: k or a count is out of range.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs 1 ≤ k ≤ {samples}, the number of samples per prompt.")
    counts = np.asarray(successes)
    if (counts < 0).any() or (counts > samples).any():
        raise ValueError(f"Successes must be between 0 and {samples}, got {counts.min()} to {counts.max()}.")
    rates = np.array([1.0 - math.comb(samples - c, k) / math.comb(samples, k) for c in range(samples + 1)])
    return rates[counts.astype(int)]


def majority_at_k(answers: Sequence[str | None], gold: str) -> float:
    """maj@k of one prompt: 1 if the most frequent answer is `gold`, 1/m if m answers tie for it, else 0.

    Samples without an answer (`None`) do not vote.
    """
    winners = multimode(answer for answer in answers if answer is not None)
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
        per_prompt_scores: (prompts,), each the mean over a prompt's samples.
        n_resamples: number of resamples.
        confidence_level: of the interval.
        seed: of the resampling.

    Raises:
        ValueError: there are no scores, more than one dimension, or scores that are not finite.
    """
    scores = _finite(per_prompt_scores, "per_prompt_scores")
    if scores.ndim != 1:
        raise ValueError(f"`per_prompt_scores` must have one score per prompt, shape (n,), got {scores.shape}.")
    if len(scores) == 1:
        return Interval(float(scores[0]), math.nan, math.nan)
    interval = stats.bootstrap(
        (scores,),
        np.mean,
        n_resamples=n_resamples,
        batch=_batch(len(scores)),
        confidence_level=confidence_level,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    mean = float(scores.mean())  # of equal scores, rounding may put it beside the means of the resamples
    return Interval(mean, min(float(interval.low), mean), max(float(interval.high), mean))


def two_level_ci(
    scores: ArrayLike,
    n_resamples: int = N_RESAMPLES,
    *,
    confidence_level: float = CONFIDENCE_LEVEL,
    seed: int = 0,
    bounds: tuple[float, float] = UNBOUNDED,
) -> Interval:
    """Mean over seeds and prompts with an interval that resamples both levels.

    Args:
        scores: (seeds, prompts), the same prompts for all seeds. With one seed only prompts are resampled.
        n_resamples, confidence_level, seed: as in `bootstrap_ci`.
        bounds: range of the mean, such as (0, 1) for a rate, to which the interval is clipped.

    Raises:
        ValueError: scores that are not finite or outside the bounds.
    """
    matrix = _matrix(scores, "scores")
    if matrix.min() < bounds[0] or matrix.max() > bounds[1]:
        raise ValueError(f"`scores` range from {matrix.min():g} to {matrix.max():g}, beyond `bounds` {bounds}.")
    mean = float(matrix.mean())
    if matrix.shape[1] == 1:
        return Interval(mean, math.nan, math.nan)
    rng = np.random.default_rng(seed)
    parts = []
    for size in _sizes(n_resamples, matrix.shape[1]):
        seeds, prompts = _draw(rng, size, len(matrix)), _draw(rng, size, matrix.shape[1])
        parts.append(_deviations(matrix, seeds, prompts))
    low, high = _around_zero(np.concatenate(parts), confidence_level)
    return Interval(mean, max(mean + low, bounds[0]), min(mean + high, bounds[1]))


def paired_bootstrap(
    a: ArrayLike,
    b: ArrayLike,
    n_resamples: int = N_RESAMPLES,
    *,
    paired_seeds: bool = False,
    confidence_level: float = CONFIDENCE_LEVEL,
    seed: int = 0,
    bounds: tuple[float, float] = UNBOUNDED,
) -> Difference:
    """Paired test of two methods on the same prompts: the difference `mean(a) − mean(b)`.

    Each resample draws prompts once for both methods, so the prompts' difficulty cancels.

    Args:
        a, b: scores, (prompts,) or (seeds, prompts); column i is the same prompt in both.
        n_resamples, confidence_level, seed: as in `bootstrap_ci`.
        paired_seeds: row s of `a` and row s of `b` share a seed, so seeds are also drawn once for both.
        bounds: range of the means, as in `two_level_ci`; the difference is clipped to its width.

    Returns:
        The [`Difference`]. The p-value is the share of resamples, centred on 0, that are at least as far from 0 as
        the observed difference, and at least `1 / (n_resamples + 1)`.

    Raises:
        ValueError: different prompts, fewer than two prompts, scores that are not finite, or different numbers of
            seeds with `paired_seeds`.
    """
    left, right = _matrix(a, "a"), _matrix(b, "b")
    if left.shape[1] != right.shape[1]:
        raise ValueError(f"A paired test needs the same prompts: `a` has {left.shape[1]}, `b` {right.shape[1]}.")
    if left.shape[1] < 2:
        raise ValueError("A paired test needs at least two prompts.")
    if paired_seeds and len(left) != len(right):
        raise ValueError(f"`paired_seeds` needs as many seeds in `a` ({len(left)}) as in `b` ({len(right)}).")
    deviations = _paired_deviations(left, right, n_resamples, paired_seeds, np.random.default_rng(seed))
    difference = float(left.mean() - right.mean())
    low, high = _around_zero(deviations, confidence_level)
    # Equality counts; the slack absorbs rounding, since scores are multiples of 1/k.
    extreme = int((np.abs(deviations) >= abs(difference) - 1e-12).sum())
    p_value = (extreme + 1) / (n_resamples + 1)
    width = bounds[1] - bounds[0]
    return Difference(difference, max(difference + low, -width), min(difference + high, width), p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values with Holm's step-down adjustment for multiple tests."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted


class _Draw(NamedTuple):
    """B resamples of one level."""

    weights: Array  # (B, items), the share of each item among a resample's draws
    tails: Array  # (B,), √(ν / χ²_ν)


def _draw(rng: np.random.Generator, size: int, count: int) -> _Draw:
    """`size` resamples of a level with `count` items, `count` − 1 draws each (1 for a single item)."""
    if count == 1:
        return _Draw(np.ones((size, 1)), np.ones(size))
    drawn = rng.integers(count, size=(size, count - 1)) + np.arange(size)[:, None] * count
    weights = np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count) / (count - 1)
    return _Draw(weights, np.sqrt((count - 1) / rng.chisquare(count - 1, size)))


def _deviations(matrix: Array, seeds: _Draw, prompts: _Draw) -> Array:
    """(B,) deviations of the resamples' means from the mean of `matrix`, (seeds, prompts)."""
    by_seed, by_prompt = matrix.mean(axis=1), matrix.mean(axis=0)
    seed_part = (seeds.weights - 1.0 / matrix.shape[0]) @ (by_seed - by_seed.mean())
    prompt_part = (prompts.weights - 1.0 / matrix.shape[1]) @ (by_prompt - by_prompt.mean())
    residual = matrix - by_seed[:, None] - by_prompt + matrix.mean()
    both = np.einsum("bs,sn,bn->b", seeds.weights, residual, prompts.weights, optimize=True)
    return seed_part * seeds.tails + prompt_part * prompts.tails + both


def _paired_deviations(
    left: Array, right: Array, n_resamples: int, paired_seeds: bool, rng: np.random.Generator
) -> Array:
    """(n_resamples,) deviations of the difference, with the same prompts drawn for both methods."""
    parts = []
    for size in _sizes(n_resamples, left.shape[1]):
        prompts, seeds = _draw(rng, size, left.shape[1]), _draw(rng, size, len(left))
        if paired_seeds:
            parts.append(_deviations(left - right, seeds, prompts))
        else:
            right_seeds = _draw(rng, size, len(right))
            parts.append(_deviations(left, seeds, prompts) - _deviations(right, right_seeds, prompts))
    return np.concatenate(parts)


def _around_zero(deviations: Array, confidence_level: float) -> tuple[float, float]:
    """Percentiles of deviations from a mean, which rounding of equal scores must not move to one side of it."""
    tail = (1.0 - confidence_level) / 2
    low, high = np.quantile(deviations, [tail, 1.0 - tail])
    return min(float(low), 0.0), max(float(high), 0.0)


def _batch(count: int) -> int:
    """Resamples in memory at once: about 64 MB."""
    return max(1, 8_000_000 // count)


def _sizes(n_resamples: int, count: int) -> list[int]:
    whole, rest = divmod(n_resamples, _batch(count))
    return [_batch(count)] * whole + ([rest] if rest else [])


def _matrix(scores: ArrayLike, name: str) -> Array:
    array = _finite(scores, name)
    if array.ndim not in (1, 2):
        raise ValueError(f"`{name}` must have shape (prompts,) or (seeds, prompts), got {array.shape}.")
    return np.atleast_2d(array)


def _finite(scores: ArrayLike, name: str) -> Array:
    array = np.asarray(scores, dtype=np.float64)
    if array.size == 0:
        raise ValueError(f"`{name}` is empty.")
    if not np.isfinite(array).all():
        raise ValueError(f"`{name}` has {int((~np.isfinite(array)).sum())} scores that are not finite.")
    return array
