# SPDX-License-Identifier: Apache-2.0
"""Provides the result of an audit: what the scores of canaries say about a certified privacy claim."""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..support.validate import strictly_between, whole
from .audit_bounds import (
    AuditPlan,
    Guesses,
    Outcome,
    epsilon_bound,
    errors,
    ideal_errors,
    ideal_guesses,
    interpolated,
    p_value,
    plan,
)
from .audit_sums import Sums, ideal_sums, plan_block, sums
from .bracket import Array
from .compose import Profile
from .rounding import round_down, round_up, short
from .tradeoff import PiecewiseLinear
from .tradeoff.base import rates

SHARES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of the planned number of guesses, which the test of the claim tries
FEWEST_GAMES = 4  # independent games on each side: two choose the threshold, two test


@dataclass(frozen=True, eq=False)
class Audit:
    """The result of an audit: prints as one sentence; holds scores, claim, p-value and lower bounds.

    Args:
        inside: scores of the canaries that were in the data; a higher score means "in".
        outside: scores of the canaries that were left out.
        profile: the claim, such as ``training.profile()``.
        significance: probability of a false alarm, of the test and of the lower bound each.
        plan: number of guesses, fixed before the scores were seen; None if every canary had a run of its own.
        notes: what limits the result, in words.
        block: canaries in half a block; their scores are added. None if a score may depend on other canaries' coins.

    Guarantees:
        - If the claim holds, ``p_value`` is at most s with probability at most s, for every s.
        - If the claim holds, ``epsilon_low(delta)`` exceeds the true ε with probability at most ``significance``, at
          one δ or, where the claim has noise, at several: all come from one bound on it. ``epsilon_sums(delta)`` has
          the same guarantee.
        - All hold for every way to compute scores that does not look at the coins.

    A small lower bound shows nothing: one run and one attack find less than there is.
    """

    inside: Array
    outside: Array
    profile: Profile
    significance: float
    plan: AuditPlan | None
    notes: tuple[str, ...] = ()
    delta: float = 1e-5
    block: int | None = None

    @property
    def num_canaries(self) -> int:
        return len(self.inside) + len(self.outside)

    @cached_property
    def _order(self) -> Array:
        """Returns which canaries were in, from the highest score to the lowest; equal scores come in random order."""
        scores = np.concatenate([self.outside, self.inside])
        coins = np.arange(len(scores)) >= len(self.outside)
        order = np.random.default_rng(secrets.randbits(128)).permutation(len(scores))
        order = order[np.argsort(-scores[order], kind="stable")]
        return coins[order]

    @cached_property
    def outcome(self) -> Outcome:
        """The counts of the game: guesses in one run, or errors in independent runs."""
        return errors(self.inside, self.outside) if self.plan is None else self._guesses(self.plan)

    @cached_property
    def sums(self) -> Sums | None:
        """The counts of blocks with the larger sum of scores inside; None if scores depend on other canaries."""
        return None if self.block is None else sums(self.inside, self.outside, self.block)

    def _guesses(self, planned: AuditPlan) -> Guesses:
        num_in, num_out = planned
        coins = self._order
        right = int(coins[:num_in].sum()) + int((~coins[len(coins) - num_out :]).sum())
        return Guesses(self.num_canaries, num_in + num_out, right)

    @cached_property
    def p_value(self) -> float:
        """The p-value of the claim's own certified trade-off curve, corrected for the tests that are tried."""
        if self.sums is None:
            return self._p_value_of_outcome
        of_sums = self.sums.p_value(self.profile.tradeoffs["symmetrized"].low)
        return min(1.0, 2 * min(self._p_value_of_outcome, of_sums))

    @property
    def _p_value_of_outcome(self) -> float:
        claimed = interpolated(self.profile.tradeoffs["symmetrized"].low)
        if self.plan is None:
            return p_value(claimed, self.outcome)
        plans = {self.plan.scaled(share, self.num_canaries) for share in SHARES}
        return min(1.0, len(plans) * min(p_value(claimed, self._guesses(other)) for other in plans))

    @property
    def is_rejected(self) -> bool:
        """True if the claim is contradicted at the given significance."""
        return self.p_value <= self.significance

    def epsilon_low(self, delta: float | None = None) -> float:
        """Returns a lower bound on ε at δ, with a confidence of 1 - significance.

        The bound is that of the claimed events with more or less noise: the smallest noise that is rejected. Where the
        claim has no noise, as randomized response has none, every mechanism has it, as with ``epsilon_any``.
        """
        delta = self.delta if delta is None else delta
        strictly_between("Audit.epsilon_low", 0, 1, delta=delta)
        return self._bound_by(self.outcome, delta)

    def epsilon_ideal(self, delta: float | None = None) -> float:
        """Returns the lower bound that the ideal attack would reach on average, if the claim is exact."""
        delta = self.delta if delta is None else delta
        strictly_between("Audit.epsilon_ideal", 0, 1, delta=delta)
        return self._bound_by(self._ideal, delta)

    def epsilon_sums(self, delta: float | None = None) -> float:
        """Returns a lower bound on ε at δ by sums of scores, usually much larger than ``epsilon_low``; see `Sums`.

        Sums show more than guesses because canaries are independent of each other: the test assumes that no score
        depends on other canaries' coins, which holds for `GradientCanaries` and for runs of their own. The bound is in
        the same family as ``epsilon_low``. It is 0 where the assumption is not made.
        """
        delta = self.delta if delta is None else delta
        strictly_between("Audit.epsilon_sums", 0, 1, delta=delta)
        if (found := self.sums) is None:
            return 0.0
        return self._bound(lambda curve: found.reject(curve, self.significance), delta)

    def epsilon_any(self, delta: float | None = None) -> float:
        """Returns a lower bound on ε at δ that assumes no family of mechanisms; see `Guesses.epsilon_low`."""
        return self.outcome.epsilon_low(self.delta if delta is None else delta, self.significance)

    @property
    def _ideal(self) -> Outcome:
        if self.plan is None:
            return ideal_errors(self.profile, self.num_canaries)
        return ideal_guesses(self.profile, self.num_canaries, self.plan)

    def _bound_by(self, outcome: Outcome, delta: float) -> float:
        return self._bound(lambda curve: outcome.reject(interpolated(curve), self.significance), delta)

    def _bound(self, rejects: Callable[[PiecewiseLinear], bool], delta: float) -> float:
        return epsilon_bound(self.profile, rejects, delta)

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
        rates("Audit.true_positive_rate", false_positive_rate)
        false, true = self.roc()
        return float(true[np.searchsorted(false, false_positive_rate, side="right") - 1])

    @property
    def area_under_curve(self) -> float:
        """The probability that a canary inside has a higher score than one outside; 1/2 for blind guessing."""
        false, true = self.roc()
        return float(np.trapezoid(true, false))

    def as_json(self) -> dict[str, Any]:
        """Returns everything that the report shows, as plain data; null stands for infinity.

        The scores and coins themselves stay out.
        """
        false, true = self.roc()
        every = np.unique(np.linspace(0, len(false) - 1, min(len(false), 401)).round().astype(int))
        curve = self.profile.tradeoffs["symmetrized"].low
        rates = np.concatenate([[0.0], np.geomspace(1e-4, 1, 200)])
        epsilons = {
            "epsilon_claimed": self.profile.epsilon(self.delta).high,
            "epsilon_low": self.epsilon_low(),
            "epsilon_low_any_mechanism": self.epsilon_any(),
            "epsilon_low_ideal": self.epsilon_ideal(),
        }
        of_sums: dict[str, Any] = {}
        if self.sums is not None:
            ideal = ideal_sums(self.profile, self.num_canaries, self.sums.block)
            of_sums = {"sums": self.sums._asdict(), "sums_ideal": ideal._asdict()}
            epsilons["epsilon_low_sums"] = self.epsilon_sums()
        return {
            "num_canaries": self.num_canaries,
            "num_inside": len(self.inside),
            "games": "independent" if self.plan is None else "one run",
            "outcome": self.outcome._asdict(),
            "outcome_ideal": self._ideal._asdict(),
            **of_sums,
            "significance": self.significance,
            "p_value": self.p_value,
            "rejected": self.is_rejected,
            "delta": self.delta,
            **{name: value if math.isfinite(value) else None for name, value in epsilons.items()},
            "area_under_curve": self.area_under_curve,
            "roc": [false[every].tolist(), true[every].tolist()],
            "claimed_curve": [rates.tolist(), (1 - np.asarray(curve(rates))).tolist()],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        claim = f"epsilon = {round_up(self.profile.epsilon(self.delta).high)} at delta = {short(self.delta)}"
        verdict = (
            f"the claim {claim} is REJECTED (p = {self.p_value:.2g}): the training is less private than its ledger says"
            if self.is_rejected
            else f"the claim {claim} is not contradicted (p = {self.p_value:.2g})"
        )
        confidence = f"{100 * (1 - self.significance):g} %"
        bound = (
            f"epsilon is at least {round_down(self.epsilon_low())} ({confidence} confidence, this data and this "
            f"attack); the ideal attack with as many canaries would show {round_down(self.epsilon_ideal())}"
        )
        if self.sums is not None:
            right = f"{self.sums.num_right} of {self.sums.num_blocks}"
            bound += f"; sums of scores, right in {right} blocks, show {round_down(self.epsilon_sums())}"
        return " ".join([f"{self._counts()}: {verdict}; {bound}.", *self.notes])

    def _counts(self) -> str:
        outcome = self.outcome
        if isinstance(outcome, Guesses):
            right = f"{outcome.num_correct} of {outcome.num_guesses} guesses right"
        else:
            right = (
                f"{outcome.num_false_alarms} false alarms in {outcome.num_outside} and {outcome.num_missed} missed of "
                f"{outcome.num_inside}"
            )
        return f"{self.num_canaries} canaries, {right}"


def audit_scores(
    inside: Sequence[float] | Array,
    outside: Sequence[float] | Array,
    profile: Profile,
    *,
    significance: float = 0.05,
    delta: float = 1e-5,
    num_guesses: tuple[int, int] | None = None,
    independent: bool = False,
    disjoint: bool = False,
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
        independent: every canary had a run of its own, with its own noise. That shows much more than one run does:
            error rates are bounded by Clopper and Pearson's intervals, at a threshold chosen on half of the games.
        disjoint: no score depends on other canaries' coins, as with `GradientCanaries`, or with runs of their own. Then
            sums of scores are tested, too; see ``Audit.epsilon_sums``.
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
    check_test("audit_scores", significance, delta)
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
    planned: AuditPlan | None
    if independent:
        planned = None
        if min(map(len, scores)) < FEWEST_GAMES:
            raise ValueError(
                f"audit_scores: independent games need {FEWEST_GAMES} scores inside and as many outside; got "
                f"{len(scores[0])} and {len(scores[1])}."
            )
    elif num_guesses is None:
        planned = plan(profile, num_canaries)
    else:
        planned = plan_of("audit_scores", num_guesses, num_canaries)
    block = plan_block(profile, num_canaries) if disjoint or independent else None
    return Audit(scores[0], scores[1], profile, significance, planned, tuple(notes), delta, block)


def check_test(where: str, significance: float, delta: float) -> None:
    """Raises a ``ValueError`` unless both lie in (0, 1)."""
    strictly_between(where, 0, 1, significance=significance, delta=delta)


def plan_of(where: str, num_guesses: Any, num_canaries: int) -> AuditPlan:
    """Returns the numbers of guesses; raises a ``ValueError`` unless they are two that fit to the canaries."""
    if not isinstance(num_guesses, Sequence) or len(num_guesses) != 2:
        raise ValueError(
            f"{where}: num_guesses={num_guesses!r} must be two numbers, of the guesses in and of those out."
        )
    planned = AuditPlan(*num_guesses)
    whole(where, num_in=planned.num_in, num_out=planned.num_out)
    whole(where, num_guesses=sum(planned), at_least=1, at_most=num_canaries)
    return planned
