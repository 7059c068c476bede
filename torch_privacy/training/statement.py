# SPDX-License-Identifier: Apache-2.0
"""What a training says about its privacy: one line, and a statement for machines."""

from __future__ import annotations

import math
import platform
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import __version__, privacy
from .._validate import strictly_between
from ..privacy.spent import NOT_FOR_RELEASE, NOT_PRIVATE
from ..privacy.spent import Spent as Spent

if TYPE_CHECKING:
    from .loop import PrivateTraining

MOVED = (
    "NOT PRIVATE (the trained weights were changed other than by the training's own steps, {}; if that used no private "
    "data, take the statement before it)"
)

CHOICE_OF_SETTINGS = "the choice of hyper-parameters by looking at this data"


def warning_of(training: PrivateTraining) -> str | None:
    """Why there is no privacy, if there is none."""
    if training.test_seed is not None:
        return NOT_PRIVATE
    if training.not_for_release:
        return NOT_FOR_RELEASE
    moved = training._weights_moved_otherwise()
    if moved:
        return MOVED.format(moved)
    return next((release.warning for release in training.prior_releases if release.warning), None)


def check_delta(training: PrivateTraining, delta: float) -> float:
    """A delta that is below 1/n; warns above a tenth of that."""
    n = training.num_examples
    hint = f"It must be below 1/n for the {n} examples; 1 / (10 n) or less is usual."
    strictly_between("PrivateTraining", 0, 1 / n, delta=delta, hint=hint)
    if delta > 1 / (10 * n) * (1 + 1e-9):
        warnings.warn(
            f"delta={delta!r} is close to 1/n for the {n} examples: with that probability everything about some "
            f"example may come out. Take 1 / (10 n) = {1 / (10 * n):.2g} or less.",
            stacklevel=4,
        )
    return delta


def spent(training: PrivateTraining, delta: float) -> Spent:
    """By the releases so far, and by all that are planned."""
    profile, planned, warning = training.profile(), training._planned_profile(), warning_of(training)
    text, made, steps = profile.statement(delta), training.step_count, training._num_planned
    if made < steps and training._stop_reason is None:
        text = (
            f"{text} after {made} of {steps} steps; {planned.statement(delta)} after all, which is the one to report "
            "if a stop depends on what was released"
        )
    epsilon = profile.epsilon(delta)
    return Spent(
        epsilon,
        delta,
        text if warning is None else f"{warning}: {text}",
        epsilon if made == steps else planned.epsilon(delta),
    )


def statement(training: PrivateTraining) -> dict[str, Any]:
    """Everything that determines the guarantee, as plain data."""
    warning, budget, mechanism = warning_of(training), training.budget, training._mechanism
    return {
        "format": 2,
        "private": warning is None,
        **({} if warning is None else {"warning": warning}),
        "neighboring_relation": training.event.neighboring_relation.value,
        "sampler": training.event.sampler,
        "unit": "one item of the dataset",
        "num_examples": training.num_examples,
        "expected_batch_size": training.expected_batch_size,
        "sampling_probability": training.sampling_probability,
        "num_steps_planned": training.num_steps,
        "num_steps_made": training.step_count,
        "stop": {"independent_of_data": training._stop_reason is not None, "reason": training._stop_reason},
        "independence": {
            "shown_by": "rehearsal" if training.assume_independent is None else "assumption",
            "assumed_because": training.assume_independent,
            "not_compared": sorted(training._not_compared),
        },
        "clipping": mechanism.statement(),
        "sensitivity": mechanism.sensitivity,
        "noise_multiplier": training.noise_multiplier,
        "noise": "Gaussian, float32, AES-256-CTR keyed by the operating system, Box-Muller",
        "target_epsilon": training.target_epsilon,
        "budget": None if budget is None else {"epsilon": budget.epsilon, "delta": budget.delta},
        "delta": training.delta,
        "epsilon": _epsilon_as_json(training, _covering(training)),
        "epsilon_of_steps_made": _epsilon_as_json(training, training.profile()),
        "releases": [
            {"event": privacy.event_to_dict(event), "count": count} for event, count in training.ledger.events
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


def _covering(training: PrivateTraining) -> privacy.Profile:
    """What holds wherever training stops; of the steps made, where the stop has nothing to do with the data."""
    made = training._stop_reason is not None or training.step_count >= training._num_planned
    return training.profile() if made else training._planned_profile()


def _epsilon_as_json(training: PrivateTraining, profile: privacy.Profile) -> dict[str, float | None] | None:
    """The bracket at the given delta; null stands for infinity."""
    if training.delta is None:
        return None
    bracket = profile.epsilon(training.delta)._asdict()
    return {side: value if math.isfinite(value) else None for side, value in bracket.items()}
