# SPDX-License-Identifier: Apache-2.0
"""Bounds heavy-tailed losses: roughly, by one large loss or none; then on a lattice that is truncated above ε.

Rough bounds (`HeavyTailCurve`), for an ε far beyond what the other engines carry:

- above: ``δ(ε) <= P(some loss > b) + exp(Σ log E_P[e^(c l); l <= b] + H(c) - c ε)`` for every cut b and every c > 0,
  with ``(1 - e^-x)+ <= e^(H(c) + c x)``;
- below: ``δ(ε) >= P(some loss > m) (1 - e^(ε - m - rest))`` for every m, because all other losses together are at
  least ``rest``, the sum of their smallest values.

A node at a cut counts as a loss up to the cut.

Truncated lattice (`TruncatedLatticeCurve`): a loss l far above ε counts the same whether it is large or infinite, as
``1 - e^(ε - l)`` is 1. The rough bounds on ε determine where the lattice may end; larger losses count as infinite. In
the other direction they hardly ever occur.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..bracket import Array, Bracket, inner, ordered
from ..pairs.base import DiscretizablePair, DominatingPair
from ..pairs.mixture import SubsampledMixturePair
from .curve import Curve, SimpleCurve, Unresolved, bisect, trivial_delta
from .fft import LatticeCurve, LatticeEngine

Steps = Sequence[tuple[DominatingPair, int]]

EXPONENTS = np.geomspace(0.05, 60, 40)  # candidates for c ε
SMALLEST, LARGEST = 1e-6, 1e30  # range in which ε is searched
MARGIN = 20.0  # how far above ε the lattice ends: sizes of larger losses change their share in δ by e^-20
ROUGH_SUFFICES = 1e5  # beyond this ε, 30 % accuracy suffices
END_SHARE = 1e-6  # share of δ that may come from losses beyond the lattice's end
POINTS, COARSER = 2**12, 4.0  # lattice points up to ε that suffice, unless the spacing becomes wider by this factor


class HeavyTailCurve(SimpleCurve):
    """The remove curve of steps with bounded gains, good to some ten percent of ε where single losses decide.

    Raises:
        Unresolved: now, if some pair has no nodes or no smallest loss.
    """

    def __init__(self, steps: Steps):
        self._nodes: list[tuple[int, Array, Array]] = []
        self.rest = 0.0  # the sum of all smallest losses
        for pair, times in steps:
            if not isinstance(pair, DiscretizablePair) or pair.smallest == -np.inf:
                raise Unresolved
            nodes = pair.nodes(pair.coarsest_step)
            if nodes is None:
                raise Unresolved
            self._nodes.append((times, nodes.losses, nodes.log_mass))
            self.rest += times * pair.smallest
        self._cuts = np.unique(np.concatenate([losses[losses > 1e-3] for _, losses, _ in self._nodes]))
        if not len(self._cuts):
            raise Unresolved

    def delta(self, epsilon: float) -> Bracket[float]:
        high = self._delta_high(epsilon) if epsilon >= SMALLEST else 1.0
        gain = -np.expm1(self._log_none_beyond())
        share = -np.expm1(np.minimum(epsilon - self._cuts - self.rest, 0.0))
        return ordered(max(float((gain * share).max()), trivial_delta(epsilon)), high)

    def epsilon(self, delta: float) -> Bracket[float]:
        low = self._crossing(lambda epsilon: self.delta(epsilon).low <= delta)[0]
        return Bracket(low, max(self.epsilon_high(delta), low))

    def epsilon_high(self, delta: float) -> float:
        return self._crossing(lambda epsilon: self._delta_high(epsilon) <= delta)[1]

    def _log_none_beyond(self) -> Array:
        """Returns ``Σ times * log P(l <= cut)`` for each cut."""
        total = np.zeros(len(self._cuts))
        for times, losses, log_mass in self._nodes:
            beyond = np.append(np.cumsum(np.exp(log_mass[::-1]))[::-1], 0.0)
            first = np.searchsorted(losses, self._cuts, side="right")
            total += times * np.log1p(-np.minimum(beyond[first], 1 - 1e-16))
        return total

    def _delta_high(self, epsilon: float) -> float:
        """Returns the upper bound on δ(ε)."""
        c = EXPONENTS / max(epsilon, SMALLEST)
        exponent = np.zeros((len(c), len(self._cuts)))
        for times, losses, log_mass in self._nodes:
            last = np.searchsorted(losses, self._cuts, side="right") - 1  # below all losses any bound is valid
            with np.errstate(over="ignore"):  # an infinite sum bounds nothing, but is valid
                partial = np.cumsum(np.exp(log_mass + c[:, None] * losses), axis=1)
            exponent += times * np.log(np.maximum(partial[:, last], 1e-300))
        exponent += (c * np.log(c) - (1 + c) * np.log1p(c) - c * epsilon)[:, None]
        rare = -np.expm1(self._log_none_beyond())
        return min(float((np.exp(np.minimum(exponent, 0.0)) + rare).min()), 1.0)

    @staticmethod
    def _crossing(holds: Callable[[float], bool]) -> tuple[float, float]:
        """Returns an ε at which a condition fails and a larger one at which it holds, to 1e-4."""
        if holds(SMALLEST):
            return 0.0, SMALLEST
        high = 0.5
        while not holds(high):
            high *= 4
            if high > LARGEST:
                return high, np.inf
        return bisect(holds, high / 4 if high > 0.5 else SMALLEST, high, 1e-4)


class TruncatedLatticeCurve(SimpleCurve):
    """The remove curve of steps of which some are heavy-tailed, on a lattice truncated for each question.

    Args:
        steps: pairs and how often each happened.
        raised: adds what is known otherwise from below to a lattice's curve.

    Raises:
        Unresolved: now or when asked, if no lattice is fine enough.
    """

    def __init__(self, steps: Steps, raised: Callable[[Curve], Curve]):
        self._steps, self._rough, self._raised = steps, HeavyTailCurve(steps), raised
        self._lattices: dict[tuple[float, float], Curve] = {}

    def delta(self, epsilon: float) -> Bracket[float]:
        rough = self._rough.delta(epsilon)
        return inner(rough, self._lattice(max(epsilon, 0.0), rough.low).delta(epsilon))

    def epsilon(self, delta: float) -> Bracket[float]:
        rough = self._rough.epsilon(delta)
        if rough.high > ROUGH_SUFFICES:
            return rough
        return inner(rough, self._lattice(rough.high, delta).epsilon(delta))

    def epsilon_high(self, delta: float) -> float:
        rough = self._rough.epsilon_high(delta)
        return rough if rough > ROUGH_SUFFICES else min(rough, self._lattice(rough, delta).epsilon_high(delta))

    def _lattice(self, epsilon: float, delta: float) -> Curve:
        """Returns the curve on a lattice that ends where a single loss decides, or where losses are rare enough.

        Neighboring questions share a lattice: ends are rounded up by a quarter at most, rarities down by four digits.
        """
        sampled = sum(
            times * pair.probability for pair, times in self._steps if isinstance(pair, SubsampledMixturePair)
        )
        end = 1.25 ** float(np.ceil(np.log(epsilon - self._rough.rest + MARGIN) / np.log(1.25)))
        rare = 1e4 ** float(np.floor(np.log(max(END_SHARE * delta / sampled, 1e-24)) / np.log(1e4)))
        if (end, rare) not in self._lattices:
            steps = _truncated(self._steps, end, rare)
            finest = LatticeEngine(steps).spacing
            suffices = float(2.0 ** np.floor(np.log2(max(epsilon, finest) / POINTS)))
            spacing = max(finest, min(suffices, COARSER * finest))
            self._lattices[end, rare] = self._raised(LatticeCurve(steps, spacing, swapped=False))
        return self._lattices[end, rare]


def add_curve(steps: Steps) -> Curve:
    """Returns the add curve of such steps: Q has hardly any mass where the losses of the remove direction are large."""
    return LatticeEngine(_truncated(steps, 2 * MARGIN, 0.0)).curve(swapped=True)


def _truncated(steps: Steps, end: float, rare: float) -> Steps:
    """Counts losses above ``end``, or as rare as ``rare`` in a sampled step, as infinite.

    Steps on whole batches stay as they are: their tails are as heavy in either direction.
    """
    return [
        (replace(pair, largest=min(end - float(np.log(pair.probability)), pair.quantile(rare))), times)
        if isinstance(pair, SubsampledMixturePair) and pair.edge
        else (pair, times)
        for pair, times in steps
    ]
