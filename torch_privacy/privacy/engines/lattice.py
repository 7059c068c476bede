# SPDX-License-Identifier: Apache-2.0
"""Moves the pair of one step onto a lattice of privacy losses, once upwards and once downwards.

A pair (P, Q) is described by its hockey stick ``H(x) = sup_A P(A) - x Q(A)``, convex in ``x = e^ε``. Moving mass onto
lattice points makes it piecewise linear:

- `pessimistic` joins the values of H at the lattice points by chords, so it lies nowhere below H;
- `optimistic` joins values that lie on tangents of H, so it lies nowhere above H (but for `log_neglected`).

Domination of hockey sticks survives composition, and both lattices keep (or only drop) P- and Q-mass, so the swapped
pair is dominated the same way. The two curves differ by O(h²) in the spacing h: T steps cost O(T h²), not O(T h).
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache, singledispatch

import numpy as np

from ..bracket import Array
from ..pairs.base import UNIT, DiscretizablePair, DominatingPair
from ..pairs.gaussian import SymmetrizedPair
from .curve import Unresolved

CANCELLED = 1e-12  # relative error of a difference of masses that nearly cancel
FIRST_EXCESS = 1e-3  # how far the first height may lie too high, relative to the spacing or to itself


@dataclass(frozen=True, eq=False)
class Lattice:
    """A pair (P, Q) with finite privacy losses at ``start + (first + i) * spacing``; ``Q-mass = e^-loss * P-mass``.

    ``start`` may be tiny compared to the largest loss, and many steps multiply its rounding error. So it is never added
    to a large number and rounded: the swapped pair has ``-start``, exactly.

    Args:
        start: loss of the lattice point number 0.
        spacing: h, above 0.
        mass: P-mass at each lattice point.
        only_p: P-mass where Q has none (loss +∞).
        only_q: Q-mass where P has none (loss -∞); it turns into `only_p` when the pair is swapped.
        log_neglected: log of the small Q-mass that the outcomes of `only_p` have in truth; the hockey stick is too high
            by at most e^ε times that mass. A logarithm, because heavy tails lie at losses far above 700.
        first: number of the lattice point at index 0.
    """

    start: float
    spacing: float
    mass: Array
    only_p: float = 0.0
    only_q: float = 0.0
    log_neglected: float = -np.inf
    first: int = 0

    @cached_property
    def losses(self) -> Array:
        """The privacy losses of all lattice points, ascending."""
        return self.start + self.spacing * np.arange(self.first, self.first + len(self.mass))

    def exact_loss(self, index: int) -> Fraction:
        """Returns the privacy loss at an index without any rounding."""
        return Fraction(self.start) + (self.first + index) * Fraction(self.spacing)

    @cached_property
    def swapped(self) -> "Lattice":
        """The pair (Q, P), which is the other direction."""
        with np.errstate(divide="ignore"):  # log 0 = -∞ is right
            q_mass = np.exp(np.log(self.mass) - self.losses)
        first = -(self.first + len(self.mass) - 1)
        return Lattice(-self.start, self.spacing, q_mass[::-1], self.only_q, self.only_p, first=first)

    def delta(self, epsilon: float) -> float:
        """Returns the hockey stick of this single step at e^ε (composition uses `fft`)."""
        return float(self.mass @ np.maximum(-np.expm1(epsilon - self.losses), 0)) + self.only_p


@lru_cache(maxsize=16)
def pessimistic(pair: DominatingPair, spacing: float) -> Lattice:
    """Returns a lattice pair that dominates ``pair``."""
    return above(pair, spacing)


@lru_cache(maxsize=16)
def optimistic(pair: DominatingPair, spacing: float) -> Lattice:
    """Returns a lattice pair that ``pair`` dominates."""
    return below(pair, spacing)


@singledispatch
def above(pair: DominatingPair, spacing: float) -> Lattice:
    """Implements `pessimistic` for one type of pair; a new type is registered here."""
    raise Unresolved


@singledispatch
def below(pair: DominatingPair, spacing: float) -> Lattice:
    """Implements `optimistic` for one type of pair; a new type is registered here."""
    raise Unresolved


@above.register
def _(pair: DiscretizablePair, spacing: float) -> Lattice:
    """Joins the hockey stick's values at the lattice points by chords.

    Each cell between neighboring lattice points ``l`` and ``l + h`` moves its mass to its two ends, keeping the P- and
    the Q-mass: ``up = (P - e^l Q) / (1 - e^-h)``, ``down = P - up``. The pair gives ``P - e^l Q`` free of the
    cancellation that small sampling probabilities would bring. The two outer cells reach to -∞ and +∞ (their h is
    infinite); the outcomes beyond the last one count as an infinite loss.

    Source: Doroshenko, Ghazi, Kamath, Kumar & Manurangsi (2022), arXiv:2207.04380.
    """
    lowest = _lowest_index(pair, spacing)
    heights = spacing * np.arange(lowest, int(np.ceil(pair.ends[1] / spacing)) + 1)
    cuts = np.concatenate([[-np.inf], heights, [np.inf]])
    mass, excess = pair.cells(cuts, cuts[:-1])
    gap = np.full(len(mass), -np.expm1(-spacing))
    gap[[0, -1]] = 1.0
    up = np.clip(excess / gap, 0, mass)  # all of the first cell: from a loss of -∞, where `down` has no P-mass
    down = mass - up
    # Cell i lies below lattice point i: it sends `up` there and `down` one point lower.
    start = pair.floor + float(heights[0])
    missing = pair.cells(cuts[:2], heights[:1])[1]  # P - e^start Q of the first cell, which has more Q- than P-mass
    lattice = Lattice(pair.floor, spacing, up[:-1] + down[1:], float(up[-1]) + pair.beyond, first=lowest)
    if start > -700:
        only_q = max(-math.exp(-start) * float(missing[0]), 0.0)
    else:  # e^start is 0: what remains of Q's mass
        only_q = min(max(1.0 - float(lattice.swapped.mass.sum()), 0.0) + CANCELLED, 1.0)
    return replace(lattice, only_q=only_q + pair.beyond)


def _lowest_index(pair: DiscretizablePair, spacing: float) -> int:
    """Returns the index of the first lattice point: 0, the floor, unless all losses lie far from it (much noise)."""
    lowest = int(np.floor(pair.ends[0] / spacing))
    return lowest if lowest < 0 or (pair.edge and lowest * spacing > pair.span) else 0


@below.register
def _(pair: DiscretizablePair, spacing: float) -> Lattice:
    """Joins values on tangents of the hockey stick, lowered so that they meet on the lattice.

    Cells are cut midway between lattice points; at a cut the tangent of H is known exactly. At the lattice point
    ``x_i = e^{l_i}`` the tangents of the two nearest cuts differ by ``κ_i = P_i - x_i Q_i = O(h³)``, and the lower one
    is taken. Neighboring values lie on or below the tangent of the cut between them, so their chord lies below H. In
    masses: ``max(κ_i, 0) / (e^h - 1)`` moves from i-1 up to i, and ``-min(κ_i, 0) / (1 - e^-h)`` from i+1 down to i.

    The first lattice point is the mean ratio of all that lies below the first cut (κ = 0), the last cell is longer
    above than below (κ >= 0), so that no mass leaves the lattice. Outcomes beyond count as an infinite loss;
    `log_neglected` is the little Q-mass that they have.
    """
    bottom = 0.0 if pair.edge else pair.ends[0]
    heights = _first_height(pair, bottom, spacing) + spacing * np.arange(max(int(pair.span / spacing) + 2, 3))
    cuts = np.concatenate([[bottom], heights + spacing / 2])
    cuts[-1] += spacing / 4
    first, last = _range_to_keep(pair.cells(cuts, heights)[0])
    heights, cuts = heights[first : last + 1], np.concatenate([cuts[:1], cuts[first + 1 : last + 1], cuts[-1:]])
    mass, kappa = pair.cells(cuts, heights)
    if kappa[-1] < -8 * UNIT * mass[-1]:  # an atom below the last lattice point: its cell joins the one before
        if len(heights) == 1:  # the spacing is so wide that there is none
            raise Unresolved
        heights, cuts = heights[:-1], np.delete(cuts, -2)
        mass, kappa = pair.cells(cuts, heights)
    mass = _without_concave_kinks(_lowered(mass, kappa, spacing), spacing)
    (only_p,), (excess,) = pair.cells(np.array([cuts[-1], np.inf]), heights[-1:])
    only_p = max(float(only_p), 0.0)
    weighted = max(only_p - float(excess), CANCELLED * only_p)  # e^height of the last point times their Q-mass
    log_neglected = float(np.log(weighted)) - pair.floor - float(heights[-1]) if weighted else -np.inf
    return Lattice(pair.floor + float(heights[0]), spacing, mass, only_p, log_neglected=log_neglected)


@above.register
def _(pair: SymmetrizedPair, spacing: float) -> Lattice:
    """Joins the values above 0 by chords, mirrors them, and leaves the rest of the mass at 0."""
    half, top = pair.one_sided, pair.one_sided.floor + pair.one_sided.ends[1]
    losses = spacing * np.arange(int(np.ceil(top / spacing)) + 1)
    mass, excess = half.cells(np.append(losses - half.floor, np.inf), losses - half.floor)
    gap = np.append(np.full(len(mass) - 1, -np.expm1(-spacing)), 1.0)
    up = np.clip(excess / gap, 0, mass)
    positive, only = up[:-1] + (mass - up)[1:], float(up[-1])
    negative = np.exp(-losses[1:]) * positive
    rest = max(1.0 - float(positive.sum() + negative.sum()) - only, 0.0)
    mass = np.concatenate([negative[::-1], [rest], positive])
    return Lattice(0.0, spacing, mass, only, only, first=1 - len(losses))


@below.register
def _(pair: SymmetrizedPair, spacing: float) -> Lattice:
    return below(pair.one_sided, spacing)  # a curve lies below its symmetrization


def _range_to_keep(mass: Array) -> tuple[int, int]:
    """Returns the first and the last cell to keep; beyond them, masses more than halve from cell to cell."""
    rising, falling = mass[1:] > 2 * mass[:-1], mass[:-1] > 2 * mass[1:]
    first = np.flatnonzero((mass[:-1] > 0) & ~rising)
    last = np.flatnonzero((mass[1:] > 0) & ~falling) + 1
    if not len(first) or not len(last):
        raise Unresolved
    return int(first[0]), int(last[-1])


def _first_height(pair: DiscretizablePair, bottom: float, spacing: float) -> float:
    """Returns the height of the first lattice point: the mean likelihood ratio of what lies below its upper cut.

    The iteration stops at a fixed point or a little above it, which is as valid.
    """
    height = pair.ends[0]
    for _ in range(100):
        mean = pair.mean_height(bottom, height + spacing / 2)
        if mean <= height:
            break
        if pair.mean_height(bottom, mean + spacing / 2) <= mean + 2 * UNIT * abs(mean):  # an atom: now on the lattice
            return mean
        height = mean + FIRST_EXCESS * min(spacing, abs(mean))
    return height


def _lowered(mass: Array, kappa: Array, spacing: float) -> Array:
    """Returns the masses of the interpolation through the lower tangents: κ moves mass towards the flatter side."""
    up = np.maximum(kappa, 0) / np.expm1(min(spacing, 700.0))
    down = -np.minimum(kappa, 0) / -np.expm1(-spacing)
    up[0] = down[-1] = 0.0  # κ <= 0 and κ >= 0 there, up to rounding
    lowered = mass + up + down
    lowered[:-1] -= up[1:]
    lowered[1:] -= down[:-1]
    return lowered


def _without_concave_kinks(mass: Array, spacing: float) -> Array:
    """Drops lattice points of negative mass, where the interpolation is concave; the chord past them lies lower.

    Each one's mass goes to its neighbors so that P- and Q-mass are kept. Such points come mostly from rounding in far
    tails (masses below 1e-22) and from the first cells of a pair.
    """
    waiting = np.flatnonzero(mass < 0)[::-1].tolist()
    if not waiting:
        return mass
    masses = mass.tolist()  # its numbers are read and written one by one: tens of thousands of times between atoms
    before = list(range(-1, len(masses) - 1))  # neighbors among the remaining points
    after = list(range(1, len(masses) + 1))
    while waiting:
        here = waiting.pop()
        if masses[here] >= 0:  # dropped already
            continue
        below, above = before[here], after[here]
        if below < 0 or above == len(masses):
            raise Unresolved
        share = math.expm1((below - here) * spacing) / math.expm1((below - above) * spacing)
        masses[above] += share * masses[here]
        masses[below] += (1 - share) * masses[here]
        masses[here] = 0.0
        after[below], before[above] = above, below
        waiting += [point for point in (above, below) if masses[point] < 0]
    return np.array(masses)
