# SPDX-License-Identifier: Apache-2.0
import re
import sys

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st
from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

from torch_privacy import privacy
from torch_privacy.privacy import Bracket
from torch_privacy.privacy.engines import dispatch
from torch_privacy.privacy.engines.curve import ClosedFormCurve, SimpleCurve
from torch_privacy.privacy.pairs.gaussian import SubsampledGaussianPair
from torch_privacy.privacy.summary import equal_releases

compose_module = sys.modules[privacy.compose.__module__]

MNIST = 256 / 60000

# noise multiplier, sampling probability, steps, delta -> epsilon, computed once by a contour integral to 1e-9
EXACT = {
    "Adult": (0.55, 256 / 29305, 2061, 1e-5, 11.807306),
    "two thousand": (1.0, 0.01, 2000, 1e-5, 2.58384118169),
    "ten thousand": (0.8, MNIST, 10_000, 1e-5, 3.7976047070),
    "five thousand": (2.0, 0.02, 5000, 1e-5, 3.2087507013),
    "moments 1.34": (1.3, MNIST, 4688, 1e-5, 1.007396),
    "moments 8.68": (0.7, MNIST, 16_406, 1e-5, 7.094764),
    "CLT 8.68": (0.638, MNIST, 16_406, 1e-5, 9.476696),
    "MNIST row 3": (0.7, MNIST, 10_547, 1e-5, 5.639683),
    "IMDb": (0.56, 512 / 25_000, 439, 1e-5, 12.140715),
    "CLT .35": (1.06, MNIST, 4688, 1e-5, 1.407805),
    "MNIST row 1": (1.3, MNIST, 3516, 1e-5, 0.864540),
    "MNIST row 2": (1.1, MNIST, 14062, 1e-5, 2.381597),
    "Abadi 100": (4.0, 0.01, 10_000, 1e-5, 0.946867),
    "Abadi 400": (4.0, 0.01, 40_000, 1e-5, 2.033065),
    "Figure A.1": (1.1, 60**0.5 * MNIST, 234, 1e-5, 2.743269),
    "MovieLens": (0.6, 1 / 80, 1600, 1e-6, 12.749436),
    "0.6, 1e3": (0.6, MNIST, 1000, 1e-5, 3.817107536),
    "0.6, 1e4": (0.6, MNIST, 10_000, 1e-5, 9.076485506),
    "0.6, 1e5": (0.6, MNIST, 100_000, 1e-5, 34.145515192),
    "0.6, 1e6": (0.6, MNIST, 1_000_000, 1e-5, 186.173086837),
    "1.1, 1e3": (1.1, MNIST, 1000, 1e-5, 0.598685144),
    "1.1, 1e4": (1.1, MNIST, 10_000, 1e-5, 1.977902463),
    "1.1, 1e5": (1.1, MNIST, 100_000, 1e-5, 7.270792856),
    "1.1, 1e6": (1.1, MNIST, 1_000_000, 1e-5, 31.586728024),
    "2, 1e3": (2.0, MNIST, 1000, 1e-5, 0.245642421),
    "2, 1e4": (2.0, MNIST, 10_000, 1e-5, 0.843812122),
    "2, 1e5": (2.0, MNIST, 100_000, 1e-5, 3.009404709),
    "2, 1e6": (2.0, MNIST, 1_000_000, 1e-5, 11.730315562),
}


def poisson(noise_multiplier, sampling_probability, num_steps) -> privacy.Profile:
    return privacy.compose([(privacy.SubsampledGaussian(noise_multiplier, sampling_probability), num_steps)])


def curves_of(profile):
    return list(profile.directions.values())


def assert_brackets(bracket: Bracket, truth: float, digits: float = 0.0, width: float = 1e-4):
    assert bracket.low <= truth + digits
    assert bracket.high >= truth - digits
    assert bracket.high - bracket.low <= width * abs(truth)


@pytest.mark.parametrize("case", EXACT)
def test_epsilon_brackets_the_exact_value(case):
    *setting, delta, epsilon = EXACT[case]
    width = 5e-4 if setting[2] == 1_000_000 else 6e-5
    assert_brackets(poisson(*setting).epsilon(delta), epsilon, digits=1e-6, width=width)


def test_add_direction_alone_matches_its_exact_value():
    remove, add = curves_of(poisson(0.55, 256 / 29305, 2061))
    assert_brackets(add.epsilon(1e-5), 5.305, digits=5e-4)
    assert_brackets(remove.epsilon(1e-5), 11.807306, digits=1e-6)


@pytest.mark.parametrize("num_steps", [1, 4, 1000])
def test_full_batch_gaussian_has_a_closed_form(num_steps):
    profile = privacy.compose([(privacy.Gaussian(3.0), num_steps)])
    curve = privacy.tradeoff.Gaussian(num_steps**0.5 / 3.0)
    for epsilon in (0.0, 0.3, 2.0):
        assert_brackets(profile.delta(epsilon), curve.delta(epsilon), digits=1e-15, width=1e-10)
    epsilon = curve.mu**2 / 2 + 2 * curve.mu  # two deviations up
    assert_brackets(profile.epsilon(float(curve.delta(epsilon))), epsilon, width=1e-11)


def test_lattice_agrees_with_the_closed_form_where_both_apply():
    nearly_all = privacy.SubsampledGaussian(3.0, 1 - 1e-12)
    exact = privacy.compose([(privacy.Gaussian(3.0), 50)]).epsilon(1e-6).high
    assert_brackets(privacy.compose([(nearly_all, 50)]).epsilon(1e-6), exact, digits=1e-9)


def test_sampling_probability_one_is_the_full_batch():
    assert poisson(2.0, 1.0, 7).epsilon(1e-5) == privacy.compose([(privacy.Gaussian(2.0), 7)]).epsilon(1e-5)


def test_mixed_full_batch_and_poisson_releases():
    mixed = privacy.compose([(privacy.Gaussian(8.0), 1), (privacy.SubsampledGaussian(1.0, 0.01), 2000)])
    assert mixed.epsilon(1e-5).low > poisson(1.0, 0.01, 2000).epsilon(1e-5).high
    witness = PLDAccountant()
    witness.compose(dp_event.GaussianDpEvent(8.0))
    witness.compose(dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.0)), 2000)
    assert_brackets(mixed.epsilon(1e-5), witness.get_epsilon(1e-5), digits=5e-5)
    assert mixed.sampler == "full batch + Poisson"


def test_splitting_and_reordering_a_list_changes_nothing():
    a, b = privacy.SubsampledGaussian(1.0, 0.01), privacy.SubsampledGaussian(0.8, 0.005)
    whole = privacy.compose([(a, 300), (b, 200)]).epsilon(1e-5)
    parts = privacy.compose([(b, 120), (a, 299), (b, 80), (a, 1), (b, 0)]).epsilon(1e-5)
    assert parts == pytest.approx(whole, rel=1e-12)


def test_nothing_released_costs_nothing():
    for events in ([], [(privacy.Gaussian(1.0), 0)]):
        profile = privacy.compose(events)
        assert profile.epsilon(1e-5) == (0, 0)
        assert profile.delta(0.0) == profile.advantage() == (0, 0)
        low, high = profile.tradeoff(np.array([0.0, 0.3, 1.0]))
        np.testing.assert_allclose(low, [1.0, 0.7, 0.0], atol=1e-6)
        np.testing.assert_allclose(high, [1.0, 0.7, 0.0], atol=1e-6)


@pytest.mark.parametrize(
    "setting",
    [(0.3, 0.5, 3, 1e-12), (0.36, 0.0044, 570, 3.6e-12), (20.0, 1e-5, 1000, 1e-12), (5.0, 0.02, 100_000, 1e-12)],
)
def test_hard_settings_are_bracketed_tightly(setting):
    *setting, delta = setting
    low, high = poisson(*setting).epsilon(delta)
    assert low <= high <= low * 1.0005 + 1e-9


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_few_steps_agree_with_numerical_convolution(num_steps):
    sigma, q = 0.8, 0.1
    x = np.linspace(-12, 12 + 1 / sigma, 1500)
    density = np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi) * (x[1] - x[0])
    loss = np.log1p(q * np.expm1(x / sigma - 1 / (2 * sigma**2)))
    total, mass = np.zeros(1), np.ones(1)  # of all steps but one
    for _ in range(num_steps - 1):
        total, mass = (total[:, None] + loss).ravel(), np.outer(mass, density * np.exp(loss)).ravel()
        if len(total) > 2000:  # keep a sorted summary: bins much finer than what is tested
            total, mass = _binned(total, mass, 1e-4)
    last, curve = poisson(sigma, q, 1).directions["remove"], poisson(sigma, q, num_steps).directions["remove"]
    for epsilon in (0.2, 1.0, 3.0):
        truth = sum(m * last.delta(epsilon - t).low for t, m in zip(total, mass, strict=True) if m > 1e-11)
        assert_brackets(curve.delta(epsilon), truth, digits=2e-4 * truth + 1e-7, width=1e-3)


def _binned(values, weights, width):
    bins = np.round(values / (100 * width)).astype(int)
    bins -= bins.min()
    mass = np.bincount(bins, weights)
    means = np.bincount(bins, weights * values)[mass > 0] / mass[mass > 0]
    return means, mass[mass > 0]


SIGMA, Q, STEPS = st.floats(0.5, 10), st.floats(1e-3, 0.9), st.integers(1, 3000)


@given(SIGMA, Q, STEPS, st.floats(1e-9, 1e-2))
def test_epsilon_and_delta_are_ordered_and_inverse(sigma, q, steps, delta):
    profile = poisson(sigma, q, steps)
    epsilon = profile.epsilon(delta)
    assert 0 <= epsilon.low <= epsilon.high < np.inf
    assert profile.delta(epsilon.high * (1 + 1e-9)).low <= delta
    if epsilon.low > 0:
        assert profile.delta(epsilon.low * (1 - 1e-9)).high >= delta


@given(SIGMA, Q, STEPS)
def test_epsilon_grows_with_steps_and_sampling_and_falls_with_noise(sigma, q, steps):
    low, high = poisson(sigma, q, steps).epsilon(1e-5)
    assert poisson(sigma, q, steps + 1 + steps // 10).epsilon(1e-5).high >= low
    assert poisson(sigma, min(1.0, 1.1 * q), steps).epsilon(1e-5).high >= low
    assert poisson(sigma * 1.1, q, steps).epsilon(1e-5).low <= high


@pytest.mark.thorough
@given(st.floats(0.7, 5), st.floats(1e-2, 0.5), st.integers(1, 200))
def test_tradeoff_is_convex_symmetric_and_below_guessing(sigma, q, steps):
    alpha = np.linspace(0, 1, 101)
    low, high = poisson(sigma, q, steps).tradeoff(alpha)
    assert (low <= high + 1e-12).all()
    assert (high <= 1 - alpha + 1e-12).all()
    assert (high - low).max() < 0.01
    assert (np.diff(low) <= 1e-12).all()
    assert (np.diff(low, 2) >= -1e-9).all()
    # Symmetry: f(f(α)) = α where f is strictly decreasing, up to the width of the bracket.
    inner = (low > 0.01) & (alpha > 0.01)
    again = np.interp(low[inner], alpha, low)
    assert np.abs(again - alpha[inner]).max(initial=0) < 0.05


def test_tradeoff_curves_are_computed_once_and_cannot_be_changed_for_others(monkeypatch):
    releases = [(privacy.Gaussian(1.0), 3)]
    first = privacy.compose(releases).tradeoffs
    for noise_multiplier in (2.0, 3.0, 4.0, 5.0, 6.0):  # so that `compose` forgets the first profile
        privacy.compose([(privacy.Gaussian(noise_multiplier), 3)]).epsilon(1e-5)
    monkeypatch.setattr(compose_module, "of_profile", lambda *_: pytest.fail("computed again"))
    curve = first.pop("symmetrized")
    assert privacy.compose(releases).tradeoffs["symmetrized"] is curve


def test_tradeoff_of_a_gaussian_brackets_the_closed_form():
    profile, curve = privacy.compose([(privacy.Gaussian(2.0), 4)]), privacy.tradeoff.Gaussian(1.0)
    alpha = np.concatenate([[0, 1e-6, 1e-3], np.linspace(0.01, 1, 100)])
    low, high = profile.tradeoff(alpha)
    assert (low <= curve(alpha) + 1e-13).all()
    assert (high >= curve(alpha) - 1e-13).all()
    assert (high - low).max() < 3e-4
    rate = profile.true_positive_rate(0.01)
    assert rate.low <= 1 - curve(0.01) <= rate.high
    assert isinstance(rate.high, float)


def test_advantage_is_delta_at_zero_and_the_best_gap():
    profile = poisson(0.55, 256 / 29305, 2061)
    alpha = np.linspace(0, 1, 2001)
    low, high = profile.tradeoff(alpha)
    assert (1 - high - alpha).max() <= profile.advantage().high
    assert (1 - low - alpha).max() >= profile.advantage().low


def test_directions_of_the_tradeoff_bracket_those_of_one_step():
    profile, exact = poisson(1.0, 0.1, 1), privacy.tradeoff.subsampled(privacy.tradeoff.Gaussian(1.0), 0.1)
    alpha = np.linspace(0, 1, 101)
    expected = {"remove": exact, "add": exact.inverse(), "symmetrized": privacy.tradeoff.symmetrized(exact)}
    assert profile.tradeoffs.keys() == expected.keys()
    for direction, f in expected.items():
        low, high = profile.tradeoff(alpha, direction)
        assert (low <= f(alpha) + 1e-12).all()
        assert (f(alpha) <= high + 1e-12).all()
    assert not np.allclose(exact(alpha), exact.inverse()(alpha), atol=1e-4)  # else nothing was told apart


def test_where_only_the_dearer_direction_is_known_no_other_is_offered():
    profile = privacy.compose([(privacy.FixedSizeGaussian(1.0, 0.1), 1)])
    with pytest.raises(ValueError, match=r"Profile\.tradeoff: direction='remove' must be one of 'symmetrized'\."):
        profile.tradeoff(0.5, "remove")


def test_mu_and_posterior_of_gaussians_bracket_the_closed_form():
    profile = privacy.compose([(privacy.Gaussian(2.0), 4)])
    low, high = profile.mu()
    assert 0.98 < low <= 1.0 <= high < 1.02
    for prior, rate in ((0.5, 0.01), (0.01, 0.2)):
        low, high = profile.posterior(prior, rate)
        exact = privacy.tradeoff.posterior(privacy.tradeoff.Gaussian(1.0), prior, rate)
        assert low - 1e-12 <= exact <= high + 1e-12
        assert high - low < 0.01
    assert profile.posterior(0.3) == profile.posterior(0.3, 0.01)


@pytest.mark.thorough
@given(st.floats(0.7, 5), st.floats(1e-2, 0.5), st.integers(1, 200))
def test_no_tradeoff_lies_below_that_of_its_mu(sigma, q, steps):
    profile, alpha = poisson(sigma, q, steps), np.linspace(0, 1, 401)
    gaussian = privacy.tradeoff.Gaussian(max(profile.mu().high, 1e-9))(alpha)
    low = profile.tradeoff(alpha).low
    inside = (alpha > 1e-6) & (low > 1e-6)
    assert (gaussian <= low + 1e-9)[inside].all()


@pytest.mark.parametrize("events", [[], [(privacy.Gaussian(1.0), 0)], [(privacy.SubsampledGaussian(1.0, 0.01), 50)]])
@pytest.mark.parametrize("epsilon", [0.0, -0.0, 0.5, 30.0, 1000.0])
def test_delta_is_never_minus_zero(events, epsilon):
    assert not np.signbit(privacy.compose(events).delta(epsilon)).any()


def test_statement_rounds_outwards_and_names_its_assumptions():
    profile = poisson(0.55, 256 / 29305, 2061)
    expected = "epsilon in [11.807, 11.808] at delta = 1e-05 (add/remove one example, Poisson sampling)"
    assert profile.statement(1e-5) == str(profile) == expected
    assert profile.sampler == "Poisson"
    assert profile.neighboring_relation is privacy.NeighboringRelation.ADD_OR_REMOVE_ONE
    assert profile.events == [(privacy.SubsampledGaussian(0.55, 256 / 29305), 2061)]


def test_epsilon_and_delta_as_printed_hold_together():
    """1 / 290,160 is 3.446374e-06: with six digits, rounded to the nearest, a smaller δ was printed."""
    delta = 1 / 290_160
    noise = privacy.calibrate(2.0, delta, sampling_probability=1.0, num_steps=1, tolerance=1e-10)
    profile = privacy.compose([(privacy.Gaussian(noise), 1)])
    printed = re.search(r", (\S+)\] at delta = (\S+) ", profile.statement(delta))
    assert printed is not None
    assert profile.epsilon(float(printed[2])).high <= float(printed[1]) == 2.0


def test_epsilon_is_finite_when_delta_is_below_what_was_truncated():
    profile = privacy.compose([(privacy.SubsampledGaussian(1.0, 0.5), 100)], method="lattice")
    low, high = profile.epsilon(1e-23)
    assert 0 <= low <= high <= privacy.compose([(privacy.Gaussian(1.0), 100)]).epsilon(1e-23).high * (1 + 1e-9)


HOSTILE_COUNTS = [-1, 1.0, True, None, float("nan")]


@pytest.mark.parametrize("count", HOSTILE_COUNTS)
def test_compose_refuses_counts(count):
    with pytest.raises(ValueError, match=r"compose, Gaussian\(noise_multiplier=1.0\): count=.*integer"):
        privacy.compose([(privacy.Gaussian(1.0), count)])


def test_compose_refuses_unknown_events():
    with pytest.raises(ValueError, match=r"cannot price 'laplace'\. Known events: .*Gaussian.* FinitePair"):
        privacy.compose([("laplace", 1)])


@pytest.mark.parametrize("delta", [1, -1e-5, float("nan"), 2, True])
def test_epsilon_refuses_delta(delta):
    with pytest.raises(ValueError, match=r"Profile\.epsilon: delta="):
        poisson(1.0, 0.1, 1).epsilon(delta)


@pytest.mark.parametrize("epsilon", [float("nan"), float("inf")])
def test_delta_refuses_epsilon(epsilon):
    with pytest.raises(ValueError, match=r"Profile\.delta: epsilon="):
        poisson(1.0, 0.1, 1).delta(epsilon)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_tradeoff_refuses_alpha(alpha):
    with pytest.raises(ValueError, match=r"Profile\.tradeoff: alpha="):
        poisson(1.0, 0.1, 1).tradeoff(alpha)


@pytest.mark.thorough
@pytest.mark.parametrize("num_steps", [1, 30, 1000])
@pytest.mark.parametrize(("sigma", "q"), [(0.5, 0.01), (1.0, 0.1), (2.0, 0.004)])
def test_pld_accountant_is_an_upper_witness(sigma, q, num_steps):
    witness = PLDAccountant()
    witness.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma)), num_steps)
    above = witness.get_epsilon(1e-5)
    low, high = poisson(sigma, q, num_steps).epsilon(1e-5)
    assert low <= above
    assert high == pytest.approx(above, rel=2e-3, abs=2e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(("sigma", "q", "num_steps"), [(0.55, 256 / 29305, 2061), (1.0, 0.05, 300), (2.0, 0.01, 1000)])
def test_prv_accountant_is_a_witness_on_both_sides(sigma, q, num_steps):
    mechanism = PoissonSubsampledGaussianMechanism(noise_multiplier=sigma, sampling_probability=q)
    witness = PRVAccountant(prvs=[mechanism], max_self_compositions=[num_steps], eps_error=0.01, delta_error=1e-10)
    below, _, above = witness.compute_epsilon(delta=1e-5, num_self_compositions=[num_steps])
    low, high = poisson(sigma, q, num_steps).epsilon(1e-5)
    assert below <= high
    assert low <= above


def test_random_settings_are_bracketed_or_refused():
    draw = np.random.default_rng(3)
    for _ in range(40):
        setting = 10 ** draw.uniform(-0.5, 1.3), 10 ** draw.uniform(-4, 0), int(10 ** draw.uniform(0, 6))
        low, high = poisson(*setting).epsilon(float(10 ** draw.uniform(-12, -3)))
        assert 0 <= low <= high <= low * 1.01 + 1e-12, setting


@pytest.mark.parametrize("noise_multiplier", [1e-3, 0.02, 0.049])
@pytest.mark.parametrize("num_steps", [1, 2000])
def test_hardly_any_noise_is_priced_from_above(noise_multiplier, num_steps):
    """Outside floating-point range of the losses: the bound is that of one step which dominates all."""
    profile = privacy.compose([(privacy.SubsampledGaussian(noise_multiplier, 0.01), num_steps)])
    unsampled = privacy.compose([(privacy.Gaussian(noise_multiplier), num_steps)]).epsilon(1e-5)
    epsilon = profile.epsilon(1e-5)
    assert unsampled.low * 0.5 < epsilon.high <= unsampled.high
    if num_steps == 1:
        assert epsilon.low == pytest.approx(epsilon.high, rel=1e-6)
    else:
        assert epsilon.low == profile.delta(1.0).low == 0.0
    assert 0.0 <= profile.true_positive_rate(0.01).low <= profile.true_positive_rate(0.01).high <= 1.0


@pytest.mark.parametrize("noise_multiplier", [0.05, 0.1, 0.2])
def test_little_noise_is_bracketed(noise_multiplier):
    low, high = privacy.compose([(privacy.SubsampledGaussian(noise_multiplier, 0.07), 29)]).epsilon(1e-5)
    assert low <= high <= low * 1.0001
    assert high < privacy.compose([(privacy.Gaussian(noise_multiplier), 29)]).epsilon(1e-5).low


def assert_answers(sigma, q, num_steps, delta):
    low, high = poisson(sigma, q, num_steps).epsilon(delta)
    unsampled = privacy.compose([(privacy.Gaussian(sigma), num_steps)]).epsilon(delta).high
    assert 0 <= low <= high < np.inf
    assert high <= unsampled * (1 + 1e-6)
    assert poisson(sigma, q, num_steps).epsilon_high(delta) == high


@pytest.mark.parametrize("delta", [1e-15, 1e-5, 0.49])
@pytest.mark.parametrize("num_steps", [1, 1000, 10_000_000])
@pytest.mark.parametrize("q", [1e-310, 1e-20, 0.5, 0.999])
@pytest.mark.parametrize("sigma", [1e-6, 1e-2, 1e3, 1e4, 1e6])
def test_extreme_settings_are_bracketed_below_the_full_batch(sigma, q, num_steps, delta):
    assert_answers(sigma, q, num_steps, delta)


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("q", [1e-20, 1e-8, 256 / 29305, 1 - 1e-16, 1.0])
@pytest.mark.parametrize("sigma", [1e-6, 0.049, 0.06, 0.3, 1, 100, 1e6])
def test_grid_of_all_settings_is_bracketed_below_the_full_batch(sigma, q):
    for num_steps in (2, 1000, 10_000_000):
        for delta in (1e-15, 1e-5, 0.49):
            assert_answers(sigma, q, num_steps, delta)


@pytest.mark.parametrize(
    ("sigma", "q", "num_steps", "rel"),
    [(1e4, 0.999, 10_000_000, 2e-3), (1e3, 0.5, 100, 2e-4), (1e6, 0.5, 10_000_000, 3e-3), (1e3, 0.5, 10_000_000, 1e-3)],
)
def test_much_noise_is_nearly_gaussian_and_tightly_bracketed(sigma, q, num_steps, rel):
    low, high = poisson(sigma, q, num_steps).epsilon(1e-5)
    assert low < high <= low * (1 + 2 * rel)
    assert high == pytest.approx(privacy.clt(equal_releases(sigma, q, num_steps)).epsilon(1e-5), rel=rel)


@pytest.mark.thorough
@pytest.mark.parametrize("q", [1e-20, 1e-12])
def test_tiny_sampling_probability_is_free_once_delta_covers_it(q):
    assert poisson(1.0, q, 1_000_000).epsilon(1.1e6 * q) == (0, 0)
    low, high = poisson(0.3, q, 100_000).epsilon(0.03e5 * q)  # by Monte Carlo delta(0) is about 0.08e5 * q: not covered
    assert 0 <= low <= high <= privacy.compose([(privacy.Gaussian(0.3), 100_000)]).epsilon(0.3).high
    assert high > 0


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("setting", [(1.0, 0.1, 30), (0.5, 0.01, 500), (3.0, 0.9, 4), (20.0, 0.5, 100)])
def test_dominating_step_lies_above_the_composition_in_both_directions(setting, swapped):
    assert_dominated([(privacy.SubsampledGaussian(*setting[:2]), setting[2])], swapped)


@pytest.mark.parametrize("swapped", [False, True])
def test_dominating_step_of_mixed_releases_lies_above_them(swapped):
    assert_dominated([(privacy.SubsampledGaussian(1.0, 0.1), 5), (privacy.SubsampledGaussian(2.0, 0.01), 50)], swapped)


def assert_dominated(events, swapped):
    steps = [(SubsampledGaussianPair(1 / event.noise_multiplier, event.sampling_probability), n) for event, n in events]
    above = ClosedFormCurve(dispatch.dominating(steps), swapped=swapped)
    curve = curves_of(privacy.compose(events))[int(swapped)]
    for epsilon in (-1.0, -0.1, 0.0, 0.05, 0.5, 2.0):
        assert above.delta(epsilon).high >= curve.delta(epsilon).low


@pytest.mark.parametrize(("remove", "add"), [(1.0, 2.0), (2.0, 1.0)])
def test_epsilon_asks_the_add_direction_whenever_its_bound_is_higher(remove, add, monkeypatch):
    class Fixed(SimpleCurve):
        def __init__(self, value):
            self.value = value

        def delta(self, epsilon):
            return Bracket(0.0, float(self.value > epsilon))

        def epsilon(self, delta):
            return Bracket(self.value, self.value)

        def epsilon_high(self, delta):
            return self.value

    module = sys.modules[privacy.Profile.__module__]
    monkeypatch.setattr(module, "curves", lambda steps, method: (Fixed(remove), Fixed(add)))
    profile = privacy.Profile([(privacy.Gaussian(1e5 * remove), 1)])  # which nothing else asks for: answers are kept
    assert profile.epsilon(1e-5) == (2.0, 2.0)
    assert profile.epsilon_high(1e-5) == 2.0


@pytest.mark.parametrize("setting", [(0.5, 0.01, 100), (1.0, 0.5, 10), (5.0, 0.9, 50), (50.0, 0.99, 10), (1.0, 0.1, 1)])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.05, 0.3])
def test_epsilon_is_never_below_the_add_direction(setting, delta):
    profile = poisson(*setting)
    assert profile.epsilon(delta).high >= max(curve.epsilon(delta).low for curve in curves_of(profile))


def test_many_different_releases_ask_few_parts_for_lower_bounds(monkeypatch):
    """Parts of parts of parts would be exponentially many."""
    made = []
    curves = dispatch._curves

    def counted(steps, method):
        made.append(len(steps))
        return curves(steps, method)

    monkeypatch.setattr(dispatch, "_curves", counted)
    steps = [(privacy.SubsampledGaussian(1 + 0.1 * step, 1 / 6), 1) for step in range(8)]
    profile = privacy.compose(steps)
    for epsilon in (55.0, 60.0):  # far out, where an engine's own lower bound is 0
        low, high = profile.delta(epsilon)
        assert max(privacy.compose([step]).delta(epsilon).low for step in steps[:3]) <= low <= high
    assert made.count(1) <= 2 * 3 + 3 * 3
    assert set(made) <= {1, 8}
