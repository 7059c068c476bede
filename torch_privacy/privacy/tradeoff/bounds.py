# SPDX-License-Identifier: Apache-2.0
"""Encloses trade-off functions between certified bounds, from profiles with known bounds only."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from ..bracket import Array, Bracket
from .piecewise_linear import PiecewiseLinear, hull

FURTHEST = 600.0  # largest threshold
NEGLIGIBLE, TYPICAL = 1e-12, 1e-3  # δ at the last threshold, and δ down to which thresholds are about equally dense
LARGER = (1e-9, 1e-6, 1e-4, 1e-2, 0.1, 0.5, 0.9)  # δ to try where some losses are infinite
TO_TWENTY = tuple(np.linspace(0, 20, 257).tolist())


class ProfileLike(Protocol):
    """The part of ``privacy.Profile`` that `of_profile` uses."""

    @property
    def directions(self) -> Mapping[str, Any]:
        """Curves with ``delta(epsilon)`` as brackets, under "remove" and "add", or "both" if they are equal."""
        ...

    def epsilon_high(self, delta: float) -> float:
        """Returns an upper bound on the larger ε of both directions."""
        ...


def of_profile(profile: ProfileLike, pieces: int = 256) -> dict[str, Bracket[PiecewiseLinear]]:
    """Returns the trade-off functions of a composition, each between certified bounds.

    Args:
        profile: a profile, as `privacy.compose` returns it.
        pieces: number of thresholds at which δ is computed in each direction.

    Returns:
        "symmetrized", which holds in both directions and is the one to report; and "remove" (without the example
        against with it) and "add", unless they are equal or only their maximum is known.

    Example:
        >>> from torch_privacy import privacy
        >>> curves = of_profile(privacy.compose([(privacy.SubsampledGaussian(1.0, 0.01), 1000)]))
        >>> [round(float(curves[name].low(0.01)), 3) for name in ("remove", "add", "symmetrized")]
        [0.971, 0.974, 0.971]
    """
    furthest = min(max(_first_finite(profile, NEGLIGIBLE), 1e-6), FURTHEST)
    scale = min(max(_first_finite(profile, TYPICAL), 1e-3 * furthest), furthest)  # wider steps beyond, for heavy tails
    thresholds = scale * np.sinh(np.linspace(0, np.arcsinh(furthest / scale), pieces + 1))
    bounds = {name: _bounds_of_delta(curve.delta, thresholds) for name, curve in profile.directions.items()}
    either = np.maximum.reduce(list(bounds.values()))
    curves = {"symmetrized": _enclosed(thresholds, either, either)}
    if len(bounds) == 2:
        remove, add = bounds["remove"], bounds["add"]
        curves |= {"remove": _enclosed(thresholds, remove, add), "add": _enclosed(thresholds, add, remove)}
    return curves


def _first_finite(profile: ProfileLike, delta: float) -> float:
    """Returns the upper bound on ε at δ, or at the next larger one of a few at which it is finite; else infinity."""
    for larger in (delta, *(one for one in LARGER if one > delta)):
        high = profile.epsilon_high(larger)
        if np.isfinite(high):
            return high
    return np.inf


def from_bounds(
    profile: Callable[[float], Bracket[float]],
    reverse: Callable[[float], Bracket[float]] | None = None,
    thresholds: Sequence[float] | Array = TO_TWENTY,
) -> Bracket[PiecewiseLinear]:
    """Returns the trade-off function of a profile with known bounds, such as `privacy.Profile.delta`.

    ``low`` is the highest of the lines ``1 - δ - e^ε α`` with the upper bounds of δ. ``high`` is the trade-off
    function of a convex function below δ: the lines through a lower bound at a threshold and an upper bound one
    threshold further away.

    Args:
        profile: bracket of δ at any ε >= 0, in the direction of this trade-off function.
        reverse: the same in the other direction; by default equal to ``profile``.
        thresholds: ε at which δ is computed, ascending from 0; δ at the last one should be negligible.

    Guarantees:
        - ``low <= f <= high`` everywhere, also between the thresholds.

    Example:
        >>> from torch_privacy import privacy
        >>> low, high = from_bounds(privacy.compose([(privacy.Gaussian(1.0), 1)]).delta)
        >>> low <= high, round(float(low(0.1)), 2), round(float(privacy.tradeoff.Gaussian(1.0)(0.1)), 2)
        (True, 0.61, 0.61)
    """
    epsilon = np.asarray(thresholds, float)
    if epsilon.ndim != 1 or len(epsilon) < 3 or epsilon[0] != 0 or not (np.diff(epsilon) > 0).all():
        raise ValueError("tradeoff.from_bounds: thresholds must be three or more ascending numbers that start at 0.")
    bounds = _bounds_of_delta(profile, epsilon)
    return _enclosed(epsilon, bounds, bounds if reverse is None else _bounds_of_delta(reverse, epsilon))


def _bounds_of_delta(profile: Callable[[float], Bracket[float]], thresholds: Array) -> Array:
    """Returns lower and upper bounds of δ, one row each."""
    return np.array([profile(value) for value in thresholds.tolist()]).T


def _enclosed(epsilon: Array, bounds: Array, reverse: Array) -> Bracket[PiecewiseLinear]:
    """Returns the bracket of `from_bounds` from the bounds at the thresholds in both directions."""
    (low, high), (other_low, other_high) = bounds, reverse
    below = highest_of_lines(epsilon, high, epsilon, other_high)
    corners, other_corners = _under(epsilon, low, high, other_high), _under(epsilon, other_low, other_high, high)
    return Bracket(below, highest_of_lines(*corners, *other_corners))


def highest_of_lines(forth: Array, delta: Array, back: Array, reverse: Array) -> PiecewiseLinear:
    """Returns the maximum of 0 and the lines ``β = 1 - δ - e^ε α`` and ``α = 1 - δ' - e^ε' β``, thresholds >= 0.

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
    return hull(alpha, np.clip(beta, 0, np.maximum(1 - alpha, 0)))


def _meet(a: Array, b: Array, c: Array, i: int, k: int) -> tuple[float, float]:
    """Returns where two lines cross; parallel ones at (∞, -∞) if the later line is lower, else at (-∞, ∞)."""
    with np.errstate(over="ignore"):
        determinant = a[i] * b[k] - a[k] * b[i]
        if determinant == 0:
            return (-np.inf, np.inf) if c[k] * b[i] >= c[i] * b[k] else (np.inf, -np.inf)
        if a[i] >= b[i]:  # computed from the line, so that an error of alpha moves along it
            alpha = (c[i] * b[k] - c[k] * b[i]) / determinant
            return alpha, (c[i] - a[i] * alpha) / b[i]
        beta = (a[i] * c[k] - a[k] * c[i]) / determinant
        return (c[i] - b[i] * beta) / a[i], beta


def _under(epsilon: Array, low: Array, high: Array, other_high: Array) -> tuple[Array, Array]:
    """Returns corners (ε, δ) of a function that is convex in x = e^ε and lies below every profile within the bounds.

    On [x_i, x_i+1] it is the higher of the line through (x_i-1, high), (x_i, low) and the one through (x_i+1, low),
    (x_i+2, high). Before the first point duality gives ``δ(1/x) = 1 - 1/x + δ'(x)/x``; beyond the last, δ >= 0.
    """
    x = np.exp(np.minimum(epsilon, FURTHEST))
    width, before = np.diff(x), 1 / x[1]
    high_before = 1 - before + before * other_high[1]
    falling = (low[:-1] - np.append(high_before, high[:-2])) / np.diff(np.append(before, x[:-1]))
    rising = np.minimum(np.append((high[2:] - low[1:-1]) / width[1:], 0.0), 0.0)  # δ falls, so no line needs to rise
    with np.errstate(invalid="ignore", divide="ignore"):  # parallel lines meet anywhere
        meet = (low[1:] - rising * width - low[:-1]) / (falling - rising)
    meet = np.clip(np.nan_to_num(meet), 0, width)
    corner = low[1:] - rising * (width - meet)
    points = np.concatenate([x, x[:-1] + meet])
    order = np.argsort(points, kind="stable")
    return np.log(points[order]), np.concatenate([np.append(low[:-1], 0.0), corner])[order]
