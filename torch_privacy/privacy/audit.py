# SPDX-License-Identifier: Apache-2.0
"""Tests a certified privacy claim by the scores of canaries in one run, and bounds epsilon from below."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit
from scipy.stats import binom

from ..support.validate import in_range, strictly_between, whole
from .bracket import Array
from .compose import Profile, compose
from .events.base import Event
from .events.gaussian import Gaussian
from .tradeoff import PiecewiseLinear

SHARES = (0.25, 0.5, 1.0, 2.0)  # of the planned number of guesses, which the test of the claim tries
SMALLEST_P = 1e-300
LARGEST_SCALE = 1e3  # of the noise; what is not rejected there is compatible with epsilon = 0
STEPS = 30  # of a bisection
FALSE_ALARMS = (*np.geomspace(1e-4, 0.5, 24),)  # rates among which the number of guesses is planned
NORMAL = NormalDist()

TradeOffFunction = Callable[[float], float]


class Guesses(NamedTuple):
    """The outcome of a game with ``num_canaries`` fair coins, of which some were guessed."""

    num_canaries: int
    num_guesses: int
    num_correct: int


def is_rejected(f: TradeOffFunction, guesses: Guesses, significance: float) -> bool:
    """True if a run that is f-DP guesses so well with a probability of at most ``significance``.

    Every canary is in the data with probability 1/2, independently; an attacker guesses r of the m coins, and v are
    right. With ``B(x) = f(1 - x)``, ``a = s v/m`` and ``b = s (r - v)/m`` for significance s, repeat for
    i = v - 1, v - 2, ..., 0: ``b' = max(b, B(a))``, ``a = min(a + i/(r - i) (b' - b), 1)``, ``b = b'``, until b stands
    still. The claim is rejected if ``a + b > r/m``.

    Args:
        f: symmetric trade-off function of one record; a lower bound on the true one makes the test more cautious.
        guesses: counts of the game.
        significance: in (0, 1).

    Source: Mahloujifar, Melis & Chaudhuri (2024), arXiv 2410.22235, Algorithm 1.
    """
    m, r, v = guesses
    right, wrong = significance * v / m, significance * (r - v) / m
    for i in range(v - 1, -1, -1):
        larger = max(wrong, f(1 - right))
        if larger == wrong:
            break
        right, wrong = min(right + i / (r - i) * (larger - wrong), 1.0), larger
    return right + wrong > r / m


def p_value(f: TradeOffFunction, guesses: Guesses) -> float:
    """Returns the smallest significance at which `is_rejected` holds, rounded up; 1 if it never does."""
    low, high = math.log(SMALLEST_P), 0.0
    if not is_rejected(f, guesses, 1 - 1e-12):
        return 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_rejected(f, guesses, math.exp(middle)) else (middle, high)
    return math.exp(high)


def one_run_epsilon(guesses: Guesses, delta: float, significance: float = 0.05) -> float:
    """Returns a lower bound on ε at δ that holds for every mechanism with a confidence of 1 - ``significance``.

    If the run is (ε, δ)-private, then with ``p = 1/(1 + e^-ε)``, r guesses and m canaries
    ``P[V >= v] <= β + 2 m δ α``, ``β = P[Bin(r, p) >= v]``, ``α = max_i (P[Bin(r, p) >= v - i] - β) / i``, i = 1 .. v.
    The bound is the ε at which the right side equals the significance.

    Example:
        >>> round(one_run_epsilon(Guesses(1000, 200, 180), delta=1e-5), 4)
        1.7963

    Source: Steinke, Nasr & Jagielski (2023), arXiv 2305.08846, Theorem 5.2.
    """
    low, high = 0.0, 64.0
    if _tail(guesses, low, delta) >= significance:
        return 0.0
    for _ in range(2 * STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(guesses, middle, delta) < significance else (low, middle)
    return low


def _tail(guesses: Guesses, epsilon: float, delta: float) -> float:
    m, r, v = guesses
    p = expit(epsilon)
    beta = float(binom.sf(v - 1, r, p))
    if delta == 0 or v == 0:
        return beta
    i = np.arange(1, v + 1)
    alpha = float(np.max((binom.sf(v - i - 1, r, p) - beta) / i))
    return beta + 2 * m * delta * max(alpha, 0.0)


class Plan(NamedTuple):
    """How many canaries are guessed: those with the highest scores "in", those with the lowest "out"."""

    num_in: int
    num_out: int

    def scaled(self, share: float, num_canaries: int) -> "Plan":
        """Returns a plan with so many times as many guesses, at least one and at most one for every canary."""
        num_in, num_out = (round(share * count) for count in self)
        if num_in + num_out > num_canaries:
            num_in = round(num_canaries * num_in / (num_in + num_out))
            num_out = num_canaries - num_in
        return Plan(num_in if num_in + num_out else 1, num_out)


def plan(profile: Profile, num_canaries: int) -> Plan:
    """Returns the number of guesses that serves the ideal attack on the claimed mechanism best, without any data.

    The ideal attack is the best test at each rate of false alarms α: it has α m/2 wrong and (1 - f(α)) m/2 right
    guesses on average. The rates are those with the largest lower bound in the Gaussian family.
    """
    sides = _sides(profile)
    best: list[tuple[float, float]] = []  # bound, rate of false alarms
    for f in sides:
        bounds = [(_gaussian_bound(_expected([(f, rate)], num_canaries)), rate) for rate in FALSE_ALARMS]
        best.append(max(bounds))
    options = [
        [(sides[0], best[0][1])],
        [(sides[0], best[0][1]), (sides[1], best[1][1])],
    ]
    bounds = [_gaussian_bound(_expected(option, num_canaries)) for option in options]
    chosen = options[int(np.argmax(bounds))]
    counts = [_expected([pair], num_canaries).num_guesses for pair in chosen]
    return Plan(max(counts[0], 1), counts[1] if len(counts) > 1 else 0).scaled(1.0, num_canaries)


def ideal_guesses(profile: Profile, num_canaries: int, planned: Plan) -> Guesses:
    """Returns the counts that the ideal attack has on average, on the claimed mechanism and with these guesses."""
    pairs = []
    for f, count in zip(_sides(profile), planned, strict=True):
        if count:
            pairs.append((f, _rate_with(f, 2 * count / num_canaries)))
    expected = _expected(pairs, num_canaries)
    total = sum(planned)
    return Guesses(num_canaries, total, min(round(expected.num_correct * total / expected.num_guesses), total))


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


def _gaussian_bound(guesses: Guesses, significance: float = 0.05) -> float:
    """Returns the largest μ for which a Gaussian trade-off function is rejected."""
    low, high = 0.0, 64.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if is_rejected(_gaussian(middle), guesses, significance) else (low, middle)
    return low


def _gaussian(mu: float) -> TradeOffFunction:
    def f(alpha: float) -> float:
        return NORMAL.cdf(NORMAL.inv_cdf(1 - alpha) - mu) if 0 < alpha < 1 else 1 - alpha

    return f


def _interpolated(curve: PiecewiseLinear) -> TradeOffFunction:
    """Returns a trade-off function of single numbers, evaluated quickly."""
    alphas, betas = curve.alpha, curve.beta

    def f(alpha: float) -> float:
        return float(np.interp(alpha, alphas, betas))

    return f


@dataclass(frozen=True, eq=False)
class Audit:
    """The result of an audit: prints as one sentence; holds scores, claim, p-value and lower bounds.

    Args:
        inside: scores of the canaries that were in the data; a higher score means "in".
        outside: scores of the canaries that were left out.
        profile: the claim, such as ``training.profile()``.
        significance: probability of a false alarm, of the test and of the lower bound each.
        plan: number of guesses, fixed before the scores were seen.
        notes: what limits the result, in words.

    Guarantees:
        - If the claim holds, ``p_value`` is at most s with probability at most s, for every s.
        - If the claim holds, ``epsilon_low(delta)`` exceeds the true ε with probability at most ``significance``, at
          one δ or at several: all come from one bound on the noise.
        - Both hold for every way to compute scores that does not look at the coins.

    A small lower bound shows nothing: one run and one attack find less than there is.
    """

    inside: Array
    outside: Array
    profile: Profile
    significance: float
    plan: Plan
    notes: tuple[str, ...] = ()
    delta: float = 1e-5

    @property
    def num_canaries(self) -> int:
        return len(self.inside) + len(self.outside)

    @cached_property
    def _order(self) -> Array:
        """Which canaries were in, from the highest score to the lowest; ties count against the attack."""
        scores = np.concatenate([self.outside, self.inside])
        coins = np.concatenate([np.zeros(len(self.outside), bool), np.ones(len(self.inside), bool)])
        return coins[np.argsort(-scores, kind="stable")]

    def guesses(self, planned: Plan | None = None) -> Guesses:
        """Returns the counts of the game with the planned number of guesses, or with another plan's."""
        num_in, num_out = self.plan if planned is None else planned
        coins = self._order
        right = int(coins[:num_in].sum()) + int((~coins[len(coins) - num_out :]).sum())
        return Guesses(self.num_canaries, num_in + num_out, right)

    @cached_property
    def p_value(self) -> float:
        """The p-value of the claim's own certified trade-off curve, corrected for the four numbers of guesses tried."""
        claimed = _interpolated(self.profile.tradeoffs["symmetrized"].low)
        plans = {self.plan.scaled(share, self.num_canaries) for share in SHARES}
        return min(1.0, len(plans) * min(p_value(claimed, self.guesses(other)) for other in plans))

    @property
    def is_rejected(self) -> bool:
        """True if the claim is contradicted at the given significance."""
        return self.p_value <= self.significance

    def epsilon_low(self, delta: float | None = None) -> float:
        """Returns a lower bound on ε at δ, with a confidence of 1 - significance.

        The bound is that of the claimed events with more or less noise: the smallest noise that is rejected. Events
        without noise, such as randomized response, are bounded in the family of Gaussians.
        """
        delta = self.delta if delta is None else delta
        strictly_between("Audit.epsilon_low", 0, 1, delta=delta)
        return self._bound(self.guesses(), delta)

    def epsilon_ideal(self, delta: float | None = None) -> float:
        """Returns the lower bound that the ideal attack would reach on average, if the claim is exact."""
        delta = self.delta if delta is None else delta
        strictly_between("Audit.epsilon_ideal", 0, 1, delta=delta)
        return self._bound(ideal_guesses(self.profile, self.num_canaries, self.plan), delta)

    def epsilon_any(self, delta: float | None = None) -> float:
        """Returns a lower bound on ε at δ that assumes no family of mechanisms; see `one_run_epsilon`."""
        return one_run_epsilon(self.guesses(), self.delta if delta is None else delta, self.significance)

    def _bound(self, guesses: Guesses, delta: float) -> float:
        rejected = _rejected_family(self.profile, guesses, self.significance)
        return 0.0 if rejected is None else rejected.epsilon(delta).low

    def roc(self) -> tuple[Array, Array]:
        """Returns the attack's false and true positive rates at every threshold, from (0, 0) to (1, 1)."""
        thresholds = np.unique(np.concatenate([self.inside, self.outside]))[::-1]
        rates = [
            np.searchsorted(np.sort(-scores), -thresholds, side="right") / max(len(scores), 1)
            for scores in (self.outside, self.inside)
        ]
        return np.append(0.0, rates[0]), np.append(0.0, rates[1])

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Returns the share of canaries found in at a rate of false alarms of at most this. An estimate, no bound."""
        in_range("Audit.true_positive_rate", 0, 1, false_positive_rate=false_positive_rate)
        false, true = self.roc()
        return float(true[np.searchsorted(false, false_positive_rate, side="right") - 1])

    @property
    def area_under_curve(self) -> float:
        """The probability that a canary inside has a higher score than one outside; 1/2 for blind guessing."""
        false, true = self.roc()
        return float(np.trapezoid(true, false))

    def as_json(self) -> dict[str, Any]:
        """Returns everything that the report shows, as plain data. The scores and coins themselves stay out."""
        guesses, ideal = self.guesses(), ideal_guesses(self.profile, self.num_canaries, self.plan)
        false, true = self.roc()
        every = np.unique(np.linspace(0, len(false) - 1, min(len(false), 401)).round().astype(int))
        curve = self.profile.tradeoffs["symmetrized"].low
        rates = np.concatenate([[0.0], np.geomspace(1e-4, 1, 200)])
        return {
            "format": 1,
            "num_canaries": self.num_canaries,
            "num_inside": len(self.inside),
            "num_guesses": guesses.num_guesses,
            "num_correct": guesses.num_correct,
            "num_correct_ideal": ideal.num_correct,
            "significance": self.significance,
            "p_value": self.p_value,
            "rejected": self.is_rejected,
            "delta": self.delta,
            "epsilon_claimed": self.profile.epsilon(self.delta).high,
            "epsilon_low": self.epsilon_low(),
            "epsilon_low_any_mechanism": self.epsilon_any(),
            "epsilon_low_ideal": self.epsilon_ideal(),
            "area_under_curve": self.area_under_curve,
            "roc": [false[every].tolist(), true[every].tolist()],
            "claimed_curve": [rates.tolist(), (1 - np.asarray(curve(rates))).tolist()],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        claim = f"epsilon = {self.profile.epsilon(self.delta).high:.3f} at delta = {self.delta:g}"
        verdict = (
            f"the claim {claim} is REJECTED (p = {self.p_value:.2g}): the training is less private than its ledger says"
            if self.is_rejected
            else f"the claim {claim} is not contradicted (p = {self.p_value:.2g})"
        )
        confidence = f"{100 * (1 - self.significance):g} %"
        bound = (
            f"epsilon is at least {self.epsilon_low():.3f} ({confidence} confidence, this data and this attack); the "
            f"ideal attack with as many canaries would show {self.epsilon_ideal():.3f}"
        )
        guesses = self.guesses()
        text = (
            f"{self.num_canaries} canaries, {guesses.num_correct} of {guesses.num_guesses} guesses right: {verdict}; "
            f"{bound}."
        )
        return " ".join([text, *self.notes])


def audit_scores(
    inside: Sequence[float] | Array,
    outside: Sequence[float] | Array,
    profile: Profile,
    *,
    significance: float = 0.05,
    delta: float = 1e-5,
    num_guesses: tuple[int, int] | None = None,
    notes: Sequence[str] = (),
) -> Audit:
    """Audits a game of one's own: canaries that fair coins put into the data of one run, and their scores.

    Args:
        inside: scores of the canaries that were in; a higher score means "in".
        outside: scores of those that were left out. The coins must be fair, independent, and unknown to the attack.
        profile: the claim, such as ``training.profile()`` or ``privacy.compose(...)``.
        significance: probability of a false alarm.
        delta: δ at which ε is shown.
        num_guesses: how many canaries are guessed "in" and "out", fixed before scores were seen; by default what
            serves the ideal attack on the claimed mechanism best.
        notes: printed with the result.

    Returns:
        The `Audit`.

    Raises:
        ValueError: scores are missing or NaN, or more guesses than canaries.

    Example:
        >>> from torch_privacy import privacy
        >>> claim = privacy.compose([(privacy.Gaussian(1.0), 1)])
        >>> normal = np.random.default_rng(0).normal
        >>> audit = audit_scores(normal(2.0, 1.0, 1000), normal(0.0, 1.0, 1000), claim)  # twice the claimed signal
        >>> audit.is_rejected
        True
    """
    strictly_between("audit_scores", 0, 1, significance=significance, delta=delta)
    scores = [np.asarray(part, float) for part in (inside, outside)]
    for name, part in zip(("inside", "outside"), scores, strict=True):
        if part.ndim != 1 or np.isnan(part).any():
            raise ValueError(
                f"audit_scores: {name} must be a list of numbers without NaN; got shape {part.shape} with "
                f"{int(np.isnan(part).sum())} NaN."
            )
    num_canaries = sum(map(len, scores))
    if not num_canaries:
        raise ValueError("audit_scores: there is no score. Pass those of the canaries inside and outside.")
    if num_guesses is None:
        planned = plan(profile, num_canaries)
    else:
        planned = Plan(*num_guesses)
        whole("audit_scores", num_in=planned.num_in, num_out=planned.num_out)
        whole("audit_scores", num_guesses=sum(planned), at_least=1, at_most=num_canaries)
    return Audit(scores[0], scores[1], profile, significance, planned, tuple(notes), delta)


def _rejected_family(profile: Profile, guesses: Guesses, significance: float) -> Profile | None:
    """Returns the claim with the smallest noise that is rejected; None if none is."""

    def rejected(scale: float) -> bool:
        f = _interpolated(compose(_with_noise(profile, scale)).tradeoffs["symmetrized"].low)
        return is_rejected(f, guesses, significance)

    scales = [*_brackets(rejected)]
    if not scales:
        return None
    low, high = scales
    while high / low > 1.002:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if rejected(middle) else (middle, high)
    return compose(_with_noise(profile, high))


def _brackets(rejected: Callable[[float], bool]) -> Iterator[float]:
    """Yields a scale of the noise that is not rejected and one that is; nothing if none is rejected."""
    grid = [2.0**k for k in range(-4, 10)]
    if rejected(1.0):
        falling = [1.0, 0.5, 0.25, 0.125, 0.0625]
        for high, low in pairwise(falling):
            if not rejected(low):
                yield from (low, high)
                return
        yield from (falling[-1] * 0.999, falling[-1])
        return
    for low, high in pairwise(scale for scale in grid if scale >= 1):
        if rejected(high):
            yield from (low, high)
            return


def _with_noise(profile: Profile, scale: float) -> list[tuple[Event, int]]:
    """Returns the events with ``scale`` times the noise; a Gaussian of this noise if an event has no noise to scale."""
    scaled = [(_scaled(event, scale), count) for event, count in profile.events]
    known = [(event, count) for event, count in scaled if event is not None]
    if len(known) < len(scaled) or not known:
        relation = profile.neighboring_relation
        return [(Gaussian(scale, relation), 1)]
    return known


def _scaled(event: Any, scale: float) -> Event | None:
    if hasattr(event, "noise_multiplier"):
        return replace(event, noise_multiplier=scale * event.noise_multiplier)
    if hasattr(event, "noise_multipliers"):
        return replace(event, noise_multipliers=tuple(scale * noise for noise in event.noise_multipliers))
    return None
