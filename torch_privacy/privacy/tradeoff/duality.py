# SPDX-License-Identifier: Apache-2.0
"""Converts privacy profiles to trade-off functions, and computes minima and symmetrizations by way of profiles.

``f(α) = sup_ε (1 - δ(ε) - e^ε α)``: every line below the supremum is a valid bound by itself. So the search for the
best line errs on one side only, towards a smaller f.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .base import Array, TradeOff
from .piecewise_linear import hull

Delta = Callable[[Array], float | Array]
LARGEST = 700.0  # |ε| beyond which e^ε overflows
NARROWINGS = 80  # golden sections: from a width of 1400 to 1e-14
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class FromProfile(TradeOff):
    """The trade-off function of a privacy profile, by duality.

    ``f(α) = sup_ε max(1 - δ(ε) - e^ε α, e^-ε (1 - δ'(ε) - α))`` over ε >= 0, with δ' the other direction's profile.

    Args:
        profile: δ at an array of ε >= 0; convex in e^ε, as every profile is.
        reverse: δ' likewise; by default equal to ``profile``, for mechanisms with two equal directions.

    Guarantees:
        - never above the true supremum, and below it by at most 1e-12 for a convex profile.
    Source: Dong, Roth & Su (2022), Proposition 6.

    Example:
        >>> from torch_privacy.privacy.tradeoff import Gaussian
        >>> f = FromProfile(Gaussian(1.0).delta)
        >>> round(float(f(0.05) - Gaussian(1.0)(0.05)), 12)
        0.0
    """

    profile: Delta
    reverse: Delta | None = None

    def at(self, alpha: float | Array) -> float | Array:
        return highest_line(self.delta, self.inverse().delta, np.asarray(alpha, float))

    def delta(self, epsilon: float | Array) -> float | Array:
        epsilon = np.asarray(epsilon, float)
        above, below = np.maximum(epsilon, 0), np.minimum(epsilon, 0)
        reverse = self.profile if self.reverse is None else self.reverse
        dual = -np.expm1(below) + np.exp(below) * reverse(-below)  # δ(-t) = 1 - e^-t + e^-t δ'(t)
        return np.where(epsilon >= 0, self.profile(above), dual)[()]

    def inverse(self) -> "FromProfile":
        return self if self.reverse is None else FromProfile(self.reverse, self.profile)


@dataclass(frozen=True)
class Minimum(TradeOff):
    """``min {f, g}**``: valid when the attacker may face either f or g; its profile is the larger of the two.

    Guarantees:
        - the largest trade-off function nowhere above f and g; rounding puts it below by at most 1e-12, never above.
    """

    f: TradeOff
    g: TradeOff

    def at(self, alpha: float | Array) -> float | Array:
        return highest_line(self.delta, self.inverse().delta, np.asarray(alpha, float))

    def delta(self, epsilon: float | Array) -> float | Array:
        return np.maximum(self.f.delta(epsilon), self.g.delta(epsilon))

    def inverse(self) -> "Minimum":
        return Minimum(self.f.inverse(), self.g.inverse())


def minimum(f: TradeOff, g: TradeOff) -> TradeOff:
    """Returns ``min {f, g}**``, in closed form where both are piecewise linear."""
    if f.corners is None or g.corners is None:
        return Minimum(f, g)
    (a, b), (c, d) = f.corners, g.corners
    alpha, beta = np.concatenate([a, c]), np.concatenate([b, d])
    order = np.lexsort((beta, alpha))
    return hull(alpha[order], beta[order])


def symmetrized(f: TradeOff) -> TradeOff:
    """Returns ``min {f, f⁻¹}**``, which holds in both directions; f itself if it is symmetric.

    ``symmetrized(Subsampled(f, q))`` is the operator C_q of Dong, Roth & Su (2022), Definition 8.
    """
    reverse = f.inverse()
    return f if reverse is f else minimum(f, reverse)


def highest_line(delta: Delta, reverse: Delta, alpha: Array) -> float | Array:
    """Returns ``sup_ε (1 - δ(ε) - e^ε α)`` within [0, 1 - α]: concave in e^ε, so golden sections find it."""

    def height(epsilon: Array) -> Array:
        above, below = np.maximum(epsilon, 0), np.minimum(epsilon, 0)
        right = 1 - delta(above) - np.exp(above) * alpha
        left = np.exp(below) * (1 - reverse(-below) - alpha)
        return np.where(epsilon >= 0, right, left)

    low, high = np.full(alpha.shape, -LARGEST), np.full(alpha.shape, LARGEST)
    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_a, at_b = height(a), height(b)
    best = np.maximum(np.maximum(at_a, at_b), np.maximum(height(np.zeros(alpha.shape)), 0))
    for _ in range(NARROWINGS):
        left = at_a >= at_b  # the supremum is left of b
        low, high = np.where(left, low, a), np.where(left, b, high)
        a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        new = height(np.where(left, a, b))
        at_a, at_b = np.where(left, new, at_b), np.where(left, at_a, new)
        best = np.maximum(best, new)
    best = np.maximum(best, height(high)) if not (alpha > 0).all() else best
    return np.minimum(best, 1 - alpha)[()]
