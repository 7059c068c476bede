# SPDX-License-Identifier: Apache-2.0
"""Prices of noisy votes, against the answers' true distributions on neighboring votes."""

import itertools

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

from torch_privacy import privacy
from torch_privacy.privacy import pate


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
def test_divergence_is_never_below_that_of_the_answers_on_neighboring_votes(votes, noise_stddev):
    orders = np.array([1.5, 2.0, 4.0, 8.0, 20.0])
    (log_q,) = pate.log_chance_of_another(np.array([votes]), noise_stddev)
    bound = pate._divergence(log_q, noise_stddev, orders)
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


def test_agreement_makes_answers_cheap_and_disagreement_never_dearer_than_any_votes():
    agreed, split = np.tile([250.0, 0, 0], (1000, 1)), np.tile([84.0, 83, 83], (1000, 1))
    orders = np.array(pate.ORDERS)
    anyway = (1000 * orders / 40.0**2 + np.log1p(-1 / orders) - np.log(1e-5 * orders) / (orders - 1)).min()
    assert pate.data_dependent_epsilon(split, 40.0, 1e-5) == pytest.approx(anyway)
    assert pate.data_dependent_epsilon(agreed, 40.0, 1e-5) < 0.2 * anyway


def test_whatever_the_votes_the_price_is_a_gaussian_of_sensitivity_root_two():
    profile = privacy.compose([(pate.votes_event(40.0), 200)])
    assert profile.epsilon(1e-5).low <= privacy.compose([(privacy.Gaussian(40 / 400**0.5), 1)]).epsilon(1e-5).high
    assert profile.epsilon(1e-5).high >= privacy.compose([(privacy.Gaussian(40 / 400**0.5), 1)]).epsilon(1e-5).low


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
