# SPDX-License-Identifier: Apache-2.0
"""Provides the abstract dominating pair: the distributions (P, Q) that an attacker must distinguish in one step.

The *remove* direction is P against Q, *add* is Q against P (`swapped`). Each engine uses one method of a pair:

- the closed form: `DominatingPair.tails`, the exact hockey stick of the single step;
- the lattice: `DiscretizablePair.cells`, masses of cells of losses;
- the contour: `DiscretizablePair.nodes`, points and masses that integrate a smooth pair to rounding accuracy.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..bracket import Array

UNIT = 2.0**-53  # relative error of one rounding


class Tails(NamedTuple):
    """A hockey stick ``δ(ε) = gain - loss``; its rounding error grows with ``exponent``."""

    gain: Array
    loss: Array
    exponent: Array


class Extremes(NamedTuple):
    """A bound on the finite losses of one step, the probability of an infinite one, and the error of the bound."""

    largest: float
    infinite: float
    error: float = 0.0


class Nodes(NamedTuple):
    """Points of a trapezoid rule of spacing ``step``: losses, log P-masses, and gaps between neighboring losses.

    ``loss_error`` bounds the rounding error of each loss, ``mass_error`` that of each log mass.
    """

    losses: Array
    log_mass: Array
    gaps: Array
    step: float
    loss_error: Array
    mass_error: Array


class DominatingPair(ABC):
    """The pair (P, Q) that dominates one step."""

    @abstractmethod
    def tails(self, epsilon: Array, *, swapped: bool) -> Tails:
        """Returns the exact hockey stick of P against Q at e^ε, for any real ε; of Q against P if swapped."""

    @property
    @abstractmethod
    def span(self) -> float:
        """Distance between the largest and the smallest loss that a lattice must reach."""

    @abstractmethod
    def second_moment(self) -> float:
        """Returns ``E_P[l²]``; 1 % accuracy suffices, because it only determines the resolution of lattices."""

    def extremes(self, *, swapped: bool) -> Extremes:
        """Returns the largest finite loss, rounded up, and the exact mass of infinite losses."""
        return Extremes(np.inf, 0.0)

    @property
    def symmetric(self) -> bool:
        """True if both directions have the same hockey stick."""
        return False


class DiscretizablePair(DominatingPair):
    """A pair that gives the masses of intervals of losses.

    Losses are written as ``l = floor + height``, so that no digit is lost near the floor.
    """

    @property
    @abstractmethod
    def floor(self) -> float:
        """The loss that heights are measured from."""

    @property
    @abstractmethod
    def ends(self) -> tuple[float, float]:
        """Heights of the smallest and the largest loss that a lattice must reach."""

    @property
    def edge(self) -> bool:
        """True if no loss lies below the floor."""
        return False

    @property
    def atoms(self) -> Array:
        """The finite losses that have a mass; none if losses have a density."""
        return np.empty(0)

    @property
    def smallest(self) -> float:
        """A lower bound on the losses of P; may be -∞."""
        return self.floor if self.edge else -np.inf

    @abstractmethod
    def cells(self, cuts: Array, at: Array) -> tuple[Array, Array]:
        """Returns the P-mass of the cells between consecutive heights ``cuts``, and their ``P - e^(floor + at) Q``.

        The second, with one height ``at`` for each cell, keeps its relative accuracy. Cuts may be infinite; for an
        infinite ``at`` it is the P-mass.
        """

    def mean_height(self, low: float, high: float) -> float:
        """Returns the log of the mean likelihood ratio between two heights, minus the floor."""
        cuts = np.array([low, high])
        mass, excess = self.cells(cuts, np.array([high]))
        return high - float(np.log1p(-excess[0] / mass[0]))

    @property
    def coarsest_step(self) -> float:
        """Spacing at which `nodes` integrates every ``e^(s l)`` with real s to rounding accuracy."""
        raise NotImplementedError

    def nodes(self, step: float) -> Nodes | None:
        """Returns a trapezoid rule for ``E_P f(l)``; None if the pair is not smooth enough for one.

        Oscillations ``e^(i t l)`` are integrated to rounding accuracy while ``t * gaps + 26.6 step <= 2π``.
        """
        return None

    @property
    def beyond(self) -> float:
        """A bound on the mass, under P or Q, of outcomes that `nodes` and finite `cells` leave out."""
        return 0.0

    @property
    def node_rounding(self) -> float:
        """Relative rounding error that all masses of `nodes` share, estimated: it changes K by that share of it."""
        return 0.0

    @property
    def heavy(self) -> bool:
        """True if ``E_P e^(s l)`` is infinite for every s > 0, so that only -1 <= s <= 0 can be used."""
        return False

    @property
    def span(self) -> float:
        bottom, top = self.ends
        return top - bottom

    def second_moment(self) -> float:
        bottom, top = self.ends
        cuts = np.concatenate([np.linspace(bottom, top, 401), np.geomspace(max(bottom, 1e-9 * top), top, 400)])
        cuts = np.unique(cuts)
        middle = (cuts[:-1] + cuts[1:]) / 2
        return float((self.cells(cuts, middle)[0] * (self.floor + middle) ** 2).sum())


@dataclass(frozen=True)
class PairBounds:
    """Bounds on an event without a known exact pair: one pair that dominates it, and pairs that it dominates.

    Args:
        upper: a pair that dominates the event in both directions; None if none is known, so that nothing is promised.
        lower: pairs that some neighboring data sets attain; may be empty.
        family: pairs, one of which dominates the event whatever the examples are; may be empty. Several releases then
            cost less than with ``upper``.
        mixtures: a noise and two mixtures of it, of which these are the bounds: log moments ask for them, as the tails
            of the bounds have none. None where they are not known.
    """

    upper: DominatingPair | None
    lower: tuple[DominatingPair, ...] = ()
    family: tuple[DominatingPair, ...] = ()
    mixtures: tuple[Any, Any, Any] | None = None
