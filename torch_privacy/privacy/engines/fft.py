# SPDX-License-Identifier: Apache-2.0
"""Composes pairs on a lattice with a spacing that is fine enough: the curves of the lattice engine."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from scipy.special import ndtri

from ..bracket import Array, Bracket, inner
from ..pairs.base import DiscretizablePair, DominatingPair
from ..pairs.gaussian import REACH, SubsampledGaussianPair
from ..pairs.subsampled import SubsampledPair
from .curve import Curve, Enough, Unresolved, bisect, crossing, lies_on_one_side
from .lattice import Lattice, optimistic, pessimistic
from .tilted import TiltedComposition, TiltedCompositions, WindowTooLong

POINTS = 2**18  # lattice points that a typical window may take before the spacing is widened
FEW_POINTS, MANY_POINTS = 2**11, 2**14  # points to begin with, and from which on a lattice begins with fewer
MOST_POINTS = 2**20  # lattice points at which refinement ends
NARROWEST, CHEAP_POINTS = 3e-5, 2**16  # the same while a lattice has few points
NARROW_DELTA = 5e-3  # the same for δ, which changes more than ε
NARROW = 7e-4  # width of a bracket, relative, that needs no more points
END_SHARE = 1e-6  # share of δ that may come from losses beyond the lattice's end
MOST_ATOMS, MOST_PARTS = 64, 24  # losses that are tried to be put on one lattice, and parts of the smallest one
ALIGNED = 1e-13  # relative distance from the lattice at which a loss lies on it
COARSEST = 1e4  # largest spacing in standard deviations of a step, which are tiny where sampling is rare
FINEST = 4e-3  # spacing for widely spread losses
Discretize = Callable[[DominatingPair, float], Lattice]
Choice = Callable[[TiltedCompositions], TiltedComposition]


class LatticeCurve(Curve):
    """One direction's curve between a lattice pair that dominates the truth and one that the truth dominates.

    Where a composition does not fit into LONGEST lattice points, the spacing is doubled and the bracket becomes wider.
    """

    def __init__(self, steps: Sequence[tuple[DominatingPair, int]], spacing: float, *, swapped: bool):
        self._steps, self._swapped = steps, swapped
        self._spacing: dict[Discretize, float] = {optimistic: spacing, pessimistic: spacing}
        self._compositions: dict[Discretize, TiltedCompositions] = {}

    def delta(self, epsilon: float) -> Bracket[float]:
        high = self._composed(pessimistic, lambda tilted: tilted.at_epsilon(epsilon)).at_most(epsilon)
        try:
            low = self._tilted_for(epsilon).at_least(epsilon)
        except Unresolved:
            low = 0.0
        return Bracket(low, high)

    def epsilon(self, delta: float) -> Bracket[float]:
        upper = self._composed(pessimistic, lambda tilted: tilted.at_delta(delta))
        high = crossing(lambda epsilon: upper.at_most(epsilon) <= delta).high
        try:
            lower = self._composed(optimistic, lambda tilted: tilted.at_delta(delta))
        except Unresolved:
            return Bracket(0.0, high)
        reach = high
        if np.isinf(high):
            least, reach = crossing(lambda epsilon: lower.at_least(epsilon) <= delta)
            if np.isinf(reach):
                return Bracket(least, high)
        low = _last_above(lower.at_least, delta, reach)
        if low == 0 < reach:  # at the end of the finite losses each ε needs its own tilt
            low = _last_above(lambda epsilon: self._tilted_for(epsilon).at_least(epsilon), delta, reach)
        return Bracket(low, high)

    def epsilon_high(self, delta: float) -> float:
        upper = self._composed(pessimistic, lambda tilted: tilted.at_delta(delta))
        return crossing(lambda epsilon: upper.at_most(epsilon) <= delta).high

    def surely_below(self, epsilon: float, delta: float) -> bool:
        if self._compositions_of(pessimistic).epsilon_bound(delta) <= epsilon:
            return True
        return self._composed(pessimistic, lambda tilted: tilted.at_delta(delta)).at_most(epsilon) <= delta

    def _tilted_for(self, epsilon: float) -> TiltedComposition:
        return self._composed(optimistic, lambda tilted: tilted.at_epsilon(epsilon))

    def _compositions_of(self, discretize: Discretize) -> TiltedCompositions:
        if discretize not in self._compositions:
            terms = [(discretize(pair, self._spacing[discretize]), count) for pair, count in self._steps]
            terms = [(lattice.swapped if self._swapped else lattice, count) for lattice, count in terms]
            self._compositions[discretize] = TiltedCompositions(terms)
        return self._compositions[discretize]

    def _composed(
        self, discretize: Discretize, choose: Callable[[TiltedCompositions], TiltedComposition]
    ) -> TiltedComposition:
        try:
            return choose(self._compositions_of(discretize))
        except WindowTooLong:
            self._spacing[discretize] *= 2  # of this side alone: the other's answers stay as they are
            _check_spacing(self._steps, self._spacing[discretize])
            del self._compositions[discretize]
            return self._composed(discretize, choose)


class RefinedLatticeCurve(Curve):
    """A lattice curve that starts with few lattice points and takes more until the bracket is narrow enough.

    Where sampling is rare, losses differ by orders of magnitude, and so does the spacing that suffices: large losses
    need few points, and more points cost time and rounding errors. For each δ, losses so rare that they matter less
    than `END_SHARE` of it count as infinite: they would take most of the points. All brackets are certain, so their
    intersection is returned.
    """

    def __init__(self, steps: Sequence[tuple[DominatingPair, int]], *, swapped: bool):
        self._steps, self._swapped = steps, swapped
        self._atoms = len(_atoms(steps)) > 0
        self._lattices: dict[tuple[float, float], LatticeCurve] = {}
        self._spacings: dict[float, tuple[float, float, float]] = {}  # by reach; hundreds of questions need them

    def delta(self, epsilon: float) -> Bracket[float]:
        # A curve of δ is asked at hundreds of ε, so it is not refined further.
        narrow = np.inf if self._atoms else NARROW_DELTA
        return self._refined(self._steps, REACH, lambda curve: curve.delta(epsilon), narrow)

    def epsilon(self, delta: float) -> Bracket[float]:
        return self._epsilon(delta, lambda _: False)

    def epsilon_high(self, delta: float) -> float:
        return self.epsilon(delta).high

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self._epsilon(delta, lies_on_one_side(epsilon)).high <= epsilon

    def _epsilon(self, delta: float, enough: Enough) -> Bracket[float]:
        """Returns ε's bracket, refined until it is narrow or enough."""
        sampled = sum(
            count * pair.probability for pair, count in self._steps if isinstance(pair, SubsampledGaussianPair)
        )
        rare = END_SHARE * delta / max(sampled, 1e-300)
        reach = float(np.ceil(4 * -ndtri(min(max(rare, 1e-300), 1e-2))) / 4)  # neighboring questions share lattices
        if reach >= REACH:
            return self._refined(self._steps, REACH, lambda curve: curve.epsilon(delta), enough=enough)
        steps = [
            (replace(pair, reach=reach), count)
            if isinstance(pair, SubsampledGaussianPair) and pair.probability < 1
            else (pair, count)
            for pair, count in self._steps
        ]
        return self._refined(steps, reach, lambda curve: curve.epsilon(delta), enough=enough)

    def _refined(
        self,
        steps: Sequence[tuple[DominatingPair, int]],
        reach: float,
        ask: Callable[[LatticeCurve], Bracket[float]],
        narrow: float = NARROW,
        *,
        enough: Enough = lambda _: False,
    ) -> Bracket[float]:
        if reach not in self._spacings:
            self._spacings[reach] = self._spacings_of(steps)
        span, finest, spacing = self._spacings[reach]
        narrowest = narrow if self._atoms else min(narrow, NARROWEST)
        known = Bracket(0.0, np.inf)
        while True:
            if (reach, spacing) not in self._lattices:
                self._lattices[reach, spacing] = LatticeCurve(steps, spacing, swapped=self._swapped)
            width = known.high - known.low
            known = inner(ask(self._lattices[reach, spacing]), known)
            share = (known.high - known.low) / known.high if 0 < known.high < np.inf else float(known.high > 0)
            worse = known.high - known.low > 0.7 * width and not self._atoms
            is_narrow = share <= narrowest or (share <= narrow and span > CHEAP_POINTS * spacing)
            if is_narrow or spacing <= finest or worse or enough(known):
                return known
            order = 1.0 if self._atoms else 0.5  # the bracket shrinks with the spacing, or with its square
            finer = max(0.7 * (narrowest / share) ** order, 1 / 16) if known.low > 0 else 1 / 8
            spacing = max(spacing / 2.0 ** math.ceil(-math.log2(finer)), finest)

    def _spacings_of(self, steps: Sequence[tuple[DominatingPair, int]]) -> tuple[float, float, float]:
        """Returns the range of losses, the smallest spacing, and the one to begin with."""
        span = _span(steps)
        if self._atoms:
            return span, span / POINTS, aligned_spacing(_atoms(steps), _spacing(steps))
        of_one_step = max(pair.span for pair, _ in steps)
        finest = max(_spacing(steps, MOST_POINTS), float(2.0 ** np.floor(np.log2(of_one_step / POINTS))))
        return span, finest, max(finest, float(2.0 ** np.floor(np.log2(span / FEW_POINTS))))


class LatticeEngine:
    """The lattice engine: composes ``count`` steps of each pair, in either direction."""

    def __init__(self, steps: Sequence[tuple[DominatingPair, int]]):
        self._steps = steps

    @cached_property
    def spacing(self) -> float:
        """The spacing of lattice points for these steps."""
        return _spacing(self._steps)

    def curve(self, *, swapped: bool) -> Curve:
        """Returns the *remove* curve, or the *add* curve if swapped.

        Raises:
            Unresolved: now or when asked, if a lattice fine enough for these pairs would not fit into memory.
        """
        gaussian = all(isinstance(pair, SubsampledGaussianPair) for pair, _ in self._steps)
        if len(_atoms(self._steps)) or (gaussian and _span(self._steps) > MANY_POINTS * self.spacing):
            return RefinedLatticeCurve(self._steps, swapped=swapped)
        return LatticeCurve(self._steps, self.spacing, swapped=swapped)


def _last_above(at_least: Callable[[float], float], delta: float, high: float) -> float:
    """Returns the largest ε where δ(ε) is certainly above delta, searched downwards: errors grow far below the tilt."""
    for distance in (high * 2.0**-halvings for halvings in range(40, -1, -1)):
        if at_least(high - distance) > delta:
            return bisect(lambda epsilon: at_least(epsilon) <= delta, high - distance, high, 1e-13)[0]
    return 0.0


def _deviation(steps: Sequence[tuple[DominatingPair, int]]) -> float:
    """Returns the root mean square loss of one step."""
    return (sum(count * pair.second_moment() for pair, count in steps) / sum(count for _, count in steps)) ** 0.5


def _atoms(steps: Sequence[tuple[DominatingPair, int]]) -> Array:
    """Returns the losses with a mass of all steps."""
    atoms = [pair.atoms for pair, _ in steps if isinstance(pair, DiscretizablePair)]
    return np.unique(np.concatenate(atoms)) if atoms else np.empty(0)


def aligned_spacing(atoms: Array, at_most: float) -> float:
    """Returns a spacing of at most that size with all atoms on the lattice; that size if there is no simple one."""
    sizes = np.abs(atoms)
    sizes = sizes[sizes > 1e-12 * sizes.max(initial=0.0)]
    if not len(sizes) or len(sizes) > MOST_ATOMS:
        return at_most
    for parts in range(1, MOST_PARTS + 1):
        unit = float(sizes.min()) / parts
        multiples = sizes / unit
        if (np.abs(multiples - np.round(multiples)) < ALIGNED * multiples).all():
            return unit / 2.0 ** max(math.ceil(math.log2(unit / at_most)), 0)
    return at_most


def _span(steps: Sequence[tuple[DominatingPair, int]]) -> float:
    """Returns the range of losses that a typical window covers."""
    num_steps = sum(count for _, count in steps)
    return max(pair.span for pair, _ in steps) + 20 * _deviation(steps) * num_steps**0.5


def _spacing(steps: Sequence[tuple[DominatingPair, int]], points: int = POINTS) -> float:
    """Returns a small part of a step's deviation, or more where that takes too many points; a power of 2.

    Powers of 2 let several compositions share lattices.

    Relative to ε the bracket is about ``(spacing / deviation)² sqrt(steps) / 100`` wide, so few steps need fewer
    points: the part is 1/56 from 1000 steps on and grows like their fourth root below. The bracket of
    discrete pairs shrinks more slowly, so they always use 1/80.
    """
    deviation, num_steps = _deviation(steps), sum(count for _, count in steps)
    smooth = all(isinstance(pair, SubsampledPair) for pair, _ in steps)
    parts = 56 * min(num_steps / 1000, 1) ** 0.25 if smooth else 80
    spacing = float(2.0 ** np.floor(np.log2(max(min(deviation / parts, FINEST), _span(steps) / points))))
    _check_spacing(steps, spacing)
    return spacing


def _check_spacing(steps: Sequence[tuple[DominatingPair, int]], spacing: float) -> None:
    if spacing > COARSEST * _deviation(steps):
        raise Unresolved
