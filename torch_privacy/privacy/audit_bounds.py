# SPDX-License-Identifier: Apache-2.0
"""Tests a trade-off function by the outcome of a membership game, and bounds epsilon from below."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import scipy
from scipy.special import expit

from ..support.validate import InvalidValue
from .bracket import Array
from .compose import Profile, compose
from .events.base import Event
from .tradeoff import EpsilonDelta, PiecewiseLinear, of_profile

SMALLEST_P = 1e-9  # smaller ones would be rounded too coarsely
PER_DOUBLING = 64  # scales of the noise that are tried, from one to its double
LEAST_EXPONENT, LARGEST_EXPONENT = -4 * PER_DOUBLING, 10 * PER_DOUBLING  # of these scales
NOISE = {"noise_multiplier", "noise_multipliers", "noise_scale", "noise_stddev"}  # fields of events
PIECES = 64  # of a trade-off function with scaled noise; fewer make a smaller, still correct bound
STEPS = 30  # of a bisection
FALSE_ALARMS = (*np.geomspace(1e-4, 0.5, 24),)  # rates among which the number of guesses is planned
USUAL_RATE = 0.05  # of false alarms, if no rate shows anything
NORMAL = NormalDist()

TradeOffFunction = Callable[[float], float]


class Guesses(NamedTuple):
    """The outcome of one run with ``num_canaries`` fair coins, of which some were guessed."""

    num_canaries: int
    num_guesses: int
    num_correct: int

    def reject(self, f: TradeOffFunction, significance: float) -> bool:
        """True if a run that is f-DP is guessed so well with a probability of at most ``significance``.

        Every canary is in the data with probability 1/2, independently; an attacker guesses r of the m coins, and v are
        right. With ``B(x) = f(1 - x)``, ``a = s v/m`` and ``b = s (r - v)/m`` for significance s, repeat for
        i = v - 1, v - 2, ..., 0: ``b' = max(b, B(a))``, ``a = min(a + i/(r - i) (b' - b), 1)``, ``b = b'``, until b
        stands still. The claim is rejected if ``a + b > r/m``.

        Args:
            f: symmetric trade-off function of one record; a lower bound on the true one makes the test more cautious.
            significance: in (0, 1).

        Source: Mahloujifar, Melis & Chaudhuri (2024), arXiv 2410.22235, Algorithm 1.
        """
        m, r, v = self
        right, wrong = significance * v / m, significance * (r - v) / m
        for i in range(v - 1, -1, -1):
            larger = max(wrong, f(1 - right))
            if larger == wrong:
                break
            right, wrong = min(right + i / (r - i) * (larger - wrong), 1.0), larger
        return right + wrong > r / m

    def epsilon_low(self, delta: float, significance: float = 0.05) -> float:
        """Returns a lower bound on ε at δ that holds for every mechanism with a confidence of 1 - ``significance``.

        If the run is (ε, δ)-private, then with ``p = 1/(1 + e^-ε)``, r guesses and m canaries
        ``P[V >= v] <= β + 2 m δ α``, ``β = P[Bin(r, p) >= v]``, ``α = max_i (P[Bin(r, p) >= v - i] - β) / i``,
        i = 1 .. v. The bound is the ε at which the right side equals the significance.

        Example:
            >>> round(Guesses(1000, 200, 180).epsilon_low(delta=1e-5), 4)
            1.7963

        Source: Steinke, Nasr & Jagielski (2023), arXiv 2305.08846, Theorem 5.2.
        """
        return _largest(lambda epsilon: self._tail(epsilon, delta) < significance)

    def _tail(self, epsilon: float, delta: float) -> float:
        m, r, v = self
        p = expit(epsilon)
        at_least_v = float(scipy.stats.binom.sf(v - 1, r, p))
        if delta == 0 or v == 0:
            return at_least_v
        i = np.arange(1, v + 1)
        alpha = float(np.max((scipy.stats.binom.sf(v - i - 1, r, p) - at_least_v) / i))
        return at_least_v + 2 * m * delta * max(alpha, 0.0)


class Errors(NamedTuple):
    """The outcome of independent games, each a run of its own with one canary, at a threshold chosen on other games."""

    num_outside: int
    num_false_alarms: int
    num_inside: int
    num_missed: int

    def reject(self, f: TradeOffFunction, significance: float) -> bool:
        """True if runs that are f-DP have so few errors with a probability of at most ``significance``.

        That is, if ``β < f(α)`` for Clopper and Pearson's upper bounds α and β on the rates of false alarms and of
        misses, each with half of the significance.
        """
        alpha, missed = self._upper(significance)
        return missed < f(alpha)

    def epsilon_low(self, delta: float, significance: float = 0.05) -> float:
        """Returns a lower bound on ε at δ that holds for every mechanism with a confidence of 1 - ``significance``.

        ``ε >= log((1 - δ - β) / α)``, and the same with α and β exchanged, for the upper bounds of `reject`.
        """
        alpha, missed = self._upper(significance)
        ratios = [(1 - delta - missed) / alpha, (1 - delta - alpha) / missed]
        return max(0.0, math.log(max(*ratios, 1.0)))

    def mu(self, significance: float) -> float:
        """Returns the largest μ of a Gaussian trade-off function that is rejected: ``Φ⁻¹(1 - α) - Φ⁻¹(β)``."""
        alpha, missed = self._upper(significance)
        return max(0.0, NORMAL.inv_cdf(1 - alpha) - NORMAL.inv_cdf(missed)) if max(alpha, missed) < 1 else 0.0

    def _upper(self, significance: float) -> tuple[float, float]:
        return (
            clopper_pearson(self.num_false_alarms, self.num_outside, significance / 2),
            clopper_pearson(self.num_missed, self.num_inside, significance / 2),
        )


Outcome = Guesses | Errors


def clopper_pearson(count: int, total: int, significance: float) -> float:
    """Returns an upper bound on a probability that an event with ``count`` of ``total`` occurrences has."""
    return 1.0 if count >= total else float(scipy.stats.beta.ppf(1 - significance, count + 1, total - count))


def _largest(holds: Callable[[float], bool]) -> float:
    """Returns the largest number from 0 to 64 at which a falling condition holds; 0 if it never does."""
    low, high = 0.0, 64.0
    for _ in range(2 * STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def p_value(f: TradeOffFunction, outcome: Outcome) -> float:
    """Returns the smallest significance at which f is rejected, rounded up; 1 if it never is."""
    low, high = math.log(SMALLEST_P), 0.0
    if not outcome.reject(f, 1 - 1e-12):
        return 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if outcome.reject(f, math.exp(middle)) else (middle, high)
    return math.exp(high)


class AuditPlan(NamedTuple):
    """Numbers of guesses: "in" for the canaries with the highest scores, "out" for those with the lowest."""

    num_in: int
    num_out: int

    def scaled(self, share: float, num_canaries: int) -> "AuditPlan":
        """Returns a plan with ``share`` times as many guesses: at least one, at most half of the canaries a side."""
        half = (num_canaries + 1) // 2
        num_in, num_out = (min(round(share * count), half) for count in self)
        return AuditPlan(max(num_in, 1), min(num_out, num_canaries - max(num_in, 1)))


def plan(profile: Profile, num_canaries: int) -> AuditPlan:
    """Returns the number of guesses that serves the ideal attack on the claimed mechanism best, without any data.

    The ideal attack is the best test at each rate of false alarms α: it has α m/2 wrong and (1 - f(α)) m/2 right
    guesses on average. The rates are those with the largest lower bound in the Gaussian family.
    """
    sides = _sides(profile)
    best: list[tuple[float, float]] = []  # bound, rate of false alarms
    for f in sides:
        bounds = [(gaussian_bound(_expected([(f, rate)], num_canaries)), rate) for rate in FALSE_ALARMS]
        best.append(max(bounds, key=lambda pair: (pair[0], -abs(math.log(pair[1] / USUAL_RATE)))))
    options = [[(sides[0], best[0][1])], [(sides[0], best[0][1]), (sides[1], best[1][1])]]
    bounds = [gaussian_bound(_expected(option, num_canaries)) for option in options]
    chosen = options[int(np.argmax(bounds))]
    counts = [_expected([pair], num_canaries).num_guesses for pair in chosen]
    return AuditPlan(max(counts[0], 1), counts[1] if len(counts) > 1 else 0).scaled(1.0, num_canaries)


def ideal_guesses(profile: Profile, num_canaries: int, planned: AuditPlan) -> Guesses:
    """Returns the counts that the ideal attack has on average, on the claimed mechanism and with these guesses."""
    pairs = []
    for f, count in zip(_sides(profile), planned, strict=True):
        if count:
            pairs.append((f, _rate_with(f, 2 * count / num_canaries)))
    expected = _expected(pairs, num_canaries)
    total = sum(planned)
    return Guesses(num_canaries, total, min(round(expected.num_correct * total / expected.num_guesses), total))


def ideal_errors(profile: Profile, num_games: int) -> Errors:
    """Returns the counts that the ideal attack has on average, in a number of independent games with half to test."""
    f, half = _sides(profile)[0], max(num_games // 4, 1)
    options = [Errors(half, round(half * rate), half, round(half * float(f(rate)))) for rate in FALSE_ALARMS]
    return max(options, key=gaussian_bound)


def errors(inside: Array, outside: Array) -> Errors:
    """Returns the errors in half of the games, at the threshold that serves best in the other half."""
    choose, test = ((outside[k::2], inside[k::2]) for k in (0, 1))
    thresholds = np.unique(np.concatenate(choose))
    picked = thresholds[np.unique(np.linspace(0, len(thresholds) - 1, 64).round().astype(int))]
    best = max(picked, key=lambda threshold: gaussian_bound(_errors_at(threshold, *choose)))
    return _errors_at(best, *test)


def _errors_at(threshold: float, outside: Array, inside: Array) -> Errors:
    return Errors(len(outside), int((outside >= threshold).sum()), len(inside), int((inside < threshold).sum()))


def _sides(profile: Profile) -> tuple[PiecewiseLinear, PiecewiseLinear]:
    """Returns the trade-off functions of a guess "in" and of a guess "out"."""
    curves = profile.tradeoffs
    names = ("remove", "add") if "remove" in curves else ("symmetrized", "symmetrized")
    return curves[names[0]].low, curves[names[1]].low


def _expected(pairs: Sequence[tuple[PiecewiseLinear, float]], num_canaries: int) -> Guesses:
    right = sum(num_canaries / 2 * (1 - float(f(rate))) for f, rate in pairs)
    wrong = sum(num_canaries / 2 * rate for _, rate in pairs)
    total = min(max(round(right + wrong), 1), num_canaries)
    return Guesses(num_canaries, total, min(round(total * right / (right + wrong)), total))


def _rate_with(f: PiecewiseLinear, share: float) -> float:
    """Returns the rate of false alarms α at which ``α + 1 - f(α)``, twice the share of guesses, is as given."""
    low, high = 0.0, 1.0
    for _ in range(2 * STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if middle + 1 - float(f(middle)) < share else (low, middle)
    return high


def gaussian_bound(outcome: Outcome, significance: float = 0.05) -> float:
    """Returns the largest μ for which a Gaussian trade-off function is rejected."""
    if isinstance(outcome, Errors):
        return outcome.mu(significance)
    low, high = 0.0, 64.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if outcome.reject(_gaussian(middle), significance) else (low, middle)
    return low


def _gaussian(mu: float) -> TradeOffFunction:
    def f(alpha: float) -> float:
        return NORMAL.cdf(NORMAL.inv_cdf(1 - alpha) - mu) if 0 < alpha < 1 else 1 - alpha

    return f


def interpolated(curve: PiecewiseLinear) -> TradeOffFunction:
    """Returns a trade-off function of single numbers, evaluated without numpy, which is quicker."""
    alphas, betas = curve.alpha.tolist(), curve.beta.tolist()
    slopes = [(b - a) / (d - c) for (a, b), (c, d) in zip(pairwise(betas), pairwise(alphas), strict=True)]

    def f(alpha: float) -> float:
        k = bisect_right(alphas, alpha) - 1
        return betas[k] + slopes[k] * (alpha - alphas[k]) if k < len(slopes) else 0.0

    return f


def epsilon_bound(profile: Profile, rejects: Callable[[PiecewiseLinear], bool], delta: float) -> float:
    """Returns the epsilon at delta of the least private trade-off function that is not rejected, rounded down.

    The functions are those of the claimed events with more or less noise. Of events without noise no family is known
    that has the truth in it: they are bounded by the functions of (ε, δ)-privacy itself, as every mechanism is.
    """
    events = tuple(profile.events)
    if not any(_has_noise(event) for event, _ in events):
        return _largest(lambda epsilon: rejects(PiecewiseLinear(*EpsilonDelta(epsilon, delta).corners)))
    found = _smallest_rejected(events, rejects)
    return 0.0 if found is None else compose(_with_noise(events, 2 ** (found / PER_DOUBLING))).epsilon(delta).low


def _smallest_rejected(events: tuple[tuple[Event, int], ...], rejects: Callable[[PiecewiseLinear], bool]) -> int | None:
    """Returns the smallest scale of the noise that is rejected, as an exponent; None if none is."""

    def rejected(exponent: int) -> bool:
        try:
            return rejects(_curve(events, exponent))
        except InvalidValue:  # an event has no price with that much noise, or that little
            return False

    low, high, step = LEAST_EXPONENT, LEAST_EXPONENT, PER_DOUBLING
    if rejected(0):
        high = 0
        while (low := high - step) > LEAST_EXPONENT and rejected(low):
            high = low
    else:
        low, high = 0, step
        while not rejected(high):
            low, high = high, high + step
            if high > LARGEST_EXPONENT:
                return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rejected(middle) else (middle, high)
    return high


@lru_cache(maxsize=256)
def _curve(events: tuple[tuple[Event, int], ...], exponent: int) -> PiecewiseLinear:
    """Returns a lower bound on the trade-off function of these events with 2^(exponent/64) times the noise."""
    scaled = compose(_with_noise(events, 2 ** (exponent / PER_DOUBLING)))
    return of_profile(scaled, pieces=PIECES)["symmetrized"].low


def _with_noise(events: Sequence[tuple[Event, int]], scale: float) -> list[tuple[Event, int]]:
    """Returns the events with ``scale`` times the noise; those that have none to scale as they are."""
    return [(_scaled(event, scale), count) for event, count in events]


def _has_noise(event: Any) -> bool:
    values = [(field.name, getattr(event, field.name)) for field in fields(event)]
    return any(name in NOISE or (isinstance(value, Event) and _has_noise(value)) for name, value in values)


def _scaled(event: Any, scale: float) -> Any:
    changed: dict[str, Any] = {}
    for field in fields(event):
        value = getattr(event, field.name)
        if field.name in NOISE:
            changed[field.name] = tuple(scale * noise for noise in value) if type(value) is tuple else scale * value
        elif isinstance(value, Event):  # such as the epoch of a later batch
            changed[field.name] = _scaled(value, scale)
    return replace(event, **changed)
