# SPDX-License-Identifier: Apache-2.0
"""Trade-off functions: the smallest type II error of any test at a given type I error (f-differential privacy)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr, ndtri

from .._check import positive

Array = NDArray[Any]


class TradeOff(ABC):
    """How well any attacker can tell two neighboring data sets apart.

    Guarantees of every trade-off function f:
        - convex, continuous, non-increasing on [0, 1], and at most 1 - α, the value of blind guessing;
        - ``delta(epsilon) = 1 + f*(-e^epsilon)``, the same information as a privacy profile.
    Source: Dong, Roth & Su (2022), JRSS-B, Propositions 1 and 6.
    """

    @abstractmethod
    def __call__(self, alpha: float | Array) -> float | Array:
        """Smallest type II error at type I error ``alpha`` in [0, 1]."""

    @abstractmethod
    def delta(self, epsilon: float | Array) -> float | Array:
        """Smallest δ such that the mechanism is (ε, δ)-private, at any real ε."""


@dataclass(frozen=True)
class Gaussian(TradeOff):
    """Trade-off function of N(0, 1) against N(μ, 1): the price of one full-batch Gaussian release.

    ``f(α) = Φ(Φ⁻¹(1 - α) - μ)``,  ``δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ)``

    Args:
        mu: sensitivity divided by the noise's standard deviation, above 0.

    Guarantees:
        - self-inverse, besides what every `TradeOff` promises; rounding error below 1e-14, absolute.
    Source: Dong, Roth & Su (2022), JRSS-B: G_μ; Corollary 1 for δ(ε).

    Example:
        >>> round(float(Gaussian(1.0)(0.05)), 4)
        0.7405
    """

    mu: float

    def __post_init__(self) -> None:
        positive("tradeoff.Gaussian", mu=self.mu)

    def __call__(self, alpha: float | Array) -> float | Array:
        return ndtr(-ndtri(alpha) - self.mu)  # -Φ⁻¹(α) = Φ⁻¹(1 - α), without losing small α

    def delta(self, epsilon: float | Array) -> float | Array:
        a, b = self.mu / 2 - epsilon / self.mu, -self.mu / 2 - epsilon / self.mu
        return ndtr(a) - np.exp(epsilon + log_ndtr(b))
