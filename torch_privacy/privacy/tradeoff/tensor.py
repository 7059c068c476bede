# SPDX-License-Identifier: Apache-2.0
"""Tensor product of any trade-off functions, between two piecewise linear ones whose product is exact.

A curve f lies above each of its tangents and below each of its chords. So the tangents at some thresholds bound it
from below, the chords between the points where they meet from above, and both are pairs of discrete laws. The laws of
a product are the products of the laws. Afterwards neighboring outcomes are joined, again once to each side.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import pairwise
from math import hypot

import numpy as np

from ..._check import whole
from ..bracket import Array, Bracket
from .base import TradeOff
from .closed import IDENTITY, Gaussian
from .pieces import PiecewiseLinear, hull

FURTHEST = 600.0  # largest threshold
TELLING = 1e-15  # δ beyond the last threshold
TO_TWENTY = tuple(np.linspace(0, 20, 257).tolist())

Join = Callable[[Array, Array, Array], tuple[Array, Array]]


def tensor(*factors: TradeOff, pieces: int = 512) -> Bracket[TradeOff]:
    """``f ⊗ g ⊗ ...``, the price of independent releases together; ``low <= truth <= high`` everywhere.

    Args:
        factors: any trade-off functions; none at all gives `IDENTITY`.
        pieces: outcomes that a law is cut to after each product; the bracket narrows with their square.

    Returns:
        ``low``, on the safe side, and ``high``; equal where the product is exact: Gaussians among themselves,
        `IDENTITY` with anything, and piecewise linear functions as long as the pieces suffice.

    Guarantees:
        - commutative, associative, `IDENTITY` is the unit: exactly for the truth, so brackets of both sides overlap;
        - up to rounding, some 1e-13 in error rates.

    For many equal steps see `privacy.compose`, whose engines are made for them.

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
    """Piecewise linear trade-off functions below and above any f, by tangents and by chords.

    Args:
        f: any trade-off function; a piecewise linear one with no more pieces is returned as it is.
        pieces: how many tangents; for a smooth f the gap shrinks with their square.

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
    return Bracket(low, hull(alpha, np.minimum(beta, 1 - alpha)))


def from_bounds(
    profile: Callable[[float], Bracket[float]],
    reverse: Callable[[float], Bracket[float]] | None = None,
    thresholds: Sequence[float] | Array = TO_TWENTY,
) -> Bracket[PiecewiseLinear]:
    """The trade-off function of a profile of which bounds are known, such as `privacy.Profile.delta`.

    ``low`` is the highest of the lines ``1 - δ - e^ε α`` with the upper bounds of δ. ``high`` is the trade-off
    function of a convex function below δ: the lines through a lower bound at a threshold and an upper bound one
    threshold further away.

    Args:
        profile: bracket of δ at any ε >= 0, in the direction of this trade-off function.
        reverse: the other direction's; by default the same, for the price in whichever direction is dearer.
        thresholds: ε at which to ask, ascending from 0; the last one should have a δ that no longer matters.

    Guarantees:
        - ``low <= f <= high`` everywhere, whatever lies between the thresholds.

    Example:
        >>> from torch_privacy import privacy
        >>> steps = privacy.compose([(privacy.SubsampledGaussian(1.0, 0.01), 1000)])
        >>> low, high = from_bounds(steps.delta)
        >>> low <= high, round(float(low(0.1)), 3)
        (True, 0.805)
    """
    epsilon = np.asarray(thresholds, float)
    if epsilon.ndim != 1 or len(epsilon) < 3 or epsilon[0] != 0 or not (np.diff(epsilon) > 0).all():
        raise ValueError("tradeoff.from_bounds: thresholds must be at least three numbers that rise from 0.")
    low, high = np.array([profile(value) for value in epsilon.tolist()]).T
    other_low, other_high = low, high
    if reverse is not None:
        other_low, other_high = np.array([reverse(value) for value in epsilon.tolist()]).T
    below = highest_of_lines(epsilon, high, epsilon, other_high)
    corners, other_corners = _under(epsilon, low, high, other_high), _under(epsilon, other_low, other_high, high)
    return Bracket(below, highest_of_lines(*corners, *other_corners))


def highest_of_lines(forth: Array, delta: Array, back: Array, reverse: Array) -> PiecewiseLinear:
    """The maximum of 0 and the lines ``β = 1 - δ - e^ε α`` and ``α = 1 - δ' - e^ε' β``, thresholds from 0 on.

    Written as ``a α + b β = c`` with a and b at most as large as e^ε on their own side, no digit is lost.
    """
    a = np.concatenate([np.exp(forth)[::-1], np.ones(len(back))])
    b = np.concatenate([np.ones(len(forth)), np.exp(back)])
    c = np.concatenate([1 - delta[::-1], 1 - reverse])
    kept: list[int] = []
    for line in range(len(a)):  # from the steepest to the flattest
        while kept and _meet(a, b, c, kept[-1], line)[0] <= (_meet(a, b, c, kept[-2], kept[-1])[0] if kept[1:] else 0):
            kept.pop()
        kept.append(line)
    while len(kept) > 1 and _meet(a, b, c, kept[-2], kept[-1])[1] <= 0:  # below 0 from the start
        kept.pop()
    first, last = kept[0], kept[-1]
    inner = [_meet(a, b, c, *pair) for pair in pairwise(kept)]
    alpha, beta = np.array([(0.0, c[first] / b[first]), *inner, (c[last] / a[last], 0.0)]).T
    return hull(alpha, np.minimum(beta, 1 - alpha))


def _meet(a: Array, b: Array, c: Array, i: int, k: int) -> tuple[float, float]:
    """Where two lines cross; at (∞, -∞) for the same slope if the later line is lower, else at (-∞, ∞)."""
    with np.errstate(over="ignore"):
        determinant = a[i] * b[k] - a[k] * b[i]
        if determinant == 0:
            return (-np.inf, np.inf) if c[k] * b[i] >= c[i] * b[k] else (np.inf, -np.inf)
        if a[i] >= b[i]:  # the second coordinate from the line, so that an error of the first moves along it
            alpha = (c[i] * b[k] - c[k] * b[i]) / determinant
            return alpha, (c[i] - a[i] * alpha) / b[i]
        beta = (a[i] * c[k] - a[k] * c[i]) / determinant
        return (c[i] - b[i] * beta) / a[i], beta


def _under(epsilon: Array, low: Array, high: Array, other_high: Array) -> tuple[Array, Array]:
    """Corners (ε, δ) of a function that is convex in x = e^ε and lies below every profile within the bounds.

    On [x_i, x_i+1] it is the higher of the line through (x_i-1, high), (x_i, low) and the one through (x_i+1, low),
    (x_i+2, high). Before the first point duality gives ``δ(1/x) = 1 - 1/x + δ'(x)/x``; beyond the last, δ >= 0.
    """
    x = np.exp(np.minimum(epsilon, FURTHEST))
    width, before = np.diff(x), 1 / x[1]
    high_before = 1 - before + before * other_high[1]
    falling = (low[:-1] - np.append(high_before, high[:-2])) / np.diff(np.append(before, x[:-1]))
    rising = np.minimum(np.append((high[2:] - low[1:-1]) / width[1:], 0.0), 0.0)  # δ falls, so no line need rise
    with np.errstate(invalid="ignore", divide="ignore"):  # parallel lines meet anywhere
        meet = (low[1:] - rising * width - low[:-1]) / (falling - rising)
    meet = np.clip(np.nan_to_num(meet), 0, width)
    corner = low[1:] - rising * (width - meet)
    points = np.concatenate([x, x[:-1] + meet])
    order = np.argsort(points, kind="stable")
    return np.log(points[order]), np.concatenate([np.append(low[:-1], 0.0), corner])[order]


def _thresholds(f: TradeOff, count: int) -> Array:
    """Privacy losses from 0 to where δ has come to its end, equally spaced at first and then ever wider."""
    trial = np.concatenate([[0.0], np.geomspace(1e-9, FURTHEST, 1000)])
    at_infinity = 1 - float(f(0.0))
    delta = np.asarray(f.delta(trial)) - at_infinity

    def first(least: float) -> int:
        """Index of the first threshold above 0 with no more than so much finite δ, or of the last threshold."""
        return min(max(int(np.searchsorted(-delta, -least)), 1), len(trial) - 1)

    before, reach = trial[first(TELLING) - 1], trial[first(TELLING)]
    for _ in range(50):  # the law may have an atom there
        middle = (before + reach) / 2
        before, reach = (before, middle) if f.delta(middle) - at_infinity <= TELLING else (middle, reach)
    scale = min(trial[first(delta[0] / 100)], 2.0)
    return scale * np.sinh(np.linspace(0, np.arcsinh(reach / scale), count))


def _product(f: PiecewiseLinear, g: PiecewiseLinear, pieces: int, join: Join) -> PiecewiseLinear:
    """The exact tensor product, then cut to fewer outcomes by a way of joining neighbors.

    What only one of a pair of laws has needs no outcome: it is what is missing from the masses' sum.
    """
    q = np.outer(np.diff(f.alpha), np.diff(g.alpha)).ravel()
    p = np.outer(np.diff(f.beta), np.diff(g.beta)).ravel()
    there = (q > 0) & (p > 0)  # the rest has underflowed
    q, p = q[there], p[there]
    order = np.argsort(np.log(q) - np.log(p), kind="stable")  # the most telling outcome first
    q, p = q[order], p[order]
    if len(q) > 2 * pieces:
        q, p = join(q, p, _groups(np.log(p) - np.log(q), pieces))
    alpha, beta = np.append(0.0, np.cumsum(q)), np.append(np.cumsum(p[::-1])[::-1], 0.0)
    return hull(alpha, np.clip(beta, 0, np.maximum(1 - alpha, 0)))


def _groups(loss: Array, count: int) -> Array:
    """First outcome of each group: narrow groups about a loss of 0, ever wider ones away from it."""
    scale = max(min(float(np.quantile(np.abs(loss), 0.5)), 2.0), 1e-300)
    ends = scale * np.sinh(np.linspace(np.arcsinh(loss[0] / scale), np.arcsinh(loss[-1] / scale), count + 1))
    return np.unique(np.append(0, np.searchsorted(-loss, -ends[1:-1])))


def _merged(q: Array, p: Array, starts: Array) -> tuple[Array, Array]:
    """Each group as one outcome: chords, nowhere below."""
    return np.add.reduceat(q, starts), np.add.reduceat(p, starts)


def _spread(q: Array, p: Array, starts: Array) -> tuple[Array, Array]:
    """Each group's masses moved to its two ends, keeping both sums: tangents, nowhere above."""
    last = np.append(starts[1:], len(q)) - 1
    steep, flat = p[starts] / q[starts], p[last] / q[last]
    q_sum, p_sum = _merged(q, p, starts)
    with np.errstate(invalid="ignore", divide="ignore"):  # a group of one ratio
        first = np.clip(np.nan_to_num((p_sum - flat * q_sum) / (steep - flat)), 0, q_sum)
    ends = np.stack([first, q_sum - first], 1), np.stack([steep * first, np.maximum(p_sum - steep * first, 0)], 1)
    return ends[0].ravel(), ends[1].ravel()
