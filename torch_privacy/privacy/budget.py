# SPDX-License-Identifier: Apache-2.0
"""What a privacy budget still allows, and tables of what other choices would cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._validate import positive, strictly_between
from .bracket import Bracket
from .calibrate import most_steps
from .compose import compose
from .events.base import Event
from .events.gaussian import SubsampledGaussian

Releases = Iterable[tuple[Event, int]]


@dataclass(frozen=True)
class Budget:
    """An (ε, δ) that all releases together must not exceed: a filter, and an odometer to read on the way.

    `allows` and `remaining` are the filter: they look at certified upper bounds, so what they let pass is
    (epsilon, delta)-private as a whole. Stopping early, for whatever reason, is covered by the budget. `spent` is the
    odometer: what the releases so far cost had their number been fixed ahead of time. Whoever lets the outcomes decide
    when to stop reports the budget, not the reading. The events themselves (noise, sampling) are to be chosen ahead of
    time, not by looking at outcomes.

    Args:
        epsilon: above 0.
        delta: in (0, 1).

    Example:
        >>> budget, event = Budget(epsilon=2.0, delta=1e-5), SubsampledGaussian(1.0, 0.01)
        >>> budget.remaining(event)
        1202
        >>> budget.remaining(event, after=[(event, 1000)]), budget.allows([(event, 1203)])
        (202, False)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        positive("Budget", epsilon=self.epsilon)
        strictly_between("Budget", 0, 1, delta=self.delta)

    def allows(self, releases: Releases) -> bool:
        """Whether all of these together are certainly within the budget."""
        return compose(releases).epsilon_high(self.delta) <= self.epsilon

    def remaining(self, event: Event, after: Releases = (), most: int = 10**7) -> int:
        """How many more releases of an event are within the budget after those; at most ``most``."""
        after = list(after)
        return most_steps(event, self.epsilon, self.delta, beside=after, most=most) if self.allows(after) else 0

    def spent(self, releases: Releases) -> Bracket[float]:
        """ε at the budget's δ of what was released so far."""
        return compose(releases).epsilon(self.delta)


class Choice(NamedTuple):
    """One row of `what_if`."""

    noise_multiplier: float
    sampling_probability: float
    num_steps: int
    epsilon: float


def what_if(
    noise_multipliers: Sequence[float], sampling_probabilities: Sequence[float], num_steps: Sequence[int], delta: float
) -> list[Choice]:
    """The certified ε of every combination of Poisson-sampled Gaussian steps.

    Example:
        >>> for row in what_if([1.0, 2.0], [0.01], [2000], delta=1e-5):
        ...     print(f"{row.noise_multiplier:g}: {row.epsilon:.3f}")
        1: 2.584
        2: 0.900
    """
    return [
        Choice(noise, q, steps, compose([(SubsampledGaussian(noise, q), steps)]).epsilon_high(delta))
        for noise in noise_multipliers
        for q in sampling_probabilities
        for steps in num_steps
    ]
