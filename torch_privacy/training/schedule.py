# SPDX-License-Identifier: Apache-2.0
"""Provides the number of steps, and the events that are planned for them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any

from .. import privacy
from ..support.steps import steps_of
from ..support.validate import plain_number, positive

WHERE = "PrivateTraining"


def number_of_steps(num_steps: int | None, epochs: float | None, num_examples: int, batch_size: float) -> int:
    """Returns the number of steps: the one given, or the smallest with ``epochs * n`` examples drawn on average.

    Raises:
        ValueError: both or none are given, or ``epochs`` is not a finite number above 0.
    """
    if (num_steps is None) == (epochs is None):
        raise ValueError(f"{WHERE}: num_steps={num_steps!r} and epochs={epochs!r}: give exactly one of the two.")
    if num_steps is not None or epochs is None:
        return num_steps  # pyright: ignore[reportReturnType]  # checked above
    passes, mean_size = plain_number(epochs), plain_number(batch_size)
    positive(WHERE, epochs=passes, expected_batch_size=mean_size)
    return steps_of(passes, num_examples, mean_size)


@lru_cache
def under(relation: privacy.NeighboringRelation, event: Any) -> privacy.Event:
    """Returns the event under another relation; asked for in every step."""
    return replace(event, neighboring_relation=relation)


class StepPlan:
    """Holds the event of every planned step.

    Args:
        releases: events in the order of the steps, each with the number of steps that it is for.
    """

    def __init__(self, releases: Iterable[tuple[privacy.Event, int]]):
        runs = groupby(releases, key=lambda release: release[0])
        self.releases = [(event, sum(count for _, count in same)) for event, same in runs]
        self._ends = [*accumulate(count for _, count in self.releases)]

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def is_constant(self) -> bool:
        """True if all steps have one event."""
        return len(self.releases) == 1

    def at(self, step: int) -> privacy.Event:
        """Returns the event of a step; after the last one, that of the last."""
        return self.releases[min(bisect_right(self._ends, step), len(self.releases) - 1)][0]

    def begun_anew(self, step: int, number: int) -> StepPlan:
        """Returns the plan where a run begins at a step, as under new keys, with this number in the ledger."""
        event = self.at(step)
        if isinstance(event, privacy.BandedGaussian):
            return StepPlan([*self.between(0, step), (replace(event, run=number), len(self) - step)])
        if not isinstance(event, privacy.LaterBatch):
            return self
        return StepPlan([*self.between(0, step), (event.epoch, 1), *self.between(step + 1, len(self))])

    def between(self, start: int, end: int) -> list[tuple[privacy.Event, int]]:
        """Returns the releases of the steps from ``start`` up to ``end``, without ``end``."""
        bounds = [0, *self._ends]
        counts = [min(high, end) - max(low, start) for low, high in pairwise(bounds)]
        return [(event, count) for (event, _), count in zip(self.releases, counts, strict=True) if count > 0]
