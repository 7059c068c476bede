# SPDX-License-Identifier: Apache-2.0
"""Releases with Gaussian noise: full batches, Poisson samples, samples of fixed size, several blocks at once.

**Noise over sensitivity.** Everywhere ``noise_multiplier`` is the noise's standard deviation divided by the sensitivity
*under the event's own neighboring relation*, as `clipping.ClippingRule.sensitivity` has it: values clipped to norm C
have sensitivity C when an example comes, goes or is zeroed out, and **2 C when it is replaced**. Papers often write
noise over C under every relation: under replace-one halve their number, or ε comes out far too small.
"""

from dataclasses import dataclass

from ..._validate import in_range
from ..engines.dispatch import Between
from ..pairs.base import Law, PlusMinus, Subsampled, SubsampledNormal, Symmetrised
from .base import Event, NeighboringRelation, check_noise, check_relation, priced

ADD_OR_REMOVE_ONE, REPLACE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE


def check_probability(where: str, sampling_probability: float) -> None:
    """Raise unless the sampling probability lies in (0, 1]."""
    hint = "For a mean batch of 256 out of 60000 pass 256 / 60000."
    in_range(where, 0, 1, sampling_probability=sampling_probability, hint=hint)


def poisson_law(shift: float, probability: float, relation: NeighboringRelation) -> Law:
    """Law of a Poisson-sampled Gaussian release, ``shift`` the sensitivity under the relation over the noise."""
    if relation is REPLACE_ONE and probability < 1:
        return PlusMinus(shift / 2, probability)  # the two examples' values lie half the sensitivity from 0
    return SubsampledNormal(shift, probability)


@priced(lambda event: SubsampledNormal(1 / event.noise_multiplier, 1.0))
@dataclass(frozen=True, repr=False)
class Gaussian(Event):
    """One noisy sum over all the data.

    Args:
        noise_multiplier: standard deviation of the noise divided by the sensitivity, in [1e-6, 1e6].
        neighboring_relation: any; the sensitivity is the one under it: 2 C, not C, where examples are replaced.
    """

    noise_multiplier: float
    neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE
    sampler = "full batch"

    def __post_init__(self) -> None:
        check_noise("privacy.Gaussian", self.noise_multiplier)
        check_relation("privacy.Gaussian", self.neighboring_relation)


@priced(lambda event: poisson_law(1 / event.noise_multiplier, event.sampling_probability, event.neighboring_relation))
@dataclass(frozen=True, repr=False)
class SubsampledGaussian(Event):
    """One noisy sum over a Poisson sample: every example joins independently with the same probability.

    Released is ``sum of clipped values + N(0, (noise_multiplier * sensitivity)² I)``. With z = 1 / noise_multiplier and
    q the sampling probability, the pair that an attacker must tell apart is

    - add/remove one: ``(1 - q) N(0, 1) + q N(z, 1)`` and ``N(0, 1)``, in either order;
    - replace by a null record (zero-out): the same;
    - replace one: ``(1 - q) N(0, 1) + q N(±z/2, 1)``, for the sensitivity is twice a value's norm.

    Args:
        noise_multiplier: standard deviation of the noise divided by the sensitivity, in [1e-6, 1e6]. **Under
            replace-one the sensitivity is 2 C** for values clipped to norm C: pass half of "noise over clip norm".
        sampling_probability: chance that an example joins the sample, in (0, 1].
        neighboring_relation: add/remove one example by default.

    Example:
        >>> SubsampledGaussian(noise_multiplier=1.1, sampling_probability=256 / 60000).sampler
        'Poisson'
    """

    noise_multiplier: float
    sampling_probability: float
    neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE
    sampler = "Poisson"

    def __post_init__(self) -> None:
        check_noise("SubsampledGaussian", self.noise_multiplier)
        check_probability("SubsampledGaussian", self.sampling_probability)
        check_relation("SubsampledGaussian", self.neighboring_relation)


def _fixed_size_laws(event: "FixedSizeGaussian") -> Law | Between:
    shift, probability = 1 / event.noise_multiplier, event.sampling_probability
    one_sided: Subsampled = SubsampledNormal(shift, probability)
    if probability == 1:
        return one_sided
    return Between(Symmetrised(one_sided), (one_sided, PlusMinus(shift / 2, probability)))


@priced(_fixed_size_laws)
@dataclass(frozen=True, repr=False)
class FixedSizeGaussian(Event):
    """One noisy sum over a batch of fixed size, drawn without replacement; one example is replaced.

    The price is a bracket, its width is not rounding but lack of knowledge. Above: amplification by subsampling without
    replacement, ``δ(ε) <= q D(log(1 + (e^ε - 1) / q))`` for ε >= 0 with D the Gaussian curve of the whole sensitivity,
    symmetrised (`Symmetrised`). Below: the dearest of three pairs that data sets realise, ``(1 - q) N(0) + q N(z)``
    against ``N(0)`` in either order and ``(1 - q) N(0) + q N(±z/2)``, z = 1 / noise_multiplier.

    Args:
        noise_multiplier: standard deviation of the noise divided by the sensitivity, which is 2 C for values clipped to
            norm C, in [1e-6, 1e6]: half of "noise over clip norm".
        sampling_probability: batch size over number of examples, in (0, 1].

    Source: Balle, Barthe & Gaboardi (2018), arXiv:1807.01647, Theorem 9; the lower bounds by inspection.
    """

    noise_multiplier: float
    sampling_probability: float
    neighboring_relation = REPLACE_ONE
    sampler = "fixed-size"

    def __post_init__(self) -> None:
        check_noise("FixedSizeGaussian", self.noise_multiplier)
        check_probability("FixedSizeGaussian", self.sampling_probability)


def combined(noise_multipliers: tuple[float, ...]) -> float:
    """Noise multiplier of blocks released together: ``(Σ σᵢ⁻²)^(-1/2)``.

    In coordinates of unit noise one example moves the concatenation by at most ``sqrt(Σ σᵢ⁻²)``.
    """
    return sum(noise**-2 for noise in noise_multipliers) ** -0.5


@priced(
    lambda event: poisson_law(
        1 / combined(event.noise_multipliers), event.sampling_probability, event.neighboring_relation
    )
)
@dataclass(frozen=True, repr=False)
class SubsampledBlocks(Event):
    """Several noisy sums over *one* Poisson sample, each with a sensitivity and noise of its own.

    One Gaussian release of ``1 / σ² = Σ 1 / σᵢ²``, inside the sampling. Composing the blocks as releases on samples of
    their own is no bound: they share the sample.

    Args:
        noise_multipliers: each block's standard deviation of the noise over its own sensitivity, in [1e-6, 1e6];
            under replace-one that is twice the block's clip norm.
        sampling_probability: chance that an example joins the sample, in (0, 1].
        neighboring_relation: add/remove one example by default.
    """

    noise_multipliers: tuple[float, ...]
    sampling_probability: float
    neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE
    sampler = "Poisson"

    def __post_init__(self) -> None:
        if not isinstance(self.noise_multipliers, tuple) or not self.noise_multipliers:
            got = f"noise_multipliers={self.noise_multipliers!r}"
            raise ValueError(f"SubsampledBlocks: {got} must be a tuple of one or more numbers.")
        for noise in self.noise_multipliers:
            check_noise("SubsampledBlocks", noise)
        check_noise("SubsampledBlocks, all blocks together", combined(self.noise_multipliers))
        check_probability("SubsampledBlocks", self.sampling_probability)
        check_relation("SubsampledBlocks", self.neighboring_relation)


@priced(
    lambda event: poisson_law(2**0.5 / event.noise_multiplier, event.sampling_probability, event.neighboring_relation)
)
@dataclass(frozen=True, repr=False)
class SubsampledGEP(Event):
    """Gradient embedding perturbation: noisy embedding and noisy residual of the same Poisson sample.

    One Gaussian release of noise multiplier ``noise_multiplier / sqrt(2)``, inside the sampling.

    Args:
        noise_multiplier: each part's standard deviation of the noise over its own sensitivity, in [1e-6, 1e6]; under
            replace-one that is twice the part's clip norm.
        sampling_probability: chance that an example joins the sample, in (0, 1].
        neighboring_relation: add/remove one example by default.
    Source: Yu, Zhang, Chen & Liu (2021), arXiv:2102.12677, Theorem 3.2; the sampling as in `SubsampledBlocks`.
    """

    noise_multiplier: float
    sampling_probability: float
    neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE
    sampler = "Poisson"

    def __post_init__(self) -> None:
        check_noise("SubsampledGEP", self.noise_multiplier)
        check_probability("SubsampledGEP", self.sampling_probability)
        check_relation("SubsampledGEP", self.neighboring_relation)


@priced(
    lambda event: poisson_law(
        1 / combined((event.noise_multiplier, event.count_noise_multiplier)),
        event.sampling_probability,
        event.neighboring_relation,
    )
)
@dataclass(frozen=True, repr=False)
class SubsampledAdaptiveClip(Event):
    """Noisy clipped sum and noisy count of the examples within the clip norm, of the same Poisson sample.

    One Gaussian release of ``1 / σ² = 1 / noise_multiplier² + 1 / count_noise_multiplier²``, inside the sampling.

    Args:
        noise_multiplier: of the sum, over its sensitivity (2 C under replace-one), in [1e-6, 1e6].
        count_noise_multiplier: standard deviation of the count's noise over the count's sensitivity, which is 1/2 for
            a count of ±1/2 when an example comes or goes, and 1 when one is replaced; in [1e-6, 1e6].
        sampling_probability: chance that an example joins the sample, in (0, 1].
        neighboring_relation: add/remove one example by default.
    Source: Andrew, Thakkar, McMahan & Ramaswamy (2021), arXiv:1905.03871, Theorem 1.
    """

    noise_multiplier: float
    count_noise_multiplier: float
    sampling_probability: float
    neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE
    sampler = "Poisson"

    def __post_init__(self) -> None:
        check_noise("SubsampledAdaptiveClip", self.noise_multiplier)
        check_noise("SubsampledAdaptiveClip, count", self.count_noise_multiplier)
        check_probability("SubsampledAdaptiveClip", self.sampling_probability)
        check_relation("SubsampledAdaptiveClip", self.neighboring_relation)


@priced(lambda event: SubsampledNormal(1 / event.noise_multiplier, event.sampling_probability))
@dataclass(frozen=True, repr=False)
class NoisyCovariance(Event):
    """``Σ xᵢ xᵢᵀ`` of rows with norm at most 1 plus symmetric Gaussian noise, as of private principal components.

    The noise is drawn independently on and above the diagonal and mirrored, its standard deviation noise_multiplier on
    the diagonal and at least noise_multiplier / √2 beside it. In the coordinates ``(A₁₁, √2·A₁₂, ..., A₂₂, ...)`` that
    is noise of one size, and one row changes the matrix by the length ‖xxᵀ‖ = ‖x‖² <= 1: the release is one Gaussian.

    Args:
        noise_multiplier: noise over sensitivity, which is 1, in [1e-6, 1e6].
        sampling_probability: chance that a row joins, in (0, 1]; all rows by default.
    Source: Abadi et al. (2016), arXiv:1607.00133, §4; Dwork, Talwar, Thakurta & Zhang (2014), Algorithm 1.
    """

    noise_multiplier: float
    sampling_probability: float = 1.0
    neighboring_relation = ADD_OR_REMOVE_ONE

    @property
    def sampler(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """How the rows were drawn."""
        return "full batch" if self.sampling_probability == 1 else "Poisson"

    def __post_init__(self) -> None:
        check_noise("NoisyCovariance", self.noise_multiplier)
        check_probability("NoisyCovariance", self.sampling_probability)
