# SPDX-License-Identifier: Apache-2.0
"""Bounds for heavy-tailed losses whose ε is far beyond what engines carry: one big jump, and all but big jumps.

- Above: ``δ(ε) <= P(some loss > b) + exp(Σ log E_P[e^(c l); l <= b] + H(c) - c ε)`` for every cut b and every c > 0,
  with ``(1 - e^-x)+ <= e^(H(c) + c x)``.
- Below: ``δ(ε) >= P(some loss > m) (1 - e^(ε - m - rest))`` for every m, as all others together lose at most ``-rest``,
  the sum of their smallest.

Masses beyond a node are summed with that node for the bound above and without it for the one below.
"""

from collections.abc import Sequence

import numpy as np

from ..bracket import Array, Bracket
from ..pairs.base import Continuous, Law
from .curve import Unresolved, bisect

EXPONENTS = np.geomspace(0.05, 60, 40)  # candidates for c ε
SMALLEST, LARGEST = 1e-6, 1e30  # ε between which to search


class JumpCurve:
    """The remove curve of steps with bounded gains, good to some ten percent of ε where single losses decide."""

    def __init__(self, steps: Sequence[tuple[Law, int]]):
        self._nodes: list[tuple[int, Array, Array]] = []
        self.rest = 0.0  # the sum of all smallest losses
        for law, times in steps:
            if not isinstance(law, Continuous) or law.smallest == -np.inf:
                raise Unresolved
            nodes = law.nodes(law.coarsest_step)
            if nodes is None:
                raise Unresolved
            self._nodes.append((times, nodes.losses, nodes.log_mass))
            self.rest += times * law.smallest
        self._cuts = np.unique(np.concatenate([losses[losses > 1e-3] for _, losses, _ in self._nodes]))
        if not len(self._cuts):
            raise Unresolved

    def _log_no_jump(self, *, with_node: bool) -> Array:
        """``Σ times * log P(l <= cut)`` for each cut, or with the cut's own node counted as a jump."""
        total = np.zeros(len(self._cuts))
        for times, losses, log_mass in self._nodes:
            beyond = np.append(np.cumsum(np.exp(log_mass[::-1]))[::-1], 0.0)
            first = np.searchsorted(losses, self._cuts, side="left" if with_node else "right")
            total += times * np.log1p(-np.minimum(beyond[first], 1 - 1e-16))
        return total

    def delta(self, epsilon: float) -> Bracket[float]:
        trivial = max(-float(np.expm1(min(epsilon, 0.0))), 0.0)
        high = self._above(epsilon) if epsilon >= SMALLEST else 1.0
        gain = -np.expm1(self._log_no_jump(with_node=False))
        share = -np.expm1(np.minimum(epsilon - self._cuts - self.rest, 0.0))
        return Bracket(min(max(float((gain * share).max()), trivial), high), high)

    def _above(self, epsilon: float) -> float:
        c = EXPONENTS / max(epsilon, SMALLEST)
        exponent = np.zeros((len(c), len(self._cuts)))
        for times, losses, log_mass in self._nodes:
            last = np.searchsorted(losses, self._cuts, side="right") - 1  # below all losses: any bound will do
            with np.errstate(over="ignore"):  # an infinite sum is no bound, rightly
                partial = np.cumsum(np.exp(log_mass + c[:, None] * losses), axis=1)
            exponent += times * np.log(np.maximum(partial[:, last], 1e-300))
        exponent += (c * np.log(c) - (1 + c) * np.log1p(c) - c * epsilon)[:, None]
        rare = -np.expm1(self._log_no_jump(with_node=False))
        return min(float((np.exp(np.minimum(exponent, 0.0)) + rare).min()), 1.0)

    def epsilon(self, delta: float) -> Bracket[float]:
        low = self._crossing(lambda epsilon: self.delta(epsilon).low <= delta)[0]
        return Bracket(low, max(self.epsilon_high(delta), low))

    def epsilon_high(self, delta: float) -> float:
        return self._crossing(lambda epsilon: self._above(epsilon) <= delta)[1]

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return epsilon >= SMALLEST and self._above(epsilon) <= delta

    @staticmethod
    def _crossing(holds) -> tuple[float, float]:
        if holds(SMALLEST):
            return 0.0, SMALLEST
        high = 0.5
        while not holds(high):
            high *= 4
            if high > LARGEST:
                return high, np.inf
        return bisect(holds, high / 4 if high > 0.5 else SMALLEST, high, 1e-4)
