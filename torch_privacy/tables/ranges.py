# SPDX-License-Identifier: Apache-2.0
"""Learns bounds, scales and logarithms of a table's numbers and dates from two noisy histograms of all columns.

The bounds are the extreme quantiles that the noise lets through, those of the bins that stand out, and a margin; they
are rounded, or dates.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..mechanisms.histograms import Ends, ends_of_numbers
from ..mechanisms.scales import COARSE, Numbers, Scale, find_ranges, scale_of
from .mechanisms import CountNoise, noisy_counts
from .schema import Column

MARGIN, LARGEST_MARGIN = 0.05, 0.5  # of the range, at both ends
NOISE_OF_LARGEST = 0.01  # on a count, over the number of rows, from which on the margin is the largest
EPOCH = datetime.date(1970, 1, 1)


@cache
def ends_of_days() -> Ends:
    """Returns the ends of the first bins of dates: the quarters of the years from 1900 to 2100."""
    days = [datetime.date(year, month, 1) - EPOCH for year in range(1900, 2101) for month in (1, 4, 7, 10)]
    return np.array([day.days for day in days], float)


def with_margin(low: float, high: float, noise: float = 0.0) -> tuple[float, float]:
    """Returns bounds with a margin for values too rare to stand out; it does not cross zero.

    It grows with the noise on a count over the number of rows, which hides more values.
    """
    more = min(max(LARGEST_MARGIN * noise / NOISE_OF_LARGEST, MARGIN), LARGEST_MARGIN) * (high - low)
    return (max(low - more, 0.0) if low >= 0 else low - more, min(high + more, 0.0) if high <= 0 else high + more)


def rounded(low: float, high: float) -> tuple[float, float]:
    """Returns bounds with three digits of their distance, rounded outwards: they are easier to read and to edit."""
    digits = 2 - math.floor(math.log10(high - low))
    unit = 10.0**-digits
    low, high = math.floor(low / unit + 1e-9) * unit, math.ceil(high / unit - 1e-9) * unit
    if digits <= 0:
        return float(round(low)), float(round(high))
    return round(low, digits), round(high, digits)


def as_dates(low: float, high: float) -> tuple[str, str]:
    """Returns bounds in days as ISO dates, at least one day apart."""
    first, last = math.floor(low), max(math.ceil(high), math.floor(low) + 1)
    return tuple((EPOCH + datetime.timedelta(days=day)).isoformat() for day in (first, last))  # pyright: ignore


def is_unscaled(column: Column) -> bool:
    """True if a column has declared bounds, and where most of its values lie within them is not known."""
    return column.kind in ("number", "date") and column.bounds is not None and column.scale is None


def learn_ranges(
    columns: Mapping[str, Column],
    values: Mapping[str, NDArray[np.float64]],
    noise: CountNoise,
    num_rows: int,
    target: str,
    record: Callable[[CountNoise], None],
) -> tuple[dict[str, Column], list[str]]:
    """Returns the columns with bounds and scales, and the names of those without bounds of which nothing stood out.

    Args:
        columns: numbers and dates, with bounds and without.
        values: of each column, (n,), NaN where missing; those beyond declared bounds count at their end.
        noise: on each of the two histograms, of which a row is in one bin of each column.
        num_rows: or the number of owners; it is public, and says how fine bins may be, and how wide bounds should be.
        target: is never replaced with its logarithm, as the mean of a logarithm is not that of the number.
        record: gets the noise of each histogram before its counts are used.
    """

    def release(counts: NDArray[np.int64]) -> NDArray[np.int64]:
        released = noisy_counts(counts, noise)
        record(noise)
        return released

    share = noise.stddev / num_rows
    numbers = {name: _numbers(column, values[name], share) for name, column in columns.items()}
    ranges = find_ranges(numbers, noise.stddev, release, num_rows)
    made, lost = {}, []
    for name, column in columns.items():
        if name not in ranges:
            if column.bounds is None:
                lost.append(name)
            made[name] = replace(column, scale=column.bounds)
            continue
        if column.bounds is None:
            ends = with_margin(*ranges[name].range, share)
            column = replace(column, bounds=as_dates(*ends) if column.kind == "date" else rounded(*ends))
        may_log = column.kind != "date" and name != target
        scale = scale_of(ranges[name], column.limits, noise.stddev, may_log=may_log)
        made[name] = replace(column, scale=_written(column, scale), log=scale.log_unit)
    return made, lost


def _numbers(column: Column, values: NDArray[np.float64], noise: float) -> Numbers:
    limits = None if column.bounds is None else column.limits
    if column.kind == "date":
        return Numbers(values, ends_of_days(), limits)
    return Numbers.without_limits(values, noise) if limits is None else Numbers(values, ends_of_numbers(COARSE), limits)


def _written(column: Column, scale: Scale) -> Any:
    """Returns a scale as a schema has it: two numbers or dates within the bounds."""
    if column.kind == "date":
        return as_dates(scale.low, scale.high)
    limits = column.limits
    low, high = rounded(scale.low, scale.high)
    low, high = max(low, limits[0]), min(high, limits[1])
    return (low, high) if low < high else column.bounds
