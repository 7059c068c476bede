# SPDX-License-Identifier: Apache-2.0
"""Who learns from noisy answers: ridge regression, labels that spread, principal directions."""

import numpy as np
import pytest
import torch

from torch_privacy_papers.yu2021 import kernels


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


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
