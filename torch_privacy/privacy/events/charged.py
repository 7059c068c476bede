# SPDX-License-Identifier: Apache-2.0
"""Says what the steps of runs cost together, where the steps have no price one by one."""

from collections import Counter
from collections.abc import Iterable

from .banded import BandedGaussian
from .base import Event
from .epochs import BallsAndBins, LaterBatch


def charged(releases: Iterable[tuple[Event, int]]) -> list[tuple[Event, int]]:
    """Returns releases that have a price each, and cost together what the given ones do.

    Later batches of an epoch cost nothing, as the epoch pays for them. Steps with banded noise become the Poisson
    samples to which they reduce.

    Raises:
        ValueError: there are more later batches than the epochs have.
    """
    left: Counter[BallsAndBins] = Counter()
    found: list[tuple[Event, int]] = []
    for event, count in releases:
        if isinstance(event, LaterBatch):
            left[event.epoch] -= count
            continue
        if isinstance(event, BallsAndBins):
            left[event] += count * (event.num_bins - 1)
        found.append(event.reduced(count) if isinstance(event, BandedGaussian) else (event, count))
    for epoch, number in left.items():
        if number < 0:
            raise ValueError(
                f"compose: {-number} later batches of {epoch!r} belong to no epoch in the list, which pays for "
                f"{epoch.num_bins - 1} of them. List the releases of whole trainings."
            )
    return found
