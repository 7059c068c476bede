# SPDX-License-Identifier: Apache-2.0
"""Frozen descriptions of releases: what was done to the data, not yet what it costs."""

from abc import ABC
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, ClassVar

from .._check import in_range, one_of, positive

# Beyond these there is no privacy or no signal left, and floating point gives out.
SMALLEST_NOISE, LARGEST_NOISE = 1e-6, 1e6


class NeighboringRelation(Enum):
    """Which two data sets count as neighbors; an epsilon means nothing without it."""

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    """One data set is the other plus one example."""

    REPLACE_ONE = "replace_one"
    """Same size, one example differs."""

    REPLACE_SPECIAL = "replace_special"
    """Same size, one example is swapped for a null record that contributes nothing."""


def check_noise(where: str, noise_multiplier: float) -> None:
    """Raise unless the noise multiplier is a number that can be priced."""
    positive(where, noise_multiplier=noise_multiplier)
    if not SMALLEST_NOISE <= noise_multiplier <= LARGEST_NOISE:
        raise ValueError(
            f"{where}: noise_multiplier={noise_multiplier!r} must lie in [{SMALLEST_NOISE:g}, {LARGEST_NOISE:g}]. "
            "Usual values lie between 0.3 and 10; it is relative to the sensitivity."
        )


class Event(ABC):
    """One release. The fields are public information and all that its price may depend on."""

    neighboring_relation: ClassVar[NeighboringRelation]
    sampler: ClassVar[str]


@dataclass(frozen=True)
class SubsampledGaussian(Event):
    """One noisy sum over a Poisson sample: every example joins independently with the same probability.

    Released is ``sum of clipped values + N(0, (noise_multiplier * sensitivity)² I)``.

    Args:
        noise_multiplier: standard deviation of the noise divided by the sensitivity, in [1e-6, 1e6].
        sampling_probability: chance that an example joins the sample, in (0, 1].

    Example:
        >>> SubsampledGaussian(noise_multiplier=1.1, sampling_probability=256 / 60000).sampler
        'Poisson'
    """

    noise_multiplier: float
    sampling_probability: float
    neighboring_relation: ClassVar[NeighboringRelation] = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampler: ClassVar[str] = "Poisson"

    def __post_init__(self) -> None:
        check_noise("SubsampledGaussian", self.noise_multiplier)
        in_range(
            "SubsampledGaussian",
            0,
            1,
            sampling_probability=self.sampling_probability,
            hint="For a mean batch of 256 out of 60000 pass 256 / 60000.",
        )


@dataclass(frozen=True)
class Gaussian(Event):
    """One noisy sum over all the data: the case ``sampling_probability = 1``.

    Args:
        noise_multiplier: standard deviation of the noise divided by the sensitivity, in [1e-6, 1e6].
    """

    noise_multiplier: float
    neighboring_relation: ClassVar[NeighboringRelation] = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampler: ClassVar[str] = "full batch"

    def __post_init__(self) -> None:
        check_noise("privacy.Gaussian", self.noise_multiplier)


EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in (SubsampledGaussian, Gaussian)}


def event_to_dict(event: Event) -> dict[str, Any]:
    """The event as plain JSON: its type's name under ``"type"``, then its fields.

    Example:
        >>> event_to_dict(Gaussian(2.0))
        {'type': 'Gaussian', 'noise_multiplier': 2.0}
    """
    one_of("event_to_dict", EVENTS, type=type(event).__name__)
    return {"type": type(event).__name__, **asdict(event)}  # pyright: ignore[reportArgumentType]


def event_from_dict(description: dict[str, Any]) -> Event:
    """The event that `event_to_dict` described.

    Raises:
        ValueError: the type is not known, a field is missing or unknown, or a value is not allowed.
    """
    values = dict(description)
    name = values.pop("type", None)
    one_of("event_from_dict", EVENTS, type=name)
    kind = EVENTS[name]
    expected = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    if set(values) != expected:
        raise ValueError(f"event_from_dict: {name} has fields {sorted(expected)}, but got {sorted(values)}.")
    return kind(**values)
