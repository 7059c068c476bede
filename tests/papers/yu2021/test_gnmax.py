# SPDX-License-Identifier: Apache-2.0
"""Noisy answers: how many are given, that their price covers every outcome, and who learns from them."""

import math

import numpy as np
import pytest
import torch

from torch_privacy import privacy
from torch_privacy.privacy import compose
from torch_privacy.privacy.events import pate
from torch_privacy_papers.yu2021 import kernels
from torch_privacy_papers.yu2021.gnmax import GNMax


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


@pytest.mark.parametrize("tests", [0, 300])
@pytest.mark.parametrize("epsilon", [0.5, 2.0, 8.0])
def test_all_that_may_be_released_costs_the_epsilon(tests, epsilon):
    mechanism = GNMax.within(epsilon, 1e-5, 100, tests=tests, threshold=200.0, share=0.3)
    assert epsilon - 1e-3 < compose(mechanism.events()).epsilon(1e-5).high <= epsilon
    squares = [number / event.noise_multiplier**2 for event, number in mechanism.events()]
    once = privacy.Gaussian(sum(squares) ** -0.5)
    assert compose([(once, 1)]).epsilon(1e-5).high == pytest.approx(epsilon, abs=1e-3)
    assert len(squares) == 1 or squares[0] == pytest.approx(0.3 * sum(squares))


def test_answers_stop_at_the_number_that_is_paid_for():
    votes = torch.tensor([[90.0, 10.0, 0.0], [34.0, 33.0, 33.0]]).repeat(50, 1)
    answers = GNMax(20, 1.0, tests=80, threshold=60.0, test_noise_stddev=1.0).released(votes)
    assert answers.queries.tolist() == list(range(0, 40, 2))
    assert answers.labels.tolist() == [0] * 20
    assert answers.tested == 39
    few = GNMax(60, 1.0, tests=80, threshold=60.0, test_noise_stddev=1.0).released(votes)
    assert (len(few.queries), few.tested) == (40, 80)
    none = GNMax(60, 1.0, tests=80, threshold=1e6, test_noise_stddev=1.0).released(votes)
    assert (len(none.queries), len(none.labels), none.tested) == (0, 0, 80)
    plain = GNMax(7, 1.0).released(votes)
    assert (plain.queries.tolist(), plain.tested) == (list(range(7)), 0)


def test_answers_are_as_noisy_as_they_say():
    votes = torch.tensor([[60.0, 40.0]]).repeat(20_000, 1)
    mechanism = GNMax(20_000, 20.0, tests=20_000, threshold=70.0, test_noise_stddev=15.0)
    answers = mechanism.released(votes)
    agreed, right = (0.5 * math.erfc(-z / math.sqrt(2)) for z in ((60 - 70) / 15, 20 / (20 * math.sqrt(2))))
    assert len(answers.queries) / 20_000 == pytest.approx(agreed, abs=5 * math.sqrt(0.25 / 20_000))
    share = float((answers.labels == 0).float().mean())
    assert share == pytest.approx(right, abs=5 * math.sqrt(0.25 / len(answers.labels)))


def test_price_of_votes_is_that_of_the_tests_and_answers():
    votes = torch.tensor([[84.0, 83.0, 83.0]]).repeat(50, 1)  # nobody agrees: as dear as any votes
    mechanism = GNMax(10, 30.0, tests=50, threshold=84.0, test_noise_stddev=50.0)
    answers = mechanism.released(votes)
    assert 0 < len(answers.queries) <= 10
    order = np.array(pate.ORDERS)
    dearest = len(answers.queries) / 30.0**2 + answers.tested / (2 * 50.0**2)
    anyway = (order * dearest + np.log1p(-1 / order) - np.log(1e-5 * order) / (order - 1)).min()
    spent = mechanism.epsilon_of_these_votes(votes, answers, 1e-5)
    assert 0.8 * anyway < spent <= anyway * (1 + 1e-9)


def test_ridge_solves_its_equations_in_double_precision():
    x, y = torch.randn(40, 3, dtype=torch.float64), torch.randint(3, (40,))
    ridge = kernels.Ridge.fitted(x, y, 1.5, classes=3)
    kernel = torch.exp(-(x[:, None] - x).square().sum(2) / 1.5**2)
    targets = torch.eye(3, dtype=torch.float64)[y] - 1 / 3
    torch.testing.assert_close((kernel + kernels.RIDGE * torch.eye(40)) @ ridge.weights, targets)
    assert torch.equal(ridge.predicted(x), (kernel @ ridge.weights).argmax(1))


def test_labels_spread_within_clusters_and_a_wrong_one_stays_alone():
    centers = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    truth = torch.arange(90) % 3
    points = centers[truth] + torch.randn(90, 2)
    graph = kernels.neighborhood(points)
    difference = graph - graph.T
    assert abs(difference).max() < 1e-6
    largest = np.linalg.eigvalsh(graph.toarray())[-1]
    assert largest == pytest.approx(1, abs=1e-5)
    known = torch.arange(12)
    labels = truth[known].clone()
    labels[0] = 1
    assert torch.equal(kernels.spread(graph, known, labels, classes=3)[1:], truth[1:])


def test_principal_directions_are_those_of_the_singular_values():
    points = torch.randn(200, 6) * torch.tensor([5.0, 4.0, 3.0, 0.1, 0.1, 0.1]) + 2
    mean, directions = kernels.principal(points, 3)
    exact = torch.linalg.svd(points - mean, full_matrices=False).Vh[:3]
    torch.testing.assert_close((exact @ directions).abs(), torch.eye(3), atol=1e-2, rtol=0)
    assert torch.equal(directions, kernels.principal(points, 3)[1])
