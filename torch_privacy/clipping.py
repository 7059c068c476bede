# SPDX-License-Identifier: Apache-2.0
"""Clipping rules: from the norms of the per-example gradients to the factors that bound what one example can do."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._validate import in_range, non_negative, positive, strictly_between, whole
from .ops._base import in_sum_dtype
from .privacy import NeighboringRelation

# Norms up to here are taken for zero by rules whose factors grow without bound as the norm shrinks: the squares of
# entries below 1e-19 are lost in float32, and a norm that misses some of them would let the row exceed its bound.
SMALLEST_NORM = 1e-10


class ClippingRule(ABC):
    """Factors c that bound every row of diag(c) J, and the sensitivity that follows for their sum.

    A rule works group by group: it cuts the trained parameters into groups, and the part of a row that lies in one
    group is bounded from its own norm alone. Most rules have one group, ``"all"``. Some have to see the parameters'
    names first: ``bind`` gives the rule whose bounds are all known, and leaves any other rule as it is.

    A rule of your own is a frozen dataclass that defines ``factors`` and ``sensitivity``. The factor of a row must be a
    function of that row's norm alone: not of the other norms, such as their median.

    Guarantees:
        - ``factors(norms, group)[i] * norms[i]`` is at most the group's bound, up to rounding (1e-5, relative),
          whatever the norms and their type. Half precision is raised to float32.
        - A part whose norm is infinite or undefined gets the factor 0.
        - ``sensitivity`` is at most the root of the sum of the squared bounds of the groups, once where an example
          comes, goes or is zeroed, twice where it is replaced (`MicroBatches` differs, and says so).
    """

    def bind(self, names: Sequence[str]) -> ClippingRule:
        """The rule for a model whose trained parameters have these dotted names, all its bounds explicit.

        Raises:
            ValueError: the rule does not fit the names.
        """
        return self

    def groups(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Partition of the trained parameters: a group's label -> its parameters, in the order of ``names``."""
        return {"all": tuple(names)}

    @abstractmethod
    def factors(self, norms: Tensor, group: str = "all") -> Tensor:
        """(n,) norms of the rows over one group's parameters -> (n,) factors, 0 or greater and finite."""

    @abstractmethod
    def sensitivity(self, relation: NeighboringRelation) -> float:
        """Largest L2 change of the clipped sum between neighboring data sets."""

    def largest_norm(self) -> float:
        """Bound on the norm of a whole clipped row, all groups together: ``√(Σ bounds²)``. Checked on every step."""
        return self.sensitivity(NeighboringRelation.ADD_OR_REMOVE_ONE)

    def divisor(self, expected_batch_size: float) -> float:
        """What the released sum is divided by: a number that no data have a part in."""
        return expected_batch_size

    def statement(self) -> dict[str, Any]:
        """Its name, its settings and, once they are known, the bounds of its groups: plain data that can be printed."""
        return {"rule": type(self).__name__, **asdict(self)}  # pyright: ignore[reportArgumentType]


def check_rule(where: str, name: str, rule: Any) -> ClippingRule:
    """Raise a ``ValueError`` unless this is a clipping rule that can say its settings."""
    if not isinstance(rule, ClippingRule):
        raise ValueError(f"{where}: {name}={rule!r} must be a clipping rule such as Flat(clip_norm=1.0).")
    try:
        rule.statement()
    except TypeError:
        kind = type(rule).__name__
        raise ValueError(
            f"{where}: {name}={rule!r} cannot say its settings, which the privacy statement prints. Make {kind} a "
            "dataclass, with @dataclass(frozen=True), or define statement()."
        ) from None
    return rule


def clip_factors(norms: Tensor, clip_norm: float) -> Tensor:
    """``min(1, clip_norm / norm)``, and 0 where the norm is not finite."""
    return _or_zero((clip_norm / in_sum_dtype(norms)).clamp(max=1))


def vectors_changed(relation: NeighboringRelation) -> int:
    """How many clipped vectors enter the change of a sum: one comes or goes, or one goes and another comes."""
    return 2 if relation is NeighboringRelation.REPLACE_ONE else 1


@dataclass(frozen=True)
class Flat(ClippingRule):
    """One bound for the whole gradient: ``cᵢ = min(1, clip_norm / ‖gᵢ‖)``.

    Args:
        clip_norm: bound C on the L2 norm of each per-example gradient, in the units of the gradient. The median norm
            of unclipped gradients is a good start (take it on public data, see `median_norm`).

    Guarantees:
        - ``cᵢ‖gᵢ‖ <= clip_norm`` up to rounding (1e-5, relative).
        - A gradient within the bound is left exactly as it is.

    Edge cases: norm 0 gets the factor 1; an infinite or undefined norm gets 0.

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
        """``clip_norm`` where one example comes, goes or is zeroed; twice that where it is replaced."""
        return self.clip_norm * vectors_changed(relation)


@dataclass(frozen=True)
class Groups(ClippingRule):
    """A bound for each group of parameters: ``cᵢ = min(1, clip_norms[group] / ‖gᵢ in the group‖)``.

    Args:
        clip_norms: prefix -> bound. A prefix is the dotted name of a module, of a parameter, or ``""`` for the whole
            model; a parameter belongs to the longest prefix of its name.
        made_by: the rule that chose these bounds, if one did; the privacy statement names it.

    Guarantees:
        - Every trained parameter is in exactly one group, and its part of the gradient has at most the group's bound.
        - The sensitivity is ``√(Σ clip_norms²)``, twice that where one example is replaced.

    Edge cases: as of `Flat`, in each group on its own.

    Raises:
        ValueError: (by ``bind``) a parameter that no prefix matches, or a prefix that matches none; all are listed.

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
        positive("Groups", **{f"clip_norms[{prefix!r}]": bound for prefix, bound in self.clip_norms.items()})
        object.__setattr__(self, "clip_norms", dict(self.clip_norms))

    def bind(self, names: Sequence[str]) -> Groups:
        unused = sorted(set(self.clip_norms) - set(self.groups(names)))
        if unused:
            raise ValueError(
                f"Groups: {_listed(unused)} in clip_norms matches no trained parameter as the longest prefix of its "
                f"name. Trained are {_listed(names)}. Correct or remove it; its bound would only add to the noise."
            )
        return self

    def groups(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        longest = {name: _longest_prefix(name, self.clip_norms) for name in names}
        offenders = [name for name, prefix in longest.items() if prefix is None]
        if offenders:
            raise ValueError(
                f"Groups: no prefix in clip_norms matches {_listed(offenders)}. Given are {_listed(self.clip_norms)}. "
                "Add prefixes for them, or '' for all that is left, or freeze the parameters."
            )
        members = {group: tuple(n for n, prefix in longest.items() if prefix == group) for group in self.clip_norms}
        return {group: inside for group, inside in members.items() if inside}

    def factors(self, norms: Tensor, group: str = "all") -> Tensor:
        if group not in self.clip_norms:
            raise ValueError(f"Groups.factors: group={group!r} must be one of {_listed(self.clip_norms)}.")
        return clip_factors(norms, self.clip_norms[group])

    def sensitivity(self, relation: NeighboringRelation) -> float:
        return math.hypot(*self.clip_norms.values()) * vectors_changed(relation)

    def statement(self) -> dict[str, Any]:
        maker = {"rule": type(self).__name__} if self.made_by is None else self.made_by.statement()
        return {**maker, "clip_norms": dict(self.clip_norms)}


@dataclass(frozen=True)
class PerLayer(ClippingRule):
    """One group for each module that has trained parameters of its own; the L bounds share ``clip_norm`` equally.

    Each layer gets ``clip_norm / √L``, so that the sensitivity is that of ``Flat(clip_norm)``. A layer is a module: the
    parameters ``a.b.weight`` and ``a.b.bias`` form the layer ``a.b``.

    Args:
        clip_norm: bound C on the L2 norm of the whole per-example gradient after clipping.

    Guarantees:
        - ``bind(names)`` gives `Groups` with one bound for each of the L layers.
        - The sensitivity is ``clip_norm``, twice that where one example is replaced.

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


@dataclass(frozen=True)
class EachLayer(ClippingRule):
    """One group for each module that has trained parameters of its own; each of the L layers is clipped to the bound.

    Args:
        clip_norm: bound on the L2 norm of each layer's part of each per-example gradient.

    Guarantees:
        - ``bind(names)`` gives `Groups` with the bound ``clip_norm`` for every layer.
        - The sensitivity is ``√L clip_norm``, twice that where one example is replaced; it is known after ``bind``.

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


@dataclass(frozen=True)
class Automatic(ClippingRule):
    """Every gradient is brought to nearly the same norm: ``cᵢ = clip_norm / (‖gᵢ‖ + gamma)``.

    With gamma above 0 this is AUTO-S; with gamma 0 it is AUTO-V, which normalises. The bound only scales the
    gradients, so that it may be merged with the learning rate and left at 1: nothing is left to tune.

    Args:
        clip_norm: bound C on the L2 norm of each per-example gradient after clipping.
        gamma: keeps small gradients small, in the units of the gradient; 0 or greater.

    Guarantees:
        - ``cᵢ‖gᵢ‖ <= clip_norm`` up to rounding (1e-5, relative); below it where gamma > 0.
        - A norm of at most 1e-10, too small to be known in float32, gets the factor 0. So does one so small that
          the factor would overflow.

    Edge cases: norm 0 gets the factor 0; an infinite or undefined norm gets 0.

    Source: Bu et al. (2023, arXiv:2206.07136), equations for AUTO-V and AUTO-S; the cut at 1e-10 is ours.

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


class NoiseSplit(NamedTuple):
    """How one joint Gaussian release is split between the clipped sum and the count beside it."""

    gradient_noise_multiplier: float  # for the clipped sum, relative to its sensitivity
    count_noise_stddev: float  # for the count, absolute


@dataclass(frozen=True)
class Adaptive(ClippingRule):
    """`Flat` with a clip norm that follows a quantile of the norms, by a noisy count released with every step.

    Beside the clipped sum each step releases ``Σᵢ (1[‖gᵢ‖ <= C] - 1/2)`` with noise of its own; b is that over the
    expected batch size plus 1/2, an unbiased estimate of the fraction of norms within C. Then
    ``C ← C exp(-learning_rate (b - target_quantile))``. A rule is a value: ``updated`` gives the next one.

    The pair (sum, count) is one Gaussian release of the noise multiplier z that the accountant is told: scaled to unit
    noise, one example moves the sum by at most 1 / z_grad and the count by s / σ_b, hence the pair by
    ``√(z_grad⁻² + (s / σ_b)²) = 1 / z``, which is solved for z_grad by ``split``. One example changes the count by at
    most s = 1/2, or 1 where it is replaced.

    Args:
        clip_norm: the clip norm now; at the start, a rough guess on the small side.
        target_quantile: fraction of the norms that should lie within the clip norm, in (0, 1).
        learning_rate: speed at which the logarithm of the clip norm moves.
        count_noise_stddev: absolute standard deviation σ_b of the count's noise; by default the expected batch size
            over 20.
        smallest: lower bound on the clip norm.
        largest: upper bound on the clip norm.

    Guarantees:
        - ``cᵢ‖gᵢ‖ <= clip_norm`` up to rounding (1e-5, relative).
        - One example changes ``count`` by at most 1/2, by at most 1 where it is replaced.
        - The sum at ``split(...).gradient_noise_multiplier`` and the count at ``split(...).count_noise_stddev`` are
          together one release of the ``noise_multiplier`` given.
        - ``smallest <= updated(...).clip_norm <= largest``, whatever the noise.

    Edge cases: an infinite or undefined norm gets the factor 0 and counts as not within.

    Source: Andrew, Thakkar, McMahan & Ramaswamy (2021, arXiv:1905.03871), Algorithm 1 and Theorem 1, whose σ_b is m/20.

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
        """Of the clipped sum alone, at the present clip norm; the count's is ``count_sensitivity``."""
        return self.clip_norm * vectors_changed(relation)

    def count(self, norms: Tensor) -> Tensor:
        """``Σᵢ (1[norm <= clip_norm] - 1/2)``, a scalar; secret until noise of ``count_noise_stddev`` is added."""
        return torch.where(norms <= self.clip_norm, 0.5, -0.5).sum()

    def count_sensitivity(self, relation: NeighboringRelation) -> float:
        """Largest change of ``count`` between neighboring data sets."""
        return 0.5 * vectors_changed(relation)

    def split(self, noise_multiplier: float, expected_batch_size: float, relation: NeighboringRelation) -> NoiseSplit:
        """The noise of sum and count that makes both together one release of ``noise_multiplier``.

        Raises:
            ValueError: the count's noise is too small to leave any for the sum.
        """
        positive("Adaptive.split", noise_multiplier=noise_multiplier, expected_batch_size=expected_batch_size)
        stddev = expected_batch_size / 20 if self.count_noise_stddev is None else self.count_noise_stddev
        left = noise_multiplier**-2 - (self.count_sensitivity(relation) / stddev) ** 2
        if left <= 0:
            raise ValueError(
                f"Adaptive: count_noise_stddev={stddev!r} must be greater than "
                f"{self.count_sensitivity(relation) * noise_multiplier:g}, the noise multiplier {noise_multiplier:g} "
                f"times the count's sensitivity. Set it, or take a larger expected_batch_size; 1/20 of it is usual."
            )
        return NoiseSplit(left**-0.5, stddev)

    def updated(self, noisy_count: float, expected_batch_size: float) -> Adaptive:
        """The rule for the next step, from the sum of the batch's ``count`` and its noise."""
        positive("Adaptive.updated", expected_batch_size=expected_batch_size)
        in_range("Adaptive.updated", -math.inf, math.inf, noisy_count=noisy_count)
        fraction = noisy_count / expected_batch_size + 0.5
        log = math.log(self.clip_norm) - self.learning_rate * (fraction - self.target_quantile)
        log = min(max(log, math.log(self.smallest)), math.log(self.largest))  # before exp, which may overflow
        return replace(self, clip_norm=min(max(math.exp(log), self.smallest), self.largest))


@dataclass(frozen=True)
class MicroBatches(ClippingRule):
    """Clips the mean gradient of each group of about ``size`` examples: ``cⱼ = min(1, clip_norm / ‖mean of group j‖)``.

    Each example of the batch joins one of ``num_groups`` groups at random. Released is the sum of the groups' clipped
    means; divide it by ``num_groups``. Its noise is dearer than that of `Flat`: the sensitivity is twice the bound, and
    a step sums ``size`` times fewer vectors.

    The sensitivity, between neighboring data sets: an example's group must be drawn without looking at any data, and
    independently of the other examples. Then draw the groups of all examples first, the same in both data sets, and
    take the worst draw. One example that comes or goes changes the mean of one group, and nothing else. Both means
    are clipped, so that each lies in the ball of radius C, and their distance is at most 2C. It is 2C where a
    gradient arrives that outweighs a group of the opposite direction. (C holds only where every group has one
    example at most, so that it becomes empty.) One example that is replaced keeps its place and hence its group: again
    one mean changes, by at most 2C. Groups of a fixed size, filled in order, would not do: where one example comes,
    all those behind it change groups.

    Args:
        clip_norm: bound C on the L2 norm of each group's mean gradient.
        size: expected number of examples in a group, 2 or more.

    Guarantees:
        - ``cⱼ‖mean of group j‖ <= clip_norm`` up to rounding (1e-5, relative).
        - The sensitivity is ``2 clip_norm`` under every neighboring relation.

    Edge cases: an empty group has mean 0 and adds nothing; a group with an infinite or undefined mean gets 0.

    Source: the ``num_microbatches`` of TensorFlow Privacy (McMahan et al. 2018, arXiv:1812.06210), whose noise is
    scaled by C; we scale it by 2C.

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
                "MicroBatches: size=1 must be at least 2. To clip every example by itself take Flat(clip_norm), whose "
                "sensitivity is half as large."
            )

    def num_groups(self, expected_batch_size: float) -> int:
        """Number of groups m, also the divisor of the released sum; it depends on public numbers only."""
        positive("MicroBatches.num_groups", expected_batch_size=expected_batch_size)
        return max(1, round(expected_batch_size / self.size))

    def largest_norm(self) -> float:
        return self.clip_norm

    def divisor(self, expected_batch_size: float) -> float:
        return self.num_groups(expected_batch_size)

    def factors(self, norms: Tensor, group: str = "all") -> Tensor:
        """(m,) norms of the groups' means -> (m,) factors."""
        return clip_factors(norms, self.clip_norm)

    def sensitivity(self, relation: NeighboringRelation) -> float:
        return 2 * self.clip_norm


def median_norm(norms: Tensor) -> float:
    """Median of the finite norms, a good first clip norm; the lower one of two middle values.

    On public data only: on private data the median is a release like any other, and this function adds no noise.
    `Adaptive` follows the median of private norms, and its price is in the epsilon.

    Args:
        norms: (n,) norms of unclipped per-example gradients, as from ``jacobian.squared_norms().sqrt()``.

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
    """Dotted names of the modules that hold the parameters; ``""`` is the model itself.

    >>> layers_of(["scale", "body.0.weight", "body.0.bias"])
    ['', 'body.0']
    """
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def _or_zero(factors: Tensor) -> Tensor:
    """0 in place of factors that are undefined, infinite, or so small that their digits are lost."""
    return torch.where((factors >= torch.finfo(factors.dtype).tiny) & factors.isfinite(), factors, 0)


def _longest_prefix(name: str, prefixes: Iterable[str]) -> str | None:
    matching = (p for p in prefixes if p in ("", name) or name.startswith(f"{p}."))
    return max(matching, key=len, default=None)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _unbound(rule: ClippingRule, what: str) -> ValueError:
    return ValueError(
        f"{type(rule).__name__}.{what}: not known before the layers are. Call rule.bind(names of the trained "
        "parameters) and ask the rule it gives."
    )
