# SPDX-License-Identifier: Apache-2.0
"""Bounds the characteristic function of many steps beyond a frequency, which certifies the contour engine.

With D the difference of two independent tilted losses, ``1 - |φ(t)|² = E[1 - cos(t D)]``. Three bounds from below:

- near 0, by ``1 - cos x >= x²/2 - x⁴/24``: ``τ² - (κ + 3) τ⁴ / 12``, τ = t times the deviation, κ the kurtosis;
- for large t, ``|φ(t)| <= mass above a cap + variation of min(density, cap) / t``; and at smaller t by
  ``1 - cos(k x) <= k² (1 - cos x)``: |φ| cannot be near 1 at t if it is not near 1 at k t;
- between the two, |φ| at the points of a grid and its Lipschitz constant.
"""

import math
from collections.abc import Sequence

import numpy as np

from ..bracket import Array
from .curve import Unresolved
from .tilt import Term, Tilted, refined

POINTS = 600  # of the grid; with more points the lattice is faster


def log_bound_beyond(terms: Sequence[Term], parts: Sequence[Tilted], c: float, start: float, rest: float) -> float:
    """Returns a bound on ``Σ times * log |φ(t)|`` for all t >= start, from the easier half of the parts; near ``rest``.

    Raises:
        Unresolved: if the bound would be above ``rest / 2``.
    """
    share = 1.0 if len(parts) == 1 else 0.5
    log_level = rest / (share * sum(part.times for part in parts))  # the largest log |φ| allowed
    needed = -math.expm1(2 * log_level)
    ends = [_far(part, log_level) for part in parts]
    order = sorted(range(len(parts)), key=ends.__getitem__)
    reached = np.cumsum([parts[i].times for i in order])
    chosen = order[: int(np.searchsorted(reached, share * reached[-1])) + 1]
    steps, end = sum(parts[i].times for i in chosen), ends[chosen[-1]]
    if math.isinf(end):
        raise Unresolved
    bounds = [steps * log_level]
    if start < end:
        near, decays = zip(*(_near(parts[i], start, needed) for i in chosen), strict=True)
        begin = min(near)
        if begin > start:
            bounds.append(sum(parts[i].times * log for i, log in zip(chosen, decays, strict=True)))
        if begin < end:
            t = _grid(begin, end, max(float(parts[i].mass @ np.abs(parts[i].offsets)) for i in chosen))
            between = np.zeros(len(t) - 1)
            for i in chosen:
                between += parts[i].times * _log_size_between(terms[i], parts[i], c, t, 0.01 * needed)
            bounds.append(float(between.max()))
    if max(bounds) > rest / 2:
        raise Unresolved
    return max(bounds)


def _near(part: Tilted, start: float, needed: float) -> tuple[float, float]:
    """Returns the t up to which the fourth moment shows ``1 - |φ|² >= needed``, and a bound on log |φ| until t."""
    if part.variance < 1e-100:  # a constant loss
        return start, 0.0
    squares = part.offsets * part.offsets
    quartic = (float(part.mass @ (squares * squares)) / part.variance**2 + 3) / 12
    squared = start * start * part.variance  # τ² at the start
    at_start = squared - quartic * squared**2
    root = 1 - 4 * quartic * needed
    if root < 0 or at_start < 0.85 * needed:
        return start, 0.0
    last = (1 + math.sqrt(root)) / (2 * quartic)
    return math.sqrt(last / part.variance), math.log1p(-min(at_start, needed, 1 - 1e-15)) / 2


def _far(part: Tilted, log_level: float) -> float:
    """Returns a frequency beyond which the variation, there or at a multiple, shows ``log |φ| <= log_level``."""
    density = part.mass / np.maximum(part.gaps, 1e-300)
    levels = np.sort(density[part.mass > 1e-6])
    caps = levels[[len(levels) // 2, 7 * len(levels) // 10, 17 * len(levels) // 20, -1], None]
    cut = np.minimum(density, caps)
    above = (1 - caps / np.maximum(density, caps)) @ part.mass
    variation = 1.1 * (np.abs(cut[:, 1:] - cut[:, :-1]).sum(1) + cut[:, 0] + cut[:, -1])
    ends, squared = [math.inf], math.exp(2 * log_level)
    for k in {1, max(int(math.sqrt(0.4 / (1 - squared))), 1)}:  # the second k is nearly the best one
        room = math.sqrt(max(1 - k * k + k * k * squared, 0.0)) - above
        with np.errstate(over="ignore"):  # next to no room shows nothing
            ends += (variation[room > 0] / room[room > 0] / k).tolist()
    return min(ends)


def _grid(start: float, end: float, deviation: float) -> Array:
    """Returns frequencies that grow by a tenth each, and in equal steps once losses turn about once."""
    turn = min(max(2.5 / deviation, start), end)
    steady = math.ceil(math.log(turn / start) / math.log(1.1)), math.ceil((end - turn) * deviation / 0.25)
    if sum(steady) > POINTS:
        raise Unresolved
    growing = start * (turn / start) ** np.linspace(0, 1, steady[0] + 1)
    return np.append(growing, np.linspace(turn, end, steady[1] + 1)[1:])


def _log_size_between(one: Term, part: Tilted, c: float, t: Array, negligible: float) -> Array:
    """Returns a bound on log |φ| between neighboring t, from its values there and its Lipschitz constants."""
    deviation, variance = float(part.mass @ np.abs(part.offsets)), part.variance
    part, slope = refined(one, part, c, float(t[-1]), negligible)
    kept = part.gaps <= slope * part.step * (1 + 1e-9)
    angle, mass = t[:, None] * part.offsets[kept], part.mass[kept]
    size = np.hypot(np.cos(angle) @ mass, np.sin(angle) @ mass) + 1 - float(mass.sum())
    between = (size[:-1] + size[1:]) / 2 + np.minimum(deviation, variance * t[1:]) * np.diff(t) / 2
    return np.log(np.minimum(between, 1.0))
