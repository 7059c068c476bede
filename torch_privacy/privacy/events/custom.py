# SPDX-License-Identifier: Apache-2.0
"""Provides events for mechanisms of your own: known by (ε, δ) guarantees, or by their output distributions."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...support.units import ONE_EXAMPLE
from ...support.validate import LARGEST
from ..bracket import Array
from ..pairs.base import PairBounds
from ..pairs.discrete import DiscretePair, pair_from_guarantees
from .base import Event, NeighboringRelation, check_fields, priced


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST  # pyright: ignore[reportArgumentType]


def check_numbers(where: str, **values: tuple[float, ...]) -> None:
    """Raises a ``ValueError`` unless every value is a tuple of one or more finite numbers."""
    for name, value in values.items():
        if not isinstance(value, tuple) or not value or not all(map(_is_finite, value)):
            raise ValueError(f"{where}: {name}={value!r} must be a tuple of one or more finite numbers.")


@priced(lambda event: PairBounds(pair_from_guarantees(np.array(event.epsilons), np.array(event.deltas))))
@dataclass(frozen=True, repr=False)
class KnownProfile(Event):
    """A mechanism known only by its guarantees: it is (εᵢ, δᵢ)-private for each i, in both directions.

    It is priced by the pair that dominates all such mechanisms, so its lower bound is trivial. A privacy profile δ(ε)
    is passed as a table; a finer table gives a smaller ε.

    Args:
        epsilons: the εᵢ, each in [0, 600].
        deltas: the δᵢ, as many, each in [0, 1].
        neighboring_relation: the relation under which the guarantees hold.

    Guarantees:
        - never below the price of any mechanism with these guarantees.

    Source: Kairouz, Oh & Viswanath (2015), arXiv:1311.0776, for a single (ε, δ).

    Example:
        >>> from torch_privacy.privacy import compose
        >>> f"{compose([(KnownProfile((0.1,), (0.0,)), 20)]).epsilon(1e-5).high:.3f}"  # 20 mechanisms, each (0.1, 0)
        '1.598'
    """

    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    unit: str = ONE_EXAMPLE
    sampler = "the release's own"

    def __post_init__(self) -> None:
        check_fields(self)
        check_numbers("KnownProfile", epsilons=self.epsilons, deltas=self.deltas)
        if len(self.epsilons) != len(self.deltas):
            raise ValueError(
                f"KnownProfile: got {len(self.epsilons)} epsilons and {len(self.deltas)} deltas. Pass as many."
            )
        if not all(0 <= epsilon <= 600 for epsilon in self.epsilons):
            raise ValueError(f"KnownProfile: epsilons={self.epsilons!r} must lie in [0, 600].")
        if not all(0 <= delta <= 1 for delta in self.deltas):
            raise ValueError(f"KnownProfile: deltas={self.deltas!r} must lie in [0, 1].")


@priced(lambda event: DiscretePair(event.p, event.q))
@dataclass(frozen=True, repr=False)
class FinitePair(Event):
    """A mechanism with finitely many outcomes and known probabilities on the two worst neighboring data sets.

    Args:
        p: probability of each outcome with the example, adding up to 1.
        q: the same without the example (or with another one).
        neighboring_relation: the relation under which this is the worst pair.

    Guarantees:
        - exact if p and q dominate every other pair of neighboring data sets, which the caller must make sure of.

    Source: Dong, Roth & Su (2022), JRSS-B; Neyman & Pearson (1933) for finite distributions.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> survey = FinitePair(p=(0.75, 0.25), q=(0.25, 0.75))  # randomized response with ε = log 3
        >>> f"{compose([(survey, 1)]).epsilon(1e-5).high:.3f}"
        '1.099'
    """

    p: tuple[float, ...]
    q: tuple[float, ...]
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    unit: str = ONE_EXAMPLE
    sampler = "the release's own"

    def __post_init__(self) -> None:
        check_fields(self)
        check_numbers("FinitePair", p=self.p, q=self.q)
        if len(self.p) != len(self.q):
            raise ValueError(f"FinitePair: p has {len(self.p)} outcomes and q has {len(self.q)}.")
        for name, masses in (("p", self.p), ("q", self.q)):
            if min(masses) < 0 or abs(sum(masses) - 1) > 1e-9:
                raise ValueError(f"FinitePair: {name}={masses!r} must be probabilities that add up to 1.")

    @classmethod
    def from_densities(
        cls,
        p: Callable[[Array], Array],
        q: Callable[[Array], Array],
        edges: Array,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    ) -> "FinitePair":
        """Returns a finite pair that dominates two densities: each cell's mass moves to its extreme likelihood ratios.

        Args:
            p: density of the outcome with the example; takes an array.
            q: density without the example.
            edges: ends of the cells, ascending; the ratio p/q must be monotone within each cell. Outcomes beyond the
                first and the last edge count as an infinite loss. The excess falls with the square of the cells' width.
            neighboring_relation: the relation under which this is the worst pair.

        Guarantees:
            - never below the price of the densities, up to the quadrature of each cell's mass (16 points).

        Example:
            >>> from torch_privacy.privacy import compose
            >>> def logistic(x):  # noise with standard deviation 9.1
            ...     return 1 / (4 * 5 * np.cosh(x / 10) ** 2)
            >>> event = FinitePair.from_densities(lambda x: logistic(x - 1), logistic, np.linspace(-200, 201, 2001))
            >>> f"{compose([(event, 10)]).epsilon(1e-5).high:.3f}"
            '1.292'
        """
        edges = np.asarray(edges, float)
        points, weights = np.polynomial.legendre.leggauss(16)
        half = np.diff(edges)[:, None] / 2
        x = edges[:-1, None] + half * (1 + points)
        p_mass, q_mass = ((density(x) * half * weights).sum(1) for density in (p, q))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.asarray(p(edges)) / np.asarray(q(edges))
        low, high = np.minimum(ratio[:-1], ratio[1:]), np.maximum(ratio[:-1], ratio[1:])
        spread = (high - low) > 1e-12 * high
        q_high = np.where(spread, (p_mass - low * q_mass) / np.where(spread, high - low, 1.0), q_mass)
        q_high = np.clip(q_high, 0.0, q_mass)
        q_low = q_mass - q_high
        p_high = np.minimum(high * q_high, p_mass)
        masses = np.concatenate([p_high, p_mass - p_high, [max(1 - p_mass.sum(), 0.0), 0.0]])
        others = np.concatenate([q_high, q_low, [0.0, max(1 - q_mass.sum(), 0.0)]])
        return cls(
            tuple((masses / masses.sum()).tolist()), tuple((others / others.sum()).tolist()), neighboring_relation
        )
