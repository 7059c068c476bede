# SPDX-License-Identifier: Apache-2.0
"""Writes ranges that noisy histograms have found as bounds: with a margin, rounded, or as dates.

The bounds are the extreme quantiles that the noise lets through, those of the bins that stand out, and a margin.
"""

from __future__ import annotations

import datetime
import math
from functools import cache

import numpy as np

from ..mechanisms.histograms import Ends

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
