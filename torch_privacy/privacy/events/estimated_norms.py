# SPDX-License-Identifier: Apache-2.0
"""Provides the event of a noisy sum with clip factors from norms that random projections estimate."""

from dataclasses import dataclass

from ...support.units import ONE_EXAMPLE, check_unit
from ...support.validate import whole
from ..pairs.mixture import SubsampledMixturePair
from .base import Event, NeighboringRelation, check_noise, check_removal, priced
from .gaussian import check_probability

MOST = 10_000_000  # projections; beyond, the estimate is as good as exact and floating point no better


@priced(lambda event: SubsampledMixturePair(event.num_projections, event.noise_multiplier, event.sampling_probability))
@dataclass(frozen=True, repr=False)
class SubsampledJL(Event):
    """One noisy sum over a Poisson sample, clipped by norms estimated from r random projections (DP-SGD-JL).

    The estimate is ``norm * sqrt(χ²_r / r)``; the projections are drawn anew in each step and are public. With
    ``Z = 1 / (σ sqrt(χ²_r / r))`` the pair is (Z, (1 - q) N(0, 1) + q N(Z, 1)) and (Z, N(0, 1)), in either order.
    An estimate is sometimes far too small, and then a large gradient is not clipped: P(Z > z) ~ z^-r. Below about 16
    projections this event dominates ε; with one projection ε is above 10^11 in the published settings.

    Args:
        noise_multiplier: σ, standard deviation of the noise divided by the clip norm, in [0.05, 1e6].
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
        where = "SubsampledJL"
        check_noise(where, self.noise_multiplier)
        check_unit(where, unit=self.unit)
        check_removal(where, self.neighboring_relation)
        if self.noise_multiplier < 0.05:
            raise ValueError(f"{where}: noise_multiplier={self.noise_multiplier!r} must be at least 0.05 to be priced.")
        check_probability(where, self.sampling_probability)
        whole(where, at_least=1, num_projections=self.num_projections)
        if self.num_projections > MOST:
            raise ValueError(
                f"{where}: num_projections={self.num_projections!r} must be at most {MOST}. Price it as exact norms."
            )
