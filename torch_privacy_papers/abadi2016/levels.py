# SPDX-License-Identifier: Apache-2.0
"""Provides the three levels of noise of Abadi et al. (2016) on MNIST, and their price, without training."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from torch_privacy import privacy
from torch_privacy.privacy import Bracket, Event

LAYERS = 2
PROBABILITY = 0.01  # 600 of 60,000 examples
STEPS_PER_EPOCH = 100
LEAST_DELTA = 1e-200  # below it, bounds are not computed


class Level(NamedTuple):
    """One of the paper's three levels of noise, with its results."""

    noise: float  # sigma, over the clip norm of one layer
    pca_noise: float  # sigma_p
    epochs: float  # after which the authors' code reports epsilon
    epsilon: float
    accuracy: float
    certified_epochs: float  # after which the certified epsilon reaches epsilon without exceeding it

    @property
    def name(self) -> str:
        """Returns the name of the row with the paper's epochs."""
        return f"sigma {self.noise:g}, sigma_p {self.pca_noise:g}"

    @property
    def certified_name(self) -> str:
        """Returns the name of the row that trains until the certified epsilon is the paper's."""
        return f"{self.name}, to epsilon {self.epsilon:g}"

    def releases(self, epochs: float) -> list[tuple[Event, int]]:
        """Returns what is released after ``epochs`` epochs: the components, and the steps."""
        return [(privacy.NoisyCovariance(float(self.pca_noise)), 1), (self._step, round(epochs * STEPS_PER_EPOCH))]

    @property
    def _step(self) -> Event:
        return privacy.SubsampledGaussian(self.noise / LAYERS**0.5, PROBABILITY)

    def delta(self, epochs: float, epsilon: float) -> Bracket[float]:
        """Returns certified bounds on delta after ``epochs`` epochs, at this epsilon."""
        return privacy.compose(self.releases(epochs)).delta(epsilon)

    def moments_delta(self, epochs: float, epsilon: float) -> float:
        """Returns the same by the moments accountant, a bound that is larger; at most 1."""

        def excess(log_delta: float) -> float:
            return privacy.moments_of(self.releases(epochs), float(np.exp(log_delta))) - epsilon

        low, high = np.log(LEAST_DELTA), np.log(1 - 1e-9)
        if excess(high) >= 0:
            return 1.0
        while high - low > 1e-6:  # delta falls as epsilon rises
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        return float(np.exp(high))


LEVELS = (
    Level(8, 16, 14.5, 0.5, 0.90, 51.0),
    Level(4, 7, 107.5, 2, 0.95, 172.0),
    Level(2, 4, 353.1, 8, 0.97, 413.8),
)


@lru_cache(maxsize=256)
def most_steps(level: Level, epsilon: float, delta: float) -> int:
    """Returns the largest number of the level's steps within (epsilon, delta), at most those of its longest training.

    It is 0 if the components alone cost more.
    """
    (components, step), most = level.releases(level.certified_epochs), round(level.certified_epochs * STEPS_PER_EPOCH)
    return privacy.Budget(epsilon, delta).remaining(step[0], after=[components], most=most)
