# SPDX-License-Identifier: Apache-2.0
"""Provides `Curve`, certified bounds on δ as a function of ε in one direction, and the curves in closed form."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar, final

import numpy as np

from ..bracket import Array, Bracket, ordered
from ..pairs.base import DominatingPair

Value = TypeVar("Value", float, Array, float | Array)
Enough = Callable[[Bracket[float]], bool]  # of a bracket that is refined: it needs no more


class Unresolved(ValueError):
    """Raised by an engine that cannot represent these pairs; `FallbackChain` then asks the next engine."""

    def __init__(self) -> None:
        super().__init__(
            "compose: the engine of this method cannot resolve these releases. Use method='auto', which tries all."
        )


class Curve(ABC):
    """Certified bounds on the hockey stick of one direction. An engine makes curves from the pairs of single steps."""

    @abstractmethod
    def delta(self, epsilon: float) -> Bracket[float]:
        """Returns bounds on δ(ε), for any real ε."""

    @abstractmethod
    def epsilon(self, delta: float) -> Bracket[float]:
        """Returns bounds on the smallest ε >= 0 with δ(ε) <= delta."""

    @abstractmethod
    def epsilon_high(self, delta: float) -> float:
        """Returns exactly ``epsilon(delta).high``, without the work for ``low``."""

    @abstractmethod
    def surely_below(self, epsilon: float, delta: float) -> bool:
        """True only if δ(epsilon) is certainly at most ``delta``; cheaper than `epsilon`. False proves nothing."""


class SimpleCurve(Curve):
    """A curve without a cheaper certificate than δ(ε) itself."""

    @final
    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self.delta(epsilon).high <= delta


class SumCurve(Curve):
    """A curve that adds up bounds on ε, so that ``epsilon_high`` is its cheapest certificate."""

    @abstractmethod
    def epsilon_low(self, delta: float) -> float:
        """Returns a lower bound on ε(delta)."""

    @final
    def epsilon(self, delta: float) -> Bracket[float]:
        high = self.epsilon_high(delta)
        return ordered(self.epsilon_low(delta), high)

    @final
    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self.epsilon_high(delta) <= epsilon


def lies_on_one_side(epsilon: float) -> Enough:
    """Returns whether a bracket answers if ε(δ) is at most this: every narrower one within it answers the same."""
    return lambda known: known.high <= epsilon or known.low > epsilon


def trivial_delta(epsilon: float) -> float:
    """Returns ``max(1 - e^ε, 0)``, the δ that even P = Q has; every δ is at least that."""
    return max(-float(np.expm1(min(epsilon, 0.0))), 0.0)


def bisect(holds: Callable[[float], bool], fails: float, good: float, tolerance: float = 0.0) -> tuple[float, float]:
    """Narrows ``[fails, good]`` (in either order) around the threshold of a monotone condition.

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
    """Brackets the smallest ε >= 0 at which a condition holds: (0, 0) if it holds at 0, (…, ∞) if it never does."""
    if small_enough(0.0):
        return Bracket(0.0, 0.0)
    upper = 1.0
    while not small_enough(upper):
        upper *= 2
        if upper > 1e20:
            return Bracket(upper / 2, np.inf)
    return Bracket(*bisect(small_enough, 0.0, upper, 1e-13))


class NoRelease(SimpleCurve):
    """The curve of no release at all: P = Q."""

    def delta(self, epsilon: float) -> Bracket[float]:
        value = trivial_delta(epsilon)
        return Bracket(value, value)

    def epsilon(self, delta: float) -> Bracket[float]:
        return Bracket(0.0, 0.0)

    def epsilon_high(self, delta: float) -> float:
        return 0.0


class NoPromise(SimpleCurve):
    """The curve of releases of which no bound is known: anything may be revealed."""

    def delta(self, epsilon: float) -> Bracket[float]:
        return Bracket(1.0, 1.0)

    def epsilon(self, delta: float) -> Bracket[float]:
        return Bracket(np.inf, np.inf)

    def epsilon_high(self, delta: float) -> float:
        return np.inf


class ClosedFormCurve(SimpleCurve):
    """The curve of a single pair: its hockey stick is a difference of two tails, the bounds differ by rounding.

    The rounding of each tail is taken as 32 units in the last place times its exponent: an estimate, not a proof.
    """

    def __init__(self, pair: DominatingPair, *, swapped: bool):
        self._pair, self._swapped = pair, swapped

    def delta(self, epsilon: float) -> Bracket[float]:
        gain, loss, exponent = (float(value) for value in self._pair.tails(np.array(epsilon), swapped=self._swapped))
        error = 32 * 2.0**-53 * (1 + abs(exponent)) * (gain + loss)
        return Bracket(max(gain - loss - error, 0.0), min(max(gain - loss, 0.0) + error, 1.0))

    def epsilon(self, delta: float) -> Bracket[float]:
        low = crossing(lambda epsilon: self.delta(epsilon).low <= delta).low
        return Bracket(low, self.epsilon_high(delta))

    def epsilon_high(self, delta: float) -> float:
        return crossing(lambda epsilon: self.delta(epsilon).high <= delta).high
