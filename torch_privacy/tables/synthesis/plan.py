# SPDX-License-Identifier: Apache-2.0
"""Plans the releases of a generator of marginals, before the first one: from public numbers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ... import privacy
from ...privacy import NeighboringRelation

RELATION = NeighboringRelation.REPLACE_SPECIAL  # as that of the steps of a training
ONE_WAY = {"aim": 0.1, "mst": 1 / 3}  # part of the budget, in inverse squares of the noise, for single columns
SELECT = {"aim": 0.1, "mst": 1 / 2}  # part of the rest for choices
LARGEST_CHOICE = 50.0  # epsilon that the event of a choice takes


@dataclass(frozen=True)
class Release:
    """A planned release: ``"one-way"`` marginals, the ``"choice"`` of a marginal, or the marginals ``"chosen"``."""

    kind: str
    event: privacy.Event

    @property
    def noise(self) -> float:
        """Returns the noise multiplier of marginals; the epsilon of a choice."""
        return getattr(self.event, "noise_multiplier", None) or self.event.epsilon  # type: ignore[attr-defined]


def num_rounds(generator: str, num_columns: int, most: int | None = None) -> int:
    """Returns the number of choices: of a tree of all columns, or twice as many as columns."""
    rounds = num_columns - 1 if generator == "mst" else 2 * num_columns
    return max(1, rounds if most is None else min(rounds, most))


def planned(generator: str, num_columns: int, unit: str, scale: float) -> list[Release]:
    """Returns all releases in their order; ``scale`` multiplies all noise.

    With w its part of the budget, a release of marginals has noise ``scale / √w`` times their sensitivity, and a choice
    has ``epsilon = 2 √w / scale``: both then cost the same in zero-concentrated differential privacy.
    """
    one, rounds = ONE_WAY[generator], num_rounds(generator, num_columns)

    def marginals(kind: str, part: float) -> Release:
        return Release(kind, privacy.Gaussian(scale / math.sqrt(part), RELATION, unit=unit))

    select = (1 - one) * SELECT[generator] / rounds
    epsilon = min(2 * math.sqrt(select) / scale, LARGEST_CHOICE)
    choice = Release("choice", privacy.ExponentialMechanism(epsilon, False, RELATION, unit))
    measure = (1 - one) * (1 - SELECT[generator])
    if generator == "mst":
        return [marginals("one-way", one), *[choice] * rounds, marginals("chosen", measure)]
    return [marginals("one-way", one), *[choice, marginals("chosen", measure / rounds)] * rounds]


def counted(releases: list[Release]) -> list[tuple[privacy.Event, int]]:
    """Returns the events with how often each is released."""
    found: dict[privacy.Event, int] = {}
    for release in releases:
        found[release.event] = found.get(release.event, 0) + 1
    return list(found.items())
