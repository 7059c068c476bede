# SPDX-License-Identifier: Apache-2.0
"""Provides bounds on the pair of one epoch of balls-and-bins sampling with Gaussian noise.

Of t batches, an example is in exactly one, each with probability 1/t. Under Q, the data without the example, the
likelihood ratio of the epoch's t sums is

    R = S / t,  S = X_1 + ... + X_t,  X_i = exp(z_i / σ - 1 / (2 σ²)),  z_i independent and standard normal,

so every X has mean 1, and the hockey sticks are ``E_Q (R - e^ε)_+`` and ``E_Q (1 - e^ε R)_+``. Both are expectations of
convex functions of S. So a law of more spread and the same mean bounds them from above (`Spread`), and one in which
outcomes are merged into their mean from below (`Merged`). Sums are made by doubling.

**Rounding.** u = 2^-53. Every mass is a sum of products of positive numbers, without differences or Fourier transforms.

1. *Cells of X.* Each is an integral, by Gauss' rule of 10 points on parts that are at most 0.1 long in z, and in
   log x. |z| is at most 37. In the ellipse around a part with ρ = 10 the integrand is at most 10^6 times its mean, so
   the rule's relative error is below 4 * 10^6 * 10^-20. z is known to 600 u where it is negative (above -12) and to
   200 u elsewhere, so that ``e^(-z²/2)``, and all else, are known to 2^14 u: `CELL`.
2. *Sums.* A mass adds up at most BODY products in `sums`, some of octaves, and then all outcomes that come to one
   place, which are counted. Their number times u is added to the errors of both laws: `Law.error`.
3. *Places.* Where an outcome lies is known to its slip. `Spread` gives to both neighbors what they can get at most, so
   that its masses are upper bounds. The last places are moved by it, away from the mean or towards it.
4. *Total and mean.* `_certified` takes bounds of all masses but those of two neighbors around the ratio 1, which make
   up for it. Subtract from a convex function its chord through the two: no difference of expectations changes. The rest
   is at least 0 outside of the two, and falls towards them. There the upper law has more mass, farther away, than the
   true one, and the lower law less, and nearer. Between the two the rest is at most 0. The upper law has no mass there,
   and neither has the one that the lower law is compared with: the true law, with the same outcomes merged.

What is left is the rounding of the two masses themselves, some u, as of the masses of any `DiscretePair`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Self

import numpy as np
from scipy.special import ndtr

from ..bracket import Array
from .base import DominatingPair, PairBounds
from .discrete import DiscretePair
from .gaussian import SubsampledGaussianPair
from .widening_grid import BODY, OCTAVE, means, merge, num_octaves_of, places_of, places_up_to, positions, split, sums

REACH = 12.0  # standard deviations above the mean that the body covers
FAR = 12.0  # standard deviations from which on z is given up, under Q below and under P above
WIDE = 1 / 3  # deviation over mean from which on octaves are as fine as a body
RARE = 1e-9  # mass at the low end where places are close
NEGLIGIBLE = 1e-35  # mass at the low end that is given up
LEAST_NOISE = 0.25  # with less, no sampling is taken into account
U = 2.0**-53
CELL, SUM, PLACE = 2**14 * U, 2**12 * U, 16 * U  # relative errors: of a cell's mass, of `sums`, and of a place
PART = 0.1  # largest length in z of what Gauss' rule integrates at once
POINTS, WEIGHTS = np.polynomial.legendre.leggauss(10)
UNDERFLOW = 1e-200  # P-mass that is more than all numbers that were too small for floating point


def epoch_pair(noise_multiplier: float, num_bins: int) -> DominatingPair | PairBounds:
    """Returns the pair of one epoch, or bounds on it; the noise multiplier is that of a batch."""
    all_batches, one_batch = (SubsampledGaussianPair(1 / noise_multiplier, share) for share in (1.0, 1 / num_bins))
    if num_bins == 1:
        return one_batch
    if noise_multiplier < LEAST_NOISE:
        return PairBounds(all_batches, (one_batch,))
    return _bounds(noise_multiplier, num_bins)


@lru_cache(maxsize=64)
def _bounds(noise_multiplier: float, num_bins: int) -> PairBounds:
    upper, lower = (law.of_one(noise_multiplier).times(num_bins) for law in (Spread, Merged))
    return PairBounds(_certified(upper), (_certified(lower),))


def _certified(law: Law) -> DiscretePair:
    """Returns the pair of the ratio S / t, with bounds of all masses and places but those of two around the ratio 1.

    The two make up for it, so that mass and mean are 1.
    """
    present = law.mass > 0
    at = law.at[present]
    value = law.base + law.step * at  # of the sum, from the center on: small ratios keep their relative accuracy
    slip = law.slip[0] + law.slip[1] * at + PLACE * ((law.center + abs(law.base)) / law.step + at)
    above = int(np.searchsorted(value, law.count - law.center))
    outwards = np.where(np.arange(len(at)) < above, -1.0, 1.0) * law.outwards
    value = np.maximum(value + outwards * slip * law.step, -law.center)
    value[above - 1 : above + 1] = value[:above].max(), value[above:].min()
    ratio, excess = (law.center + value) / law.count, (law.center - law.count + value) / law.count
    left, right = excess[above - 1 : above + 1]
    q, lost, infinite = law.bounds(present)
    q[above - 1 : above + 1] = 0.0
    mass, mean = 1 - lost - q.sum(), lost - infinite - excess @ q
    q[above] = (mean - left * mass) / (right - left)
    q[above - 1] = mass - q[above]
    if not left < right or q[above - 1 : above + 1].min() < 0:
        raise ArithmeticError("balls and bins: the masses around the mean are smaller than the errors of all others")
    return DiscretePair((0.0, *(ratio * q).tolist(), infinite), (lost, *q.tolist(), 0.0))


@dataclass(frozen=True)
class Law(ABC):
    """A law of the sum of ``count`` X's, by the masses of places on a grid.

    The grid has places at ``center + base + step * k`` for k < BODY, and then OCTAVE of equal distance in each octave,
    from BODY 2^j to BODY 2^(j+1).

    Args:
        sigma: noise multiplier.
        count: number of X's in the sum.
        center: the mean of the sum, if it deviates little; else 0.
        base: smallest place, from the center on.
        step: distance of the first places.
        mass: of each place.
        moment: of each place, mass times the mean distance from the base in steps.
        given_up: mass of outcomes without a place, and what they add to the mean at most.
        error: bounds the error of the logarithm of each mass.
        slip: a and b, if the mean distance d of a place is known to ``a + b d`` steps.
    """

    outwards: ClassVar[float]  # where places are moved by their slip, from the mean on

    sigma: float
    count: int
    center: int
    base: float
    step: float
    mass: Array
    moment: Array
    given_up: tuple[float, float]
    error: float
    slip: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of_one(cls, sigma: float) -> Self:
        """Returns the law of X, made from the mass and the mean of each cell between two places."""
        log_base = -FAR / sigma - 1 / (2 * sigma**2)
        center = _center(sigma, 1)
        base = math.expm1(log_base) if center else math.exp(log_base)
        rare = -6 / sigma - 1 / (2 * sigma**2)
        step = _step(sigma, 1, center, base, math.expm1(rare) if center else math.exp(rare))
        places = places_up_to((math.exp(FAR / sigma + 1 / (2 * sigma**2)) - center - base) / step)
        left, right = _cells(sigma, center, base, step, places)
        ends = _normal(sigma, center, base + step * places[[0, -1]])
        lost = float(ndtr(ends[0])), float(ndtr(-ends[1]))
        infinite = (center + base) * lost[0] + float(ndtr(1 / sigma - ends[1]))
        return cls._of_cells(sigma, center, base, step, places, left, right, (2 * sum(lost), 2 * infinite))

    @classmethod
    @abstractmethod
    def _of_cells(
        cls, sigma: float, center: int, base: float, step: float, places: Array,
        left: Array, right: Array, given_up: tuple[float, float],
    ) -> Self:  # fmt: skip
        """Returns the law of one X, from the parts of each cell's mass that keep its mean at the two places around."""

    @abstractmethod
    def _placed(self, at: Array, mass: Array) -> Self:
        """Returns the law of outcomes at these distances from the base, brought to the places of a grid.

        All but its masses and moments is as in this law, before the errors of placing are added.
        """

    @abstractmethod
    def _sums(self, other: Law) -> tuple[Array, Array, tuple[float, float]]:
        """Returns outcomes of the sum with an independent law of the same step: places, masses, and their slip."""

    @abstractmethod
    def bounds(self, present: Array) -> tuple[Array, float, float]:
        """Returns bounds of the masses of these outcomes, of outcomes at the ratio 0, and of P-mass at infinity."""

    @property
    def at(self) -> Array:
        """Mean distance of each outcome from the base, in steps."""
        return means(self.moment, self.mass, places_of(num_octaves_of(self.mass)))

    def plus(self, other: Law) -> Self:
        """Returns the law of the sum with an independent law of the same kind."""
        if other.step != self.step:
            ratio = other.step / self.step
            slip = other.slip[0] * ratio, other.slip[1]
            other = replace(other, step=self.step, slip=slip)._placed(other.at * ratio, other.mass)
        at, mass, (offset, slope) = self._sums(other)
        below = np.cumsum(mass[: 2 * BODY - 1])
        low, rare = (at[min(np.searchsorted(below, share), 2 * BODY - 2)] for share in (NEGLIGIBLE, RARE))
        count = self.count + other.count
        center = _center(self.sigma, count)
        base = (self.center + other.center - center) + self.base + other.base + self.step * low
        step = _step(self.sigma, count, center, base, base + self.step * (rare - low))
        lost = self.given_up[0] + other.given_up[0]
        infinite = self.given_up[1] + other.given_up[1]
        infinite += self.count * other.given_up[0] + other.count * self.given_up[0]
        ratio, slope = self.step / step, max(self.slip[1], other.slip[1]) + slope
        slip = ratio * (self.slip[0] + other.slip[0] + offset + slope * low), slope
        summed = replace(
            self, count=count, center=center, base=base, step=step, given_up=(lost, infinite),
            error=self.error + other.error + SUM, slip=slip,
        )  # fmt: skip
        return summed._placed((at - low) * ratio, mass)

    def times(self, number: int) -> Self:
        """Returns the law of the sum of ``number`` independent copies."""
        if number == 1:
            return self
        half = self.times(number // 2)
        double = half.plus(half)
        return double.plus(self) if number % 2 else double


class Spread(Law):
    """A law above that of the sum in convex order: each outcome is split between the two places around it.

    The split keeps the mean. What has no place is put at 0, and its mean at infinity, where everything is revealed.
    """

    outwards = 1.0

    @property
    def at(self) -> Array:
        return places_of(num_octaves_of(self.mass))

    @classmethod
    def _of_cells(
        cls, sigma: float, center: int, base: float, step: float, places: Array,
        left: Array, right: Array, given_up: tuple[float, float],
    ) -> Self:  # fmt: skip
        mass = np.append(left, 0.0) + np.append(0.0, right)
        return cls(sigma, 1, center, base, step, mass, mass * places, given_up, CELL)

    def _placed(self, at: Array, mass: Array) -> Self:
        places = places_up_to(at[mass > 0].max())
        outside = (at < 0) | (at > places[-1])
        lost, infinite = self.given_up
        lost += float(mass[outside].sum())
        infinite += float(mass[outside] @ (self.center + self.base + self.step * at[outside]))
        at, mass = at[~outside], mass[~outside]
        left = np.minimum(np.searchsorted(places, at, side="right") - 1, len(places) - 2)
        gap = places[left + 1] - places[left]
        share = (at - places[left]) / gap
        error = PLACE * (abs(self.base) / self.step + at) / gap
        parts = np.minimum(1 - share + error, 1.0), np.minimum(share + error, 1.0)
        total = np.sum([np.bincount(left + k, mass * part, len(places)) for k, part in enumerate(parts)], axis=0)
        error = self.error + _of_adding(left)
        return replace(self, mass=total, moment=total * places, given_up=(lost, infinite), error=error)

    def _sums(self, other: Law) -> tuple[Array, Array, tuple[float, float]]:
        mass = sums(self.mass, other.mass, split)
        return positions(max(num_octaves_of(self.mass), num_octaves_of(other.mass))), mass, (0.0, 0.0)

    def bounds(self, present: Array) -> tuple[Array, float, float]:
        scale = math.exp(self.error)
        infinite = self.given_up[1] / self.count * scale + UNDERFLOW
        return self.mass[present] * scale, self.given_up[0] * scale + UNDERFLOW, infinite


class Merged(Law):
    """A law below that of the sum in convex order: the outcomes between two places are merged into their mean.

    Those without a place are merged into the mean of all, by `_certified`.
    """

    outwards = -1.0

    @classmethod
    def _of_cells(
        cls, sigma: float, center: int, base: float, step: float, places: Array,
        left: Array, right: Array, given_up: tuple[float, float],
    ) -> Self:  # fmt: skip
        mass = np.append(left + right, 0.0)
        moment = np.append(left * places[:-1] + right * places[1:], 0.0)
        return cls(sigma, 1, center, base, step, mass, moment, (0.0, 0.0), CELL, _of_merging(CELL, 2 * U))

    def _placed(self, at: Array, mass: Array) -> Self:
        places = places_up_to(at[mass > 0].max())
        at, mass = at[at >= 0], mass[at >= 0]
        left = np.clip(np.searchsorted(places, at, side="right") - 1, 0, len(places) - 1)
        total, moment = np.bincount(left, mass, len(places)), np.bincount(left, mass * at, len(places))
        error = self.error + _of_adding(left)
        offset, slope = _of_merging(error, _of_adding(left))
        slip = self.slip[0] + offset + PLACE * abs(self.base) / self.step, self.slip[1] + slope + PLACE
        return replace(self, mass=total, moment=moment, error=error, slip=slip)

    def _sums(self, other: Law) -> tuple[Array, Array, tuple[float, float]]:
        mass = sums(self.mass, other.mass, merge)
        moment = sums(self.moment, other.mass, merge) + sums(self.mass, other.moment, merge)
        at = means(moment, mass, positions(max(num_octaves_of(self.mass), num_octaves_of(other.mass))))
        return at, mass, _of_merging(self.error + other.error + SUM, SUM)

    def bounds(self, present: Array) -> tuple[Array, float, float]:
        q = self.mass[present] * math.exp(-self.error)
        return np.where(q > UNDERFLOW, q, 0.0), 0.0, 0.0


def _of_adding(place: Array) -> float:
    """Returns the error of the masses of places that outcomes are added to."""
    return (int(np.bincount(place).max()) + 16) * U


def _of_merging(error: float, adding: float) -> tuple[float, float]:
    """Returns the slip of the means of outcomes that lie within two gaps.

    The gap at a distance d is at most ``1 + d / OCTAVE``. Weights that are wrong by e move a mean by e gaps at most.
    """
    return 4 * error, 4 * error / OCTAVE + 4 * adding


def _center(sigma: float, count: int) -> int:
    """Returns the origin of the places: the mean of the sum if the deviation is small against it, else 0."""
    return count if math.sqrt(count * math.expm1(sigma**-2)) <= WIDE * count else 0


def _step(sigma: float, count: int, center: int, base: float, rare: float) -> float:
    """Returns the distance of the first places; ``rare`` is a value below which hardly any outcome lies.

    The body covers the mean and REACH standard deviations above it, unless these are so large that octaves are as fine
    there. Then it covers rare outcomes alone, so that small ratios have a small relative error, too.
    """
    end = REACH * math.sqrt(count * math.expm1(sigma**-2)) if center else 2 * rare
    return (end - base) / BODY


def _normal(sigma: float, center: int, value: Array) -> Array:
    """Returns the z at which X is ``center + value``."""
    return sigma * (np.log1p(value) if center else np.log(value)) + 1 / (2 * sigma)


def _cells(sigma: float, center: int, base: float, step: float, places: Array) -> tuple[Array, Array]:
    """Returns, for each cell between two places, the masses at its ends that have its mass and its mean.

    They are ``∫ (1 - t) dQ`` and ``∫ t dQ``, with t from 0 to 1 in the cell.
    """
    z = _normal(sigma, center, base + step * places)
    parts = np.ceil(np.diff(z) / (PART * min(1.0, sigma))).astype(int) + 1
    cell = np.repeat(np.arange(len(parts)), parts)
    number = np.arange(len(cell)) - np.repeat(np.cumsum(parts) - parts, parts)
    width = np.diff(z)[cell] / sigma  # of the cell in log x, in which its parts are equal
    start, end = (np.expm1(width * (k / parts[cell])) / np.expm1(width) for k in (number, number + 1))
    t = start[:, None] + (end - start)[:, None] * (POINTS + 1) / 2
    gap = np.diff(places)[cell, None]
    value = base + step * (places[cell, None] + gap * t)
    density = np.exp(-(_normal(sigma, center, value) ** 2) / 2) / math.sqrt(2 * math.pi) * sigma / (center + value)
    mass = density * (step * gap * (end - start)[:, None]) * WEIGHTS / 2
    left, right = (np.bincount(cell, (mass * part).sum(1), len(parts)) for part in (1 - t, t))
    return left, right
