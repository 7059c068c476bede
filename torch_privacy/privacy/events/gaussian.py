# SPDX-License-Identifier: Apache-2.0
"""Provides the events with Gaussian noise: full batches, Poisson samples, fixed-size batches, several blocks at once.

**Noise over sensitivity.** Everywhere ``noise_multiplier`` is the noise's standard deviation divided by the sensitivity
*under the event's own neighboring relation*, as `clipping.ClippingRule.sensitivity` returns it: values clipped to norm
C have sensitivity C when an example is added, removed or zeroed out, and **2 C when it is replaced**. Papers often
write noise over C under every relation; under replace-one divide their number by 2, or ε comes out far too small.
"""

from dataclasses import dataclass
from math import nextafter

import scipy

from ...support.units import ONE_EXAMPLE
from ...support.validate import whole
from ..pairs.base import DominatingPair, PairBounds
from ..pairs.either import EitherPair
from ..pairs.fixed_size import family
from ..pairs.gaussian import LARGEST_SHIFT, ReplaceOneGaussianPair, SubsampledGaussianPair, SymmetrizedPair
from .base import MAX_COUNT, REMOVALS, REPLACED, Event, NeighboringRelation, check_fields, check_noise, priced


def poisson_pair(shift: float, probability: float, relation: NeighboringRelation) -> DominatingPair:
    """Returns the pair of a Poisson-sampled Gaussian release; ``shift`` is the sensitivity over the noise."""
    if relation is NeighboringRelation.REPLACE_ONE and probability < 1:
        return ReplaceOneGaussianPair(shift / 2, probability)  # both examples' values lie half the sensitivity from 0
    return SubsampledGaussianPair(shift, probability)


@priced(lambda event: SubsampledGaussianPair(1 / event.noise_multiplier, 1.0))
@dataclass(frozen=True, repr=False)
class Gaussian(Event):
    """One noisy sum over all the data: ``sum of clipped values + N(0, (noise_multiplier * sensitivity)² I)``.

    Args:
        noise_multiplier: standard deviation of the noise divided by the sensitivity, in [1e-6, 1e6].
        neighboring_relation: any; the sensitivity is the one under it: 2 C, not C, where examples are replaced.

    Guarantees:
        - exact: the pair is N(1 / noise_multiplier, 1) against N(0, 1), the trade-off function `tradeoff.Gaussian`.

    Source: Balle & Wang (2018), arXiv:1805.06530, Theorem 8.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> f"{compose([(Gaussian(noise_multiplier=5.0), 1)]).epsilon(1e-5).high:.3f}"
        '0.726'
    """

    noise_multiplier: float
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    unit: str = ONE_EXAMPLE
    sampler = "full batch"

    __post_init__ = check_fields


@dataclass(frozen=True, repr=False)
class _PoissonSampled(Event):
    """One noisy sum over a Poisson batch, with one noise multiplier."""

    noise_multiplier: float
    sampling_probability: float
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    unit: str = ONE_EXAMPLE
    sampler = "Poisson"

    __post_init__ = check_fields


@priced(lambda event: poisson_pair(1 / event.noise_multiplier, event.sampling_probability, event.neighboring_relation))
@dataclass(frozen=True, repr=False)
class SubsampledGaussian(_PoissonSampled):
    """One step of DP-SGD: a noisy sum over a Poisson sample, which every example joins with the same probability.

    Released is ``sum of clipped values + N(0, (noise_multiplier * sensitivity)² I)``. With z = 1 / noise_multiplier and
    q the sampling probability, the pair that an attacker must distinguish is

    - add/remove one: ``(1 - q) N(0, 1) + q N(z, 1)`` and ``N(0, 1)``, in either order;
    - zero out one (replace it with nothing; the number of examples is public): the same;
    - replace one: ``(1 - q) N(0, 1) + q N(±z/2, 1)``, because the sensitivity is twice a value's norm.

    Args:
        noise_multiplier: standard deviation of the noise divided by the sensitivity, in [1e-6, 1e6]. **Under
            replace-one the sensitivity is 2 C** for values clipped to norm C: pass half of "noise over clip norm".
        sampling_probability: chance that an example joins the sample, in (0, 1].
        neighboring_relation: add/remove one example by default.

    Guarantees:
        - exact for clipped sums; the price covers any function of them, such as a step of an optimizer.

    Source: Abadi et al. (2016), arXiv:1607.00133; Zhu, Dong & Wang (2022), arXiv:2106.08567, for the pairs.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> step = SubsampledGaussian(noise_multiplier=1.1, sampling_probability=256 / 60000)
        >>> f"{compose([(step, 10_000)]).epsilon(1e-5).high:.3f}"
        '1.978'
    """


def _fixed_size_pair(event: "FixedSizeGaussian") -> DominatingPair | PairBounds:
    shift, probability = 1 / event.noise_multiplier, event.sampling_probability
    one_sided = SubsampledGaussianPair(shift, probability)
    if probability == 1:
        return one_sided
    lower = one_sided, ReplaceOneGaussianPair(shift / 2, probability)
    return PairBounds(SymmetrizedPair(one_sided), lower, family(shift, probability) if shift <= LARGEST_SHIFT else ())


@priced(_fixed_size_pair)
@dataclass(frozen=True, repr=False)
class FixedSizeGaussian(Event):
    """One noisy sum over a batch of fixed size, drawn without replacement; neighbors replace one example.

    One step costs ``δ(ε) = q D(log(1 + (e^ε - 1) / q))`` for ε >= 0, with D the Gaussian curve of the whole
    sensitivity, which some data sets attain. No exact price of several steps is known: the bracket of ε is as wide as
    the gap between two bounds. Above, from 2 to 4000 steps without other releases, a choice at each step among pairs
    that cover all values (``pairs.fixed_size``, a few milliseconds a step); else the curve of one step, symmetrized.
    Below, the largest of three pairs that some data sets attain: ``(1 - q) N(0) + q N(z)`` against ``N(0)`` in either
    order and ``(1 - q) N(0) + q N(±z/2)``, z = 1 / noise_multiplier.

    Args:
        noise_multiplier: standard deviation of the noise divided by the sensitivity, which is 2 C for values clipped to
            norm C, in [1e-6, 1e6]: half of "noise over clip norm". Values lie in a ball of half the sensitivity.
        sampling_probability: batch size over number of examples, in (0, 1].

    Source: Balle, Barthe & Gaboardi (2018), arXiv:1807.01647, Theorem 9, for one step; docs/accounting.md for several.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> step = FixedSizeGaussian(noise_multiplier=1.0, sampling_probability=0.01)
        >>> low, high = compose([(step, 100)]).epsilon(1e-5)
        >>> f"{low:.3f} to {high:.3f}"
        '0.718 to 0.733'
    """

    noise_multiplier: float
    sampling_probability: float
    neighboring_relation = NeighboringRelation.REPLACE_ONE
    sampler = "fixed-size"

    __post_init__ = check_fields


def noise_of_one(event: Event) -> float:
    """Returns the noise multiplier of a release that is one Gaussian, perhaps on a Poisson sample.

    Raises:
        ValueError: the release is not one Gaussian.
    """
    pair = event.dominating_pair()
    if not isinstance(pair, SubsampledGaussianPair):
        raise ValueError("it is not one Gaussian release.")
    given = getattr(event, "noise_multiplier", None)
    return given if given and 1 / given == pair.shift else nextafter(1 / pair.shift, 0.0)


def _truncated_pair(event: "TruncatedGaussian") -> DominatingPair:
    """Returns the pair: with the probability that the batch is full, one example displaces another."""
    shift, q, n, most = 1 / event.noise_multiplier, event.sampling_probability, event.num_examples, event.most
    usual = SubsampledGaussianPair(shift, q)
    full = float(scipy.stats.binom.sf(most - 1, n - 1, q))  # the probability that the others fill the batch
    if full == 0:
        return usual
    cut = float(scipy.stats.binom.sf(most, n, q))  # that a batch was cut
    drawn = min(1.0, cut * most / (n * full))  # that the example is in one that was cut
    if 2 * shift > LARGEST_SHIFT:  # beyond floating point; whoever sees what was drawn sees two Gaussians 4 z apart
        return SubsampledGaussianPair(4 * shift, 1.0)
    displaced = ReplaceOneGaussianPair(2 * shift, drawn)
    return displaced if full == 1 else EitherPair(usual, displaced, full)


@priced(_truncated_pair)
@dataclass(frozen=True, repr=False)
class TruncatedGaussian(Event):
    """One noisy sum over a Poisson sample of which at most ``most`` examples stay, chosen uniformly.

    Batches have a largest size, so that memory and time have a bound. With K = ``most`` and n examples, an example that
    joins a full batch displaces another one, and the sum changes by twice the sensitivity. With probability
    τ = P[Bin(n - 1, q) >= K] the pair is that of `SubsampledGaussian` under replace-one with noise σ/2 and probability
    ``P[Bin(n, q) > K] K / (n τ)``; else it is that of a Poisson sample. Where K is 5 standard deviations above q n,
    the price is that of Poisson sampling to 0.1 %. With noise below 0.1 it is that of the displaced example alone,
    without sampling.

    Args:
        noise_multiplier: standard deviation of the noise divided by the sensitivity, in [1e-6, 1e6].
        sampling_probability: chance that an example joins the sample before the cut, in (0, 1].
        num_examples: n, which is public: the event holds for zeroing out one example only.
        most: K, the largest number of examples in a batch, at least 1.

    Guarantees:
        - an upper bound: the replaced pair is slightly larger than the true one. ``low`` of a bracket is a lower bound
          on that pair's price, not on the truth.

    Source: arXiv:2508.15089, and ``TruncatedSubsampledGaussianDpEvent`` of dp-accounting, which has the same price.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> step = TruncatedGaussian(noise_multiplier=1.0, sampling_probability=0.01, num_examples=50_000, most=600)
        >>> f"{compose([(step, 1000)]).epsilon(1e-5).high:.3f}"  # of Poisson samples: 1.829
        '1.838'
    """

    noise_multiplier: float
    sampling_probability: float
    num_examples: int
    most: int
    neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL
    unit: str = ONE_EXAMPLE
    sampler = "truncated Poisson"

    def __post_init__(self) -> None:
        check_fields(self)
        whole("TruncatedGaussian", at_least=1, at_most=MAX_COUNT, num_examples=self.num_examples, most=self.most)
        if self.neighboring_relation is not NeighboringRelation.REPLACE_SPECIAL:
            raise ValueError(
                f"TruncatedGaussian: neighboring_relation={self.neighboring_relation!r} has no price, because the "
                "number of examples decides how often a batch is cut, and no pair is proved to cover any two examples, "
                f"one in place of the other. Allowed: NeighboringRelation.REPLACE_SPECIAL. {REPLACED}"
            )


def truncated(event: Event, num_examples: int, most: int) -> TruncatedGaussian:
    """Returns the event of a Poisson-sampled release whose batches are truncated to ``most`` examples.

    Raises:
        ValueError: the release is not one Gaussian.

    Example:
        >>> truncated(SubsampledGaussian(noise_multiplier=1.0, sampling_probability=0.01), 50_000, most=600)
        TruncatedGaussian(noise_multiplier=1.0, sampling_probability=0.01, num_examples=50000, most=600)
    """
    probability = getattr(event, "sampling_probability", 1.0)
    return TruncatedGaussian(noise_of_one(event), probability, num_examples, most, unit=event.unit)


def combined_noise(noise_multipliers: tuple[float, ...]) -> float:
    """Returns the noise multiplier of blocks released together: ``(Σ σᵢ⁻²)^(-1/2)``.

    In coordinates of unit noise one example moves the concatenation by at most ``sqrt(Σ σᵢ⁻²)``.
    """
    return sum(noise**-2 for noise in noise_multipliers) ** -0.5


@priced(
    lambda event: poisson_pair(
        1 / combined_noise(event.noise_multipliers), event.sampling_probability, event.neighboring_relation
    )
)
@dataclass(frozen=True, repr=False)
class SubsampledBlocks(Event):
    """Several noisy sums over *one* Poisson sample, each with its own sensitivity and noise.

    Together they are one Gaussian release with ``1 / σ² = Σ 1 / σᵢ²``, inside the sampling. For example: groups of
    parameters that are clipped separately, or a clipped sum with a noisy count for adaptive clipping. Pricing the
    blocks as releases on separate samples gives no bound, because they share the sample.

    Args:
        noise_multipliers: for each block, the standard deviation of the noise divided by the block's sensitivity, in
            [1e-6, 1e6]; under replace-one the sensitivity is twice the block's clip norm.
        sampling_probability: chance that an example joins the sample, in (0, 1].
        neighboring_relation: add/remove one example by default.

    Guarantees:
        - exact where one example can reach every block's sensitivity at once, else an upper bound.

    Source: Andrew, Thakkar, McMahan & Ramaswamy (2021), arXiv:1905.03871, Theorem 1, for two blocks.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> blocks = SubsampledBlocks(noise_multipliers=(1.5, 2.0), sampling_probability=0.01)  # together 1.2
        >>> f"{compose([(blocks, 1000)]).epsilon(1e-5).high:.3f}"
        '1.299'
    """

    noise_multipliers: tuple[float, ...]
    sampling_probability: float
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE
    unit: str = ONE_EXAMPLE
    sampler = "Poisson"

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.noise_multipliers, tuple) or not self.noise_multipliers:
            got = f"noise_multipliers={self.noise_multipliers!r}"
            raise ValueError(f"SubsampledBlocks: {got} must be a tuple of one or more numbers.")
        for noise in self.noise_multipliers:
            check_noise("SubsampledBlocks", noise)
        check_noise("SubsampledBlocks, all blocks together", combined_noise(self.noise_multipliers))


@priced(
    lambda event: poisson_pair(2**0.5 / event.noise_multiplier, event.sampling_probability, event.neighboring_relation)
)
@dataclass(frozen=True, repr=False)
class SubsampledGEP(_PoissonSampled):
    """One step of gradient embedding perturbation: noisy embedding and noisy residual of the same Poisson sample.

    Together they are one Gaussian release of noise multiplier ``noise_multiplier / sqrt(2)``, inside the sampling.

    Args:
        noise_multiplier: for each of the two, the standard deviation of the noise divided by the sensitivity, in
            [1e-6, 1e6]; under replace-one the sensitivity is twice the clip norm.
        sampling_probability: chance that an example joins the sample, in (0, 1].
        neighboring_relation: add/remove one example by default.

    Guarantees:
        - the price of ``SubsampledBlocks((noise_multiplier, noise_multiplier), sampling_probability)``.

    Source: Yu, Zhang, Chen & Liu (2021), arXiv:2102.12677, Theorem 3.2; the sampling as in `SubsampledBlocks`.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> step = SubsampledGEP(noise_multiplier=2.0, sampling_probability=0.01)
        >>> f"{compose([(step, 1000)]).epsilon(1e-5).high:.3f}"
        '1.000'
    """


def _covariance_pair(event: "NoisyCovariance") -> DominatingPair | PairBounds:
    shift, q = 1 / event.noise_multiplier, event.sampling_probability
    if event.neighboring_relation in REMOVALS or q == 1:
        return SubsampledGaussianPair(shift, q)
    one = shift / 2**0.5  # the length of one row's matrix; another's is at most as long, and at no obtuse angle
    attained = ReplaceOneGaussianPair(shift / 2, q), SubsampledGaussianPair(one, q)
    return PairBounds(ReplaceOneGaussianPair(one, q), attained)


@priced(_covariance_pair)
@dataclass(frozen=True, repr=False)
class NoisyCovariance(Event):
    """``Σ xᵢ xᵢᵀ`` of rows with norm at most 1 plus symmetric Gaussian noise, as released by private PCA.

    The noise is drawn independently on and above the diagonal and mirrored, its standard deviation noise_multiplier on
    the diagonal and at least noise_multiplier / √2 off it. In the coordinates ``(A₁₁, √2·A₁₂, ..., A₂₂, ...)`` that is
    at least noise_multiplier in each, and one row changes the matrix by the length ‖xxᵀ‖ = ‖x‖² <= 1: the release is
    one Gaussian.

    Args:
        noise_multiplier: noise divided by the sensitivity, which is 1, and √2 where a row is replaced (by one at right
            angles to it), in [1e-6, 1e6].
        sampling_probability: chance that a row joins, in (0, 1]; all rows by default.
        neighboring_relation: add/remove one row by default.

    Guarantees:
        - the price of ``SubsampledGaussian(noise_multiplier, sampling_probability)``; where a row of a sample is
          replaced, an upper bound: that of two opposite matrices, which are further apart.

    Source: Abadi et al. (2016), arXiv:1607.00133, §4; Dwork, Talwar, Thakurta & Zhang (2014), Algorithm 1.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> f"{compose([(NoisyCovariance(noise_multiplier=16.0), 1)]).epsilon(1e-5).high:.3f}"
        '0.204'
    """

    noise_multiplier: float
    sampling_probability: float = 1.0
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE

    @property
    def sampler(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The word for how rows are drawn."""
        return "full batch" if self.sampling_probability == 1 else "Poisson"

    __post_init__ = check_fields
