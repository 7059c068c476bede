# SPDX-License-Identifier: Apache-2.0
"""The filter against every adversary of small games, against other curves, and against the filter that is not valid."""

import math
from functools import cache

import mpmath as mp
import numpy as np
import pytest
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

from torch_privacy import privacy
from torch_privacy.privacy import tradeoff
from torch_privacy.privacy.gaussian_filter import GaussianFilter, delta_low

RELATION = privacy.NeighboringRelation.ADD_OR_REMOVE_ONE


def answering(epsilon):
    """Returns randomized response."""
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    return privacy.FinitePair((truth, 1 - truth), (1 - truth, truth))


def revealing(delta):
    """Returns a mechanism that reveals everything with this probability, else nothing."""
    return privacy.FinitePair((1 - delta, delta, 0.0), (1 - delta, 0.0, delta))


def worst_delta(epsilon, first, menu, fits):
    """Returns the largest δ at ε of any choice of mechanisms, each after all earlier outcomes, exactly.

    ``fits(names)`` says whether a filter allows these mechanisms of the menu after the ``first`` one.
    """

    @cache
    def value(p, q, chosen):
        found = max(p - math.exp(epsilon) * q, 0.0)
        for name, event in menu.items():
            following = tuple(sorted((*chosen, name)))
            if fits(following):
                parts = zip(event.p, event.q, strict=True)
                found = max(found, sum(value(p * a, q * b, following) for a, b in parts))
        return found

    return sum(value(p, q, ()) for p, q in zip(first.p, first.q, strict=True))


def test_filter_by_composed_profiles_is_not_valid_for_adaptive_choice():
    first, answer = answering(1.0), answering(0.8)
    delta = float(privacy.compose([(first, 1), (answer, 1)]).delta(1.2).high)
    menu = {"answer": answer, "reveal": revealing(delta)}
    for event in menu.values():
        assert privacy.compose([(first, 1), (event, 1)]).delta(1.2).low <= delta * (1 + 1e-9)
    adaptive = worst_delta(1.2, first, menu, lambda names: len(names) == 1)
    assert adaptive == pytest.approx(delta * (1 + 1 / (1 + math.e)), rel=1e-6)  # after the harmless outcome, reveal


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [(1.2, 0.05), *(pytest.param(*one, marks=pytest.mark.thorough) for one in [(2.0, 0.01), (0.5, 0.1)])],
)
def test_filter_holds_against_every_adaptive_adversary(epsilon, delta):
    bounded = GaussianFilter(epsilon, delta, RELATION, "example")
    first = answering(epsilon / 4)
    low, high = 0.0, 2.0
    for _ in range(8):
        middle = (low + high) / 2
        fits = bounded.epsilon_high([(first, 1)], middle) <= epsilon
        low, high = (middle, high) if fits else (low, middle)
    menu = {
        "answer": answering(epsilon / 4),
        "answer more": answering(epsilon / 2),
        "reveal": revealing(delta / 16),
        "lopsided": privacy.FinitePair((0.02, 0.98), (0.01, 0.99)),
    }
    shares = {name: bounded.share([(event, 1)]) for name, event in menu.items()}
    worst = worst_delta(epsilon, first, menu, lambda names: sum(shares[name] for name in names) <= low)
    assert 0.02 * delta < worst <= delta


def test_share_of_gaussian_release_is_that_of_its_square():
    bounded = GaussianFilter(3.0, 1e-6, RELATION, "example")
    one = bounded.share([(privacy.Gaussian(5.0), 1)])
    assert one == pytest.approx(bounded.share([(privacy.Gaussian(10.0), 4)]), rel=2e-6)

    assert bounded.epsilon_high([], 1.0) == pytest.approx(3.0, abs=1e-9)
    assert bounded.epsilon_high([], 1.0) <= 3.0
    # the share of noise 1/μ is 1 but for the chords, and never below
    mu = 1 / privacy.calibrate(3.0, 0.75e-6 / (1 - 0.25e-6), sampling_probability=1.0, num_steps=1)
    assert 1 <= bounded.share([(privacy.Gaussian(1 / mu), 1)]) / (1 - 2e-4) < 1.02


def test_share_bounds_what_dp_accounting_says_of_sampled_steps():
    bounded = GaussianFilter(3.0, 1e-6, RELATION, "example")
    steps = [(privacy.SubsampledGaussian(1.5, 0.02), 200)]
    share = bounded.share(steps)
    mu_of_whole = 1 / privacy.calibrate(3.0, 0.75e-6 / (1 - 0.25e-6), sampling_probability=1.0, num_steps=1)
    revealed, curve = 1 - (1 - 0.25e-6) ** share, tradeoff.Gaussian(math.sqrt(share) * mu_of_whole * (1 + 1e-4))
    accountant = PLDAccountant(value_discretization_interval=1e-3).compose(privacy.to_dp_event(steps))
    for epsilon in np.linspace(0, 4, 9):
        above = revealed + (1 - revealed) * float(curve.delta(float(epsilon)))
        assert accountant.get_delta(float(epsilon)) <= above * 1.03 + 1e-12  # their curve is an upper bound
    assert privacy.compose(steps).delta(0.5).low > 0.6 * (revealed + (1 - revealed) * float(curve.delta(0.5)))


def test_share_covers_delta_that_no_epsilon_takes_away():
    bounded = GaussianFilter(3.0, 1e-6, RELATION, "example")
    share = bounded.share([(privacy.KnownProfile((0.0,), (1e-7,)), 1)])
    assert share == pytest.approx(0.4, rel=1e-2)
    assert bounded.share([(privacy.KnownProfile((600.0,), (0.0,)), 1)]) == math.inf
    assert bounded.share([(privacy.KnownProfile((0.0,), (0.0,)), 1)]) == 0
    assert bounded.epsilon_high([], 5.0) == math.inf  # everything of δ is revealed
    assert bounded.epsilon_high([], math.inf) == math.inf  # everything is


def test_declared_releases_without_a_share_have_their_exact_price():
    bounded = GaussianFilter(3.0, 1e-6, RELATION, "example")
    steps = [(privacy.SubsampledGaussian(1.5, 0.02), 200)]
    assert bounded.epsilon_high(steps, 0.0) == privacy.compose(steps).epsilon_high(1e-6)


def test_declared_gaussian_release_and_a_share_have_a_closed_form():
    bounded = GaussianFilter(3.0, 1e-6, RELATION, "example")
    of_whole = 1 / privacy.calibrate(3.0, 0.75e-6 / (1 - 0.25e-6), sampling_probability=1.0, num_steps=1)
    epsilon = bounded.epsilon_high([(privacy.Gaussian(5.0), 1)], 0.1)
    revealed, curve = 1 - (1 - 0.25e-6) ** 0.1, tradeoff.Gaussian(math.sqrt(0.1 * of_whole**2 + 0.2**2))
    assert revealed + (1 - revealed) * float(curve.delta(epsilon)) == pytest.approx(1e-6, rel=1e-3)


def test_points_on_the_curve_do_not_bound_the_chord_between_them():
    bounded = GaussianFilter(3.0, 1e-6, RELATION, "example")
    curve = tradeoff.Gaussian(bounded._mu)
    for epsilons, holds in ([0.0, 3.0, 600.0], False), (np.linspace(0, 8, 4000), True):
        points = np.asarray(epsilons, float)
        deltas = (1 - 1e-4) * np.asarray(curve.delta(points))  # below the curve of the whole budget
        assert bounded._dominates(1.0, points, deltas) is holds


def test_rounding_never_lifts_the_curve_of_a_small_share():
    """Against 50 digits: down to μ = 1e-9, where the two parts of δ agree in nine digits."""
    with mp.workdps(50):
        for mu in np.geomspace(1e-9, 30, 40):
            epsilons = mu * np.array([0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0])
            for epsilon, found in zip(epsilons, delta_low(float(mu), epsilons), strict=True):
                e, m = mp.mpf(float(epsilon)), mp.mpf(float(mu))
                exact = mp.ncdf(m / 2 - e / m) - mp.exp(e) * mp.ncdf(-m / 2 - e / m)
                assert found <= exact
                assert mu < 1e-3 or found >= exact * (1 - 1e-8)
