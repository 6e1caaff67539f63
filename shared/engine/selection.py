"""Picks the largest values of a row without sorting it. Equal values rank by index, lower first. Pure.

Only values decide, and sums run in index order: how a library orders what it partitions does not matter.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_GROUP = 64
"""Values that share a maximum in the quick bound of `largest`."""

_BINS = 4096
"""Bins of the histogram in `nucleus`."""

_TINY = 1e-300


def largest(values: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Indices of the `k` largest of `values` [n], ascending; all of them when `k` is n or more."""
    if k >= len(values):
        return np.arange(len(values))
    if k <= 0:
        return np.empty(0, np.int64)
    return _best(values, _kth_largest(values, k), k)


def nucleus(scaled: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices, ascending, of the fewest best of `scaled` [n] whose probabilities together reach `top_p`; at least one.

    `scaled` are log weights, up to a constant, whose largest is 0. A histogram of the weights finds the bin in which
    the sum passes the goal, and only that bin is sorted.
    """
    total = float(np.exp(scaled).sum())
    goal = top_p * total
    # What weighs less than an even share of the rest cannot be needed: all of it together is less than the rest. The
    # factor 2 leaves room for rounding.
    lowest = math.log(max((total - goal) / (2 * len(scaled)), _TINY))
    plausible = scaled[scaled >= lowest]
    bins = (plausible * (_BINS / lowest)).astype(np.intp)
    reached = np.bincount(bins, np.exp(plausible)).cumsum()
    goal = min(goal, float(reached[-1]))  # the sums differ by rounding
    passing = int(reached.searchsorted(goal))
    above = float(reached[passing - 1]) if passing else 0.0
    inside = np.sort(plausible[bins == passing])[::-1]
    shares = np.exp(inside)
    before = above + np.cumsum(shares) - shares
    kept = max(1, int(np.count_nonzero(before < goal)))
    return _best(scaled, float(inside[kept - 1]), kept + int(np.count_nonzero(bins < passing)))


def _best(values: NDArray[np.float64], floor: float, count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest, ascending; `floor` is the smallest of them, whose ties go to lower indices."""
    indices = np.flatnonzero(values >= floor)
    if len(indices) > count:
        ties = np.flatnonzero(values[indices] == floor)
        indices = np.delete(indices, ties[count - len(indices) :])
    return indices


def _kth_largest(values: NDArray[np.float64], k: int) -> float:
    groups = len(values) // _GROUP
    if k <= groups:
        # Each of k groups has a value as large as the k-th largest maximum, so none below it is among the k largest.
        maxima = values[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        values = values[values >= np.partition(maxima, groups - k)[groups - k]]
    return float(np.partition(values, len(values) - k)[len(values) - k])
