# SPDX-License-Identifier: Apache-2.0
"""Finds the range in which numbers lie from noisy histograms; all but the histograms is public arithmetic.

The first histogram has public bins for all sizes of numbers, and finds where values are. The second divides that range
into equal bins. This holds for values of a narrow range and for values that repeat, where an exponential mechanism has
nothing to choose between.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALLEST, SMALL, LARGE, LARGEST = -15, -4, 10, 19  # powers of ten of the sizes that are distinguished
PER_DECADE, PER_OUTER_DECADE = 40, 10  # between small and large, and beyond
FEWER = (PER_DECADE, 20, 10, 4, 2, 1)  # what there may be in a decade, by the noise
FINE_BINS = 64
STANDS_OUT = (5.0, 4.0)  # standard deviations of the noise, in the first and the second histogram
WIDTHS = (1, 4, 16, 40)  # numbers of neighboring bins that are looked at together
SHARE_OF_DECADE = 0.1  # share of the rows that is to stand out also if it is spread over a decade
Ends = NDArray[np.float64]  # (bins + 1,): where bins end, in increasing order
Counts = NDArray[Any]  # (bins,): integers, or floats with noise


@cache
def ends_of_numbers(per_decade: int = PER_DECADE) -> Ends:
    """Returns the ends of the first bins of numbers of both signs: one around 0, and one for all beyond 1e19.

    There are 40 in each decade from 1e-4 to 1e10, or fewer. There are at most 10 below, down to 1e-15, for masses and
    concentrations in their basic units, and above, up to 1e19, for times in nanoseconds and long identifiers.
    """
    outer = min(per_decade, PER_OUTER_DECADE)
    decades = [(SMALLEST, SMALL, outer), (SMALL, LARGE, per_decade), (LARGE, LARGEST, outer)]
    parts = [10 ** (np.arange(first * number, last * number) / number) for first, last, number in decades]
    sizes = np.concatenate([*parts, [10.0**LARGEST, 10.0 ** (LARGEST + 2)]])
    return np.concatenate([-sizes[::-1], sizes])


def bins_in_decade(noise: float) -> int:
    """Returns how many of the first bins a decade has; ``noise`` is that of a count over the number of rows.

    A tenth of the rows is to stand out also where it is spread over a decade, as are numbers around 0 and long tails.
    """
    return next((one for one in FEWER if STANDS_OUT[0] * noise * math.sqrt(one) <= SHARE_OF_DECADE), FEWER[-1])


def ends_within(ends: Ends, low: float, high: float) -> Ends:
    """Returns the ends of the bins between two bounds, the bounds among them."""
    return np.unique(np.concatenate([[low], ends.clip(low, high), [high]]))


def histogram(values: NDArray[np.float64], ends: Ends) -> NDArray[np.int64]:
    """Returns the number of values in each bin; those beyond all bins count in the outermost, NaN nowhere."""
    kept = values[~np.isnan(values)]
    bins = np.clip(np.searchsorted(ends, kept, side="right") - 1, 0, len(ends) - 2)
    return np.bincount(bins, minlength=len(ends) - 1)


def standing_out(
    counts: Counts, ends: Ends, least: float, widths: tuple[int, ...] = WIDTHS
) -> tuple[float, float] | None:
    """Returns the range of the bins with more than noise, None if there is none.

    ``least`` is for a single bin; of w neighbors together, which are looked at next, ``least √w`` must be exceeded by
    what has not stood out before. So the long tail of a distribution counts, too.
    """
    rest, found = counts.astype(float), np.zeros(len(counts), bool)
    for width in widths:
        starts = np.arange(0, len(rest), width)
        sums = np.add.reduceat(rest, starts)
        stands = np.repeat(sums > least * math.sqrt(width), width)[: len(rest)]
        found |= stands
        rest[stands] = 0.0
    if not found.any():
        return None
    places = np.flatnonzero(found)
    low, high = float(ends[places[0]]), float(ends[places[-1] + 1])
    tiny = 10.0**SMALLEST
    low, high = (0.0 if low == -tiny else low), (0.0 if high == tiny and low < -tiny else high)
    return low, 1.0 if (low, high) == (0.0, tiny) else high  # values that are nearly all 0


def fine_ends(low: float, high: float, times: int = 1) -> Ends:
    """Returns the ends of the second bins: 64 of equal width between two bounds, or ``times`` as many."""
    return np.linspace(low, high, times * FINE_BINS + 1)
