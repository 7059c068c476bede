# SPDX-License-Identifier: Apache-2.0
"""Bounds tiny δ of Poisson-sampled Gaussian steps by the moments of their losses, where other engines' nodes end.

``δ(ε) <= exp(K(λ) + H(λ) - λ ε)`` for every λ > 0, with the log moment K(λ) of all steps together; the smallest of
these bounds is some percent of ε above the truth at any δ.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ..bracket import Array, Bracket, ordered
from ..pairs.gaussian import LARGEST_SHIFT, SubsampledGaussianPair
from .curve import Curve
from .log_moments import log_moments
from .tilt import tilt_entropy

TINY = 1e-20  # at larger δ the engines are narrower
ORDERS = np.geomspace(0.03, 500, 160)  # of the λ, in units of one over the largest shift
RELATIVE, ABSOLUTE = 1e-9, 1e-12  # bounds on the rounding of one step's log moment


class BoundedByMoments(Curve):
    """A curve with an upper bound by moments where δ is tiny; for Gaussian steps.

    Args:
        engine: the curve.
        steps: the pairs, and how often each happened.
    """

    def __init__(self, engine: Curve, steps: Sequence[tuple[SubsampledGaussianPair, int]]):
        self._engine, self._steps = engine, steps

    @cached_property
    def _bounds(self) -> tuple[Array, Array]:
        """The λ, and an upper bound on K(λ) + H(λ) for each."""
        orders = ORDERS / min(max(pair.shift for pair, _ in self._steps), LARGEST_SHIFT)
        total = np.zeros(len(orders))
        for pair, count in self._steps:
            alpha = log_moments(pair, orders)
            total += count * (alpha * (1 + RELATIVE) + ABSOLUTE)
        return orders, total + tilt_entropy(orders)

    def _epsilon(self, delta: float) -> float:
        orders, bounds = self._bounds
        return max(float(((bounds - math.log(delta)) / orders).min()), 0.0)

    def delta(self, epsilon: float) -> Bracket[float]:
        low, high = self._engine.delta(epsilon)
        if 0 < high < TINY:
            orders, bounds = self._bounds
            exponent = float((bounds - orders * epsilon).min())
            high = min(high, max(math.exp(min(exponent, 0.0)), 5e-324))
        return ordered(low, high)

    def epsilon(self, delta: float) -> Bracket[float]:
        low, high = self._engine.epsilon(delta)
        return ordered(low, min(high, self._epsilon(delta)) if 0 < delta < TINY else high)

    def epsilon_high(self, delta: float) -> float:
        high = self._engine.epsilon_high(delta)
        return min(high, self._epsilon(delta)) if 0 < delta < TINY else high

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self._engine.surely_below(epsilon, delta) or (0 < delta < TINY and self._epsilon(delta) <= epsilon)
