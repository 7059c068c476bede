# SPDX-License-Identifier: Apache-2.0
"""Provides the events of small releases beside training: numbers with noise, randomized response."""

from dataclasses import dataclass
from math import exp

from ...support.units import ONE_EXAMPLE
from ...support.validate import in_range, positive, whole
from ..pairs.discrete import DiscretePair, LaplacePair
from ..pairs.shifted import DiscreteGaussianNoise, DiscreteLaplaceNoise, LaplaceNoise, sampled
from .base import Event, NeighboringRelation, check_fields, priced

LARGEST_SENSITIVITY = 10**6
LARGEST_STDDEV = 1e5  # of discrete Gaussian noise; the masses of all integers up to 39 times as large are kept


@priced(lambda event: LaplacePair(1 / event.noise_multiplier))
@dataclass(frozen=True, repr=False)
class Laplace(Event):
    """One number plus Laplace noise, such as a count: (1 / noise_multiplier, 0)-private, and a little better for δ > 0.

    ``δ(ε) = 1 - e^((ε - 1 / noise_multiplier) / 2)`` for 0 <= ε <= 1 / noise_multiplier.

    Args:
        noise_multiplier: scale of the noise divided by the sensitivity, in [0.01, 1e6]. A count has sensitivity 1.
        neighboring_relation: any; the sensitivity is the one under it.

    Guarantees:
        - exact where two neighboring data sets attain the sensitivity.

    Source: Dwork, McSherry, Nissim & Smith (2006), TCC; Dong, Roth & Su (2022), Proposition A.6, for the curve.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> f"{compose([(Laplace(noise_multiplier=10.0), 20)]).epsilon(1e-5).high:.3f}"  # 20 counts, each (0.1, 0)
        '1.592'
    """

    noise_multiplier: float
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    unit: str = ONE_EXAMPLE
    sampler = "full batch"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.noise_multiplier < 0.01:
            raise ValueError(f"Laplace: noise_multiplier={self.noise_multiplier!r} must be at least 0.01.")

    @property
    def noise(self) -> tuple[LaplaceNoise, float]:
        """The noise, and the sensitivity in its unit."""
        return LaplaceNoise(), 1 / self.noise_multiplier


@priced(lambda event: sampled(event.noise[0], event.noise[1], 1.0, replaced=False))
@dataclass(frozen=True, repr=False)
class DiscreteLaplace(Event):
    """One integer plus discrete Laplace noise, which is k with probability in proportion to ``e^(-|k| / noise_scale)``.

    It is (sensitivity / noise_scale, 0)-private. Also known as the geometric mechanism.

    Args:
        noise_scale: at least a hundredth of the sensitivity, at most 1e6.
        sensitivity: the most that the integer changes, from 1 to 1e6.
        neighboring_relation: any; the sensitivity is the one under it.

    Guarantees:
        - exact where two neighboring data sets attain the sensitivity, if it is at most 4096; else within 1e-5.

    Source: Ghosh, Roughgarden & Sundararajan (2012), arXiv:0811.2841.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> f"{compose([(DiscreteLaplace(noise_scale=10.0), 20)]).epsilon(1e-5).high:.3f}"  # 20 counts, each (0.1, 0)
        '1.598'
    """

    noise_scale: float
    sensitivity: int = 1
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    unit: str = ONE_EXAMPLE
    sampler = "full batch"

    def __post_init__(self) -> None:
        check_fields(self)
        where = "DiscreteLaplace"
        whole(where, at_least=1, at_most=LARGEST_SENSITIVITY, sensitivity=self.sensitivity)
        positive(where, noise_scale=self.noise_scale)
        in_range(where, 0, 1e6, noise_scale=self.noise_scale)
        if self.noise_scale < 0.01 * self.sensitivity:
            raise ValueError(
                f"{where}: noise_scale={self.noise_scale!r} must be at least a hundredth of the sensitivity."
            )

    @property
    def noise(self) -> tuple[DiscreteLaplaceNoise, float]:
        """The noise, and the sensitivity."""
        return DiscreteLaplaceNoise(self.noise_scale), self.sensitivity


@priced(lambda event: sampled(event.noise[0], event.noise[1], 1.0, replaced=False))
@dataclass(frozen=True, repr=False)
class DiscreteGaussian(Event):
    """One integer plus discrete Gaussian noise: k with probability in proportion to ``e^(-k² / (2 noise_stddev²))``.

    Args:
        noise_stddev: σ in the formula, from 0.1 and a twentieth of the sensitivity to 1e5.
        sensitivity: the most that the integer changes, from 1 to 1e6.
        neighboring_relation: any; the sensitivity is the one under it.

    Guarantees:
        - exact where two neighboring data sets attain the sensitivity, up to outcomes of probability 1e-41; for a large
          noise_stddev, outcomes are grouped, which widens the bracket by some 1e-5.

    Source: Canonne, Kamath & Steinke (2020), arXiv:2004.00010.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> f"{compose([(DiscreteGaussian(noise_stddev=10.0), 20)]).epsilon(1e-5).high:.3f}"
        '1.760'
    """

    noise_stddev: float
    sensitivity: int = 1
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    unit: str = ONE_EXAMPLE
    sampler = "full batch"

    def __post_init__(self) -> None:
        check_fields(self)
        where = "DiscreteGaussian"
        whole(where, at_least=1, at_most=LARGEST_SENSITIVITY, sensitivity=self.sensitivity)
        positive(where, noise_stddev=self.noise_stddev)
        in_range(where, 0, LARGEST_STDDEV, noise_stddev=self.noise_stddev)
        if self.noise_stddev < max(0.1, self.sensitivity / 20):
            smallest = "at least 0.1, and at least a twentieth of the sensitivity"
            raise ValueError(f"{where}: noise_stddev={self.noise_stddev!r} must be {smallest}.")

    @property
    def noise(self) -> tuple[DiscreteGaussianNoise, float]:
        """The noise, and the sensitivity."""
        return DiscreteGaussianNoise(self.noise_stddev), self.sensitivity


def _response_pair(event: "RandomizedResponse") -> DiscretePair:
    k, odds = event.num_answers, exp(event.epsilon)
    truth, other = odds / (odds + k - 1), 1 / (odds + k - 1)
    return DiscretePair((truth, other, (k - 2) * other), (other, truth, (k - 2) * other))


@priced(_response_pair)
@dataclass(frozen=True, repr=False)
class RandomizedResponse(Event):
    """Randomized response: one of k answers, the true one with probability ``e^ε / (e^ε + k - 1)``, else another one.

    Args:
        epsilon: above 0, at most 50; one answer is (epsilon, 0)-private.
        num_answers: k, at least 2.
        neighboring_relation: replace-one by default, because everyone answers.

    Guarantees:
        - exact for any δ and any number of answers composed.

    Source: Warner (1965), JASA; Kairouz, Bonawitz & Ramage (2016), arXiv:1602.07387, for k answers.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> f"{compose([(RandomizedResponse(epsilon=0.1), 20)]).epsilon(1e-5).high:.3f}"
        '1.598'
    """

    epsilon: float
    num_answers: int = 2
    neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE
    unit: str = ONE_EXAMPLE
    sampler = "full batch"

    def __post_init__(self) -> None:
        check_fields(self)
        positive("RandomizedResponse", epsilon=self.epsilon)
        in_range("RandomizedResponse", 0, 50, epsilon=self.epsilon)
        whole("RandomizedResponse", at_least=2, at_most=2**53, num_answers=self.num_answers)
