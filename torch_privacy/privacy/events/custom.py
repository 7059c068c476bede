# SPDX-License-Identifier: Apache-2.0
"""Releases of the user's own making: known by their (ε, δ) guarantees, or by what they give on neighboring data."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..bracket import Array
from ..engines.dispatch import Between
from ..pairs.discrete import Atoms, allowed_by
from .base import Event, NeighboringRelation, check_relation, priced


def _numbers(where: str, **values: tuple[float, ...]) -> None:
    for name, value in values.items():
        fine = isinstance(value, tuple) and len(value) > 0 and all(isinstance(item, (int, float)) for item in value)
        if not fine or not np.isfinite(value).all():
            raise ValueError(f"{where}: {name}={value!r} must be a tuple of one or more finite numbers.")


@priced(lambda event: Between(allowed_by(np.array(event.epsilons), np.array(event.deltas))))
@dataclass(frozen=True, repr=False)
class KnownProfile(Event):
    """Anything that is (εᵢ, δᵢ)-private for each i, in both directions; nothing else is known of it.

    Priced by the pair that dominates all such mechanisms (`discrete.allowed_by`), so only the upper bound says
    something. A curve δ(ε) is passed as a table; the finer, the tighter.

    Args:
        epsilons: 0 or above, at most 600.
        deltas: one for each, in [0, 1].
        neighboring_relation: the one under which these hold.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> f"{compose([(KnownProfile((0.1,), (0.0,)), 20)]).epsilon(1e-5).high:.3f}"  # 20 times (0.1, 0)
        '1.598'
    """

    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampler = "the release's own"

    def __post_init__(self) -> None:
        _numbers("KnownProfile", epsilons=self.epsilons, deltas=self.deltas)
        if len(self.epsilons) != len(self.deltas):
            raise ValueError(
                f"KnownProfile: {len(self.epsilons)} epsilons and {len(self.deltas)} deltas must be as many."
            )
        if not all(0 <= epsilon <= 600 for epsilon in self.epsilons):
            raise ValueError(f"KnownProfile: epsilons={self.epsilons!r} must lie in [0, 600].")
        if not all(0 <= delta <= 1 for delta in self.deltas):
            raise ValueError(f"KnownProfile: deltas={self.deltas!r} must lie in [0, 1].")
        check_relation("KnownProfile", self.neighboring_relation)


@priced(lambda event: Atoms(event.p, event.q))
@dataclass(frozen=True, repr=False)
class FinitePair(Event):
    """One of finitely many outcomes, its probabilities known on the two worst neighboring data sets.

    Args:
        p: probability of each outcome with the example, adding up to 1.
        q: the same without it (or with another one).
        neighboring_relation: the one under which this is the worst pair.
    """

    p: tuple[float, ...]
    q: tuple[float, ...]
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampler = "the release's own"

    def __post_init__(self) -> None:
        _numbers("FinitePair", p=self.p, q=self.q)
        if len(self.p) != len(self.q):
            raise ValueError(f"FinitePair: p has {len(self.p)} outcomes and q has {len(self.q)}.")
        for name, masses in (("p", self.p), ("q", self.q)):
            if min(masses) < 0 or abs(sum(masses) - 1) > 1e-9:
                raise ValueError(f"FinitePair: {name}={masses!r} must be probabilities that add up to 1.")
        check_relation("FinitePair", self.neighboring_relation)

    @classmethod
    def from_densities(
        cls,
        p: Callable[[Array], Array],
        q: Callable[[Array], Array],
        edges: Array,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    ) -> "FinitePair":
        """A finite pair that dominates a pair of densities: each cell's mass moves to its extreme likelihood ratios.

        Args:
            p: density with the example, vectorised.
            q: density without it.
            edges: ascending; the ratio p/q must be monotone within each cell between neighbors. What lies beyond the
                ends counts as perfectly telling. The bound closes with the square of the cells' width.
            neighboring_relation: the one under which this is the worst pair.
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
