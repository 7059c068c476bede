# SPDX-License-Identifier: Apache-2.0
"""Which engine answers: closed form, contour, lattice, or a single step that dominates all; and their combination.

In this order, the first that can: a closed form (one step, or full-batch Gaussians only); the contour (`contour`),
exact to about 12 digits in a millisecond; the lattice (`lattice`, `fourier`), where few steps or a law without a smooth
density let the contour converge too slowly, cut off where losses are heavy-tailed (`cut`); for Gaussian steps also a
single step that dominates all (`dominating`); and at last the sum of what the parts cost by themselves (`apart`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ..bracket import Bracket
from ..pairs.base import LARGEST_SHIFT, Continuous, Law, SubsampledNormal
from . import contour
from . import fft as fourier
from .combine import Apart, AtLeastParts, StepByStep
from .curve import Capped, ClosedForm, Curve, Nothing, Unresolved, UpperHalf
from .heavy_tail import JumpCurve
from .truncation import CutCurve, add_curve

Steps = Sequence[tuple[Law, int]]
Answer = TypeVar("Answer")
METHODS = ("auto", "contour", "lattice")


@dataclass(frozen=True)
class Between:
    """An event of which no exact law is known: one that dominates it, and realisable ones that it dominates.

    Args:
        upper: a law at least as easy to tell apart, in both directions.
        lower: laws that some pair of neighboring data sets realises; may be empty.
    """

    upper: Law
    lower: tuple[Law, ...] = ()


class FirstThatCan:
    """Asks one engine, and where that gives up, the next."""

    def __init__(self, make: Sequence[Callable[[], Curve]]):
        self._make, self._made = make, {}

    def _ask(self, question: Callable[[Curve], Answer]) -> Answer:
        for index, make in enumerate(self._make):
            try:
                if index not in self._made:
                    self._made[index] = make()
                return question(self._made[index])
            except Unresolved:
                if index == len(self._make) - 1:
                    raise
        raise AssertionError("no engine at all")

    def delta(self, epsilon: float) -> Bracket[float]:
        return self._ask(lambda curve: curve.delta(epsilon))

    def epsilon(self, delta: float) -> Bracket[float]:
        return self._ask(lambda curve: curve.epsilon(delta))

    def epsilon_high(self, delta: float) -> float:
        return self._ask(lambda curve: curve.epsilon_high(delta))

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return self._ask(lambda curve: curve.surely_below(epsilon, delta))


class Extremes:
    """The upper bounds of some curves, the largest; and the lower bounds of others, the largest."""

    def __init__(self, upper: Sequence[Curve], lower: Sequence[Curve]):
        self._upper, self._lower = upper, lower

    def delta(self, epsilon: float) -> Bracket[float]:
        high = max(curve.delta(epsilon).high for curve in self._upper)
        trivial = max(-float(np.expm1(min(epsilon, 0.0))), 0.0)
        return Bracket(min(max([trivial, *(curve.delta(epsilon).low for curve in self._lower)]), high), high)

    def epsilon(self, delta: float) -> Bracket[float]:
        high = self.epsilon_high(delta)
        return Bracket(min(max([0.0, *(curve.epsilon(delta).low for curve in self._lower)]), high), high)

    def epsilon_high(self, delta: float) -> float:
        return max(curve.epsilon_high(delta) for curve in self._upper)

    def surely_below(self, epsilon: float, delta: float) -> bool:
        return all(curve.surely_below(epsilon, delta) for curve in self._upper)


def curves(steps: Sequence[tuple[Law | Between, int]], method: str = "auto") -> tuple[Curve, ...]:
    """The remove and the add curve of all steps together; a single one where both are the same."""
    if not steps:
        return (Nothing(),)
    if not any(isinstance(law, Between) for law, _ in steps):
        return _curves(steps, method)  # pyright: ignore[reportArgumentType]
    upper = [(law.upper if isinstance(law, Between) else law, count) for law, count in steps]
    lower = [curve for some in _realisable(steps) for curve in _curves(some, method)]
    return (Extremes(_curves(upper, method), lower),)


def _realisable(steps: Sequence[tuple[Law | Between, int]]) -> list[Steps]:
    """What is certainly as easy to tell apart, each law's variants taken in turn; a law without any is left out."""
    options = [(law.lower if isinstance(law, Between) else (law,), count) for law, count in steps]
    options = [(laws, count) for laws, count in options if laws]
    variants = max((len(laws) for laws, _ in options), default=0)
    return [[(laws[i % len(laws)], count) for laws, count in options] for i in range(variants)]


def _curves(steps: Steps, method: str) -> tuple[Curve, ...]:
    swaps = (False,) if all(law.symmetric for law, _ in steps) else (False, True)
    normal = [(law, count) for law, count in steps if isinstance(law, SubsampledNormal)]
    if len(normal) == len(steps):
        if all(law.probability == 1 for law, _ in normal):
            return (ClosedForm(dominating(normal), swapped=False),)
        caps = {swapped: ClosedForm(dominating(normal), swapped=swapped) for swapped in swaps}
        if any(law.shift > LARGEST_SHIFT for law, _ in normal) and sum(count for _, count in steps) > 1:
            return tuple(UpperHalf(cap) for cap in caps.values())
    else:
        caps = {}
    if method == "auto" and sum(count for _, count in steps) == 1:
        return tuple(ClosedForm(steps[0][0], swapped=swapped) for swapped in swaps)
    lattices = fourier.Shared(steps)
    return tuple(_curve(steps, lattices, swapped, caps.get(swapped), method) for swapped in swaps)


def _curve(steps: Steps, lattices: fourier.Shared, swapped: bool, cap: Curve | None, method: str) -> Curve:
    def lattice() -> Curve:
        return lattices.curve(swapped=swapped)

    def capped() -> Curve:
        return lattice() if cap is None else Capped(lattice(), cap)

    def on_a_line() -> Curve:
        return contour.curve(steps, swapped=swapped)

    if method != "auto":
        return FirstThatCan([on_a_line if method == "contour" else capped])

    def apart() -> Curve:
        return _apart(steps, swapped)

    def at_least(curve: Curve) -> Curve:
        return AtLeastParts(curve, apart) if len(steps) > 1 else curve

    heavy = any(law.heavy for law, _ in steps if isinstance(law, Continuous))
    tails = [lambda: add_curve(steps) if swapped else CutCurve(steps, at_least)] if heavy else []
    jumps = [lambda: JumpCurve(steps)] if heavy and not swapped else []
    cheap = [lambda: UpperHalf(cap)] if cap is not None and len(steps) == 1 else []
    return FirstThatCan([on_a_line, *tails, lambda: at_least(capped()), *jumps, *cheap, apart])


def _apart(steps: Steps, swapped: bool) -> Curve:
    """Without the law that matters least, and that one by itself; equal steps one by one."""
    if len(steps) == 1:
        return StepByStep(*steps[0], swapped=swapped)
    moments = [times * law.second_moment() for law, times in steps]
    least = moments.index(min(moments))
    parts = [*steps[:least], *steps[least + 1 :]], [steps[least]]
    return Apart(*(_curves(part, "auto")[-1 if swapped else 0] for part in parts))


def dominating(steps: Sequence[tuple[SubsampledNormal, int]]) -> SubsampledNormal:
    """One law at least as easy to tell apart, in both directions, as all steps together; equal to it where q = 1.

    With probability ``Π (1 - q_i)`` no step sees the example and P is Q. Otherwise P is a mixture over the steps that
    do; full-batch Gaussians add up, so each part has a shift of at most ``sqrt(Σ z_i²)``, and the hockey stick is
    convex in P. So one step with that shift, and the probability that any step sees the example, dominates.
    """
    if len(steps) == 1 and steps[0][1] == 1:
        return steps[0][0]
    shift = sum(count * law.shift**2 for law, count in steps) ** 0.5
    with np.errstate(divide="ignore"):  # log 0 = -∞ is right for q = 1
        log_unseen = sum(count * np.log1p(-law.probability) for law, count in steps)
    return SubsampledNormal(shift, float(-np.expm1(log_unseen)))
