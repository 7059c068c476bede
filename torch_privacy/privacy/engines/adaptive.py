# SPDX-License-Identifier: Apache-2.0
"""Bounds releases from above that have one of several pairs each, which may depend on what was released before.

With V₀(ε) = max(1 - e^ε, 0), the largest δ(ε) of T releases over all such choices is V_T, where

    V_t(ε) = max over the pairs of E_P V_(t-1)(ε - l),  l the loss.

It lies below the composition of a single pair that dominates all, because a choice is made for each result, not for
each ε of one release. Pairs are moved onto a lattice upwards; outside the window V - V₀ is at most what it is at the
window's ends, since it rises up to 0 and falls from there. The rounding of Fourier transforms is added in each step.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ..bracket import Array, Bracket
from ..pairs.base import DominatingPair
from .curve import Curve, SimpleCurve, crossing, trivial_delta
from .lattice import above
from .tilted import fft_rounding

WINDOW = 2**12  # lattice points
LOSSES = 2**12  # of a single release; larger ones count as infinite
MOST_RELEASES = 4000  # with more, a step at a time takes too long
SMALLEST_DELTA = 1e-8  # for which the window reaches far enough


class AdaptiveCurve(SimpleCurve):
    """An upper bound on what ``count`` releases cost, each with one of the pairs.

    Args:
        pairs: the pairs; their lattices contain the loss 0.
        count: number of releases.
        rough: a curve above, which determines how far the window reaches.
    """

    def __init__(self, pairs: Sequence[DominatingPair], count: int, rough: Curve):
        self._pairs, self._count, self._rough = pairs, count, rough

    @cached_property
    def _spacing(self) -> float:
        return 2.2 * self._rough.epsilon_high(SMALLEST_DELTA) / WINDOW

    @cached_property
    def _losses(self) -> Array:
        return self._spacing * np.arange(-WINDOW // 2, WINDOW // 2)

    @cached_property
    def _bound(self) -> Array:
        """V_T at the lattice points of the window."""
        kernels, infinite, first = zip(*(self._kernel(pair) for pair in self._pairs), strict=True)
        infinite, first = np.array(infinite)[:, None], np.array(first)
        length, ends = WINDOW + LOSSES, LOSSES // 2
        transformed = np.fft.rfft(np.array(kernels), length)
        free = np.maximum(-np.expm1(self._losses), 0.0)
        excess = np.zeros(WINDOW)  # V - V₀
        for _ in range(self._count):
            padded = np.pad(excess, ends, mode="edge")
            moved = np.fft.irfft(np.fft.rfft(padded) * transformed, length)[:, LOSSES:]
            found = (moved + first + infinite).max(0)
            rounding = 4 * fft_rounding(length) * float(padded.sum())  # of three transforms and a product
            excess = np.minimum(found + rounding - free, 1.0 - free)
        return np.minimum(excess + free, 1.0)

    def _kernel(self, pair: DominatingPair) -> tuple[Array, float, Array]:
        """Returns masses of losses, lowest last, the mass of infinite ones, and V_1, for one pair."""
        lattice = above(pair, self._spacing)
        assert lattice.start == 0  # all pairs share one lattice
        at = lattice.first + np.arange(len(lattice.mass)) + LOSSES // 2
        fits = at <= LOSSES
        infinite = lattice.only_p + float(lattice.mass[~fits].sum())
        masses = np.bincount(np.maximum(at[fits], 0), lattice.mass[fits], LOSSES + 1)
        losses = self._spacing * np.arange(-LOSSES // 2, LOSSES // 2 + 1)
        sums = np.cumsum(masses[::-1])[::-1], np.cumsum((masses * np.exp(-losses))[::-1])[::-1]
        there = np.clip(np.arange(-WINDOW // 2, WINDOW // 2) + LOSSES // 2 + 1, 0, LOSSES + 1)
        tails = [np.append(one, 0.0)[there] for one in sums]
        return masses, infinite, tails[0] - np.exp(self._losses) * tails[1]

    def delta(self, epsilon: float) -> Bracket[float]:
        place = int(np.searchsorted(self._losses, epsilon, side="right")) - 1  # it falls, so a point below is above
        return Bracket(trivial_delta(epsilon), float(self._bound[place]) if place >= 0 else 1.0)

    def epsilon(self, delta: float) -> Bracket[float]:
        return Bracket(0.0, self.epsilon_high(delta))

    def epsilon_high(self, delta: float) -> float:
        if self._bound[-1] > delta:
            return math.inf
        return crossing(lambda epsilon: self.delta(epsilon).high <= delta).high
