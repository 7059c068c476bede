# SPDX-License-Identifier: Apache-2.0
"""Releases that no engine composes together: bounds from their parts, each by itself.

- Above: ``δ(s + t) <= δ_1(s) + δ_2(t)`` for two parts, and for equal steps ``δ(T s) <= 1 - (1 - δ_step(s))^T``.
- Below: whoever sees everything sees each part, so δ is at least that of any part.

Source: Dwork & Roth (2014), Theorem 3.16; it holds for each direction, at any real s and t.
"""

from collections.abc import Callable

import numpy as np

from ..bracket import Bracket
from ..pairs.base import Law
from .curve import ClosedForm, Curve

SHARES = (1e-6, 1e-3, 0.03, 0.5, 0.97, 0.999, 1 - 1e-6)  # of δ, for the second part


class Apart:
    """Two parts of the releases, of which each has a curve."""

    def __init__(self, first: Curve, second: Curve):
        self._first, self._second = first, second

    def delta(self, epsilon: float) -> Bracket[float]:
        first, second = self._first.delta(epsilon), self._second.delta(epsilon)
        reach = sorted({self._second.epsilon_high(10.0**-digits) for digits in (2, 4, 6, 9, 12, 15)} | {0.0})
        sums = [
            self._first.delta(epsilon - spent).high + self._second.delta(spent).high
            for spent in reach
            if np.isfinite(spent)
        ]
        high = min([1.0, *sums])
        return Bracket(min(max(first.low, second.low), high), high)

    def epsilon(self, delta: float) -> Bracket[float]:
        high = self.epsilon_high(delta)
        return Bracket(min(max(self._first.epsilon(delta).low, self._second.epsilon(delta).low), high), high)

    def epsilon_high(self, delta: float) -> float:
        return min(
            self._first.epsilon_high(delta * (1 - share)) + self._second.epsilon_high(delta * share) for share in SHARES
        )

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self.epsilon_high(delta) <= epsilon


class StepByStep:
    """Equal steps, each by its closed form."""

    def __init__(self, law: Law, times: int, *, swapped: bool):
        self._step, self._times = ClosedForm(law, swapped=swapped), times

    def delta(self, epsilon: float) -> Bracket[float]:
        each = self._step.delta(epsilon / self._times).high
        high = -float(np.expm1(self._times * np.log1p(-each))) if each < 1 else 1.0
        return Bracket(min(self._step.delta(epsilon).low, high), high)

    def epsilon(self, delta: float) -> Bracket[float]:
        high = self.epsilon_high(delta)
        return Bracket(min(self._step.epsilon(delta).low, high), high)

    def epsilon_high(self, delta: float) -> float:
        return self._times * self._step.epsilon_high(-float(np.expm1(np.log1p(-delta) / self._times)))

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self.epsilon_high(delta) <= epsilon


class AtLeastParts:
    """An engine's curve; where it knows no lower bound but the trivial one, that of the parts."""

    def __init__(self, engine: Curve, apart: Callable[[], Curve]):
        self._engine, self._apart = engine, apart

    def delta(self, epsilon: float) -> Bracket[float]:
        return self._raised(self._engine.delta(epsilon), lambda parts: parts.delta(epsilon))

    def epsilon(self, delta: float) -> Bracket[float]:
        return self._raised(self._engine.epsilon(delta), lambda parts: parts.epsilon(delta))

    def epsilon_high(self, delta: float) -> float:
        return self._engine.epsilon_high(delta)

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self._engine.surely_below(epsilon, delta)

    def _raised(self, known: Bracket[float], ask: Callable[[Curve], Bracket[float]]) -> Bracket[float]:
        return (
            known if known.low > 0 or known.high == 0 else Bracket(min(ask(self._apart()).low, known.high), known.high)
        )
