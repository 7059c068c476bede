# SPDX-License-Identifier: Apache-2.0
"""What every trade-off function answers, and how two of them are compared."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from ..bracket import Array as Array

ROUNDING = 1e-12  # difference in error rates below which two trade-off functions count as equal


class TradeOff(ABC):
    """How well any attacker can tell two neighboring data sets apart: ``f = T(Q, P)``.

    ``f(α) = min {P(accept Q) : tests with Q(reject Q) <= α}``: with Q the law without the example and P the one with
    it, the smallest rate of members missed among all tests with a rate α of false alarms.

    Guarantees of every trade-off function f:
        - convex, continuous on (0, 1], non-increasing, and at most 1 - α, the value of blind guessing;
        - ``delta(epsilon) = 1 + f*(-e^epsilon)``, the same information as a privacy profile;
        - ``inverse()`` is the same pair in the other order, ``T(P, Q)``; its inverse is f.
    Source: Dong, Roth & Su (2022), JRSS-B, Propositions 1 and 6.
    """

    def __call__(self, alpha: float | Array) -> float | Array:
        """Smallest type II error at type I error ``alpha``, a number or an array.

        Raises:
            ValueError: some alpha lies outside [0, 1].
        """
        return self.at(rates("tradeoff", alpha))

    @abstractmethod
    def at(self, alpha: float | Array) -> float | Array:
        """The same for an ``alpha`` that certainly lies in [0, 1]: what a new trade-off function defines."""

    @abstractmethod
    def delta(self, epsilon: float | Array) -> float | Array:
        """Smallest δ at which it is (ε, δ)-private in this direction: ``sup P(A) - e^ε Q(A)``. Any real ε."""

    @abstractmethod
    def inverse(self) -> "TradeOff":
        """The other direction: ``f⁻¹(α) = inf {t : f(t) <= α}``."""

    @property
    def corners(self) -> tuple[Array, Array] | None:
        """Points (α, f(α)) between which a piecewise linear f is straight, α rising; None for any other f."""
        return None

    def __le__(self, other: "TradeOff") -> bool:
        """No test is harder than under ``other``: ``f(α) <= g(α)`` for all α, see `compare`."""
        return compare(self, other).holds


def rates(where: str, alpha: float | Array) -> float | Array:
    """``alpha`` if every one is a rate; what exceeds [0, 1] by rounding is cut off."""
    values = np.asarray(alpha, float)
    outside = values[~((values >= -ROUNDING) & (values <= 1 + ROUNDING))]
    if outside.size:
        raise ValueError(f"{where}: alpha={float(outside.flat[0])!r} must lie in [0, 1]. It is a rate of false alarms.")
    return np.clip(values, 0, 1)[()]


class Comparison(NamedTuple):
    """Whether ``f <= g`` everywhere."""

    holds: bool
    certified: bool
    """The answer is for every α, up to rounding; else only for the thresholds of a grid."""

    excess: float
    """The largest amount found by which f lies above g, in error rates; 0 if none was found."""


def compare(f: TradeOff, g: TradeOff) -> Comparison:
    """Whether ``f(α) <= g(α)`` for all α: a mechanism with f is at least as easy to attack as one with g.

    Certified where f or g is piecewise linear (`EpsilonDelta`, `PiecewiseLinear`): between two corners of g, f - g is
    convex, so its maximum is at a corner; between two slopes of f the same holds for the profiles, as functions of
    e^ε. Else 401 thresholds in each direction are tried, |ε| up to 100. Differences below 1e-12 count as none.

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
    """By how much g's δ exceeds that of the piecewise linear f where f's δ has its kinks, ε >= 0, and at infinity."""
    assert f.corners is not None
    alpha, beta = f.corners
    with np.errstate(divide="ignore"):
        slopes = np.log(-np.diff(beta)) - np.log(np.diff(alpha))
    epsilon = np.append(slopes[np.isfinite(slopes) & (slopes > 0)], 0.0)
    at_infinity = np.asarray(f(0.0)) - np.asarray(g(0.0))
    return np.append(np.asarray(g.delta(epsilon)) - np.asarray(f.delta(epsilon)), at_infinity)
