# SPDX-License-Identifier: Apache-2.0
"""Combines curves: the first engine that answers, the larger of several bounds, and bounds from the parts of a run.

Parts that no engine composes together are bounded one by one, in each direction and at any real s and t:

- above: ``δ(s + t) <= δ_1(s) + δ_2(t)`` for two parts, and ``δ(T s) <= 1 - (1 - δ_step(s))^T`` for T equal steps;
- below: δ is at least that of any part, because an attacker who sees all releases sees each part.

Source: Dwork & Roth (2014), Theorem 3.16.
"""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from functools import cache
from typing import TypeVar

import numpy as np

from ..bracket import Bracket, inner, ordered
from ..pairs.base import UNIT, DominatingPair
from .curve import ClosedFormCurve, Curve, SumCurve, Unresolved, trivial_delta

SECOND_SHARES = (1e-6, 1e-3, 0.03, 0.5, 0.97, 0.999, 1 - 1e-6)  # shares of δ that the second part may take
SMALLEST_POSITIVE = 5e-324
EXACT_DIGITS, SMALL_MASS = 60, Decimal("1e-20")
Answer = TypeVar("Answer")


class FallbackChain(Curve):
    """Asks one engine, and where that raises `Unresolved`, the next.

    Args:
        engines: functions that make each engine's curve; called when the engine is first asked.
    """

    def __init__(self, engines: Sequence[Callable[[], Curve]]):
        self._engines = engines
        self._curves: dict[int, Curve] = {}

    def _ask(self, question: Callable[[Curve], Answer]) -> Answer:
        for index, make in enumerate(self._engines):
            try:
                if index not in self._curves:
                    self._curves[index] = make()
                return question(self._curves[index])
            except Unresolved:
                if index == len(self._engines) - 1:
                    raise
        raise AssertionError("FallbackChain needs at least one engine")

    def delta(self, epsilon: float) -> Bracket[float]:
        return self._ask(lambda curve: curve.delta(epsilon))

    def epsilon(self, delta: float) -> Bracket[float]:
        return self._ask(lambda curve: curve.epsilon(delta))

    def epsilon_high(self, delta: float) -> float:
        return self._ask(lambda curve: curve.epsilon_high(delta))

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self._ask(lambda curve: curve.surely_below(epsilon, delta))


class Envelope(Curve):
    """The largest upper bound of some curves and the largest lower bound of others; by default the trivial one."""

    def __init__(self, upper: Sequence[Curve], lower: Sequence[Curve] = ()):
        self._upper, self._lower = upper, lower

    def delta(self, epsilon: float) -> Bracket[float]:
        high = max(curve.delta(epsilon).high for curve in self._upper)
        return ordered(max([trivial_delta(epsilon), *(curve.delta(epsilon).low for curve in self._lower)]), high)

    def epsilon(self, delta: float) -> Bracket[float]:
        low = _largest(self._lower, delta, lambda curve: curve.epsilon(delta).low)
        return ordered(low, self.epsilon_high(delta))

    def epsilon_high(self, delta: float) -> float:
        return _largest(self._upper, delta, lambda curve: curve.epsilon_high(delta))

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return all(curve.surely_below(epsilon, delta) for curve in self._upper)


def _largest(curves: Sequence[Curve], delta: float, bound: Callable[[Curve], float]) -> float:
    """Returns the largest bound on ε(δ); of a curve that is surely below those before, it is not computed."""
    largest = 0.0
    for curve in curves:
        if not largest or not curve.surely_below(largest, delta):
            largest = max(largest, bound(curve))
    return largest


class CappedCurve(Curve):
    """An engine's curve, its upper bound cut at a curve that dominates it.

    The dominating curve is cheap and is asked first: where its ε or δ is 0, the engine is not asked.
    """

    def __init__(self, engine: Curve, dominating: Curve):
        self._engine, self._cap = engine, Envelope([dominating])

    def delta(self, epsilon: float) -> Bracket[float]:
        cap = self._cap.delta(epsilon)
        return cap if cap.high <= cap.low else inner(self._engine.delta(epsilon), cap)

    def epsilon(self, delta: float) -> Bracket[float]:
        cap = self._cap.epsilon(delta)
        return cap if cap.high <= cap.low else inner(self._engine.epsilon(delta), cap)

    def epsilon_high(self, delta: float) -> float:
        cap = self._cap.epsilon_high(delta)
        return cap if cap == 0 else min(self._engine.epsilon_high(delta), cap)

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self._cap.surely_below(epsilon, delta) or self._engine.surely_below(epsilon, delta)


class FiniteCurve(Curve):
    """An engine's curve; where its upper bound on ε is infinite, that of a dominating curve takes its place.

    Args:
        engine: the engine's curve.
        dominating: function that makes the dominating curve; called only where it is needed.
    """

    def __init__(self, engine: Curve, dominating: Callable[[], Curve]):
        self._engine, self._dominating = engine, dominating

    def delta(self, epsilon: float) -> Bracket[float]:
        return self._engine.delta(epsilon)

    def epsilon(self, delta: float) -> Bracket[float]:
        low, high = self._engine.epsilon(delta)
        return Bracket(low, high) if np.isfinite(high) else ordered(low, self._dominating().epsilon_high(delta))

    def epsilon_high(self, delta: float) -> float:
        high = self._engine.epsilon_high(delta)
        return high if np.isfinite(high) else self._dominating().epsilon_high(delta)

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self._engine.surely_below(epsilon, delta)


class BoundedCurve(Curve):
    """An engine's curve, exact where the largest loss decides: at δ = 0, and beyond the largest finite loss.

    There δ is exactly the mass of infinite losses. Before, δ is positive: where it is smaller than any number, the
    upper bound is the smallest positive number. At least this δ has an ε of at most the largest finite loss.

    Args:
        engine: the engine's curve.
        steps: the pairs, and how often each happened.
        swapped: True for the add direction.
    """

    def __init__(self, engine: Curve, steps: Sequence[tuple[DominatingPair, int]], *, swapped: bool):
        self._engine = engine
        extremes = [(pair.extremes(swapped=swapped), count) for pair, count in steps]
        self._largest = sum(count * one.largest for one, count in extremes) * (1 + len(extremes) * UNIT)
        error = sum(count * one.error for one, count in extremes)
        self._largest_low = max(self._largest * (1 - (40 + 2 * len(extremes)) * UNIT) - error, 0.0)
        self._infinite = _any_infinite([(one.infinite, count) for one, count in extremes])

    def delta(self, epsilon: float) -> Bracket[float]:
        if epsilon >= self._largest and self._infinite == 0:
            return Bracket(0.0, 0.0)
        low, high = self._engine.delta(epsilon)
        high = max(high, SMALLEST_POSITIVE)
        return ordered(low, min(high, self._infinite) if epsilon >= self._largest else high)

    def epsilon(self, delta: float) -> Bracket[float]:
        if delta == 0:
            low = self._largest_low if self._infinite == 0 else np.inf
            return Bracket(low, self.epsilon_high(delta))
        low, high = self._engine.epsilon(delta)
        return ordered(low, min(high, self._largest) if delta >= self._infinite else high)

    def epsilon_high(self, delta: float) -> float:
        if delta == 0:
            return self._largest if self._infinite == 0 else np.inf
        high = self._engine.epsilon_high(delta)
        return min(high, self._largest) if delta >= self._infinite else high

    def surely_below(self, epsilon: float, delta: float) -> bool:
        if epsilon >= self._largest and delta >= self._infinite:
            return True
        return delta > 0 and self._engine.surely_below(epsilon, delta)


def _any_infinite(masses: Sequence[tuple[float, int]]) -> float:
    """Returns ``1 - Π (1 - mass)^count`` rounded up, exactly: a δ that is asked for may be this very number."""
    masses = [(min(mass, 1.0), count) for mass, count in masses if mass]
    if sum(count for _, count in masses) <= 1:
        return masses[0][0] if masses else 0.0
    with localcontext(prec=EXACT_DIGITS):
        total = sum((count * Decimal(mass) for mass, count in masses), Decimal(0))  # a bound, near the truth if small
        exact = total if total < SMALL_MASS else 1 - math.prod((1 - Decimal(mass)) ** count for mass, count in masses)
        nearest = float(exact)
        return min(nearest if Decimal(nearest) >= exact else math.nextafter(nearest, 1.0), 1.0)


class RaisedLowerBound(Curve):
    """An engine's curve; where its lower bound is trivial, the largest one of some parts takes its place.

    Args:
        engine: the engine's curve.
        parts: function that makes the curves of the parts; called once, where they are needed.
    """

    def __init__(self, engine: Curve, parts: Callable[[], Sequence[Curve]]):
        self._engine, self._parts = engine, cache(parts)

    def delta(self, epsilon: float) -> Bracket[float]:
        return self._raised(self._engine.delta(epsilon), lambda parts: parts.delta(epsilon))

    def epsilon(self, delta: float) -> Bracket[float]:
        return self._raised(self._engine.epsilon(delta), lambda parts: parts.epsilon(delta))

    def epsilon_high(self, delta: float) -> float:
        return self._engine.epsilon_high(delta)

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self._engine.surely_below(epsilon, delta)

    def _raised(self, known: Bracket[float], ask: Callable[[Curve], Bracket[float]]) -> Bracket[float]:
        if known.low > 0 or known.high == 0:
            return known
        return ordered(max(ask(part).low for part in self._parts()), known.high)


class SumOfParts(SumCurve):
    """Bounds on two parts of the releases together, from a curve of each."""

    def __init__(self, first: Curve, second: Curve):
        self._first, self._second = first, second

    def delta(self, epsilon: float) -> Bracket[float]:
        first, second = self._first.delta(epsilon), self._second.delta(epsilon)
        shares = sorted({self._second.epsilon_high(10.0**-digits) for digits in (2, 4, 6, 9, 12, 15)} | {0.0})
        sums = [
            self._first.delta(epsilon - share).high + self._second.delta(share).high
            for share in shares
            if np.isfinite(share)
        ]
        return ordered(max(first.low, second.low), min([1.0, *sums]))

    def epsilon_low(self, delta: float) -> float:
        return max(self._first.epsilon(delta).low, self._second.epsilon(delta).low)

    def epsilon_high(self, delta: float) -> float:
        return min(
            self._first.epsilon_high(delta * (1 - share)) + self._second.epsilon_high(delta * share)
            for share in SECOND_SHARES
        )


class StepwiseBounds(SumCurve):
    """Bounds on equal steps, from the closed form of a single one."""

    def __init__(self, pair: DominatingPair, times: int, *, swapped: bool):
        self._step, self._times = ClosedFormCurve(pair, swapped=swapped), times

    def delta(self, epsilon: float) -> Bracket[float]:
        each = self._step.delta(epsilon / self._times).high
        high = -float(np.expm1(self._times * np.log1p(-each))) if each < 1 else 1.0
        return ordered(self._step.delta(epsilon).low, high)

    def epsilon_low(self, delta: float) -> float:
        return self._step.epsilon(delta).low

    def epsilon_high(self, delta: float) -> float:
        return self._times * self._step.epsilon_high(-float(np.expm1(np.log1p(-delta) / self._times)))
