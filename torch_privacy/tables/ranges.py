# SPDX-License-Identifier: Apache-2.0
"""Learns bounds, scales and logarithms of numbers and dates from two noisy histograms of all columns.

Bounds clip values, and a *scale* says where most of them lie: a model sees ``(f(value) - middle) / half`` with the
middle and half the length of the scale, so that honest bounds may be wide. f is the identity, or
``log(1 + value / unit)`` for skewed numbers that are never negative. All but the histograms is public arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bounds import (
    STANDS_OUT,
    Ends,
    as_dates,
    ends_of_days,
    ends_of_numbers,
    fine_ends,
    histogram,
    rounded,
    standing_out,
    with_margin,
)
from .mechanisms import CountNoise, noisy_counts
from .schema import Column

LOW, HIGH = 0.1, 0.9  # quantiles that a scale is made of
WIDER = 1.5  # half of a scale over half the distance of these quantiles: two standard deviations of a normal one
TAIL = 3.0  # factor by which values may lie beyond the bins that stand out, where they are too rare for it
SKEWED = 0.4  # (q90 + q10 - 2 q50) / (q90 - q10) from which on the logarithm is taken; 0.57 for exp of a normal one
NARROW = 0.02  # of the range that stands out: quantiles that are closer say little of the other values
NOISIEST = 0.15  # noise on a cumulative count over the number of rows from which on quantiles are not believed
COARSE = 10  # bins in a decade where bounds are declared
STANDS_OUT_WITHIN = 3.5  # standard deviations there: what noise adds widens a scale, and costs no values
Histogram = tuple[NDArray[np.int64], Ends]


def is_unscaled(column: Column) -> bool:
    """True if a column has declared bounds, and where most of its values lie within them is not known."""
    return column.kind in ("number", "date") and column.bounds is not None and column.scale is None


def learn_ranges(
    columns: Mapping[str, Column],
    values: Mapping[str, NDArray[np.float64]],
    noise: CountNoise,
    target: str,
    record: Callable[[CountNoise, list[int]], None],
) -> tuple[dict[str, Column], list[str]]:
    """Returns the columns with bounds and scales, and the names of those without bounds of which nothing stood out.

    Args:
        columns: numbers and dates, with bounds and without.
        values: of each column, (n,), NaN where missing; those beyond declared bounds count at their end.
        noise: on each of the two histograms, of which a row is in one bin of each column.
        target: is never replaced with its logarithm, as the mean of a logarithm is not that of the number.
        record: gets noise and released counts of each histogram before they are used.
    """
    values = {name: _clipped(columns[name], of) for name, of in values.items()}
    ends = {name: _first_ends(column) for name, column in columns.items()}
    first, second = {}, {}
    for least, found in zip(STANDS_OUT, (first, second), strict=True):
        counts = noisy_counts(np.concatenate([histogram(values[name], ends[name]) for name in ends]), noise)
        record(noise, counts.tolist())
        parts = np.split(counts, np.cumsum([len(one) - 1 for one in ends.values()])[:-1])
        for name, part in zip(ends, parts, strict=True):
            within = columns[name].bounds is not None
            ranged = standing_out(part, ends[name], (STANDS_OUT_WITHIN if within else least) * noise.stddev)
            if ranged is not None:
                found[name] = (part, ends[name]), ranged
        ends = {name: fine_ends(*ranged) for name, (_, ranged) in found.items()}
        if not ends:
            break
    made, lost = {}, []
    for name, column in columns.items():
        if name not in second:
            if column.bounds is None:
                lost.append(name)
            made[name] = replace(column, scale=column.bounds)
            continue
        fine, ranged = second[name]
        if column.bounds is None:
            ends_of = with_margin(*ranged)
            column = replace(column, bounds=as_dates(*ends_of) if column.kind == "date" else rounded(*ends_of))
        unit = None if column.kind == "date" or name == target else _log_unit(first[name][0], column, noise.stddev)
        histogram_of = fine if unit is None else first[name][0]
        if columns[name].bounds is not None:
            ranged = first[name][1]  # the finer bins may miss the rarer values
        made[name] = replace(column, scale=_scale(column, histogram_of, ranged, unit, noise.stddev), log=unit)
    return made, lost


def _first_ends(column: Column) -> Ends:
    if column.kind == "date":
        return ends_of_days()
    return ends_of_numbers() if column.bounds is None else ends_of_numbers(COARSE)


def _clipped(column: Column, values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values if column.bounds is None else values.clip(*column.limits)


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


def _log_unit(first: Histogram, column: Column, stddev: float) -> float | None:
    """Returns the unit of the logarithm, the tenth percentile of what is above 0; None if it is not to be taken."""
    low, high = column.limits
    if low < 0 or high <= 0:
        return None
    counts, ends = _within(first, 0.0, high)
    smallest = 10.0**-4
    above = counts[ends[:-1] >= smallest], ends[np.flatnonzero(ends >= smallest)]
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


def _scale(column: Column, of: Histogram, ranged: tuple[float, float], unit: float | None, stddev: float) -> Any:
    """Returns the scale of a column, two numbers or dates within its bounds."""
    limits = column.limits
    low, high = max(ranged[0], limits[0]), min(ranged[1], limits[1])
    if not low < high:
        return column.bounds
    quantiles = _quantiles(_within(of, low, high), (LOW, HIGH), stddev)
    if quantiles is not None and quantiles[1] - quantiles[0] > NARROW * (high - low):
        q10, q90 = quantiles if unit is None else np.log1p(quantiles / unit)
        ends = np.array([q10 + q90 - WIDER * (q90 - q10), q10 + q90 + WIDER * (q90 - q10)]) / 2
        if unit is not None:
            ends = unit * np.expm1(ends)
        low, high = (float(end) for end in ends.clip(*limits))
    if column.kind == "date":
        return as_dates(low, high)
    low, high = rounded(low, high)
    low, high = max(low, limits[0]), min(high, limits[1])
    return (low, high) if low < high else column.bounds
