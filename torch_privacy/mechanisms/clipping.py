# SPDX-License-Identifier: Apache-2.0
"""Defines clipping rules, which turn the norms of per-example gradients into factors that bound each example."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops._base import in_sum_dtype
from ..privacy import NeighboringRelation
from ..support.validate import (
    in_range,
    non_negative,
    plain_number,
    plain_numbers,
    positive,
    quoted,
    strictly_between,
    whole,
)
from .scheduled import Schedule, Scheduled

# float32 loses the squares of entries below 1e-19, and with a norm that misses some of them a row would exceed its
# bound. Rules with factors that grow without bound as the norm shrinks treat norms up to this one as zero; for a bound
# that is smaller, shorter norms count as this one.
SMALLEST_NORM = 1e-10


class ClippingRule(ABC):
    """Computes factors c that bound every row of diag(c) J, and the sensitivity of the sum of these rows.

    A rule partitions the trained parameters into groups. The part of a row that lies in one group is clipped by its
    own norm alone. Most rules have one group, ``"all"``. Some rules need the parameters' names to know their bounds:
    ``bind`` returns the rule with all bounds known; other rules it returns unchanged.

    A rule of your own is a frozen dataclass that defines ``factors`` and ``sensitivity``. The factor of a row must be a
    function of that row's norm alone, not of the other norms (such as their median).

    Guarantees:
        - ``factors(norms, group)[i] * norms[i]`` is at most the group's bound, up to rounding (1e-5, relative),
          for norms of any size and type. Half precision is converted to float32.
        - A part with an infinite or undefined norm gets the factor 0.
        - ``sensitivity`` is at most the root of the sum of the squared bounds of the groups if an example is added,
          removed or zeroed, and twice that if it is replaced (`MicroBatches` documents another value).
    """

    def bind(self, names: Sequence[str]) -> ClippingRule:
        """Returns the rule with all its bounds known, for trained parameters with these dotted names.

        Raises:
            ValueError: the rule does not fit the names.
        """
        return self

    def groups(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Returns the partition of the trained parameters: label of a group -> members, in the order of ``names``."""
        return {"all": tuple(names)}

    @abstractmethod
    def factors(self, norms: Tensor, group: str = "all") -> Tensor:
        """Returns (n,) factors, finite and 0 or greater, for the (n,) norms of the rows in one group's parameters."""

    @abstractmethod
    def sensitivity(self, relation: NeighboringRelation) -> float:
        """Returns the largest L2 change of the clipped sum between neighboring data sets."""

    def largest_norm(self) -> float:
        """Returns the bound on the norm of a clipped row over all groups, ``√(Σ bounds²)``; checked on every step."""
        return self.sensitivity(NeighboringRelation.ADD_OR_REMOVE_ONE)

    def divisor(self, expected_batch_size: float) -> float:
        """Returns the divisor of the released sum, a number that does not depend on the data."""
        return expected_batch_size

    def scaled(self, factor: float) -> ClippingRule:
        """Returns the rule with all its bounds multiplied by ``factor``, which `scheduled` needs."""
        raise ValueError(
            f"{type(self).__name__}.scaled: this rule cannot scale its bounds, as scheduled(...) needs. Define "
            "scaled(factor), which returns the rule with all bounds multiplied by the factor."
        )

    def scheduled(self, factors: Schedule) -> Scheduled:
        """Returns the rule with bounds that are multiplied by a factor in every step; it changes no epsilon.

        Args:
            factors: a function of the step, from 0 on, or a number for each step.
        """
        return Scheduled(self, factors)

    def statement(self) -> dict[str, Any]:
        """Returns the rule's name, settings and, once known, the bounds of its groups, as plain data."""
        return {"rule": type(self).__name__, **asdict(self)}  # pyright: ignore[reportArgumentType]


def check_rule(where: str, name: str, rule: Any) -> ClippingRule:
    """Returns the rule; raises a ``ValueError`` unless it is a clipping rule with a ``statement()`` that works."""
    if not isinstance(rule, ClippingRule):
        raise ValueError(f"{where}: {name}={rule!r} must be a clipping rule such as Flat(clip_norm=1.0).")
    try:
        rule.statement()
    except TypeError:
        kind = type(rule).__name__
        raise ValueError(
            f"{where}: {name}={rule!r} has no statement() of its settings, which the privacy statement prints. Make "
            f"{kind} a dataclass, with @dataclass(frozen=True), or define statement()."
        ) from None
    try:
        signature(rule.factors).bind(None, "all")
    except TypeError:
        raise ValueError(
            f"{where}: {type(rule).__name__}.factors must take the norms and the group's label: define "
            'factors(self, norms, group="all").'
        ) from None
    return rule


def clip_factors(norms: Tensor, clip_norm: float) -> Tensor:
    """Returns ``min(1, clip_norm / norm)``, and 0 where the norm is not finite."""
    norms = in_sum_dtype(norms)
    if clip_norm < SMALLEST_NORM:
        norms = norms.clamp(min=SMALLEST_NORM)
    factors = norms.reciprocal().mul_(clip_norm).clamp_(max=1).nan_to_num_(0)
    return torch.threshold_(factors, torch.finfo(factors.dtype).tiny, 0)


def vectors_changed(relation: NeighboringRelation) -> int:
    """Returns how many clipped vectors differ between neighboring sums: one is added or removed, or one is replaced."""
    return 2 if relation is NeighboringRelation.REPLACE_ONE else 1


@plain_numbers
@dataclass(frozen=True)
class Flat(ClippingRule):
    """Clips the whole gradient to one bound: ``cᵢ = min(1, clip_norm / ‖gᵢ‖)``.

    Args:
        clip_norm: bound C on the L2 norm of each per-example gradient, in the units of the gradient. The median norm
            of unclipped gradients is a good start (compute it on public data, see `median_norm`).

    Guarantees:
        - ``cᵢ‖gᵢ‖ <= clip_norm`` up to rounding (1e-5, relative).
        - A gradient within the bound is left unchanged.

    Edge cases: norm 0 gets the factor 1; an infinite or undefined norm gets 0. For a bound below 1e-10, shorter norms,
    which float32 cannot resolve, count as 1e-10.

    Source: Abadi et al. (2016), Algorithm 1.

    Example:
        >>> import torch
        >>> Flat(clip_norm=1.0).factors(torch.tensor([0.5, 4.0, float("inf")]))
        tensor([1.0000, 0.2500, 0.0000])
    """

    clip_norm: float

    def __post_init__(self) -> None:
        positive("Flat", clip_norm=self.clip_norm)

    def factors(self, norms: Tensor, group: str = "all") -> Tensor:
        return clip_factors(norms, self.clip_norm)

    def sensitivity(self, relation: NeighboringRelation) -> float:
        """Returns ``clip_norm`` if one example is added, removed or zeroed; twice that if it is replaced."""
        return self.clip_norm * vectors_changed(relation)

    def scaled(self, factor: float) -> Flat:
        return replace(self, clip_norm=self.clip_norm * factor)


@dataclass(frozen=True)
class Groups(ClippingRule):
    """Clips each group of parameters to its own bound: ``cᵢ = min(1, clip_norms[group] / ‖gᵢ in the group‖)``.

    Args:
        clip_norms: prefix -> bound. A prefix is the dotted name of a module, of a parameter, or ``""`` for the whole
            model; a parameter belongs to the longest prefix of its name.
        made_by: the rule that chose these bounds, if any; the privacy statement names it.

    Guarantees:
        - Every trained parameter is in exactly one group; a group's part of the gradient is at most the group's bound.
        - The sensitivity is ``√(Σ clip_norms²)``, and twice that if one example is replaced.

    Edge cases: those of `Flat`, in each group separately.

    Raises:
        ValueError: (from ``bind``) no prefix matches a parameter, or a prefix matches none; all are listed.

    Source: McMahan et al. (2018, arXiv:1710.06963), "per-layer clipping", with bounds of any size.

    Example:
        >>> rule = Groups({"encoder": 0.3, "head": 0.4}).bind(["encoder.0.weight", "head.weight", "head.bias"])
        >>> rule.groups(["encoder.0.weight", "head.weight", "head.bias"])
        {'encoder': ('encoder.0.weight',), 'head': ('head.weight', 'head.bias')}
        >>> rule.sensitivity(NeighboringRelation.ADD_OR_REMOVE_ONE)
        0.5
    """

    clip_norms: Mapping[str, float] = field(hash=False)
    made_by: ClippingRule | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.clip_norms, Mapping) or not self.clip_norms:
            raise ValueError(
                f"Groups: clip_norms={self.clip_norms!r} must map prefixes of parameters' names to bounds, as in "
                "Groups({'encoder': 0.5, 'head': 1.0})."
            )
        clip_norms = {prefix: plain_number(bound) for prefix, bound in self.clip_norms.items()}
        positive("Groups", **{f"clip_norms[{prefix!r}]": bound for prefix, bound in clip_norms.items()})
        object.__setattr__(self, "clip_norms", clip_norms)

    def bind(self, names: Sequence[str]) -> Groups:
        unused = sorted(set(self.clip_norms) - set(self.groups(names)))
        if unused:
            raise ValueError(
                f"Groups: {quoted(unused)} in clip_norms matches no trained parameter as the longest prefix of its "
                f"name. Trained are {quoted(names)}. Correct or remove it; its bound would only add to the noise."
            )
        return self

    def groups(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        groups: dict[str, tuple[str, ...]] = {}  # in the order of the names, as that of a mapping may differ by process
        unmatched = list[str]()
        for name in names:
            prefix = _longest_prefix(name, self.clip_norms)
            if prefix is None:
                unmatched.append(name)
            else:
                groups[prefix] = (*groups.get(prefix, ()), name)
        if unmatched:
            raise ValueError(
                f"Groups: no prefix in clip_norms matches {quoted(unmatched)}. Given are {quoted(self.clip_norms)}. "
                "Add prefixes for them, or '' for all remaining parameters, or freeze the parameters."
            )
        return groups

    def factors(self, norms: Tensor, group: str = "all") -> Tensor:
        if group not in self.clip_norms:
            raise ValueError(f"Groups.factors: group={group!r} must be one of {quoted(self.clip_norms)}.")
        return clip_factors(norms, self.clip_norms[group])

    def sensitivity(self, relation: NeighboringRelation) -> float:
        return math.hypot(*sorted(self.clip_norms.values())) * vectors_changed(relation)

    def scaled(self, factor: float) -> Groups:
        return replace(self, clip_norms={group: bound * factor for group, bound in self.clip_norms.items()})

    def statement(self) -> dict[str, Any]:
        rule = {"rule": type(self).__name__} if self.made_by is None else self.made_by.statement()
        return {**rule, "clip_norms": dict(self.clip_norms)}


@plain_numbers
@dataclass(frozen=True)
class PerLayer(ClippingRule):
    """Clips each of the L layers to ``clip_norm / √L``, so that the sensitivity is that of ``Flat(clip_norm)``.

    A layer is a module that has trained parameters of its own: ``a.b.weight`` and ``a.b.bias`` form the layer ``a.b``.

    Args:
        clip_norm: bound C on the L2 norm of the whole per-example gradient after clipping.

    Guarantees:
        - ``bind(names)`` returns `Groups` with one bound for each of the L layers.
        - The sensitivity is ``clip_norm``, and twice that if one example is replaced.

    Source: McMahan et al. (2018, arXiv:1710.06963), "per-layer clipping"; He et al. (2023, arXiv:2212.01539).

    Example:
        >>> PerLayer(clip_norm=1.0).bind(["0.weight", "0.bias", "1.weight", "2.weight", "3.weight"])
        Groups(clip_norms={'0': 0.5, '1': 0.5, '2': 0.5, '3': 0.5})
    """

    clip_norm: float

    def __post_init__(self) -> None:
        positive("PerLayer", clip_norm=self.clip_norm)

    def bind(self, names: Sequence[str]) -> Groups:
        layers = layers_of(names)
        return Groups(dict.fromkeys(layers, self.clip_norm / math.sqrt(len(layers))), made_by=self)

    def groups(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        return self.bind(names).groups(names)

    def factors(self, norms: Tensor, group: str = "all") -> Tensor:
        raise _unbound(self, "factors")

    def sensitivity(self, relation: NeighboringRelation) -> float:
        return self.clip_norm * vectors_changed(relation)


@plain_numbers
@dataclass(frozen=True)
class EachLayer(ClippingRule):
    """Clips each of the L layers to the same bound; a layer is a module that has trained parameters of its own.

    Args:
        clip_norm: bound on the L2 norm of each layer's part of each per-example gradient.

    Guarantees:
        - ``bind(names)`` returns `Groups` with the bound ``clip_norm`` for every layer.
        - The sensitivity is ``√L clip_norm``, and twice that if one example is replaced; it is known after ``bind``.

    Source: Abadi et al. (2016), experiments on MNIST, which clip "the gradient norm of each layer at 4".

    Example:
        >>> EachLayer(clip_norm=4.0).bind(["0.weight", "0.bias", "2.weight", "2.bias"])
        Groups(clip_norms={'0': 4.0, '2': 4.0})
    """

    clip_norm: float

    def __post_init__(self) -> None:
        positive("EachLayer", clip_norm=self.clip_norm)

    def bind(self, names: Sequence[str]) -> Groups:
        return Groups(dict.fromkeys(layers_of(names), self.clip_norm), made_by=self)

    def groups(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        return self.bind(names).groups(names)

    def factors(self, norms: Tensor, group: str = "all") -> Tensor:
        return clip_factors(norms, self.clip_norm)

    def sensitivity(self, relation: NeighboringRelation) -> float:
        raise _unbound(self, "sensitivity")


@plain_numbers
@dataclass(frozen=True)
class Automatic(ClippingRule):
    """Scales every gradient to nearly the same norm: ``cᵢ = clip_norm / (‖gᵢ‖ + gamma)``.

    With gamma above 0 this is AUTO-S; with gamma 0 it is AUTO-V, which normalizes. The bound only scales the
    gradients, so it can be left at 1 and absorbed into the learning rate: there is no clip norm to tune.

    Args:
        clip_norm: bound C on the L2 norm of each per-example gradient after clipping.
        gamma: keeps small gradients small, in the units of the gradient; 0 or greater.

    Guarantees:
        - ``cᵢ‖gᵢ‖ <= clip_norm`` up to rounding (1e-5, relative); below it where gamma > 0.
        - A norm of at most 1e-10, which float32 cannot resolve, gets the factor 0. So does a norm so small that the
          factor would overflow.

    Edge cases: norm 0 gets the factor 0; an infinite or undefined norm gets 0.

    Source: Bu et al. (2023, arXiv:2206.07136), equations for AUTO-V and AUTO-S; the threshold at 1e-10 is ours.

    Example:
        >>> import torch
        >>> Automatic(gamma=0.0).factors(torch.tensor([0.5, 4.0, 0.0]))
        tensor([2.0000, 0.2500, 0.0000])
    """

    clip_norm: float = 1.0
    gamma: float = 0.01

    def __post_init__(self) -> None:
        positive("Automatic", clip_norm=self.clip_norm)
        non_negative("Automatic", gamma=self.gamma)

    def factors(self, norms: Tensor, group: str = "all") -> Tensor:
        norms = in_sum_dtype(norms)
        return torch.where(norms > SMALLEST_NORM, _or_zero(self.clip_norm / (norms + self.gamma)), 0)

    def sensitivity(self, relation: NeighboringRelation) -> float:
        return self.clip_norm * vectors_changed(relation)

    def scaled(self, factor: float) -> Automatic:
        return replace(self, clip_norm=self.clip_norm * factor)


class NoiseSplit(NamedTuple):
    """Splits one joint Gaussian release into noise for the clipped sum and noise for the count."""

    gradient_noise_multiplier: float  # for the clipped sum, relative to its sensitivity
    count_noise_stddev: float  # for the count, absolute


@plain_numbers
@dataclass(frozen=True)
class Adaptive(ClippingRule):
    """Clips as `Flat` does; the clip norm follows a quantile of the norms by a noisy count released with every step.

    In addition to the clipped sum, each step releases ``Σᵢ (1[‖gᵢ‖ <= C] - 1/2)`` with noise of its own. Divided by the
    expected batch size, plus 1/2, it is an unbiased estimate b of the fraction of norms within C. Then
    ``C ← C exp(-learning_rate (b - target_quantile))``. A rule is immutable: ``updated`` returns the next one.

    The pair (sum, count) is one Gaussian release with the noise multiplier z that the accountant prices. Scaled to unit
    noise, one example moves the sum by at most 1 / z_grad and the count by s / σ_b, hence the pair by
    ``√(z_grad⁻² + (s / σ_b)²) = 1 / z``; ``split`` solves this for z_grad. One example changes the count by at most
    s = 1/2, or by 1 if it is replaced.

    Args:
        clip_norm: the present clip norm; at the start a rough guess, rather too small than too large.
        target_quantile: fraction of the norms that should lie within the clip norm, in (0, 1).
        learning_rate: step size of the logarithm of the clip norm.
        count_noise_stddev: absolute standard deviation σ_b of the count's noise; by default the expected batch size
            divided by 20.
        smallest: lower bound on the clip norm.
        largest: upper bound on the clip norm.

    Guarantees:
        - ``cᵢ‖gᵢ‖ <= clip_norm`` up to rounding (1e-5, relative).
        - One example changes ``count`` by at most 1/2, and by at most 1 if it is replaced.
        - The sum at ``split(...).gradient_noise_multiplier`` and the count at ``split(...).count_noise_stddev``
          together are one release with the given ``noise_multiplier``.
        - ``smallest <= updated(...).clip_norm <= largest`` for any noise.

    Edge cases: an infinite or undefined norm gets the factor 0 and counts as outside of the clip norm.

    Source: Andrew, Thakkar, McMahan & Ramaswamy (2021, arXiv:1905.03871), Algorithm 1 and Theorem 1, with σ_b = m/20.

    Example:
        >>> rule = Adaptive(clip_norm=1.0, learning_rate=0.2)
        >>> round(rule.updated(noisy_count=-30.0, expected_batch_size=100.0).clip_norm, 4)  # 20 of 100 are within
        1.0618
    """

    clip_norm: float
    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise_stddev: float | None = None
    smallest: float = 1e-6
    largest: float = 1e6

    def __post_init__(self) -> None:
        positive("Adaptive", clip_norm=self.clip_norm, learning_rate=self.learning_rate)
        positive("Adaptive", smallest=self.smallest, largest=self.largest)
        strictly_between("Adaptive", 0, 1, target_quantile=self.target_quantile)
        if self.count_noise_stddev is not None:
            positive("Adaptive", count_noise_stddev=self.count_noise_stddev)
        if not self.smallest <= self.clip_norm <= self.largest:
            raise ValueError(
                f"Adaptive: clip_norm={self.clip_norm!r} must lie in [smallest, largest] = [{self.smallest:g}, "
                f"{self.largest:g}]."
            )

    def factors(self, norms: Tensor, group: str = "all") -> Tensor:
        return clip_factors(norms, self.clip_norm)

    def sensitivity(self, relation: NeighboringRelation) -> float:
        """Returns the sensitivity of the clipped sum alone at the present clip norm; see ``count_sensitivity``, too."""
        return self.clip_norm * vectors_changed(relation)

    def count(self, norms: Tensor) -> Tensor:
        """Returns the scalar ``Σᵢ (1[norm <= clip_norm] - 1/2)``, which is secret until noise is added."""
        halves = torch.where(norms <= self.clip_norm, 0.5, -0.5)  # of torch's default type, which may be bfloat16
        return halves.sum(dtype=torch.float32)  # exact, as a sum of 0.5 each, for up to 2^24 norms

    def count_sensitivity(self, relation: NeighboringRelation) -> float:
        """Returns the largest change of ``count`` between neighboring data sets."""
        return 0.5 * vectors_changed(relation)

    def split(self, noise_multiplier: float, expected_batch_size: float, relation: NeighboringRelation) -> NoiseSplit:
        """Returns the noise of sum and count that together make one release with ``noise_multiplier``.

        Raises:
            ValueError: the count's noise is so small that no finite noise on the sum is enough.
        """
        positive("Adaptive.split", noise_multiplier=noise_multiplier, expected_batch_size=expected_batch_size)
        stddev = expected_batch_size / 20 if self.count_noise_stddev is None else self.count_noise_stddev
        inverse_square = noise_multiplier**-2 - (self.count_sensitivity(relation) / stddev) ** 2
        if inverse_square <= 0:
            raise ValueError(
                f"Adaptive: count_noise_stddev={stddev!r} must be greater than "
                f"{self.count_sensitivity(relation) * noise_multiplier:g}, the noise multiplier {noise_multiplier:g} "
                f"times the count's sensitivity. Raise it, or take a larger expected_batch_size; 1/20 of it is usual."
            )
        return NoiseSplit(inverse_square**-0.5, stddev)

    def scaled(self, factor: float) -> ClippingRule:
        raise ValueError("Adaptive.scaled: the clip norm follows the norms already. Leave .scheduled(...) out.")

    def updated(self, noisy_count: float, expected_batch_size: float) -> Adaptive:
        """Returns the rule for the next step, from the batch's ``count`` plus its noise."""
        positive("Adaptive.updated", expected_batch_size=expected_batch_size)
        in_range("Adaptive.updated", -math.inf, math.inf, noisy_count=noisy_count)
        fraction = noisy_count / expected_batch_size + 0.5
        log = math.log(self.clip_norm) - self.learning_rate * (fraction - self.target_quantile)
        log = min(max(log, math.log(self.smallest)), math.log(self.largest))  # before exp, which may overflow
        return replace(self, clip_norm=min(max(math.exp(log), self.smallest), self.largest))


@plain_numbers
@dataclass(frozen=True)
class MicroBatches(ClippingRule):
    """Clips the mean gradient of each group of about ``size`` examples: ``cⱼ = min(1, clip_norm / ‖mean of group j‖)``.

    Each example of the batch joins one of ``num_groups`` groups at random. The sum of the groups' clipped means is
    released; divide it by ``num_groups``. It needs more noise than `Flat`: the sensitivity is twice the bound, and a
    step sums ``size`` times fewer vectors.

    The sensitivity between neighboring data sets follows because an example's group is drawn independently of the data
    and of the other examples. Fix the groups of all examples, the same in both data sets, at the worst draw. Adding or
    removing one example changes the mean of one group and nothing else. Both means are clipped, so each lies in the
    ball of radius C, and their distance is at most 2C. It reaches 2C if the new gradient outweighs a group with the
    opposite direction. (C holds only if every group has at most one example, so that it becomes empty.) An example that
    is replaced keeps its place and hence its group: again one mean changes, by at most 2C. Groups of a fixed size,
    filled in order, have no such bound: adding one example moves all later ones to other groups.

    Args:
        clip_norm: bound C on the L2 norm of each group's mean gradient.
        size: expected number of examples in a group, 2 or more.

    Guarantees:
        - ``cⱼ‖mean of group j‖ <= clip_norm`` up to rounding (1e-5, relative).
        - The sensitivity is ``2 clip_norm`` under every neighboring relation.

    Edge cases: an empty group has mean 0 and adds nothing; a group with an infinite or undefined mean gets factor 0.

    Source: the ``num_microbatches`` of TensorFlow Privacy (McMahan et al. 2018, arXiv:1812.06210). Its
    noise is scaled by C; ours by 2C.

    Example:
        >>> rule = MicroBatches(clip_norm=1.0, size=16)
        >>> rule.num_groups(expected_batch_size=256), rule.sensitivity(NeighboringRelation.ADD_OR_REMOVE_ONE)
        (16, 2.0)
    """

    clip_norm: float
    size: int

    def __post_init__(self) -> None:
        positive("MicroBatches", clip_norm=self.clip_norm)
        whole("MicroBatches", size=self.size, at_least=1)
        if self.size == 1:
            raise ValueError(
                "MicroBatches: size=1 must be at least 2. To clip every example by itself, use Flat(clip_norm); its "
                "sensitivity is half as large."
            )

    def num_groups(self, expected_batch_size: float) -> int:
        """Returns the number of groups m, also the divisor of the released sum; depends on public numbers only."""
        positive("MicroBatches.num_groups", expected_batch_size=expected_batch_size)
        return max(1, round(expected_batch_size / self.size))

    def largest_norm(self) -> float:
        return self.clip_norm

    def divisor(self, expected_batch_size: float) -> float:
        return self.num_groups(expected_batch_size)

    def factors(self, norms: Tensor, group: str = "all") -> Tensor:
        """Returns (m,) factors from the (m,) norms of the groups' means."""
        return clip_factors(norms, self.clip_norm)

    def sensitivity(self, relation: NeighboringRelation) -> float:
        return 2 * self.clip_norm

    def scaled(self, factor: float) -> MicroBatches:
        return replace(self, clip_norm=self.clip_norm * factor)


def median_norm(norms: Tensor) -> float:
    """Returns the median of the finite norms, a good first clip norm; the lower one of two middle values.

    Use it on public data only: on private data the median is itself a release, and this function adds no noise.
    `Adaptive` follows the median of private norms, at a price that epsilon includes.

    Args:
        norms: (n,) norms of unclipped per-example gradients, such as ``jacobian.squared_norms().sqrt()``.

    Source: Abadi et al. (2016), on the choice of C: "the median of the norms of the unclipped gradients".

    Example:
        >>> median_norm(torch.tensor([0.5, 3.0, 1.0]))
        1.0
    """
    finite = norms[norms.isfinite()]
    if not len(finite):
        raise ValueError(f"median_norm: norms of shape {tuple(norms.shape)} must hold at least one finite number.")
    return float(finite.median())


def layers_of(names: Sequence[str]) -> list[str]:
    """Returns the dotted names of the modules that hold the parameters; ``""`` is the model itself.

    >>> layers_of(["scale", "body.0.weight", "body.0.bias"])
    ['', 'body.0']
    """
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def _or_zero(factors: Tensor) -> Tensor:
    """Returns 0 in place of factors that are undefined, infinite, or subnormal."""
    return torch.where((factors >= torch.finfo(factors.dtype).tiny) & factors.isfinite(), factors, 0)


def _longest_prefix(name: str, prefixes: Iterable[str]) -> str | None:
    """Returns the longest prefix of a dotted name; None if no prefix matches."""
    matching = (p for p in prefixes if p in ("", name) or name.startswith(f"{p}."))
    return max(matching, key=len, default=None)


def _unbound(rule: ClippingRule, what: str) -> ValueError:
    """Returns the error for a method that works only after ``bind``."""
    return ValueError(
        f"{type(rule).__name__}.{what}: the layers must be known. Call rule.bind(names of the trained parameters), and "
        "use the rule that it returns."
    )
