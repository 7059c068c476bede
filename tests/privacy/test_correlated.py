# SPDX-License-Identifier: Apache-2.0
"""The coefficients of banded noise: reference values, a dense optimum, and the error that is simulated."""

import math

import numpy as np
import pytest
from scipy.linalg import toeplitz
from scipy.optimize import minimize

from torch_privacy.privacy import Workload, best_coefficients, inverse_coefficients, inverse_error, mean_error
from torch_privacy.privacy.correlated import inverse

WORKLOADS = {
    "sums": Workload(24),
    "momentum": Workload(24, momentum=0.9),
    "decay": Workload(24, momentum=0.5, weight_decay=0.1),
    "rates": Workload(24, momentum=0.9, rates=tuple(1 / (1 + k) for k in range(24))),
    "average": Workload(24, momentum=0.5, average=0.8),
    "mean of all": Workload(24, momentum=0.5, average=tuple(k / (k + 1) for k in range(24))),
    "average and rates": Workload(24, average=0.8, rates=tuple(1 / (1 + k) for k in range(24))),
}


@pytest.mark.parametrize(
    ("bands", "first"),
    [(2, (0.75015, 0.66126)), (4, (0.58702, 0.50351, 0.46819, 0.42742)), (8, (0.50050, 0.38679, 0.35633, 0.33805))],
)
def test_the_optimum_for_sums_is_that_of_another_implementation(bands, first):
    assert best_coefficients(bands, Workload(1000))[: len(first)] == pytest.approx(first, abs=2e-5)


@pytest.mark.parametrize(
    ("bands", "noise", "error"),
    [(1, 2.38227, 53.30), (8, 2.03853, 17.03), (32, 1.35021, 6.63), (64, 1.69633, 6.84), (2, 0.65515, 10.43)],
)
def test_the_error_at_a_noise_multiplier_is_the_reference(bands, noise, error):
    workload = Workload(1000)
    assert noise * mean_error(best_coefficients(bands, workload), workload) == pytest.approx(error, abs=0.006)


def dense_workload(workload):
    """Returns A, with the optimizer simulated for each gradient."""
    n, rates = workload.num_steps, workload.rates or (1.0,) * workload.num_steps
    scale = math.sqrt(np.mean(np.square(rates)))
    averages = workload.average if isinstance(workload.average, tuple) else (workload.average,) * n
    a = np.zeros((n, n))
    for i in range(n):
        weight = velocity = average = 0.0
        for t in range(n):
            velocity = workload.momentum * velocity + (t == i)
            weight = (1 - workload.weight_decay) * weight + rates[t] / scale * velocity
            average = averages[t] * average + (1 - averages[t]) * weight
            a[t, i] = average
    return a


def of_matrices(c, workload):
    """Returns the error by dense matrices."""
    a, n = dense_workload(workload), workload.num_steps
    dense = toeplitz(np.append(c, np.zeros(n))[:n], np.zeros(n))
    return np.linalg.norm(c) * math.sqrt((a @ np.linalg.inv(dense)).__pow__(2).sum() / n)


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("name", WORKLOADS)
def test_error_and_optimum_are_those_of_dense_matrices(name):
    workload = WORKLOADS[name]
    for c in ((1.0,), (1.0, 0.5, 0.375), best_coefficients(5, workload)):
        assert mean_error(c, workload) == pytest.approx(of_matrices(np.array(c), workload), rel=1e-9)
    best = mean_error(best_coefficients(4, workload), workload)
    for seed in range(3):
        start = np.random.default_rng(seed).random(3)
        found = minimize(lambda tail: of_matrices(np.append(1.0, np.abs(tail)), workload), start, method="Nelder-Mead")
        assert best <= found.fun * (1 + 1e-5)


@pytest.mark.parametrize("name", WORKLOADS)
def test_more_bands_are_never_worse_at_equal_noise_and_have_norm_1(name):
    errors = []
    for bands in (1, 2, 3, 6, 12, 30):
        c = best_coefficients(bands, WORKLOADS[name])
        assert len(c) == bands
        assert np.linalg.norm(c) == pytest.approx(1.0, abs=1e-9)
        assert min(c) >= 0
        errors.append(mean_error(c, WORKLOADS[name]))
    assert errors == sorted(errors, reverse=True) or np.all(np.diff(errors) < 1e-4 * errors[0])


def test_the_inverse_of_the_square_root():
    assert inverse((1, 0.5, 0.375, 0.3125, 0.2734375, 0.24609375), 6) == pytest.approx(
        [1, -0.5, -0.125, -0.0625, -0.0390625, -0.02734375]
    )


@pytest.mark.parametrize(
    ("bands", "error"), [(1, 70.746), (4, 28.47), (8, 20.92), (16, 15.99), (32, 13.17), (64, 12.37)]
)
def test_the_banded_inverse_has_the_error_of_the_reference_after_ten_passes(bands, error):
    workload = Workload(1000)
    found = inverse_error(inverse_coefficients(bands, workload, 100), workload) * 10**0.5
    assert found == pytest.approx(error, abs=0.006)


@pytest.mark.parametrize("workload", [Workload(23), Workload(23, weight_decay=0.1), Workload(23, average=0.3)], ids=str)
@pytest.mark.parametrize(("bands", "batches"), [(1, 5), (3, 5), (7, 5), (4, 9), (30, 5)])
def test_passes_over_a_banded_inverse_cost_at_most_as_many_gaussian_releases(workload, bands, batches):
    w = inverse_coefficients(bands, workload, batches)
    assert len(w) == bands
    dense = toeplitz(np.append(w, np.zeros(23))[:23], np.zeros(23))
    a, c = dense_workload(workload), np.linalg.inv(dense)
    assert inverse_error(w, workload) == pytest.approx(math.sqrt(((a @ dense) ** 2).sum() / 23), rel=1e-9)
    rng, ratios = np.random.default_rng(0), []
    for stop in range(1, 24):
        for first in range(min(batches, stop)):
            steps = np.arange(first, stop, batches)
            every = [np.ones(len(steps)), *rng.choice([-1.0, 1.0], (20, len(steps)))]
            ratios += [np.linalg.norm(c[:stop, steps] @ signs) ** 2 / -(-stop // batches) for signs in every]
    assert 0.9 < max(ratios) <= 1


def test_few_bands_of_an_inverse_that_make_the_error_larger_are_refused():
    with pytest.raises(ValueError, match="too small for this momentum"):
        inverse_coefficients(4, Workload(1000, momentum=0.9, average=0.99), 100)
    with pytest.raises(ValueError, match="must be one number"):
        inverse_coefficients(2, Workload(2, average=(0.0, 0.5)), 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"average": 1.5},
        {"average": (0.5, 1.5)},
        {"average": (0.5,) * 1201, "num_steps": 1201},
        {"momentum": 1.5},
        {"momentum": -0.1},
        {"weight_decay": 2.0},
        {"num_steps": 0},
    ],
)
def test_what_is_out_of_range_is_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Workload(**{"num_steps": 5} | settings)
