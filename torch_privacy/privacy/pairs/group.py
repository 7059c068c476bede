# SPDX-License-Identifier: Apache-2.0
"""Provides the pair of a Poisson-sampled Gaussian release for a group: all examples of one person at once."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import log_ndtr

from ..bracket import Array
from .base import UNIT, DiscretizablePair, Extremes, Nodes, Tails
from .gaussian import REACH, SubsampledGaussianPair, _mass_error, _points, normal_mass

LARGEST_EXPONENT = 600.0  # e to this power, and times a few more factors, is still finite
CHUNK = 2**18  # numbers that are computed at once, which fit a processor's cache
TABLE = 2**12  # outcomes of a table
MOST_NEWTON, CONVERGED = 60, 1e-10  # steps to an outcome; two or three are usual
REST = -140.0  # log of the share of all groups, of sizes so rare that a lattice counts their losses as infinite


@dataclass(frozen=True)
class GroupPair(DiscretizablePair):
    """``P = Σₖ bₖ N(k z, 1)`` against ``Q = N(0, 1)``, bₖ binomial: each of G examples joins with probability q.

    The likelihood ratio ``Σₖ bₖ e^(k z x - k² z²/2)`` is a polynomial in ``e^(z x)`` with real negative zeros only
    (that of the binomial weights, times the multiplier sequence ``e^(-k² z²/2)``). So the loss is increasing in the
    outcome x, lies above its floor ``G log(1 - q)``, and is a sum of G losses of the form that one example has: the
    quadrature of `SubsampledGaussianPair` serves here, too, at a finer spacing.

    Args:
        shift: z = 1 / noise_multiplier.
        probability: q, in (0, 1).
        group_size: G, at least 2.

    Source: Ganesh (2024), arXiv:2401.10294, Theorem: the scalar mixture dominates the sampled vectors of a group.
    """

    shift: float
    probability: float
    group_size: int

    @cached_property
    def _log_weights(self) -> tuple[Array, Array]:
        """Returns log bₖ for k = 0 ... G, and bounds on their errors."""
        size, q = self.group_size, self.probability
        parts = [(math.log(math.comb(size, k)), k * math.log(q), (size - k) * math.log1p(-q)) for k in range(size + 1)]
        logs = np.array(parts)
        return logs.sum(1), 4 * UNIT * np.abs(logs).sum(1)

    @cached_property
    def _steps(self) -> Array:
        return np.arange(self.group_size + 1) * self.shift

    @property
    def weights(self) -> list[float]:
        """Returns bₖ for k = 0 ... G, which add up to 1."""
        weights = np.exp(self._log_weights[0])
        return (weights / math.fsum(weights)).tolist()

    @property
    def floor(self) -> float:
        return float(self._log_weights[0][0])

    @property
    def edge(self) -> bool:
        return True

    def extremes(self, *, swapped: bool) -> Extremes:
        return Extremes(-self.floor * (1 + 64 * UNIT) if swapped else np.inf, 0.0)

    @property
    def ends(self) -> tuple[float, float]:
        logs = self._log_weights[0]
        largest = int(np.flatnonzero(logs > REST / 2)[-1])
        bottom, top = self._height_at(np.array([-REACH, largest * self.shift + REACH]))
        return float(bottom), min(float(top), LARGEST_EXPONENT - self.floor)  # losses beyond count as infinite

    def dominating(self) -> SubsampledGaussianPair:
        """Returns the pair of a single example as long as the whole group, which dominates this one."""
        chance = -math.expm1(self.floor)
        return SubsampledGaussianPair(self.group_size * self.shift, min(chance * (1 + 8 * UNIT), 1.0))

    # Losses and outcomes

    @cached_property
    def _log_ratios(self) -> Array:
        """Returns log bₖ/b₀ - k² z²/2 for k = 1 ... G, as a column."""
        return (self._log_weights[0] - self.floor - self._steps**2 / 2)[1:, None]

    def _log_rest(self, x: Array, *, slopes: bool = False) -> tuple[Array, Array]:
        """Returns ``log Σ_(k>0) bₖ/b₀ e^(k z x - k² z²/2)`` for each of (n,) outcomes; its derivative, if wanted."""
        steps = self._steps[1:]
        terms = steps[:, None] * x + self._log_ratios  # shape: (G, n)
        largest = terms.max(0)
        terms -= largest
        np.exp(terms, out=terms)
        total = terms.sum(0)
        return largest + np.log(total), steps @ terms / total if slopes else total

    def _height_at(self, x: Array) -> Array:
        """Returns the privacy losses of (n,) outcomes, minus the floor."""
        return np.logaddexp(0, self._log_rest(x)[0])

    @cached_property
    def _table(self) -> tuple[Array, Array]:
        """Outcomes and their `_log_rest`, from which Newton's steps begin."""
        x = np.linspace(-4 * REACH, self._steps[-1] + 4 * REACH, TABLE)
        return self._log_rest(x)[0], x

    def outcome(self, height: Array) -> Array:
        """Returns the outcome at which the loss is ``floor + height``; -∞ at height 0."""
        flat = np.asarray(height, float).ravel()
        size = max(1, CHUNK // self.group_size)
        parts = [self._outcome(flat[k : k + size]) for k in range(0, len(flat), size)]
        return np.concatenate(parts or [flat]).reshape(np.shape(height))

    def _outcome(self, height: Array) -> Array:
        inner = np.isfinite(height) & (height > 0)
        known = np.where(inner, height, 1.0)
        target = known + np.log(-np.expm1(-known))
        rest, outcomes = self._table
        x = np.interp(target, rest, outcomes)
        for outside, k in ((target < rest[0], 0), (target > rest[-1], -1)):  # where one term is all that matters
            x = np.where(outside, (target - self._log_ratios[k, 0]) / self._steps[1:][k], x)
        for _ in range(MOST_NEWTON):
            value, slope = self._log_rest(x, slopes=True)
            step = (value - target) / slope
            x = x - step
            if not (np.abs(step) > CONVERGED * (1 + np.abs(x))).any():  # the next step is as small as its square
                break
        return np.where(inner, x, np.where(height > 0, np.inf, -np.inf))

    # What the engines use

    def cells(self, cuts: Array, at: Array) -> tuple[Array, Array]:
        x = self.outcome(cuts)
        weights = np.exp(self._log_weights[0])
        null = normal_mass(x[:-1], x[1:])
        joined = np.zeros(len(null))
        for weight, step in zip(weights[1:], self._steps[1:], strict=True):
            if weight:
                joined += weight * normal_mass(x[:-1] - step, x[1:] - step)
        mass = weights[0] * null + joined
        finite = np.isfinite(at)
        known = np.where(finite, at, 0.0)
        with np.errstate(divide="ignore", over="ignore"):
            grown = np.exp(self.floor + np.maximum(known, 1e-300) + np.log(-np.expm1(-np.maximum(known, 1e-300))))
        return mass, np.where(finite, joined - grown * null, mass)

    def tails(self, epsilon: Array, *, swapped: bool) -> Tails:
        epsilon = np.asarray(epsilon, float)
        height = (-epsilon if swapped else epsilon) - self.floor
        inside = height > 0
        height = np.where(inside, height, 1.0)
        x, side = self.outcome(height), 1 if swapped else -1
        log_rest = self.floor + height + np.log(-np.expm1(-height))  # log of Σ_(k>0) bₖ e^(...), at x
        log_null = log_rest + log_ndtr(side * x)
        shifted = self._log_weights[0][1:] + log_ndtr(side * (x[..., None] - self._steps[1:]))
        largest = shifted.max(-1)
        log_joined = largest + np.log(np.exp(shifted - largest[..., None]).sum(-1))
        exponent = np.abs(height) + np.abs(self.floor) + np.abs(log_null) + np.abs(x) * self._steps[-1]
        if swapped:
            log_gain = epsilon + log_null
            log_loss = np.minimum(epsilon + log_joined, log_gain)
            gain, loss = (np.where(inside, np.exp(part), 0.0) for part in (log_gain, log_loss))
            return Tails(gain, loss, exponent)
        log_loss = np.minimum(log_null, log_joined)
        gain = np.where(inside, np.exp(log_joined), -np.expm1(np.minimum(epsilon, 0)))
        return Tails(gain, np.where(inside, np.exp(log_loss), 0.0), exponent)

    @property
    def coarsest_step(self) -> float:
        # A power n of a factor 1 + w / wⱼ adds at most e^(2π/0.3) e^(-2π²/0.3) < e^-44 to the rule, whatever n is.
        return min(0.3 / self.shift, 0.2)

    def nodes(self, step: float) -> Nodes:
        x = _points(-REACH - 30, REACH + 30 + self._steps[-1], step)
        (logs, log_errors), steps = self._log_weights, self._steps
        base = steps * (x[:, None] - steps / 2)  # k z x - k² z²/2
        base_error = 8 * UNIT * steps * (np.abs(x)[:, None] + steps) + log_errors
        exponents = logs + base
        largest = exponents.max(1)
        shares = np.exp(exponents - largest[:, None])
        total = shares.sum(1)
        direct = largest + np.log(total)
        shares /= total[:, None]
        small = np.minimum(base, LARGEST_EXPONENT)
        excess = np.exp(logs) * np.expm1(small)  # near 0 the loss is log(1 + Σ bₖ (e^uₖ - 1)), which loses no digit
        near = (np.abs(direct) < 0.5) & (base.max(1) < LARGEST_EXPONENT)
        losses = np.where(near, np.log1p(np.maximum(excess.sum(1), -0.9)), direct)
        sizes = (np.exp(logs + log_errors - losses[:, None]) * np.abs(np.expm1(small))).sum(1)
        terms = self.group_size + 1
        rounding = (40 + terms) * UNIT
        # A weight that is off by a factor 1 + e moves the loss by bₖ |e^uₖ - 1| e / e^l, as the weights add up to 1.
        of_weights = (np.exp(logs - losses[:, None]) * np.abs(np.expm1(small)) * log_errors).sum(1)
        of_bases = (shares * (base_error - log_errors)).sum(1)
        far = rounding * (1 + np.abs(losses)) + (shares * base_error).sum(1) + 4 * UNIT * np.abs(exponents).max(1)
        error = np.where(near, of_weights + of_bases + rounding * (sizes + np.abs(losses)), far)
        log_mass = losses - x**2 / 2 + np.log(step / np.sqrt(2 * np.pi))
        gaps = step * (shares @ steps)
        return Nodes(losses, log_mass, gaps, step, error, error + _mass_error(x, losses, log_mass))
