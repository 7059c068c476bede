# SPDX-License-Identifier: Apache-2.0
"""Computes the tensor product of trade-off functions, enclosed between exact products of piecewise linear ones.

A curve f lies above each of its tangents and below each of its chords. So the tangents at some thresholds bound it
from below, and the chords between the points where they meet bound it from above; both are pairs of discrete
distributions. The distributions of a product are the products of the distributions. Afterwards neighboring outcomes
are merged, once towards each bound.
"""

from collections.abc import Callable
from functools import reduce
from math import hypot

import numpy as np

from ...support.validate import whole
from ..bracket import Array, Bracket
from .base import TradeOff
from .bounds import FURTHEST, highest_of_lines
from .closed_form import IDENTITY, Gaussian
from .piecewise_linear import PiecewiseLinear, hull

LAST_DELTA = 1e-15  # finite δ at the last threshold

Join = Callable[[Array, Array, Array], tuple[Array, Array]]


def tensor(*factors: TradeOff, pieces: int = 512) -> Bracket[TradeOff]:
    """Returns ``f ⊗ g ⊗ ...``, the trade-off function of independent releases together, between two bounds.

    Args:
        factors: any trade-off functions; without any the product is `IDENTITY`.
        pieces: number of outcomes kept after each product; the bracket narrows with its square.

    Returns:
        ``low <= truth <= high`` everywhere; ``low`` is the safe side. They are equal where the product is exact:
        Gaussians among themselves, `IDENTITY` with anything, and piecewise linear functions as long as the pieces
        suffice.

    Guarantees:
        - commutative, associative, `IDENTITY` is the unit: exactly for the truth, so brackets of both sides overlap;
        - up to rounding, some 1e-13 in error rates. Ratios beyond floating point, e^700, count as infinite.

    For many equal steps use `privacy.compose` instead.

    Source: Dong, Roth & Su (2022), Definition 7 and Theorem 4.

    Example:
        >>> tensor(Gaussian(3.0), Gaussian(4.0)).low
        Gaussian(mu=5.0)
        >>> from torch_privacy.privacy.tradeoff import EpsilonDelta
        >>> twice = tensor(EpsilonDelta(1.0), EpsilonDelta(1.0)).low
        >>> round(float(twice.delta(1.0)), 4), round(float(twice.delta(2.0)), 4)
        (0.3378, 0.0)
    """
    whole("tradeoff.tensor", at_least=8, pieces=pieces)
    gaussians = [f for f in factors if isinstance(f, Gaussian)]
    rest = [f for f in factors if not isinstance(f, Gaussian) and f != IDENTITY]
    rest += gaussians if len(gaussians) < 2 else [Gaussian(hypot(*(f.mu for f in gaussians)))]
    if len(rest) <= 1:
        only = rest[0] if rest else IDENTITY
        return Bracket(only, only)
    lows, highs = zip(*(enclosed(f, pieces) for f in rest), strict=True)
    low = reduce(lambda f, g: _product(f, g, pieces, _spread), lows)
    high = reduce(lambda f, g: _product(f, g, pieces, _merged), highs)
    return Bracket(low, high)


def enclosed(f: TradeOff, pieces: int = 512) -> Bracket[PiecewiseLinear]:
    """Returns piecewise linear trade-off functions below and above any f, by tangents and by chords.

    Args:
        f: any trade-off function; a piecewise linear one with no more pieces is returned as it is.
        pieces: number of tangents; for a smooth f the gap shrinks with its square.

    Example:
        >>> low, high = enclosed(Gaussian(1.0))
        >>> low <= Gaussian(1.0) <= high, float(high(0.1) - low(0.1)) < 1e-4
        (True, True)
    """
    if f.corners is not None:
        exact = PiecewiseLinear(*f.corners)
        if len(exact.alpha) <= pieces + 1:
            return Bracket(exact, exact)
    reverse = f.inverse()
    forth, back = _thresholds(f, pieces // 2), _thresholds(reverse, pieces // 2)
    low = highest_of_lines(forth, np.asarray(f.delta(forth)), back, np.asarray(reverse.delta(back)))
    steep = low.alpha <= low.beta
    alpha = np.where(steep, low.alpha, reverse(np.minimum(low.beta, 1)))
    beta = np.where(steep, f(np.minimum(low.alpha, 1)), low.beta)
    return Bracket(low, hull(np.append(alpha, 1.0), np.append(np.minimum(beta, 1 - alpha), 0.0)))


def _thresholds(f: TradeOff, count: int) -> Array:
    """Returns privacy losses from 0 to where δ is negligible, equally spaced at first and then ever wider."""
    trial = np.concatenate([[0.0], np.geomspace(1e-9, FURTHEST, 1000)])
    at_infinity = 1 - float(f(0.0))
    delta = np.asarray(f.delta(trial)) - at_infinity

    def first(least: float) -> int:
        """Returns the index of the first threshold above 0 with finite δ at most ``least``, or of the last one."""
        return min(max(int(np.searchsorted(-delta, -least)), 1), len(trial) - 1)

    before, reach = trial[first(LAST_DELTA) - 1], trial[first(LAST_DELTA)]
    for _ in range(50):  # the distribution may have an atom there
        middle = (before + reach) / 2
        before, reach = (before, middle) if f.delta(middle) - at_infinity <= LAST_DELTA else (middle, reach)
    scale = min(trial[first(delta[0] / 100)], 2.0)
    return scale * np.sinh(np.linspace(0, np.arcsinh(reach / scale), count))


def _product(f: PiecewiseLinear, g: PiecewiseLinear, pieces: int, join: Join) -> PiecewiseLinear:
    """Returns the exact tensor product, then merges neighboring outcomes with ``join``.

    Outcomes possible under one distribution only need no entry: they are what the masses lack to 1.
    """
    q = np.outer(np.diff(f.alpha), np.diff(g.alpha)).ravel()
    p = np.outer(np.diff(f.beta), np.diff(g.beta)).ravel()
    there = (q > 0) & (p > 0)  # the other masses have underflowed
    q, p = q[there], p[there]
    order = np.argsort(np.log(q) - np.log(p), kind="stable")  # the largest privacy loss first
    q, p = q[order], p[order]
    if len(q) > 2 * pieces:
        q, p = join(q, p, _groups(np.log(p) - np.log(q), pieces))
    alpha, beta = np.append(0.0, np.cumsum(q)), np.append(np.cumsum(p[::-1])[::-1], 0.0)
    return hull(alpha, np.clip(beta, 0, np.maximum(1 - alpha, 0)))


def _groups(loss: Array, count: int) -> Array:
    """Returns the first outcome of each group: narrow groups around a loss of 0, ever wider ones away from it."""
    scale = max(min(float(np.quantile(np.abs(loss), 0.5)), 2.0), 1e-300)
    ends = scale * np.sinh(np.linspace(np.arcsinh(loss[0] / scale), np.arcsinh(loss[-1] / scale), count + 1))
    return np.unique(np.append(0, np.searchsorted(-loss, -ends[1:-1])))


def _merged(q: Array, p: Array, starts: Array) -> tuple[Array, Array]:
    """Merges each group into one outcome: chords, an upper bound."""
    return np.add.reduceat(q, starts), np.add.reduceat(p, starts)


def _spread(q: Array, p: Array, starts: Array) -> tuple[Array, Array]:
    """Moves each group's masses to its two ends, keeping both sums: tangents, a lower bound."""
    last = np.append(starts[1:], len(q)) - 1
    q_sum, p_sum = _merged(q, p, starts)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # a group of one ratio; ratios beyond 1e308
        steep, flat = p[starts] / q[starts], p[last] / q[last]
        first = np.clip(np.nan_to_num((p_sum - flat * q_sum) / (steep - flat)), 0, q_sum)
        at_first, at_last = steep * first, flat * q_sum
    rest = np.maximum(p_sum - at_first, 0)
    if not np.isfinite(steep).all():  # such an outcome counts as impossible under Q, without an entry
        lost = np.isinf(steep)
        first, at_first = np.where(lost, 0.0, first), np.where(lost, 0.0, at_first)
        rest = np.where(lost, np.where(np.isinf(flat), 0.0, np.minimum(at_last, p_sum)), rest)
    return np.stack([first, q_sum - first], 1).ravel(), np.stack([at_first, rest], 1).ravel()
