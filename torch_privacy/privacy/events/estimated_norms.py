# SPDX-License-Identifier: Apache-2.0
"""Releases whose clip factors come from estimated norms: random projections, and sketches of each layer's factors."""

from dataclasses import dataclass

from ..._validate import in_range, whole
from ..pairs.mixture import Estimate, SubsampledMixture
from .base import Event, NeighboringRelation, check_noise, priced
from .gaussian import check_probability

MOST = 10_000_000  # projections beyond which the estimate is as good as exact, and floating point no better


def _check(where: str, event: "SubsampledJL | SubsampledSketch | SubsampledSketchConjectured", number: str) -> None:
    check_noise(where, event.noise_multiplier)
    if event.noise_multiplier < 0.05:
        raise ValueError(f"{where}: noise_multiplier={event.noise_multiplier!r} must be at least 0.05 to be priced.")
    check_probability(where, event.sampling_probability)
    whole(where, at_least=1, **{number: getattr(event, number)})
    if getattr(event, number) > MOST:
        raise ValueError(f"{where}: {number}={getattr(event, number)!r} must be at most {MOST}; price it as exact.")


def _jl_law(event: "SubsampledJL") -> SubsampledMixture:
    estimate = Estimate.PLAIN if event.floor is None else Estimate.FLOORED
    noise, probability = event.noise_multiplier, event.sampling_probability
    return SubsampledMixture(estimate, event.num_projections, noise, probability, event.floor or 0.0)


@priced(_jl_law)
@dataclass(frozen=True, repr=False)
class SubsampledJL(Event):
    """One noisy sum over a Poisson sample, clipped by norms that Gaussian projections estimated.

    The estimate is ``norm * sqrt(χ²_r / r)`` with r projections, drawn anew in each step and made public. With
    ``Z = 1 / (σ sqrt(χ²_r / r))`` the pair is (Z, (1 - q) N(0, 1) + q N(Z, 1)) and (Z, N(0, 1)), in either order.
    An example with a large gradient escapes clipping now and then: P(Z > z) ~ z^-r. Below about 16 projections that is
    what ε measures; one projection costs more than 10^11 in the published settings.

    Args:
        noise_multiplier: σ, standard deviation of the noise over the clip norm, in [0.05, 1e6].
        num_projections: r, at least 1.
        sampling_probability: chance that an example joins the sample, in (0, 1].
        floor: in (0, 1], or None. Given a public bound U on an example's norm that does not depend on the projections,
            ``max(estimate, floor * U)`` is what clips; then ``Z <= 1 / (floor * σ)`` and nothing is heavy-tailed.

    Source: Bu, Gopi, Kulkarni, Lee, Shen & Tantipongpipat (2021), arXiv:2102.03013, Lemma 4.1; composed numerically
        instead of by their Theorem. Add/remove only: no tight pair is known when an example is replaced.
    """

    noise_multiplier: float
    num_projections: int
    sampling_probability: float
    floor: float | None = None
    neighboring_relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampler = "Poisson"

    def __post_init__(self) -> None:
        _check("SubsampledJL", self, "num_projections")
        if self.floor is not None:
            in_range("SubsampledJL", 0, 1, floor=self.floor)

    @property
    def assumption(self) -> str:
        return (
            "" if self.floor is None else f"norms bounded by U deterministically, estimates at least {self.floor:g} U"
        )


@priced(
    lambda event: SubsampledMixture(
        Estimate.ENVELOPE, event.num_directions, event.noise_multiplier, event.sampling_probability
    )
)
@dataclass(frozen=True, repr=False)
class SubsampledSketch(Event):
    """One noisy sum over a Poisson sample, clipped by norms that a sketch of each layer's factors estimated.

    The squared norm is estimated as ``‖G R‖² / r`` with R Gaussian and G an example's gradient as a matrix, any number
    of layers. Whatever G is, the estimate relative to the truth lies below any t <= 1 at most as often as χ²_r / r
    does (proved in the project's notes), so ``Z = max(1, sqrt(r / χ²_r)) / σ`` dominates.

    Args:
        noise_multiplier: σ, standard deviation of the noise over the clip norm, in [0.05, 1e6].
        num_directions: r, columns of R, at least 1.
        sampling_probability: chance that an example joins the sample, in (0, 1].
    """

    noise_multiplier: float
    num_directions: int
    sampling_probability: float
    neighboring_relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampler = "Poisson"

    def __post_init__(self) -> None:
        _check("SubsampledSketch", self, "num_directions")


@priced(
    lambda event: SubsampledMixture(
        Estimate.PLAIN, event.num_directions, event.noise_multiplier, event.sampling_probability
    )
)
@dataclass(frozen=True, repr=False)
class SubsampledSketchConjectured(Event):
    """`SubsampledSketch` at the price of plain projections: **a conjecture, not a guarantee**.

    Numerically no G costs more than one of rank 1, whose estimate is ``χ²_r / r``, for noise multipliers of 0.4 and
    above; it is false at 0.3 and below, which is refused. Not to be reported as a guarantee.

    Args:
        noise_multiplier: as of `SubsampledSketch`, at least 0.4.
        num_directions: as there.
        sampling_probability: as there.
    """

    noise_multiplier: float
    num_directions: int
    sampling_probability: float
    neighboring_relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampler = "Poisson"

    def __post_init__(self) -> None:
        _check("SubsampledSketchConjectured", self, "num_directions")
        if self.noise_multiplier < 0.4:
            got = f"noise_multiplier={self.noise_multiplier!r}"
            raise ValueError(
                f"SubsampledSketchConjectured: {got} must be at least 0.4; below, the conjecture is false."
            )

    @property
    def assumption(self) -> str:
        return "conjectured, not proved: no gradient matrix costs more than one of rank 1"
