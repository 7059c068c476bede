# SPDX-License-Identifier: Apache-2.0
"""Reports the privacy that a training has spent, in one line and as a machine-readable statement."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import privacy
from ..mechanism import Mechanism
from ..privacy.spent import AUDIT, NOT_FOR_RELEASE, NOT_PRIVATE, Spent
from ..support.validate import Refused
from ..support.version import __version__
from .settings import TrainingSettings

MOVED = (
    "NOT PRIVATE (the trained weights were changed other than by the training's own steps, {}; if that used no private "
    "data, take the statement before it)"
)

CHOICE_OF_SETTINGS = "the choice of hyper-parameters by looking at this data"


@dataclass(frozen=True)
class Progress:
    """Holds the progress of a training, on which its privacy statement depends."""

    steps_made: int
    stop_reason: str | None  # reason for stopping, if declared to be independent of the data
    moved_otherwise: str  # when other code was first seen to have moved the weights; empty if it did not
    not_compared: frozenset[str]  # what rehearsals could not compare, in words
    generator: str  # of the noise


class Account:
    """Prices the steps of a training: those made, and those still planned.

    Args:
        settings: settings of the training.
        event: event of one step.
        ledger: records the releases.

    Raises:
        Refused: the budget does not allow one step.
    """

    def __init__(self, settings: TrainingSettings, event: privacy.Event, ledger: privacy.Ledger):
        self._settings, self._event, self._ledger = settings, event, ledger
        self.steps_allowed = self._steps_allowed(0)
        self._planned: tuple[Any, privacy.Profile] | None = None
        if not self.steps_allowed:
            raise Refused(
                f"PrivateTraining: {settings.budget!r} does not allow one step of {event!r}. Raise noise or budget."
            )

    def count_lost(self, num_lost: int) -> None:
        """Counts the steps allowed again after so many releases that were not repeated; keeps to the target epsilon."""
        self.steps_allowed = self._steps_allowed(num_lost)

    def _steps_allowed(self, num_lost: int) -> int:
        """Returns the total number of steps, as planned or as the budget allows."""
        settings, num_steps = self._settings, self._settings.num_steps
        limits = [] if settings.budget is None else [settings.budget]
        if num_lost and settings.target_epsilon is not None and settings.delta is not None:
            limits.append(privacy.Budget(settings.target_epsilon, settings.delta))
        released = self._ledger.events
        made = sum(count for _, count in released) - len(settings.prior_releases) - num_lost
        left = [limit.remaining(self._event, after=released, most=num_steps) for limit in limits]
        return min(num_steps, made + min(left, default=num_steps))

    def profile(self) -> privacy.Profile:
        """Returns the privacy profile of the releases so far."""
        return self._ledger.profile()

    def planned_profile(self, progress: Progress) -> privacy.Profile:
        """Returns the privacy profile of the releases so far and of the steps still planned."""
        left = self.steps_allowed - progress.steps_made
        made = self._ledger.events
        key = repr(made), left
        if self._planned is None or self._planned[0] != key:
            self._planned = key, privacy.compose([*made, (self._event, left)]) if left > 0 else self.profile()
        return self._planned[1]

    def spent(self, progress: Progress, delta: float) -> Spent:
        """Returns the privacy spent by the releases so far, and by all that are planned."""
        profile, planned, warning = self.profile(), self.planned_profile(progress), self._warning(progress)
        text, made, steps = profile.statement(delta), progress.steps_made, self.steps_allowed
        if made < steps and progress.stop_reason is None:
            text = (
                f"{text} after {made} of {steps} steps; {planned.statement(delta)} after all, which is the one to "
                "report if a stop depends on what was released"
            )
        epsilon = profile.epsilon(delta)
        return Spent(
            epsilon,
            delta,
            text if warning is None else f"{warning}: {text}",
            epsilon if made == steps else planned.epsilon(delta),
        )

    def statement(self, progress: Progress, mechanism: Mechanism) -> dict[str, Any]:
        """Returns everything that determines the guarantee, as plain data."""
        settings, warning = self._settings, self._warning(progress)
        budget = settings.budget
        return {
            "format": 2,
            "private": warning is None,
            **({} if warning is None else {"warning": warning}),
            "neighboring_relation": self._event.neighboring_relation.value,
            "sampler": self._event.sampler,
            "unit": "one item of the dataset",
            **({"num_canaries": settings.num_canaries} if settings.num_canaries else {}),
            "num_examples": settings.num_examples,
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
            "clipping": mechanism.statement(),
            "sensitivity": mechanism.sensitivity,
            "noise_multiplier": settings.noise_multiplier,
            "noise": f"Gaussian, float64 on a grid, key from the operating system: {progress.generator}",
            "target_epsilon": settings.target_epsilon,
            "budget": None if budget is None else {"epsilon": budget.epsilon, "delta": budget.delta},
            "delta": settings.delta,
            "epsilon": self._as_json(self._covering(progress)),
            "epsilon_of_steps_made": self._as_json(self.profile()),
            "releases": [
                {"event": privacy.event_to_dict(event), "count": count} for event, count in self._ledger.events
            ],
            "treated_as_public": [
                "num_examples",
                "model architecture",
                "hyper-parameters",
                "number of steps",
                *mechanism.treated_as_public,
            ],
            "not_covered": [
                "losses, accuracies and counts computed on the training data and shown or logged without noise",
                CHOICE_OF_SETTINGS,
                "the test data, on which accuracy is measured",
            ],
            "versions": {
                "torch_privacy": __version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }

    def _warning(self, progress: Progress) -> str | None:
        """Returns the reason if the training is not private."""
        if self._settings.test_seed is not None:
            return NOT_PRIVATE
        if self._settings.not_for_release:
            return NOT_FOR_RELEASE
        if self._settings.num_canaries:
            return AUDIT
        if progress.moved_otherwise:
            return MOVED.format(progress.moved_otherwise)
        return next((release.warning for release in self._settings.prior_releases if release.warning), None)

    def _covering(self, progress: Progress) -> privacy.Profile:
        """Returns the profile that holds wherever training stops; that of the steps made if the stop is independent."""
        made = progress.stop_reason is not None or progress.steps_made >= self.steps_allowed
        return self.profile() if made else self.planned_profile(progress)

    def _as_json(self, profile: privacy.Profile) -> dict[str, float | None] | None:
        """Returns the certified interval at the given delta; null stands for infinity."""
        if self._settings.delta is None:
            return None
        interval = profile.epsilon(self._settings.delta)._asdict()
        return {side: value if math.isfinite(value) else None for side, value in interval.items()}
