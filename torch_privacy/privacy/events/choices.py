# SPDX-License-Identifier: Apache-2.0
"""Provides the events that choose the best of several options: the exponential mechanism, and permute-and-flip."""

from dataclasses import dataclass
from math import exp, expm1, log1p

import numpy as np

from ...support.units import ONE_EXAMPLE
from ...support.validate import in_range, positive
from ..pairs.base import PairBounds
from ..pairs.discrete import DiscretePair, pair_from_guarantees
from .base import Event, NeighboringRelation, check_fields, priced

POINTS = 400  # of the table of (ε, δ) of bounded-range mechanisms


def range_pair(largest: float, width: float) -> DiscretePair:
    """Returns the pair with the two losses ``largest`` and ``largest - width``, for a largest loss in (0, width)."""
    chance = -expm1(largest - width) / -expm1(-width)
    q_chance = chance * exp(-largest)
    return DiscretePair((chance, 1 - chance), (q_chance, 1 - q_chance))


def _bounded_range(width: float) -> PairBounds:
    """Returns bounds on a mechanism with losses in an interval of this width, wherever it lies."""
    epsilons = np.linspace(0.0, width, POINTS)
    upper = pair_from_guarantees(epsilons, np.expm1((epsilons - width) / 2) ** 2 / -expm1(-width))
    even = width + log1p(-0.5 * -expm1(-width))  # where both losses have probability 1/2
    return PairBounds(upper, tuple(range_pair(largest, width) for largest in (even, width / 2, 0.8 * width)))


def _width(event: "_Selection") -> float:
    return event.epsilon / 2 if event.monotonic else event.epsilon


@dataclass(frozen=True, repr=False)
class _Selection(Event):
    """A private choice of an option with a large utility."""

    epsilon: float
    monotonic: bool = False
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    unit: str = ONE_EXAMPLE
    sampler = "full batch"

    def __post_init__(self) -> None:
        check_fields(self)
        where = type(self).__name__
        positive(where, epsilon=self.epsilon)
        in_range(where, 1e-6, 50, epsilon=self.epsilon)
        if not isinstance(self.monotonic, bool):
            raise ValueError(f"{where}: monotonic={self.monotonic!r} must be True or False.")


@priced(lambda event: _bounded_range(_width(event)))
@dataclass(frozen=True, repr=False)
class ExponentialMechanism(_Selection):
    """A choice with probability in proportion to ``exp(epsilon * utility / (2 * sensitivity))``.

    The losses of all options lie in an interval of width r, which is epsilon, or half of it for monotonic utilities:
    the mechanism has *bounded range*. ``δ(ε) <= (e^(r/2) - e^(ε/2))² / (e^r - 1)`` for 0 <= ε <= r, which several
    utilities attain, one for each ε. So a single release is exact, and of several the price is an upper bound: the pair
    of that curve. The lower bound is that of utilities with only two losses.

    Args:
        epsilon: in (1e-6, 50]; the same in the formula. Gumbel noise of scale ``2 * sensitivity / epsilon`` on each
            utility, and then the largest, is the same mechanism.
        monotonic: True if an added example changes all utilities in the same direction, such as counts.
        neighboring_relation: the relation of the sensitivity, which is the most that one utility changes.

    Guarantees:
        - never below the price of any utilities of this sensitivity.

    Source: McSherry & Talwar (2007); Durfee & Rogers (2019), arXiv:1905.04273, for the range; Dong, Durfee & Rogers
        (2020), arXiv:1909.13830, for the curve and for what a fixed list of such mechanisms costs.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> low, high = compose([(ExponentialMechanism(epsilon=0.5), 20)]).epsilon(1e-5)
        >>> f"{low:.3f} to {high:.3f}"
        '4.609 to 5.541'
    """


def _flipped(event: "PermuteAndFlip") -> PairBounds:
    width = _width(event)
    truth, other, half = 1 / (1 + exp(-width)), 1 / (1 + exp(width)), exp(-width) / 2
    return PairBounds(DiscretePair((truth, other), (other, truth)), (DiscretePair((0.5, 0.5), (half, 1 - half)),))


@priced(_flipped)
@dataclass(frozen=True, repr=False)
class PermuteAndFlip(_Selection):
    """Options in random order, each taken with probability ``exp(epsilon * (utility - largest) / (2 * sensitivity))``.

    It is (epsilon, 0)-private, or (epsilon / 2, 0) for monotonic utilities, and its utility is never below that of the
    exponential mechanism. But its range is not bounded, so that several cost more: the price is that of randomized
    response, the worst mechanism with this epsilon. The lower bound is two options that are equal on one data set.

    Args:
        epsilon: in (1e-6, 50]; the same in the formula. Exponential noise of scale ``2 * sensitivity / epsilon`` on
            each utility, and then the largest, is the same mechanism.
        monotonic: True if an added example changes all utilities in the same direction, such as counts.
        neighboring_relation: the relation of the sensitivity, which is the most that one utility changes.

    Guarantees:
        - never below the price of any utilities of this sensitivity.

    Source: McKenna & Sheldon (2020), arXiv:2010.12603; Ding et al. (2021), arXiv:2105.07260, for the noise.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> low, high = compose([(PermuteAndFlip(epsilon=0.5), 20)]).epsilon(1e-5)
        >>> f"{low:.3f} to {high:.3f}"
        '8.502 to 9.859'
    """
