# SPDX-License-Identifier: Apache-2.0
"""Computes moments and characteristic function of one step's loss under a tilt, to rounding accuracy.

``M(s) = E_P e^(s l)`` comes from a trapezoid rule over the outcome (`Term`). On a line ``s = c + i t`` it is
``M(c) φ(t)``, φ the characteristic function of the loss under the tilt c (`Tilted`). Many steps multiply its logarithm,
so M - 1 and φ - 1 are computed instead: with a million steps, M and φ themselves would lose six digits.

Rounding is bounded a priori (`moment_error`, `Tilted.phi_error`), given that every addition, multiplication and
division has a relative error of at most `UNIT`, every elementary function one of `ELEMENTARY`, and that the pair bounds
the errors of its nodes. A sum of n products is taken to have an error of n roundings of the sum of their sizes.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..bracket import Array
from ..pairs.base import UNIT, DiscretizablePair, DominatingPair, Nodes
from .curve import Unresolved

NEGLIGIBLE = -80.0  # log mass under any tilt below which nodes are left out of moments, which are at least about 1
LARGEST_EXPONENT = 700.0  # e to this power is still finite
TRIMMED = -44.0  # log mass under the tilt, relative to the largest, below which nodes are left out
PAIRWISE = 24 * UNIT  # error of numpy's pairwise sum of up to 2^15 numbers, relative to the sum of their sizes
BLOCK = 16  # nodes summed at a time
ELEMENTARY = 8 * UNIT  # relative error of exp, expm1, log, log1p, sin and cos: four units in the last place
QUADRATURE = 4e-19  # of the trapezoid rule, relative to 1: an estimate, as the rule converges far beyond it


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
    loss_error: Array
    mass_error: Array  # relative
    drifts: Array  # mass times e^-l - 1
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
    losses, log_mass, gaps, step, loss_error, mass_error = _nodes(pair, halvings)
    assert isinstance(pair, DiscretizablePair)
    if swapped:
        losses, log_mass = -losses, log_mass - losses
        mass_error = mass_error + loss_error + UNIT * np.abs(log_mass)
    mass = np.exp(log_mass)
    near = np.expm1(-np.maximum(losses, -1.0)) * mass
    drifts = np.where(losses > -1, near, np.exp(log_mass - losses) - mass)  # mass may underflow far from Q's
    mass_error = mass_error + ELEMENTARY
    return Term(
        pair, times, swapped, losses, mass, log_mass, gaps, step, loss_error, mass_error, drifts, float(drifts.sum())
    )


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
    phase_error: float  # Σ mass * error of the loss
    mass_error: tuple[float, float]  # E[relative error of the mass], and the same times |offset|
    left_out: float  # mass of the nodes that were trimmed
    node_rounding: float  # see `DiscretizablePair.node_rounding`

    def phi_error(self, t: Array, excess: Array) -> Array:
        """Returns a bound on the rounding error of φ(t), as `log_phi_at_multiples` sums it, given ``|φ - 1|``."""
        deviation, (mass_error, weighted) = float(self.mass @ np.abs(self.offsets)), self.mass_error
        evaluation = (44 + 2 * BLOCK + len(self.mass) // BLOCK) * UNIT * np.minimum(t * deviation, 4.0)
        masses = np.minimum(t * weighted, 2 * mass_error) + (mass_error + len(self.mass) * UNIT) * excess
        return evaluation + masses + t * self.phase_error + 2 * self.left_out + QUADRATURE

    def log_size(self, t: float) -> float:
        """Returns ``log |φ(t)|``."""
        half = (t / 2) * self.offsets
        sine = np.sin(half)
        real, imaginary = -2 * float((sine * sine) @ self.mass), 2 * float((sine * np.cos(half)) @ self.mass)
        return math.log1p(max(2 * real + real**2 + imaginary**2, -1 + 2e-15)) / 2

    def log_phi_at_multiples(self, spacing: float, count: int) -> tuple[Array, Array, Array]:
        """Returns real and imaginary part of log φ at 0, spacing, 2 spacing, ... with few sines and one matrix product.

        The third bounds the relative error of φ itself.

        With A = e^(ia) - 1 and B = e^(ib) - 1, ``e^(i(a + b)) - 1 = A (1 + B) + B`` loses no digit, whereas φ itself
        would.
        """
        width = math.isqrt(count - 1) + 1
        fine = self._turned(spacing * np.arange(width))
        coarse = self._turned(spacing * width * np.arange(math.ceil(count / width)))
        blocks = -(-len(self.mass) // BLOCK)  # sums of blocks round less than one long sum
        shape, missing = (-1, blocks, BLOCK), ((0, 0), (0, BLOCK * blocks - len(self.mass)))
        left = np.pad(coarse * self.mass, missing).reshape(shape).swapaxes(0, 1)
        right = np.pad(fine + 1, missing).reshape(shape).transpose(1, 2, 0)
        excess = ((left @ right).sum(0) + (fine * self.mass).sum(1)).ravel()[:count]
        real, imaginary = np.real(excess), np.imag(excess)
        size = np.maximum(2 * real + real**2 + imaginary**2, -1 + 2e-15)  # |φ|² - 1; less is rounding
        squared = 1 + size
        error = self.phi_error(spacing * np.arange(count), np.abs(excess)) / np.sqrt(squared)
        error += 16 * UNIT * (2 * np.abs(real) + real**2 + np.abs(imaginary) + imaginary**2) / squared
        return np.log1p(size) / 2, np.arctan2(imaginary, 1 + real), error

    def _turned(self, t: Array) -> Array:
        """Returns ``e^(i t (l - mean)) - 1``, one row for each t."""
        half = t[:, None] * (self.offsets / 2)
        sine = np.sin(half)
        turned = np.empty(half.shape, complex)
        turned.real = -2 * sine**2
        turned.imag = 2 * sine * np.cos(half)
        return turned


def moment_error(one: Term, c: float) -> float:
    """Returns a bound on the relative rounding error of the moment ``E_P e^(c l)`` of `tilted`.

    Sums are numpy's pairwise ones. An error of a mass or a loss enters through ``g(l) = e^(c l) - 1 + c (e^-l - 1)``,
    which is 0 to first order.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        grown, lost = np.expm1(c * one.losses), np.expm1(-one.losses)
        sizes = np.abs(grown) + abs(c) * np.abs(lost)
        masses = np.abs(grown + c * lost) * (one.mass_error + PAIRWISE)
        losses = abs(c) * (np.abs(grown - lost) + abs(c * one.losses) * UNIT * (grown + 1)) * one.loss_error
        rounding = (12 * UNIT + UNIT * np.abs(c * one.losses)) * sizes
        products = (masses + losses + rounding) * one.mass
        by_tilt = np.exp(np.minimum(one.log_mass + np.maximum(c * one.losses, 0), LARGEST_EXPONENT))
        by_loss = np.exp(np.minimum(one.log_mass + np.maximum(-one.losses, 0), LARGEST_EXPONENT))
        errors = one.mass_error + abs(c) * (one.loss_error + UNIT * np.abs(one.losses)) + 16 * UNIT
        products = np.where(np.isfinite(products), products, errors * (by_tilt + abs(c) * by_loss))  # no overflow
    return float(products.sum()) / (1.0 + float(one.mass @ np.where(np.isfinite(grown), grown, 0.0)))


def tilted(one: Term, c: float) -> Tilted:
    """Returns a term under the tilt c."""
    exponents = c * one.losses
    if max(exponents[0], exponents[-1]) < LARGEST_EXPONENT:
        excess = float((np.expm1(exponents) * one.mass + c * one.drifts).sum())
    else:  # far out in a heavy tail: e^exponent overflows, but the mass is as small
        excess = float((np.exp(exponents + one.log_mass) - one.mass + c * one.drifts).sum())
    if not excess > -1:  # rounding in a heavy tail
        raise Unresolved
    log_moment = math.log1p(excess)
    exponents += one.log_mass
    exponents -= exponents.max()
    matter = np.flatnonzero(exponents > TRIMMED)
    kept = slice(matter[0], matter[-1] + 1)
    mass, losses = np.exp(exponents), one.losses[kept]
    left_out = float(mass[: kept.start].sum() + mass[kept.stop :].sum())
    mass = mass[kept]
    total = float(mass.sum())
    mass /= total
    mean = float(mass @ losses)
    offsets = losses - mean
    sizes = np.abs(offsets)
    variance = float(mass @ (offsets * offsets))
    exponent_error = UNIT * (2 * abs(c) * np.abs(losses) + np.abs(one.log_mass[kept]) + np.abs(exponents[kept]))
    mass_error = mass * (one.mass_error[kept] + abs(c) * one.loss_error[kept] + exponent_error + ELEMENTARY)
    phase_error = float(mass @ (one.loss_error[kept] + UNIT * (np.abs(losses) + 8 * sizes)))
    errors = float(mass_error.sum()), float(mass_error @ sizes)
    of_part = mean, variance, log_moment, phase_error, errors, left_out / total, one.pair.node_rounding
    return Tilted(one.times, offsets, mass, one.gaps[kept], one.step, *of_part)


def refined(one: Term, part: Tilted, c: float, frequency: float, negligible: float = 1e-19) -> tuple[Tilted, float]:
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
