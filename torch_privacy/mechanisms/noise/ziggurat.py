# SPDX-License-Identifier: Apache-2.0
"""Turns random words into standard normal numbers by a ziggurat under the curve, in float64.

The area under ``f(x) = exp(-x²/2)``, x ≥ 0, is divided into 16384 equal parts. 16381 of them are rectangles that lie
wholly under the curve, stacked from the bottom: ``[0, xᵢ] × [f(xᵢ₋₁), f(xᵢ)]`` with ``x₁ > x₂ > ...`` and f(x₀) = 0. A
word chooses a part by its lowest 14 bits, and a number in the rectangle by all of its bits, with sign: one product, and
no test. The other 3 parts are what is left under the curve: a piece over each rectangle, and the tail beyond x₁. There
a point is drawn uniformly in boxes that cover the pieces (for the tail, under an exponential) until one is under the
curve, so that the law is exact.

Resolution: 50 bits of a word are left for the number. So the probability of a point of the grid (see grid.py) differs
from the normal law's by a relative error of 1.3e-7 (root mean square; 4e-8 below one standard deviation, 2e-6 between 3
and 4), as computed for samples of points. If the errors of different points are independent, this changes the privacy
loss of p numbers by about 1.8e-7 √p, added in squares: 2.4e-4 for 1.8 million numbers, as if the noise of a multiplier
of 1 were smaller by 3e-8, relative. `mechanism.noise_factors` prices it.

Source: C. D. McFarland (2016), "A modified ziggurat algorithm for generating exponentially and normally distributed
    pseudorandom numbers", arXiv:1403.6870, for the rectangles; G. Marsaglia (1964), "Generating a variable from the
    tail of the normal distribution". We draw what is left by rejection from boxes.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

PARTS = 2**14


class Tables(NamedTuple):
    """The rectangles, and the boxes around what is left; the box with index 0 covers the tail."""

    widths: np.ndarray  # (PARTS,) of the rectangles; 0 for the parts that are none, which come first
    num_rest: int  # of the parts that are no rectangle
    areas: np.ndarray  # (boxes,) cumulated
    boxes: np.ndarray  # (boxes, 8): see in_the_rest


@cache
def tables() -> Tables:
    """Returns the tables, computed once.

    Over a rectangle the curve lies below its chord plus ``rise``, the largest of ``-f''(x) = (1 - x²) f(x)`` there (at
    the left edge), times width² / 8. So the box is a trapezoid; half of a parallelogram of the height ``full``.
    """
    right = np.array(edges())
    top = np.exp(-right * right / 2)  # upper edges of the rectangles
    left, peak = np.append(right[1:], 0.0), np.append(top[1:], 1.0)
    width, height, zero = right - left, peak - top, 0 * right
    rise = np.maximum(1 - left * left, 0) * peak * width * width / 8
    full = height + 2 * rise
    tail = [right[0], 0.0, 0.0, top[0], np.inf, 0.0, -1 / right[0], 0.0]
    boxes = np.vstack([tail, np.stack([left, width, top, full, height + rise, height, zero, zero + 1], axis=1)])
    areas = np.cumsum(np.append(top[0] / right[0], width * full / 2))
    num_rest = PARTS - len(right)
    return Tables(np.append(np.zeros(num_rest), right), num_rest, areas, boxes)


def edges() -> list[float]:
    """Returns the right edges x₁ > x₂ > ... of the rectangles: ``xᵢ (f(xᵢ) - f(xᵢ₋₁)) = √(π/2) / PARTS``."""
    area, found, x, bottom = math.sqrt(math.pi / 2) / PARTS, [], 8.0, 0.0
    while True:
        while True:  # from the right to the largest solution of f(x) = bottom + area / x
            top = bottom + area / x
            if top >= 1:
                return found
            left = math.sqrt(-2 * math.log(top))
            if left >= x:
                break
            x = left
        found.append(x)
        bottom = math.exp(-x * x / 2)


@lru_cache(16)
def _scaled_widths(scale: float) -> np.ndarray:
    return tables().widths * (scale * 2.0**-63)


def in_rectangles(words: np.ndarray, scale: float, parts: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Writes ``scale`` times the words' numbers to ``out``, and returns the indices of those that are in no rectangle.

    Args:
        words: (n,) int64.
        scale: any factor.
        parts: memory (n,) int64.
        out: (n,) float64; 0 where there is no rectangle.
    """
    np.bitwise_and(words, PARTS - 1, out=parts)
    np.take(_scaled_widths(scale), parts, out=out, mode="wrap")
    rest = (out == 0).nonzero()[0]  # faster than to compare the integers
    np.multiply(words, out, out=out)
    return rest


def in_the_rest(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a number (n,) from each row of four random words (n, 4) uint64, and whether it is accepted.

    The words choose the box, the point in it, and the sign. A point of the parallelogram above the trapezoid's upper
    side is turned about the center of that side.
    """
    t = tables()
    box, along, up = words.T[:3] * 2.0**-64 + 2.0**-65  # above 0, at most 1
    left, width, bottom, full, upper, fall, decay, straight = t.boxes[np.searchsorted(t.areas, box * t.areas[-1])].T
    y = up * full
    is_above = y > upper - fall * along
    along = np.abs(is_above - along)
    y = np.abs(is_above * full - y)
    x = left + width * along + decay * np.log(along)
    y = bottom + y * np.maximum(along, straight)  # in the tail, full * along is the exponential at x
    return np.copysign(x, words[:, 3].view(np.int64)), y < np.exp(-0.5 * x * x)
