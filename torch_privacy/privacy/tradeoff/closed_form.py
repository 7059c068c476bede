# SPDX-License-Identifier: Apache-2.0
"""Provides the trade-off functions in closed form: Gaussian noise, Laplace noise, (ε, δ)-privacy, no release."""

from dataclasses import dataclass

import numpy as np
from scipy.special import expit, log_ndtr, ndtr, ndtri

from ...support.validate import in_range, non_negative, plain_numbers, positive
from .base import Array, TradeOff

LARGEST = 700.0  # ε beyond which e^ε counts as infinite


@plain_numbers
@dataclass(frozen=True)
class Gaussian(TradeOff):
    """The trade-off function of N(0, 1) against N(μ, 1): the price of one full-batch Gaussian release.

    ``f(α) = Φ(Φ⁻¹(1 - α) - μ)``,  ``δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ)``

    Args:
        mu: sensitivity divided by the noise's standard deviation, above 0.

    Guarantees:
        - self-inverse, in addition to the guarantees of every `TradeOff`; absolute rounding error below 1e-14.
    Source: Dong, Roth & Su (2022), JRSS-B: G_μ; Corollary 1 for δ(ε).

    Example:
        >>> round(float(Gaussian(1.0)(0.05)), 4)
        0.7405
    """

    mu: float

    def __post_init__(self) -> None:
        positive("tradeoff.Gaussian", mu=self.mu)

    def at(self, alpha: float | Array) -> float | Array:
        return ndtr(-ndtri(alpha) - self.mu)  # -Φ⁻¹(α) = Φ⁻¹(1 - α), without losing small α

    def delta(self, epsilon: float | Array) -> float | Array:
        a, b = self.mu / 2 - epsilon / self.mu, -self.mu / 2 - epsilon / self.mu
        return ndtr(a) - np.exp(np.minimum(epsilon + log_ndtr(b), 0.0))  # above 0 by rounding only

    def inverse(self) -> "Gaussian":
        return self


@plain_numbers
@dataclass(frozen=True)
class EpsilonDelta(TradeOff):
    """The trade-off function of (ε, δ)-privacy: the largest one below those of all (ε, δ)-private mechanisms.

    ``f(α) = max(0, 1 - δ - e^ε α, e^-ε (1 - δ - α))``

    Args:
        epsilon: 0 or above.
        budget: δ, in [0, 1).

    Guarantees:
        - self-inverse; ``delta(epsilon) = budget``; tight: n-fold randomized response attains it for δ = 0.
    Source: Wasserman & Zhou (2010), JASA; Dong, Roth & Su (2022), equation 6.

    Example:
        >>> round(float(EpsilonDelta(1.0, 1e-5)(0.05)), 4)
        0.8641
    """

    epsilon: float
    budget: float = 0.0

    def __post_init__(self) -> None:
        non_negative("tradeoff.EpsilonDelta", epsilon=self.epsilon, budget=self.budget)
        in_range("tradeoff.EpsilonDelta", 0, 1, one_minus_budget=1 - self.budget)

    def at(self, alpha: float | Array) -> float | Array:
        rest, x = 1 - self.budget, np.exp(min(self.epsilon, LARGEST))
        alpha = np.asarray(alpha, float)[()]
        return np.maximum(np.maximum(rest - x * alpha, (rest - alpha) / x), 0)

    def delta(self, epsilon: float | Array) -> float | Array:
        # Masses of the pair at the losses ∞, ε, -ε: δ, (1 - δ) / (1 + e^-ε), (1 - δ) / (1 + e^ε).
        rest = 1 - self.budget
        high, low = rest * expit(self.epsilon), rest * expit(-self.epsilon)
        epsilon = np.asarray(epsilon, float)[()]
        gain = high * np.maximum(-np.expm1(np.minimum(epsilon - self.epsilon, 0)), 0)
        return self.budget + gain + low * np.maximum(-np.expm1(np.minimum(epsilon + self.epsilon, 0)), 0)

    def inverse(self) -> "EpsilonDelta":
        return self

    @property
    def corners(self) -> tuple[Array, Array]:
        rest = 1 - self.budget
        middle = rest * expit(-min(self.epsilon, LARGEST))
        return np.array([0.0, middle, rest]), np.array([rest, middle, 0.0])


IDENTITY = EpsilonDelta(0.0)
"""``Id(α) = 1 - α``: blind guessing, perfect privacy; the unit of the tensor product."""


@plain_numbers
@dataclass(frozen=True)
class Laplace(TradeOff):
    """The trade-off function of Laplace noise: a number of sensitivity 1 released with noise of scale 1/ε.

    ``f(α) = 1 - e^ε α`` up to α = e^-ε/2, ``e^-ε / (4α)`` up to 1/2, ``e^-ε (1 - α)`` beyond;
    ``δ(t) = 1 - e^((t - ε)/2)`` for t between -ε and ε.

    Args:
        epsilon: sensitivity divided by the noise's scale, above 0.

    Guarantees:
        - self-inverse; nowhere below ``EpsilonDelta(epsilon)``, with equality at both ends.
    Source: Dong, Roth & Su (2022), Proposition A.6.

    Example:
        >>> float(Laplace(1.0)(0.5)), float(EpsilonDelta(1.0)(0.5))
        (0.18393972058572117, 0.18393972058572117)
    """

    epsilon: float

    def __post_init__(self) -> None:
        positive("tradeoff.Laplace", epsilon=self.epsilon)

    def at(self, alpha: float | Array) -> float | Array:
        alpha, low = np.asarray(alpha, float)[()], np.exp(-min(self.epsilon, LARGEST))
        middle = low / (4 * np.clip(alpha, low / 2, 0.5))
        return np.where(alpha < low / 2, 1 - alpha / low, np.where(alpha > 0.5, low * (1 - alpha), middle))[()]

    def delta(self, epsilon: float | Array) -> float | Array:
        epsilon = np.asarray(epsilon, float)[()]
        inside = -np.expm1((np.minimum(epsilon, self.epsilon) - self.epsilon) / 2)
        return np.where(epsilon < -self.epsilon, -np.expm1(np.minimum(epsilon, 0)), inside)[()]

    def inverse(self) -> "Laplace":
        return self
