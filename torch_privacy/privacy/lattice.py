# SPDX-License-Identifier: Apache-2.0
"""One step's law moved onto a lattice of privacy losses, once upwards and once downwards.

A pair (P, Q) is described by its hockey stick ``H(x) = sup_A P(A) - x Q(A)``, convex in ``x = e^ε``. Moving mass onto
lattice points makes it piecewise linear:

- `pessimistic` joins the values of H at the lattice points by chords, so it lies nowhere below H;
- `optimistic` joins values that lie on tangents of H, so it lies nowhere above H.

Domination of hockey sticks survives composition, and both lattices keep (or only drop) P- and Q-mass, so the swapped
pair is dominated the same way. The two curves differ by O(h²) in the spacing h: T steps cost O(T h²), not O(T h).
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from .curve import Unresolved
from .law import REACH, SubsampledNormal
from .tradeoff import Array


@dataclass(frozen=True, eq=False)
class Lattice:
    """A pair (P, Q) whose finite privacy losses lie at ``start + i * spacing``; ``Q-mass = e^-loss * P-mass`` there.

    Args:
        start: loss at index 0.
        spacing: h, above 0.
        mass: P-mass at each lattice point.
        only_p: P-mass where Q has none (loss +∞).
        only_q: Q-mass where P has none (loss -∞); it turns into `only_p` when the pair is swapped.
    """

    start: float
    spacing: float
    mass: Array
    only_p: float = 0.0
    only_q: float = 0.0

    @cached_property
    def losses(self) -> Array:
        """The privacy losses of all lattice points, ascending."""
        return self.start + self.spacing * np.arange(len(self.mass))

    @cached_property
    def swapped(self) -> "Lattice":
        """The pair (Q, P), i.e. the other direction."""
        q_mass = self.mass * np.exp(-self.losses)
        return Lattice(-float(self.losses[-1]), self.spacing, q_mass[::-1], self.only_q, self.only_p)

    def delta(self, epsilon: float) -> float:
        """Hockey stick of this single step at e^ε (for tests; composition uses `fourier`)."""
        return float(self.mass @ np.maximum(-np.expm1(epsilon - self.losses), 0)) + self.only_p


@lru_cache(maxsize=16)
def pessimistic(law: SubsampledNormal, spacing: float) -> Lattice:
    """A lattice pair that is at least as easy to tell apart as ``law``: connect the dots.

    Each cell between neighboring lattice points ``l`` and ``l + h`` moves its mass to its two ends, keeping the P- and
    the Q-mass: ``up = (P - e^l Q) / (1 - e^-h)``, ``down = P - up``. Here ``P - e^l Q = q (N_z - e^u N_0)``, with N_z
    and N_0 the base masses of the cell and u the base loss at ``l``: free of the cancellation that small q would
    bring. The two outer cells reach to -∞ and +∞ (their h is infinite); what lies there becomes perfectly telling.

    Source: Doroshenko, Ghazi, Kamath, Kumar & Manurangsi (2022), arXiv:2207.04380.
    """
    top = float(law.height(np.array(law.shift + REACH)))
    lowest = _lowest_index(law, spacing)
    heights = spacing * np.arange(lowest, int(np.ceil(top / spacing)) + 1)
    ends = np.concatenate([[-np.inf], law.base_loss(heights), [np.inf]])
    base, shifted = law.cell_masses(ends)
    gap = np.full(len(base), -np.expm1(-spacing))
    gap[[0, -1]] = 1.0
    mass = law.mixed(base, shifted)
    up = np.clip(law.probability * (shifted - np.exp(ends[:-1]) * base) / gap, 0, mass)
    if lowest:
        up[0] = mass[0]  # from a loss of -∞, where `down` has no P-mass
    down = mass - up
    # Cell i lies below lattice point i: it sends `up` there and `down` one point lower.
    start = law.floor + lowest * spacing
    only_q = max(float(base[0] - np.exp(-start) * up[0]), 0.0)
    return Lattice(start, spacing, up[:-1] + down[1:], float(up[-1]), only_q)


def _lowest_index(law: SubsampledNormal, spacing: float) -> int:
    """How many lattice points above the floor to begin: 0, unless the losses keep far away from it (much noise)."""
    lowest = int(law.height(np.array(-REACH)) / spacing)
    return lowest if law.probability < 1 and lowest * spacing > law.span else 0


@lru_cache(maxsize=16)
def optimistic(law: SubsampledNormal, spacing: float) -> Lattice:
    """A lattice pair that is at most as easy to tell apart as ``law``: tangents, lowered to meet on the lattice.

    Cells are cut midway between lattice points; at a cut the tangent of H is known exactly. At the lattice point
    ``x_i = e^{l_i}`` the tangents of the two nearest cuts differ by ``κ_i = P_i - x_i Q_i = O(h³)``, and the lower one
    is taken. Neighboring values lie on or below the tangent of the cut between them, so their chord lies below H. In
    masses: ``max(κ_i, 0) / (e^h - 1)`` moves from i-1 up to i, and ``-min(κ_i, 0) / (1 - e^-h)`` from i+1 down to i.

    The first lattice point is the mean ratio of all that lies below the first cut (κ = 0), the last cell is longer
    above than below (κ >= 0), so that no mass leaves the lattice. Outcomes beyond are dropped, which only lowers H.
    """
    heights = _first_height(law, spacing) + spacing * np.arange(_cell_count(law, spacing))
    cuts = np.concatenate([[0.0], heights + spacing / 2])
    cuts[-1] += spacing / 4
    first, last = _gentle_range(law.mixed(*law.cell_masses(law.base_loss(cuts))))
    heights, cuts = heights[first : last + 1], np.concatenate([cuts[:1], cuts[first + 1 : last + 1], cuts[-1:]])
    base, shifted = law.cell_masses(law.base_loss(cuts))
    kappa = law.probability * (shifted - np.exp(law.base_loss(heights)) * base)
    mass = _without_concave_kinks(_lowered(law.mixed(base, shifted), kappa, spacing), spacing)
    return Lattice(law.floor + float(heights[0]), spacing, mass)


def _gentle_range(mass: Array) -> tuple[int, int]:
    """First and last cell to keep: beyond, masses more than halve from cell to cell, so that those tails join in."""
    rising, falling = mass[1:] > 2 * mass[:-1], mass[:-1] > 2 * mass[1:]
    first = np.flatnonzero((mass[:-1] > 0) & ~rising)
    last = np.flatnonzero((mass[1:] > 0) & ~falling) + 1
    if not len(first) or not len(last):
        raise Unresolved
    return int(first[0]), int(last[-1])


def _cell_count(law: SubsampledNormal, spacing: float) -> int:
    return max(int(law.span / spacing), 3)


def _first_height(law: SubsampledNormal, spacing: float) -> float:
    """Height of the first lattice point: the mean likelihood ratio of what lies below its upper cut.

    A fixed point; any value at or above it is valid, so the iteration need not have converged to the last digit.
    """
    start = float(law.height(np.array(-REACH)))
    height = start
    for _ in range(100):
        base, shifted = law.cell_masses(law.base_loss(np.array([0.0, height + spacing / 2])))
        height = max(law.mean_height(base[0], shifted[0]), start)
    return height


def _lowered(mass: Array, kappa: Array, spacing: float) -> Array:
    """Masses of the interpolation through the lower tangents: κ moves mass towards the flatter side."""
    up = np.maximum(kappa, 0) / np.expm1(spacing)
    down = -np.minimum(kappa, 0) / -np.expm1(-spacing)
    up[0] = down[-1] = 0.0  # κ <= 0 and κ >= 0 there, up to rounding
    lowered = mass + up + down
    lowered[:-1] -= up[1:]
    lowered[1:] -= down[:-1]
    return lowered


def _without_concave_kinks(mass: Array, spacing: float) -> Array:
    """Drop lattice points of negative mass, where the interpolation is concave: the chord past them lies lower still.

    Each one's mass goes to its neighbors so that P- and Q-mass are kept. Mostly rounding in far tails (masses below
    1e-22) and the first cells of a law make such points.
    """
    kept, mass = np.arange(len(mass)), mass.copy()
    while (concave := np.flatnonzero(mass[kept] < 0)).size:
        if concave[0] == 0 or concave[0] == len(kept) - 1:
            raise Unresolved
        below, here, above = kept[concave[0] - 1 : concave[0] + 2]
        share = -np.expm1((below - here) * spacing) / -np.expm1((below - above) * spacing)
        mass[above] += share * mass[here]
        mass[below] += (1 - share) * mass[here]
        mass[here] = 0.0
        kept = np.delete(kept, concave[0])
    return mass
