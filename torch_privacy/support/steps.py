# SPDX-License-Identifier: Apache-2.0
"""Counts the steps of a number of epochs: one rule for trainings in a loop, commands and accounting."""

import math
from fractions import Fraction


def steps_of(epochs: float, num_examples: int, batch_size: float) -> int:
    """Returns the smallest number of steps in which ``epochs * num_examples`` examples are drawn on average.

    For a sampling probability q pass 1 example and the batch size q.

    Example:
        >>> steps_of(1, 1000, 300), steps_of(3, 1, 0.01), steps_of(0.1, 1, 0.5)
        (4, 300, 1)
    """
    exact = Fraction(epochs) * num_examples / Fraction(batch_size)
    return max(1, math.ceil(exact * (1 - Fraction(1, 10**9))))  # 20 steps also where n/B is rounded up to 20 + 4e-15
