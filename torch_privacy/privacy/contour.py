# SPDX-License-Identifier: Apache-2.0
"""The contour engine: δ(ε) as an integral of the privacy loss's moments, inverted on a line through its saddle point.

``δ(ε) = 1/(2πi) ∫ exp(K(s) - s ε) / (s (s + 1)) ds`` along ``s = c + i t``, c > 0, with
``K(s) = Σ count * log E_P e^(s l)`` over all steps. The number of steps only multiplies K, so a million cost as little
as a hundred. The trapezoid rule with spacing 2π/P gives **exactly** ``Σ_k e^(c k P) δ(ε + k P)``: the truth plus
aliases that are positive and bounded by ``δ <= 1`` below ε and by moments above it.

Proved, given exact arithmetic: aliasing (the upper bound needs no proof at all: aliases are positive), and what is left
of the integral beyond the last point (`_log_bound_beyond`: Lipschitz bounds between the points of a grid, and ``mass
above κ + variation of min(density, κ) / t`` beyond it). Estimated: rounding (`ROUNDING`), the trapezoid rule
inside K (its spacing makes it converge to 1e-15), and the variation of the density, taken at the rule's own points.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from .bracket import Array, Bracket
from .curve import Unresolved, bisect
from .law import Continuous, Law

ALIAS = 1e-13  # aliases, relative to δ
REST = -42.0  # log of the integrand, relative to its peak, beyond the last point
ROUNDING = 2.0**-53
LONGEST = 1200  # points of the outer rule; beyond, the lattice is quicker
CERTIFICATE = 600  # points of the certificate's grid
ALIAS_OF_ONE = 1e-17  # aliases on a Hellinger line, absolute
REACHES = (2.0, 8.0, 32.0, 128.0, 512.0, 2048.0)  # ε up to which Hellinger lines are made
WIDEST = 1e-4  # half a bracket, relative to ε, beyond which another engine does better
NOTHING = 1e-18  # width of a bracket of δ that always suffices
RARE = 2.0**-10  # how much smaller the candidates are where sampling is rare
AMPLIFICATION = 5.0  # log of the integrand's peak over δ that is tolerated for a shorter sum
TILTS = 2.0 ** np.arange(-3, 8.5, 0.4)  # candidates for c, in units of one over the composed deviation


class _Term(NamedTuple):
    """One law's nodes in the chosen direction."""

    law: Continuous
    times: int
    losses: Array
    log_mass: Array
    mass: Array
    gaps: Array
    step: float
    drift: float  # E_P [e^-l - 1], 0 but for rounding


@lru_cache(maxsize=512)
def _term(law: Law, times: int, swapped: bool, halvings: int = 0) -> _Term:
    """A law's nodes, their spacing the coarsest over ``2^(halvings / 2)``."""
    nodes = law.nodes(law.coarsest_step / 2 ** (halvings / 2)) if isinstance(law, Continuous) else None
    if nodes is None:
        raise Unresolved
    assert isinstance(law, Continuous)
    losses, log_mass, gaps, step = nodes
    if swapped:
        losses, log_mass = -losses, log_mass - losses
    small, mass = np.abs(losses) < 1, np.exp(log_mass)
    near = np.expm1(-np.where(small, losses, 0.0)) * mass
    drift = float(np.where(small, near, np.exp(log_mass - losses) - mass).sum())
    return _Term(law, times, losses, log_mass, mass, gaps, step, drift)


def _entropy(s: Array) -> Array:
    """``H(s) = s log s - (1 + s) log(1 + s)``: ``δ(ε) <= exp(K(s) + H(s) - s ε)`` for every s > 0."""
    return s * np.log(s) - (1 + s) * np.log1p(s)


class _Moments:
    """K(s) on a grid of real s > 0, with the variance of the composed loss under each tilt."""

    def __init__(self, terms: Sequence[_Term], scale: float = 1.0):
        weights = [term.mass for term in terms]
        moment = sum(term.times * float(weight @ term.losses**2) for term, weight in zip(terms, weights, strict=True))
        if moment < 1e-250:  # out of floating-point range
            raise Unresolved
        self.tilts = TILTS * scale / math.sqrt(moment)
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
        excess = grown @ weight + tilts * term.drift
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
    step: float
    mean: float
    log_moment: float

    def log_phi(self, t: Array) -> tuple[Array, Array]:
        """Real and imaginary part of ``log E e^(i t (l - mean))`` under the tilt."""
        return _log_parts(self._turned(t) @ self.mass)

    def log_phi_at_multiples(self, spacing: float, count: int) -> tuple[Array, Array]:
        """The same for t = 0, spacing, 2 spacing, ..., by ``e^(i(a + b)) - 1 = A B + A + B``: few sines, one product.

        With A = e^(ia) - 1 and B = e^(ib) - 1 no digit of φ - 1 is lost, as φ itself would lose them.
        """
        width = math.isqrt(count - 1) + 1
        fine = self._turned(spacing * np.arange(width))
        coarse = self._turned(spacing * width * np.arange(math.ceil(count / width))) * self.mass
        excess = coarse @ fine.T + coarse.sum(1)[:, None] + fine @ self.mass
        return _log_parts(excess.ravel()[:count])

    def _turned(self, t: Array) -> Array:
        """``e^(i t (l - mean)) - 1``, a row for each t."""
        half = t[:, None] * (self.offsets / 2)
        sine = np.sin(half)
        turned = np.empty(half.shape, complex)
        turned.real = -2 * sine**2
        turned.imag = 2 * sine * np.cos(half)
        return turned


def _log_parts(excess: Array) -> tuple[Array, Array]:
    """Real and imaginary part of ``log(1 + excess)``."""
    real, imaginary = np.real(excess), np.imag(excess)
    size = np.maximum(2 * real + real**2 + imaginary**2, -1 + 2e-15)  # |φ|² - 1; less is rounding
    return np.log1p(size) / 2, np.arctan2(imaginary, 1 + real)


def _tilted(term: _Term, c: float) -> _Tilted:
    excess = float(np.expm1(c * term.losses) @ term.mass) + c * term.drift
    exponents = term.log_mass + c * term.losses
    kept = exponents > exponents.max() - 44
    mass = np.exp(exponents[kept] - exponents.max())
    mass /= mass.sum()
    losses = term.losses[kept]
    mean = float(mass @ losses)
    return _Tilted(term.times, losses - mean, mass, term.gaps[kept], term.step, mean, math.log1p(excess))


class _Line:
    """The integrand on one vertical line: δ at any ε near the one that the line was chosen for."""

    def __init__(self, terms: Sequence[_Term], c: float, period: float, *, swapped: bool):
        self.c, self.period = c, period
        parts = [_tilted(term, c) for term in terms]
        spread = math.sqrt(sum(part.times * float(part.mass @ part.offsets**2) for part in parts))
        spacing, end = 2 * math.pi / period, math.sqrt(-2 * REST) / spread
        while True:  # until the integrand is negligible
            if end > LONGEST * spacing:
                raise Unresolved
            parts = [_refined(term, part, c, end, swapped)[0] for term, part in zip(terms, parts, strict=True)]
            if sum(part.times * float(part.log_phi(np.array([end]))[0][0]) for part in parts) <= REST:
                break
            end *= 1.25
        t = spacing * np.arange(max(math.ceil(end / spacing) + 1, 8))
        parts = [_refined(term, part, c, float(t[-1]), swapped)[0] for term, part in zip(terms, parts, strict=True)]
        logs = [(part.times, *part.log_phi_at_multiples(spacing, len(t))) for part in parts]
        log_size = sum((times * real for times, real, _ in logs), np.zeros(len(t)))
        phase = sum((times * imaginary for times, _, imaginary in logs), np.zeros(len(t)))
        self._log_moment = sum(part.times * part.log_moment for part in parts)
        self._mean = sum(part.times * part.mean for part in parts)
        s = c + 1j * t
        weights = np.exp(log_size + 1j * phase) / (s * (s + 1)) * (spacing / math.pi)
        weights[0] /= 2
        self._t, self._weights, self._total = t, weights, float(np.abs(weights).sum())
        self._rest = math.exp(_log_bound_beyond(terms, parts, c, float(t[-1]), swapped)) / (math.pi * float(t[-1]))
        steps = sum(part.times for part in parts)
        self._rounding = ROUNDING * (64 + 8 * abs(self._log_moment) + 8 * math.sqrt(steps) + 2 * abs(c * self._mean))

    def value(self, epsilon: float) -> tuple[float, float, float]:
        """Trapezoid sum at ε, its derivative in ε, and the error that truncation and rounding may have made."""
        log_peak = self._log_moment - self.c * epsilon
        if abs(log_peak) > 600:
            raise Unresolved
        peak = math.exp(log_peak)
        turned = self._weights * np.exp(1j * self._t * (self._mean - epsilon))
        total = peak * float(turned.real.sum()) + (self.c < 0)  # the integral is δ - 1 left of the pole at 0
        slope = -peak * float((turned * (self.c + 1j * self._t)).real.sum())
        rounding = self._rounding + 4 * ROUNDING * abs(self.c * epsilon)
        error = peak * (self._rest + rounding * self._total) + 4 * ROUNDING * (self.c < 0)
        return total, slope, error


def _refined(
    term: _Term, part: _Tilted, c: float, frequency: float, swapped: bool, negligible: float = 1e-16
) -> tuple[_Tilted, float]:
    """The same part from a rule that is fine enough for oscillations up to a frequency, and its steepest slope.

    The nodes of the widest gaps are let be that have no more mass than ``negligible`` together.
    """
    widest = np.argsort(part.gaps)[::-1]
    first = int(np.searchsorted(np.cumsum(part.mass[widest]), negligible))
    slope = float(part.gaps[widest[first]]) / part.step
    if (frequency * slope + 26.6) * part.step <= 2 * math.pi:
        return part, slope
    step = 2 * math.pi / (frequency * slope + 26.6)
    if term.step / step > 100:
        raise Unresolved
    coarsest = term.law.coarsest_step
    return _tilted(_term(term.law, term.times, swapped, math.ceil(2 * math.log2(coarsest / step))), c), slope


def _log_bound_beyond(terms: Sequence[_Term], parts: Sequence[_Tilted], c: float, start: float, swapped: bool) -> float:
    """Bound on ``Σ times * log |φ(t)|`` for all t >= start, from the easier half of the parts."""
    share = 1.0 if len(parts) == 1 else 0.5
    level = math.exp(1.05 * REST / (share * sum(part.times for part in parts)))  # what |φ| must not exceed in the end
    ends = [_where_variation_suffices(part, level) for part in parts]
    order = sorted(range(len(parts)), key=ends.__getitem__)
    reached = np.cumsum([parts[i].times for i in order])
    chosen = order[: int(np.searchsorted(reached, share * reached[-1])) + 1]  # the easiest half of the steps
    steps, end = sum(parts[i].times for i in chosen), ends[chosen[-1]]
    if end <= start:
        return steps * math.log(level)
    deviation = max(float(parts[i].mass @ np.abs(parts[i].offsets)) for i in chosen)
    turn = min(max(2.5 / deviation, start), end)
    steady = math.ceil(math.log(turn / start) / math.log(1.1)), math.ceil((end - turn) * deviation / 0.25)
    if sum(steady) > CERTIFICATE:
        raise Unresolved
    t = start * (turn / start) ** np.linspace(0, 1, steady[0] + 1)
    t = np.append(t, turn + (end - turn) * _fractions(steady[1]))
    total = np.zeros(len(t) - 1)
    for i in chosen:
        total += parts[i].times * np.log(_size_between(terms[i], parts[i], c, t, swapped, 0.02 * (1 - level)))
    largest = max(float(total.max(initial=-math.inf)), steps * math.log(level))
    if largest > REST / 2:
        raise Unresolved
    return largest


def _size_between(term: _Term, part: _Tilted, c: float, t: Array, swapped: bool, negligible: float) -> Array:
    """Bound on |φ| between neighboring t, from its values there and its Lipschitz constants."""
    deviation, variance = float(part.mass @ np.abs(part.offsets)), float(part.mass @ part.offsets**2)
    part, slope = _refined(term, part, c, float(t[-1]), swapped, negligible)
    kept = part.gaps <= slope * part.step * (1 + 1e-9)
    angle, mass = t[:, None] * part.offsets[kept], part.mass[kept]
    size = np.hypot(np.cos(angle) @ mass, np.sin(angle) @ mass) + 1 - float(mass.sum())
    return np.minimum((size[:-1] + size[1:]) / 2 + np.minimum(deviation, variance * t[1:]) * np.diff(t) / 2, 1.0)


def _fractions(count: int) -> Array:
    """1/count, 2/count, ..., 1."""
    return np.arange(1, count + 1) / max(count, 1)


def _where_variation_suffices(part: _Tilted, level: float) -> float:
    """A frequency from which on ``|φ(t)| <= ∫ (f - κ)+ + variation(min(f, κ)) / t <= level`` for some κ."""
    density = part.mass / np.maximum(part.gaps, 1e-300)
    levels = np.sort(density[part.mass > 1e-6])
    caps = levels[[len(levels) // 2, 7 * len(levels) // 10, 17 * len(levels) // 20, -1], None]
    cut = np.minimum(density, caps)
    above = part.mass @ (1 - cut / density).T
    variation = 1.1 * (np.abs(np.diff(cut, axis=1)).sum(1) + cut[:, 0] + cut[:, -1])
    with np.errstate(divide="ignore"):
        ends = np.where(above < level, variation / (level - above), np.inf)
    return float(ends.min())


class SaddleCurve:
    """One direction's curve, from lines near the saddle point: for laws with positive moments."""

    def __init__(self, steps: Sequence[tuple[Law, int]], *, swapped: bool):
        self._terms = [_term(law, count, swapped) for law, count in steps]
        self._swapped = swapped

    @cached_property
    def _moments(self) -> _Moments:
        try:
            return _Moments(self._terms)
        except Unresolved:  # rare sampling: a few large losses make up the deviation
            return _Moments(self._terms, RARE)

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
        return _Line(self._terms, float(tilts[best]), float(period[best]), swapped=self._swapped)

    def _alias(self, line: _Line, epsilon: float) -> float:
        """Upper bound on what the aliases add at ε."""
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
        line = self._line(epsilon, min(exponent, 0.0) - 2.0)
        total, _, error = line.value(epsilon)
        floor = max(-math.expm1(min(epsilon, 0.0)), 0.0)
        high = min(total + error, 1.0)
        low = total - error - self._alias(line, epsilon)
        if high - low > 10 * WIDEST * high + NOTHING:
            raise Unresolved
        return Bracket(min(max(low, floor), high), high)

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
        high = self.epsilon_bound(delta)
        line = self._line(high, math.log(delta))
        low, epsilon = 0.0, high
        for _ in range(80):  # Newton in log δ, by halves where that leads out of [low, high]
            total, slope, _ = line.value(epsilon)
            low, high = (epsilon, high) if total > delta else (low, epsilon)
            following = -1.0
            if total > 0 and slope < 0:
                following = epsilon + math.log(total / delta) * total / -slope
            if abs(following - epsilon) <= 1e-14 * epsilon or high - low <= 1e-14 * high:
                break
            if not low < following < high:
                following = 0.0 if low == 0.0 and following <= 0.0 < epsilon and total > 0 else (low + high) / 2
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
        if slope >= 0:
            raise Unresolved
        margin = 1.5 * (error + abs(total - delta)) / -slope + 1e-15 * root
        while margin <= WIDEST * root:
            total, _, error = line.value(root + margin)
            if total + error <= delta:
                return root + margin
            margin *= 2
        raise Unresolved

    def _below(self, line: _Line, root: float, delta: float) -> float:
        total, slope, error = line.value(root)
        if slope >= 0:
            raise Unresolved
        margin = 1.5 * (error + self._alias(line, root) + abs(total - delta)) / -slope + 1e-15 * root
        while margin <= WIDEST * root:
            epsilon = root - margin
            total, _, error = line.value(epsilon)
            if total - error - self._alias(line, epsilon) > delta:
                return epsilon
            margin *= 2
        raise Unresolved


class HellingerCurve:
    """One direction's curve, from lines with -1 < c < 0: for laws without any positive moment.

    There the integral is δ(ε) - 1, and the trapezoid rule gives ``δ - Σ_{k != 0} e^(c k P) (1 - δ(ε + k P))``; the
    aliases, by ``1 - δ(ε) <= min(1, e^ε)``, are at most ``e^(c P) / (1 - e^(c P))`` from above ε and
    ``e^(ε - (1 + c) P)``, over one minus its ratio, from below. They count for the upper bound; the lower one needs
    none. δ comes as a small difference from 1, so that rounding costs about 1e-14 / δ of it.
    """

    def __init__(self, steps: Sequence[tuple[Law, int]], *, swapped: bool):
        self._terms = [_term(law, count, swapped) for law, count in steps]
        self._swapped = swapped
        self._lines: dict[float, _Line] = {}

    def _line(self, reach: float) -> _Line:
        """A line that serves all ε up to ``reach``."""
        if reach not in self._lines:
            size = -math.log(ALIAS_OF_ONE)
            period = reach + 2 * size
            self._lines[reach] = _Line(self._terms, -size / period, period, swapped=self._swapped)
        return self._lines[reach]

    @staticmethod
    def _alias(line: _Line, epsilon: float) -> float:
        above, log_ratio = math.exp(line.c * line.period), -(1 + line.c) * line.period
        return above / (1 - above) + math.exp(min(epsilon + log_ratio, 0.0)) / -math.expm1(log_ratio)

    def _bounds(self, line: _Line, epsilon: float) -> Bracket[float]:
        total, _, error = line.value(epsilon)
        floor = max(-math.expm1(min(epsilon, 0.0)), 0.0)
        high = min(total + error + self._alias(line, epsilon), 1.0)
        return Bracket(min(max(total - error, floor), high), high)

    def delta(self, epsilon: float) -> Bracket[float]:
        reach = REACHES[int(np.searchsorted(REACHES, epsilon))] if epsilon <= REACHES[-1] else None
        if reach is None:
            raise Unresolved
        return self._bounds(self._line(reach), epsilon)

    def epsilon(self, delta: float) -> Bracket[float]:
        line, reach = self._enough(delta)
        high = self._crossing(lambda epsilon: self._bounds(line, epsilon).high <= delta, reach)[1]
        low = self._crossing(lambda epsilon: self._bounds(line, epsilon).low <= delta, reach)[0]
        return Bracket(min(low, high), high)

    def epsilon_high(self, delta: float) -> float:
        line, reach = self._enough(delta)
        return self._crossing(lambda epsilon: self._bounds(line, epsilon).high <= delta, reach)[1]

    def epsilon_bound(self, delta: float) -> float:
        return math.inf

    def _enough(self, delta: float) -> tuple[_Line, float]:
        """A line that reaches ε(δ)."""
        for reach in REACHES:
            line = self._line(reach)
            if self._bounds(line, reach).high <= delta:
                return line, reach
        raise Unresolved

    @staticmethod
    def _crossing(holds: Callable[[float], bool], reach: float) -> tuple[float, float]:
        if holds(0.0):
            return 0.0, 0.0
        return bisect(holds, 0.0, reach, 1e-12)


def curve(steps: Sequence[tuple[Law, int]], *, swapped: bool) -> SaddleCurve | HellingerCurve:
    """One direction's curve by the contour engine.

    Raises:
        Unresolved: now or when asked, the integral converges too slowly (few steps), or a law is not smooth.
    """
    heavy = any(law.heavy for law, _ in steps if isinstance(law, Continuous)) and not swapped
    return (HellingerCurve if heavy else SaddleCurve)(steps, swapped=swapped)
