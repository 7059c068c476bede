# SPDX-License-Identifier: Apache-2.0
"""The contour engine: δ(ε) as an integral of the privacy loss's moments, inverted on a line through its saddle point.

``δ(ε) = 1/(2πi) ∫ exp(K(s) - s ε) / (s (s + 1)) ds`` along ``s = c + i t``, c > 0, with
``K(s) = Σ count * log E_P e^(s l)`` over all steps. The number of steps only multiplies K, so a million cost as little
as a hundred. The trapezoid rule with spacing 2π/P gives **exactly** ``Σ_k e^(c k P) δ(ε + k P)``: the truth plus
aliases that are positive and bounded by ``δ <= 1`` below ε and by moments above it.

Proved, given exact arithmetic: aliasing (the upper bound needs no proof at all: aliases are positive), and
what is left of the integral beyond the last point (`_Line._certify`: Lipschitz bounds between the points of a grid, and
``mass above κ + variation of min(density, κ) / t`` beyond it). Estimated: rounding (`ROUNDING`), the trapezoid rule
inside K (its spacing makes it converge to 1e-15), and the variation of the density, taken at the rule's own points.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .bracket import Array, Bracket
from .curve import Unresolved
from .law import Continuous, Law

ALIAS = 1e-13  # aliases, relative to δ
REST = -42.0  # log of the integrand, relative to its peak, beyond the last point
ROUNDING = 2.0**-53
LONGEST = 1200  # points of the outer rule; beyond, the lattice is quicker
CERTIFICATE = 600  # points of the certificate's grid
AMPLIFICATION = 5.0  # log of the integrand's peak over δ that is tolerated for a shorter sum
TILTS = 2.0 ** np.arange(-3, 8.5, 0.4)  # candidates for c, in units of one over the composed deviation


class _Term(NamedTuple):
    """One law's nodes in the chosen direction."""

    law: Continuous
    times: int
    losses: Array
    log_mass: Array
    gaps: Array
    step: float


def _term(law: Law, count: int, *, swapped: bool, step: float | None = None) -> _Term:
    if not isinstance(law, Continuous) or (law.heavy and not swapped):
        raise Unresolved
    nodes = law.nodes(law.coarsest_step if step is None else step)
    if nodes is None:
        raise Unresolved
    losses, log_mass, gaps, step = nodes
    if swapped:
        losses, log_mass = -losses, log_mass - losses
    return _Term(law, count, losses, log_mass, gaps, step)


def _entropy(s: Array) -> Array:
    """``H(s) = s log s - (1 + s) log(1 + s)``: ``δ(ε) <= exp(K(s) + H(s) - s ε)`` for every s > 0."""
    return s * np.log(s) - (1 + s) * np.log1p(s)


class _Moments:
    """K(s) on a grid of real s > 0, with the variance of the composed loss under each tilt."""

    def __init__(self, terms: Sequence[_Term]):
        weights = [np.exp(term.log_mass) for term in terms]
        moment = sum(term.times * float(weight @ term.losses**2) for term, weight in zip(terms, weights, strict=True))
        if moment < 1e-250:  # out of floating-point range
            raise Unresolved
        self.tilts = TILTS / math.sqrt(moment)
        self.log_moment, self.variance = np.zeros(len(TILTS)), np.zeros(len(TILTS))
        for term, weight in zip(terms, weights, strict=True):
            log_moment, variance = _log_moments(term, weight, self.tilts)
            self.log_moment += term.times * log_moment
            self.variance += term.times * variance
        usable = np.isfinite(self.log_moment)
        if not usable.any():
            raise Unresolved
        self.tilts, self.log_moment = self.tilts[usable], self.log_moment[usable]
        self.variance = np.maximum(self.variance[usable], 1e-300)
        self.bound = self.log_moment + _entropy(self.tilts)

    def epsilon_bound(self, delta: float) -> float:
        return max(float(((self.bound - math.log(delta)) / self.tilts).min()), 0.0)


def _log_moments(term: _Term, weight: Array, tilts: Array) -> tuple[Array, Array]:
    """``log E_P e^(s l)`` and the tilted variance of l for each s; infinite where the nodes do not reach far enough.

    ``E_P [e^-l - 1] = 0``, so ``E_P [e^(s l) - 1 + s (e^-l - 1)]`` is the moment less 1 without cancellation.
    """
    exponents = tilts[:, None] * term.losses
    with np.errstate(over="ignore", invalid="ignore"):
        grown = np.expm1(exponents)
        excess = grown @ weight + tilts * float(np.expm1(-term.losses) @ weight)
        tilted = (grown + 1) * weight
        total = tilted.sum(1)
        mean = tilted @ term.losses / total
        variance = tilted @ term.losses**2 / total - mean**2
        ends = np.maximum(tilted[:, 0], tilted[:, -1]) / total
        log_moment = np.log1p(excess)
    usable = np.isfinite(log_moment) & (ends < 1e-18)
    return np.where(usable, log_moment, np.inf), np.where(usable, np.maximum(variance, 0), np.inf)


class _Tilted(NamedTuple):
    """One term under the tilt c, trimmed to the nodes that matter."""

    times: int
    offsets: Array  # losses less their mean
    mass: Array
    gaps: Array
    mean: float
    log_moment: float

    def log_phi(self, t: Array) -> tuple[Array, Array]:
        """Real and imaginary part of ``log E e^(i t (l - mean))`` under the tilt."""
        angle = t[:, None] * self.offsets
        real = -2 * (np.sin(angle / 2) ** 2 @ self.mass)
        imaginary = np.sin(angle) @ self.mass
        size = np.maximum(2 * real + real**2 + imaginary**2, -1 + 2e-15)  # |φ|² - 1; less is rounding
        return np.log1p(size) / 2, np.arctan2(imaginary, 1 + real)


def _tilted(term: _Term, c: float) -> _Tilted:
    weight = np.exp(term.log_mass)
    excess = float(np.expm1(c * term.losses) @ weight + c * (np.expm1(-term.losses) @ weight))
    exponents = term.log_mass + c * term.losses
    kept = exponents > exponents.max() - 44
    mass = np.exp(exponents[kept] - exponents.max())
    mass /= mass.sum()
    losses = term.losses[kept]
    mean = float(mass @ losses)
    return _Tilted(term.times, losses - mean, mass, term.gaps[kept], mean, math.log1p(excess))


class _Line:
    """The integrand on one vertical line: δ at any ε near the one that the line was chosen for."""

    def __init__(self, terms: Sequence[_Term], c: float, period: float, moments: _Moments, *, swapped: bool):
        self.c, self.period, self._moments = c, period, moments
        parts = [_tilted(term, c) for term in terms]
        spread = math.sqrt(sum(part.times * float(part.mass @ part.offsets**2) for part in parts))
        spacing = 2 * math.pi / period
        t_end = math.sqrt(-2 * REST) / spread
        parts = [_refined(term, part, c, 3 * t_end, swapped) for term, part in zip(terms, parts, strict=True)]
        t = np.empty(0)
        log_size, phase = np.empty(0), np.empty(0)
        while not t.size or log_size[-1] > REST:
            more = spacing * (len(t) + np.arange(max(8, math.ceil((t_end if not t.size else t[-1] / 3) / spacing))))
            if len(t) + len(more) > LONGEST:
                raise Unresolved
            logs = [(part.times, *part.log_phi(more)) for part in parts]
            t = np.append(t, more)
            log_size = np.append(log_size, sum(count * real for count, real, _ in logs))
            phase = np.append(phase, sum(count * imaginary for count, _, imaginary in logs))
        self._log_moment = sum(part.times * part.log_moment for part in parts)
        self._mean = sum(part.times * part.mean for part in parts)
        s = c + 1j * t
        weights = np.exp(log_size + 1j * phase) / (s * (s + 1)) * (spacing / math.pi)
        weights[0] /= 2
        self._t, self._weights, self._total = t, weights, float(np.abs(weights).sum())
        self._rest = math.exp(self._certify(terms, parts, swapped)) / (math.pi * float(t[-1]))
        steps = sum(part.times for part in parts)
        self._rounding = ROUNDING * (64 + 8 * abs(self._log_moment) + 8 * math.sqrt(steps) + 2 * c * abs(self._mean))

    def _certify(self, terms: Sequence[_Term], parts: Sequence[_Tilted], swapped: bool) -> float:
        """Bound on ``log |product of characteristic functions|`` from the last point on."""
        largest = max(range(len(parts)), key=lambda i: parts[i].times * float(parts[i].mass @ parts[i].offsets ** 2))
        return _log_bound_beyond(terms[largest], parts[largest], self.c, float(self._t[-1]), swapped)

    def value(self, epsilon: float) -> tuple[float, float, float]:
        """Trapezoid sum at ε, its derivative in ε, and the error that truncation and rounding may have made."""
        log_peak = self._log_moment - self.c * epsilon
        if abs(log_peak) > 600:
            raise Unresolved
        peak = math.exp(log_peak)
        turned = self._weights * np.exp(1j * self._t * (self._mean - epsilon))
        total = peak * float(turned.real.sum())
        slope = -peak * float((turned * (self.c + 1j * self._t)).real.sum())
        error = peak * (self._rest + (self._rounding + 4 * ROUNDING * self.c * abs(epsilon)) * self._total)
        return total, slope, error

    def alias(self, epsilon: float) -> float:
        """Upper bound on what the aliases add at ε."""
        below = math.exp(-self.c * self.period)
        usable = self._moments.tilts > self.c
        exponents = (self._moments.bound - self._moments.tilts * epsilon)[usable]
        decay = np.exp(-(self._moments.tilts[usable] - self.c) * self.period)
        with np.errstate(over="ignore", invalid="ignore"):
            above = np.exp(exponents) * decay / (1 - decay)
        above = float(np.min(above, initial=math.inf, where=np.isfinite(above)))
        return below / (1 - below) + above


def _refined(term: _Term, part: _Tilted, c: float, frequency: float, swapped: bool) -> _Tilted:
    """The same part from a rule that is fine enough for oscillations up to a frequency."""
    gaps = float(part.gaps[part.mass > 1e-17].max())
    if frequency * gaps + 26.6 * term.step <= 2 * math.pi:
        return part
    step = 2 * math.pi / (frequency * gaps / term.step + 26.6)
    if term.step / step > 40:
        raise Unresolved
    return _tilted(_term(term.law, term.times, swapped=swapped, step=step), c)


def _log_bound_beyond(term: _Term, part: _Tilted, c: float, start: float, swapped: bool) -> float:
    """Bound on ``count * log |φ(t)|`` for all t >= start."""
    level = math.exp(1.05 * REST / part.times)  # what |φ| must not exceed
    end = _where_variation_suffices(part, level)
    if end <= start:
        return part.times * math.log(level)
    deviation = float(part.mass @ np.abs(part.offsets))
    variance = float(part.mass @ part.offsets**2)
    turn = min(max(2.5 / deviation, start), end)
    points = math.ceil(math.log(turn / start) / math.log(1.1)) + math.ceil((end - turn) * deviation / 0.25)
    if points > CERTIFICATE:
        raise Unresolved
    t = np.append(
        start * (turn / start) ** np.linspace(0, 1, math.ceil(math.log(turn / start) / math.log(1.1)) + 1),
        turn + (end - turn) * np.linspace(0, 1, math.ceil((end - turn) * deviation / 0.25) + 1)[1:],
    )
    part = _refined(term, part, c, end, swapped)
    size = np.exp(part.log_phi(t)[0])
    slope = np.minimum(deviation, variance * t[1:])
    bound = (size[:-1] + size[1:]) / 2 + slope * np.diff(t) / 2
    largest = max(float(bound.max(initial=0.0)), level)
    if largest >= 1 or part.times * math.log(largest) > REST / 2:
        raise Unresolved
    return part.times * math.log(largest)


def _where_variation_suffices(part: _Tilted, level: float) -> float:
    """A frequency from which on ``|φ(t)| <= ∫ (f - κ)+ + variation(min(f, κ)) / t <= level`` for some κ."""
    density = part.mass / np.maximum(part.gaps, 1e-300)
    caps = np.quantile(density[part.mass > 1e-6], [0.5, 0.7, 0.85, 1.0])[:, None]
    cut = np.minimum(density, caps)
    above = part.mass @ (1 - cut / density).T
    variation = 1.1 * (np.abs(np.diff(cut, axis=1)).sum(1) + cut[:, 0] + cut[:, -1])
    with np.errstate(divide="ignore"):
        ends = np.where(above < level, variation / (level - above), np.inf)
    return float(ends.min())


class ContourCurve:
    """One direction's curve by the contour engine.

    Raises:
        Unresolved: now or when asked, the integral converges too slowly (few steps), or a law is not smooth.
    """

    def __init__(self, steps: Sequence[tuple[Law, int]], *, swapped: bool):
        self._terms = [_term(law, count, swapped=swapped) for law, count in steps]
        self._swapped = swapped

    @cached_property
    def _moments(self) -> _Moments:
        return _Moments(self._terms)

    def _line(self, epsilon: float, log_delta: float) -> _Line:
        """The line with the shortest sum among those whose integrand is not much larger than δ."""
        moments = self._moments
        tilts, chernoff = moments.tilts, moments.bound - moments.tilts * epsilon
        log_delta = min(log_delta, float(chernoff.min()))
        log_peak = moments.log_moment - tilts * epsilon - np.log(tilts * (1 + tilts))
        allowed = log_peak - log_delta <= max(AMPLIFICATION, float((log_peak - log_delta).min()) + 1)
        log_alias = math.log(ALIAS) + log_delta
        apart = tilts - tilts[:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            above = np.where(apart > 0, (chernoff - log_alias) / apart, np.inf).min(1)
        period = np.maximum(-log_alias / tilts, above)
        cost = np.where(allowed, np.sqrt(-2 * REST / moments.variance) * period, np.inf)
        best = int(cost.argmin())
        return _Line(self._terms, float(tilts[best]), float(period[best]), moments, swapped=self._swapped)

    def delta(self, epsilon: float) -> Bracket[float]:
        exponent = float((self._moments.bound - self._moments.tilts * epsilon).min())
        line = self._line(epsilon, min(exponent, 0.0) - 2.0)
        total, _, error = line.value(epsilon)
        floor = max(-math.expm1(min(epsilon, 0.0)), 0.0)
        high = min(total + error, 1.0)
        return Bracket(min(max(total - error - line.alias(epsilon), floor, 0.0), high), high)

    def epsilon(self, delta: float) -> Bracket[float]:
        line, root = self._solve(delta)
        if line is None:
            return Bracket(0.0, 0.0)
        return Bracket(self._below(line, root, delta), self._above(line, root, delta))

    def epsilon_high(self, delta: float) -> float:
        line, root = self._solve(delta)
        return 0.0 if line is None else self._above(line, root, delta)

    def epsilon_bound(self, delta: float) -> float:
        return self._moments.epsilon_bound(delta)

    def _solve(self, delta: float) -> tuple[_Line | None, float]:
        """A line near the saddle point of ε(δ), and the ε where its sum is δ; no line if ε = 0 is enough."""
        start = self.epsilon_bound(delta)
        line = self._line(start, math.log(delta))
        epsilon = start
        for _ in range(50):
            total, slope, _ = line.value(epsilon)
            if not (total > 0 and slope < 0):
                raise Unresolved
            step = (math.log(total) - math.log(delta)) * total / -slope
            following = max(epsilon + step, 0.0)
            if abs(following - epsilon) <= 1e-14 * abs(epsilon):
                break
            if following == 0.0 and epsilon == 0.0:
                break
            epsilon = following
        else:
            raise Unresolved
        if epsilon < 1e-12:
            total, _, error = line.value(0.0)
            if total + error <= delta:
                return None, 0.0
            raise Unresolved  # whether ε is 0 cannot be told from rounding
        return line, epsilon

    @staticmethod
    def _above(line: _Line, root: float, delta: float) -> float:
        total, slope, error = line.value(root)
        margin = 1.5 * (error + abs(total - delta)) / -slope + 1e-15 * root
        for _ in range(60):
            total, _, error = line.value(root + margin)
            if total + error <= delta:
                return root + margin
            margin *= 2
        raise Unresolved

    @staticmethod
    def _below(line: _Line, root: float, delta: float) -> float:
        total, slope, error = line.value(root)
        margin = 1.5 * (error + line.alias(root) + abs(total - delta)) / -slope + 1e-15 * root
        for _ in range(60):
            epsilon = root - margin
            if epsilon <= 0:
                return 0.0
            total, _, error = line.value(epsilon)
            if total - error - line.alias(epsilon) > delta:
                return epsilon
            margin *= 2
        return 0.0
