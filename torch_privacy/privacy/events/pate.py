# SPDX-License-Identifier: Apache-2.0
"""Prices noisy majority votes of teachers (PATE), for any votes and, for comparison with papers, for given votes.

Each example is known to one teacher, and without it that teacher may vote differently: one count falls by one and
another rises by one, so a query has sensitivity sqrt(2). For any votes, an answer is therefore a `Gaussian` event,
which `votes_event` returns. Where teachers agree, the answer hardly depends on any of them, and
`data_dependent_epsilon` is smaller. **That number depends on the votes, hence on private data: it must not be
published** (only with smooth sensitivity and noise added to it), and never goes into a ledger.

Confident GNMax first tests whether the largest count plus noise reaches a threshold, and answers only then. A test has
sensitivity 1, see `threshold_event`. The answered queries are random, but the price is not, if the numbers of tests and
of answers are bounded in advance: every release is Gaussian given those before, so the squares of their 1 / noise
multiplier add up, and the bounds cover all of them (Smith & Thakurta 2022, arXiv:2210.17520).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import erfc, log_ndtr

from ...support.validate import plain_numbers, positive, strictly_between
from ..bracket import Array
from .base import NeighboringRelation
from .gaussian import Gaussian

ORDERS = (*(1 + order / 10 for order in range(1, 100)), *range(11, 64), 80, 96, 128, 192, 256, 512)


@plain_numbers
def votes_event(noise_stddev: float) -> Gaussian:
    """Returns the event of one answer, ``argmax(votes + N(0, noise_stddev² I))``: its noise multiplier is
    ``noise_stddev / sqrt(2)``.

    This is for one example more or less. Replacing one by another is two changes, and costs up to four times as much in
    1/σ², where the other example has another teacher, as with `teachers_of`.

    Args:
        noise_stddev: standard deviation of the noise on every count, in votes.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> f"{compose([(votes_event(40.0), 1000)]).epsilon(1e-5).high:.2f}"
        '4.98'
    """
    positive("votes_event", noise_stddev=noise_stddev)
    return Gaussian(noise_stddev / math.sqrt(2), NeighboringRelation.ADD_OR_REMOVE_ONE)


@plain_numbers
def threshold_event(noise_stddev: float) -> Gaussian:
    """Returns the event of one test, ``max(votes) + N(0, noise_stddev²) >= threshold``: its sensitivity is 1.

    Args:
        noise_stddev: standard deviation of the noise on the largest count, in votes.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> f"{compose([(threshold_event(100.0), 1000), (votes_event(40.0), 300)]).epsilon(1e-5).high:.2f}"
        '2.86'
    """
    positive("threshold_event", noise_stddev=noise_stddev)
    return Gaussian(noise_stddev, NeighboringRelation.ADD_OR_REMOVE_ONE)


@dataclass(frozen=True, eq=False)
class ThresholdTests:
    """Threshold tests that were made: the largest counts, secret, of shape (tests,), the threshold and the noise."""

    largest: Array
    threshold: float
    noise_stddev: float  # standard deviation of the noise on the largest count, in votes


@plain_numbers
def data_dependent_epsilon(
    votes: Array,
    noise_stddev: float,
    delta: float,
    orders: Sequence[float] | Array = ORDERS,
    *,
    tests: ThresholdTests | None = None,
) -> float:
    """Returns ε of answering exactly these votes, by Rényi divergences; **itself private**, to compare with papers.

    Args:
        votes: (queries, classes) counts of the teachers' votes, where they were answered.
        noise_stddev: standard deviation of the noise on every count, in votes.
        delta: in (0, 1).
        orders: Rényi orders to try, each above 1.
        tests: all threshold tests of confident GNMax that were made.

    Returns:
        ε >= 0; never above the ε for any votes at the same orders.

    Raises:
        ValueError: if votes are not counts, or a number is out of range.

    Source: Papernot, Song, Mironov, Raghunathan, Talwar & Erlingsson (2018), arXiv:1802.08908, Theorem 6,
        Propositions 7 and 10, and Algorithm 1 (its tests have two outcomes, so their divergence is that of these two);
        Canonne, Kamath & Steinke (2020), arXiv:2004.00010, for the last step.
    """
    votes, values = _counts(votes), np.asarray(orders, float)
    positive("data_dependent_epsilon", noise_stddev=noise_stddev)
    strictly_between("data_dependent_epsilon", 0, 1, delta=delta)
    if values.size == 0 or not ((values > 1) & np.isfinite(values)).all():
        raise ValueError(f"data_dependent_epsilon: orders={orders!r} must be one or more finite numbers above 1.")
    divergence = sum(
        (answer_divergences(log_q, noise_stddev, values) for log_q in log_chance_of_another(votes, noise_stddev)),
        np.zeros(len(values)) if tests is None else threshold_divergences(tests, values),
    )
    candidates = divergence + np.log1p(-1 / values) - np.log(delta * values) / (values - 1)
    return max(float(candidates.min()), 0.0)


def log_chance_of_another(votes: Array, noise_stddev: float) -> Array:
    """Returns the log of a bound on the chance that an answer is not the one with most votes.

    Shape (queries,); each at most 0.

    ``Σ_j erfc((n* - n_j) / (2 noise_stddev)) / 2`` over the other classes.
    """
    votes = _counts(votes)
    ordered = np.sort(votes, axis=1)
    lead = ordered[:, -1:] - ordered[:, :-1]
    with np.errstate(divide="ignore"):
        return np.minimum(np.log(erfc(lead / (2 * noise_stddev)).sum(1) / 2), 0.0)


def answer_divergences(log_q: float, noise_stddev: float, orders: Array) -> Array:
    """Returns Rényi divergences of one answer that differs from the most frequent one with probability at most q.

    They are never above ``order / noise_stddev²``, the bound for any votes, and below it where q is small enough.
    """
    variance = noise_stddev**2
    any_votes = orders / variance
    if log_q == -math.inf:
        return np.zeros(len(orders))
    second = math.sqrt(-log_q) * noise_stddev  # the order μ₂; μ₁ is one more
    if second <= 1:
        return any_votes
    first = second + 1
    bound = (second - 1) * second / variance - second * (math.log(first / second) + math.log(second / (second - 1)))
    if log_q > bound or -log_q <= second / variance:
        return any_votes
    log_stays = _log_1_minus_exp(log_q)
    log_a = (orders - 1) * (log_stays - _log_1_minus_exp((log_q + second / variance) * (1 - 1 / second)))
    log_b = (orders - 1) * (first / variance - log_q / second)
    sharper = np.logaddexp(log_stays + log_a, log_q + log_b) / (orders - 1)
    return np.where(orders < first, np.minimum(sharper, any_votes), any_votes)


def threshold_divergences(tests: ThresholdTests, orders: Array) -> Array:
    """Returns Rényi divergences of all tests at every order; a neighbor's count is one larger or smaller."""
    positive("ThresholdTests", noise_stddev=tests.noise_stddev)
    largest = _counts(np.column_stack([tests.largest, tests.largest]))[:, :1]
    here, *there = (
        (log_ndtr(x), log_ndtr(-x))
        for x in ((largest + change - tests.threshold) / tests.noise_stddev for change in (0, 1, -1))
    )
    either = [
        np.logaddexp(*(orders * p + (1 - orders) * q for p, q in zip(here, other, strict=True))) / (orders - 1)
        for other in there
    ]
    return np.clip(np.maximum(*either), 0, orders / (2 * tests.noise_stddev**2)).sum(0)


def _log_1_minus_exp(x: float) -> float:
    """Returns ``log(1 - e^x)`` for x < 0."""
    return math.log(-math.expm1(x)) if x > -0.7 else math.log1p(-math.exp(x))


def _counts(votes: Array) -> Array:
    counts = np.asarray(votes, float)
    if counts.ndim != 2 or counts.shape[1] < 2 or not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise ValueError(
            f"data_dependent_epsilon: votes of shape {counts.shape} must be counts of shape (queries, classes), none "
            "below 0 or infinite, with two or more classes."
        )
    return counts
