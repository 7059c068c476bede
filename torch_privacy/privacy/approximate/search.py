# SPDX-License-Identifier: Apache-2.0
"""Finds the smallest noise multiplier that an accountant accepts."""

from collections.abc import Callable
from functools import partial

from ...support.validate import InvalidValue, in_range, plain_numbers, positive, strictly_between, whole
from ..calibrate import log_ratio, smallest
from ..events.base import Event
from ..events.gaussian import SubsampledGaussian
from .clt import clt_noise

Releases = list[tuple[Event, int]]

LEAST_NOISE, MOST_NOISE = 0.2, 1e4  # noise multipliers that are searched
NOISE_TOLERANCE = 1e-6  # relative


@plain_numbers
def smallest_noise(
    accountant: Callable[[Releases, float], float],
    target_epsilon: float,
    delta: float,
    *,
    sampling_probability: float,
    num_steps: int,
) -> float:
    """Returns the smallest noise multiplier with which an accountant states at most the target, to 1e-6.

    So papers and other libraries plan. Train with the noise of `calibrate`, which is less.

    Args:
        accountant: from pairs (event, how often) and δ to ε: `rdp`, `moments_of`, or one of these with other arguments,
            by ``functools.partial``.
        target_epsilon: above 0.
        delta: in (0, 1).
        sampling_probability: q of equal Poisson-sampled Gaussian steps, in (0, 1].
        num_steps: how many, at least 1.

    Raises:
        ValueError: the target needs a noise multiplier above 1e4, or below 0.2.

    Example:
        >>> from torch_privacy.privacy import moments_of, rdp
        >>> for accountant in (rdp, moments_of):
        ...     noise = smallest_noise(accountant, 8.0, 1e-5, sampling_probability=0.01, num_steps=10_000)
        ...     print(f"{noise:.3f}, {accountant([(SubsampledGaussian(noise, 0.01), 10_000)], 1e-5):.4f}")
        0.917, 8.0000
        0.962, 8.0000
    """
    where = "smallest_noise"
    positive(where, target_epsilon=target_epsilon)
    in_range(where, 0, 1, sampling_probability=sampling_probability)
    whole(where, at_least=1, num_steps=num_steps)
    strictly_between(where, 0, 1, delta=delta)

    def excess(noise: float) -> float:
        stated = accountant([(SubsampledGaussian(noise, sampling_probability), num_steps)], delta)
        return log_ratio(stated, target_epsilon)

    start = clt_noise(target_epsilon, delta, sampling_probability, num_steps)
    refused = partial(InvalidValue, where, "target_epsilon", target_epsilon)
    return smallest(excess, start, NOISE_TOLERANCE, refused, (LEAST_NOISE, MOST_NOISE))
