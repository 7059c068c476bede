# SPDX-License-Identifier: Apache-2.0
"""δ as a function of ε in one direction, with a bound on each side: what every engine hands to `compose`."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from ..bracket import Array, inner
from ..bracket import Bracket as Bracket
from ..pairs.base import Law

Value = TypeVar("Value", float, Array, float | Array)


class Unresolved(ValueError):
    """An engine cannot represent these laws; whoever asks falls back on a bound that needs no engine."""

    def __init__(self) -> None:
        super().__init__(
            "compose: the engine that was asked for cannot resolve these releases. Leave it to method='auto'."
        )


class Curve(Protocol):
    """Certified bounds on one direction's hockey stick. An engine is whatever makes these from one-step laws."""

    def delta(self, epsilon: float) -> Bracket[float]:
        """Bounds on δ(ε), any real ε."""
        ...

    def epsilon(self, delta: float) -> Bracket[float]:
        """Bounds on the smallest ε >= 0 with δ(ε) <= delta."""
        ...

    def epsilon_high(self, delta: float) -> float:
        """``epsilon(delta).high`` exactly, without the work for ``low``."""
        ...

    def surely_below(self, epsilon: float, delta: float) -> bool:
        """Whether δ(epsilon) is certainly at most ``delta``, cheaper than `epsilon`; False is no answer."""
        ...


def bisect(holds: Callable[[float], bool], fails: float, good: float, tolerance: float = 0.0) -> tuple[float, float]:
    """Narrow ``[fails, good]`` (in either order) around the threshold of a monotone condition.

    Returns:
        ``(last point where it failed, last point where it held)``, at most ``tolerance`` times the latter apart, or
        neighbors in floating point.
    """
    while abs(good - fails) > tolerance * abs(good):
        middle = fails + (good - fails) / 2
        if middle in (fails, good):
            break
        if holds(middle):
            good = middle
        else:
            fails = middle
    return fails, good


def crossing(small_enough: Callable[[float], bool]) -> Bracket[float]:
    """Bracket of the smallest ε >= 0 that is large enough for a condition: (0, 0) if 0 is, (…, ∞) if none is."""
    if small_enough(0.0):
        return Bracket(0.0, 0.0)
    upper = 1.0
    while not small_enough(upper):
        upper *= 2
        if upper > 1e20:
            return Bracket(upper / 2, np.inf)
    return Bracket(*bisect(small_enough, 0.0, upper, 1e-13))


class Nothing:
    """Nothing was released: P = Q."""

    def delta(self, epsilon: float) -> Bracket[float]:
        value = max(-float(np.expm1(min(epsilon, 0.0))), 0.0)
        return Bracket(value, value)

    def epsilon(self, delta: float) -> Bracket[float]:
        return Bracket(0.0, 0.0)

    def epsilon_high(self, delta: float) -> float:
        return 0.0

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return epsilon >= 0 or self.delta(epsilon).high <= delta


class UpperHalf:
    """A curve of which only upper bounds are known, from one that dominates it; the lower bounds are trivial."""

    def __init__(self, dominating: Curve):
        self._dominating = dominating

    def delta(self, epsilon: float) -> Bracket:
        return Bracket(max(-float(np.expm1(min(epsilon, 0.0))), 0.0), self._dominating.delta(epsilon).high)

    def epsilon(self, delta: float) -> Bracket:
        return Bracket(0.0, self.epsilon_high(delta))

    def epsilon_high(self, delta: float) -> float:
        return self._dominating.epsilon_high(delta)

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self._dominating.surely_below(epsilon, delta)


class Capped:
    """An engine's curve, its upper bound cut at a curve that dominates it.

    The cap costs next to nothing, so it is asked first: if its ε or δ is 0, the engine is left alone.
    """

    def __init__(self, engine: Curve, dominating: Curve):
        self._engine, self._cap = engine, UpperHalf(dominating)

    def delta(self, epsilon: float) -> Bracket[float]:
        cap = self._cap.delta(epsilon)
        return cap if cap.high <= cap.low else inner(self._engine.delta(epsilon), cap)

    def epsilon(self, delta: float) -> Bracket[float]:
        cap = self._cap.epsilon(delta)
        return cap if cap.high <= cap.low else inner(self._engine.epsilon(delta), cap)

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self._cap.surely_below(epsilon, delta) or self._engine.surely_below(epsilon, delta)

    def epsilon_high(self, delta: float) -> float:
        cap = self._cap.epsilon_high(delta)
        return cap if cap == 0 else min(self._engine.epsilon_high(delta), cap)


class ClosedForm:
    """A single law whose hockey stick is a difference of two tails; the bounds differ by its rounding error.

    The rounding of each tail is taken as 32 units in the last place times its exponent: an estimate, not a proof.
    """

    def __init__(self, law: Law, *, swapped: bool):
        self._law, self._swapped = law, swapped

    def delta(self, epsilon: float) -> Bracket[float]:
        gain, loss, exponent = (float(value) for value in self._law.tails(np.array(epsilon), swapped=self._swapped))
        error = 32 * 2.0**-53 * (1 + abs(exponent)) * (gain + loss)
        return Bracket(max(gain - loss - error, 0.0), min(max(gain - loss, 0.0) + error, 1.0))

    def epsilon(self, delta: float) -> Bracket[float]:
        low = crossing(lambda epsilon: self.delta(epsilon).low <= delta).low
        return Bracket(low, self.epsilon_high(delta))

    def epsilon_high(self, delta: float) -> float:
        return crossing(lambda epsilon: self.delta(epsilon).high <= delta).high

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self.delta(epsilon).high <= delta
