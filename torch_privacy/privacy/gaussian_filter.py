# SPDX-License-Identifier: Apache-2.0
"""Prices runs that are chosen from the outcomes of earlier runs: each takes a share of one Gaussian release.

Privacy loss distributions of releases that were chosen adaptively do not compose: whoever has seen an unlucky outcome
can choose next what is worst after just this one. They do compose if all are dominated by members of one family that
grows in one number. Here it is, for a share s of a budget (ε, δ),

    A(s): with probability 1 - (1 - δ/4)^s everything is revealed, else N(√s μ, 1) against N(0, 1),

with the largest μ at which A(1) is (ε, δ)-private. If each run k, whatever made one choose it, is dominated by A(s_k),
then all runs together are dominated by A(Σ s_k), as long as a filter keeps Σ s_k within a bound fixed in advance.

Proof. A mechanism that A(s) dominates can be simulated from an outcome of A(s) (Blackwell's theorem), an interactive
one, too, run at the same time as others (Vadhan & Zhang). Take a Brownian motion with drift b, where b = 1 for one of
two neighboring data sets and 0 for the other, and a clock that is independent of b and rings at an exponential time.
Each run reads the next piece of both, of length s_k: the increment is N(√s_k μ b, 1) after scaling, and the ringing
reveals b. Which piece is read next may depend on everything read before. So the simulation of all runs is a function of
both up to the bound, and that is A(Σ s_k).

Source: Smith & Thakurta (2022), arXiv:2210.17520, and Koskela, Tobaben & Honkela (2023), arXiv:2209.15596, for the
filter of Gaussian DP; Whitehouse, Ramdas, Rogers & Wu (2023), arXiv:2203.05481, for the part δ/4 of probability;
Dong, Roth & Su (2022), JRSS-B, Theorem 2 (Blackwell), for the simulation; Vadhan & Zhang (2023), arXiv:2207.08335, for
runs at the same time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import exp, expm1, inf, log, log1p, sqrt

import numpy as np
from scipy.special import log_ndtr, ndtr

from .bracket import Array
from .compose import compose
from .engines.curve import bisect
from .events.base import LARGEST_NOISE, Event, NeighboringRelation
from .events.gaussian import Gaussian
from .pairs.base import UNIT
from .tradeoff import Gaussian as GaussianCurve

REVEALED = 0.25  # part of δ with which everything is revealed: the tails of sampled steps are heavier than Gaussian
POINTS = 64  # of ε, at which a run is compared
FINEST = 1e-6  # δ at the last of them, as a part of the budget's
LARGEST_EPSILON = 600.0  # e^ε is a number in floating point
TOLERANCE = 1e-6  # of the logarithm of a share, relative
SLACK = 1e-9  # relative: more than the rounding of both curves
SMALLEST_SHARE, LARGEST_SHARE = 1e-9, 1e3
LARGEST_MU, SMALLEST_MU = 1e3, 1e-9

Releases = Iterable[tuple[Event, int]]


def delta_low(mu: float, epsilons: Array) -> Array:
    """Returns the δ of N(μ, 1) against N(0, 1) at each ε >= 0, without what rounding may have added; 0 at least.

    It is a difference of two numbers that nearly agree where μ is small.
    """
    gain, log_loss = ndtr(mu / 2 - epsilons / mu), epsilons + log_ndtr(-mu / 2 - epsilons / mu)
    rounding = 8 * UNIT * (16 + epsilons + np.abs(log_ndtr(-mu / 2 - epsilons / mu)))
    return np.maximum(gain - np.exp(log_loss) - rounding * gain, 0.0)


@dataclass(frozen=True)
class GaussianFilter:
    """The family A(s) of a budget, and what declared releases and shares cost together.

    Args:
        epsilon, delta: of the budget.
        neighboring_relation, unit: of all releases.
    """

    epsilon: float
    delta: float
    neighboring_relation: NeighboringRelation
    unit: str

    @cached_property
    def _mu(self) -> float:
        """The largest μ, rounded down, at which A(1) is (ε, δ)-private."""
        target = self._rest_of_delta(1.0)
        _, good = bisect(
            lambda mu: float(GaussianCurve(mu).delta(self.epsilon)) <= target, LARGEST_MU, SMALLEST_MU, 1e-12
        )
        return good

    def _revealed(self, share: float) -> float:
        """Returns the probability with which A(share) reveals everything."""
        return -expm1(share * log1p(-REVEALED * self.delta))

    def _rest_of_delta(self, share: float) -> float:
        """Returns the δ that is left for what is not revealed."""
        revealed = self._revealed(share)
        return (self.delta - revealed) / (1 - revealed)

    def share(self, releases: Releases) -> float:
        """Returns the smallest share, rounded up, such that A(share) dominates all of these releases of a run.

        The run's δ is known at 64 values of ε, and convex in e^ε, so chords bound it from above. The δ of A(share) is
        convex, too, so tangents bound it from below. Infinity if no share up to 1000 suffices.
        """
        epsilons, deltas = self._points(list(releases))

        def dominates(log_share: float) -> bool:
            return self._dominates(exp(log_share), epsilons, deltas)

        if deltas[0] == 0:
            return 0.0
        if not dominates(log(LARGEST_SHARE)):
            return inf
        return exp(bisect(dominates, log(SMALLEST_SHARE), log(LARGEST_SHARE), TOLERANCE)[1])

    def epsilon_high(self, declared: Releases, share: float) -> float:
        """Returns an upper bound on ε at the budget's δ of declared releases and a share; infinity if there is none."""
        found = list(declared)
        if share == 0:
            return compose(found).epsilon_high(self.delta)
        if self._revealed(share) >= self.delta:  # all is revealed where the share is infinite
            return inf
        delta = self._rest_of_delta(share)
        noise = min(1 / (sqrt(share) * self._mu), LARGEST_NOISE)
        return compose([*found, (Gaussian(noise, self.neighboring_relation, self.unit), 1)]).epsilon_high(delta)

    def _points(self, releases: list[tuple[Event, int]]) -> tuple[Array, Array]:
        """Returns increasing ε from 0 on, and an upper bound on δ at each."""
        profile = compose(releases)
        first = profile.delta(0.0).high
        if first == 0:
            return np.zeros(1), np.zeros(1)
        last = profile.epsilon_high(min(FINEST * self.delta, first))
        if last > LARGEST_EPSILON:  # there is a δ that no ε takes away
            left = min(1.001 * profile.delta(LARGEST_EPSILON).high, first)
            last = profile.epsilon_high(left) if left < 1 else last
        last = min(last, LARGEST_EPSILON)
        epsilons = np.linspace(0.0, last, POINTS if last else 1)
        return epsilons, np.array([first, *(profile.delta(float(epsilon)).high for epsilon in epsilons[1:])])

    def _dominates(self, share: float, epsilons: Array, deltas: Array) -> bool:
        """True if the δ of A(share) is above the chords between these points, and above the last one for ever."""
        revealed, mu = self._revealed(share), sqrt(share) * self._mu
        if deltas[-1] > revealed * (1 - SLACK):
            return False
        scale = (1 - SLACK) * (1 - revealed)
        above = (1 - SLACK) * revealed + scale * delta_low(mu, epsilons) - deltas
        if (above < 0).any():
            return False
        width = np.exp(epsilons[:-1]) * np.expm1(np.diff(epsilons))  # of e^ε; a difference of powers would lose digits
        wide = width > 0
        chord = np.diff(deltas)[wide] / width[wide]
        slopes = -scale * ndtr(-mu / 2 - epsilons / mu)  # of δ in e^ε
        left, right = slopes[:-1][wide] - chord, slopes[1:][wide] - chord
        inside = (left < 0) & (right > 0)  # the tangents at both ends meet below both ends
        start, end, wide_inside = above[:-1][wide][inside], above[1:][wide][inside], width[wide][inside]
        left, right = left[inside], right[inside]
        meeting = start + left * (end - start - right * wide_inside) / (left - right)
        return bool((meeting >= 0).all())
