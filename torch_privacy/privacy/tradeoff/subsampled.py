# SPDX-License-Identifier: Apache-2.0
"""Applies Poisson subsampling to any trade-off function: the example joins the sample with probability q.

With f = T(Q, P), *remove* is ``T(Q, (1 - q) Q + q P) = q f + (1 - q) Id`` and *add* is its inverse. Neither bounds the
other; `symmetrized` of either one holds in both directions.
"""

from dataclasses import dataclass

import numpy as np

from ...support.validate import in_range, plain_numbers
from .base import Array, TradeOff
from .duality import highest_line
from .piecewise_linear import hull


@plain_numbers
@dataclass(frozen=True)
class Subsampled(TradeOff):
    """``f_q = q f + (1 - q) Id``, the mixture with blind guessing: the *remove* direction.

    ``δ(ε) = q δ_f(log(1 + (e^ε - 1) / q))`` above ``ε = log(1 - q)``, and ``1 - e^ε`` below.

    Args:
        f: trade-off function without sampling.
        probability: q, in (0, 1].

    Guarantees:
        - sampling twice is sampling once with the product of the probabilities; nowhere below f.
    Source: Dong, Roth & Su (2022), Definition 8; Balle, Barthe & Gaboardi (2018), Theorem 2 for δ.
    """

    f: TradeOff
    probability: float

    def __post_init__(self) -> None:
        in_range("tradeoff.Subsampled", 0, 1, probability=self.probability)

    def at(self, alpha: float | Array) -> float | Array:
        return self.probability * self.f(alpha) + (1 - self.probability) * (1 - alpha)

    def delta(self, epsilon: float | Array) -> float | Array:
        epsilon = np.asarray(epsilon, float)
        ratio = _ratio_less_one(epsilon, self.probability)
        inside = self.probability * self.f.delta(np.log1p(np.maximum(ratio, -1 + 1e-15)))
        return np.where(ratio > -1, inside, -np.expm1(np.minimum(epsilon, 0)))[()]

    def inverse(self) -> "SubsampledInverse":
        return SubsampledInverse(self.f, self.probability)


@plain_numbers
@dataclass(frozen=True)
class SubsampledInverse(TradeOff):
    """``f_q⁻¹``, the *add* direction: samples of the data set with the example against those without it.

    ``δ(ε) = c δ_{f⁻¹}(log(q e^ε / c))`` with ``c = 1 - (1 - q) e^ε``, and 0 where c <= 0: never above -log(1 - q).
    """

    f: TradeOff
    probability: float

    def __post_init__(self) -> None:
        in_range("tradeoff.SubsampledInverse", 0, 1, probability=self.probability)

    def at(self, alpha: float | Array) -> float | Array:
        return highest_line(self.delta, self.inverse().delta, np.asarray(alpha, float))

    def delta(self, epsilon: float | Array) -> float | Array:
        epsilon = np.asarray(epsilon, float)
        with np.errstate(divide="ignore"):  # log 0 = -∞ is right for q = 1
            rest = -np.expm1(np.minimum(epsilon + np.log1p(-self.probability), 1.0))
        loss = np.log(self.probability) + epsilon - np.log(np.where(rest > 0, rest, 1.0))
        return np.where(rest > 0, rest * self.f.inverse().delta(loss), 0.0)[()]

    def inverse(self) -> Subsampled:
        return Subsampled(self.f, self.probability)


@plain_numbers
def subsampled(f: TradeOff, probability: float) -> TradeOff:
    """Returns ``q f + (1 - q) Id``, see `Subsampled`; piecewise linear if f is, and f itself for q = 1.

    Example:
        >>> from torch_privacy.privacy.tradeoff import Gaussian, symmetrized
        >>> price = symmetrized(subsampled(Gaussian(1.0), 0.01))  # C_q(G_μ): one step of DP-SGD, both directions
        >>> round(float(price.delta(0.0)), 6)
        0.003829
    """
    sampled = Subsampled(f, probability)
    if probability == 1:
        return f
    if f.corners is None:
        return sampled
    alpha = np.append(f.corners[0], 1.0)
    return hull(alpha, np.asarray(sampled(alpha)))


def _ratio_less_one(epsilon: Array, probability: float) -> Array:
    """Returns ``(e^ε - 1) / q``, clipped to the largest float."""
    return np.expm1(np.minimum(epsilon, 700.0 + np.log(probability))) / probability
