# SPDX-License-Identifier: Apache-2.0
"""zCDP: the conversion against opendp and a search over orders, the price against mechanisms with the guarantee."""

import math

import numpy as np
import opendp.combinators
import opendp.measurements
import opendp.prelude as dp
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.optimize import minimize_scalar

from torch_privacy import privacy
from torch_privacy.privacy import Gaussian, SubsampledGaussian, ZeroConcentrated
from torch_privacy.privacy.events.concentrated import delta_of


def epsilon(*events, delta=1e-6):
    return privacy.compose([(event, 1) for event in events]).epsilon(delta)


@pytest.mark.parametrize("rho", [1e-8, 1e-4, 1e-2, 0.3, 5.0, 100.0])
def test_conversion_is_the_best_order(rho):
    def exponent(log_order_minus_1, target):
        a = 1 + math.exp(log_order_minus_1)
        return (a - 1) * (a * rho - target) + (a - 1) * math.log1p(-1 / a) - math.log(a)

    targets = np.linspace(0, rho + 2 * math.sqrt(40 * rho), 23)
    best = [minimize_scalar(exponent, bounds=(-12, 20), method="bounded", args=(e,)).fun for e in targets]
    ours = np.log(delta_of(rho, targets))
    np.testing.assert_array_less(np.minimum(best, 0) - 1e-9, ours + 1e-12)
    np.testing.assert_allclose(ours[1:], np.minimum(best, 0)[1:], atol=2e-3)


@pytest.mark.parametrize("scale", [1.0, 7.0, 100.0])
def test_price_is_that_of_opendp(scale):
    dp.enable_features("contrib")
    space = dp.atom_domain(T=int), dp.absolute_distance(T=float)
    noisy = opendp.measurements.make_gaussian(*space, scale, MO="ZeroConcentratedDivergence")
    curve = opendp.combinators.make_zCDP_to_approxDP(noisy).map(1.0)
    event = ZeroConcentrated(noisy.map(1.0))
    for delta in (1e-3, 1e-6, 1e-9):
        assert epsilon(event, delta=delta).high == pytest.approx(curve.epsilon(delta), rel=2e-3)
        assert epsilon(event, delta=delta).high >= curve.epsilon(delta) * (1 - 1e-9)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("rho", [1e-3, 0.02, 0.5])
@pytest.mark.parametrize("count", [1, 5])
def test_price_is_never_below_that_of_gaussian_noise(rho, count):
    truth = pld.from_gaussian_mechanism(math.sqrt(0.5 / rho), use_connect_dots=False, pessimistic_estimate=False)
    truth = truth.self_compose(count)
    for delta in (1e-3, 1e-6):
        high = privacy.compose([(ZeroConcentrated(rho), count)]).epsilon(delta).high
        assert truth.get_epsilon_for_delta(delta) <= high <= (1.3 + 0.1 * count) * truth.get_epsilon_for_delta(delta)


def test_delta_is_spent():
    assert epsilon(ZeroConcentrated(0.01, 1e-6), delta=0.9e-6).high == np.inf
    assert epsilon(ZeroConcentrated(0.01, 1e-6), delta=3e-6).high >= epsilon(ZeroConcentrated(0.01), delta=2e-6).high
    twice = epsilon(ZeroConcentrated(0.01, 1e-6), ZeroConcentrated(0.01, 1e-6), delta=3e-6).high
    assert twice >= privacy.compose([(Gaussian(math.sqrt(50)), 2)]).epsilon(1e-6 + 1e-12).high


@pytest.mark.parametrize("rho", [1e-3, 0.05])
def test_training_with_releases_costs_no_less_than_with_gaussian_ones(rho):
    step = (SubsampledGaussian(1.0, 0.01), 500)
    ours = privacy.compose([(ZeroConcentrated(0.3 * rho), 1), (ZeroConcentrated(0.7 * rho, 1e-8), 1), step])
    gaussian = privacy.compose([(Gaussian(math.sqrt(0.5 / rho)), 1), step])
    alone = privacy.compose([step])
    high = ours.epsilon(1e-6).high
    assert alone.epsilon(1e-6).high < gaussian.epsilon(1e-6).low <= high <= 1.15 * gaussian.epsilon(1e-6).high
