# SPDX-License-Identifier: Apache-2.0
"""Heavy-tailed losses on a lattice that ends a little above the ε in question.

A loss far above ε counts the same whether it is large or infinite: ``1 - e^(ε - l)`` is 1. So rough bounds on ε
(`jumps`) say where the lattice may end, and what lies beyond is perfectly telling. In the other direction it hardly
ever happens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..bracket import Bracket, inner
from ..pairs.base import Law
from ..pairs.mixture import SubsampledMixture
from .curve import Curve
from .fft import LatticeCurve, Shared
from .heavy_tail import JumpCurve

Steps = Sequence[tuple[Law, int]]

MARGIN = 20.0  # e^-20 of the largest losses' share in δ is what their size may still matter
HOPELESS = 1e5  # ε from which on a third more or less is nobody's concern
SMALL = 1e-6  # share of δ that may come from the lattice's end
POINTS, COARSER = 2**12, 4.0  # lattice points up to ε that are enough, unless the spacing gets so much wider


class CutCurve:
    """The remove curve of steps some of which are heavy-tailed, on a lattice cut for each question.

    Args:
        steps: the steps.
        at_least: adds what else is known from below to a lattice's curve.

    Raises:
        Unresolved: at once or when asked, if no lattice is fine enough.
    """

    def __init__(self, steps: Steps, at_least: Callable[[Curve], Curve]):
        self._steps, self._rough, self._at_least = steps, JumpCurve(steps), at_least
        self._lattices: dict[tuple[float, float], Curve] = {}

    def delta(self, epsilon: float) -> Bracket[float]:
        rough = self._rough.delta(epsilon)
        return inner(rough, self._lattice(max(epsilon, 0.0), rough.low).delta(epsilon))

    def epsilon(self, delta: float) -> Bracket[float]:
        rough = self._rough.epsilon(delta)
        if rough.high > HOPELESS:
            return rough
        return inner(rough, self._lattice(rough.high, delta).epsilon(delta))

    def epsilon_high(self, delta: float) -> float:
        rough = self._rough.epsilon_high(delta)
        return rough if rough > HOPELESS else min(rough, self._lattice(rough, delta).epsilon_high(delta))

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self.delta(epsilon).high <= delta

    def _lattice(self, epsilon: float, delta: float) -> Curve:
        """The steps on a lattice that ends where a single loss decides, whatever the others are, or is as rare.

        Neighboring questions share one: ends are rounded up by a quarter at most, rarities down by four digits.
        """
        sampled = sum(times * law.probability for law, times in self._steps if isinstance(law, SubsampledMixture))
        end = 1.25 ** float(np.ceil(np.log(epsilon - self._rough.rest + MARGIN) / np.log(1.25)))
        rare = 1e4 ** float(np.floor(np.log(max(SMALL * delta / sampled, 1e-24)) / np.log(1e4)))
        if (end, rare) not in self._lattices:
            steps = _cut(self._steps, end, rare)
            finest = Shared(steps).spacing
            enough = float(2.0 ** np.floor(np.log2(max(epsilon, finest) / POINTS)))
            spacing = max(finest, min(enough, COARSER * finest))
            self._lattices[end, rare] = self._at_least(LatticeCurve(steps, spacing, swapped=False))
        return self._lattices[end, rare]


def add_curve(steps: Steps) -> Curve:
    """The add curve of such steps: where the remove direction's losses are large, the other law has hardly any mass."""
    return Shared(_cut(steps, 2 * MARGIN, 0.0)).curve(swapped=True)


def _cut(steps: Steps, end: float, rare: float) -> Steps:
    """The same with losses above ``end``, or as rare as that in a sampled step, counted as infinite.

    Steps on whole batches stay: their tails are as heavy in either direction.
    """
    return [
        (replace(law, largest=min(end - float(np.log(law.probability)), law.quantile(rare))), times)
        if isinstance(law, SubsampledMixture) and law.heavy and law.edge
        else (law, times)
        for law, times in steps
    ]
