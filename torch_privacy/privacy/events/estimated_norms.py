# SPDX-License-Identifier: Apache-2.0
"""Provides the event of a noisy sum with clip factors from norms that random projections estimate."""

from dataclasses import dataclass

from ...support.units import ONE_EXAMPLE
from ...support.validate import whole
from ..pairs.base import DominatingPair, PairBounds
from ..pairs.mixture import SubsampledMixturePair
from .base import Event, NeighboringRelation, check_fields, check_removal, priced

MOST = 10_000_000  # projections; beyond, the estimate is as good as exact and floating point no better
LEAST_PRICED = 0.05  # noise multiplier; with less, only bounds are known


def _pair(event: "SubsampledJL") -> DominatingPair | PairBounds:
    """Returns the pair; with less noise than is priced, only that it costs more than with the least that is.

    More noise can be added afterwards, which makes (a Z, a x + more noise) of an outcome (Z, x), with a < 1.
    """
    noise = max(event.noise_multiplier, LEAST_PRICED)
    exact = SubsampledMixturePair(event.num_projections, noise, event.sampling_probability)
    return exact if noise == event.noise_multiplier else PairBounds(None, (exact,))


@priced(_pair)
@dataclass(frozen=True, repr=False)
class SubsampledJL(Event):
    """One noisy sum over a Poisson sample, clipped by norms estimated from r random projections (DP-SGD-JL).

    The estimate is ``norm * sqrt(χ²_r / r)``; the projections are drawn anew in each step and are public. With
    ``Z = 1 / (σ sqrt(χ²_r / r))`` the pair is (Z, (1 - q) N(0, 1) + q N(Z, 1)) and (Z, N(0, 1)), in either order.
    An estimate is sometimes far too small, and then a large gradient is not clipped: P(Z > z) ~ z^-r. Below about 16
    projections this event dominates ε; with one projection ε is above 10^11 in the published settings.

    Args:
        noise_multiplier: σ, standard deviation of the noise divided by the clip norm. Below 0.05 the upper bound on ε
            is infinite, and the lower one that of 0.05: for studies of training on data that need no protection.
        num_projections: r, at least 1.
        sampling_probability: q, chance that an example joins the sample, in (0, 1].

    Guarantees:
        - add/remove or zero out one example only: no tight pair is known when an example is replaced.

    Source: Bu, Gopi, Kulkarni, Lee, Shen & Tantipongpipat (2021), arXiv:2102.03013, Lemma 4.1; composed numerically
        instead of by their theorem.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> step = SubsampledJL(noise_multiplier=1.3, num_projections=64, sampling_probability=256 / 60000)
        >>> f"{compose([(step, 3516)]).epsilon(1e-5).high:.4f}"  # 0.8645 with exact norms
        '0.8973'
    """

    noise_multiplier: float
    num_projections: int
    sampling_probability: float
    unit: str = ONE_EXAMPLE
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampler = "Poisson"

    def __post_init__(self) -> None:
        check_fields(self)
        where = "SubsampledJL"
        check_removal(where, self.neighboring_relation)
        whole(where, at_least=1, num_projections=self.num_projections)
        if self.num_projections > MOST:
            raise ValueError(
                f"{where}: num_projections={self.num_projections!r} must be at most {MOST}. Price it as exact norms."
            )
