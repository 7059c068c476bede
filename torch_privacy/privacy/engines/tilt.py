# SPDX-License-Identifier: Apache-2.0
"""Computes moments and characteristic function of one step's loss under a tilt, to rounding accuracy.

``M(s) = E_P e^(s l)`` comes from a trapezoid rule over the outcome (`Term`). On a line ``s = c + i t`` it is
``M(c) φ(t)``, φ the characteristic function of the loss under the tilt c (`Tilted`). Many steps multiply its logarithm,
so M - 1 and φ - 1 are computed instead: with a million steps, M and φ themselves would lose six digits.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..bracket import Array
from ..pairs.base import DiscretizablePair, DominatingPair, Nodes
from .curve import Unresolved

NEGLIGIBLE = -80.0  # log mass under any tilt below which nodes are left out of moments, which are at least about 1
LARGEST_EXPONENT = 700.0  # e to this power is still finite
TRIMMED = -44.0  # log mass under the tilt, relative to the largest, below which nodes are left out


def tilt_entropy(s: Array) -> Array:
    """Returns ``H(s) = s log s - (1 + s) log(1 + s)``; ``δ(ε) <= exp(K(s) + H(s) - s ε)`` for every s > 0."""
    return s * np.log(s) - (1 + s) * np.log1p(s)


class Term(NamedTuple):
    """The nodes of one pair in one direction."""

    pair: DiscretizablePair
    times: int
    swapped: bool
    losses: Array
    mass: Array
    log_mass: Array
    gaps: Array
    step: float
    drift: float  # E_P [e^-l - 1]: rounding only, as it is 0 in truth


@lru_cache(maxsize=256)
def _nodes(pair: DominatingPair, halvings: int) -> Nodes:
    """Returns a pair's nodes at its coarsest spacing divided by ``2^(halvings / 2)``."""
    nodes = pair.nodes(pair.coarsest_step / 2 ** (halvings / 2)) if isinstance(pair, DiscretizablePair) else None
    if nodes is None:
        raise Unresolved
    return nodes


@lru_cache(maxsize=512)
def term(pair: DominatingPair, times: int, swapped: bool, halvings: int = 0) -> Term:
    """Returns one direction's nodes of a pair that happened ``times`` times."""
    losses, log_mass, gaps, step = _nodes(pair, halvings)
    assert isinstance(pair, DiscretizablePair)
    if swapped:
        losses, log_mass = -losses, log_mass - losses
    mass = np.exp(log_mass)
    near = np.expm1(-np.maximum(losses, -1.0)) * mass
    drift = float(
        np.where(losses > -1, near, np.exp(log_mass - losses) - mass).sum()
    )  # mass may underflow far from Q's
    return Term(pair, times, swapped, losses, mass, log_mass, gaps, step, drift)


def log_moments(one: Term, tilts: Array) -> tuple[Array, Array]:
    """Returns ``log E_P e^(s l)`` and the tilted variance of l for each s; infinite where the nodes end too early.

    ``E_P [e^-l - 1] = 0``, so ``E_P [e^(s l) - 1 + s (e^-l - 1)]`` is the moment minus 1 without cancellation.
    """
    lifted = one.log_mass + np.maximum(tilts[0] * one.losses, tilts[-1] * one.losses)
    matter = np.flatnonzero(lifted > NEGLIGIBLE)
    kept = slice(matter[0], matter[-1] + 1)
    losses, mass = one.losses[kept], one.mass[kept]
    first = losses * mass
    powers = np.array([mass, first, losses * first])  # shape: (3, nodes)
    with np.errstate(over="ignore", invalid="ignore"):
        grown = np.expm1(tilts[:, None] * losses)  # shape: (tilts, nodes)
        grown_powers = powers @ grown.T
        total, mean, square = powers.sum(1)[:, None] + grown_powers
        variance = square / total - (mean / total) ** 2
        ends = (grown[:, [0, -1]] + 1) * mass[[0, -1]]
        log_moment = np.log1p(grown_powers[0] + tilts * one.drift)
        usable = np.isfinite(log_moment) & (ends.max(1) < 1e-18 * total)
    return np.where(usable, log_moment, np.inf), np.where(usable, np.maximum(variance, 0), np.inf)


class Tilted(NamedTuple):
    """One term under the tilt c, trimmed to the nodes that matter."""

    times: int
    offsets: Array  # losses minus their mean
    mass: Array
    gaps: Array
    step: float
    mean: float
    variance: float
    log_moment: float

    def log_size(self, t: float) -> float:
        """Returns ``log |φ(t)|``."""
        half = (t / 2) * self.offsets
        sine = np.sin(half)
        real, imaginary = -2 * float((sine * sine) @ self.mass), 2 * float((sine * np.cos(half)) @ self.mass)
        return math.log1p(max(2 * real + real**2 + imaginary**2, -1 + 2e-15)) / 2

    def log_phi_at_multiples(self, spacing: float, count: int) -> tuple[Array, Array]:
        """Returns real and imaginary part of log φ at 0, spacing, 2 spacing, ... with few sines and one matrix product.

        With A = e^(ia) - 1 and B = e^(ib) - 1, ``e^(i(a + b)) - 1 = A (1 + B) + B`` loses no digit, whereas φ itself
        would.
        """
        width = math.isqrt(count - 1) + 1
        fine = self._turned(spacing * np.arange(width))
        coarse = self._turned(spacing * width * np.arange(math.ceil(count / width)))
        excess = ((coarse * self.mass) @ (fine + 1).T + fine @ self.mass).ravel()[:count]
        real, imaginary = np.real(excess), np.imag(excess)
        size = np.maximum(2 * real + real**2 + imaginary**2, -1 + 2e-15)  # |φ|² - 1; less is rounding
        return np.log1p(size) / 2, np.arctan2(imaginary, 1 + real)

    def _turned(self, t: Array) -> Array:
        """Returns ``e^(i t (l - mean)) - 1``, one row for each t."""
        half = t[:, None] * (self.offsets / 2)
        sine = np.sin(half)
        turned = np.empty(half.shape, complex)
        turned.real = -2 * sine**2
        turned.imag = 2 * sine * np.cos(half)
        return turned


def tilted(one: Term, c: float) -> Tilted:
    """Returns a term under the tilt c."""
    exponents = c * one.losses
    if max(exponents[0], exponents[-1]) < LARGEST_EXPONENT:
        excess = float(np.expm1(exponents) @ one.mass)
    else:  # far out in a heavy tail: e^exponent overflows, but the mass is as small
        excess = float((np.exp(exponents + one.log_mass) - one.mass).sum())
    excess += c * one.drift
    if not excess > -1:  # rounding in a heavy tail
        raise Unresolved
    log_moment = math.log1p(excess)
    exponents += one.log_mass
    exponents -= exponents.max()
    matter = np.flatnonzero(exponents > TRIMMED)
    kept = slice(matter[0], matter[-1] + 1)
    mass, losses = np.exp(exponents[kept]), one.losses[kept]
    mass /= mass.sum()
    mean = float(mass @ losses)
    offsets = losses - mean
    variance = float(mass @ (offsets * offsets))
    return Tilted(one.times, offsets, mass, one.gaps[kept], one.step, mean, variance, log_moment)


def refined(one: Term, part: Tilted, c: float, frequency: float, negligible: float = 1e-16) -> tuple[Tilted, float]:
    """Returns the part from a rule fine enough for oscillations up to a frequency, and its steepest slope.

    The nodes with the widest gaps are left as they are, as long as their total mass is at most ``negligible``.
    """
    widest = np.argsort(part.gaps)[::-1]
    first = int(np.searchsorted(np.cumsum(part.mass[widest]), negligible))
    slope = float(part.gaps[widest[first]]) / part.step
    if (frequency * slope + 26.6) * part.step <= 2 * math.pi:
        return part, slope
    step = 2 * math.pi / (frequency * slope + 26.6)
    if one.step / step > 100:
        raise Unresolved
    halvings = math.ceil(2 * math.log2(one.pair.coarsest_step / step))
    return tilted(term(one.pair, one.times, one.swapped, halvings), c), slope
