# SPDX-License-Identifier: Apache-2.0
"""Provides bounds on the pair of two mixtures of one noise, each part shifted by a value: P = Σ wᵢ f(x - sᵢ).

The noise f is symmetric and log-concave, so that for the mixtures made here the likelihood ratio rises with the
outcome. Outcomes are cut into cells. Above, each cell's mass moves to its two extreme ratios; below, it is merged into
its mean. For whole-numbered noise a cell is one outcome, and both are exact.

**Values of a sample.** Where an example is replaced, its value x gives way to y, and to 0 where it is not sampled:
``P = (1 - q) f(t) + q f(t - x)`` against ``Q = (1 - q) f(t) + q f(t - y)``, |x|, |y| <= c. The worst are x = c and
y = -c. For α >= 1 and any set S, ``P(S) - α Q(S)`` is q times the mass of S under the noise around x, minus multiples
of its masses under those around 0 and around y. Among sets with the first mass, a half-line has the least mass under
the noise around a point at distance d (Neyman & Pearson: the ratio is monotone), which falls as d grows; and the same
half-line has both least masses if the points lie on one side. The distances are at most c and 2c, as there. For α < 1
exchange P and Q. For integers, add a coin to the half-line.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import logsumexp, ndtr

from ..bracket import Array
from .base import DominatingPair, PairBounds
from .discrete import DiscretePair

CELLS = 2**12  # of outcomes; as many atoms are kept as they are
REACH = 13.5  # standard deviations beyond which Gaussian outcomes are one cell: 1e-41 of the mass
UNDERFLOW = 38.6  # standard deviations beyond which there is no mass in floating point

Mixture = tuple[tuple[float, float], ...]
"""Weights, which add up to 1, and the shift of each part."""


class NoiseLaw(ABC):
    """A symmetric log-concave noise."""

    whole = False  # True if outcomes are integers
    bounded = False  # True if the ratio of two shifts is constant beyond both

    @abstractmethod
    def tail(self, x: Array) -> Array:
        """Returns the mass at x and above, for x >= 0 (x >= 1 for integers)."""

    @abstractmethod
    def log_density(self, x: Array) -> Array:
        """Returns log f(x), up to a constant."""

    @property
    @abstractmethod
    def reach(self) -> float:
        """The distance beyond the shifts up to which outcomes have cells of their own."""

    def mass(self, low: Array, high: Array) -> Array:
        """Returns the mass in [low, high), for low <= high, with relative accuracy in both tails."""
        on_the_left = low + high < self.whole
        near, far = np.where(on_the_left, self.whole - high, low), np.where(on_the_left, self.whole - low, high)
        return self._at_least(near) - self._at_least(far)

    def _at_least(self, x: Array) -> Array:
        right = self.tail(np.where(x < self.whole, self.whole - x, x))
        return np.where(x < self.whole, 1 - right, right)


@dataclass(frozen=True)
class GaussianNoise(NoiseLaw):
    """N(0, 1)."""

    @property
    def reach(self) -> float:
        return REACH

    def tail(self, x: Array) -> Array:
        return ndtr(-x)

    def log_density(self, x: Array) -> Array:
        return -(x**2) / 2


class ExponentialTails(NoiseLaw):
    """A noise with tails in proportion to ``e^(-x / scale)``: masses of narrow cells keep their digits."""

    scale: float
    center: float  # the mass at 0
    bounded = True

    @property
    def reach(self) -> float:
        return 0.0

    def mass(self, low: Array, high: Array) -> Array:
        far_right, near_right = np.maximum(high, self.whole), np.maximum(low, self.whole)
        far_left, near_left = np.maximum(self.whole - low, self.whole), np.maximum(self.whole - high, self.whole)
        around = np.where((low < self.whole) & (high >= self.whole), self.center, 0.0)
        return around + self._between(near_right, far_right) + self._between(near_left, far_left)

    def _between(self, near: Array, far: Array) -> Array:
        """Returns the mass in [near, far) of the right tail."""
        return self.tail(near) * -np.expm1((near - far) / self.scale)


@dataclass(frozen=True)
class LaplaceNoise(ExponentialTails):
    """Laplace noise of scale 1."""

    scale = 1.0
    center = 0.0

    def tail(self, x: Array) -> Array:
        return np.exp(-x) / 2

    def log_density(self, x: Array) -> Array:
        return -np.abs(x)


@dataclass(frozen=True)
class DiscreteLaplaceNoise(ExponentialTails):
    """Integers with a mass in proportion to ``e^(-|k| / scale)``."""

    scale: float
    whole = True

    @property
    def center(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return float(np.tanh(1 / (2 * self.scale)))

    def tail(self, x: Array) -> Array:
        return np.exp(-x / self.scale) / (1 + np.exp(-1 / self.scale))

    def log_density(self, x: Array) -> Array:
        return -np.abs(x) / self.scale


@lru_cache(maxsize=4)
def _gaussian_tails(stddev: float) -> Array:
    """Returns the masses at 0, 1, 2, ... and above, and a last 0."""
    k = np.arange(int(UNDERFLOW * stddev) + 2.0)
    mass = np.exp(-((k / stddev) ** 2) / 2)
    tails = np.append(np.cumsum(mass[::-1])[::-1], 0.0)
    return tails / (2 * tails[1] + 1)


@dataclass(frozen=True)
class DiscreteGaussianNoise(NoiseLaw):
    """Integers with a mass in proportion to ``e^(-k² / (2 stddev²))``."""

    stddev: float
    whole = True

    @property
    def reach(self) -> float:
        return REACH * self.stddev

    def tail(self, x: Array) -> Array:
        tails = _gaussian_tails(self.stddev)
        return tails[np.minimum(x, len(tails) - 1).astype(int)]

    def log_density(self, x: Array) -> Array:
        return -((x / self.stddev) ** 2) / 2


@lru_cache(maxsize=64)
def enclosed(noise: NoiseLaw, p: Mixture, q: Mixture) -> DominatingPair | PairBounds:
    """Returns bounds on the pair of two mixtures with a rising likelihood ratio; the pair, where they are the same."""
    shifts = sorted(shift for _, shift in p + q)
    cuts = _cuts(noise, shifts)
    p_mass, q_mass = (masses(noise, side, cuts) for side in (p, q))
    first, last = cuts[:-1].copy(), cuts[1:] - noise.whole
    first[0], last[-1] = last[0], first[-1]  # where the ratio is constant
    low, high = (log_ratio(noise, at, p, q) for at in (first, last))
    if not noise.bounded:
        low[0], high[-1] = _at_the_end(p, q, above=False), _at_the_end(p, q, above=True)
    merged = DiscretePair(tuple(p_mass.tolist()), tuple(q_mass.tolist()))
    if (high <= low).all():
        return merged
    mixtures = None if noise.bounded else (noise, p, q)  # bounds on bounded losses have moments themselves
    return PairBounds(spread(p_mass, q_mass, low, high), (merged,), mixtures=mixtures)


def sampled(noise: NoiseLaw, sensitivity: float, probability: float, *, replaced: bool) -> DominatingPair | PairBounds:
    """Returns the pair of a sum over a Poisson sample plus noise: of an example added, or replaced by its opposite."""
    rest = () if probability == 1 else ((1 - probability, 0.0),)
    if replaced and probability < 1:
        half = sensitivity / 2
        return enclosed(noise, (*rest, (probability, half)), (*rest, (probability, -half)))
    return enclosed(noise, (*rest, (probability, float(sensitivity))), ((1.0, 0.0),))


def mixed(pair: DominatingPair | PairBounds, probability: float) -> DominatingPair | PairBounds:
    """Returns the pair of a mechanism on a Poisson sample when one example is added, from that on the whole data.

    Raises:
        TypeError: the pair has no finite number of outcomes.

    Source: Zhu, Dong & Wang (2022), arXiv:2106.08567, Theorem 11.
    """
    if isinstance(pair, PairBounds):
        upper = None if pair.upper is None else mixed(pair.upper, probability)
        lower = tuple(mixed(part, probability) for part in pair.lower)
        return PairBounds(upper, lower)  # pyright: ignore[reportArgumentType]
    if not isinstance(pair, DiscretePair):
        raise TypeError(f"{type(pair).__name__} has no finite number of outcomes")
    p = tuple(probability * a + (1 - probability) * b for a, b in zip(pair.p, pair.q, strict=True))
    return DiscretePair(p, pair.q)


def masses(noise: NoiseLaw, mixture: Mixture, cuts: Array) -> Array:
    """Returns the mass of a mixture in each cell between two cuts."""
    return np.sum([weight * noise.mass(cuts[:-1] - at, cuts[1:] - at) for weight, at in mixture], axis=0)


def _cuts(noise: NoiseLaw, shifts: list[float]) -> Array:
    """Returns the ends of the cells; the first and the last one are unbounded."""
    low, high = shifts[0] - noise.reach, shifts[-1] + noise.reach
    if not noise.whole:
        inner = np.linspace(low, high, CELLS + 1)
    elif high - low < CELLS:
        inner = np.arange(np.floor(low) + 1, np.ceil(high) + 1)
    else:
        inner = np.round(np.linspace(np.floor(low) + 1, np.ceil(high), CELLS + 1))
    return np.concatenate([[-np.inf], inner, [np.inf]])


def log_ratio(noise: NoiseLaw, at: Array, p: Mixture, q: Mixture) -> Array:
    """Returns the log of the ratio of two mixtures' densities at each outcome."""
    return log_density(noise, at, p) - log_density(noise, at, q)


def log_density(noise: NoiseLaw, at: Array, mixture: Mixture) -> Array:
    """Returns the log of a mixture's density at each outcome, up to the constant of the noise."""
    parts = [np.log(weight) + noise.log_density(at - shift) for weight, shift in mixture]
    return np.asarray(logsumexp(parts, axis=0))


def _at_the_end(p: Mixture, q: Mixture, *, above: bool) -> float:
    """Returns the limit of the log ratio of Gaussian mixtures at ∞ (above) or -∞."""
    ends = [(max if above else min)(shift for _, shift in side) for side in (p, q)]
    if ends[0] == ends[1]:
        sizes = [sum(weight for weight, shift in side if shift == ends[0]) for side in (p, q)]
        return float(np.log(sizes[0] / sizes[1]))
    return np.inf if above else -np.inf


def spread(p: Array, q: Array, low: Array, high: Array) -> DiscretePair:
    """Returns a pair that dominates all with these masses of cells, and log ratios from low to high in each."""
    wide = high > low  # else one ratio, up to rounding
    with np.errstate(all="ignore"):  # for cells that are unbounded, or narrow
        q_high = np.where(low == -np.inf, p * np.exp(-high), (p * np.exp(-low) - q) / np.expm1(high - low))
        q_high = np.where(wide, np.clip(q_high, 0.0, q), q)
        p_high = np.where(high == np.inf, p - np.exp(low) * q, np.exp(high) * q_high)
    p_high = np.where(wide & (low > -np.inf), np.clip(p_high, 0.0, p), p)
    both = ((p_high, q_high), (p - p_high, q - q_high))
    joined = [np.concatenate(sides) for sides in zip(*both, strict=True)]
    return DiscretePair(tuple(joined[0].tolist()), tuple(joined[1].tolist()))
