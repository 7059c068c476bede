# SPDX-License-Identifier: Apache-2.0
"""Provides ``get_noise_multiplier`` of Opacus."""

from typing import Any

from ...privacy import calibrate
from ...support.steps import steps_of


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    epochs: float | None = None,
    steps: int | None = None,
    **options: Any,
) -> float:
    """Returns `privacy.calibrate` for ``epochs / sample_rate`` steps, or for ``steps``.

    Opacus' ``accountant`` and ``epsilon_tolerance`` change nothing: the target is met, and never exceeded.

    Raises:
        ValueError: not exactly one of ``epochs`` and ``steps``, or a target that `privacy.calibrate` cannot meet.
    """
    if (epochs is None) == (steps is None):
        raise ValueError(f"get_noise_multiplier: epochs={epochs!r} and steps={steps!r}: give exactly one of the two.")
    num_steps = steps if epochs is None else steps_of(epochs, 1, sample_rate)
    assert num_steps is not None
    return calibrate(target_epsilon, target_delta, sampling_probability=sample_rate, num_steps=num_steps)
