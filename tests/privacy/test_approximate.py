# SPDX-License-Identifier: Apache-2.0
import pytest

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


@pytest.mark.parametrize("orders", [[], [0.0], [-1.0], [float("nan")]])
def test_moments_refuse_orders(orders):
    with pytest.raises(ValueError, match="moments: orders="):
        privacy.moments(1.0, 0.1, 10, delta=1e-5, orders=orders)


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


def test_clt_is_no_lower_bound_either():
    setting = 0.3, 256 / 29305, 11
    truth = privacy.compose([(privacy.SubsampledGaussian(*setting[:2]), setting[2])]).epsilon(1e-5)
    assert truth.high < 14.5 < 59.2 < privacy.clt(*setting).epsilon(1e-5)


@pytest.mark.parametrize("q", [1e-20, 0.01, 1.0])
@pytest.mark.parametrize("sigma", [1e-6, 0.03, 1.0, 1e6])
def test_both_answer_over_the_whole_range_of_noise(sigma, q):
    for num_steps in (1, 10_000_000):
        assert privacy.clt(sigma, q, num_steps).epsilon(1e-5) >= 0
        assert privacy.moments(sigma, q, num_steps, delta=1e-5) >= 0
