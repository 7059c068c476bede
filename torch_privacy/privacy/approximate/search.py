# SPDX-License-Identifier: Apache-2.0
"""Finds the smallest noise multiplier that an accountant accepts."""

from collections.abc import Callable

import numpy as np

from ...support.validate import InvalidValue, in_range, strictly_between, whole
from .clt import clt_noise

LEAST_NOISE, MOST_NOISE = 0.2, 1e4  # noise multipliers that are searched
NOISE_TOLERANCE = 1e-6  # relative


def smallest_noise(
    where: str, accountant: Callable[[float], float], target: float, delta: float, steps: tuple[float, int]
) -> float:
    """Returns the smallest noise multiplier with which an accountant states at most the target, to 1e-6.

    Args:
        where: the public function, for messages.
        accountant: from a noise multiplier to ε at δ.
        target: the ε that must not be exceeded.
        delta: δ, for the start of the search.
        steps: sampling probability and number of steps, for the same.
    """
    probability, num_steps = steps
    in_range(where, 0, 1, sampling_probability=probability)
    whole(where, at_least=1, num_steps=num_steps)
    strictly_between(where, 0, 1, delta=delta)

    def excess(noise: float) -> float:
        if not LEAST_NOISE <= noise <= MOST_NOISE:
            end, found = ("below", LEAST_NOISE) if noise < LEAST_NOISE else ("above", MOST_NOISE)
            raise InvalidValue(where, "target_epsilon", target, f"needs a noise multiplier {end} {found:g}.")
        return float(np.log(max(accountant(noise), 1e-300) / target))

    good = min(max(clt_noise(target, delta, probability, num_steps), 2 * LEAST_NOISE), MOST_NOISE / 2)
    fails, low = good, excess(good)
    high = low
    while high > 0:
        fails, high, good = good, excess(1.2 * good), 1.2 * good
    while low <= 0:
        good, low, fails = fails, excess(fails / 1.2), fails / 1.2
    low, high = excess(fails), excess(good)
    while good / fails > 1 + NOISE_TOLERANCE:  # nearly a straight line in log-log
        share = min(max(low / (low - high), 0.0), 1.0) + NOISE_TOLERANCE / 2
        middle = fails * (good / fails) ** min(max(share, 1e-3), 1 - 1e-3)
        value = excess(middle)
        if value > 0:
            fails, low, high = middle, value, high / 2
        else:
            good, high, low = middle, value, low / 2
    return good
