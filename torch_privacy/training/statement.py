# SPDX-License-Identifier: Apache-2.0
"""Reports the privacy that a training has spent, in one line and as a machine-readable statement."""

from __future__ import annotations

import platform
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import privacy
from ..mechanisms.base import Mechanism, noise_factors, summary_of
from ..mechanisms.noise import TailNumbers
from ..privacy.budget_file import counted, includes
from ..privacy.budget_runs import Reservation
from ..privacy.events.base import releases_to_json
from ..privacy.spent import ALWAYS_PUBLIC, AUDIT, NEVER_COVERED, NOT_FOR_RELEASE, NOT_PRIVATE, Spent
from ..privacy.summary import attacker_as_json, interval_as_json
from ..support.units import ITEM, OF_TRAINING, owner_in_words
from ..support.validate import Refused
from ..support.version import __version__
from .sampling import StepPlan
from .settings import TrainingSettings

MOVED = (
    "NOT PRIVATE (the trained weights were changed other than by the training's own steps, {}; if that used no private "
    "data, take the statement before it)"
)


@dataclass(frozen=True)
class TrainingProgress:
    """Holds the progress of a training, on which its privacy statement depends."""

    steps_made: int
    stop_reason: str | None  # reason for stopping, if declared to be independent of the data
    moved_otherwise: str  # when other code was first seen to have moved the weights; empty if it did not
    coupled: str  # NOT PRIVATE and which releases may leak, if examples were found to depend on each other; or empty
    not_compared: frozenset[str]  # what rehearsals could not compare, in words
    not_covered: tuple[str, ...]  # what no epsilon covers, in words
    generator: str  # of the noise
    date: str  # of the last step, in UTC
    callbacks: tuple[str, ...]  # names of those called after every step
    num_trained: int  # numbers in all trained parameters


class Account:
    """Prices the steps of a training: those made, and those still planned.

    Args:
        settings: settings of the training.
        plan: the event of each step.
        ledger: records the releases.
        ranks: number of processes.
        reservation: in the budget of the data, if there is one.
        shows_owners: whether it is public who owns each example.

    Attributes:
        is_settled: whether the training has given back the rest of its reservation, so that it may release no more.

    Raises:
        Refused: the budget does not allow one step.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        plan: StepPlan,
        ledger: privacy.Ledger,
        ranks: int = 1,
        reservation: Reservation | None = None,
        *,
        shows_owners: bool = False,
    ):
        self._settings, self._plan, self._ledger, self._ranks = settings, plan, ledger, ranks
        self._at_first, self._num_lost = plan, 0
        self._reservation, self.is_settled = reservation, False
        self._shows_owners = shows_owners
        self.steps_allowed = self._steps_allowed()
        self._planned: tuple[Any, privacy.Profile] | None = None
        if not self.steps_allowed:
            raise Refused(
                f"PrivateTraining: {settings.budget!r} does not allow one step of {plan.at(0)!r}. Raise noise or "
                "budget."
            )

    def count_lost(self, num_lost: int, plan: StepPlan) -> None:
        """Counts the steps allowed by what is now planned, after releases that were not repeated."""
        self._plan, self._num_lost = plan, num_lost
        self.steps_allowed = self._steps_allowed()

    def _steps_released(self) -> int:
        """Returns the number of steps in the ledger that were not lost; some may have to be repeated."""
        number = sum(count for _, count in self._ledger.events)
        return min(number - len(self._settings.prior_releases) - self._num_lost, self._settings.num_steps)

    def _steps_allowed(self) -> int:
        """Returns the total number of steps, as planned or as the budget allows."""
        settings, num_steps = self._settings, self._settings.num_steps
        limits: list[Any] = [limit for limit in (self._reservation or settings.budget,) if limit is not None]
        released, made = self._ledger.events, self._steps_released()
        planned = StepPlan([*released, *self._plan.between(made, num_steps)]).releases
        more = planned != StepPlan([*settings.prior_events, *self._at_first.releases]).releases
        if more and settings.target_epsilon is not None and settings.delta is not None:
            limits.append(privacy.Budget(settings.target_epsilon, settings.delta))  # the noise is for fewer releases
        if not limits:
            return num_steps
        begun = isinstance(self._plan.at(made), privacy.BandedGaussian) and made > 0  # a group may go on
        if self._plan.is_constant and not begun:
            left = [limit.remaining(self._plan.at(0), after=released, most=num_steps) for limit in limits]
            return min(num_steps, made + min(left, default=num_steps))

        def exceeds(end: int) -> bool:
            releases = StepPlan(
                [*released, *self._plan.between(made, end)]
            ).releases  # runs of equal ones are one entry
            return not all(limit.allows(releases) for limit in limits)

        return bisect_left(range(num_steps + 1), True, lo=made + 1, key=exceeds) - 1

    @property
    def draws(self) -> bool:
        """True if the training draws from the budget of its data."""
        return self._reservation is not None

    def begin(self) -> None:
        """Notes in the budget of the data that the training begins to read rows."""
        if self._reservation is not None:
            self._reservation.begin()

    def settle(self, reason: str = "") -> None:
        """Gives back what the training has not released of its reservation, and will not."""
        reservation = self._reservation
        if reservation is None:
            return
        self.is_settled = True
        drawn = reservation.drawn
        if drawn.settled is not None:
            return
        made = counted(reservation.budget.unknown(self._ledger.made))
        releases = made if reason or includes(made, drawn.reserved) else None  # else outcomes may have decided the stop
        own = self._ledger.releases[len(self._settings.prior_releases) :]
        fingerprints, warning = [release.fingerprint for release in own], self._ledger.warning
        reservation.settle(releases, reason=reason, fingerprints=fingerprints, warning=warning)

    def profile(self) -> privacy.Profile:
        """Returns the privacy profile of the releases so far."""
        return self._ledger.profile()

    def planned_profile(self, progress: TrainingProgress) -> privacy.Profile:
        """Returns the privacy profile of the releases so far and of the steps still planned."""
        releases = self._planned_releases(progress)
        if releases == self._ledger.events:
            return self.profile()
        key = repr(releases)
        if self._planned is None or self._planned[0] != key:
            self._planned = key, privacy.compose(releases)
        return self._planned[1]

    def covering_releases(self, progress: TrainingProgress) -> list[tuple[privacy.Event, int]]:
        """Returns the releases with the epsilon to report: see `statement`."""
        return self._ledger.events if self._is_over(progress) else self._planned_releases(progress)

    def _planned_releases(self, progress: TrainingProgress) -> list[tuple[privacy.Event, int]]:
        made = max(progress.steps_made, self._steps_released())
        return StepPlan([*self._ledger.events, *self._plan.between(made, self.steps_allowed)]).releases

    def spent(
        self, progress: TrainingProgress, mechanism: Mechanism, delta: float, group_size: int | None = None
    ) -> Spent:
        """Returns the privacy spent by the releases so far, and by all that are planned.

        With a group size it is that of a person with at most that number of examples.
        """
        profile, planned, warning = self.profile(), self.planned_profile(progress), self.warning(progress)
        if group_size is not None:
            profile, planned = (
                privacy.compose([(privacy.for_group(event, group_size), count) for event, count in of_one.events])
                for of_one in (profile, planned)
            )
        unit = None if self._settings.owners is None else self._settings.owners.in_words
        text, made, steps = profile.statement(delta, unit), progress.steps_made, self.steps_allowed
        if made < steps and progress.stop_reason is None:
            text = (
                f"{text} after {made} of {steps} steps; {planned.statement(delta, unit)} after all, which is the one "
                "to report if a stop depends on what was released"
            )
        epsilon = profile.epsilon(delta)
        return Spent(
            epsilon,
            delta,
            text if warning is None else f"{warning}: {text}",
            epsilon if made == steps else planned.epsilon(delta),
            is_public=warning is not None and warning != AUDIT,
            profile=profile if self._is_over(progress) else planned,
            unit=self._unit()["unit"] if group_size is None else f"one {planned.unit}",
            treated_as_public=self._public(mechanism),
            not_covered=self._not_covered(progress),
        )

    def statement(self, progress: TrainingProgress, mechanism: Mechanism) -> dict[str, Any]:
        """Returns everything that determines the guarantee, as plain data."""
        settings, warning = self._settings, self.warning(progress)
        budget, covering = settings.budget, self._covering(progress)
        made, priced = releases_to_json(self._ledger.events), releases_to_json(covering.events)
        return {
            "format": 2,
            "date": progress.date,
            "private": warning is None,
            **({} if warning is None else {"warning": warning}),
            "neighboring_relation": self._plan.at(0).neighboring_relation.value,
            "sampler": self._plan.at(0).sampler,
            **({"ranks": self._ranks} if self._ranks > 1 else {}),
            **self._unit(),
            **({"num_canaries": settings.num_canaries} if settings.num_canaries else {}),
            "expected_batch_size": settings.expected_batch_size,
            "sampling_probability": settings.sampling_probability,
            "num_steps_planned": settings.num_steps,
            "num_steps_made": progress.steps_made,
            "stop": {"independent_of_data": progress.stop_reason is not None, "reason": progress.stop_reason},
            "independence": {
                "shown_by": "rehearsal" if settings.assume_independent is None else "assumption",
                "assumed_because": settings.assume_independent,
                "not_compared": sorted(progress.not_compared),
            },
            **({} if settings.after_update is None else {"after_update": _post_processing(settings.after_update)}),
            "clipping": mechanism.statement(),
            "sensitivity": mechanism.largest_sensitivity,
            "noise_multiplier": settings.noise_multiplier,
            **({} if settings.noise_schedule is None else {"noise_schedule": summary_of(settings.noise_schedule)}),
            **({} if settings.sampling.sizes is None else {"size_schedule": summary_of(settings.sampling.sizes)}),
            **(
                {}
                if settings.correlation is None
                else {"correlation": settings.correlation.statement(settings.num_steps, settings.sampling_probability)}
            ),
            "noise": self._noise(progress),
            "noise_factor": noise_factors(progress.num_trained, settings.largest_noise),
            "target_epsilon": settings.target_epsilon,
            "budget": None if budget is None else {"epsilon": budget.epsilon, "delta": budget.delta},
            **({} if self._reservation is None else {"data_budget": self._reservation.as_json()}),
            "delta": settings.delta,
            "epsilon": self._as_json(covering),
            "epsilon_of_steps_made": self._as_json(self.profile()),
            "attacker": attacker_as_json(covering),
            "releases": made,
            **({} if priced == made else {"releases_priced": priced}),
            **({"prior_releases": releases_to_json(settings.prior_events)} if settings.prior_releases else {}),
            "treated_as_public": [*self._public(mechanism)],
            "not_covered": [*self._not_covered(progress)],
            "versions": versions(),
        }

    def _noise(self, progress: TrainingProgress) -> str:
        """Returns the law of the noise, and where it comes from."""
        own = self._settings.own_noise
        law, made_by = ("Gaussian", progress.generator) if own is None else (own.name, TailNumbers.name)
        return f"{law}, float64 on a grid, key from the operating system: {made_by}"

    def _public(self, mechanism: Mechanism) -> tuple[str, ...]:
        size = "num_examples" if self._settings.owners is None else "num_owners"
        return (
            size,
            *(("the owners of each example",) if self._shows_owners else ()),
            *ALWAYS_PUBLIC,
            *mechanism.treated_as_public,
        )

    @staticmethod
    def _not_covered(progress: TrainingProgress) -> tuple[str, ...]:
        statistics, *others = NEVER_COVERED
        return (statistics, *_logs(progress.callbacks), *others, *progress.not_covered)

    def _unit(self) -> dict[str, Any]:
        """Returns what is protected and how many there are. With owners the number of examples is not public."""
        settings, owners = self._settings, self._settings.owners
        if owners is None:
            return {"unit": ITEM, "num_examples": settings.num_examples}
        return {
            "unit": owner_in_words(owners.name, owners.per_owner, OF_TRAINING),
            "owner": owners.name,
            "num_owners": owners.count,
            "examples_per_owner": owners.per_owner,
            **({} if owners.left_out is None else {"examples_left_out": owners.left_out}),
        }

    def warning(self, progress: TrainingProgress) -> str | None:
        """Returns the reason if the training is not private."""
        if self._settings.test_seed is not None:
            return NOT_PRIVATE
        if self._settings.not_for_release:
            return NOT_FOR_RELEASE
        if progress.coupled:
            return progress.coupled
        if progress.moved_otherwise:
            return MOVED.format(progress.moved_otherwise)
        if self._ledger.reason.known:  # of releases that a state from before them does not know
            return self._ledger.reason.known
        if self._settings.num_canaries:
            return AUDIT
        return next((release.warning for release in self._settings.prior_releases if release.warning), None)

    def why_not_private(self, progress: TrainingProgress) -> str:
        """Returns the reason why the releases are not private; "" if they are, as those of an audit."""
        warning = self.warning(progress)
        return "" if warning is None or warning == AUDIT else warning

    def _covering(self, progress: TrainingProgress) -> privacy.Profile:
        """Returns the profile that holds wherever training stops; that of the steps made if the stop is independent."""
        return self.profile() if self._is_over(progress) else self.planned_profile(progress)

    def _is_over(self, progress: TrainingProgress) -> bool:
        return progress.stop_reason is not None or progress.steps_made >= self.steps_allowed

    def _as_json(self, profile: privacy.Profile) -> dict[str, float | None] | None:
        """Returns the certified interval at the given delta; null stands for infinity."""
        if self._settings.delta is None:
            return None
        return interval_as_json(profile.epsilon(self._settings.delta))


def versions() -> dict[str, str]:
    """Returns the versions that a statement lists."""
    return {
        "torch_privacy": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _post_processing(name: str) -> str:
    return f"{name} changes the weights after every update; that it reads nothing but released weights is a promise"


def _logs(callbacks: tuple[str, ...]) -> list[str]:
    """Returns the sentence on what callbacks were given, if there are any."""
    if not callbacks:
        return []
    return [
        "the logs kept by callbacks of the training, which are given losses, shares of clipped examples and gradient "
        f"norms of each batch without noise: {', '.join(callbacks)}"
    ]
