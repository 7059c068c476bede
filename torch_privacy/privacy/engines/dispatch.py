# SPDX-License-Identifier: Apache-2.0
"""Chooses the engine that composes the steps of a run: closed form, contour, lattice, or bounds from the parts.

The first of these that can answer does:

1. a closed form: a single step, or full-batch Gaussians only;
2. the contour (`contour`): exact to about 12 digits in a millisecond, for many steps of smooth pairs;
3. the lattice (`lattice`, `fft`): for few steps and for pairs without a smooth density; truncated where losses are
   heavy-tailed (`heavy_tail`);
4. for Gaussian steps, a single step that dominates all (`dominating`);
5. the sum of what the parts cost one by one (`combine.SumOfParts`).

Where the bracket of 3. to 5. is wide, products of merged outcomes narrow it (`merged`). Where
δ is tiny, moments bound Gaussian steps from above (`log_moments`).
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from ..bracket import Array
from ..pairs.base import DiscretizablePair, DominatingPair, PairBounds
from ..pairs.gaussian import LARGEST_SHIFT, SubsampledGaussianPair
from ..pairs.group import GroupPair
from . import contour
from .adaptive import MOST_RELEASES, SMALLEST_DELTA, AdaptiveCurve
from .combine import (
    BoundedCurve,
    CappedCurve,
    Envelope,
    FallbackChain,
    FiniteCurve,
    RaisedLowerBound,
    StepwiseBounds,
    SumOfParts,
)
from .curve import ClosedFormCurve, Curve, NoPromise, NoRelease
from .fft import LatticeEngine
from .heavy_tail import HeavyTailCurve, TruncatedLatticeCurve, add_curve
from .log_moments import BoundedByMoments
from .merged import MergedEngine, SharpenedCurve

Steps = Sequence[tuple[DominatingPair, int]]
METHODS = ("auto", "contour", "lattice")
MOST_DISTINCT = 1000  # different Gaussian steps that are composed one by one
MOST_MERGED = 16  # different pairs that are composed by merged outcomes
FURTHEST = 200.0  # ε for which choices among a family are not looked at
FEW_PARTS = 3  # that bound the others from below where the engines' own bound is trivial


def curves(steps: Sequence[tuple[DominatingPair | PairBounds, int]], method: str = "auto") -> tuple[Curve, ...]:
    """Returns the remove and the add curve of all steps together; a single one where both are the same."""
    if not steps:
        return (NoRelease(),)
    if not any(isinstance(pair, PairBounds) for pair, _ in steps):
        return _curves(steps, method)  # pyright: ignore[reportArgumentType]
    lower = [curve for realizable in _realizable(steps) for curve in _curves(realizable, method)]
    upper = [(pair.upper if isinstance(pair, PairBounds) else pair, count) for pair, count in steps]
    known = [(pair, count) for pair, count in upper if pair is not None]
    if len(known) < len(upper):
        return (Envelope([NoPromise()], lower),)
    return (Envelope([_adaptive(curve, steps, method) for curve in _curves(known, method)], lower),)


def _adaptive(curve: Curve, steps: Sequence[tuple[DominatingPair | PairBounds, int]], method: str) -> Curve:
    """Returns an upper curve, cut at what adaptive choices from a family of pairs cost where all steps have one."""
    (pair, count), *others = steps
    if others or method != "auto" or not isinstance(pair, PairBounds) or not pair.family:
        return curve
    if not 1 < count <= MOST_RELEASES or curve.epsilon_high(SMALLEST_DELTA) > FURTHEST:
        return curve
    return CappedCurve(curve, AdaptiveCurve(pair.family, count, curve))


def _realizable(steps: Sequence[tuple[DominatingPair | PairBounds, int]]) -> list[Steps]:
    """Returns lists of steps that the true ones dominate, one for each lower bound; steps without any are left out."""
    options = [(pair.lower if isinstance(pair, PairBounds) else (pair,), count) for pair, count in steps]
    options = [(pairs, count) for pairs, count in options if pairs]
    variants = max((len(pairs) for pairs, _ in options), default=0)
    return [[(pairs[i % len(pairs)], count) for pairs, count in options] for i in range(variants)]


def _curves(steps: Steps, method: str) -> tuple[Curve, ...]:
    """Returns the same curves for steps with exact pairs only."""
    revealing = next((pair for pair, _ in steps if pair.extremes(swapped=False).infinite >= 1), None)
    if revealing is not None and sum(count for _, count in steps) > 1:  # without finite losses there is no lattice
        return (Envelope([NoPromise()], [ClosedFormCurve(revealing, swapped=False)]),)
    swaps = (False,) if all(pair.symmetric for pair, _ in steps) else (False, True)
    if len(steps) > MOST_DISTINCT and (grouped := grouped_gaussians(steps, MOST_DISTINCT)):
        enclosed = zip(*(_by_engines(side, swaps, method) for side in grouped), strict=True)
        engines: tuple[Curve, ...] = tuple(Envelope([above], [below]) for above, below in enclosed)
    else:
        engines = _by_engines(steps, swaps, method)
    gaussian = [(pair, count) for pair, count in steps if isinstance(pair, SubsampledGaussianPair)]
    if method == "auto" and sum(count for _, count in steps) > 1 and len(gaussian) == len(steps) <= MOST_MERGED:
        engines = tuple(BoundedByMoments(curve, gaussian) for curve in engines)
    return tuple(BoundedCurve(curve, steps, swapped=swapped) for curve, swapped in zip(engines, swaps, strict=True))


def _by_engines(steps: Steps, swaps: Sequence[bool], method: str) -> tuple[Curve, ...]:
    """Returns the curve of each direction."""
    gaussian = [(pair, count) for pair, count in steps if isinstance(pair, SubsampledGaussianPair)]
    out_of_reach = any(pair.shift > LARGEST_SHIFT for pair, _ in gaussian)
    if len(gaussian) == len(steps):
        if all(pair.probability == 1 for pair, _ in gaussian):
            return (ClosedFormCurve(dominating(gaussian), swapped=False),)
        caps = {swapped: ClosedFormCurve(dominating(gaussian), swapped=swapped) for swapped in swaps}
        if out_of_reach and sum(count for _, count in steps) > 1:
            return tuple(Envelope([cap]) for cap in caps.values())
    elif out_of_reach and method == "auto":
        others = [(pair, count) for pair, count in steps if not isinstance(pair, SubsampledGaussianPair)]
        parts = [_curves(part, "auto") for part in (gaussian, others)]
        return tuple(SumOfParts(*(part[-1 if swapped else 0] for part in parts)) for swapped in swaps)
    else:
        caps = {}
    if method == "auto" and sum(count for _, count in steps) == 1:
        return tuple(ClosedFormCurve(steps[0][0], swapped=swapped) for swapped in swaps)
    engine = LatticeEngine(steps)
    curves = {swapped: _curve(steps, engine, swapped, caps.get(swapped), method) for swapped in swaps}
    if method != "auto":
        return tuple(curves.values())
    return tuple(
        FallbackChain([partial(contour.curve, steps, swapped=swapped), partial(_sharpened, curve, steps, swapped)])
        for swapped, curve in curves.items()
    )


def _sharpened(curve: Curve, steps: Steps, swapped: bool) -> Curve:
    """Returns the curve, which merged outcomes narrow where it is wide."""
    if all(isinstance(pair, DiscretizablePair) for pair, _ in steps) and len(steps) <= MOST_MERGED:
        return SharpenedCurve(curve, partial(MergedEngine, steps, swapped=swapped))
    return curve


def _curve(steps: Steps, engine: LatticeEngine, swapped: bool, cap: Curve | None, method: str) -> Curve:
    """Returns one direction's curve; ``cap`` is a curve that dominates it, if one is known."""

    def on_lattice() -> Curve:
        return engine.curve(swapped=swapped)

    def capped() -> Curve:
        return on_lattice() if cap is None else CappedCurve(on_lattice(), cap)

    def on_contour() -> Curve:
        return contour.curve(steps, swapped=swapped)

    if method != "auto":
        return FallbackChain([on_contour if method == "contour" else capped])

    def in_parts() -> Curve:
        return _in_parts(steps, swapped)

    def some_parts() -> list[Curve]:
        return [_curves(part, "auto")[-1 if swapped else 0] for part in _parts_below(steps)]

    def raised(curve: Curve) -> Curve:
        return RaisedLowerBound(curve, some_parts) if len(steps) > 1 else curve

    def finite(curve: Curve) -> Curve:
        dominating = [(pair.dominating() if isinstance(pair, GroupPair) else pair, count) for pair, count in steps]
        if dominating == list(steps):
            return curve
        return FiniteCurve(curve, lambda: _by_engines(dominating, (swapped,), method)[0])

    heavy = any(pair.heavy for pair, _ in steps if isinstance(pair, DiscretizablePair))
    truncated = [lambda: add_curve(steps) if swapped else TruncatedLatticeCurve(steps, raised)] if heavy else []
    rough = [lambda: HeavyTailCurve(steps)] if heavy and not swapped else []
    one_step = [lambda: Envelope([cap])] if cap is not None and len(steps) == 1 else []
    return FallbackChain([*truncated, lambda: finite(raised(capped())), *rough, *one_step, in_parts])


def _in_parts(steps: Steps, swapped: bool) -> Curve:
    """Returns bounds from two parts, one of them the pair with the least variance; from equal steps one by one."""
    if len(steps) == 1:
        return StepwiseBounds(*steps[0], swapped=swapped)
    return SumOfParts(*(_curves(part, "auto")[-1 if swapped else 0] for part in _two_parts(steps)))


def _two_parts(steps: Steps) -> tuple[Steps, Steps]:
    """Returns all steps but the pair with the least variance, and that pair."""
    moments = [times * pair.second_moment() for pair, times in steps]
    least = moments.index(min(moments))
    return [*steps[:least], *steps[least + 1 :]], [steps[least]]


def _parts_below(steps: Steps) -> Sequence[Steps]:
    """Returns parts of the steps, for lower bounds: two, or of many different steps the few with the most variance.

    Parts of parts of many steps would be as many as there are steps, each with an engine of its own.
    """
    if len(steps) <= FEW_PARTS:
        return _two_parts(steps)
    by_moment = sorted(steps, key=lambda step: step[1] * step[0].second_moment(), reverse=True)
    return [[step] for step in by_moment[:FEW_PARTS]]


def grouped_gaussians(steps: Steps, most: int) -> tuple[Steps, Steps] | None:
    """Returns steps that dominate these and steps that these dominate, with about ``most`` different Gaussian ones.

    A larger shift dominates, and so does a larger sampling probability. Both are rounded to the ends of equal intervals
    of their logarithms, once up and once down. None if there are not that many Gaussian steps.
    """
    gaussian = [(pair, count) for pair, count in steps if isinstance(pair, SubsampledGaussianPair)]
    if len(gaussian) <= most:
        return None
    others = [(pair, count) for pair, count in steps if not isinstance(pair, SubsampledGaussianPair)]
    values = np.array([(pair.shift, pair.probability) for pair, _ in gaussian])
    counts = [count for _, count in gaussian]
    logs, width = np.log(values), 1e-6

    def cells() -> Array:
        steps_up = np.floor((logs - logs.min(0)) / width)
        return steps_up[:, 0] * (steps_up[:, 1].max() + 1) + steps_up[:, 1]

    while len(np.unique(cells())) > most:
        width *= 1.25
    first, group = np.unique(cells(), return_inverse=True)
    totals = [0] * len(first)
    for index, count in zip(group.tolist(), counts, strict=True):
        totals[index] += count
    sides = []
    for extreme, start in ((np.maximum, 0.0), (np.minimum, np.inf)):
        ends = np.full((len(first), 2), start)
        extreme.at(ends, group, values)
        merged: dict[DominatingPair, int] = {}
        for (shift, probability), total in zip(ends.tolist(), totals, strict=True):
            pair = SubsampledGaussianPair(shift, probability)
            merged[pair] = merged.get(pair, 0) + total
        sides.append([*others, *merged.items()])
    return sides[0], sides[1]


def dominating(steps: Sequence[tuple[SubsampledGaussianPair, int]]) -> SubsampledGaussianPair:
    """Returns one pair that dominates all steps together in both directions; it is exact where q = 1.

    With probability ``Π (1 - q_i)`` no step samples the example and P is Q. Otherwise P is a mixture over the steps
    that do; full-batch Gaussians add up, so each component has a shift of at most ``sqrt(Σ z_i²)``, and the hockey
    stick is convex in P. So one step with that shift, and the probability that any step samples the example, dominates.
    """
    if len(steps) == 1 and steps[0][1] == 1:
        return steps[0][0]
    shift = sum(count * pair.shift**2 for pair, count in steps) ** 0.5
    with np.errstate(divide="ignore"):  # log 0 = -∞ is right for q = 1
        log_unseen = sum(count * np.log1p(-pair.probability) for pair, count in steps)
    return SubsampledGaussianPair(shift, float(-np.expm1(log_unseen)))
