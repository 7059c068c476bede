# SPDX-License-Identifier: Apache-2.0
"""Composes outcomes by products, and merges neighboring ones on a grid that widens with the distance from the mean.

Where sampling is rare or tails are heavy, losses of very different sizes count at once: a lattice with equal spacing
needs too many points. Here a few hundred outcomes are kept, dense around the mean and ever wider away from it, so that
each doubling of the range takes as many points as the one before. A product has all pairs of outcomes; those that fall
into one cell of the grid are

- below: merged to one outcome with their P- and Q-mass, which an attacker could do (post-processing);
- above: moved to the two ends of the cell, keeping P- and Q-mass, so that the hockey stick is joined by chords.

In the add direction P and Q change places from the first step on.

Both errors are of second order in the width of cells. So for an ε far from the mean the grid is also dense where losses
weigh most in a Chernoff bound on δ(ε). Where it is dense, only the width of brackets depends on it: any grid is valid.
All terms are positive, so that the smallest masses keep their digits. ``count`` equal steps take ``2 log2(count)``
products.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..bracket import Array
from ..pairs.base import UNIT, DiscretizablePair
from ..pairs.gaussian import SubsampledGaussianPair
from ..pairs.mixture import SubsampledMixturePair
from .curve import Unresolved

FURTHEST_REACH = 37.5  # standard deviations, beyond which no mass is left in floating point
BASE_TAIL, LARGEST_BASE = 1e-33, 1e6  # mass of base losses that count as infinite, and base losses that do
SHARE, NEGLIGIBLE = 1e-8, 1e-24  # of δ that far losses may add; where no δ is given
COARSE = 64  # groups of outcomes from which the range of a product is found
ROWS = 2**16  # pairs of outcomes computed at a time, which fit a processor's cache
SMALLEST_MASS = 1e-280
LARGEST = 500.0  # e to this power is far from overflow
Spread = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Finitely many outcomes: losses and P-masses; the Q-mass is ``e^-loss`` times as large.

    Args:
        losses: ascending.
        mass: under P.
        infinite: P-mass of outcomes without Q-mass.
        middle: center and scale of the grid for products; by default those of `spread`.
    """

    losses: Array
    mass: Array
    infinite: float = 0.0
    middle: Spread | None = None

    def spread(self) -> Spread:
        """Returns the center of a grid and the distance from there within which it is dense.

        The latter is a quarter of the width that has 68 % of the mass, or more where that is nearly an atom.
        """
        if self.middle is not None:
            return self.middle
        return _spread(self.losses, self.mass / self.mass.sum())

    def counted(self, rare: float) -> Array:
        """Returns the losses; those so large that they have at most that P-mass together count as the next smaller."""
        above = np.cumsum(self.mass[::-1])[::-1]
        return np.minimum(self.losses, self.losses[max(int(np.searchsorted(-above, -rare)) - 1, 0)])

    def decisive(self, center: float, tilt: float, rare: float) -> Spread:
        """Returns center and distance as `spread` does, where moved losses change a Chernoff bound the most.

        Merging moves a loss by a share of its distance from ``center``; what that changes is of second order.
        """
        with np.errstate(divide="ignore"):  # log 0 = -∞ is right
            logs = np.log(self.mass) + tilt * self.counted(rare) + 2 * np.log(np.abs(self.losses - center) + 1e-300)
        mass = np.exp(logs - logs.max())
        return _spread(self.losses, mass / mass.sum())

    def divided(self, rare: float) -> "tuple[Outcomes, ...]":
        """Returns pairs that together dominate this one: its usual losses, and its largest, of at most that P-mass.

        The second shows either a large loss or nothing. Who sees both can take the large loss where there is one, and
        else the usual one: that is this pair. Many steps then take the large losses along without dividing them again.
        """
        above = np.cumsum(self.mass[::-1])[::-1] + self.infinite
        first = int(np.searchsorted(-above, -rare))
        large, mass = self.losses[first:], self.mass[first:]
        p, q = float(mass.sum()) + self.infinite, float(mass @ np.exp(-large))
        if not len(large) or not first or q >= 0.5:
            return (self,)
        nothing = math.log1p(-(float(mass @ -np.expm1(-large)) + self.infinite) / (1 - q))
        usual = Outcomes(self.losses[:first] - nothing, self.mass[:first] / (1 - p))
        middle = nothing, float(large[0] - nothing) / 2
        return usual, Outcomes(np.append(nothing, large), np.append(1 - p, mass), self.infinite, middle)

    def delta(self, epsilon: float) -> float:
        """Returns the hockey stick of these outcomes."""
        return float(self.mass @ -np.expm1(np.minimum(epsilon - self.losses, 0.0))) + self.infinite


def _spread(losses: Array, mass: Array) -> Spread:
    mean = float(mass @ losses)
    deviation = math.sqrt(float(mass @ (losses - mean) ** 2))
    low, high = np.interp((0.16, 0.84), np.cumsum(mass), losses)
    return mean, max(float(high - low) / 4, 1e-3 * deviation, 1e-300)


class Grid(NamedTuple):
    """The grid on which outcomes are kept.

    Args:
        width: of cells, relative to the distance from the mean.
        negligible: mass of far losses that may count as infinite in each product.
        tilt: of a Chernoff bound; if positive, the grid is also dense where that bound is decided.
    """

    width: float
    negligible: float
    tilt: float = 0.0

    @property
    def rare(self) -> float:
        """About the mass of losses above ε(δ)."""
        return (1 + self.tilt) * self.negligible / SHARE

    def ends(self, low: float, high: float, spreads: Sequence[Spread]) -> Array:
        """Returns the ends of cells from low to high, at each place as narrow as around the center that asks for it."""
        high = high if high > low else low + spreads[0][1]  # one loss alone has a cell, too
        grids = [center + self.cuts(low - center, high - center, scale) for center, scale in spreads]
        if len(grids) == 1:
            return grids[0]
        widths = [[np.maximum(np.abs(ends - center), scale) for center, scale in spreads] for ends in grids]
        chosen = [ends[width[i] <= width[1 - i]] for i, (ends, width) in enumerate(zip(grids, widths, strict=True))]
        return np.unique(np.concatenate([[low], *chosen, [high]]))

    def cuts(self, low: float, high: float, scale: float) -> Array:
        """Returns the ends of cells from low to high, as distances from the mean.

        Cells within ``scale`` are equally wide. Those beyond have the same ends for every scale: what lies on an end
        stays there when it is multiplied with something small.
        """
        first = math.ceil(math.log(scale) / self.width)
        start = math.exp(first * self.width)
        furthest = max(-low, high, start)
        inner = start * np.linspace(0, 1, math.ceil(1 / self.width) + 1)[:-1]
        outer = np.exp(self.width * np.arange(first, math.log(furthest / start) / self.width + first + 2))
        side = np.append(inner, outer)
        ends = np.concatenate([-side[:0:-1], side])
        ends = ends[(ends > low) & (ends < high)]
        return np.concatenate([[low], ends, [high]])


def one_step(pair: DiscretizablePair, count: int, grid: Grid, *, above: bool, swapped: bool) -> Outcomes:
    """Returns outcomes of a single one of ``count`` steps on a grid, which dominate it, or which it dominates."""
    pair = _reaching(pair)
    bottom, top = (0.0 if pair.edge else pair.ends[0]), pair.ends[1]
    center, scale = -pair.floor, 1e-9 * (top - bottom)
    wide = Grid(0.1, 0.0)

    def rough(center: float, scale: float) -> Outcomes:
        return _cells(pair, center + wide.cuts(bottom - center, top - center, scale), above=False, swapped=False)

    mean, scale = rough(center, scale).spread()  # how large typical losses are
    if not math.isfinite(mean + scale):  # e^loss is beyond floating point
        raise Unresolved
    found = rough(mean - pair.floor, scale)
    spreads = [found.spread()]
    if grid.tilt:
        side = -1 if swapped else 1
        decisive = _swapped(found, 0.0, swapped).decisive(side * spreads[0][0], grid.tilt, grid.rare / count)
        spreads.append((side * decisive[0], decisive[1]))
    if not swapped:
        mass = np.cumsum(found.mass[::-1])[::-1]
        beyond = int(np.searchsorted(-mass, -grid.negligible / count))  # the first cell beyond which all is negligible
        if beyond < len(mass):
            top = min(top, float(found.losses[beyond]) - pair.floor)
    spreads = [(min(max(mean - pair.floor, bottom), top), scale) for mean, scale in spreads]
    return _cells(pair, grid.ends(bottom, top, spreads), above=above, swapped=swapped)


def _reaching(pair: DiscretizablePair) -> DiscretizablePair:
    """Returns the pair with its far losses, which a lattice with equal spacing would leave out."""
    if isinstance(pair, SubsampledGaussianPair):
        return replace(pair, reach=FURTHEST_REACH)
    if isinstance(pair, SubsampledMixturePair):
        return replace(pair, largest=min(pair.quantile(BASE_TAIL), LARGEST_BASE))
    return pair


def _cells(pair: DiscretizablePair, heights: Array, *, above: bool, swapped: bool) -> Outcomes:
    """Returns the outcomes of a pair, merged within the cells between heights or moved to their ends."""
    ends = np.concatenate([[-np.inf], heights, [np.inf]])
    if not above:
        at = np.append(heights[:1], heights)
        return _swapped(_one_each(pair.floor + at, *pair.cells(ends, at)), 0.0, swapped)
    mass, excess = pair.cells(ends, ends[:-1])
    gap = np.concatenate([[1.0], -np.expm1(-np.diff(heights)), [1.0]])
    up = np.clip(excess / gap, 0, mass)
    start = pair.floor + float(heights[0])
    missing = float(pair.cells(ends[:2], heights[:1])[1][0])
    only_q = max(-math.exp(min(-start, LARGEST)) * missing, 0.0) + pair.beyond
    found = Outcomes(pair.floor + heights, up[:-1] + (mass - up)[1:], float(up[-1]) + pair.beyond)
    return _swapped(found, only_q, swapped)


def _swapped(found: Outcomes, only_q: float, swapped: bool) -> Outcomes:
    """Returns the outcomes with P and Q exchanged, if swapped; ``only_q`` is the Q-mass without P-mass."""
    if not swapped:
        return found
    with np.errstate(divide="ignore"):  # log 0 = -∞ is right
        mass = np.exp(np.log(found.mass) - found.losses)
    return Outcomes(-found.losses[::-1], mass[::-1], only_q)


def _one_each(at: Array, mass: Array, excess: Array) -> Outcomes:
    """Returns one outcome for each cell with some P-mass, from its P-mass and its ``P - e^at Q``."""
    there = mass > SMALLEST_MASS  # others are left out, with their Q-mass
    share = np.minimum(excess[there] / mass[there], 1 - UNIT)
    return Outcomes(at[there] - np.log1p(-share), mass[there])


def product(first: Outcomes, second: Outcomes, grid: Grid, *, above: bool) -> Outcomes:
    """Returns the outcomes of two independent releases together, on a grid."""
    (center, scale), (other_center, other_scale) = first.spread(), second.spread()
    center += other_center
    middle = (center, max(scale, other_scale)) if first.middle and second.middle else None
    scale = middle[1] if middle else math.hypot(scale, other_scale)
    downwards, upwards = (_coarsely(first, second, side) for side in (-1, 1))
    low, high = _extreme(downwards, grid.negligible, -1), _extreme(upwards, grid.negligible, 1)
    spreads = [(center, scale)] + ([upwards.decisive(center, grid.tilt, grid.rare)] if grid.tilt else [])
    ends = grid.ends(min(low, center), max(high, center), spreads)
    sums, infinite = np.zeros((2, len(ends) - 1)), first.infinite + second.infinite - first.infinite * second.infinite
    rows = max(1, ROWS // len(second.losses))
    for start in range(0, len(first.losses), rows):
        block, columns = slice(start, start + rows), slice(start if first is second else 0, None)
        losses = (first.losses[block, None] + second.losses[columns]).ravel()
        mass = first.mass[block, None] * second.mass[columns]
        if first is second:  # each pair of different outcomes once, for both orders
            mass = 2 * np.triu(mass)
            np.fill_diagonal(mass, mass.diagonal() / 2)
        mass = mass.ravel()
        far = losses > ends[-1]
        infinite += float(mass[far].sum()) if above else 0.0
        mass[far] *= not above  # below, they are merged with those of the last cell
        if above:
            losses = np.maximum(losses, ends[0])  # it is rare that this moves something
        else:
            mass[losses < ends[0] - LARGEST] = 0.0
            losses = np.maximum(losses, ends[0] - LARGEST)
        cell = np.clip(np.searchsorted(ends, losses, side="right") - 1, 0, len(ends) - 2)
        excess = -np.expm1(np.minimum(ends[cell] - losses, LARGEST)) * mass  # P - e^l Q, l the lower end
        sums += np.array([np.bincount(cell, part, len(ends) - 1) for part in (mass, excess)])
    mass, excess = sums
    if not above:
        return replace(_one_each(ends[:-1], mass, excess), infinite=infinite, middle=middle)
    up = np.clip(excess / -np.expm1(-np.diff(ends)), 0, mass)
    return Outcomes(ends, np.append(mass - up, 0.0) + np.append(0.0, up), infinite, middle)


def _coarsely(first: Outcomes, second: Outcomes, side: int) -> Outcomes:
    """Returns roughly the outcomes of a product, from groups of outcomes with their largest or smallest losses."""
    parts = []
    for one in (first, second):
        losses, mass = one.losses[::side], one.mass[::side]
        starts = np.arange(0, len(losses), max(1, len(losses) // COARSE))
        parts.append((losses[np.append(starts[1:], len(losses)) - 1], np.add.reduceat(mass, starts)))
    (losses, mass), (other_losses, other_mass) = parts
    sums = (losses[:, None] + other_losses).ravel()
    order = np.argsort(sums)
    return Outcomes(sums[order], np.outer(mass, other_mass).ravel()[order])


def _extreme(found: Outcomes, negligible: float, side: int) -> float:
    """Returns a loss beyond which, upwards or downwards, there is at most that mass."""
    last = int(np.searchsorted(np.cumsum(found.mass[::-side]), negligible))
    return float(found.losses[::-side][min(last, len(found.losses) - 1)])


def power(one: Outcomes, count: int, grid: Grid, *, above: bool) -> Outcomes:
    """Returns the outcomes of ``count`` equal releases together."""
    found, times, left = None, 1, count
    while True:
        if left % 2:
            found = one if found is None else product(found, one, grid, above=above)
        left //= 2
        if not left:
            assert found is not None
            return found
        times *= 2
        of_part = grid._replace(negligible=grid.negligible * times / count)  # what is left out is multiplied, too
        one = product(one, one, of_part, above=above)
