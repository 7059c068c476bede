# SPDX-License-Identifier: Apache-2.0
"""Provides the abstract pair of a release on a Poisson sample, for any base pair."""

from abc import abstractmethod

import numpy as np

from ..bracket import Array
from .base import UNIT, DiscretizablePair, Extremes, Tails

LARGEST = 700.0  # logarithm of numbers that are still in floating-point range


def log_mixture(u: Array, probability: float) -> Array:
    """Returns ``log(1 - q + q e^u)`` with a relative error of at most 40 roundings (`UNIT`), given u."""
    if probability == 1:
        return u
    excess = probability * np.expm1(np.minimum(u, LARGEST))
    with np.errstate(over="ignore"):
        direct = np.where(u > LARGEST, u + np.log(probability), np.log1p(np.maximum(excess, -0.5)))
    return np.where(excess < -0.5, np.logaddexp(np.log1p(-probability), np.log(probability) + u), direct)


def loss_error(u: Array, losses: Array, u_error: Array, probability: float) -> Array:
    """Returns a bound on the error of ``log_mixture(u, probability)``, given a bound on the error of u."""
    return probability * np.exp(np.minimum(u - losses, LARGEST)) * u_error + 40 * UNIT * np.abs(losses)


class SubsampledPair(DiscretizablePair):
    """The pair ``P = (1 - q) B + q A`` against ``Q = B``: one release on a Poisson sample, base pair (A, B).

    This is the *remove* direction; *add* is the same pair swapped. For an outcome of P or Q:

    - base loss ``u``, the log-likelihood ratio of A against B;
    - privacy loss ``l = log(1 - q + q e^u)``, increasing in u and above its edge ``log(1 - q)``.

    For q < 1 the floor is the edge, so ``e^u = (1 - q) / q * (e^height - 1)``: no digit is lost, however small q or the
    height. For q = 1 there is no edge, and the floor is the smallest base loss that matters.
    """

    probability: float  # q, in (0, 1]

    @property
    @abstractmethod
    def base_ends(self) -> tuple[float, float]:
        """Smallest and largest base loss that a lattice must reach."""

    @abstractmethod
    def cell_masses(self, u: Array) -> tuple[Array, Array]:
        """Returns the masses under B and A between consecutive base losses ``u``, which may be infinite."""

    def weighted_masses(self, u: Array, at: Array) -> tuple[Array, Array, Array]:
        """Returns `cell_masses`, and ``e^at`` times the mass under B."""
        base, shifted = self.cell_masses(u)
        return base, shifted, np.exp(np.minimum(at, LARGEST)) * base  # beyond, B has a mass of e^-700 at most

    def extremes(self, *, swapped: bool) -> Extremes:
        bounded = swapped and self.probability < 1
        return Extremes(-float(np.log1p(-self.probability)) * (1 + 8 * UNIT) if bounded else np.inf, 0.0)

    @property
    def edge(self) -> bool:
        return self.probability < 1

    @property
    def symmetric(self) -> bool:
        return self.probability == 1

    @property
    def floor(self) -> float:
        return self.base_ends[0] if self.probability == 1 else float(np.log1p(-self.probability))

    def base_loss(self, height: Array) -> Array:
        """Returns the base loss u at which the privacy loss is ``floor + height``, for heights of 0 and above."""
        if self.probability == 1:
            return self.floor + height
        with np.errstate(divide="ignore"):  # height 0 is u = -∞
            return np.log1p(-self.probability) - np.log(self.probability) + height + np.log(-np.expm1(-height))

    def height_at(self, u: Array) -> Array:
        """Returns the inverse of `base_loss`."""
        if self.probability == 1:
            return u - self.floor
        return np.logaddexp(0, u + np.log(self.probability) - np.log1p(-self.probability))

    def loss_at(self, u: Array) -> Array:
        """Returns the privacy loss at a base loss; see `log_mixture`."""
        return log_mixture(u, self.probability)

    def mean_height_of(self, base: float, shifted: float) -> float:
        """Returns the log of the mean likelihood ratio of outcomes with these masses under B and A, minus the floor."""
        if self.probability == 1:
            return float(np.log(shifted / base)) - self.floor if shifted else -np.inf
        return float(np.log1p(self.probability / (1 - self.probability) * shifted / base))

    def mean_height(self, low: float, high: float) -> float:
        base, shifted = self.cell_masses(self._base_loss(np.array([low, high])))
        return self.mean_height_of(float(base[0]), float(shifted[0]))

    @property
    def ends(self) -> tuple[float, float]:
        bottom, top = self.height_at(np.array(self.base_ends))
        return float(bottom), float(top)

    def mixed(self, base: Array, shifted: Array) -> Array:
        """Returns the P-mass of outcomes with mass ``base`` under B and ``shifted`` under A."""
        return (1 - self.probability) * base + self.probability * shifted

    def cells(self, cuts: Array, at: Array) -> tuple[Array, Array]:
        base, shifted, weighted = self.weighted_masses(self._base_loss(cuts), self._base_loss(at))
        mass = self.mixed(base, shifted)
        return mass, np.where(at == -np.inf, mass, self.probability * (shifted - weighted))

    def _base_loss(self, heights: Array) -> Array:
        lowest = 0.0 if self.edge else -np.inf
        inner = np.isfinite(heights) & (heights > lowest)
        outer = np.where(heights > lowest, np.inf, -np.inf)
        return np.where(inner, self.base_loss(np.where(inner, heights, 1.0)), outer)

    def tails(self, epsilon: Array, *, swapped: bool) -> Tails:
        return self.add_tails(epsilon) if swapped else self.remove_tails(epsilon)

    def remove_tails(self, epsilon: Array) -> Tails:
        """Returns ``δ(ε) = q (A - e^u B)(losses above u)``, u the base loss of ε; ``1 - e^ε`` below the edge."""
        u, below = self._threshold(epsilon)
        log_base, log_shifted = self.log_tails(u, above=True)
        # e^u B <= A there; the minimum only catches rounding errors of huge exponents.
        log_loss = np.minimum(u + log_base, log_shifted)
        gain = np.where(below, -np.expm1(np.minimum(epsilon, 0)), self.probability * np.exp(log_shifted))
        loss = np.where(below, 0.0, self.probability * np.exp(log_loss))
        return Tails(gain, loss, np.abs(u) + np.abs(log_base))

    def add_tails(self, epsilon: Array) -> Tails:
        """Returns the same for Q against P: ``δ(ε) = q e^ε (e^u B - A)(losses below u)``, u the base loss of -ε."""
        u, beyond = self._threshold(-epsilon)
        log_base, log_shifted = self.log_tails(u, above=False)
        log_weight = np.minimum(epsilon + u, -np.log(self.probability))  # q e^(ε + u) = 1 - (1 - q) e^ε is at most 1
        log_gain = log_weight + log_base
        log_loss = np.minimum(epsilon + log_shifted, log_gain)
        gain, loss = (np.where(beyond, 0.0, self.probability * np.exp(tail)) for tail in (log_gain, log_loss))
        return Tails(gain, loss, np.abs(epsilon) + np.abs(u) + np.abs(log_shifted))

    @abstractmethod
    def log_tails(self, u: Array, *, above: bool) -> tuple[Array, Array]:
        """Returns the log masses under B and A of the base losses above (or below) u."""

    def _threshold(self, loss: Array) -> tuple[Array, Array]:
        """Returns the base loss at a privacy loss and False; below the edge, any number and True."""
        height = np.asarray(loss - self.floor, float)
        below_edge = (height <= 0) & self.edge
        return self.base_loss(np.where(below_edge, 1.0, height)), below_edge
