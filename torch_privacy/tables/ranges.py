# SPDX-License-Identifier: Apache-2.0
"""Learns bounds, scales and logarithms of a table's numbers and dates from two noisy histograms of all columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..mechanisms.histograms import ends_of_numbers
from ..mechanisms.scales import COARSE, Numbers, Scale, find_ranges, scale_of
from .bounds import as_dates, ends_of_days, rounded, with_margin
from .mechanisms import CountNoise, noisy_counts
from .schema import Column


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
