# SPDX-License-Identifier: Apache-2.0
"""Provides the event of a DP-SGD step with banded matrix noise."""

import hashlib
from dataclasses import dataclass, replace

from ...support.units import ONE_EXAMPLE
from ...support.validate import InvalidValue, whole
from ..pairs.base import DominatingPair
from .base import MAX_COUNT, Event, NeighboringRelation, check_fields, priced
from .gaussian import SubsampledGaussian

WHOLE = 1e-9  # relative rounding of a product that is 1


def _priced_with_its_run(event: "BandedGaussian") -> DominatingPair:
    raise ValueError(f"{event!r} has no price of its own: compose prices the steps of a run together.")


@priced(_priced_with_its_run)
@dataclass(frozen=True, repr=False)
class BandedGaussian(Event):
    """One step of DP-SGD with banded noise, under cyclic Poisson sampling.

    Every example has one of b classes, drawn once. Step t samples class t mod b with probability q b, so that an
    example takes part in steps that are b or more apart. The noise C^-1 z has b bands of norm 1 in C, so that
    participations do not overlap: b steps in a row cost one `SubsampledGaussian` with probability q b, and T steps
    ``ceil(T / b)`` of them. Steps of one run, counted together, must be one entry of a list: `compose` rounds each
    entry up.

    Args:
        noise_multiplier: standard deviation of z divided by the sensitivity, in [1e-6, 1e6].
        sampling_probability: q, the mean batch size over the number of examples; q b is at most 1.
        bands: b, at least 1. With 1, a step is a `SubsampledGaussian`.
        run: number of the release with which these steps begin in their ledger; a run with new keys is another one.
        neighboring_relation: add/remove one example by default. Under replace-one both examples have the same class,
            and the reduced steps are those of `SubsampledGaussian` under this relation: noise over 2 C.

    Guarantees:
        - the price of the reduced steps, exactly; it holds wherever the run stops, and for steps that depend on what
          was released before.

    Source: Choquette-Choo et al. (2023), arXiv:2306.08153, Theorems 4 and 5.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> for bands in (1, 4, 8, 16):
        ...     step = BandedGaussian(noise_multiplier=1.0, sampling_probability=0.01, bands=bands)
        ...     print(f"{compose([(step, 1000)]).epsilon(1e-5).high:.4f}")
        1.8282
        4.1852
        6.2284
        9.0830
    """

    noise_multiplier: float
    sampling_probability: float
    bands: int
    run: int = 0
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    unit: str = ONE_EXAMPLE
    has_runs = True

    @property
    def sampler(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The word for how examples are drawn; "no" where each joins whenever it is its turn."""
        return "cyclic Poisson" if self.sampling_probability * self.bands < 1 - WHOLE else "no"

    def __post_init__(self) -> None:
        check_fields(self)
        where = "BandedGaussian"
        whole(where, at_least=1, at_most=MAX_COUNT, bands=self.bands)
        whole(where, at_most=MAX_COUNT, run=self.run)
        if self.sampling_probability * self.bands > 1 + WHOLE:
            largest = int((1 + WHOLE) / self.sampling_probability)
            raise InvalidValue(
                where, "bands", self.bands,
                f"times sampling_probability={self.sampling_probability!r} must be at most 1: at most {largest} bands.",
            )  # fmt: skip

    def reduced(self, count: int) -> tuple[SubsampledGaussian, int]:
        """Returns the Poisson-sampled release that ``bands`` steps in a row cost, and how many ``count`` steps cost."""
        probability = min(1.0, self.sampling_probability * self.bands)
        release = SubsampledGaussian(self.noise_multiplier, probability, self.neighboring_relation, self.unit)
        return release, -(-count // self.bands)


def of_own_run(event: Event, fingerprint: str = "") -> Event:
    """Returns a step with banded noise in a run numbered by a fingerprint, or in run 0; other events as they are."""
    if not isinstance(event, BandedGaussian):
        return event
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=6).digest()
    return replace(event, run=int.from_bytes(digest) if fingerprint else 0)
