# SPDX-License-Identifier: Apache-2.0
"""Provides the events of noisy sums with clip factors from estimated norms: random projections and sketches."""

from dataclasses import dataclass

from ...support.units import ONE_EXAMPLE, check_unit
from ...support.validate import in_range, whole
from ..pairs.mixture import Estimate, SubsampledMixturePair
from .base import Event, NeighboringRelation, check_noise, check_removal, priced
from .gaussian import check_probability

SMALLEST_FLOOR = 1e-100
MOST = 10_000_000  # projections; beyond, the estimate is as good as exact and floating point no better


def _check(where: str, event: "SubsampledJL | SubsampledSketch", number: str) -> None:
    """Raises a ``ValueError`` unless the event can be priced; ``number`` names the field with its projections."""
    check_noise(where, event.noise_multiplier)
    check_unit(where, unit=event.unit)
    check_removal(where, event.neighboring_relation)
    if event.noise_multiplier < 0.05:
        raise ValueError(f"{where}: noise_multiplier={event.noise_multiplier!r} must be at least 0.05 to be priced.")
    check_probability(where, event.sampling_probability)
    whole(where, at_least=1, **{number: getattr(event, number)})
    if getattr(event, number) > MOST:
        raise ValueError(
            f"{where}: {number}={getattr(event, number)!r} must be at most {MOST}. Price it as exact norms."
        )


def _jl_pair(event: "SubsampledJL") -> SubsampledMixturePair:
    estimate = Estimate.PLAIN if event.floor is None else Estimate.FLOORED
    noise, probability = event.noise_multiplier, event.sampling_probability
    return SubsampledMixturePair(estimate, event.num_projections, noise, probability, event.floor or 0.0)


@priced(_jl_pair)
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
        floor: in (0, 1], or None. With a public bound U on an example's norm that does not depend on the projections,
            clipping uses ``max(estimate, floor * U)``; then ``Z <= 1 / (floor * σ)`` and losses are not heavy-tailed.

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
    floor: float | None = None
    unit: str = ONE_EXAMPLE
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampler = "Poisson"

    def __post_init__(self) -> None:
        _check("SubsampledJL", self, "num_projections")
        if self.floor is not None:
            in_range("SubsampledJL", SMALLEST_FLOOR, 1, floor=self.floor)

    @property
    def assumption(self) -> str:
        return (
            "" if self.floor is None else f"norms bounded by U deterministically, estimates at least {self.floor:g} U"
        )


@priced(
    lambda event: SubsampledMixturePair(
        Estimate.ENVELOPE, event.num_directions, event.noise_multiplier, event.sampling_probability
    )
)
@dataclass(frozen=True, repr=False)
class SubsampledSketch(Event):
    """One noisy sum over a Poisson sample, clipped by norms estimated from a sketch of each layer's factors.

    The squared norm is estimated as ``‖G R‖² / r`` with R Gaussian and G an example's gradient as a matrix, for any
    number of layers. For every G, the estimate divided by the truth lies below any t <= 1 at most as often as χ²_r / r
    does (proved in the project's notes), so ``Z = max(1, sqrt(r / χ²_r)) / σ`` dominates; see `SubsampledJL` for Z.

    Args:
        noise_multiplier: σ, standard deviation of the noise divided by the clip norm, in [0.05, 1e6].
        num_directions: r, the number of columns of R, at least 1.
        sampling_probability: chance that an example joins the sample, in (0, 1].

    Guarantees:
        - never below the price of any gradient; add/remove or zero out one example only.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> step = SubsampledSketch(noise_multiplier=1.3, num_directions=64, sampling_probability=256 / 60000)
        >>> f"{compose([(step, 3516)]).epsilon(1e-5).high:.4f}"
        '0.9302'
    """

    noise_multiplier: float
    num_directions: int
    sampling_probability: float
    unit: str = ONE_EXAMPLE
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampler = "Poisson"

    def __post_init__(self) -> None:
        _check("SubsampledSketch", self, "num_directions")
