# SPDX-License-Identifier: Apache-2.0
"""Composes steps on merged outcomes, and sharpens brackets that a lattice left wide."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial, reduce

import numpy as np

from ..bracket import Bracket, inner, ordered
from ..pairs.base import UNIT, DiscretizablePair, DominatingPair
from .curve import Curve, Enough, Unresolved, crossing, lies_on_one_side, trivial_delta
from .outcomes import NEGLIGIBLE, SHARE, Grid, Outcomes, one_step, power, product
from .tilt import tilt_entropy

WIDEST, NARROWEST = 0.04, 0.007  # cells, relative to the distance from the mean
NARROW, SMALL = 7e-4, 1e-3  # width of a bracket of ε that suffices: relative, of at least a small ε
NARROW_DELTA = 5e-3  # the same for δ, which changes more than ε
MANY = 1000  # steps from which large losses are composed apart
RARE = 0.1  # how many large losses are expected in all steps of a kind
TILTS = 4  # rounds in which the tilt and the rarity of what it reaches are found
LOSS_ROUNDING = 512 * UNIT  # error of losses, relative
MASS_ROUNDING = 64 * UNIT  # error of each mass and of each product, relative


class MergedEngine:
    """Composes steps on merged outcomes, in one direction.

    Args:
        steps: the pairs, and how often each happened.
        swapped: True for the add direction.
    """

    def __init__(self, steps: Sequence[tuple[DominatingPair, int]], *, swapped: bool):
        self._swapped = swapped
        self._steps = [(pair, count) for pair, count in steps if isinstance(pair, DiscretizablePair)]
        self._composed: dict[tuple[Grid, bool], Outcomes] = {}
        self._sizes, self._relative = 0.0, 1024 * UNIT  # of losses and of masses, for their rounding
        for pair, count in self._steps:
            with np.errstate(over="ignore", invalid="ignore"):
                center, scale = one_step(pair, count, Grid(WIDEST, 0.0), above=False, swapped=swapped).spread()
            self._sizes += count * (abs(center) + scale)
            self._relative += count * (MASS_ROUNDING + pair.node_rounding)

    def outcomes(self, grid: Grid, *, above: bool) -> Outcomes:
        """Returns outcomes that dominate all steps together, or that they dominate."""
        if (grid, above) not in self._composed:
            parts: list[Outcomes] = []
            for pair, count in self._steps:
                one = one_step(pair, count, grid, above=above, swapped=self._swapped)
                divided = one.divided(RARE / count) if above and count >= MANY else (one,)
                parts += [power(part, count, grid, above=above) for part in divided]
            self._composed[grid, above] = reduce(partial(product, grid=grid, above=above), parts)
        return self._composed[grid, above]

    def tilt(self, delta: float) -> float:
        """Returns roughly the t of the best Chernoff bound on ε(δ)."""
        t, best = 2.0 ** np.arange(-30, 20, 0.5), 0.0
        grid = Grid(WIDEST, SHARE * delta)
        ones = [(one_step(*step, grid, above=False, swapped=self._swapped), step[1]) for step in self._steps]
        for _ in range(TILTS):
            total = tilt_entropy(t) - math.log(delta)
            for one, count in ones:
                losses = one.counted((1 + best) * delta / count)
                with np.errstate(divide="ignore"):  # cells without mass
                    total += count * np.logaddexp.reduce(np.log(one.mass) + t[:, None] * losses, axis=1)
            best = float(t[(total / t).argmin()])
        return best

    def delta(self, epsilon: float, grid: Grid, *, above: bool) -> float:
        """Returns an upper bound on δ(ε) from outcomes above, or a lower one from those below."""
        side = 1 if above else -1
        moved = epsilon - side * LOSS_ROUNDING * (self._sizes + abs(epsilon))
        found = self.outcomes(grid, above=above).delta(moved) * (1 + side * self._relative)
        return min(found, 1.0) if above else max(found, trivial_delta(epsilon))


class SharpenedCurve(Curve):
    """An engine's curve; where its bracket is wide, merged outcomes narrow it.

    Args:
        engine: the engine's curve.
        merged: function that makes the other engine; called where it is needed.
    """

    def __init__(self, engine: Curve, merged: Callable[[], MergedEngine]):
        self._engine, self._merged = engine, cache(merged)

    def delta(self, epsilon: float) -> Bracket[float]:
        known = self._engine.delta(epsilon)
        if known.high - known.low <= NARROW_DELTA * known.high:
            return known
        try:
            sides = [self._delta(epsilon, Grid(WIDEST, NEGLIGIBLE), above) for above in (False, True)]
        except Unresolved:
            return known
        return inner(known, ordered(*sides))

    def epsilon(self, delta: float) -> Bracket[float]:
        return self._epsilon(delta, lambda _: False)

    def _epsilon(self, delta: float, enough: Enough) -> Bracket[float]:
        """Returns ε's bracket, narrowed unless it is narrow or enough."""
        known = self._engine.epsilon(delta)
        if delta == 0 or _share(known) <= NARROW or enough(known):
            return known
        try:
            return self._narrowed(known, delta, enough)
        except Unresolved:
            return known

    def _narrowed(self, known: Bracket[float], delta: float, enough: Enough) -> Bracket[float]:
        rounded = 100.0 ** math.floor(math.log(delta, 100))  # neighboring questions share grids
        negligible = SHARE * rounded
        tilt, width = self._merged().tilt(30 * rounded), WIDEST
        while width:
            low, high = (self._crossing(delta, Grid(width, negligible, tilt), above) for above in (False, True))
            known, share = inner(known, ordered(low, high)), _share(Bracket(low, high))
            if _share(known) <= NARROW or enough(known):
                break
            finer = width * 2.0 ** (min(math.floor(math.log2(NARROW / share)), -1) / 2)
            width = max(finer, NARROWEST) if width > NARROWEST else 0.0
        return known

    def _crossing(self, delta: float, grid: Grid, above: bool) -> float:
        return crossing(lambda epsilon: self._delta(epsilon, grid, above) <= delta)[above]

    def epsilon_high(self, delta: float) -> float:
        return self.epsilon(delta).high

    def surely_below(self, epsilon: float, delta: float) -> bool:
        if self._engine.surely_below(epsilon, delta):
            return True
        return self._epsilon(delta, lies_on_one_side(epsilon)).high <= epsilon

    def _delta(self, epsilon: float, grid: Grid, above: bool) -> float:
        return self._merged().delta(epsilon, grid, above=above)


def _share(known: Bracket[float]) -> float:
    """Returns the width of a bracket of ε relative to its upper bound, or to a small one."""
    low, high = known
    return (high - low) / max(high, SMALL) if np.isfinite(high) else float(np.isfinite(low))
