# SPDX-License-Identifier: Apache-2.0
"""The regret of stating mu in place of a trade-off function, against its definition and other libraries."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution

from torch_privacy import privacy
from torch_privacy.privacy.tradeoff import EpsilonDelta, Gaussian, Laplace, metrics

CURVES = {"Laplace": Laplace(1.0), "(1, 0.01)": EpsilonDelta(1.0, 0.01)}
FEW = [(privacy.SubsampledGaussian(1.0, 0.05), 20)]  # far from a Gaussian

BOUNDED = [(privacy.FixedSizeGaussian(1.0, 0.05), 20)]  # with known bounds only


def by_definition(f, mu):
    """Returns the smallest shift with ``f(alpha + shift) - shift <= G(alpha)`` on a fine grid, by bisection."""
    alpha = np.linspace(0, 1, 20_001)
    below = Gaussian(mu)(alpha)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        fits = (np.asarray(f(np.minimum(alpha + middle, 1))) - middle <= below).all()
        low, high = (low, middle) if fits else (middle, high)
    return high


@pytest.mark.parametrize("name", CURVES)
def test_regret_is_the_shift_of_its_definition(name):
    f = CURVES[name]
    for mu in (metrics.mu(f, 1e-3).high, 2.0):
        low, high = metrics.regret(f, mu)
        assert low - 1e-5 <= by_definition(f, mu) <= high + 1e-5
        assert high - low < 2e-5


def test_regret_is_zero_of_a_gaussian_and_the_fixed_point_where_mu_is_infinite():
    low, high = metrics.regret(Gaussian(1.5), 1.5)
    assert 0 <= low <= high < 1e-5
    assert metrics.regret(EpsilonDelta(0.0), 0.0).high == 0
    fixed = 0.99 / (1 + math.e)  # of (1, 0.01)-privacy
    assert metrics.regret(EpsilonDelta(1.0, 0.01), math.inf).high == pytest.approx(fixed, rel=1e-12)
    with pytest.raises(ValueError, match="mu"):
        metrics.regret(Gaussian(1.5), -1.0)


def test_mu_and_regret_are_those_of_gdpnum():
    """What the paper's library prints for this training, to the width of its own grid."""
    mu, regret = 1.5685621993129137, 0.0010208130697719753
    training = privacy.compose([(privacy.SubsampledGaussian(9.4, 0.328), 2000)])
    assert training.mu(1e-10).high == pytest.approx(mu, rel=2e-4)
    low, high = training.tradeoffs["symmetrized"]
    assert metrics.regret(low, mu).low - 3e-5 <= regret <= metrics.regret(high, mu).high + 3e-5


@pytest.mark.parametrize("releases", [FEW, BOUNDED, [(privacy.Laplace(0.5), 2)]])
def test_mu_and_regret_together_bound_every_test(releases):
    """Also those with errors below the floor, which mu alone does not bound."""
    profile = privacy.compose(releases)
    mu, shift, alpha = profile.mu().high, profile.regret().high, np.geomspace(1e-9, 1, 500)
    gaussian = Gaussian(mu)(np.minimum(alpha + shift, 1))
    assert (profile.true_positive_rate(alpha).low <= 1 - gaussian + shift).all()
    reached = profile.tradeoff(np.minimum(alpha + shift, 1)).high - shift  # wherever f lies in its bracket
    assert (reached <= Gaussian(mu)(alpha) + 1e-12).all()
    assert profile.regret(floor=0.1).high >= 0.1


def test_mu_alone_does_not_bound_errors_below_its_floor():
    """Else the regret would not need to count them."""
    profile = privacy.compose(FEW)
    gaussian = Gaussian(profile.mu().high)
    assert profile.true_positive_rate(1e-9).low > 1.5 * (1 - gaussian(1e-9))
    assert profile.true_positive_rate(1e-5).high <= (1 - gaussian(1e-5)) * (1 + 1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mu", "regret"])
def test_a_floor_is_refused_by_the_name_of_the_call(name):
    with pytest.raises(ValueError, match=rf"Profile.{name}: floor=1.0 must lie in \(1e-13, 0.5\)"):
        getattr(privacy.compose(FEW), name)(1.0)


def test_true_positive_rates_are_those_of_another_accountant():
    noise, probability, steps = 0.7, 256 / 60000, 2000
    pld = privacy_loss_distribution.from_gaussian_mechanism(noise, sampling_prob=probability).self_compose(steps)
    epsilons = np.linspace(0, 9, 121)
    delta = np.array([pld.get_delta_for_epsilon(epsilon) for epsilon in epsilons])
    profile = privacy.compose([(privacy.SubsampledGaussian(noise, probability), steps)])
    for alpha in (1e-2, 1e-3, 1e-4):
        lines = [delta + np.exp(epsilons) * alpha, 1 - np.exp(-epsilons) * (1 - delta - alpha)]
        assert profile.true_positive_rate(alpha).high == pytest.approx(float(np.min(lines)), rel=5e-3)


def test_releases_without_any_privacy_have_no_regret():
    profile = privacy.compose([(privacy.SubsampledGaussian(0.6, 0.25), 40_000)])
    assert profile.mu().high == np.inf
    assert profile.regret() == (0.0, 1e-6)
