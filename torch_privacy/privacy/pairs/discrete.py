# SPDX-License-Identifier: Apache-2.0
"""Provides pairs with atoms: finite ones, the pair of a list of (ε, δ) guarantees, and Laplace noise."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..bracket import Array
from .base import UNIT, DiscretizablePair, Extremes, Nodes, Tails

GAUSS_ROUNDING = 2.0**-44  # relative error of points and weights of Gauss' rule, estimated


@dataclass(frozen=True)
class DiscretePair(DiscretizablePair):
    """Finitely many outcomes, with their masses under P and Q; either may be 0.

    Args:
        p: P-masses, adding up to 1.
        q: Q-masses, adding up to 1.
    """

    p: tuple[float, ...]
    q: tuple[float, ...]

    @cached_property
    def _sorted(self) -> tuple[Array, Array, Array]:
        """Losses in ascending order, from -∞ to ∞, with their masses under P and Q."""
        p, q = np.array(self.p), np.array(self.q)
        p, q = p[(p > 0) | (q > 0)], q[(p > 0) | (q > 0)]
        with np.errstate(divide="ignore"):
            losses = np.log(p) - np.log(q)
        order = np.argsort(losses)
        return losses[order], p[order], q[order]

    @property
    def floor(self) -> float:
        return 0.0

    @property
    def ends(self) -> tuple[float, float]:
        losses = self._sorted[0]
        finite = losses[np.isfinite(losses)]
        if not finite.size:
            return -1e-9, 1e-9
        return float(finite[0]) - 1e-9 * (1 + abs(finite[0])), float(finite[-1]) + 1e-9 * (1 + abs(finite[-1]))

    @property
    def smallest(self) -> float:
        return self.ends[0]

    @property
    def atoms(self) -> Array:
        losses = self._sorted[0]
        return losses[np.isfinite(losses)]

    def extremes(self, *, swapped: bool) -> Extremes:
        losses, p, q = self._sorted
        if swapped:
            losses, p, q = -losses, q, p
        finite = np.isfinite(losses)
        error = 16 * UNIT * np.abs(np.log(p, where=p > 0, out=np.zeros(len(p))))
        largest = float((losses + error)[finite].max(initial=0.0))
        return Extremes(largest, float(p[losses == np.inf].sum()), 2 * float(error[finite].max(initial=0.0)))

    def second_moment(self) -> float:
        losses, p, _ = self._sorted
        finite = np.isfinite(losses)
        return float(p[finite] @ losses[finite] ** 2)

    def cells(self, cuts: Array, at: Array) -> tuple[Array, Array]:
        losses, p, q = self._sorted
        ends = np.where(cuts == -np.inf, 0, np.searchsorted(losses, cuts, side="right"))  # cells are (low, high]
        ends = np.where(cuts == np.inf, len(losses), ends)
        p_mass, q_mass = (np.diff(np.append(0.0, np.cumsum(mass))[ends]) for mass in (p, q))
        cell = np.repeat(np.arange(len(at)), np.diff(ends))
        inside = slice(int(ends[0]), int(ends[-1]))
        height = np.where(np.isfinite(at), at, 0.0)[cell]
        with np.errstate(over="ignore", invalid="ignore"):
            positive = -np.expm1(height - losses[inside]) * p[inside]
            excess_of_outcome = np.where(p[inside] > 0, positive, -np.exp(height) * q[inside])
        excess = np.bincount(cell, excess_of_outcome, minlength=len(at))
        return np.maximum(p_mass, 0.0), np.where(at == -np.inf, p_mass, excess) + 0.0 * q_mass

    def tails(self, epsilon: Array, *, swapped: bool) -> Tails:
        losses, p, q = self._sorted
        if swapped:
            losses, p, q = -losses, q, p
        epsilon = np.asarray(epsilon, float)
        above = losses > epsilon[..., None]
        with np.errstate(divide="ignore", invalid="ignore"):  # log 0 = -∞ is right for outcomes impossible under Q
            log_loss = np.where(above, np.minimum(epsilon[..., None] + np.log(q), np.log(p)), -np.inf)
        loss = np.exp(log_loss).sum(-1)
        return Tails((above * p).sum(-1), loss, np.where(loss > 0, np.abs(epsilon), 0.0))

    @property
    def coarsest_step(self) -> float:
        return 0.2

    def nodes(self, step: float) -> Nodes | None:
        losses, p, _ = self._sorted
        if not np.isfinite(losses).all():
            return None
        log_mass = np.log(p)
        mass_error = 16 * UNIT * (1 + np.abs(log_mass))
        return Nodes(losses, log_mass, np.zeros(len(losses)), step, mass_error + 16 * UNIT * np.abs(losses), mass_error)


def pair_from_guarantees(epsilons: Array, deltas: Array) -> DiscretePair:
    """Returns the pair that dominates every mechanism with all of these (ε, δ) guarantees, in both directions.

    In ``x = e^ε`` the hockey stick is convex, starts at (0, 1), never rises, lies at or below each ``(e^ε, δ)``, and by
    symmetry at or below ``(e^-ε, 1 - e^-ε + e^-ε δ)``: at most the lower convex hull of these points. A kink of the
    hull at x is an outcome of likelihood ratio x; its Q-mass is the change of slope.
    """
    above, below = np.exp(epsilons), np.exp(-epsilons)
    some = np.asarray(epsilons) > 0  # one that is too small for floating point is no 0
    x = np.concatenate([[0.0], np.where(some, np.nextafter(above, np.inf), 1.0), np.where(some, below, 1.0)])
    y = np.concatenate([[1.0], deltas, -np.expm1(-epsilons) + below * deltas])
    order = np.lexsort((y, x))
    hull: list[tuple[float, float]] = []
    for point in zip(x[order].tolist(), np.minimum.accumulate(y[order]).tolist(), strict=True):
        if hull and point[0] == hull[-1][0]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], point):
            hull.pop()
        hull.append(point)
    slopes = [_slope(left, right) for left, right in pairwise(hull)] + [0.0]
    q = np.diff(np.maximum(np.array([-1.0, *slopes]), -1.0))
    q[0] = hull[-1][1]  # impossible under P: by symmetry as much as is impossible under Q
    p = np.append(0.0, q[1:] * np.array([at for at, _ in hull[1:]]))
    p = np.append(p, hull[-1][1])  # impossible under Q: the smallest δ
    return DiscretePair(tuple(p.tolist()), (*q.tolist(), 0.0))


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


@dataclass(frozen=True)
class LaplacePair(DiscretizablePair):
    """Laplace noise of scale 1 around 0 under P, around z under Q: losses -z and z with mass, and a density between.

    ``δ(ε) = 1 - e^((ε - z) / 2)`` for 0 <= ε <= z.

    Args:
        shift: z, sensitivity over the noise's scale.
    """

    shift: float

    @property
    def symmetric(self) -> bool:
        return True

    @property
    def atoms(self) -> Array:
        return np.array([-self.shift, self.shift])

    def extremes(self, *, swapped: bool) -> Extremes:
        return Extremes(self.shift * (1 + 8 * UNIT), 0.0)

    @property
    def floor(self) -> float:
        return 0.0

    @property
    def ends(self) -> tuple[float, float]:
        end = self.shift * (1 + 1e-9)
        return -end, end

    @property
    def smallest(self) -> float:
        return self.ends[0]

    def cells(self, cuts: Array, at: Array) -> tuple[Array, Array]:
        z = self.shift
        inner = np.clip(cuts, -z, z)
        p, q = np.diff(np.exp((inner - z) / 2)) / 2, -np.diff(np.exp((-inner - z) / 2)) / 2
        top, bottom = ((cuts[:-1] < end) & (end <= cuts[1:]) for end in (z, -z))
        p = p + np.where(top, 0.5, 0.0) + np.where(bottom, 0.5 * np.exp(-z), 0.0)
        q = q + np.where(top, 0.5 * np.exp(-z), 0.0) + np.where(bottom, 0.5, 0.0)
        return p, np.where(at == -np.inf, p, p - np.exp(np.where(np.isfinite(at), at, 0.0)) * q)

    def tails(self, epsilon: Array, *, swapped: bool) -> Tails:
        size = np.abs(epsilon)
        delta = np.maximum(-np.expm1((size - self.shift) / 2), 0.0)
        negative = np.minimum(epsilon, 0.0)
        value = np.exp(negative) * delta - np.expm1(negative)
        return Tails(value, np.zeros(np.shape(value)), size)

    @property
    def coarsest_step(self) -> float:
        return 0.2

    def nodes(self, step: float) -> Nodes:
        points, weights = np.polynomial.legendre.leggauss(round(8 / step))
        z = self.shift
        losses = np.concatenate([[-z], z * points, [z]])
        mass = np.concatenate([[0.5 * np.exp(-z)], z * weights * np.exp(z * (points - 1) / 2) / 4, [0.5]])
        log_mass, gaps = np.log(mass), np.full(len(losses), np.pi * z / len(points))
        mass_error = GAUSS_ROUNDING + 8 * UNIT * (z + np.abs(log_mass))
        return Nodes(losses, log_mass, gaps, step, GAUSS_ROUNDING * np.abs(losses), mass_error)
