# SPDX-License-Identifier: Apache-2.0
"""An epoch of balls and bins: reference values, quadrature, simulation, Poisson samples, and the laws of its ratio."""

import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from torch_privacy import privacy
from torch_privacy.privacy.pairs.balls_and_bins import Merged, Spread

DELTA = 1e-5


def prices(noise: float, num_bins: int, epochs: int = 1, delta: float = DELTA) -> privacy.Bracket:
    return privacy.compose([(privacy.BallsAndBins(noise, num_bins), epochs)]).epsilon(delta)


def of_one_direction(noise: float, num_bins: int, *, swapped: bool) -> list[float]:
    """Returns ε of the lower and of the upper pair, without the other direction."""
    bounds = privacy.BallsAndBins(noise, num_bins).dominating_pair()

    def epsilon(pair) -> float:
        def excess(epsilon: float) -> float:
            tails = pair.tails(np.array([epsilon]), swapped=swapped)
            return float(tails.gain[0] - tails.loss[0]) - DELTA

        return brentq(excess, 0.0, 50.0, xtol=1e-9)

    return [epsilon(bounds.lower[0]), epsilon(bounds.upper)]


@pytest.mark.parametrize(
    ("noise", "num_bins", "remove", "add"),
    [
        (1.0, 100, 0.62094, 0.42195),
        (1.0, 1000, 0.13885, 0.12629),
        (2.0, 1000, 0.04867, 0.04842),
        (0.7, 1000, 0.58401, 0.23845),
    ],
)
def test_an_epoch_has_the_reference_values_in_both_directions(noise, num_bins, remove, add):
    for swapped, expected in ((False, remove), (True, add)):
        low, high = of_one_direction(noise, num_bins, swapped=swapped)
        assert low - 1e-5 <= expected <= high + 1e-5
        assert high - low < 2e-4


@pytest.mark.parametrize(
    ("noise", "num_bins", "low", "high"),
    [(1.0, 100, 1.7005, 1.7025), (1.0, 1000, 0.4635, 0.4655), (0.7, 1000, 1.2067, 1.2087)],
)
def test_ten_epochs_lie_within_the_reference_brackets(noise, num_bins, low, high):
    bracket = prices(noise, num_bins, 10)
    assert low <= bracket.low <= bracket.high <= high
    assert bracket.high - bracket.low < 3e-4


@pytest.mark.thorough
@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_two_bins_enclose_the_quadrature_of_the_mixture(noise):
    """E (X1 + X2 - 2 e^ε)+, with the expectation over X2 in closed form, by the formula for options."""

    def call(strike: float) -> float:
        if strike <= 0:
            return 1 - strike
        d = -noise * math.log(strike) + 1 / (2 * noise)
        return norm.cdf(d) - strike * norm.cdf(d - 1 / noise)

    def delta(epsilon: float) -> float:
        def of(z: float) -> float:
            return norm.pdf(z) * call(2 * math.exp(epsilon) - math.exp(z / noise - 1 / (2 * noise**2)))

        kink = noise * (epsilon + math.log(2)) + 1 / (2 * noise)
        ends = itertools.pairwise([-12, 0, kink, kink + 14])
        return sum(quad(of, a, b, epsabs=1e-14, epsrel=1e-11, limit=200)[0] for a, b in ends) / 2

    exact = brentq(lambda epsilon: delta(epsilon) - DELTA, 0.01, 40, xtol=1e-10)
    low, high = prices(noise, 2)
    assert low - 1e-7 <= exact <= high + 1e-7
    assert high - low < 2e-4


def test_an_epoch_agrees_with_a_simulation():
    """Of the ratio under P, where one bin, say the first, has the example."""
    noise, num_bins, delta, rng = 0.8, 20, 1e-2, np.random.default_rng(0)
    low, high = prices(noise, num_bins, delta=delta)
    shifted = np.zeros(num_bins)
    shifted[0] = 1 / noise
    z = rng.standard_normal((400_000, num_bins)) + shifted
    ratio = np.exp(z / noise - 1 / (2 * noise**2)).mean(1)
    for epsilon, sign in ((low, 1), (high, -1)):
        gains = np.maximum(1 - math.exp(epsilon) / ratio, 0.0)
        assert sign * (gains.mean() - delta) > -4 * gains.std() / math.sqrt(len(gains))


GRID = [*itertools.product([0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 4.0, 10.0], [2, 5, 10, 60, 300], [1, 3, 10, 40, 150])]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("part", range(5))
def test_settings_of_use_cost_less_than_poisson_samples(part):
    """Of all 200 settings one costs more: noise 0.6 in 150 epochs of two bins, with an epsilon of 222."""
    for noise, num_bins, epochs in GRID[part::25]:
        poisson = privacy.compose([(privacy.SubsampledGaussian(noise, 1 / num_bins), num_bins * epochs)]).epsilon(DELTA)
        if poisson.high < 200:
            assert prices(noise, num_bins, epochs).high < poisson.low, (noise, num_bins, epochs)


def test_one_bin_is_a_full_batch_and_little_noise_has_the_bound_without_sampling():
    assert prices(1.3, 1, 5) == privacy.compose([(privacy.Gaussian(1.3), 5)]).epsilon(DELTA)
    low, high = prices(0.2, 50)
    assert high == privacy.compose([(privacy.Gaussian(0.2), 1)]).epsilon(DELTA).high
    assert low == privacy.compose([(privacy.SubsampledGaussian(0.2, 1 / 50), 1)]).epsilon(DELTA).low


@pytest.mark.parametrize("num_bins", [1, 2, 7, 100])
@pytest.mark.parametrize("noise", [0.3, 1.0, 30.0])
def test_both_laws_have_the_mass_and_the_mean_of_the_sum_and_enclose_its_variance(noise, num_bins):
    variances = []
    for kind in (Merged, Spread):
        law = kind.of_one(noise).times(num_bins)
        value = law.base + law.step * law.at
        assert law.mass.sum() == pytest.approx(1, abs=1e-11)
        assert law.mass @ value == pytest.approx(num_bins, rel=1e-10)
        variances.append(law.mass @ (value - num_bins) ** 2)
    exact = num_bins * math.expm1(noise**-2)
    assert variances[0] < exact < variances[1]
    assert variances[1] < variances[0] * 1.002


def test_later_batches_are_paid_by_their_epochs_and_no_more_of_them():
    epoch, other = privacy.BallsAndBins(1.0, 5), privacy.BallsAndBins(1.0, 6)
    later = privacy.LaterBatch(epoch)
    paid = privacy.compose([(epoch, 2)]).epsilon(DELTA)
    assert privacy.compose([(epoch, 1), (later, 4), (epoch, 1), (later, 3)]).epsilon(DELTA) == paid
    assert privacy.compose([(later, 8), (epoch, 2)]).epsilon(DELTA) == paid
    for releases in ([(later, 1)], [(epoch, 2), (later, 9)], [(other, 5), (later, 1)]):
        with pytest.raises(ValueError, match=r"compose: 1 later batches of BallsAndBins\(.*belong to no epoch"):
            privacy.compose(releases)
    with pytest.raises(ValueError, match="has no price of its own"):
        later.dominating_pair()


def test_an_epoch_has_the_noise_of_its_batches():
    zero_out = privacy.NeighboringRelation.REPLACE_SPECIAL
    events = {
        privacy.SubsampledGaussian(1.1, 0.1, zero_out, "customer"): 1.1,
        privacy.SubsampledGEP(2.2, 0.1): 2.2 / 2**0.5,
        privacy.SubsampledBlocks((3.0, 4.0), 0.1): 2.4,
    }
    for event, noise in events.items():
        epoch = privacy.in_bins(event, 10)
        assert noise * (1 - 1e-15) <= epoch.noise_multiplier <= noise
        assert (epoch.unit, epoch.neighboring_relation) == (event.unit, event.neighboring_relation)
    with pytest.raises(ValueError, match="not one Gaussian"):
        privacy.in_bins(privacy.SubsampledJL(1.0, 32, 0.1), 10)


def test_exactly_k_of_t_steps_cost_no_more_than_k_epochs():
    """By simulation; the likelihood ratio is an elementary symmetric polynomial over its mean."""
    noise, k, t, draws = 0.6, 3, 15, 100_000
    z = np.random.default_rng(0).standard_normal((draws, k * t))
    z[:, :k] += 1 / noise  # the steps of an example, which may be the first ones
    sums = np.zeros((draws, k + 1))
    sums[:, 0] = 1.0
    for x in np.exp(z / noise - 1 / (2 * noise**2)).T:
        for j in range(k, 0, -1):
            sums[:, j] += x * sums[:, j - 1]
    losses = np.log(sums[:, k] / math.comb(k * t, k))
    for epsilon in (1.0, 3.0, 5.0):
        lost = np.maximum(0, 1 - np.exp(epsilon - losses))
        bound = privacy.compose([(privacy.BallsAndBins(noise, t), k)]).delta(epsilon).high
        assert lost.mean() - 4 * lost.std() / draws**0.5 <= bound
        assert bound <= 4 * lost.mean()  # and not by far
