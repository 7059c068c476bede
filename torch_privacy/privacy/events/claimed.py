# SPDX-License-Identifier: Apache-2.0
"""Provides the event of a step with noise of one's own, which has the price that its author claims."""

from dataclasses import dataclass

from .banded import BandedGaussian
from .base import REMOVALS, Event, NeighboringRelation, check_event, check_relation, priced
from .epochs import BallsAndBins, LaterBatch


@priced(lambda event: event.event.dominating_pair())
@dataclass(frozen=True, repr=False)
class Claimed(Event):
    """One step on a Poisson sample with noise of one's own, at the price of the event that its author states.

    `torch_privacy.OwnNoise` makes it. The price is that of ``event``; what is added is the assumption that it holds.

    Args:
        event: a release with a price of its own, for adding or removing one example, or zeroing it out.
        noise: the noise in words, such as "Logistic(scale=2.0, sensitivity=1.0)".
        neighboring_relation: that of ``event``, or zero-out, under which a price for add/remove holds, too.

    Guarantees:
        - exactly the price of ``event``; statements name the assumption.

    Example:
        >>> from torch_privacy.privacy import SubsampledGaussian, compose
        >>> profile = compose([(Claimed(SubsampledGaussian(1.0, 0.01), "Mine()"), 1000)])
        >>> print(f"{profile.epsilon(1e-5).high:.3f}, if {profile.assumptions[0]}")
        1.828, if Mine() hides every change up to its sensitivity, as its author claims
    """

    event: Event
    noise: str
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampler = "Poisson"

    def __post_init__(self) -> None:
        if not isinstance(self.event, Event):
            raise ValueError(f"Claimed: event={self.event!r} must be an event.")
        check_event("Claimed", self.event)
        if isinstance(self.event, BallsAndBins | LaterBatch | BandedGaussian | Claimed):
            raise ValueError(f"Claimed: event={self.event!r} must be that of one step with independent noise.")
        if not isinstance(self.noise, str) or not self.noise.strip() or not self.noise.isprintable():
            raise ValueError(f"Claimed: noise={self.noise!r} must be the noise in words, on one line.")
        check_relation("Claimed", self.neighboring_relation)
        given, needed = self.event.neighboring_relation, self.neighboring_relation
        if needed not in REMOVALS or given not in (needed, NeighboringRelation.ADD_OR_REMOVE_ONE):
            raise ValueError(
                f"Claimed: event={self.event!r} is priced for {given.in_words}, and {needed.in_words} is asked for: "
                "must be add/remove for both, or zero out."
            )

    @property
    def unit(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The unit of the release."""
        return self.event.unit

    @property
    def assumption(self) -> str:
        own = f"{self.noise} hides every change up to its sensitivity, as its author claims"
        return "; ".join(filter(None, [own, self.event.assumption]))
