# SPDX-License-Identifier: Apache-2.0
"""Noisy majority votes of teachers (PATE): what answering costs whatever the votes, and what it cost with these votes.

Each example is known to one teacher, which may vote otherwise without it: one count falls by one and another rises by
one, so a query has sensitivity sqrt(2). Whatever the votes, an answer is therefore `Gaussian`, which `votes_event`
gives. Where teachers agree the answer hardly depends on any of them, and `data_dependent_epsilon` is smaller. **That
number itself depends on the votes, hence on private data: it must not be published** (not without smooth sensitivity
and noise of its own), and never goes into a ledger.

Confident GNMax first tests whether the largest count, with noise, reaches a threshold, and answers only where it does.
A test has sensitivity 1, `threshold_event`. Which queries are answered is random, but their price is not if the numbers
of tests and of answers are bounded in advance: every release is Gaussian given those before, so the squares of their
1 / noise multiplier add up, and no more of them can come than are paid for (Smith & Thakurta 2022, arXiv:2210.17520).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import erfc, log_ndtr

from ..._validate import positive, strictly_between
from ..bracket import Array
from .base import NeighboringRelation
from .gaussian import Gaussian

ORDERS = (*(1 + order / 10 for order in range(1, 100)), *range(11, 64), 80, 96, 128, 192, 256, 512)


def votes_event(noise_stddev: float) -> Gaussian:
    """One answer, ``argmax(votes + N(0, noise_stddev² I))``, for the accountant: ``noise_stddev / sqrt(2)`` in units of
    the sensitivity.

    Teachers' data are disjoint, so an example that is replaced changes one vote as well.

    Args:
        noise_stddev: standard deviation of the noise on every count, in votes.

    Example:
        >>> from torch_privacy.privacy import compose
        >>> f"{compose([(votes_event(40.0), 1000)]).epsilon(1e-5).high:.2f}"
        '4.98'
    """
    positive("votes_event", noise_stddev=noise_stddev)
    return Gaussian(noise_stddev / math.sqrt(2), NeighboringRelation.ADD_OR_REMOVE_ONE)


def threshold_event(noise_stddev: float) -> Gaussian:
    """One test, ``max(votes) + N(0, noise_stddev²) >= threshold``, for the accountant: the largest count changes by 1.

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
    """Tests that were made: the largest counts, secret, of shape (tests,), and what they were held against."""

    largest: Array
    threshold: float
    noise_stddev: float  # of the noise on the largest count, in votes


def data_dependent_epsilon(
    votes: Array,
    noise_stddev: float,
    delta: float,
    orders: Sequence[float] | Array = ORDERS,
    *,
    tests: ThresholdTests | None = None,
) -> float:
    """ε of having answered these very votes, by Rényi divergences: **private itself**, to compare with papers only.

    Args:
        votes: (queries, classes) counts of the teachers' votes, where they were answered.
        noise_stddev: standard deviation of the noise on every count, in votes.
        delta: in (0, 1).
        orders: Rényi orders to try, each above 1.
        tests: of confident GNMax, all that were made.

    Returns:
        ε >= 0; never above the one for any votes at the same orders.

    Raises:
        ValueError: votes that are no counts; a number out of range.

    Source: Papernot, Song, Mironov, Raghunathan, Talwar & Erlingsson (2018), arXiv:1802.08908, Theorem 6,
        Propositions 7 and 10, and Algorithm 1, whose tests have two outcomes and so the divergence that these have;
        Canonne, Kamath & Steinke (2020), arXiv:2004.00010, for the last step.
    """
    votes, values = _counts(votes), np.asarray(orders, float)
    positive("data_dependent_epsilon", noise_stddev=noise_stddev)
    strictly_between("data_dependent_epsilon", 0, 1, delta=delta)
    if values.size == 0 or not ((values > 1) & np.isfinite(values)).all():
        raise ValueError(f"data_dependent_epsilon: orders={orders!r} must be one or more finite numbers above 1.")
    divergence = sum(
        (_divergence(log_q, noise_stddev, values) for log_q in log_chance_of_another(votes, noise_stddev)),
        np.zeros(len(values)) if tests is None else _of_tests(tests, values),
    )
    candidates = divergence + np.log1p(-1 / values) - np.log(delta * values) / (values - 1)
    return max(float(candidates.min()), 0.0)


def log_chance_of_another(votes: Array, noise_stddev: float) -> Array:
    """(queries,): log of a bound on the chance that an answer is not the one with most votes; at most 0.

    ``Σ_j erfc((n* - n_j) / (2 noise_stddev)) / 2`` over the other classes.
    """
    votes = _counts(votes)
    ordered = np.sort(votes, axis=1)
    lead = ordered[:, -1:] - ordered[:, :-1]
    with np.errstate(divide="ignore"):
        return np.minimum(np.log(erfc(lead / (2 * noise_stddev)).sum(1) / 2), 0.0)


def _divergence(log_q: float, noise_stddev: float, orders: Array) -> Array:
    """Rényi divergences of one answer whose chance not to be the most frequent is at most q, at every order.

    Never above ``order / noise_stddev²``, which holds for any votes; below it where q is small enough.
    """
    variance = noise_stddev**2
    anyway = orders / variance
    if log_q == -math.inf:
        return np.zeros(len(orders))
    second = math.sqrt(-log_q) * noise_stddev  # the order μ₂; μ₁ is one more
    if second <= 1:
        return anyway
    first = second + 1
    bound = (second - 1) * second / variance - second * (math.log(first / second) + math.log(second / (second - 1)))
    if log_q > bound or -log_q <= second / variance:
        return anyway
    log_stays = _log_1_minus_exp(log_q)
    log_a = (orders - 1) * (log_stays - _log_1_minus_exp((log_q + second / variance) * (1 - 1 / second)))
    log_b = (orders - 1) * (first / variance - log_q / second)
    sharper = np.logaddexp(log_stays + log_a, log_q + log_b) / (orders - 1)
    return np.where(orders < first, np.minimum(sharper, anyway), anyway)


def _of_tests(tests: ThresholdTests, orders: Array) -> Array:
    """Rényi divergences of all tests, at every order: those of two outcomes whose chances a count one off changes."""
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
    """``log(1 - e^x)`` for x < 0."""
    return math.log(-math.expm1(x)) if x > -0.7 else math.log1p(-math.exp(x))


def _counts(votes: Array) -> Array:
    counts = np.asarray(votes, float)
    if counts.ndim != 2 or counts.shape[1] < 2 or not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise ValueError(f"votes of shape {counts.shape} must be (queries, classes) counts, none below 0.")
    return counts
