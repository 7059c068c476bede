# SPDX-License-Identifier: Apache-2.0
"""Provides the pairs of Gaussian releases: Poisson samples, one example replaced, batches of fixed size."""

from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtr

from ..bracket import Array
from .base import UNIT, DiscretizablePair, DominatingPair, Nodes, Tails
from .subsampled import SubsampledPair, log_mixture, loss_error

# Mass of P and Q beyond this many standard deviations is truncated: 7.6e-24 on each side, per step.
REACH = 10.0

# 1 / noise_multiplier beyond which one step's losses leave floating-point range; ε is above 200 there.
LARGEST_SHIFT = 20.0


def normal_mass(low: Array, high: Array) -> Array:
    """Returns the mass of N(0, 1) in [low, high], low <= high, with relative accuracy in both tails."""
    on_the_right = low > 0
    return ndtr(np.where(on_the_right, -low, high)) - ndtr(np.where(on_the_right, -high, low))


def _points(low: float, high: float, step: float) -> Array:
    """Returns the multiples of ``step`` in [low, high], each with one rounding."""
    return step * np.arange(np.floor(low / step), np.ceil(high / step) + 1)


def _base_loss_error(x: Array, shift: float) -> Array:
    """Returns a bound on the error of ``z x - z²/2`` for z within four roundings and x within one."""
    return 8 * UNIT * (shift * np.abs(x) + shift**2)


def _mass_error(x: Array, losses: Array, log_mass: Array) -> Array:
    """Returns a bound on the error of the log masses of `_points`, given the losses."""
    return UNIT * (1.5 * x**2 + np.abs(losses) + 2 * np.abs(log_mass) + 8)


@dataclass(frozen=True)
class SubsampledGaussianPair(SubsampledPair):
    """``P = (1 - q) N(0, 1) + q N(z, 1)`` against ``Q = N(0, 1)``: one Poisson-sampled Gaussian release.

    Base loss ``u = z x - z²/2``.

    Args:
        shift: z = 1 / noise_multiplier.
        probability: q, in (0, 1].
        reach: standard deviations beyond which a lattice counts the losses of P as infinite.
    """

    shift: float
    probability: float
    reach: float = REACH

    @property
    def base_ends(self) -> tuple[float, float]:
        return -self.shift * REACH - self.shift**2 / 2, self.shift * self.reach + self.shift**2 / 2

    def outcome(self, u: Array) -> Array:
        """Returns the x at which the base loss is u."""
        return u / self.shift + self.shift / 2

    def cell_masses(self, u: Array) -> tuple[Array, Array]:
        x = self.outcome(u)
        return normal_mass(x[:-1], x[1:]), normal_mass(x[:-1] - self.shift, x[1:] - self.shift)

    def log_tails(self, u: Array, *, above: bool) -> tuple[Array, Array]:
        x = self.outcome(u)
        return (log_ndtr(-x), log_ndtr(self.shift - x)) if above else (log_ndtr(x), log_ndtr(x - self.shift))

    @property
    def coarsest_step(self) -> float:
        return min(0.4 / self.shift, 0.2)

    def nodes(self, step: float) -> Nodes:
        x = _points(-REACH - 30, REACH + 30 + self.shift, step)
        u = self.shift * x - self.shift**2 / 2
        losses = self.loss_at(u)
        log_mass = losses - x**2 / 2 + np.log(step / np.sqrt(2 * np.pi))
        error = loss_error(u, losses, _base_loss_error(x, self.shift), self.probability)
        gaps = step * self.shift * self.probability * np.exp(u - losses)
        return Nodes(losses, log_mass, gaps, step, error, error + _mass_error(x, losses, log_mass))


@dataclass(frozen=True)
class ReplaceOneGaussianPair(DiscretizablePair):
    """``P = (1 - q) N(0, 1) + q N(z, 1)`` against ``Q = (1 - q) N(0, 1) + q N(-z, 1)``: one example replaced.

    The dominating pair of a Poisson-sampled Gaussian release when an example is replaced by its opposite. It is
    symmetric. The outcome at a privacy loss is ``z x = l / 2 + asinh((1 - q) / q e^(z²/2) sinh(l / 2))``.

    Args:
        shift: z, the largest value of one example over the noise's standard deviation.
        probability: q, in (0, 1].
    Source: Zhu, Dong & Wang (2022), arXiv:2106.08567; Lebeda, Regehr, Kamath & Steinke (2024), arXiv:2405.20769.
    """

    shift: float
    probability: float

    @property
    def symmetric(self) -> bool:
        return True

    @property
    def floor(self) -> float:
        return 0.0

    @property
    def ends(self) -> tuple[float, float]:
        top = float(self.loss_at(np.array(self.shift + REACH)))
        return -top, top

    def loss_at(self, x: Array) -> Array:
        """Returns the privacy loss of the outcome x."""
        ahead, behind = (log_mixture(sign * self.shift * x - self.shift**2 / 2, self.probability) for sign in (1, -1))
        return ahead - behind

    def outcome(self, loss: Array) -> Array:
        """Returns the x at which the privacy loss is ``loss``."""
        half = np.minimum(np.abs(loss), 1e6) / 2  # infinite losses are handled in the last line
        log_ratio = np.log1p(-self.probability) - np.log(self.probability) if self.probability < 1 else -np.inf
        with np.errstate(over="ignore", divide="ignore"):
            log_sinh = half + np.log(-np.expm1(-2 * half) / 2)
            log_beta = log_ratio + self.shift**2 / 2 + log_sinh
            asinh = np.where(log_beta > 300, log_beta + np.log(2), np.arcsinh(np.exp(np.minimum(log_beta, 300))))
        return np.where(np.isinf(loss), loss, np.sign(loss) * (half + asinh) / self.shift)

    def cells(self, cuts: Array, at: Array) -> tuple[Array, Array]:
        x = self.outcome(cuts)
        null, plus, minus = (normal_mass(x[:-1] + move, x[1:] + move) for move in (0.0, -self.shift, self.shift))
        mass = (1 - self.probability) * null + self.probability * plus
        loss = np.where(np.isfinite(at), at, 0.0)
        excess = self.probability * (plus - np.exp(loss) * minus) - (1 - self.probability) * np.expm1(loss) * null
        return mass, np.where(at == -np.inf, mass, excess)

    def tails(self, epsilon: Array, *, swapped: bool) -> Tails:
        size = np.abs(epsilon)
        x = self.outcome(size)
        q, log_null, log_minus = self.probability, log_ndtr(-x), log_ndtr(-x - self.shift)
        gain = q * ndtr(self.shift - x)
        loss = q * np.exp(size + log_minus) + (1 - q) * -np.expm1(-size) * np.exp(size + log_null)
        loss = np.minimum(loss, gain)  # it is larger only by rounding
        # δ(-ε) = 1 - e^-ε + e^-ε δ(ε), the symmetry of the pair
        gain, loss = (np.where(epsilon < 0, np.exp(-size) * tail, tail) for tail in (gain, loss))
        return Tails(gain - np.expm1(np.minimum(epsilon, 0.0)), loss, size + np.abs(log_minus))

    @property
    def coarsest_step(self) -> float:
        return min(0.4 / self.shift, 0.2)

    def nodes(self, step: float) -> Nodes:
        reach = REACH + 30 + self.shift
        x = _points(-reach, reach, step)
        q = self.probability
        ahead, behind = (sign * self.shift * x - self.shift**2 / 2 for sign in (1.0, -1.0))
        log_mixed, log_other = log_mixture(ahead, q), log_mixture(behind, q)
        log_mass = log_mixed - x**2 / 2 + np.log(step / np.sqrt(2 * np.pi))
        gaps = step * self.shift * q * (np.exp(ahead - log_mixed) + np.exp(behind - log_other))
        u_error = _base_loss_error(x, self.shift)
        mixed_error = loss_error(ahead, log_mixed, u_error, q)
        error = mixed_error + loss_error(behind, log_other, u_error, q)
        mass_error = mixed_error + _mass_error(x, log_mixed, log_mass)
        return Nodes(log_mixed - log_other, log_mass, gaps, step, error, mass_error)


@dataclass(frozen=True)
class SymmetrizedPair(DominatingPair):
    """The smallest symmetric curve above a remove curve: ``δ(ε)`` of the pair for ε >= 0, its reflection below.

    The reflection is ``δ(-ε) = 1 - e^-ε + e^-ε δ(ε)``; the rest of the mass has loss 0.

    Args:
        one_sided: a pair with the larger δ in the remove direction at every ε >= 0.
    """

    one_sided: SubsampledGaussianPair

    @property
    def symmetric(self) -> bool:
        return True

    @property
    def span(self) -> float:
        return 2 * self.one_sided.span

    def second_moment(self) -> float:
        return self.one_sided.second_moment()

    def tails(self, epsilon: Array, *, swapped: bool) -> Tails:
        gain, loss, exponent = self.one_sided.remove_tails(np.abs(epsilon))
        weight = np.exp(np.minimum(epsilon, 0.0))
        return Tails(weight * gain - np.expm1(np.minimum(epsilon, 0.0)), weight * loss, exponent)
