# SPDX-License-Identifier: Apache-2.0
import itertools
import math
from functools import partial
from time import process_time

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from torch_privacy import privacy
from torch_privacy.privacy.approximate.moments import MOMENT_ORDERS
from torch_privacy.privacy.engines.log_moments import log_moments
from torch_privacy.privacy.summary import equal_releases

MNIST = 256 / 60000

# The papers' settings: noise multiplier, q, steps, delta -> μ, CLT ε (accounting of the published rows)
CLT_ROWS = {
    "s=1.3": (1.3, MNIST, 4688, 1e-5, 0.2624, 0.9771),
    "s=1.06, mu .35": (1.06, MNIST, 4688, 1e-5, 0.3500, 1.3413),
    "s=.7 E=70": (0.7, MNIST, 16406, 1e-5, 1.4143, 6.5732),
    "s=.638, mu 1.78": (0.638, MNIST, 16406, 1e-5, 1.7849, 8.6971),
    "s=1.1, mu .57": (1.1, MNIST, 14062, 1e-5, 0.5736, 2.3243),
    "Adult, mu 2.03": (0.55, 256 / 29305, 2061, 1e-5, 2.0327, 10.199),
    "MovieLens": (0.6, 1 / 80, 1600, 1e-6, 1.9419, 10.613),
}


@pytest.mark.parametrize("row", CLT_ROWS)
def test_clt_reproduces_the_papers_and_lies_below_the_truth(row):
    *setting, delta, mu, epsilon = CLT_ROWS[row]
    approximation = privacy.clt(equal_releases(*setting))
    assert approximation.mu == pytest.approx(mu, abs=6e-5)
    assert approximation.epsilon(delta) == pytest.approx(epsilon, abs=6e-4)
    assert approximation.delta(approximation.epsilon(delta)) == pytest.approx(delta, rel=1e-6)
    noise, q, steps = setting
    assert (
        approximation.epsilon(delta)
        < privacy.compose([(privacy.SubsampledGaussian(noise, q), steps)]).epsilon(delta).low
    )


@pytest.mark.parametrize("row", CLT_ROWS)
def test_clt_noise_is_the_noise_of_the_clt_and_too_little(row):
    noise, q, steps, delta, _, _ = CLT_ROWS[row]
    epsilon = privacy.clt(equal_releases(noise, q, steps)).epsilon(delta)
    found = privacy.clt_noise(epsilon, delta, q, steps)
    assert found == pytest.approx(noise, rel=1e-5)
    assert found < privacy.calibrate(epsilon, delta, sampling_probability=q, num_steps=steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 1e-5, 0.1, 10), r"epsilon=-1\.0 must be 0 or greater"),
        ((1.0, 1.0, 0.1, 10), r"delta=1\.0"),
        ((1.0, 1e-5, 0.0, 10), r"sampling_probability=0\.0"),
        ((1.0, 1e-5, 0.1, 0), "num_steps=0"),
    ],
)
def test_clt_noise_refuses_hostile_arguments_by_name(arguments, message):
    with pytest.raises(ValueError, match=f"clt_noise: {message}"):
        privacy.clt_noise(*arguments)


# noise multiplier, q, steps -> ε with real orders (None: not published), with integer orders
MOMENTS_ROWS = {
    "s=1.3 E=20": (1.3, MNIST, 4688, 1.3497, 1.3498),
    "s=.7 E=70": (0.7, MNIST, 16406, 8.675, 8.948),
    "s=.7 E=45": (0.7, MNIST, 10547, 7.098, 7.123),
    "Abadi E=100": (4.0, 0.01, 10_000, 1.2584, 1.2586),
    "Abadi E=400": (4.0, 0.01, 40_000, 2.5737, 2.5759),
    "Adult": (0.55, 256 / 29305, 2061, None, 15.64),
    "s=.638 E=70": (0.638, MNIST, 16406, None, 11.524),
}


@pytest.mark.parametrize("row", MOMENTS_ROWS)
def test_moments_reproduce_the_papers_and_lie_above_the_truth(row):
    *setting, real, integer = MOMENTS_ROWS[row]
    epsilon = privacy.moments_of(equal_releases(*setting), delta=1e-5)
    if real is not None:
        assert epsilon == pytest.approx(real, abs=1.1e-3)
    assert privacy.moments_of(equal_releases(*setting), delta=1e-5, orders=range(1, 33)) == pytest.approx(
        integer, abs=1e-3
    )
    noise, q, steps = setting
    assert epsilon > privacy.compose([(privacy.SubsampledGaussian(noise, q), steps)]).epsilon(1e-5).high


def test_moments_of_a_full_batch_match_the_closed_form():
    # α(λ) = λ (λ + 1) / (2 σ²) for N(1/σ, 1) against N(0, 1)
    orders = [1.0, 2.5, 10.0]
    expected = min((5 * k * (k + 1) / (2 * 9.0) + 11.512925464970229) / k for k in orders)
    assert privacy.moments_of(equal_releases(3.0, 1.0, 5), delta=1e-5, orders=orders) == pytest.approx(
        expected, rel=1e-12
    )


def test_moments_of_several_kinds_of_releases_add_up():
    """Full batches: α(λ) = λ (λ + 1) / (2 σ²), summed over the releases."""
    orders = np.arange(1.0, 33.0)
    alpha = orders * (orders + 1) / 2 * (2 / 4**2 + 3 / 5**2 + 2 / 6**2)
    releases = [
        (privacy.NoisyCovariance(4.0), 2),
        (privacy.SubsampledGaussian(5.0, 1.0), 3),
        (privacy.SubsampledGEP(6.0, 1.0), 1),
    ]
    expected = ((alpha + np.log(1e5)) / orders).min()
    assert privacy.moments_of(releases, 1e-5, orders) == pytest.approx(expected, rel=1e-9)
    assert privacy.moments_of(releases, 1e-5) > privacy.compose(releases).epsilon(1e-5).high


WITHOUT_MOMENTS = {
    "heavy tails": privacy.SubsampledJL(1.0, 32, 0.01),
    "an outcome that reveals everything": privacy.KnownProfile((0.1,), (1e-6,)),
    "a bound that gives up outcomes": privacy.BallsAndBins(1.0, 10),
    "a part that is not concentrated": privacy.ZeroConcentrated(0.1, 1e-6),
}


@pytest.mark.parametrize("event", WITHOUT_MOMENTS.values(), ids=WITHOUT_MOMENTS)
def test_releases_without_moments_are_refused_by_name(event):
    for name, arguments in {"moments_of": (1e-5,), "rdp": (1e-5,), "clt": (), "moments_delta": (1.0,)}.items():
        with pytest.raises(ValueError, match=f"{name}: {type(event).__name__}.* Use compose"):
            getattr(privacy, name)([(privacy.Gaussian(2.0), 1), (event, 1)], *arguments)


# Events that are no sampled Gaussians -> their densities with and without the example, and the ends of the outcomes
def _normal(x, mean=0.0):
    return np.exp(-((x - mean) ** 2) / 2) / np.sqrt(2 * np.pi)


def _laplace(x, mean=0.0):
    return np.exp(-np.abs(x - mean)) / 2


def _mixture(*parts):
    return lambda x: sum(weight * _normal(x, mean) for weight, mean in parts)


DENSITIES = {
    "Laplace": (privacy.Laplace(0.7), lambda x: _laplace(x, 1 / 0.7), _laplace, (-60, 0, 1 / 0.7, 60)),
    "replace one": (
        privacy.SubsampledGaussian(0.6, 0.1, privacy.NeighboringRelation.REPLACE_ONE),
        _mixture((0.9, 0.0), (0.1, 1 / 1.2)),
        _mixture((0.9, 0.0), (0.1, -1 / 1.2)),
        (-30, 0, 30),
    ),
    "group": (
        privacy.SubsampledGroup(1.5, 0.1, 2),
        _mixture((0.81, 0.0), (0.18, 1 / 1.5), (0.01, 2 / 1.5)),
        _normal,
        (-30, 0, 2, 30),
    ),
}


def integral(function, ends):
    return sum(quad(function, *pair, epsabs=0, epsrel=1e-11, limit=400)[0] for pair in itertools.pairwise(ends))


@pytest.mark.parametrize("order", [0.3, 1.0, 4.5, 9.0])
@pytest.mark.parametrize("name", DENSITIES)
def test_moments_of_other_events_are_their_integrals(name, order):
    event, p, q, ends = DENSITIES[name]
    one = integral(lambda x: p(x) * (p(x) / q(x)) ** order, ends)
    other = integral(lambda x: q(x) * (q(x) / p(x)) ** order, ends)
    expected = (3 * np.log(max(one, other)) + np.log(1e5)) / order
    assert privacy.moments_of([(event, 3)], 1e-5, [order]) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("name", ["replace one", "group"])
def test_moments_of_a_large_order_are_sums_over_close_points(name, add):
    """In logarithms, as the largest moments are beyond floating point; the larger direction counts."""
    event, p, q, _ = DENSITIES[name]
    p, q, order = (q, p, 15.0) if add else (p, q, 15.0)
    x = np.linspace(-34, 34, 400_001)
    exponents = np.log(p(x)) + order * (np.log(p(x)) - np.log(q(x)))
    alpha = exponents.max() + np.log(np.exp(exponents - exponents.max()).sum() * (x[1] - x[0]))
    found = float(log_moments(event.dominating_pair(), np.array([order]))[0])
    assert found >= alpha * (1 - 1e-9)
    if not add:
        assert found == pytest.approx(alpha, rel=1e-9)


@pytest.mark.parametrize("turned", [1, -1])
def test_moments_of_finite_outcomes_and_concentrated_releases_are_their_sums(turned):
    p, q = [np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.5, 0.3])][::turned]
    order = 2.5
    alpha = np.log(max((p * (p / q) ** order).sum(), (q * (q / p) ** order).sum()))
    zcdp = order * (order + 1) * 0.1
    releases = [(privacy.FinitePair(tuple(p), tuple(q)), 2), (privacy.ZeroConcentrated(0.1), 1)]
    assert privacy.moments_of(releases, 1e-5, [order]) == pytest.approx((2 * alpha + zcdp + np.log(1e5)) / order)


def test_moments_of_a_truncated_sample_are_the_mean_of_its_two_kinds():
    """With more than K - 1 others in the batch the example replaces one of them."""
    event, order = privacy.TruncatedGaussian(2.0, 0.1, 100, 12), 3.0
    usual, displaced = (
        log_moments(pair, np.array([order]))[0]
        for pair in (event.dominating_pair().usual, event.dominating_pair().other)
    )
    share = event.dominating_pair().share
    expected = (np.log((1 - share) * np.exp(usual) + share * np.exp(displaced)) + np.log(1e5)) / order
    assert privacy.moments_of([(event, 1)], 1e-5, [order]) == pytest.approx(expected, rel=1e-9)


def test_moments_of_a_batch_of_fixed_size_are_those_of_its_profile():
    """E_P e^(λ l) = 1 + λ (λ + 1) ∫ (e^(λ ε) + e^(-(λ + 1) ε)) δ(ε) dε over ε > 0, for a symmetric pair."""
    event, order = privacy.FixedSizeGaussian(1.0, 0.1), 4.0
    pair = event.dominating_pair().upper

    def integrand(epsilon):
        gain, loss, _ = pair.tails(np.array([epsilon]), swapped=False)
        return (np.exp(order * epsilon) + np.exp(-(order + 1) * epsilon)) * float(gain[0] - loss[0])

    total = integral(integrand, (0, 0.1, 1, 4, 12, 25))
    expected = (np.log1p(order * (order + 1) * total) + np.log(1e5)) / order
    assert privacy.moments_of([(event, 1)], 1e-5, [order]) == pytest.approx(expected, rel=1e-7)


OTHERS = {
    **{name: event for name, (event, *_) in DENSITIES.items()},
    "fixed size": privacy.FixedSizeGaussian(1.0, 0.01),
    "truncated": privacy.TruncatedGaussian(1.0, 0.01, 50_000, 600),
    "randomized response": privacy.RandomizedResponse(0.3),
    "banded": privacy.BandedGaussian(1.0, 0.01, 4),
    "best of several": privacy.Repeated(((privacy.Laplace(2.0), 1),), mean=5),
}


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("event", OTHERS.values(), ids=OTHERS)
def test_moments_and_rdp_of_other_events_lie_above_the_truth(event):
    truth = privacy.compose([(event, 30)]).epsilon(1e-5).low
    assert privacy.rdp([(event, 30)], 1e-5) >= truth
    assert privacy.moments_of([(event, 30)], 1e-5) >= privacy.rdp([(event, 30)], 1e-5, 1 + np.array(MOMENT_ORDERS))


def test_rdp_of_a_concentrated_release_is_that_of_the_gaussian_that_attains_it():
    assert privacy.rdp([(privacy.ZeroConcentrated(0.02), 7)], 1e-5) == pytest.approx(
        privacy.rdp([(privacy.Gaussian(5.0), 7)], 1e-5), rel=1e-9
    )


BEYOND = {  # events, and an order at which the moment is finite but lies beyond the outcomes of the rule
    "replace one": (privacy.SubsampledGaussian(0.3, 0.5, privacy.NeighboringRelation.REPLACE_ONE), 500.0),
    "fixed size": (privacy.FixedSizeGaussian(2.0, 1e-3), 101.0),
    "group": (privacy.SubsampledGroup(0.5, 0.5, 2), 500.0),
}


def test_discrete_gaussian_noise_is_as_concentrated_as_gaussian_noise():
    discrete, normal = [(privacy.DiscreteGaussian(9.0, 3), 10)], [(privacy.Gaussian(3.0), 10)]
    for accountant in (privacy.rdp, privacy.moments_of):
        assert accountant(discrete, 1e-5) == pytest.approx(accountant(normal, 1e-5), rel=1e-9)
    assert privacy.rdp(discrete, 1e-5) > privacy.compose(discrete).epsilon(1e-5).low


@pytest.mark.parametrize("name", BEYOND)
def test_orders_beyond_the_outcomes_of_a_rule_are_left_out(name):
    """The sum would lack what lies beyond its last outcome, and be too small."""
    event, order = BEYOND[name]
    with pytest.raises(ValueError, match="no finite moments at these orders"):
        privacy.rdp([(event, 1)], 1e-5, [order])
    alone = privacy.rdp([(event, 1)], 1e-5, [3.0])  # the last bit depends on the processor's vectors
    assert privacy.rdp([(event, 1)], 1e-5, [3.0, order]) == pytest.approx(alone, rel=1e-14)


def test_rdp_of_whole_orders_and_of_their_neighbors_agree():
    """Whole orders are sums, others integrals."""
    steps = [(privacy.SubsampledGaussian(0.8, 0.03), 1000)]
    for order in (2, 5, 30, 90):
        whole, near = (privacy.rdp(steps, 1e-5, [value]) for value in (order, order * (1 + 1e-9)))
        assert whole == pytest.approx(near, rel=1e-6)


@pytest.mark.parametrize("orders", [[], [0.0], [-1.0], [float("nan")]])
def test_orders_are_refused(orders):
    with pytest.raises(ValueError, match="moments_of: orders="):
        privacy.moments_of(equal_releases(1.0, 0.1, 10), delta=1e-5, orders=orders)
    with pytest.raises(ValueError, match=r"rdp: orders=.* greater than 1\."):
        privacy.rdp(equal_releases(1.0, 0.1, 10), delta=1e-5, orders=[*orders[:-1], 1.0])


@pytest.mark.parametrize(
    ("setting", "epsilon", "claimed"),
    [
        ((0.638, MNIST, 16406), 8.68, 4.23e-5),
        ((0.7, MNIST, 10547), 5.07, 4.86e-5),
        ((1.06, MNIST, 4688), 1.34, 2.03e-5),
        ((1.1, MNIST, 14062), 2.3243, 1.48e-5),
    ],
)
def test_clt_knows_the_true_delta_at_its_claim(setting, epsilon, claimed):
    limit = privacy.clt(equal_releases(*setting))
    assert limit.delta(epsilon) == pytest.approx(1e-5, rel=0.1)
    low, high = limit.true_delta(epsilon)
    assert low <= high
    assert high == pytest.approx(claimed, rel=0.03)
    assert low > 1.4e-5


# noise multiplier, q, steps, delta -> ε of dp-accounting's RdpAccountant as published
RDP_ROWS = {
    "s=1.3 E=20": (1.3, MNIST, 4688, 1e-5, 1.1066),
    "s=.7 E=70": (0.7, MNIST, 16406, 1e-5, 7.8393),
    "s=.638 E=70": (0.638, MNIST, 16406, 1e-5, 10.5191),
    "Abadi E=100": (4.0, 0.01, 10_000, 1e-5, 1.0355),
    "Adult": (0.55, 256 / 29305, 2061, 1e-5, 13.522),
    "MovieLens": (0.6, 1 / 80, 1600, 1e-6, 14.299),
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("row", RDP_ROWS)
def test_rdp_reproduces_the_published_rows_and_lies_above_the_truth(row):
    *setting, delta, epsilon = RDP_ROWS[row]
    assert (
        0.995 * epsilon < privacy.rdp(equal_releases(*setting), delta=delta) < epsilon + 1e-3
    )  # see the fractional orders below
    step = privacy.SubsampledGaussian(*setting[:2])
    assert (
        privacy.rdp(equal_releases(*setting), delta=delta) > privacy.compose([(step, setting[2])]).epsilon(delta).high
    )


@given(st.floats(0.5, 8), st.floats(1e-4, 1), st.integers(1, 10**5), st.floats(1e-9, 1e-3))
def test_rdp_at_whole_orders_agrees_with_dp_accounting(noise, q, steps, delta):
    orders = range(2, 64)
    accountant = RdpAccountant(orders)
    accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(noise)), steps)
    ours = privacy.rdp(equal_releases(noise, q, steps), delta, orders)
    assert ours == pytest.approx(accountant.get_epsilon(delta), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("order", [1.3, 2.9, 7.5])
def test_divergence_at_a_fractional_order_is_its_integral(order):
    # dp-accounting's series lies above it, by 0.2 % at σ = 0.638, a = 2.9: the sign of its terms is not kept
    noise, q, delta = 0.638, MNIST, 1e-5

    def moment(x):
        return np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi) * (1 - q + q * np.exp(x / noise - noise**-2 / 2)) ** order

    divergence = np.log(quad(moment, -15, order / noise + 15, points=[0, order / noise], epsabs=1e-15)[0]) / (order - 1)
    expected = 16406 * divergence + np.log1p(-1 / order) - np.log(order * delta) / (order - 1)
    assert privacy.rdp(equal_releases(noise, q, 16406), delta, [order]) == pytest.approx(expected, rel=1e-7)


def test_rdp_of_a_full_batch_matches_the_closed_form():
    orders = np.array([1.5, 4.0, 20.0])  # R(a) = a / (2 σ²)
    expected = 7 * orders / (2 * 9) + np.log1p(-1 / orders) - np.log(1e-5 * orders) / (orders - 1)
    assert privacy.rdp(equal_releases(3.0, 1.0, 7), delta=1e-5, orders=orders) == pytest.approx(
        expected.min(), rel=1e-12
    )


# Abadi et al., q = 0.01, σ = 4: epochs -> with the valid amplification, with the paper's, as the paper has it
STRONG_ROWS = {100: (26.39, 9.353, 9.34), 400: (82.35, 24.245, 24.22)}


@pytest.mark.parametrize("epochs", STRONG_ROWS)
def test_strong_composition_needs_the_paper_s_own_amplification(epochs):
    setting = 4.0, 0.01, 100 * epochs, 1e-5
    valid, scaled, paper = STRONG_ROWS[epochs]
    assert privacy.strong_composition(*setting) == pytest.approx(valid, abs=0.01)
    invalid = privacy.strong_composition(*setting, amplification=privacy.scaled_epsilon)
    assert invalid == pytest.approx(scaled, abs=1e-3)
    assert invalid == pytest.approx(paper, abs=0.03)


@given(st.floats(0.3, 20), st.floats(1e-4, 1), st.integers(1, 10**4), st.floats(1e-9, 1e-3))
def test_strong_composition_lies_above_the_truth(noise, q, steps, delta):
    truth = privacy.compose([(privacy.SubsampledGaussian(noise, q), steps)]).epsilon(delta)
    assert privacy.strong_composition(noise, q, steps, delta) >= truth.low


@given(st.floats(0.3, 5), st.floats(1e-3, 0.999))
def test_amplification_of_the_paper_is_too_small_and_the_valid_one_is_not(noise, q):
    step = privacy.tradeoff.Gaussian(1 / noise)
    sampled = privacy.tradeoff.subsampled(step, q)
    epsilon = 1 / noise
    delta = float(step.delta(epsilon))
    assert sampled.delta(privacy.sampled_epsilon(epsilon, q)) == pytest.approx(q * delta, rel=1e-9)
    assert sampled.delta(privacy.scaled_epsilon(epsilon, q)) > q * delta


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0.1, 10), "noise_multiplier=0 must be greater than 0"),
        ((1e-310, 0.1, 10), r"noise_multiplier=1e-310 must lie in \[1e-06, 1e\+06\]"),
        ((1e300, 0.1, 10), r"noise_multiplier=1e\+300 must lie in \[1e-06, 1e\+06\]"),
        ((1.0, 2.0, 10), "sampling_probability=2.0"),
        ((1.0, 0.1, 0), "num_steps=0 must be an integer of at least 1"),
    ],
)
def test_strong_composition_refuses_hostile_arguments_by_name(arguments, message):
    with pytest.raises(ValueError, match=f"strong_composition: {message}"):
        privacy.strong_composition(*arguments, delta=1e-5)


@pytest.mark.parametrize("delta", [0, 1, -1e-5, float("nan")])
@pytest.mark.parametrize("name", ["moments_of", "rdp", "strong_composition"])
def test_hostile_delta_is_refused_by_name(name, delta):
    setting = (1.0, 0.1, 10) if name == "strong_composition" else (equal_releases(1.0, 0.1, 10),)
    with pytest.raises(ValueError, match=f"{name}: delta="):
        getattr(privacy, name)(*setting, delta=delta)


def test_clt_is_no_lower_bound_either():
    setting = 0.3, 256 / 29305, 11
    truth = privacy.compose([(privacy.SubsampledGaussian(*setting[:2]), setting[2])]).epsilon(1e-5)
    assert truth.high < 14.5 < 59.2 < privacy.clt(equal_releases(*setting)).epsilon(1e-5)


@pytest.mark.parametrize("q", [1e-20, 0.01, 1.0])
@pytest.mark.parametrize("sigma", [1e-6, 0.03, 1.0, 1e6])
def test_all_answer_over_the_whole_range_of_noise(sigma, q):
    for num_steps in (1, 10_000_000):
        assert privacy.clt(equal_releases(sigma, q, num_steps)).epsilon(1e-5) >= 0
        assert privacy.moments_of(equal_releases(sigma, q, num_steps), delta=1e-5) >= 0
        assert privacy.rdp(equal_releases(sigma, q, num_steps), delta=1e-5) >= 0
        assert privacy.strong_composition(sigma, q, num_steps, delta=1e-5) >= 0


ORDERS = range(2, 40)
MIXED = [
    (privacy.SubsampledGaussian(1.1, 0.01), 500),
    (privacy.NoisyCovariance(9.0), 1),
    (privacy.SubsampledGEP(3.0, 0.05), 200),
]


@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-12])
def test_delta_by_moments_is_the_inverse_of_epsilon_and_above_the_truth(delta):
    found = privacy.moments_of(MIXED, delta)
    assert privacy.moments_delta(MIXED, found) == pytest.approx(delta, rel=1e-9)
    assert privacy.moments_delta(MIXED, found) >= privacy.compose(MIXED).delta(found).high
    assert privacy.moments_delta(MIXED, 0.0) <= 1.0


def test_delta_by_moments_of_a_full_batch_is_the_closed_form():
    """min over λ of exp(λ (λ + 1) / (2 σ²) - λ ε)."""
    noise, epsilon = 2.0, 1.5
    order = epsilon * noise**2 - 0.5
    expected = np.exp(order * (order + 1) / (2 * noise**2) - order * epsilon)
    assert privacy.moments_delta([(privacy.Gaussian(noise), 1)], epsilon, [order]) == pytest.approx(expected)


@pytest.mark.parametrize(("q", "steps", "target"), [(0.01, 1000, 1.0), (256 / 60000, 20_000, 3.0), (1.0, 5, 8.0)])
@pytest.mark.parametrize("name", ["moments_of", "rdp"])
def test_noise_by_an_accountant_is_the_smallest_that_it_accepts_and_enough(name, q, steps, target):
    accountant, plan = partial(getattr(privacy, name), orders=ORDERS), {"sampling_probability": q, "num_steps": steps}
    noise = privacy.smallest_noise(accountant, target, 1e-5, **plan)
    enough, less = (accountant(equal_releases(noise * factor, q, steps), 1e-5) for factor in (1, 1 - 2e-6))
    assert enough <= target < less
    assert noise >= privacy.calibrate(target, 1e-5, **plan) * (1 - 1e-4)


def test_rdp_of_several_kinds_of_releases_agrees_with_dp_accounting():
    orders = [2, 3, 4, 6, 8, 12, 16, 24, 32]
    accountant = RdpAccountant(orders)
    accountant.compose(privacy.to_dp_event(MIXED))
    assert privacy.rdp(MIXED, 1e-5, orders) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


# Steps of the paper's size on CIFAR-10: batches of 1000 of 50,000 images, 100 epochs
LEMMA_D4 = [(privacy.SubsampledGaussian(1.5, 0.02), 5000)]


def test_conversion_of_lemma_d4_and_the_tighter_one():
    orders = np.arange(2.0, 65.0)
    printed = privacy.rdp(LEMMA_D4, 1e-5, orders, privacy.mironov_conversion)
    assert printed == pytest.approx(5.790, abs=5e-4)
    assert privacy.rdp(LEMMA_D4, 1e-5, orders) == pytest.approx(5.165, abs=5e-4)
    divergences = np.array([privacy.rdp(LEMMA_D4, 1 - 1e-15, [a], lambda d, order, delta: d) for a in orders])
    assert printed == pytest.approx((divergences + np.log(1e5) / (orders - 1)).min(), rel=1e-12)
    assert printed == privacy.moments_of(LEMMA_D4, 1e-5, orders - 1)


@pytest.mark.parametrize(("target", "q", "steps"), [(8.0, 0.01, 10_000), (200.0, 0.02, 100_000), (0.1, 1e-4, 10)])
def test_noise_by_renyi_at_all_orders_takes_less_than_a_second(target, q, steps):
    start = process_time()
    noise = privacy.smallest_noise(privacy.rdp, target, 1e-5, sampling_probability=q, num_steps=steps)
    assert process_time() - start < 1
    low, high = (privacy.rdp(equal_releases(noise * (1 + change), q, steps), 1e-5) for change in (0, -2e-6))
    assert low <= target < high


def test_noise_by_another_conversion_is_that_of_the_moments():
    plan = {"sampling_probability": 0.01, "num_steps": 1000}
    orders = np.arange(1.0, 33.0)
    moments = partial(privacy.moments_of, orders=orders)
    renyi = partial(privacy.rdp, orders=orders + 1, conversion=privacy.mironov_conversion)
    by_moments, by_renyi = (privacy.smallest_noise(one, 3.0, 1e-5, **plan) for one in (moments, renyi))
    assert by_moments == by_renyi


def test_clt_adds_up_divergences_and_is_exact_without_sampling():
    """χ²(P‖Q) of Laplace noise is (2 e^z + e^(-2 z)) / 3 - 1."""
    z = 1 / 3
    releases = [(privacy.SubsampledGaussian(1.1, 0.01), 500), (privacy.Gaussian(4.0), 2), (privacy.Laplace(3.0), 5)]
    expected = 500 * 1e-4 * np.expm1(1.1**-2) + 2 / 16 + 5 * ((2 * np.exp(z) + np.exp(-2 * z)) / 3 - 1)
    assert privacy.clt(releases).mu == pytest.approx(np.sqrt(expected), rel=1e-12)
    full = [(privacy.Gaussian(4.0), 2), (privacy.NoisyCovariance(7.0), 3)]
    truth = privacy.compose(full).epsilon(1e-5)
    assert truth.low - 1e-6 <= privacy.clt(full).epsilon(1e-5) <= truth.high + 1e-6
    assert privacy.clt_noise(1.0, 1e-5, 1.0, 9) == pytest.approx(privacy.calibrate(
        1.0, 1e-5, sampling_probability=1.0, num_steps=9
    ), rel=1e-5)  # fmt: skip
    assert privacy.clt(full).true_delta(1.0) == privacy.compose(full).delta(1.0)


def test_clt_of_many_steps_with_hardly_any_noise_has_an_infinite_epsilon():
    limit = privacy.clt([(privacy.SubsampledGaussian(0.01, 0.5), 100_000)])
    assert limit.epsilon(1e-5) == np.inf
    assert limit.delta(3.0) == 1.0


def test_clt_of_nothing_is_refused():
    with pytest.raises(ValueError, match="clt: there is no release"):
        privacy.clt([])


@pytest.mark.parametrize(
    ("target", "message"), [(0.0, "target_epsilon=0"), (1e-9, "above 10000"), (1e9, "even at noise_multiplier=0.2")]
)
def test_targets_out_of_reach_are_refused(target, message):
    with pytest.raises(ValueError, match=message):
        privacy.smallest_noise(privacy.rdp, target, 1e-5, sampling_probability=0.01, num_steps=100)


@pytest.mark.parametrize("order", [2, 5, 9])
def test_moments_of_mixtures_are_the_multinomial_sum(order):
    """E_Q (P/Q)^a in closed form, for whole a; the sampled Gaussian is the mixture of two parts."""
    chances, lengths, stddev = (0.9, 0.06, 0.04), (0.0, 0.5, 1.0), 0.8
    total = 0.0
    for counts in itertools.product(range(order + 1), repeat=3):
        if sum(counts) == order:
            ways = math.factorial(order) / math.prod(map(math.factorial, counts))
            first = sum(count * length for count, length in zip(counts, lengths, strict=True)) / stddev
            second = sum(count * length**2 for count, length in zip(counts, lengths, strict=True)) / stddev**2
            weight = math.prod(chance**count for chance, count in zip(chances, counts, strict=True))
            total += ways * weight * math.exp((first**2 - second) / 2)
    mixture = privacy.GaussianMixture(stddev, lengths, chances)
    assert log_moments(mixture.dominating_pair(), np.array([order - 1.0]))[0] == pytest.approx(math.log(total))
    sampled, same = privacy.SubsampledGaussian(0.7, 0.05), privacy.GaussianMixture(0.7, (0.0, 1.0), (0.95, 0.05))
    real_orders = np.array([0.3, 1.7, order + 0.5])
    found = log_moments(same.dominating_pair(), real_orders)
    assert found == pytest.approx(log_moments(sampled.dominating_pair(), real_orders))


def test_moments_and_clt_take_mixtures_and_sampled_integers():
    mixture = [(privacy.GaussianMixture(0.8, (0.0, 0.5, 1.0), (0.9, 0.06, 0.04)), 100)]
    integers = [(privacy.PoissonSampled(privacy.DiscreteGaussian(9.0, 3), 0.05), 100)]
    for releases in (mixture, integers):
        exact = privacy.compose(releases).epsilon(1e-5)
        assert exact.high < privacy.rdp(releases, 1e-5) <= privacy.moments_of(releases, 1e-5) < 2 * exact.high
        assert privacy.clt(releases).epsilon(1e-5) == pytest.approx(exact.high, rel=0.2)
    normal = [(privacy.SubsampledGaussian(3.0, 0.05), 100)]
    assert privacy.rdp(integers, 1e-5) == pytest.approx(privacy.rdp(normal, 1e-5), rel=1e-6)
