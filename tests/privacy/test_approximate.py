# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from torch_privacy import privacy

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
    approximation = privacy.clt(*setting)
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
    epsilon = privacy.clt(noise, q, steps).epsilon(delta)
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
    epsilon = privacy.moments(*setting, delta=1e-5)
    if real is not None:
        assert epsilon == pytest.approx(real, abs=1.1e-3)
    assert privacy.moments(*setting, delta=1e-5, orders=range(1, 33)) == pytest.approx(integer, abs=1e-3)
    noise, q, steps = setting
    assert epsilon > privacy.compose([(privacy.SubsampledGaussian(noise, q), steps)]).epsilon(1e-5).high


def test_moments_of_a_full_batch_match_the_closed_form():
    # α(λ) = λ (λ + 1) / (2 σ²) for N(1/σ, 1) against N(0, 1)
    orders = [1.0, 2.5, 10.0]
    expected = min((5 * k * (k + 1) / (2 * 9.0) + 11.512925464970229) / k for k in orders)
    assert privacy.moments(3.0, 1.0, 5, delta=1e-5, orders=orders) == pytest.approx(expected, rel=1e-12)


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


def test_moments_of_releases_that_are_not_gaussian_are_refused():
    with pytest.raises(ValueError, match=r"SubsampledJL.* is not one Poisson-sampled Gaussian release"):
        privacy.moments_of([(privacy.SubsampledJL(1.0, 32, 0.01), 1)], 1e-5)


@pytest.mark.parametrize("orders", [[], [0.0], [-1.0], [float("nan")]])
def test_orders_are_refused(orders):
    with pytest.raises(ValueError, match="moments: orders="):
        privacy.moments(1.0, 0.1, 10, delta=1e-5, orders=orders)
    with pytest.raises(ValueError, match=r"rdp: orders=.* greater than 1\."):
        privacy.rdp(1.0, 0.1, 10, delta=1e-5, orders=[*orders[:-1], 1.0])


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
    limit = privacy.clt(*setting)
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
    assert 0.995 * epsilon < privacy.rdp(*setting, delta=delta) < epsilon + 1e-3  # see the fractional orders below
    step = privacy.SubsampledGaussian(*setting[:2])
    assert privacy.rdp(*setting, delta=delta) > privacy.compose([(step, setting[2])]).epsilon(delta).high


@given(st.floats(0.5, 8), st.floats(1e-4, 1), st.integers(1, 10**5), st.floats(1e-9, 1e-3))
def test_rdp_at_whole_orders_agrees_with_dp_accounting(noise, q, steps, delta):
    orders = range(2, 64)
    accountant = RdpAccountant(orders)
    accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(noise)), steps)
    ours = privacy.rdp(noise, q, steps, delta, orders)
    assert ours == pytest.approx(accountant.get_epsilon(delta), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("order", [1.3, 2.9, 7.5])
def test_divergence_at_a_fractional_order_is_its_integral(order):
    # dp-accounting's series lies above it, by 0.2 % at σ = 0.638, a = 2.9: the sign of its terms is not kept
    noise, q, delta = 0.638, MNIST, 1e-5

    def moment(x):
        return np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi) * (1 - q + q * np.exp(x / noise - noise**-2 / 2)) ** order

    divergence = np.log(quad(moment, -15, order / noise + 15, points=[0, order / noise], epsabs=1e-15)[0]) / (order - 1)
    expected = 16406 * divergence + np.log1p(-1 / order) - np.log(order * delta) / (order - 1)
    assert privacy.rdp(noise, q, 16406, delta, [order]) == pytest.approx(expected, rel=1e-7)


def test_rdp_of_a_full_batch_matches_the_closed_form():
    orders = np.array([1.5, 4.0, 20.0])  # R(a) = a / (2 σ²)
    expected = 7 * orders / (2 * 9) + np.log1p(-1 / orders) - np.log(1e-5 * orders) / (orders - 1)
    assert privacy.rdp(3.0, 1.0, 7, delta=1e-5, orders=orders) == pytest.approx(expected.min(), rel=1e-12)


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
def test_hostile_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=f"clt: {message}"):
        privacy.clt(*arguments)
    with pytest.raises(ValueError, match=f"moments: {message}"):
        privacy.moments(*arguments, delta=1e-5)
    with pytest.raises(ValueError, match=f"rdp: {message}"):
        privacy.rdp(*arguments, delta=1e-5)
    with pytest.raises(ValueError, match=f"strong_composition: {message}"):
        privacy.strong_composition(*arguments, delta=1e-5)


@pytest.mark.parametrize("delta", [0, 1, -1e-5, float("nan")])
@pytest.mark.parametrize("name", ["moments", "rdp", "strong_composition"])
def test_hostile_delta_is_refused_by_name(name, delta):
    with pytest.raises(ValueError, match=f"{name}: delta="):
        getattr(privacy, name)(1.0, 0.1, 10, delta=delta)


def test_clt_is_no_lower_bound_either():
    setting = 0.3, 256 / 29305, 11
    truth = privacy.compose([(privacy.SubsampledGaussian(*setting[:2]), setting[2])]).epsilon(1e-5)
    assert truth.high < 14.5 < 59.2 < privacy.clt(*setting).epsilon(1e-5)


@pytest.mark.parametrize("q", [1e-20, 0.01, 1.0])
@pytest.mark.parametrize("sigma", [1e-6, 0.03, 1.0, 1e6])
def test_all_answer_over_the_whole_range_of_noise(sigma, q):
    for num_steps in (1, 10_000_000):
        assert privacy.clt(sigma, q, num_steps).epsilon(1e-5) >= 0
        assert privacy.moments(sigma, q, num_steps, delta=1e-5) >= 0
        assert privacy.rdp(sigma, q, num_steps, delta=1e-5) >= 0
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
@pytest.mark.parametrize("name", ["moments", "rdp"])
def test_noise_by_an_accountant_is_the_smallest_that_it_accepts_and_enough(name, q, steps, target):
    def accountant(noise):
        return getattr(privacy, name)(noise, q, steps, 1e-5, ORDERS)

    plan = {"sampling_probability": q, "num_steps": steps}
    noise = getattr(privacy, f"{name}_noise")(target, 1e-5, **plan, orders=ORDERS)
    assert accountant(noise) <= target < accountant(noise * (1 - 2e-6))
    assert noise >= privacy.calibrate(target, 1e-5, **plan) * (1 - 1e-4)


def test_rdp_of_several_kinds_of_releases_agrees_with_dp_accounting():
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    orders = [2, 3, 4, 6, 8, 12, 16, 24, 32]
    accountant = RdpAccountant(orders)
    accountant.compose(privacy.to_dp_event(MIXED))
    assert privacy.rdp_of(MIXED, 1e-5, orders) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    assert dp_accounting.__name__
    with pytest.raises(ValueError, match="rdp_of: SubsampledJL"):
        privacy.rdp_of([(privacy.SubsampledJL(1.0, 32, 0.1), 1)], 1e-5)


@pytest.mark.parametrize("name", ["moments_noise", "rdp_noise"])
@pytest.mark.parametrize(("target", "message"), [(0.0, "target_epsilon=0"), (1e-9, "above 10000"), (1e9, "below 0.2")])
def test_targets_out_of_reach_are_refused(name, target, message):
    with pytest.raises(ValueError, match=message):
        getattr(privacy, name)(target, 1e-5, sampling_probability=0.01, num_steps=100, orders=ORDERS)
