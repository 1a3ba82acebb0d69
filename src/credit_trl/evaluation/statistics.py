"""Statistics over k samples per prompt: pass@k, bootstrap intervals and the paired test of two methods.

The sampling unit is the prompt. A prompt's score is the mean over its k samples, and intervals come from 2,000
bootstrap resamples of the prompts, as in the paper's Appendix A. The paired test resamples seeds as a second level.

The two-level bootstrap is corrected for small counts. A resample draws n − 1 of n items with replacement, since the
variance of a mean of n − 1 draws is s²/n, and each level's deviation is multiplied by √(ν / χ²_ν) with ν = n − 1 and a
new χ² per resample, which gives it the tails of Student's t. With five seeds an uncorrected bootstrap would give
intervals a third too narrow. The test is conservative where seeds have little effect, because resampling both levels
counts their interaction more than once.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

N_RESAMPLES = 2000

Array = NDArray[np.float64]


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval; `low` and `high` are NaN for a single prompt."""

    mean: float
    low: float
    high: float


class Difference(NamedTuple):
    """A mean difference, its 95 % confidence interval, and the two-sided p-value of no difference."""

    difference: float
    low: float
    high: float
    p_value: float


def pass_at_k(successes: ArrayLike, samples: int, k: int) -> Array:
    """Unbiased probability that at least one of k samples succeeds, `1 − C(n − c, k) / C(n, k)`.

    Args:
        successes: c, any shape, integers in [0, samples].
        samples: n, samples per prompt.
        k: in [1, samples], else a `ValueError`.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs 1 ≤ k ≤ {samples}, the number of samples per prompt.")
    rates = np.array([1.0 - math.comb(samples - c, k) / math.comb(samples, k) for c in range(samples + 1)])
    return rates[np.asarray(successes, dtype=int)]


def bootstrap_ci(per_prompt_scores: ArrayLike, n_resamples: int = N_RESAMPLES) -> Interval:
    """Mean over prompts with its percentile bootstrap interval (`scipy.stats.bootstrap`).

    Args:
        per_prompt_scores: (prompts,), each the mean over a prompt's samples.
        n_resamples: number of resamples.

    Raises:
        ValueError: there are no scores, more than one dimension, or scores that are not finite.
    """
    scores = _finite(per_prompt_scores, "per_prompt_scores", dimensions=(1,))
    mean = float(scores.mean())
    if len(scores) == 1:
        return Interval(mean, math.nan, math.nan)
    bootstrap = stats.bootstrap((scores,), np.mean, n_resamples=n_resamples, method="percentile", rng=0)
    low, high = bootstrap.confidence_interval
    return Interval(mean, min(float(low), mean), max(float(high), mean))  # equal scores round to either side


def paired_bootstrap(
    a: ArrayLike, b: ArrayLike, n_resamples: int = N_RESAMPLES, *, paired_seeds: bool = False, seed: int = 0
) -> Difference:
    """Paired test of two methods on the same prompts: the difference `mean(a) − mean(b)`.

    Each resample draws prompts once for both methods, so the prompts' difficulty cancels. With zeros for `b` it gives
    the interval of `mean(a)` over seeds and prompts.

    Args:
        a, b: scores, (prompts,) or (seeds, prompts); column i is the same prompt in both.
        n_resamples, seed: number of resamples, and seed of their draws.
        paired_seeds: row s of `a` and row s of `b` share a seed, so seeds are also drawn once for both.

    Returns:
        The [`Difference`]. The p-value is the share of resamples, centred on 0, that are at least as far from 0 as
        the observed difference, and at least `1 / (n_resamples + 1)`.

    Raises:
        ValueError: different prompts, fewer than two prompts, scores that are not finite, or different numbers of
            seeds with `paired_seeds`.
    """
    scores = np.atleast_2d(_finite(a, "a", dimensions=(1, 2)))
    right = np.atleast_2d(_finite(b, "b", dimensions=(1, 2)))
    if scores.shape[1] != right.shape[1]:
        raise ValueError(f"A paired test needs the same prompts: `a` has {scores.shape[1]}, `b` {right.shape[1]}.")
    if scores.shape[1] < 2:
        raise ValueError("A paired test needs at least two prompts.")
    if paired_seeds and len(scores) != len(right):
        raise ValueError(f"`paired_seeds` needs as many seeds in `a` ({len(scores)}) as in `b` ({len(right)}).")
    rng = np.random.default_rng(seed)
    prompts = _resample(rng, n_resamples, scores.shape[1])  # the same for both methods
    seeds = _resample(rng, n_resamples, len(scores))
    if paired_seeds:
        deviations = _deviations(scores - right, seeds, prompts)
    else:
        deviations = _deviations(scores, seeds, prompts)
        deviations = deviations - _deviations(right, _resample(rng, n_resamples, len(right)), prompts)
    difference = float(scores.mean() - right.mean())
    low, high = np.quantile(deviations, [0.025, 0.975])
    # Equality counts; the slack absorbs rounding, since scores are multiples of 1/k.
    extreme = int((np.abs(deviations) >= abs(difference) - 1e-12).sum())
    p_value = (extreme + 1) / (n_resamples + 1)
    # Rounding of equal scores must not move the interval to one side of the difference.
    return Difference(difference, difference + min(float(low), 0.0), difference + max(float(high), 0.0), p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values with Holm's step-down adjustment for multiple tests."""
    order = np.argsort(p_values, kind="stable")
    factors = len(p_values) - np.arange(len(p_values))
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.maximum.accumulate(np.minimum(1.0, factors * np.asarray(p_values, dtype=float)[order]))
    return adjusted.tolist()


def _resample(rng: np.random.Generator, size: int, count: int) -> tuple[Array, Array]:
    """`size` resamples of a level with `count` items, `count` − 1 draws each (1 for a single item).

    Returns:
        (size, count) share of each item among a resample's draws, and (size,) √(ν / χ²_ν).
    """
    if count == 1:
        return np.ones((size, 1)), np.ones(size)
    draws = rng.integers(count, size=(size, count - 1)) + np.arange(size)[:, None] * count
    weights = np.bincount(draws.ravel(), minlength=size * count).reshape(size, count) / (count - 1)
    return weights, np.sqrt((count - 1) / rng.chisquare(count - 1, size))


def _deviations(matrix: Array, seeds: tuple[Array, Array], prompts: tuple[Array, Array]) -> Array:
    """(size,) deviations of the resamples' means from the mean of `matrix`, (seeds, prompts)."""
    seed_weights, seed_tails = seeds
    prompt_weights, prompt_tails = prompts
    by_seed = matrix.mean(axis=1)
    by_prompt = matrix.mean(axis=0)
    seed_part = seed_weights @ (by_seed - by_seed.mean())
    prompt_part = prompt_weights @ (by_prompt - by_prompt.mean())
    residual = matrix - by_seed[:, None] - by_prompt + matrix.mean()
    interaction = np.einsum("bs,sn,bn->b", seed_weights, residual, prompt_weights, optimize=True)
    return seed_part * seed_tails + prompt_part * prompt_tails + interaction


def _finite(scores: ArrayLike, name: str, dimensions: tuple[int, ...]) -> Array:
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim not in dimensions or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(f"`{name}` must be finite scores with {dimensions} dimensions, got shape {array.shape}.")
    return array
