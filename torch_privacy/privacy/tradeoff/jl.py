# SPDX-License-Identifier: Apache-2.0
"""Provides the trade-off function of a step with gradient norms estimated from random projections."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import gammainccinv, gammaincinv, gammaln, log_ndtr, ndtr

from ...support.validate import plain_numbers, positive, whole
from .base import Array, TradeOff

NEGLIGIBLE = 1e-18  # probability on either side of the nodes
FURTHEST = 700.0  # largest threshold; e^710 overflows
HALVINGS = 36  # bisections: from a width of 1400 to 2e-8


@plain_numbers
@dataclass(frozen=True)
class JL(TradeOff):
    """``T((Z, N(0, 1)), (Z, N(Z, 1)))`` with ``Z = 1 / (σ sqrt(χ²_r / r))``: clipping by norms from r projections.

    The attacker knows Z, so errors are means over it: ``α(t) = E Φ(-t/Z - Z/2)``, ``β(t) = E Φ(t/Z - Z/2)``, and
    ``δ(ε) = E [Φ(Z/2 - ε/Z) - e^ε Φ(-Z/2 - ε/Z)]``, a sum over nodes in ``log(χ²_r / r)`` (trapezoid rule).

    Args:
        noise_multiplier: σ, above 0.
        num_projections: r, at least 1. With few projections the estimate is often far too small, and large
            gradients are not clipped: below r of about 16 the price is prohibitive.

    Guarantees:
        - self-inverse; below ``Gaussian(1 / noise_multiplier)``, to which it tends as r grows;
        - quadrature and rounding error of δ below 1e-13, absolute.
    Source: Bu, Gopi, Kulkarni, Lee, Shen & Tantipongpipat (2021), arXiv:2102.03013, Lemma 4.1.

    Example:
        >>> from torch_privacy.privacy.tradeoff import Gaussian
        >>> [round(float(JL(1.0, r).delta(1.0)), 5) for r in (4, 16, 64)], round(float(Gaussian(1.0).delta(1.0)), 5)
        ([0.21995, 0.14859, 0.13216], 0.12694)
    """

    noise_multiplier: float
    num_projections: int

    def __post_init__(self) -> None:
        positive("tradeoff.JL", noise_multiplier=self.noise_multiplier)
        whole("tradeoff.JL", at_least=1, num_projections=self.num_projections)

    def at(self, alpha: float | Array) -> float | Array:
        alpha = np.asarray(alpha, float)
        low, high = np.full(alpha.shape, -FURTHEST), np.full(alpha.shape, FURTHEST)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            too_many = self._false_alarms(middle) > alpha
            low, high = np.where(too_many, middle, low), np.where(too_many, high, middle)
        # The line through (α(t), β(t)) with slope -e^t lies below f for any t; its error is the square of t's error.
        right = 1 - self.delta(np.maximum(high, 0)) - np.exp(np.maximum(high, 0)) * alpha
        left = np.exp(np.minimum(high, 0)) * (1 - self.delta(np.maximum(-high, 0)) - alpha)
        return np.clip(np.where(high >= 0, right, left), 0, 1 - alpha)[()]

    def delta(self, epsilon: float | Array) -> float | Array:
        z, weights = self._nodes
        u = np.asarray(epsilon, float)[..., None]
        return ((ndtr(z / 2 - u / z) - np.exp(u + log_ndtr(-z / 2 - u / z))) @ weights)[()]

    def errors(self, threshold: float | Array) -> tuple[float | Array, float | Array]:
        """Returns (α(t), β(t)) of Lemma 4.1: the errors of the test that rejects where the privacy loss exceeds t."""
        return self._false_alarms(np.asarray(threshold, float)), self._false_alarms(-np.asarray(threshold, float))

    def inverse(self) -> "JL":
        return self

    def _false_alarms(self, threshold: Array) -> Array:
        z, weights = self._nodes
        return (ndtr(-threshold[..., None] / z - z / 2) @ weights)[()]

    @cached_property
    def _nodes(self) -> tuple[Array, Array]:
        """Values of Z, and their weights. The density in y = log(χ²_r / r) is ``∝ exp(r/2 (y - e^y))``."""
        half = self.num_projections / 2
        low, high = np.log(gammaincinv(half, NEGLIGIBLE) / half), np.log(gammainccinv(half, NEGLIGIBLE) / half)
        step = min(0.2, 0.5 * half**-0.5)  # e^-49 of error by the strip of analyticity; half a deviation
        y = np.arange(low, high + step, step)
        weights = step * np.exp(half * np.log(half) - gammaln(half) + half * (y - np.exp(y)))
        return np.exp(-y / 2) / self.noise_multiplier, weights / weights.sum()
