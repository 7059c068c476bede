# SPDX-License-Identifier: Apache-2.0
"""Prices of noisy votes, against the answers' true distributions on neighboring votes."""

import itertools

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

from torch_privacy import privacy
from torch_privacy.privacy.events import pate


def answers(votes, noise_stddev):
    """Chance of each class to have the largest noisy count, by the trapezoid rule."""
    x = np.linspace(min(votes) - 12 * noise_stddev, max(votes) + 12 * noise_stddev, 40_001)
    below = norm.cdf(x[:, None], votes, noise_stddev)
    chances = [
        np.trapezoid(norm.pdf(x, n, noise_stddev) * np.delete(below, k, axis=1).prod(1), x) for k, n in enumerate(votes)
    ]
    return np.array(chances) / sum(chances)


def renyi(p, q, order):
    kept = np.minimum(p, q) > 1e-290  # leaving out the others makes it smaller
    return logsumexp(order * np.log(p[kept]) + (1 - order) * np.log(q[kept])) / (order - 1)


@pytest.mark.parametrize("votes", [(95, 3, 2), (60, 40, 0), (34, 33, 33), (250, 0, 0), (12, 3)])
@pytest.mark.parametrize("noise_stddev", [4.0, 15.0, 40.0])
def test_divergence_is_at_least_that_of_neighboring_votes(votes, noise_stddev):
    orders = np.array([1.5, 2.0, 4.0, 8.0, 20.0])
    (log_q,) = pate.log_chance_of_another(np.array([votes]), noise_stddev)
    bound = pate.answer_divergences(log_q, noise_stddev, orders)
    here = answers(votes, noise_stddev)
    assert 1 - here.max() <= np.exp(log_q) * (1 + 1e-6) + 1e-12
    for up, down in itertools.permutations(range(len(votes)), 2):
        if votes[down]:
            neighbor = np.array(votes)
            neighbor[up] += 1
            neighbor[down] -= 1
            there = answers(neighbor, noise_stddev)
            for order, most in zip(orders, bound, strict=True):
                assert max(renyi(here, there, order), 0) <= most * (1 + 1e-6) + 1e-11


def test_agreement_is_cheap_and_disagreement_costs_at_most_any_votes():
    agreed, split = np.tile([250.0, 0, 0], (1000, 1)), np.tile([84.0, 83, 83], (1000, 1))
    orders = np.array(pate.ORDERS)
    anyway = (1000 * orders / 40.0**2 + np.log1p(-1 / orders) - np.log(1e-5 * orders) / (orders - 1)).min()
    assert pate.data_dependent_epsilon(split, 40.0, 1e-5) == pytest.approx(anyway)
    assert pate.data_dependent_epsilon(agreed, 40.0, 1e-5) < 0.2 * anyway


def test_the_larger_the_lead_the_cheaper_the_answer():
    leads = [np.array([[100 + lead, 100 - lead, 0.0]]) for lead in range(0, 101, 10)]
    spent = [pate.data_dependent_epsilon(np.tile(votes, (50, 1)), 20.0, 1e-5) for votes in leads]
    assert spent == sorted(spent, reverse=True)
    assert spent[-1] < 0.5 * spent[0]


def test_price_without_votes_is_a_gaussian_of_sensitivity_root_two():
    profile = privacy.compose([(pate.votes_event(40.0), 200)])
    assert profile.epsilon(1e-5).low <= privacy.compose([(privacy.Gaussian(40 / 400**0.5), 1)]).epsilon(1e-5).high
    assert profile.epsilon(1e-5).high >= privacy.compose([(privacy.Gaussian(40 / 400**0.5), 1)]).epsilon(1e-5).low


@pytest.mark.every_case
@pytest.mark.parametrize("noise_stddev", [0.5, 3.0, 40.0])
@pytest.mark.parametrize("largest", [0.0, 50.0, 99.0, 100.0, 103.0, 250.0])
def test_threshold_tests_cost_at_most_what_any_votes_do(largest, noise_stddev):
    orders = np.array([1.1, 2.0, 8.0, 64.0])
    tests = pate.ThresholdTests(np.array([largest]), 100.0, noise_stddev)
    spent = pate.threshold_divergences(tests, orders)
    assert (spent <= orders / (2 * noise_stddev**2)).all()
    passes = [norm.sf(100.0, largest + change, noise_stddev) for change in (0, -1, 1)]
    here, *there = (np.array([chance, 1 - chance]) for chance in passes)
    if min(np.minimum(*outcomes).min() for outcomes in zip(there, [here] * 2, strict=True)) > 1e-12:
        for order, most in zip(orders, spent, strict=True):
            assert most == pytest.approx(max(renyi(here, other, order) for other in there), rel=1e-5, abs=1e-12)


def test_tests_are_cheap_far_from_the_threshold():
    tests = [pate.ThresholdTests(np.full(100, count), 200.0, 10.0) for count in (201.0, 220.0, 249.0)]
    spent = [pate.data_dependent_epsilon(np.zeros((0, 3)), 40.0, 1e-5, tests=one) for one in tests]
    assert spent[0] > spent[1] > 2 * spent[2]
    assert pate.data_dependent_epsilon(np.full((1, 3), 5.0), 40.0, 1e-5, tests=tests[0]) > spent[0]


@pytest.mark.parametrize(
    ("votes", "noise_stddev", "delta", "said"),
    [
        (np.ones(3), 1.0, 1e-5, r"shape \(3,\)"),
        (-np.ones((1, 3)), 1.0, 1e-5, "none below 0"),
        (np.full((1, 3), np.nan), 1.0, 1e-5, "counts"),
        (np.ones((1, 3)), 0.0, 1e-5, "noise_stddev"),
        (np.ones((1, 3)), 1.0, 1.0, "delta"),
    ],
)
def test_nonsense_is_refused(votes, noise_stddev, delta, said):
    with pytest.raises(ValueError, match=said):
        pate.data_dependent_epsilon(votes, noise_stddev, delta)
