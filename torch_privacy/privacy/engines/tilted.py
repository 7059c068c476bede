# SPDX-License-Identifier: Apache-2.0
"""Composes lattice pairs by FFT under an exponential tilt, with bounds on all that a finite FFT leaves out.

Composition convolves the distributions of the privacy loss: T steps are a T-th power in Fourier space. Rounding (1e-16
of the largest mass) would hide small tails. So the distribution is tilted first, ``g(l) = p(l) e^{s l} / M(s)``,
composed, and untilted by ``A(l) = M(s)^T e^{-s l}``. With s at the saddle point for ε, g is centered on ε, and errors
of g enter ``δ(ε) = Σ_{l > ε} p(l) (1 - e^{ε - l})`` multiplied by ``A(ε)``, which is about the size of δ(ε) itself.

All that is left out is added to the upper bound and subtracted from the lower one. Mass outside the FFT's window is
below TAIL on either side (Chernoff bounds of the tilted distribution); it is missing at the top or wraps around.
Rounding is bounded a priori: that of transforms by `fft_rounding`, that of powers of their coefficients by
`_power`, relative errors of moments and sums by `TiltedComposition`. Three means keep these bounds small:

- the largest mass is not transformed, so that ``φ - 1`` is as exact as the rest of the mass is small;
- losses are counted in lattice points from the loss of the largest mass; their start is kept exactly (`Lattice`);
- errors of masses far above ε count for as little as these masses.

The losses and masses of one step, given by its pair, are trusted to `LOSS_ROUNDING`: an estimate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from ..bracket import Array
from ..pairs.base import UNIT
from .curve import Unresolved
from .lattice import Lattice
from .tilt import tilt_entropy

TAIL = 1e-17  # tilted mass outside the window, on each side
LONGEST = 2**22  # FFT length, beyond which the spacing is doubled
LOSS_ROUNDING = 512 * UNIT  # error of losses: of a floor, and of the cells between heights for any q above 1e-20
INFINITE_ROUNDING = 1e-12  # relative error of the mass of infinite losses
NEAR_EXPONENT = 50.0  # size of an exponent up to which a tilted mass has a relative error of NEAR_ROUNDING
NEAR_ROUNDING = (4 * NEAR_EXPONENT + 24) * UNIT
NEARLY = 3.0  # log of the factor in error by which a tilt may miss the best one
NEGLIGIBLE = -45.0  # log magnitude below which a Fourier coefficient counts as rounding error
LARGEST_LOG = 600.0  # untilted masses above e^600 belong to an ε far below any that is asked for

Terms = Sequence[tuple[Lattice, int]]


class WindowTooLong(Exception):
    """Raised where a composed pair needs more than LONGEST lattice points at this spacing."""


class MomentBounds:
    """Cheap upper bounds on the moments of a lattice distribution, from a few hundred points that dominate it.

    Points in a group move to its two ends, keeping the mean; ``e^{t l}`` is convex, so no moment gets smaller. Groups
    are a twentieth of a standard deviation wide in the middle and grow like the distance from the mean.
    """

    def __init__(self, losses: Array, mass: Array, mean: float, deviation: float):
        spacing = np.ptp(losses[:2])  # 0 where there is one loss alone
        fine = max(deviation / 20, spacing) or 1.0
        reach = max(losses[-1] - mean, mean - losses[0], 2 * fine)
        offsets = fine * np.concatenate([np.arange(20), 20 * np.geomspace(1, max(reach / fine / 20, 1.05), 200)])
        edges = np.unique(np.searchsorted(losses, np.concatenate([mean - offsets, mean + offsets])))
        starts = np.unique(np.concatenate([[0], edges[edges < len(losses)]]))
        low, high = losses[starts], losses[np.concatenate([starts[1:], [len(losses)]]) - 1]
        total = np.add.reduceat(mass, starts)
        first = np.add.reduceat(mass * (losses - mean), starts) - total * (low - mean)
        share = np.where(high > low, first / np.where(high > low, high - low, 1.0), 0.0)
        upper = np.clip(share, 0, total)
        points, weights = np.concatenate([low, high]), np.concatenate([total - upper, upper])
        self.points, self.log_weights = points[weights > 0] - mean, np.log(weights[weights > 0])

    def log_moment(self, t: Array) -> Array:
        """Returns an upper bound on ``log E e^{t (l - mean)}`` for an array of t."""
        exponents = self.log_weights + t[:, None] * self.points
        largest = exponents.max(1)
        return largest + np.log(np.exp(exponents - largest[:, None]).sum(1))


@dataclass(frozen=True, eq=False)
class TiltedLattice:
    """The P-masses of one lattice pair under the tilt s: ``mass * e^{s l} / M(s)``."""

    lattice: Lattice
    s: float

    @cached_property
    def mode(self) -> int:
        """Index of the largest tilted mass; exponents are measured from there, so that they are exact there."""
        if not self.s:
            return int(self.lattice.mass.argmax())
        with np.errstate(divide="ignore"):  # log 0 = -∞ is right
            return int((np.log(self.lattice.mass) + self._steps(0)).argmax())

    def _steps(self, origin: int) -> Array:
        """Returns the exponents ``s h (i - origin)`` of all lattice points, each with two roundings."""
        return (self.s * self.lattice.spacing) * (np.arange(len(self.lattice.mass)) - origin)

    @cached_property
    def _weights(self) -> tuple[Array, float]:
        """Tilted masses relative to that of the mode, and a bound on the rounding of those far from it.

        Nearer ones have a relative error of at most `NEAR_ROUNDING`.
        """
        mass, exponents = self.lattice.mass, self._steps(self.mode)
        largest = mass[self.mode]
        with np.errstate(divide="ignore"):  # log 0 = -∞ is right
            weights = np.exp(exponents + np.log(mass / largest)) if exponents[-1] > LARGEST_LOG else mass / largest
        if exponents[-1] <= LARGEST_LOG:
            weights = weights * np.exp(np.maximum(exponents, -LARGEST_LOG))
        weights[self.mode] = 0.0
        far = np.abs(exponents) > NEAR_EXPONENT
        error = 8 * UNIT * float((np.abs(exponents[far]) * weights[far]).sum())
        weights[self.mode] = 1.0
        return weights, error / float(weights.sum())

    @cached_property
    def log_total(self) -> float:
        """The log of the sum of all weights; the mode's one is 1."""
        weights = self._weights[0]
        return float(np.log1p(weights[: self.mode].sum() + weights[self.mode + 1 :].sum()))

    @cached_property
    def weight_error(self) -> float:
        """A bound on the rounding errors of masses far from the mode, in total."""
        return self._weights[1]

    @cached_property
    def rest(self) -> float:
        """The tilted mass of all lattice points but the mode."""
        return -math.expm1(-self.log_total)

    @cached_property
    def mode_loss(self) -> Fraction:
        """The exact loss of the mode: many steps multiply its rounding error."""
        return self.lattice.exact_loss(self.mode)

    @cached_property
    def log_moment(self) -> float:
        """``log M(s) = log Σ mass e^{s l}``."""
        return self.log_total + float(np.log(self.lattice.mass[self.mode])) + self.s * float(self.mode_loss)

    @cached_property
    def mass(self) -> Array:
        return self._weights[0] * math.exp(-self.log_total)

    @cached_property
    def mean(self) -> float:
        # Not a BLAS product: waking its threads costs more than they save.
        return float((self.mass * self.lattice.losses).sum())

    @cached_property
    def variance(self) -> float:
        return float((self.mass * (self.lattice.losses - self.mean) ** 2).sum())

    @cached_property
    def moment_bounds(self) -> MomentBounds:
        return MomentBounds(self.lattice.losses, self.mass, self.mean, self.variance**0.5)

    def spectrum(self, length: int) -> tuple[Array, float]:
        """Returns ``φ - 1`` at all frequencies of the mass wrapped onto ``length`` points, the mode at index 0.

        The second bounds the error of each. The mass of the mode contributes ``1 - rest``, so that only the rest
        is transformed. Relative errors of masses are not counted here.
        """
        wrapped = np.zeros(-(-len(self.mass) // length) * length)
        wrapped[: len(self.mass)] = self.mass
        wrapped[self.mode] = 0.0
        wrapped = wrapped.reshape(-1, length).sum(0)
        excess = np.fft.rfft(np.roll(wrapped, -(self.mode % length))) - self.rest
        rounding = fft_rounding(length) + (len(self.mass) / length + 8) * UNIT
        return excess, rounding * self.rest + self.weight_error


class TiltedComposition:
    """All steps composed under one tilt s >= 0: δ at any ε, most accurate near the ε with saddle point s.

    Formulas, with S(l) the untilted mass at l and above: ``δ(ε) = ∫_ε^∞ e^{ε - t} S(t) dt``, hence on the lattice
    ``δ(l_j) = (1 - e^-h) Σ_{k > j} e^{-(k - j - 1) h} S_k``, in between ``δ(l_j - r) = (1 - e^-r) S_j + e^-r δ(l_j)``:
    sums of positive terms only.

    Losses are measured from ``origin``, where all steps have the loss of their mode.
    """

    def __init__(self, terms: Terms, s: float):
        self.s, self.spacing = s, terms[0][0].spacing
        tilted = [(TiltedLattice(lattice, s), count) for lattice, count in terms]
        steps = sum(count for _, count in tilted)
        self.only_p = -float(np.expm1(sum(count * np.log1p(-term.lattice.only_p) for term, count in tilted)))
        parts = [np.log(count) + term.lattice.log_neglected for term, count in tilted]
        self.log_neglected = float(np.logaddexp.reduce(parts))

        origin = sum(Fraction(count) * term.mode_loss for term, count in tilted)
        self.origin = float(origin)
        self._starts = float(sum(count * abs(term.lattice.start) for term, count in tilted)) + abs(self.origin)
        logs = [(count, float(np.log(term.lattice.mass[term.mode])), term.log_total) for term, count in tilted]
        self.log_weight = math.fsum(count * (largest + total) for count, largest, total in logs)

        mean = sum(count * term.mean for term, count in tilted)
        below, above = _window(tilted)
        length = fast_length(int((below + above) / self.spacing) + 4)
        if length > LONGEST:
            raise WindowTooLong
        mass, self.entry_error = _power(tilted, length)
        lowest = round((mean - below - self.origin) / self.spacing) - 1
        mass = np.roll(mass, -(lowest % length))
        distances = self.spacing * (lowest + np.arange(length))

        log_weights = self.log_weight - self.s * distances
        usable = int(np.searchsorted(-log_weights, -LARGEST_LOG))  # the weights fall with the loss
        if usable == length:
            raise Unresolved
        self.lowest = float(distances[usable])
        mass = mass[usable:] * np.exp(log_weights[usable:])
        self.above = np.append(np.cumsum(mass[::-1])[::-1], 0.0)  # S_j: mass at lattice point j and higher
        self.at_point = -np.expm1(-self.spacing) * np.append(discounted_sums(self.above[1:], self.spacing), 0.0)
        sizes = math.fsum(count * (abs(largest) + 2 * total + 8) for count, largest, total in logs)
        furthest = s * max(abs(float(distances[usable])), abs(float(distances[-1]))) + abs(self.log_weight)
        self._relative_error = UNIT * (8 * sizes + 8 * furthest + 4 * length + 64)
        self._relative_error += steps * NEAR_ROUNDING

    def _position(self, epsilon: float, side: int) -> float:
        """Returns ε measured from the origin, moved up or down by a bound on the rounding of all losses."""
        distance = epsilon - self.origin
        return distance + side * (LOSS_ROUNDING * (self._starts + abs(distance)) + 4 * UNIT * abs(self.lowest))

    def _sum(self, distance: float) -> float:
        """Returns δ of the computed masses at a distance above ``lowest - spacing``."""
        position = (distance - self.lowest) / self.spacing
        j = min(math.floor(position) + 1, len(self.above) - 1)
        rest = max(j - position, 0.0) * self.spacing
        return float(-np.expm1(-rest) * self.above[j] + np.exp(-rest) * self.at_point[j])

    def _error(self, distance: float) -> float:
        """Returns how much wrapping, the missing top and rounding can change δ.

        An error of the tilted mass at l enters multiplied by ``A(ε) e^{-s (l - ε)} (1 - e^{ε - l})``: at most
        ``A(ε) / (1 + s)``, and `reached` in total over all lattice points.
        """
        s, h = self.s, self.spacing
        most = min(1 / (1 + s), -math.expm1(-min(h, 700.0)))  # of the first point, which may lie nearer than h
        reached = float(len(self.above))
        if s > 0:
            ratio = -math.expm1(-h) / -math.expm1(-(s + 1) * h)
            reached = min(reached, most + ratio * math.exp(-min(s * h, 700.0)) / -math.expm1(-s * h))
        log_weight = self.log_weight - s * distance
        if log_weight > LARGEST_LOG:
            return np.inf
        return math.exp(log_weight) * (1 + self._relative_error) * (3 * TAIL / (1 + s) + self.entry_error * reached)

    def at_most(self, epsilon: float) -> float:
        """Returns an upper bound on δ(ε) of the composed pair."""
        distance = self._position(epsilon, -1)
        if distance <= self.lowest - self.spacing:
            return 1.0
        finite = self._sum(distance) * (1 + self._relative_error) + self._error(distance)
        return min(finite + self.only_p * (1 + INFINITE_ROUNDING), 1.0)

    def at_least(self, epsilon: float) -> float:
        """Returns a lower bound on δ(ε) of the composed pair."""
        distance = max(self._position(epsilon, 1), self.lowest)  # δ falls with ε
        finite = self._sum(distance) * (1 - self._relative_error) - self._error(distance)
        infinite = self.only_p * (1 - INFINITE_ROUNDING) - np.exp(min(self.log_neglected + epsilon, LARGEST_LOG))
        return max(finite + max(infinite, 0.0), 0.0)


def _window(tilted: Sequence[tuple[TiltedLattice, int]]) -> tuple[float, float]:
    """Returns distances below and above the mean beyond which the composed tilted losses have less mass than TAIL.

    Chernoff: ``P(l - mean > w) <= exp(Σ K(t) - t w)`` for every t > 0.
    """
    spacing = tilted[0][0].lattice.spacing  # where the tilt leaves a single point, the deviation is 0
    deviation = max(sum(count * term.variance for term, count in tilted) ** 0.5, spacing)
    t = np.sqrt(-2 * np.log(TAIL)) / deviation * 2.0 ** np.arange(-16, 3.5, 0.5)
    above = (sum(count * term.moment_bounds.log_moment(t) for term, count in tilted) - np.log(TAIL)) / t
    below = (sum(count * term.moment_bounds.log_moment(-t) for term, count in tilted) - np.log(TAIL)) / t
    return float(below.min()), float(above.min())


def fast_length(at_least: int) -> int:
    """Returns the next length that has small prime factors, for a fast FFT."""
    return min(odd * 2 ** math.ceil(math.log2(max(at_least / odd, 1))) for odd in (1, 3, 5, 9, 15))


def fft_rounding(length: int) -> float:
    """Returns a bound on the error of each output of an FFT, relative to the sum of the sizes of its inputs.

    Each input reaches each output through log2(length) levels of one addition and one complex product, four roundings
    and that of the factor; passes of 3 and 5 points have as many for each factor of 2.
    """
    return UNIT * (6 * math.log2(length) + 12)


def _power(tilted: Sequence[tuple[TiltedLattice, int]], length: int) -> tuple[Array, float]:
    """Returns the product of all characteristic functions, transformed back, and a bound on the error of each entry.

    With every φ known to e, a product of c of them is known to ``(|φ| + e)^c - |φ|^c``. Only coefficients above
    e^NEGLIGIBLE are computed: for many steps, a few dozen out of a hundred thousand.
    """
    log_size, log_largest = np.zeros(length // 2 + 1), np.zeros(length // 2 + 1)
    spectra = []
    for term, count in tilted:
        excess, error = term.spectrum(length)
        real, imaginary = np.real(excess), np.imag(excess)
        grown = 2 * real + real**2 + imaginary**2  # |φ|² - 1
        near = grown > -0.5
        size = np.maximum(np.hypot(1 + real, imaginary), 1e-150)
        log_one = np.where(near, np.log1p(np.where(near, grown, 0.0)) / 2, np.log(size))
        log_size += count * log_one
        log_largest += count * (log_one + np.log1p((error + 16 * UNIT * np.abs(excess)) / size))
        spectra.append((excess, count))
    kept = np.flatnonzero(log_size > NEGLIGIBLE)
    phases = [count * np.arctan2(np.imag(excess[kept]), 1 + np.real(excess[kept])) for excess, count in spectra]
    turns = np.sum(np.abs(phases), axis=0)
    size = np.exp(log_size[kept])
    product = np.zeros(length // 2 + 1, complex)
    product[kept] = size * np.exp(1j * np.sum(phases, axis=0))
    error = np.exp(np.minimum(log_largest, LARGEST_LOG))
    error[kept] = size * np.expm1(np.minimum(log_largest[kept] - log_size[kept], LARGEST_LOG))
    error[kept] += size * ((8 + len(spectra)) * turns + 8 * np.abs(log_size[kept]) + 16) * UNIT
    entry_error = 2 / length * float(error.sum() + fft_rounding(length) * size.sum())
    return np.maximum(np.fft.irfft(product, length), 0.0), entry_error


def discounted_sums(values: Array, spacing: float) -> Array:
    """Returns ``R_j = Σ_{k >= j} e^{-(k - j) h} values_k``, block by block so that no exponential overflows."""
    if spacing > 300:
        return values.copy()
    result, carry = np.empty(len(values)), 0.0
    block = min(max(int(300 / spacing), 1), len(values))
    discount = np.exp(-spacing * np.arange(block + 1))
    for start in reversed(range(0, len(values), block)):
        part = values[start : start + block]
        beyond = carry * discount[len(part)]
        sums = np.cumsum((part * discount[: len(part)])[::-1])[::-1] + beyond
        result[start : start + block] = sums / discount[: len(part)]
        carry = result[start]
    return result


class TiltedCompositions:
    """One composed lattice pair, under a tilt for each question asked."""

    def __init__(self, terms: Terms):
        self._terms = terms
        self._composed: dict[float, TiltedComposition] = {}

    @cached_property
    def _tilts(self) -> tuple[Array, Array]:
        """Candidate tilts s, the last one 0 (no tilt), and upper bounds on ``K(s) + H(s)``."""
        plain = [(TiltedLattice(lattice, 0.0), count) for lattice, count in self._terms]
        deviation = sum(count * term.variance for term, count in plain) ** 0.5 or self._terms[0][0].spacing
        s = np.exp2(np.arange(min(-5 - np.log2(deviation), -5), 13 - np.log2(deviation), 1 / 8))
        moments = sum(
            count * (term.moment_bounds.log_moment(s) + s * term.mean + term.log_moment) for term, count in plain
        )
        sizes = sum(count * (1 + s * (abs(term.lattice.start) + abs(term.mean))) for term, count in plain)
        rounding = LOSS_ROUNDING * (sizes + np.abs(moments))
        return np.append(s, 0.0), np.append(moments + rounding + tilt_entropy(s), 0.0)

    def at_epsilon(self, epsilon: float) -> TiltedComposition:
        """Returns the composition under the best tilt for ε, or under one computed already that is nearly as good."""
        s, bounds = self._tilts
        exponents = bounds - s * epsilon
        known = np.flatnonzero(np.isin(s, list(self._composed)) & (exponents < exponents.min() + NEARLY))
        best = float(s[known[0] if known.size else exponents.argmin()])
        if best not in self._composed:
            self._composed[best] = TiltedComposition(self._terms, best)
        return self._composed[best]

    def at_delta(self, delta: float) -> TiltedComposition:
        """Returns the composition under the best tilt for ε(δ)."""
        return self.at_epsilon(self._moments_epsilon(delta))

    def epsilon_bound(self, delta: float) -> float:
        """Returns an upper bound on ε(δ) from the moments of finite losses; infinite ones reduce δ by their mass."""
        rest = delta - sum(count * lattice.only_p for lattice, count in self._terms)
        return self._moments_epsilon(rest) if rest > 0 else np.inf

    def _moments_epsilon(self, delta: float) -> float:
        """Returns ``min_s (K(s) + H(s) + log 1/δ) / s``."""
        s, bounds = self._tilts
        return max(float(((bounds - np.log(delta))[:-1] / s[:-1]).min()), 0.0)
