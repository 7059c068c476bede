# SPDX-License-Identifier: Apache-2.0
"""Lattice pairs composed by FFT under an exponential tilt, with bounds for all that a finite FFT leaves out.

Composition convolves the laws of the privacy loss: T steps are a T-th power in Fourier space. Small tails would drown
in rounding (1e-16 of the largest mass), so the law is tilted first, ``g(l) = p(l) e^{s l} / M(s)``, composed, and
untilted by ``A(l) = M(s)^T e^{-s l}``. With s at the saddle point for ε, g is centered on ε, and errors of g enter
``δ(ε) = Σ_{l > ε} p(l) (1 - e^{ε - l})`` multiplied by ``A(ε)``, which is about the size of δ(ε) itself.

Proved, given exact arithmetic: mass outside the FFT's window is below TAIL on either side (Chernoff bounds of the
tilted law); its absence at the top and its wrapping around go on top of the upper bound and off the lower one.
Estimated: rounding. Each FFT entry is trusted to ``ROUNDING * (steps + log2 length)`` times the mean spectral
magnitude, each one-step moment to ROUNDING, relative; both estimates go to the safe side.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..bracket import Array
from ..pairs.base import Law, Subsampled
from .curve import Bracket, Unresolved, bisect, crossing
from .lattice import Lattice, optimistic, pessimistic
from .tilt import tilt_entropy

TAIL = 1e-17  # tilted mass outside the window, per side
LONGEST = 2**22  # FFT length, beyond which the spacing is doubled
POINTS = 2**18  # lattice points that a typical window may take before the spacing is widened
COARSEST = 1e4  # deviations of a step that a spacing may be: what is hardly ever sampled hardly ever deviates
FINEST = 4e-3  # spacing that even widely spread losses get
ROUNDING = 16 * 2.0**-53
NEARLY = 3.0  # log of the factor in error by which a tilt may miss the best one
NEGLIGIBLE = -45.0  # log magnitude below which a Fourier coefficient counts as rounding error
LARGEST_LOG = 600.0  # untilted masses above e^600 never matter: their epsilon lies far below any that is asked for

Terms = Sequence[tuple[Lattice, int]]
Discretise = Callable[[Law, float], Lattice]


class WindowTooLong(Exception):
    """The composed law needs more than LONGEST lattice points at this spacing."""


class Grouped:
    """A few hundred points that dominate a lattice law in convex order, for cheap upper bounds on its moments.

    Points in a group move to its two ends, keeping the mean; ``e^{t l}`` is convex, so no moment gets smaller. Groups
    are a twentieth of a standard deviation wide in the middle and grow like the distance from the mean.
    """

    def __init__(self, losses: Array, mass: Array, mean: float, deviation: float):
        spacing = losses[1] - losses[0]
        fine = max(deviation / 20, spacing)
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
        """Upper bound on ``log E e^{t (l - mean)}`` for an array of t."""
        exponents = self.log_weights + t[:, None] * self.points
        largest = exponents.max(1)
        return largest + np.log(np.exp(exponents - largest[:, None]).sum(1))


@dataclass(frozen=True, eq=False)
class Tilted:
    """One lattice law under the tilt s: ``mass * e^{s l} / M(s)``."""

    lattice: Lattice
    s: float

    @cached_property
    def _unnormalised(self) -> tuple[Array, float]:
        exponents = self.s * self.lattice.losses
        shift = float(exponents[self.lattice.mass > 0].max()) if self.s else 0.0
        return self.lattice.mass * np.exp(np.minimum(exponents - shift, 0)), shift

    @cached_property
    def log_moment(self) -> float:
        """``log M(s) = log Σ mass e^{s l}``."""
        weights, shift = self._unnormalised
        return float(np.log(weights.sum())) + shift

    @cached_property
    def mass(self) -> Array:
        weights = self._unnormalised[0]
        return weights / weights.sum()

    @cached_property
    def mean(self) -> float:
        # Not a BLAS product: waking its threads costs more than they save.
        return float((self.mass * self.lattice.losses).sum())

    @cached_property
    def variance(self) -> float:
        return float((self.mass * (self.lattice.losses - self.mean) ** 2).sum())

    @cached_property
    def grouped(self) -> Grouped:
        return Grouped(self.lattice.losses, self.mass, self.mean, self.variance**0.5)

    @cached_property
    def center(self) -> int:
        """Index of the lattice point nearest to the mean."""
        return round((self.mean - self.lattice.start) / self.lattice.spacing)

    def spectrum(self, length: int) -> Array:
        """Fourier coefficients of the mass wrapped onto ``length`` points, the center at index 0."""
        wrapped = np.zeros(-(-len(self.mass) // length) * length)
        wrapped[: len(self.mass)] = self.mass
        wrapped = wrapped.reshape(-1, length).sum(0)
        return np.fft.rfft(np.roll(wrapped, -(self.center % length)))


class Composed:
    """All steps composed under one tilt s >= 0: δ at any ε, best near the ε whose saddle point s is.

    Formulas, with S(l) the untilted mass at l and above: ``δ(ε) = ∫_ε^∞ e^{ε - t} S(t) dt``, hence on the lattice
    ``δ(l_j) = (1 - e^-h) Σ_{k > j} e^{-(k - j - 1) h} S_k``, in between ``δ(l_j - r) = (1 - e^-r) S_j + e^-r δ(l_j)``:
    sums of positive terms only.
    """

    def __init__(self, terms: Terms, s: float):
        self.s, self.spacing = s, terms[0][0].spacing
        tilted = [(Tilted(lattice, s), count) for lattice, count in terms]
        self.steps = sum(count for _, count in tilted)
        self.log_moment = sum(count * term.log_moment for term, count in tilted)
        self.only_p = -float(np.expm1(sum(count * np.log1p(-term.lattice.only_p) for term, count in tilted)))
        parts = [np.log(count) + term.lattice.log_neglected for term, count in tilted]
        self.log_neglected = float(np.logaddexp.reduce(parts))

        mean = sum(count * term.mean for term, count in tilted)
        below, above = _window(tilted)
        length = _fast_length(int((below + above) / self.spacing) + 4)
        if length > LONGEST:
            raise WindowTooLong
        mass, self.entry_error = _power(tilted, length)
        origin = sum(count * (term.lattice.start + term.center * self.spacing) for term, count in tilted)
        lowest = round((mean - below - origin) / self.spacing) - 1
        mass = np.roll(mass, -(lowest % length))
        losses = origin + self.spacing * (lowest + np.arange(length))

        log_weights = self._log_bound(losses)
        usable = int(np.searchsorted(-log_weights, -LARGEST_LOG))  # the weights fall with the loss
        self.lowest = float(losses[usable])
        mass = mass[usable:] * np.exp(log_weights[usable:])
        self.above = np.append(np.cumsum(mass[::-1])[::-1], 0.0)  # S_j: mass at lattice point j and higher
        self.at_point = -np.expm1(-self.spacing) * np.append(_discounted(self.above[1:], self.spacing), 0.0)

    def _log_bound(self, epsilon: Array) -> Array:
        """``log A(ε)``."""
        return self.log_moment - self.s * epsilon

    def _sum(self, epsilon: float) -> float:
        """δ of the computed masses at ``epsilon >= lowest``."""
        position = (epsilon - self.lowest) / self.spacing
        j = min(int(position) + 1, len(self.above) - 1)
        rest = max(j - position, 0.0) * self.spacing
        return float(-np.expm1(-rest) * self.above[j] + np.exp(-rest) * self.at_point[j])

    def _error(self, epsilon: float) -> float:
        """What wrapping, the missing top and the rounding of the FFT can change in δ(ε)."""
        sh = self.s * self.spacing
        reached = 1 / np.expm1(sh) - 1 / np.expm1(min(sh + self.spacing, 700.0)) if 0 < sh < 300 else 1.0 / (1 + sh)
        rounding = self.entry_error * min(reached if sh else np.inf, len(self.above))
        return float(np.exp(min(self._log_bound(np.array(epsilon)), LARGEST_LOG)) * (2 * TAIL + rounding))

    @property
    def _relative_error(self) -> float:
        return self.steps * ROUNDING + 1e-13

    def at_most(self, epsilon: float) -> float:
        """Upper bound on δ(ε) of the composed pair."""
        if epsilon < self.lowest:
            return 1.0
        return min(self._sum(epsilon) * (1 + self._relative_error) + self._error(epsilon) + self.only_p, 1.0)

    def at_least(self, epsilon: float) -> float:
        """Lower bound on δ(ε) of the composed pair."""
        epsilon = max(epsilon, self.lowest)  # δ falls with ε
        finite = self._sum(epsilon) * (1 - self._relative_error) - self._error(epsilon)
        telling = self.only_p * (1 - self._relative_error) - np.exp(min(self.log_neglected + epsilon, LARGEST_LOG))
        return max(finite + max(telling, 0.0), 0.0)


def _window(tilted: Sequence[tuple[Tilted, int]]) -> tuple[float, float]:
    """Distances below and above the mean beyond which the composed tilted law has less than TAIL of its mass.

    Chernoff: ``P(l - mean > w) <= exp(Σ K(t) - t w)`` for every t > 0.
    """
    spacing = tilted[0][0].lattice.spacing  # a law tilted onto a single point has no deviation
    deviation = max(sum(count * term.variance for term, count in tilted) ** 0.5, spacing)
    t = np.sqrt(-2 * np.log(TAIL)) / deviation * 2.0 ** np.arange(-16, 3.5, 0.5)
    above = (sum(count * term.grouped.log_moment(t) for term, count in tilted) - np.log(TAIL)) / t
    below = (sum(count * term.grouped.log_moment(-t) for term, count in tilted) - np.log(TAIL)) / t
    return float(below.min()), float(above.min())


def _fast_length(at_least: int) -> int:
    """The next length that an FFT takes in small factors."""
    return min(odd * 2 ** math.ceil(math.log2(max(at_least / odd, 1))) for odd in (1, 3, 5, 9, 15))


def _power(tilted: Sequence[tuple[Tilted, int]], length: int) -> tuple[Array, float]:
    """The product of all characteristic functions, transformed back, and the estimated rounding error of one entry.

    Only coefficients above e^NEGLIGIBLE are computed: for many steps, a few dozen out of a hundred thousand.
    """
    spectra = [(term.spectrum(length), count) for term, count in tilted]
    with np.errstate(divide="ignore"):  # log 0 = -∞ is right
        log_magnitude = np.sum([count * np.log(np.abs(spectrum)) for spectrum, count in spectra], axis=0)
    kept = np.flatnonzero(log_magnitude > NEGLIGIBLE)
    phase = np.sum([count * np.angle(spectrum[kept]) for spectrum, count in spectra], axis=0)
    product = np.zeros(length // 2 + 1, complex)
    product[kept] = np.exp(log_magnitude[kept] + 1j * phase)
    steps = sum(count for _, count in tilted)
    mean_magnitude = 2 * float(np.abs(product[kept]).sum()) / length
    entry_error = ROUNDING * (steps + np.log2(length)) * mean_magnitude + np.exp(NEGLIGIBLE)
    return np.maximum(np.fft.irfft(product, length), 0.0), float(entry_error)


def _discounted(values: Array, spacing: float) -> Array:
    """``R_j = Σ_{k >= j} e^{-(k - j) h} values_k``, block by block so that no exponential overflows."""
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


class Family:
    """One composed lattice pair under every tilt that its questions call for."""

    def __init__(self, terms: Terms):
        self._terms = terms
        self._composed: dict[float, Composed] = {}

    @cached_property
    def _tilts(self) -> tuple[Array, Array]:
        """Candidate tilts s, from none at all to far beyond the last deviation, and bounds on ``K(s) + H(s)``."""
        plain = [(Tilted(lattice, 0.0), count) for lattice, count in self._terms]
        deviation = sum(count * term.variance for term, count in plain) ** 0.5
        s = np.exp2(np.arange(min(-5 - np.log2(deviation), -5), 13 - np.log2(deviation), 1 / 8))
        moments = sum(count * (term.grouped.log_moment(s) + s * term.mean + term.log_moment) for term, count in plain)
        return np.append(s, 0.0), np.append(moments + tilt_entropy(s), 0.0)

    def at_epsilon(self, epsilon: float) -> Composed:
        """The composition under the tilt that suits ε best, or under one already there that is nearly as good."""
        s, bounds = self._tilts
        exponents = bounds - s * epsilon
        known = np.flatnonzero(np.isin(s, list(self._composed)) & (exponents < exponents.min() + NEARLY))
        best = float(s[known[0] if known.size else exponents.argmin()])
        if best not in self._composed:
            self._composed[best] = Composed(self._terms, best)
        return self._composed[best]

    def at_delta(self, delta: float) -> Composed:
        """The composition under the tilt that suits ε(δ) best."""
        return self.at_epsilon(self._moments_epsilon(delta))

    def epsilon_bound(self, delta: float) -> float:
        """Upper bound on ε(δ) from the moments of the finite losses; the mass of infinite ones comes off δ."""
        rest = delta - sum(count * lattice.only_p for lattice, count in self._terms)
        return self._moments_epsilon(rest) if rest > 0 else np.inf

    def _moments_epsilon(self, delta: float) -> float:
        """``min_s (K(s) + H(s) + log 1/δ) / s``."""
        s, bounds = self._tilts
        return max(float(((bounds - np.log(delta))[:-1] / s[:-1]).min()), 0.0)


class LatticeCurve:
    """One direction's curve between a pair that is easier to tell apart than the truth and one that is harder.

    Should a composition not fit into LONGEST lattice points, the spacing is doubled and the bracket wider.
    """

    def __init__(self, steps: Sequence[tuple[Law, int]], spacing: float, *, swapped: bool):
        self._steps, self._swapped = steps, swapped
        self._spacing: dict[Discretise, float] = {optimistic: spacing, pessimistic: spacing}
        self._families: dict[Discretise, Family] = {}

    def delta(self, epsilon: float) -> Bracket[float]:
        high = self._composed(pessimistic, lambda family: family.at_epsilon(epsilon)).at_most(epsilon)
        try:
            low = self._tilted_for(epsilon).at_least(epsilon)
        except Unresolved:
            low = 0.0
        return Bracket(low, high)

    def epsilon(self, delta: float) -> Bracket[float]:
        upper = self._composed(pessimistic, lambda family: family.at_delta(delta))
        high = crossing(lambda epsilon: upper.at_most(epsilon) <= delta).high
        try:
            lower = self._composed(optimistic, lambda family: family.at_delta(delta))
        except Unresolved:
            return Bracket(0.0, high)
        reach = high
        if np.isinf(high):
            least, reach = crossing(lambda epsilon: lower.at_least(epsilon) <= delta)
            if np.isinf(reach):
                return Bracket(least, high)
        low = _last_above(lower.at_least, delta, reach)
        if low == 0 < reach:  # at the end of the finite losses: each ε under a tilt of its own
            low = _last_above(lambda epsilon: self._tilted_for(epsilon).at_least(epsilon), delta, reach)
        return Bracket(low, high)

    def epsilon_high(self, delta: float) -> float:
        upper = self._composed(pessimistic, lambda family: family.at_delta(delta))
        return crossing(lambda epsilon: upper.at_most(epsilon) <= delta).high

    def surely_below(self, epsilon: float, delta: float) -> bool:
        if self._family(pessimistic).epsilon_bound(delta) <= epsilon:
            return True
        return self._composed(pessimistic, lambda family: family.at_delta(delta)).at_most(epsilon) <= delta

    def _tilted_for(self, epsilon: float) -> Composed:
        return self._composed(optimistic, lambda family: family.at_epsilon(epsilon))

    def _family(self, discretise: Discretise) -> Family:
        if discretise not in self._families:
            terms = [(discretise(law, self._spacing[discretise]), count) for law, count in self._steps]
            terms = [(lattice.swapped if self._swapped else lattice, count) for lattice, count in terms]
            self._families[discretise] = Family(terms)
        return self._families[discretise]

    def _composed(self, discretise: Discretise, choose: Callable[[Family], Composed]) -> Composed:
        try:
            return choose(self._family(discretise))
        except WindowTooLong:
            self._spacing[discretise] *= 2  # of this side alone: the other's answers stay as they are
            _check_spacing(self._steps, self._spacing[discretise])
            del self._families[discretise]
            return self._composed(discretise, choose)


class Shared:
    """The lattice engine: both directions' curves of the composition of ``count`` steps of each law."""

    def __init__(self, steps: Sequence[tuple[Law, int]]):
        self._steps = steps

    @cached_property
    def spacing(self) -> float:
        """The spacing that suits these steps."""
        return _spacing(self._steps)

    @property
    def deviation(self) -> float:
        """Root mean square loss of one step."""
        return _deviation(self._steps)

    def curve(self, *, swapped: bool) -> LatticeCurve:
        """The *remove* curve, or the *add* curve if swapped.

        Raises:
            Unresolved: now or when asked, a lattice fine enough for these laws would not fit into memory.
        """
        return LatticeCurve(self._steps, self.spacing, swapped=swapped)


def _last_above(at_least: Callable[[float], float], delta: float, high: float) -> float:
    """Largest ε where δ(ε) is certainly above delta, sought downwards: far below the tilt's center errors prevail."""
    for distance in (high * 2.0**-halvings for halvings in range(40, -1, -1)):
        if at_least(high - distance) > delta:
            return bisect(lambda epsilon: at_least(epsilon) <= delta, high - distance, high, 1e-13)[0]
    return 0.0


def _deviation(steps: Sequence[tuple[Law, int]]) -> float:
    """Root mean square loss of one step."""
    return (sum(count * law.second_moment() for law, count in steps) / sum(count for _, count in steps)) ** 0.5


def _spacing(steps: Sequence[tuple[Law, int]]) -> float:
    """A small part of a step's deviation unless that takes too many points; a power of 2, so that lattices are shared.

    Relative to ε the bracket is about ``(spacing / deviation)² sqrt(steps) / 100`` wide, so few steps do with fewer
    points: the part is 1/56 from 1000 steps on and grows like their fourth root below. Atoms, whose bracket shrinks
    more slowly, always take 1/80.
    """
    deviation, num_steps = _deviation(steps), sum(count for _, count in steps)
    smooth = all(isinstance(law, Subsampled) for law, _ in steps)
    parts = 56 * min(num_steps / 1000, 1) ** 0.25 if smooth else 80
    span = max(law.span for law, _ in steps) + 20 * deviation * num_steps**0.5
    spacing = float(2.0 ** np.floor(np.log2(max(min(deviation / parts, FINEST), span / POINTS))))
    _check_spacing(steps, spacing)
    return spacing


def _check_spacing(steps: Sequence[tuple[Law, int]], spacing: float) -> None:
    if spacing > COARSEST * _deviation(steps):
        raise Unresolved
