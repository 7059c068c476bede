# SPDX-License-Identifier: Apache-2.0
"""Provides bounds on the pair of one epoch of balls-and-bins sampling with Gaussian noise.

Of t batches, an example is in exactly one, each with probability 1/t. Under Q, the data without the example, the
likelihood ratio of the epoch's t sums is

    R = S / t,  S = X_1 + ... + X_t,  X_i = exp(z_i / σ - 1 / (2 σ²)),  z_i independent and standard normal,

so every X has mean 1, and the hockey sticks are ``E_Q (R - e^ε)_+`` and ``E_Q (1 - e^ε R)_+``. Both are expectations of
convex functions of S. So a law of more spread and the same mean bounds them from above (`Spread`), and one in which
outcomes are merged into their mean from below (`Merged`). Sums are made by doubling. Every mass is a sum of products of
positive numbers, without differences or Fourier transforms, and has a small relative error in the far tails, too;
`_certified` moves that error to the safe side.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
from scipy.special import ndtr

from ..bracket import Array
from .base import DominatingPair, PairBounds
from .discrete import DiscretePair
from .gaussian import SubsampledGaussianPair

BODY = 2048  # places of equal distance, around the mean
OCTAVE = 256  # places of each octave above the body
REACH = 12.0  # standard deviations above the mean that the body covers
FAR = 12.0  # standard deviations from which on z is given up, under Q below and under P above
WIDE = 1 / 3  # deviation over mean from which on octaves are as fine as a body
RARE = 1e-9  # mass at the low end where places are close
NEGLIGIBLE = 1e-35  # mass at the low end that is given up
LEAST_NOISE = 0.25  # with less, no sampling is taken into account
RELATIVE_ERROR = 1e-9  # of a mass, times the noise if it is above 1: of the cells of X, and of 40 sums of products


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
    error = RELATIVE_ERROR * max(1.0, noise_multiplier)
    upper, lower = (law.of_one(noise_multiplier).times(num_bins) for law in (Spread, Merged))
    return PairBounds(_certified(upper, 1 + error), (_certified(lower, 1 - error),))


def _certified(law: Law, scale: float) -> DiscretePair:
    """Returns the pair of the ratio S / t, with all masses scaled but those of two neighbors around the ratio 1.

    The two make up for it, so that mass and mean are 1. If ``scale`` is above every relative error of a mass, the new
    law minus the true one is positive outside of the two and negative there: it has more spread. If it is below, less.
    """
    present = law.mass > 0
    excess = (law.base - law.count + law.step * law.at[present]) / law.count
    q, lost, infinite = law.mass[present] * scale, law.given_up[0] * scale, law.given_up[1] / law.count * scale
    above = int(np.searchsorted(excess, 0.0))
    left, right = excess[above - 1], excess[above]
    q[above - 1 : above + 1] = 0.0
    mass, mean = 1 - lost - q.sum(), lost - infinite - excess @ q
    q[above] = (mean - left * mass) / (right - left)
    q[above - 1] = mass - q[above]
    if q[above - 1 : above + 1].min() < 0:
        raise ArithmeticError("balls and bins: the masses around the mean are smaller than the errors of all others")
    p = (1 + excess) * q
    return DiscretePair((0.0, *p.tolist(), infinite), (lost, *q.tolist(), 0.0))


@dataclass(frozen=True)
class Law(ABC):
    """A law of the sum of ``count`` X's, by the masses of places on a grid.

    The grid has places at ``base + step * k`` for k < BODY, and then OCTAVE of equal distance in each octave, from
    BODY 2^j to BODY 2^(j+1).

    Args:
        sigma: noise multiplier.
        count: number of X's in the sum.
        base: smallest place.
        step: distance of the first places.
        mass: of each place.
        moment: of each place, mass times the mean distance from the base in steps.
        given_up: mass of outcomes without a place, and what they add to the mean at most.
    """

    sigma: float
    count: int
    base: float
    step: float
    mass: Array
    moment: Array
    given_up: tuple[float, float]

    @classmethod
    def of_one(cls, sigma: float) -> Self:
        """Returns the law of X, made from the mass and the mean of each cell between two places."""
        log_base = -FAR / sigma - 1 / (2 * sigma**2)
        base, largest = math.exp(log_base), math.exp(FAR / sigma + 1 / (2 * sigma**2))
        step = _step(sigma, 1, base, math.exp(-6 / sigma - 1 / (2 * sigma**2)))
        places = _places_up_to((largest - base) / step)
        z = sigma * (log_base + np.log1p(places * (step / base))) + 1 / (2 * sigma)
        mass, mean = _masses(z), _masses(z - 1 / sigma)
        with np.errstate(invalid="ignore"):
            middle = np.clip((mean / mass - base) / step, places[:-1], places[1:])
        middle = np.where(mass > 0, middle, places[:-1])
        lost = float(ndtr(z[0])), float(ndtr(-z[-1]))
        infinite = base * lost[0] + float(ndtr(1 / sigma - z[-1]))
        return cls._placed(sigma, 1, base, step, middle, mass, (sum(lost), infinite))

    @classmethod
    @abstractmethod
    def _placed(
        cls, sigma: float, count: int, base: float, step: float, at: Array, mass: Array, given_up: tuple[float, float]
    ) -> Self:
        """Returns the law of outcomes at ``base + step * at``, brought to the places of a grid."""

    @abstractmethod
    def _sums(self, other: Law) -> tuple[Array, Array]:
        """Returns outcomes of the sum with an independent law of the same step: where they are, and their masses."""

    @property
    def at(self) -> Array:
        """Mean distance of each outcome from the base, in steps."""
        return _means(self.moment, self.mass, _places(_num_octaves(self.mass)))

    def plus(self, other: Law) -> Self:
        """Returns the law of the sum with an independent law of the same kind."""
        if other.step != self.step:
            at = other.at * (other.step / self.step)
            other = self._placed(self.sigma, other.count, other.base, self.step, at, other.mass, other.given_up)
        at, mass = self._sums(other)
        below = np.cumsum(mass[: 2 * BODY - 1])
        low, rare = (at[min(np.searchsorted(below, share), 2 * BODY - 2)] for share in (NEGLIGIBLE, RARE))
        count, base = self.count + other.count, self.base + other.base + self.step * low
        step = _step(self.sigma, count, base, base + self.step * (rare - low))
        lost = self.given_up[0] + other.given_up[0]
        infinite = self.given_up[1] + other.given_up[1]
        infinite += self.count * other.given_up[0] + other.count * self.given_up[0]
        return self._placed(self.sigma, count, base, step, (at - low) * (self.step / step), mass, (lost, infinite))

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

    @classmethod
    def _placed(
        cls, sigma: float, count: int, base: float, step: float, at: Array, mass: Array, given_up: tuple[float, float]
    ) -> Self:
        places = _places_up_to(at[mass > 0].max())
        outside = (at < 0) | (at > places[-1])
        lost, infinite = given_up
        lost += float(mass[outside].sum())
        infinite += float(mass[outside] @ (base + step * at[outside]))
        at, mass = at[~outside], mass[~outside]
        left = np.minimum(np.searchsorted(places, at, side="right") - 1, len(places) - 2)
        share = (at - places[left]) / (places[left + 1] - places[left])
        placed = [np.bincount(left + k, mass * part, len(places)) for k, part in ((0, 1 - share), (1, share))]
        total = placed[0] + placed[1]
        return cls(sigma, count, base, step, total, total * places, (lost, infinite))

    def _sums(self, other: Law) -> tuple[Array, Array]:
        mass = _sums(self.mass, other.mass, _split)
        return _positions(max(_num_octaves(self.mass), _num_octaves(other.mass))), mass


class Merged(Law):
    """A law below that of the sum in convex order: the outcomes between two places are merged into their mean.

    Those without a place are merged into the mean of all, by `_certified`.
    """

    @classmethod
    def _placed(
        cls, sigma: float, count: int, base: float, step: float, at: Array, mass: Array, given_up: tuple[float, float]
    ) -> Self:
        places = _places_up_to(at[mass > 0].max())
        left = np.clip(np.searchsorted(places, at, side="right") - 1, 0, len(places) - 1)
        total, moment = np.bincount(left, mass, len(places)), np.bincount(left, mass * at, len(places))
        return cls(sigma, count, base, step, total, moment, (0.0, 0.0))

    def _sums(self, other: Law) -> tuple[Array, Array]:
        mass = _sums(self.mass, other.mass, _merge)
        moment = _sums(self.moment, other.mass, _merge) + _sums(self.mass, other.moment, _merge)
        return _means(moment, mass, _positions(max(_num_octaves(self.mass), _num_octaves(other.mass)))), mass


def _means(moment: Array, mass: Array, otherwise: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(mass > 0, moment / mass, otherwise)


def _step(sigma: float, count: int, base: float, rare: float) -> float:
    """Returns the distance of the first places; ``rare`` is a value below which hardly any outcome lies.

    The body covers the mean and REACH standard deviations above it, unless these are so large that octaves are as fine
    there. Then it covers rare outcomes alone, so that small ratios have a small relative error, too.
    """
    deviation = math.sqrt(count * math.expm1(sigma**-2))
    end = 2 * rare if deviation > WIDE * count else count + REACH * deviation
    return (end - base) / BODY


def _places(num_octaves: int) -> Array:
    """Returns the places of a grid, in steps from the base."""
    octave = BODY / OCTAVE * np.arange(OCTAVE, 2 * OCTAVE)
    return np.concatenate([np.arange(float(BODY)), *(octave * 2.0**j for j in range(num_octaves))])


def _places_up_to(largest: float) -> Array:
    """Returns the places of the grid that reaches as far."""
    return _places(max(0, math.ceil(math.log2(max(largest, 1.0) / (BODY - 1)) + 0.01)))


def _num_octaves(mass: Array) -> int:
    return (len(mass) - BODY) // OCTAVE


def _masses(z: Array) -> Array:
    """Returns the standard normal masses between neighbors, to a small relative error in both tails."""
    return np.where(z[:-1] > 0, -np.diff(ndtr(-z)), np.diff(ndtr(z)))


def _sums(a: Array, b: Array, coarser: Callable[[Array, int], Array]) -> Array:
    """Returns the masses of the sums of two outcomes, in the order of `_positions`.

    The outcomes of an octave are added to all smaller ones at once, which are brought to the octave's places.
    """
    found = [np.convolve(a[:BODY], b[:BODY])]
    low_a, low_b = (coarser(law[:BODY], BODY // OCTAVE) for law in (a, b))
    for j in range(max(_num_octaves(a), _num_octaves(b))):
        high_a, high_b = (_octave(law, j) for law in (a, b))
        found.append(np.convolve(high_a, low_b) + np.convolve(low_a, high_b))
        found.append(np.convolve(high_a, high_b))
        low_a, low_b = (
            coarser(np.concatenate([low[:-1], low[-1:] + high[:1], high[1:]]), 2)
            for low, high in ((low_a, high_a), (low_b, high_b))
        )
    return np.concatenate(found)


def _octave(mass: Array, j: int) -> Array:
    return mass[BODY + j * OCTAVE :][:OCTAVE] if j < _num_octaves(mass) else np.zeros(OCTAVE)


def _positions(num_octaves: int) -> Array:
    """Returns where the sums of `_sums` are, in steps from the sum of both bases."""
    found = [np.arange(2.0 * BODY - 1)]
    for j in range(num_octaves):
        distance = 2.0**j * BODY / OCTAVE
        found += [distance * np.arange(OCTAVE, 3 * OCTAVE), distance * np.arange(2 * OCTAVE, 4 * OCTAVE - 1)]
    return np.concatenate(found)


def _split(mass: Array, factor: int) -> Array:
    """Returns the masses at every ``factor``-th place, which others are split between, and at one more."""
    rows, share = mass.reshape(-1, factor), np.arange(factor) / factor
    return np.append(rows @ (1 - share), 0.0) + np.append(0.0, rows @ share)


def _merge(mass: Array, factor: int) -> Array:
    """Returns the masses of groups of neighbors, and a zero."""
    return np.append(mass.reshape(-1, factor).sum(1), 0.0)
