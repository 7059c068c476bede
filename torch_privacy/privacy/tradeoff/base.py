# SPDX-License-Identifier: Apache-2.0
"""Provides the abstract trade-off function, and the comparison of two of them."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from ..bracket import Array as Array

ROUNDING = 1e-12  # trade-off functions with smaller differences in error rates count as equal


class TradeOff(ABC):
    """The best test of any attacker who must distinguish two neighboring data sets: ``f = T(Q, P)``.

    ``f(α) = min {P(accept Q) : tests with Q(reject Q) <= α}``, with Q the distribution without the example and P the
    one with it: the smallest rate of missed members among all tests with a rate α of false alarms.

    Guarantees of every trade-off function f:
        - convex, continuous on (0, 1], non-increasing, and at most 1 - α, the value of blind guessing;
        - ``delta(epsilon) = 1 + f*(-e^epsilon)``, the privacy profile;
        - ``inverse()`` is the same pair in the other order, ``T(P, Q)``; its inverse is f.
    Source: Dong, Roth & Su (2022), JRSS-B, Propositions 1 and 6.
    """

    def __call__(self, alpha: float | Array) -> float | Array:
        """Returns the smallest type II error at type I error ``alpha``, a number or an array.

        Raises:
            ValueError: if some alpha lies outside [0, 1].
        """
        return self.at(rates("tradeoff", alpha))

    @abstractmethod
    def at(self, alpha: float | Array) -> float | Array:
        """Returns the same for an ``alpha`` already checked; every trade-off function implements this."""

    @abstractmethod
    def delta(self, epsilon: float | Array) -> float | Array:
        """Returns the smallest δ of (ε, δ)-privacy in this direction, ``sup P(A) - e^ε Q(A)``, for any real ε."""

    @abstractmethod
    def inverse(self) -> "TradeOff":
        """Returns the other direction: ``f⁻¹(α) = inf {t : f(t) <= α}``."""

    @property
    def corners(self) -> tuple[Array, Array] | None:
        """Points (α, f(α)) between which a piecewise linear f is straight, α rising; None for any other f."""
        return None

    def __le__(self, other: "TradeOff") -> bool:
        """True if ``f(α) <= g(α)`` for all α: at least as easy to attack as ``other``; see `compare`."""
        return compare(self, other).holds


def rates(where: str, alpha: float | Array) -> float | Array:
    """Returns ``alpha`` clipped to [0, 1]; raises a ``ValueError`` if it lies outside by more than rounding."""
    values = np.asarray(alpha, float)
    outside = values[~((values >= -ROUNDING) & (values <= 1 + ROUNDING))]
    if outside.size:
        raise ValueError(f"{where}: alpha={float(outside.flat[0])!r} must lie in [0, 1]. It is a rate of false alarms.")
    return np.clip(values, 0, 1)[()]


class Comparison(NamedTuple):
    """The answer of `compare`: does ``f <= g`` hold everywhere?"""

    holds: bool
    certified: bool
    """True if the answer is for every α, up to rounding; else it is for the thresholds of a grid only."""

    excess: float
    """The largest excess of f over g that was found, in error rates; 0 if there is none."""


def compare(f: TradeOff, g: TradeOff) -> Comparison:
    """Tests whether ``f(α) <= g(α)`` for all α: a mechanism with f is then at least as easy to attack as one with g.

    The answer is certified if f or g is piecewise linear (`EpsilonDelta`, `PiecewiseLinear`): between two corners of g,
    f - g is convex, so its maximum is at a corner; between two slopes of f the same holds for the profiles, as
    functions of e^ε. Otherwise 401 thresholds in each direction are tried, |ε| up to 100. Differences below 1e-12 are
    ignored.

    Example:
        >>> from torch_privacy.privacy.tradeoff import EpsilonDelta, Gaussian
        >>> compare(EpsilonDelta(5.0, 1e-5), Gaussian(1.0))
        Comparison(holds=True, certified=True, excess=0.0)
        >>> Gaussian(2.0) <= Gaussian(1.0), Gaussian(1.0) <= Gaussian(2.0)
        (True, False)
    """
    if g.corners is not None:
        alpha, beta = g.corners
        excess = np.asarray(f(alpha)) - beta
    elif f.corners is not None:
        excess = np.concatenate([_excess_of_delta(*pair) for pair in _both_directions(f, g)])
    else:
        epsilon = np.concatenate([[0.0], np.geomspace(1e-3, 100, 400)])
        excess = np.concatenate(
            [np.asarray(b.delta(epsilon)) - np.asarray(a.delta(epsilon)) for a, b in _both_directions(f, g)]
        )
    largest = float(excess.max())
    certified = f.corners is not None or g.corners is not None
    return Comparison(largest <= ROUNDING, certified, largest if largest > ROUNDING else 0.0)


def _both_directions(f: TradeOff, g: TradeOff) -> tuple[tuple[TradeOff, TradeOff], tuple[TradeOff, TradeOff]]:
    return (f, g), (f.inverse(), g.inverse())


def _excess_of_delta(f: TradeOff, g: TradeOff) -> Array:
    """Returns the excess of g's δ over that of a piecewise linear f at the kinks of f's δ, ε >= 0, and at infinity."""
    assert f.corners is not None
    alpha, beta = f.corners
    with np.errstate(divide="ignore"):
        slopes = np.log(-np.diff(beta)) - np.log(np.diff(alpha))
    epsilon = np.append(slopes[np.isfinite(slopes) & (slopes > 0)], 0.0)
    at_infinity = np.asarray(f(0.0)) - np.asarray(g(0.0))
    return np.append(np.asarray(g.delta(epsilon)) - np.asarray(f.delta(epsilon)), at_infinity)
