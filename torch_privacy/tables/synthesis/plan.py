# SPDX-License-Identifier: Apache-2.0
"""Plans the releases of a generator of marginals, before the first one: from public numbers alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ... import privacy
from ...privacy import NeighboringRelation
from ...support.units import OF_SYNTHESIS, ONE_EXAMPLE, owner_in_words
from ...support.validate import one_of, positive, strictly_between, whole
from ..defaults import Defaults, defaults
from ..price import LearningBudget
from ..schema import Schema

GENERATORS = ("aim", "mst", "network")
WHERE = "synthesize"
Counted = list[tuple[privacy.Event, int]]  # events, and how often each

RELATION = NeighboringRelation.REPLACE_SPECIAL  # as that of the steps of a training
ONE_WAY = {"aim": 0.1, "mst": 1 / 3}  # part of the budget, in inverse squares of the noise, for single columns
SELECT = {"aim": 0.1, "mst": 1 / 2}  # part of the rest for choices
LARGEST_CHOICE = 50.0  # epsilon that the event of a choice takes


@dataclass(frozen=True, kw_only=True)
class SynthesisSettings:
    """The public settings of a run; see `synthesize`."""

    generator: str = "aim"
    epsilon: float
    delta: float
    learning_share: float = 0.3
    per_owner: int | None = None  # None where rows are protected
    unit: str = ONE_EXAMPLE
    seed: int = 0  # of the network's first weights
    steps: int | None = None  # of the network; by default as in a training

    def __post_init__(self) -> None:
        one_of(WHERE, GENERATORS, generator=self.generator)
        positive(WHERE, epsilon=self.epsilon)
        strictly_between(WHERE, 0, 1, delta=self.delta, learning_share=self.learning_share)
        whole(WHERE, seed=self.seed)
        given = {"per_owner": self.per_owner, "steps": self.steps}
        whole(WHERE, at_least=1, **{name: value for name, value in given.items() if value is not None})

    @property
    def protected(self) -> str:
        """Returns what is protected, in words."""
        return (
            "one row of the table"
            if self.per_owner is None
            else owner_in_words(self.unit, self.per_owner, OF_SYNTHESIS)
        )


@dataclass(frozen=True)
class PlannedRelease:
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


def planned(generator: str, num_columns: int, unit: str, scale: float) -> list[PlannedRelease]:
    """Returns all releases in their order; ``scale`` multiplies all noise.

    With w its part of the budget, a release of marginals has noise ``scale / √w`` times their sensitivity, and a choice
    has ``epsilon = 2 √w / scale``: both then cost the same in zero-concentrated differential privacy.
    """
    one, rounds = ONE_WAY[generator], num_rounds(generator, num_columns)

    def marginals(kind: str, part: float) -> PlannedRelease:
        return PlannedRelease(kind, privacy.Gaussian(scale / math.sqrt(part), RELATION, unit=unit))

    select = (1 - one) * SELECT[generator] / rounds
    epsilon = min(2 * math.sqrt(select) / scale, LARGEST_CHOICE)
    choice = PlannedRelease("choice", privacy.ExponentialMechanism(epsilon, False, RELATION, unit))
    measure = (1 - one) * (1 - SELECT[generator])
    if generator == "mst":
        return [marginals("one-way", one), *[choice] * rounds, marginals("chosen", measure)]
    return [marginals("one-way", one), *[choice, marginals("chosen", measure / rounds)] * rounds]


def counted(releases: Sequence[PlannedRelease]) -> Counted:
    """Returns the events with how often each is released."""
    found: dict[privacy.Event, int] = {}
    for release in releases:
        found[release.event] = found.get(release.event, 0) + 1
    return list(found.items())


def learning_budget(settings: SynthesisSettings, schema: Schema, n: int) -> LearningBudget:
    """Returns the price of what the schema leaves open."""
    share = settings.learning_share
    return LearningBudget.of(schema, n, settings.per_owner or 1, share * settings.epsilon, share * settings.delta)


@dataclass(frozen=True)
class Plan:
    """Holds what a run may release: it follows from settings, declared schema and number of rows or persons alone.

    Args:
        settings: of the run.
        schema: as it was declared.
        n: number of rows, or of persons where these are protected.
    """

    settings: SynthesisSettings
    schema: Schema
    n: int

    @property
    def training(self) -> Defaults:
        """Returns the settings of the network's training."""
        found = defaults(self.n, self.settings.epsilon, self.settings.delta)
        return found if self.settings.steps is None else replace(found, num_steps=self.settings.steps)

    @property
    def learning(self) -> Counted:
        """Returns the releases that learn the schema."""
        if self.schema.is_complete:
            return []
        parts = learning_budget(self.settings, self.schema, self.n)
        return [(replace(event, unit=self.settings.unit), count) for event, count in parts.events]  # type: ignore

    def releases(self, scale: float) -> list[PlannedRelease]:
        """Returns the releases of marginals, in their order; columns that learning leaves out count."""
        num_columns = sum(column.kind != "ignored" for column in self.schema.columns)
        return planned(self.settings.generator, num_columns, self.settings.unit, scale)

    def generating(self, scale: float) -> Counted:
        """Returns the releases that make the generator, with this factor on their noise."""
        if self.settings.generator != "network":
            return counted(self.releases(scale))
        q = self.training.expected_batch_size / self.n
        return [(privacy.SubsampledGaussian(scale, q, RELATION, self.settings.unit), self.training.num_steps)]

    def scale(self) -> float:
        """Returns the smallest factor at which everything together keeps to epsilon."""
        learning = self.learning
        settings = self.settings
        return privacy.calibrate_schedule(
            lambda scale: [*learning, *self.generating(scale)], settings.epsilon, settings.delta
        )
