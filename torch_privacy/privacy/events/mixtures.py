# SPDX-License-Identifier: Apache-2.0
"""Provides the events of mixtures: any release on a Poisson sample, and Gaussian noise with a random sensitivity."""

from dataclasses import dataclass

from ...support.units import ONE_EXAMPLE
from ...support.validate import in_range
from ..pairs.base import DominatingPair, PairBounds
from ..pairs.gaussian import LARGEST_SHIFT
from ..pairs.shifted import GaussianNoise, enclosed, mixed, sampled
from .base import REMOVALS, Event, NeighboringRelation, check_event, check_fields, check_noise, check_removal, priced
from .choices import ExponentialMechanism, PermuteAndFlip
from .counts import DiscreteGaussian, DiscreteLaplace, Laplace
from .custom import FinitePair, KnownProfile, check_numbers
from .gaussian import Gaussian, poisson_pair

SMALLEST_PROBABILITY = 1e-7  # with less, losses have too few digits
SUMS = Gaussian, Laplace, DiscreteLaplace, DiscreteGaussian  # noise on what is added up over the sample
OTHERS = ExponentialMechanism, PermuteAndFlip, FinitePair, KnownProfile


def _sampled_pair(event: "PoissonSampled") -> DominatingPair | PairBounds:
    inner, q, relation = event.event, event.sampling_probability, event.neighboring_relation
    if isinstance(inner, Gaussian):
        return poisson_pair(1 / inner.noise_multiplier, q, relation)
    if isinstance(inner, Laplace | DiscreteLaplace | DiscreteGaussian):
        noise, sensitivity = inner.noise
        return sampled(noise, sensitivity, q, replaced=relation is NeighboringRelation.REPLACE_ONE)
    return mixed(inner.dominating_pair(), q)


@priced(_sampled_pair)
@dataclass(frozen=True, repr=False)
class PoissonSampled(Event):
    """Any of several releases on a Poisson sample, which every example joins with the same probability q.

    With the pair (P, Q) of the release on all data, the pair is ``(1 - q) Q + q P`` against Q, in either order. Under
    replace-one it is ``(1 - q) f(x) + q f(x ∓ c)`` for noise f and values of at most c, **half of the sensitivity**:
    a count, of values 0 and 1, has sensitivity 2 then.

    Args:
        event: a `Laplace`, `DiscreteLaplace`, `DiscreteGaussian` or `Gaussian`; if examples are not replaced, also an
            `ExponentialMechanism`, `PermuteAndFlip`, `FinitePair` or `KnownProfile`. Its relation and unit are those of
            this event.
        sampling_probability: chance that an example joins the sample, in (1e-7, 1].

    Guarantees:
        - exact, up to a bracket of some 1e-5, where the price of the release on all data is exact.

    Source: Zhu, Dong & Wang (2022), arXiv:2106.08567, Theorem 11; ``pairs.shifted`` has the proof for replace-one.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> step = PoissonSampled(Laplace(noise_multiplier=1.0), sampling_probability=0.01)
        >>> f"{compose([(step, 2000)]).epsilon(1e-5).high:.3f}"
        '1.639'
    """

    event: Event
    sampling_probability: float
    sampler = "Poisson"

    def __post_init__(self) -> None:
        where, inner = "PoissonSampled", self.event
        if not isinstance(inner, Event):
            raise ValueError(f"{where}: event={inner!r} must be an event.")
        check_event(where, inner)
        in_range(where, SMALLEST_PROBABILITY, 1, sampling_probability=self.sampling_probability)
        allowed = (*SUMS, *OTHERS) if inner.neighboring_relation in REMOVALS else SUMS
        if not isinstance(inner, allowed):
            raise ValueError(
                f"{where}: event={inner!r} has no known price on a sample under "
                f"{inner.neighboring_relation.in_words}: must be one of {', '.join(kind.__name__ for kind in allowed)}."
            )
        odd = isinstance(inner, DiscreteLaplace | DiscreteGaussian) and inner.sensitivity % 2
        if odd and inner.neighboring_relation not in REMOVALS:
            raise ValueError(
                f"{where}: event={inner!r} must have an even sensitivity under replace-one: twice the largest value."
            )

    @property
    def neighboring_relation(self) -> NeighboringRelation:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The relation of the release."""
        return self.event.neighboring_relation

    @property
    def unit(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The unit of the release."""
        return self.event.unit


def _mixture_pair(event: "GaussianMixture") -> DominatingPair | PairBounds:
    parts = zip(event.probabilities, event.sensitivities, strict=True)
    p = tuple((weight, size / event.noise_stddev) for weight, size in parts if weight)
    return enclosed(GaussianNoise(), p, ((1.0, 0.0),))


@priced(_mixture_pair)
@dataclass(frozen=True, repr=False)
class GaussianMixture(Event):
    """A noisy sum that an example changes by a random length: by at most cᵢ with probability pᵢ.

    The pair is ``Σ pᵢ N(cᵢ, noise_stddev²)`` against ``N(0, noise_stddev²)``, in either order. The lengths must be
    independent of what is released. Poisson samples have c = (0, C), `SubsampledGroup` has c = (0, C, 2C, ...).

    Args:
        noise_stddev: standard deviation of the noise, from a twentieth of the largest cᵢ to 1e6 times it.
        sensitivities: the cᵢ, each 0 or larger, one of them above 0 with a probability of at least 1e-7.
        probabilities: the pᵢ, as many, which add up to 1.
        neighboring_relation: add/remove one example by default, or zero out one.

    Guarantees:
        - exact, up to a bracket of some 1e-5, where all changes have one direction.

    Source: Choquette-Choo, Ganesh, Steinke & Thakurta (2023), arXiv:2310.15526.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> step = GaussianMixture(noise_stddev=1.0, sensitivities=(0.0, 0.5, 1.0), probabilities=(0.98, 0.01, 0.01))
        >>> f"{compose([(step, 1000)]).epsilon(1e-5).high:.3f}"
        '2.530'
    """

    noise_stddev: float
    sensitivities: tuple[float, ...]
    probabilities: tuple[float, ...]
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    unit: str = ONE_EXAMPLE
    sampler = "Poisson"

    def __post_init__(self) -> None:
        check_fields(self)
        where, sizes, chances = "GaussianMixture", self.sensitivities, self.probabilities
        check_numbers(where, sensitivities=sizes, probabilities=chances)
        if len(sizes) != len(chances):
            raise ValueError(f"{where}: got {len(sizes)} sensitivities and {len(chances)} probabilities. Pass as many.")
        if min(sizes) < 0:
            raise ValueError(f"{where}: sensitivities={sizes!r} must be 0 or larger.")
        if min(chances) < 0 or abs(sum(chances) - 1) > 1e-9:
            raise ValueError(f"{where}: probabilities={chances!r} must be probabilities that add up to 1.")
        if sum(chance for chance, size in zip(chances, sizes, strict=True) if size) < SMALLEST_PROBABILITY:
            raise ValueError(f"{where}: one of sensitivities={sizes!r} must be above 0 with a probability above 1e-7.")
        check_noise(where, self.noise_stddev / max(sizes))
        in_range(where, max(sizes) / LARGEST_SHIFT * (1 - 1e-12), 1e300, noise_stddev=self.noise_stddev)
        check_removal(where, self.neighboring_relation)
