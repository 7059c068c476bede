# SPDX-License-Identifier: Apache-2.0
"""Provides the pair of a release that is one of two kinds, by a coin that the attacker sees."""

from dataclasses import dataclass

import numpy as np

from ..bracket import Array
from .base import DiscretizablePair, Nodes, Tails


@dataclass(frozen=True)
class EitherPair(DiscretizablePair):
    """With probability ``share`` the pair ``other``, else the pair ``usual``: ``δ(ε)`` is the weighted mean of both.

    Args:
        usual: a pair with the lower floor of the two.
        other: a pair without an edge.
        share: probability of the other, in (0, 1).
    """

    usual: DiscretizablePair
    other: DiscretizablePair
    share: float

    @property
    def _parts(self) -> tuple[tuple[float, DiscretizablePair], ...]:
        return (1 - self.share, self.usual), (self.share, self.other)

    def tails(self, epsilon: Array, *, swapped: bool) -> Tails:
        each = [(weight, pair.tails(epsilon, swapped=swapped)) for weight, pair in self._parts]
        gain, loss = (sum(weight * getattr(tails, name) for weight, tails in each) for name in ("gain", "loss"))
        return Tails(np.asarray(gain), np.asarray(loss), np.maximum(*(tails.exponent for _, tails in each)))

    @property
    def floor(self) -> float:
        return self.usual.floor

    @property
    def ends(self) -> tuple[float, float]:
        (low, high), (other_low, other_high) = self.usual.ends, self.other.ends
        above = self.other.floor - self.floor
        return min(low, other_low + above), max(high, other_high + above)

    def cells(self, cuts: Array, at: Array) -> tuple[Array, Array]:
        above = self.other.floor - self.floor
        usual, other = self._with_edge(cuts, at), self.other.cells(cuts - above, at - above)
        mass, excess = ((1 - self.share) * a + self.share * b for a, b in zip(usual, other, strict=True))
        return mass, excess

    def _with_edge(self, cuts: Array, at: Array) -> tuple[Array, Array]:
        """Returns `cells` of the usual pair, also at losses below its edge, where ``P - e^l Q`` is a mean."""
        if not self.usual.edge:
            return self.usual.cells(cuts, at)
        below = np.isfinite(at) & (at <= 0)
        mass, excess = self.usual.cells(cuts, np.where(below, np.finfo(float).tiny, at))
        depth = np.where(below, at, 0.0)
        return mass, np.where(below, -np.expm1(depth) * mass + np.exp(depth) * excess, excess)

    @property
    def coarsest_step(self) -> float:
        return min(pair.coarsest_step for _, pair in self._parts)

    def nodes(self, step: float) -> Nodes | None:
        usual, other = self.usual.nodes(step), self.other.nodes(step)
        if usual is None or other is None:
            return None
        weights = np.repeat([1 - self.share, self.share], [len(usual.losses), len(other.losses)])
        both = {name: np.append(getattr(usual, name), getattr(other, name)) for name in usual._fields if name != "step"}
        both["log_mass"] = both["log_mass"] + np.log(weights)
        return Nodes(**both, step=step)
