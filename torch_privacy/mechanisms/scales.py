# SPDX-License-Identifier: Apache-2.0
"""Finds scales and logarithms of numbers from two noisy histograms of all columns together.

Bounds clip values, and a *scale* says where most of them lie: a model sees ``(f(value) - middle) / half`` with the
middle and half the length of the scale, so that honest bounds may be wide. f is the identity, or
``log(1 + value / unit)`` for skewed numbers that are never negative. All but the histograms is public arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .histograms import (
    FINE_BINS,
    PER_DECADE,
    STANDS_OUT,
    WIDTHS,
    Counts,
    Ends,
    bins_in_decade,
    ends_of_numbers,
    ends_within,
    fine_ends,
    histogram,
    standing_out,
)

LOW, HIGH = 0.1, 0.9  # quantiles that a scale is made of
WIDER = 1.5  # half of a scale over half the distance of these quantiles: two standard deviations of a normal one
TAIL = 3.0  # factor by which values may lie beyond the bins that stand out, where they are too rare for it
SKEWED = 0.4  # (q90 + q10 - 2 q50) / (q90 - q10) from which on the logarithm is taken; 0.57 for exp of a normal one
NARROW = 0.02  # of the range that stands out: quantiles that are closer say little of the other values
NOISIEST = 0.15  # noise on a cumulative count over the number of rows from which on quantiles are not believed
STANDS_OUT_WITHIN = 3.5  # standard deviations where bounds are declared: noise widens a scale, and costs no values
FINEST = 8  # times as many second bins at most
FINE_WIDTHS = (1, 4)  # numbers of these that are looked at together: more would be the middle of values that are spread
MOST = 0.8  # share of the values that must be in the narrower of two ranges
COARSE = 10  # bins in a decade where bounds are declared
Histogram = tuple[Counts, Ends]
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Numbers:
    """Holds one column of numbers for the two histograms.

    Args:
        values: (n,), NaN where missing.
        ends: of the first bins, which are public.
        limits: declared bounds, or None. No bin goes beyond them, so that values beyond count at their end.
        widths: numbers of neighboring first bins that are looked at together.
        finer: how many times more second bins than usual there are within a single one of the first.
    """

    values: NDArray[np.float64]
    ends: Ends
    limits: tuple[float, float] | None = None
    widths: tuple[int, ...] = WIDTHS
    finer: int = 1

    @classmethod
    def without_limits(cls, values: NDArray[np.float64], noise: float) -> Numbers:
        """Returns a column without bounds, with first bins as fine as the noise allows.

        ``noise`` is that of a count over the number of rows. Where it is large, bins are as wide as a decade, and none
        are looked at together that span more. Then values that crowd in one of them need more of the second.
        """
        per_decade = bins_in_decade(noise)
        widths = *(width for width in WIDTHS if width < per_decade), per_decade
        return cls(values, ends_of_numbers(per_decade), None, widths, min(PER_DECADE // per_decade, FINEST))

    def second_ends(self, low: float, high: float) -> Ends:
        """Returns the ends of the second bins, between the ends of the first that stand out."""
        is_single = np.searchsorted(self.first_ends, high) - np.searchsorted(self.first_ends, low) == 1
        return fine_ends(low, high, self.finer if is_single else 1)

    @property
    def first_ends(self) -> Ends:
        """Returns the ends of the first bins, within the limits."""
        return self.ends if self.limits is None else ends_within(self.ends, *self.limits)


@dataclass(frozen=True)
class Ranged:
    """Holds what two noisy histograms say of one column: the counts, and the range in which values stand out."""

    first: Histogram
    second: Histogram
    range: tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """Says where most values of a column lie, and the unit of the logarithm that is taken of them; None for none."""

    low: float
    high: float
    log_unit: float | None = None


def find_ranges(
    columns: Mapping[Name, Numbers],
    stddev: float,
    release: Callable[[NDArray[np.int64]], Counts],
    num_rows: float = math.inf,
) -> dict[Name, Ranged]:
    """Returns the ranges of the columns of which something stood out of the noise.

    Args:
        columns: the numbers, and their public bins and limits.
        stddev: standard deviation of the noise on each count.
        release: adds the noise to a vector of counts, and records that; called twice at most.
        num_rows: the number of rows, if it is public.

    Guarantees:
        - a row is in at most one bin of each column and each vector: it changes d counts of a vector by 1 at most.
        - values reach the result by the released counts alone.
    """
    ends = {name: column.first_ends for name, column in columns.items()}
    found: list[dict[Name, tuple[Histogram, tuple[float, float] | None]]] = []
    for least in STANDS_OUT:
        if not ends:
            break
        counts = release(np.concatenate([histogram(columns[name].values, ends[name]) for name in ends]))
        parts = np.split(counts, np.cumsum([len(one) - 1 for one in ends.values()])[:-1])
        found.append({})
        for (name, its_ends), part in zip(ends.items(), parts, strict=True):
            limits = columns[name].limits
            widths, times = columns[name].widths if len(found) == 1 else WIDTHS, least
            if len(found) > 1 and len(part) > FINE_BINS:
                widths, times = FINE_WIDTHS, STANDS_OUT[0]
            if limits is not None:
                times = STANDS_OUT_WITHIN
            ranged = standing_out(part, its_ends, times * stddev, widths)
            found[-1][name] = (part, its_ends), ranged
        ends = {name: columns[name].second_ends(*ranged) for name, (_, ranged) in found[-1].items() if ranged}
    ranges: dict[Name, Ranged] = {}
    for name, (fine, narrow) in (found[1] if len(found) > 1 else {}).items():
        coarse, wide = found[0][name]
        assert wide is not None
        if columns[name].limits is not None:  # there, the finer bins may miss the rarer values
            if narrow is not None:
                ranges[name] = Ranged(coarse, fine, wide)
        else:
            if narrow is None or _is_edge(narrow, fine[1]) or not _has_most(narrow, fine, stddev, num_rows):
                narrow = wide
            ranges[name] = Ranged(coarse, fine, narrow)
    return ranges


def _has_most(ranged: tuple[float, float], of: Histogram, stddev: float, num_rows: float) -> bool:
    """True if most values lie in a range, of as many as there may be: else the noise hides the others."""
    counts, ends = of
    inside = float(counts[(ends[:-1] >= ranged[0]) & (ends[1:] <= ranged[1])].sum())
    return inside >= MOST * min(num_rows, float(counts.sum()) + 2 * stddev * math.sqrt(len(counts)))


def _is_edge(ranged: tuple[float, float], ends: Ends) -> bool:
    """True if a range is an outermost bin: it stands out by the values beyond all bins, which count there."""
    return ranged in ((float(ends[0]), float(ends[1])), (float(ends[-2]), float(ends[-1])))


def scale_of(ranged: Ranged, limits: tuple[float, float], stddev: float, *, may_log: bool) -> Scale:
    """Returns the scale of a column within its bounds; the bounds themselves if the noise leaves nothing better."""
    unit = _log_unit(ranged.first, limits, stddev) if may_log else None
    low, high = max(ranged.range[0], limits[0]), min(ranged.range[1], limits[1])
    if not low < high:
        return Scale(*limits, unit)
    quantiles = _quantiles(_within(ranged.second if unit is None else ranged.first, low, high), (LOW, HIGH), stddev)
    if quantiles is not None and quantiles[1] - quantiles[0] > NARROW * (high - low):
        q10, q90 = quantiles if unit is None else np.log1p(quantiles / unit)
        ends = np.array([q10 + q90 - WIDER * (q90 - q10), q10 + q90 + WIDER * (q90 - q10)]) / 2
        if unit is not None:
            ends = unit * np.expm1(ends)
        low, high = (float(end) for end in ends.clip(*limits))
    return Scale(low, high, unit)


def _within(of: Histogram, low: float, high: float) -> Histogram:
    """Returns the bins that meet a range."""
    counts, ends = of
    chosen = np.flatnonzero((ends[1:] > low) & (ends[:-1] < high))
    return counts[chosen], ends[np.append(chosen, chosen[-1] + 1)] if len(chosen) else ends[:0]


def _quantiles(of: Histogram, shares: tuple[float, ...], stddev: float) -> NDArray[np.float64] | None:
    """Returns quantiles of the values in a noisy histogram, linear within bins; None if the noise is too large."""
    counts, ends = of
    total = float(counts.sum())
    if not total > 0 or stddev * math.sqrt(len(counts)) > NOISIEST * total:
        return None
    sums = np.maximum.accumulate(np.append(0, np.cumsum(counts))).clip(0, None)
    steps = np.arange(len(sums)) * 1e-9 * total  # so that sums increase
    return np.interp(np.array(shares) * sums[-1], sums + steps, ends)


def _log_unit(first: Histogram, limits: tuple[float, float], stddev: float) -> float | None:
    """Returns the unit of the logarithm, the tenth percentile of what is above 0; None if it is not to be taken."""
    low, high = limits
    if low < 0 or high <= 0:
        return None
    counts, ends = _within(first, 0.0, high)
    above = counts[ends[:-1] > 0], ends[ends > 0]
    found = standing_out(*above, STANDS_OUT_WITHIN * stddev) if len(above[0]) else None
    if found is None:
        return None
    quantiles = _quantiles(_within(above, found[0] / TAIL, found[1] * TAIL), (LOW, 0.5, HIGH), stddev)
    if quantiles is None:
        return None
    q10, q50, q90 = quantiles
    if not q90 + q10 - 2 * q50 > SKEWED * (q90 - q10) > 0:
        return None
    return float(f"{q10:.2g}")
