# SPDX-License-Identifier: Apache-2.0
"""An epoch of balls and bins: reference values, quadrature, simulation, Poisson samples, and the laws of its ratio."""

import itertools
import math

import mpmath as mp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from torch_privacy import privacy
from torch_privacy.privacy.pairs import balls_and_bins
from torch_privacy.privacy.pairs.balls_and_bins import Merged, Spread
from torch_privacy.privacy.pairs.widening_grid import BODY, OCTAVE, merge, positions, split, sums

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


@pytest.mark.thorough
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
        value = law.center + law.base + law.step * law.at
        most = 1e-11 * num_bins if kind is Spread else 1e-14  # a spread law has what both neighbors can get at most
        for total in (law.mass.sum(), law.mass @ value / num_bins):
            assert -1e-14 <= total - 1 <= most
        variances.append(law.mass @ (value - num_bins) ** 2)
    exact = num_bins * math.expm1(noise**-2)
    assert variances[0] < exact < variances[1]
    assert variances[1] < variances[0] * 1.002


@pytest.mark.parametrize("noise", [0.25, 0.6, 3.0, 3.3, 50.0, 1e6])
def test_cells_have_mass_and_mean_to_the_error_that_is_priced(noise):
    """Against 60 digits, from the lowest cells to the highest ones."""
    law = Merged.of_one(noise)
    places = balls_and_bins.places_of(balls_and_bins.num_octaves_of(law.mass))
    left, right = balls_and_bins._cells(noise, law.center, law.base, law.step, places)
    with mp.workdps(60):
        sigma = mp.mpf(noise)

        def mass(low, high):
            sign, low, high = (1, low, high) if low > 0 else (-1, -low, -high)  # of tails, without cancellation
            return sign * (mp.erfc(low / mp.sqrt(2)) - mp.erfc(high / mp.sqrt(2))) / 2

        for k in {*range(12), *range(12, len(left), len(left) // 60), len(left) - 1}:
            x = [mp.mpf(law.center) + mp.mpf(law.base) + mp.mpf(law.step) * mp.mpf(places[i]) for i in (k, k + 1)]
            z = [sigma * mp.log(one) + 1 / (2 * sigma) for one in x]
            total, mean = mass(*z), mass(*(one - 1 / sigma for one in z))
            expected = (x[1] * total - mean) / (x[1] - x[0]), (mean - x[0] * total) / (x[1] - x[0])
            for found, exact in zip((left[k], right[k]), expected, strict=True):
                assert abs(mp.mpf(found) / exact - 1) < balls_and_bins.CELL


def sticks_of(noise, num_bins, kind):
    """Returns δ at some epsilons around the deviation of the ratio, of the certified pair, in both directions."""
    pair = balls_and_bins._certified(kind.of_one(noise).times(num_bins))
    epsilons = np.linspace(0.02, 3, 12) * math.log1p(math.sqrt(math.expm1(noise**-2) / num_bins))
    found = [pair.tails(epsilons, swapped=swapped) for swapped in (False, True)]
    return np.concatenate([tails.gain - tails.loss for tails in found])


def unpriced(monkeypatch):
    for name in ("CELL", "SUM", "PLACE"):
        monkeypatch.setattr(balls_and_bins, name, 0.0)
    monkeypatch.setattr(balls_and_bins, "_of_adding", lambda place: 0.0)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(("noise", "num_bins"), [(0.3, 7), (1.0, 1000), (40.0, 30)])
def test_rounding_is_on_the_safe_side_of_both_laws(monkeypatch, noise, num_bins):
    """The pair with priced rounding against that without it: in both directions, at every epsilon."""
    priced = {kind: sticks_of(noise, num_bins, kind) for kind in (Merged, Spread)}
    unpriced(monkeypatch)
    exact = {kind: sticks_of(noise, num_bins, kind) for kind in (Merged, Spread)}
    error = num_bins * 1e-13  # cells are wrong by 1e-13 at least
    assert (priced[Spread] > exact[Spread] * (1 + error)).all()
    assert (priced[Merged] < exact[Merged] * (1 - error)).all()
    assert (priced[Spread] < exact[Spread] * (1 + 1e-4)).all()
    assert (priced[Merged] > exact[Merged] * (1 - 1e-3)).all()


@pytest.mark.parametrize(("noise", "num_bins"), [(1.0, 1), (1.0, 2), (0.4, 5), (40.0, 3)])
def test_places_are_moved_to_the_safe_side_of_both_laws(monkeypatch, noise, num_bins):
    unpriced(monkeypatch)
    exact = {kind: sticks_of(noise, num_bins, kind) for kind in (Merged, Spread)}
    monkeypatch.setattr(balls_and_bins, "PLACE", 1e-9)
    assert (sticks_of(noise, num_bins, Spread) > exact[Spread] * (1 + 1e-12)).all()
    assert (sticks_of(noise, num_bins, Merged) < exact[Merged] * (1 - 1e-12)).all()


@pytest.mark.parametrize("coarser", [split, merge])
def test_sums_are_exact_to_the_error_that_is_priced(coarser):
    """Against the same sums with 64 bits, of masses over 100 orders of magnitude in 40 octaves."""
    rng = np.random.default_rng(0)
    a, b = (10.0 ** -rng.uniform(0, 100, BODY + 40 * OCTAVE) for _ in range(2))
    exact = sums(a.astype(np.longdouble), b.astype(np.longdouble), coarser)
    assert (np.abs(sums(a, b, coarser) - exact) <= balls_and_bins.SUM * exact).all()


def test_sums_keep_mass_and_mean():
    rng = np.random.default_rng(0)
    a, b = (rng.uniform(size=BODY + k * OCTAVE) for k in (3, 5))
    at = balls_and_bins.places_of(5)
    mass = sums(a, b, split)
    assert mass.sum() == pytest.approx(a.sum() * b.sum(), rel=1e-13)
    mean = (a @ at[: len(a)]) * b.sum() + a.sum() * (b @ at)
    assert mass @ positions(5) == pytest.approx(mean, rel=1e-13)
    merged = sums(a * at[: len(a)], b, merge).sum() + sums(a, b * at, merge).sum()
    assert merged == pytest.approx(mean, rel=1e-13)


@pytest.mark.parametrize("kind", [Merged, Spread])
def test_errors_count_all_outcomes_that_come_to_one_place(kind, monkeypatch):
    """Of 3 copies: those of 2 cells and a sum, then of a place of the sum, of the third's new grid, and of the last."""
    counted, add = [], balls_and_bins._of_adding
    monkeypatch.setattr(balls_and_bins, "_of_adding", lambda place: counted.append(place) or add(place))
    law = kind.of_one(0.7).times(3)
    added = {id(place): np.bincount(place).max() for place in counted}
    assert len(added) == 3
    least = 3 * balls_and_bins.CELL + 2 * balls_and_bins.SUM + sum(added.values()) * 2.0**-53
    assert least <= law.error <= least + 1e-13


@pytest.mark.thorough
def test_many_bins_with_little_noise_have_a_price():
    """12,418 outcomes of their sum come to one place."""
    low, high = prices(0.25, 65_535)
    assert low < high < low * (1 + 5e-4)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("noise", [0.25, 0.4, 3.2, 3.3])
@pytest.mark.parametrize("kind", [Merged, Spread])
def test_small_ratios_keep_their_relative_accuracy(kind, noise):
    """Ratios of 1e-17 are no zeros: an epoch reveals nothing for certain, up to what was given up."""
    pair = balls_and_bins._certified(kind.of_one(noise).times(2))
    ratio = np.array(pair.p)[1:-1] / np.array(pair.q)[1:-1]
    law = kind.of_one(noise).times(2)
    value = (law.center + law.base + law.step * law.at[law.mass > 0]) / 2
    far = np.abs(value - 1) > 0.5
    assert ratio[far] == pytest.approx(value[far], rel=1e-9, abs=0)


def test_errors_that_are_too_large_are_noticed(monkeypatch):
    monkeypatch.setattr(balls_and_bins, "SUM", 1e-3)
    for kind in (Merged, Spread):
        with pytest.raises(ArithmeticError, match="smaller than the errors"):
            balls_and_bins._certified(kind.of_one(1.0).times(300))


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


@pytest.mark.thorough
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
