# SPDX-License-Identifier: Apache-2.0
"""What a training says about its privacy: one line, and a statement for machines."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import __version__, privacy

if TYPE_CHECKING:
    from .training import PrivateTraining

NOT_PRIVATE = "NOT PRIVATE (test_seed fixes noise and batches, so anyone can take the noise off)"
NOT_FOR_RELEASE = "NOT PRIVATE (made with not_for_release=True, on data that need no protection)"

CHOICE_OF_SETTINGS = "the choice of hyper-parameters by looking at this data"


@dataclass(frozen=True)
class Spent:
    """Privacy spent so far; prints as one line.

    ``epsilon`` is a certified bracket (low, high) at ``delta``; ``epsilon.high`` is the one to report.
    """

    epsilon: privacy.Bracket
    delta: float
    text: str

    def __str__(self) -> str:
        return self.text


def warning_of(training: PrivateTraining) -> str | None:
    """Why there is no privacy, if there is none."""
    if training.test_seed is not None:
        return NOT_PRIVATE
    if training.not_for_release:
        return NOT_FOR_RELEASE
    return next((release.warning for release in training.prior_releases if release.warning), None)


def spent(training: PrivateTraining, delta: float) -> Spent:
    """By the releases so far."""
    profile, warning = training.profile(), warning_of(training)
    text = profile.statement(delta)
    return Spent(profile.epsilon(delta), delta, text if warning is None else f"{warning}: {text}")


def statement(training: PrivateTraining) -> dict[str, Any]:
    """Everything that determines the guarantee, as plain data."""
    warning, budget, mechanism = warning_of(training), training.budget, training._mechanism
    return {
        "format": 1,
        "private": warning is None,
        **({} if warning is None else {"warning": warning}),
        "neighboring_relation": training.event.neighboring_relation.value,
        "sampler": training.event.sampler,
        "unit": "one item of the dataset",
        "num_examples": training.num_examples,
        "expected_batch_size": training.expected_batch_size,
        "sampling_probability": training.sampling_probability,
        "num_steps_planned": training.num_steps,
        "clipping": mechanism.statement(),
        "sensitivity": mechanism.sensitivity,
        "noise_multiplier": training.noise_multiplier,
        "noise": "Gaussian, float32, AES-256-CTR keyed by the operating system, Box-Muller",
        "target_epsilon": training.target_epsilon,
        "budget": None if budget is None else {"epsilon": budget.epsilon, "delta": budget.delta},
        "delta": training.delta,
        "epsilon": _epsilon_as_json(training),
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


def _epsilon_as_json(training: PrivateTraining) -> dict[str, float | None] | None:
    """The bracket at the given delta; null stands for infinity."""
    if training.delta is None:
        return None
    bracket = training.profile().epsilon(training.delta)._asdict()
    return {side: value if math.isfinite(value) else None for side, value in bracket.items()}
