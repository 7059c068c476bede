# SPDX-License-Identifier: Apache-2.0
"""Provides the event of a mechanism with a guarantee in zero-concentrated differential privacy (zCDP)."""

from dataclasses import dataclass
from math import log, sqrt

import numpy as np

from ...support.units import ONE_EXAMPLE
from ...support.validate import in_range
from ..bracket import Array
from ..pairs.base import PairBounds
from ..pairs.discrete import pair_from_guarantees
from .base import Event, NeighboringRelation, check_fields, priced

POINTS = 96  # of the table of (ε, δ): a finer one lowers ε by less than 2e-3, relative
SMALLEST_DELTA = 1e-18  # at the table's end
LARGEST_RHO = 100.0


def delta_of(rho: float, epsilon: Array) -> Array:
    """Returns the smallest δ that ρ-zCDP is known to imply at each ε >= 0, from above.

    ``δ = min over α > 1 of e^((α - 1)(αρ - ε)) (1 - 1/α)^(α - 1) / α``. Every α gives a valid δ, so the search for the
    best one cannot err to the wrong side.

    Source: Canonne, Kamath & Steinke (2020), arXiv:2004.00010, Proposition 12 (Corollary 13 in the journal).
    """
    start = np.log(np.maximum((np.asarray(epsilon, float) - rho) / (2 * rho), 0.1 / (1 + rho)))
    order = 1 + np.exp(start[:, None] + np.linspace(-6, 6, 1201))  # the best α is near (ε + ρ) / 2ρ
    exponent = (order - 1) * (order * rho - np.asarray(epsilon)[:, None])
    exponent += (order - 1) * np.log1p(-1 / order) - np.log(order)
    return np.minimum(np.exp(exponent.min(1) + 1e-12 * (1 + np.abs(exponent.min(1)))), 1.0)


def _pair(event: "ZeroConcentrated") -> PairBounds:
    top = event.rho + 2 * sqrt(event.rho * log(1 / SMALLEST_DELTA))
    epsilons = np.linspace(0.0, top, POINTS)
    return PairBounds(pair_from_guarantees(epsilons, np.minimum(delta_of(event.rho, epsilons) + event.delta, 1.0)))


@priced(_pair)
@dataclass(frozen=True, repr=False)
class ZeroConcentrated(Event):
    """A mechanism known only to be δ-approximately ρ-zCDP, as other libraries state of what they release.

    But for outcomes of probability δ, every Rényi divergence of order α > 1 is at most αρ, in both directions. It is
    priced by the pair that dominates all such mechanisms, so its lower bound is trivial.

    Args:
        rho: ρ, in (0, 100].
        delta: δ, in [0, 1).
        neighboring_relation: the relation under which the guarantee holds.
        unit: the word for what is added or removed, such as "customer".

    Guarantees:
        - never below the price of any mechanism with this guarantee.
        - one mechanism alone costs at most 2e-3 more, relative, than the conversion of the source.

    Source: Bun & Steinke (2016), arXiv:1605.02065, section 8 for δ > 0; Canonne, Kamath & Steinke (2020),
        arXiv:2004.00010, for the conversion.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> f"{compose([(ZeroConcentrated(rho=0.005), 1)]).epsilon(1e-5).high:.3f}"  # noise multiplier 10, or more
        '0.375'
    """

    rho: float
    delta: float = 0.0
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    unit: str = ONE_EXAMPLE
    sampler = "the release's own"

    def __post_init__(self) -> None:
        check_fields(self)
        in_range("ZeroConcentrated", 0, LARGEST_RHO, rho=self.rho)
        in_range("ZeroConcentrated", -1e-300, 1 - 1e-12, delta=self.delta)
