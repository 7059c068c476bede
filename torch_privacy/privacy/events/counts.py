# SPDX-License-Identifier: Apache-2.0
"""Small releases beside training: noisy counts, and answers of individuals."""

from dataclasses import dataclass
from math import exp

from ..._validate import in_range, positive
from ..pairs.discrete import Atoms, LaplacePair
from .base import Event, NeighboringRelation, check_noise, check_relation, priced


@priced(lambda event: LaplacePair(1 / event.noise_multiplier))
@dataclass(frozen=True, repr=False)
class Laplace(Event):
    """One number plus Laplace noise: (1 / noise_multiplier, 0)-private, and a little better for δ > 0.

    Args:
        noise_multiplier: scale of the noise over the sensitivity, in [0.01, 1e6].
        neighboring_relation: any; the sensitivity is the one under it.
    """

    noise_multiplier: float
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    sampler = "full batch"

    def __post_init__(self) -> None:
        check_noise("privacy.Laplace", self.noise_multiplier)
        if self.noise_multiplier < 0.01:
            raise ValueError(f"privacy.Laplace: noise_multiplier={self.noise_multiplier!r} must be at least 0.01.")
        check_relation("privacy.Laplace", self.neighboring_relation)


def _coin(event: "RandomizedResponse") -> Atoms:
    k, odds = event.num_answers, exp(event.epsilon)
    truth, other = odds / (odds + k - 1), 1 / (odds + k - 1)
    return Atoms((truth, other, (k - 2) * other), (other, truth, (k - 2) * other))


@priced(_coin)
@dataclass(frozen=True, repr=False)
class RandomizedResponse(Event):
    """One of k answers, the true one with probability ``e^ε / (e^ε + k - 1)``, else any other: (ε, 0)-private.

    Args:
        epsilon: above 0, at most 50.
        num_answers: k, at least 2.
        neighboring_relation: replace-one by default, since everyone answers.
    """

    epsilon: float
    num_answers: int = 2
    neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE
    sampler = "full batch"

    def __post_init__(self) -> None:
        positive("RandomizedResponse", epsilon=self.epsilon)
        in_range("RandomizedResponse", 0, 50, epsilon=self.epsilon)
        if isinstance(self.num_answers, bool) or not isinstance(self.num_answers, int) or self.num_answers < 2:
            raise ValueError(f"RandomizedResponse: num_answers={self.num_answers!r} must be an integer of at least 2.")
        check_relation("RandomizedResponse", self.neighboring_relation)
