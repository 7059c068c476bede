# SPDX-License-Identifier: Apache-2.0
"""Computes δ(ε) as an integral of the privacy loss's moments along a line through its saddle point: the contour engine.

``δ(ε) = 1/(2πi) ∫ exp(K(s) - s ε) / (s (s + 1)) ds`` along ``s = c + i t``, c > 0, with
``K(s) = Σ count * log E_P e^(s l)`` over all steps. The number of steps only multiplies K, so a million steps cost no
more time than a hundred. The trapezoid rule with spacing 2π/P gives **exactly** ``Σ_k e^(c k P) δ(ε + k P)``: the truth
plus aliases that are positive and bounded by ``δ <= 1`` below ε and by moments above it.

Proved: aliasing (the upper bound needs no proof, because aliases are positive), the rest of the integral beyond the
last point (`contour_tail`), and rounding (`tilt`, given the accuracy of the elementary functions and of the nodes).
Estimated: the trapezoid rule inside K (its spacing makes it converge to 1e-19), and the variation of the density, at
the points of that rule.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, final

import numpy as np

from ..bracket import Bracket, ordered
from ..pairs.base import UNIT, DiscretizablePair, DominatingPair
from .contour_tail import log_bound_beyond
from .curve import Curve, SimpleCurve, Unresolved, trivial_delta
from .tilt import ELEMENTARY, Term, Tilted, log_moments, moment_error, refined, term, tilt_entropy, tilted

ALIAS = 1e-12  # aliases, relative to δ
REST = -38.0  # log of the integrand, relative to its peak, beyond the last point
ROUGH = 1e-4, -14.0  # ALIAS and REST where only an upper bound on δ is needed
LONGEST, FEWEST = 1200, 8  # points of the trapezoid rule; with more points the lattice is faster
HELLINGER_ALIAS, HELLINGER_REST = 1e-17, -44.0  # ALIAS and REST on a Hellinger line, relative to 1
REACHES = (8.0, 32.0, 128.0, 512.0, 2048.0)  # largest ε of each Hellinger line
WIDEST_HELLINGER = 1.0  # half-width of a bracket from a Hellinger line, absolute; else another engine is better
WIDEST = 1e-4  # half-width of a bracket, relative to ε and to 1 / c; else another engine is better
NEGLIGIBLE_WIDTH = 1e-18  # width of a bracket of δ that always suffices
RARE = 2.0**-10  # factor by which the candidates for c are smaller where sampling is rare
AMPLIFICATION = 5.0  # largest log of the integrand's peak over δ, accepted for a shorter sum
PERIODS = 1.1  # ratio of the periods of lines that many ε share
TILTS = 2.0 ** np.arange(-3, 8.5, 0.4)  # candidates for c, in units of one over the composed deviation


class _Moments:
    """Provides K(s) on a grid of real s > 0, with the variance of the composed loss under each tilt."""

    def __init__(self, terms: Sequence[Term], scale: float = 1.0):
        moment = sum(one.times * float(one.mass @ one.losses**2) for one in terms)
        if moment < 1e-250:  # out of floating-point range
            raise Unresolved
        tilts = TILTS * scale / math.sqrt(moment)
        log_moment, variance = np.zeros(len(TILTS)), np.zeros(len(TILTS))
        for one in terms:
            term_log_moment, term_variance = log_moments(one, tilts)
            log_moment += one.times * term_log_moment
            variance += one.times * term_variance
        usable = np.isfinite(log_moment)
        if not usable.any():
            raise Unresolved
        self.tilts, self.log_moment = tilts[usable], log_moment[usable]
        self.variance = np.maximum(variance[usable], 1e-300)
        self.bound = self.log_moment + tilt_entropy(self.tilts)

    def epsilon_bound(self, delta: float) -> float:
        return max(float(((self.bound - math.log(delta)) / self.tilts).min()), 0.0)


class _Line:
    """The integrand on one vertical line, which yields δ at any ε near the one that the line was chosen for."""

    def __init__(self, terms: Sequence[Term], c: float, period: float, rest: float = REST):
        self.c, self.period = c, period
        spacing = 2 * math.pi / period
        parts, count = _until_negligible(terms, c, spacing, rest)
        t = spacing * np.arange(count)
        log_size, phase, exponent, log_error = np.zeros((4, count))
        for part in parts:
            real, imaginary, error = part.log_phi_at_multiples(spacing, count)
            log_size += part.times * real
            phase += part.times * imaginary
            exponent += part.times * (np.abs(real) + np.abs(imaginary))
            log_error += part.times * np.log1p(error)
        self._log_moment = sum(part.times * part.log_moment for part in parts)
        self._mean = sum(part.times * part.mean for part in parts)
        s = c + 1j * t
        weights = np.exp(log_size + 1j * phase) / (s * (s + 1)) * (spacing / math.pi)
        weights[0] /= 2
        self._t, self._weights = t, weights
        last, sizes, roundings = float(t[-1]), np.abs(weights), (len(parts) + 4) * UNIT
        self._rest = 1.01 * math.exp(log_bound_beyond(terms, parts, c, last, rest)) / (math.pi * last)
        # Errors relative to the peak: of the weights; for each unit of the mean's and ε's error; of the moment's log.
        with np.errstate(over="ignore"):
            error = np.expm1(log_error + (roundings + ELEMENTARY) * exponent) + 8 * ELEMENTARY + count * UNIT
        self._total, self._turned = float(sizes.sum()), float(sizes @ t)
        self._weights_error = float(sizes @ error)
        self._mean_error = roundings * sum(part.times * abs(part.mean) for part in parts)
        moments = [
            one.times * (moment_error(one, c) + (ELEMENTARY + part.node_rounding) * abs(part.log_moment))
            for one, part in zip(terms, parts, strict=True)
        ]
        self._moment_error = sum(moments) + roundings * sum(part.times * abs(part.log_moment) for part in parts)
        if not self._moment_error < 0.1:
            raise Unresolved

    def value(self, epsilon: float) -> tuple[float, float, float]:
        """Returns the trapezoid sum at ε, its derivative in ε, and a bound on the error of truncation and rounding."""
        log_peak = self._log_moment - self.c * epsilon
        if abs(log_peak) > 600:
            raise Unresolved
        peak = math.exp(log_peak)
        turned = self._weights * np.exp(1j * self._t * (self._mean - epsilon))
        real = float(turned.real.sum())
        total = peak * real + (self.c < 0)  # the integral is δ - 1 left of the pole at 0
        slope = -peak * (self.c * real - float(self._t @ turned.imag))
        angle_error = self._turned * (self._mean_error + 4 * UNIT * (abs(self._mean) + abs(epsilon)))
        of_peak = 1.1 * self._moment_error + 4 * UNIT * (abs(self._log_moment) + abs(self.c * epsilon)) + 2 * ELEMENTARY
        error = peak * (self._rest + self._weights_error + angle_error + of_peak * self._total)
        error += 4 * UNIT * (self.c < 0)
        return total, slope, error


def _beyond(terms: Sequence[Term]) -> float:
    """Returns a bound on the mass that the nodes of all steps leave out: δ rises by no more when it is put back."""
    return sum(one.times * one.pair.beyond for one in terms)


def _until_negligible(terms: Sequence[Term], c: float, spacing: float, rest: float) -> tuple[list[Tilted], int]:
    """Returns all terms under a tilt, and the number of points until ``Σ times * log |φ| <= rest``."""
    coarse = [tilted(one, c) for one in terms]
    end = math.sqrt(-2 * rest / sum(part.times * part.variance for part in coarse))
    while True:
        if end > LONGEST * spacing:
            raise Unresolved
        last = max(math.ceil(end / spacing), FEWEST - 1)
        frequency = last * spacing
        parts = [refined(one, part, c, frequency)[0] for one, part in zip(terms, coarse, strict=True)]
        log_size = sum(part.times * part.log_size(frequency) for part in parts)
        if log_size <= rest:
            return parts, last + 1
        growth = math.sqrt(rest / min(log_size, -1.0))  # as if it fell with the square
        end = frequency * min(max(growth, 1.25), 2.0)


class _Root(NamedTuple):
    """The ε at which a line's sum is nearly δ, and the sum's slope and error there."""

    epsilon: float
    slope: float
    error: float


def _root(line: _Line, delta: float, epsilon: float, high: float) -> _Root:
    """Finds the root by Newton steps in log δ, and by bisection where those leave [0, high]."""
    low = 0.0
    for _ in range(80):
        total, slope, error = line.value(epsilon)
        low, high = (epsilon, high) if total > delta else (low, epsilon)
        following = -1.0
        if total > 0 > slope:
            following = epsilon + math.log(total / delta) * total / -slope
        if abs(following - epsilon) <= 1e-8 * epsilon:
            return _Root(following, slope, error)  # Newton doubles the digits
        if high - low <= 1e-14 * high:
            return _Root(epsilon, slope, error)
        if not low < following < high:
            following = 0.0 if low == 0.0 and following <= 0.0 < epsilon and total > 0 else (low + high) / 2
        epsilon = following
    raise Unresolved


class _Crossing:
    """Brackets the ε at which δ(ε) crosses a value, next to a root of a line's sum.

    Args:
        line: the line; its sum is δ(ε) plus aliases.
        delta: the value.
        root: the ε at which the sum is nearly ``delta``.
        added: by how much the sum may be too large within ``most`` of the root.
        missing: by how much it may be too small there.
        most: the largest distance from the root to try.

    Raises:
        Unresolved: now or when asked, if the bracket would be wider than that.
    """

    def __init__(self, line: _Line, delta: float, root: _Root, *, added: float, missing: float, most: float):
        self._line, self._delta, self._root = line, delta, root.epsilon
        self._added, self._missing, self._most = added, missing, most
        self._margin = 1.1 * (root.error + added + missing) / max(-root.slope, 1e-300) + 1e-14 * root.epsilon
        if self._margin > most:
            raise Unresolved

    def low(self) -> float:
        """Returns an ε where δ(ε) is above the value, or 0."""
        margin = self._margin
        while margin < self._root:
            total, _, error = self._line.value(self._root - margin)
            if total - error - self._added > self._delta:
                return self._root - margin
            margin = self._wider(margin)
        return 0.0

    def high(self) -> float:
        """Returns an ε where δ(ε) is at most the value."""
        margin = self._margin if self._root > 0 else 0.0
        while True:
            total, _, error = self._line.value(self._root + margin)
            if total + error + self._missing <= self._delta:
                return self._root + margin
            margin = self._wider(margin)

    def _wider(self, margin: float) -> float:
        if 2 * margin > self._most or margin == 0:
            raise Unresolved
        return 2 * margin


class ContourCurve(Curve):
    """A curve that finds ε(δ) on a line of the contour integral."""

    @abstractmethod
    def _crossing(self, delta: float) -> _Crossing:
        """Returns where a line crosses δ."""

    @final
    def epsilon(self, delta: float) -> Bracket[float]:
        crossing = self._crossing(delta)
        return Bracket(crossing.low(), crossing.high())

    @final
    def epsilon_high(self, delta: float) -> float:
        return self._crossing(delta).high()


class SaddleCurve(ContourCurve):
    """One direction's curve from lines near the saddle point, for pairs with positive moments."""

    def __init__(self, steps: Sequence[tuple[DominatingPair, int]], *, swapped: bool):
        self._terms = [term(pair, count, swapped) for pair, count in steps]
        self._beyond = _beyond(self._terms)
        self._lines: dict[tuple[float, float], _Line | None] = {}  # by c and period; None for one without an answer

    @cached_property
    def _moments(self) -> _Moments:
        try:
            return _Moments(self._terms)
        except Unresolved:  # where sampling is rare, a few large losses determine the deviation
            return _Moments(self._terms, RARE)

    def _line(self, epsilon: float, log_delta: float, alias: float = ALIAS, rest: float = REST) -> _Line:
        """Returns the line with the shortest sum among those on which the integrand is not much larger than δ."""
        return _Line(self._terms, *self._place(epsilon, log_delta, alias), rest)

    def _shared_line(self, epsilon: float, log_delta: float) -> _Line:
        """Returns nearly the same line, which many ε share: a curve of hundreds of ε takes a third of the time."""
        c, period = self._place(epsilon, log_delta, ALIAS)
        if not math.isfinite(period):
            raise Unresolved
        place = c, PERIODS ** math.ceil(math.log(period, PERIODS))  # a longer period has fewer aliases
        if place not in self._lines:
            self._lines[place] = None
            self._lines[place] = _Line(self._terms, *place)
        line = self._lines[place]
        if line is None:
            raise Unresolved
        return line

    def _place(self, epsilon: float, log_delta: float, alias: float) -> tuple[float, float]:
        """Returns c and the period of a line."""
        moments = self._moments
        tilts, chernoff = moments.tilts, moments.bound - moments.tilts * epsilon
        log_delta = min(log_delta, float(chernoff.min()))
        log_peak = moments.log_moment - tilts * epsilon - np.log(tilts * (1 + tilts)) - log_delta
        allowed = np.flatnonzero(log_peak <= max(AMPLIFICATION, float(log_peak.min()) + 1))
        log_alias = math.log(alias) + log_delta
        c = tilts[allowed]
        distance = tilts - c[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            above = np.where(distance > 0, (chernoff - log_alias) / distance, np.inf).min(1)
        period = np.maximum(-log_alias / c, above)
        best = int((period / np.sqrt(moments.variance[allowed])).argmin())
        return float(c[best]), float(period[best])

    def _alias(self, line: _Line, epsilon: float) -> float:
        """Returns an upper bound on what the aliases add at ε and above."""
        moments = self._moments
        below = math.exp(-line.c * line.period)
        usable = moments.tilts > line.c
        exponents = (moments.bound - moments.tilts * epsilon)[usable]
        decay = np.exp(-(moments.tilts[usable] - line.c) * line.period)
        with np.errstate(over="ignore", invalid="ignore"):
            above = np.exp(exponents) * decay / (1 - decay)
        above = float(np.min(above, initial=math.inf, where=np.isfinite(above)))
        return below / (1 - below) + above

    def delta(self, epsilon: float) -> Bracket[float]:
        exponent = float((self._moments.bound - self._moments.tilts * epsilon).min())
        line = self._shared_line(epsilon, min(exponent, 0.0) - 2.0)
        total, _, error = line.value(epsilon)
        high = min(total + error + self._beyond, 1.0)
        low = total - error - self._alias(line, epsilon)
        if high - low > 10 * WIDEST * high + NEGLIGIBLE_WIDTH:
            raise Unresolved
        return ordered(max(low, trivial_delta(epsilon)), high)

    def surely_below(self, epsilon: float, delta: float) -> bool:
        if self._moments.epsilon_bound(delta) <= epsilon:
            return True
        total, _, error = self._line(epsilon, math.log(delta), *ROUGH).value(epsilon)
        return total + error + self._beyond <= delta

    def _crossing(self, delta: float) -> _Crossing:
        """Returns where a line near the saddle point of ε(δ) crosses δ."""
        bound = self._moments.epsilon_bound(delta)
        line = self._line(bound, math.log(delta))
        root = _root(line, delta, bound, bound)
        if root.epsilon < 1e-12:
            root = root._replace(epsilon=0.0)
        most = min(WIDEST * root.epsilon, WIDEST / line.c) if root.epsilon else math.inf
        added = self._alias(line, root.epsilon - most) if root.epsilon else 0.0
        return _Crossing(line, delta, root, added=added, missing=self._beyond, most=most)


class HellingerCurve(ContourCurve, SimpleCurve):
    """One direction's curve from lines with -1 < c < 0, for pairs without any positive moment.

    There the integral is δ(ε) - 1, and the trapezoid rule gives ``δ - Σ_{k != 0} e^(c k P) (1 - δ(ε + k P))``; the
    aliases, by ``1 - δ(ε) <= min(1, e^ε)``, are at most ``e^(c P) / (1 - e^(c P))`` from above ε and
    ``e^(ε - (1 + c) P)``, over one minus its ratio, from below. They are added to the upper bound; the lower
    one needs no correction. δ is a small difference from 1, so its relative rounding error is about 1e-14 / δ.
    """

    def __init__(self, steps: Sequence[tuple[DominatingPair, int]], *, swapped: bool):
        self._terms = [term(pair, count, swapped) for pair, count in steps]
        self._beyond = _beyond(self._terms)
        self._lines: dict[float, _Line] = {}

    def _line(self, reach: float) -> _Line:
        """Returns a line for all ε up to ``reach``."""
        if reach not in self._lines:
            size = -math.log(HELLINGER_ALIAS)
            period = reach + 2 * size
            self._lines[reach] = _Line(self._terms, -size / period, period, HELLINGER_REST)
        return self._lines[reach]

    @staticmethod
    def _alias(line: _Line, epsilon: float) -> float:
        """Returns an upper bound on what the aliases subtract at ε and below."""
        above, log_ratio = math.exp(line.c * line.period), -(1 + line.c) * line.period
        return above / (1 - above) + math.exp(min(epsilon + log_ratio, 0.0)) / -math.expm1(log_ratio)

    def delta(self, epsilon: float) -> Bracket[float]:
        reach = next((reach for reach in REACHES if epsilon <= reach), None)
        if reach is None:
            raise Unresolved
        line = self._line(reach)
        total, _, error = line.value(epsilon)
        high = min(total + error + self._alias(line, epsilon) + self._beyond, 1.0)
        return ordered(max(total - error, trivial_delta(epsilon)), high)

    def _crossing(self, delta: float) -> _Crossing:
        """Returns where a line that reaches ε(δ) crosses δ."""
        for reach in REACHES:
            line = self._line(reach)
            missing = self._alias(line, reach + WIDEST_HELLINGER) + self._beyond
            total, _, error = line.value(reach)
            if total + error + missing <= delta:
                root = _root(line, delta, 0.0, reach)
                return _Crossing(line, delta, root, added=0.0, missing=missing, most=WIDEST_HELLINGER)
        raise Unresolved


def curve(steps: Sequence[tuple[DominatingPair, int]], *, swapped: bool) -> Curve:
    """Returns one direction's curve by the contour engine.

    Raises:
        Unresolved: now or when asked, if the integral converges too slowly (few steps) or a pair is not smooth.
    """
    heavy = any(pair.heavy for pair, _ in steps if isinstance(pair, DiscretizablePair)) and not swapped
    return (HellingerCurve if heavy else SaddleCurve)(steps, swapped=swapped)
