# SPDX-License-Identifier: Apache-2.0
from typing import Any

import mpmath
import numpy as np
import pytest

from torch_privacy.privacy.engines import contour, fft, tilted
from torch_privacy.privacy.engines.lattice import Lattice, optimistic, pessimistic
from torch_privacy.privacy.engines.tilted import TiltedComposition, TiltedCompositions, TiltedLattice
from torch_privacy.privacy.pairs.discrete import DiscretePair
from torch_privacy.privacy.pairs.gaussian import SubsampledGaussianPair


def coins(spacing=0.5) -> Lattice:
    """Loss +spacing or -spacing, as of randomised response."""
    up = 1 / (1 + np.exp(-spacing))
    return Lattice(-spacing, 2 * spacing, np.array([1 - up, up]))


def binomial_delta(steps: int, spacing: float, epsilon: float) -> float:
    """δ of randomised response by hand: 2k - steps losses up, k binomial."""
    up = 1 / (1 + np.exp(-spacing))
    k = np.arange(steps + 1)
    log_choose = np.array([sum(np.log((steps - j) / (j + 1)) for j in range(i)) for i in k])
    mass = np.exp(log_choose + k * np.log(up) + (steps - k) * np.log(1 - up))
    return float(mass @ np.maximum(0, -np.expm1(epsilon - spacing * (2 * k - steps))))


@pytest.mark.parametrize("s", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("steps", [1, 2, 7, 60])
def test_composed_coins_match_the_binomial_under_every_tilt(steps, s):
    composed = TiltedComposition([(coins(), steps)], s)
    for epsilon in (0.0, 0.2, 0.5, 3.3, 0.3 * steps):
        truth = binomial_delta(steps, 0.5, epsilon)
        assert composed.at_least(epsilon) <= truth * (1 + 1e-12)
        assert composed.at_most(epsilon) >= truth * (1 - 1e-12)
        if s <= 1:  # with a tilt far off, the bracket is still right but wide
            assert composed.at_most(epsilon) - composed.at_least(epsilon) <= 1e-7 * truth + 1e-12


def test_tilt_recovers_a_tail_that_an_untilted_fft_drowns():
    truth = binomial_delta(60, 0.5, 29.0)
    assert truth < 1e-12
    composed = TiltedComposition([(coins(), 60)], 6.0)
    assert composed.at_least(29.0) == pytest.approx(truth, rel=1e-8)
    assert composed.at_most(29.0) == pytest.approx(truth, rel=1e-8)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("s", [0.0, 1e-3, 0.05, 0.5])
@pytest.mark.parametrize("steps", [200, 20_000])
def test_brackets_of_composed_coins_contain_forty_digits(steps, s):
    composed = TiltedComposition([(coins(0.01), steps)], s)
    for epsilon in (0.0, 0.003, 0.5, 4.0, 12.0):
        assert composed.at_least(epsilon) <= binomial_in_forty_digits(steps, 0.01, epsilon) <= composed.at_most(epsilon)


def binomial_in_forty_digits(steps: int, spacing: float, epsilon: float) -> Any:
    with mpmath.workdps(40):
        lattice = coins(spacing)
        down, up = (mpmath.mpf(mass) for mass in lattice.mass.tolist())
        mass, total = down**steps, mpmath.mpf(0)
        for k in range(steps + 1):
            loss = mpmath.mpf(spacing) * (2 * k - steps)
            if loss > epsilon:
                total += mass * -mpmath.expm1(epsilon - loss)
            mass *= up * (steps - k) / (down * (k + 1))
        return total


@pytest.mark.parametrize("mass", np.linspace(0.3, 0.9999, 25).tolist())
def test_powers_of_a_single_mass_are_bracketed(mass):
    steps = int(-600 / np.log(mass))
    composed = TiltedComposition([(Lattice(1.0, 1.0, np.array([mass, 0.0])), steps)], 0.0)
    with mpmath.workdps(40):
        truth = mpmath.mpf(mass) ** steps * -mpmath.expm1(-steps)
    assert composed.at_least(0.0) <= truth <= composed.at_most(0.0)


def test_a_tiny_loss_next_to_a_large_one_is_not_rounded_away():
    """A billion steps with a loss of 1e-15, or rarely -16: the larger one must not swallow the digits of the other."""
    steps, tiny, rare = 10**9, 1e-15, 1e-9
    remove = Lattice(-tiny, 16.0, np.array([1 - rare, rare]))
    composed = TiltedCompositions([(remove.swapped, steps)]).at_epsilon(0.0)
    with mpmath.workdps(40):
        never = ((1 - mpmath.mpf(rare)) * mpmath.exp(tiny)) ** steps
        truth = never * -mpmath.expm1(-steps * mpmath.mpf(tiny))  # one large loss exceeds all the others
    assert composed.at_least(0.0) <= truth <= composed.at_most(0.0)
    assert composed.at_most(0.0) <= 1.01 * float(truth)


@pytest.mark.parametrize("s", [0.3, 3.0, 40.0])
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.9])
def test_errors_count_in_full_between_lattice_points(s, fraction):
    composed = TiltedComposition([(coins(), 7)], s)
    composed.entry_error = 1e-3  # far above rounding
    distance = composed.lowest + composed.spacing * (3 + fraction)
    gaps = composed.spacing * (np.arange(1, 200) - fraction)
    changed = 1e-3 * np.exp(composed.log_weight - s * (distance + gaps)) * -np.expm1(-gaps)
    assert composed._error(distance) >= changed.sum()


def test_discounted_sums_match_the_recursion_across_blocks():
    values, spacing = np.random.default_rng(0).random(40), 25.0  # a block holds 300 / 25 = 12 points
    expected, carry = [], 0.0
    for value in values[::-1]:
        carry = value + np.exp(-spacing) * carry
        expected.append(carry)
    np.testing.assert_allclose(tilted.discounted_sums(values, spacing), expected[::-1], rtol=1e-15)


def test_discounted_sums_carry_a_large_value_into_the_block_before():
    values = np.zeros(24)
    values[12] = 1e300
    assert tilted.discounted_sums(values, 25.0)[11] == pytest.approx(1e300 * np.exp(-25.0))


@pytest.mark.parametrize("sign", [-1, 1])
def test_grouped_moments_are_bounds_and_nearly_exact(sign):
    losses = np.linspace(-1, 5, 5001)
    mass = np.exp(-losses) / np.exp(-losses).sum()
    tilted = TiltedLattice(Lattice(-1.0, losses[1] - losses[0], mass), 0.0)
    t = sign * np.geomspace(0.01, 5, 9)
    exact = np.log(np.exp(t[:, None] * (losses - tilted.mean)) @ mass)
    assert (tilted.moment_bounds.log_moment(t) >= exact - 1e-13).all()
    np.testing.assert_allclose(tilted.moment_bounds.log_moment(t), exact, rtol=0.05, atol=1e-3)


def test_one_loss_alone_has_its_own_moments():
    bounds = tilted.MomentBounds(np.array([0.25]), np.array([0.5]), 0.25, 0.0)
    t = np.array([-2.0, 0.0, 3.0])
    np.testing.assert_allclose(bounds.log_moment(t), np.log(0.5), rtol=1e-15)


@pytest.mark.parametrize("at_least", [1, 7, 1000, 99_999])
def test_fast_length_is_enough_and_little_more(at_least):
    assert at_least <= tilted.fast_length(at_least) <= 1.25 * at_least + 1


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("noise", "q", "steps"), [(7.8, 3e-10, 92), (25.0, 1e-12, 5_000), (8.3, 3e-10, 670_000)])
def test_finer_lattices_of_rare_sampling_agree_with_the_contour(noise, q, steps, swapped):
    parts = [(SubsampledGaussianPair(1 / noise, q), steps)]
    deviation = fft._deviation(parts) * steps**0.5
    for epsilon in (0.3 * deviation, 3 * deviation):
        truth = contour.curve(parts, swapped=swapped).delta(epsilon)
        for points in (2**12, 2**18):
            spacing = float(2.0 ** np.floor(np.log2(fft._span(parts) / points)))
            low, high = fft.LatticeCurve(parts, spacing, swapped=swapped).delta(epsilon)
            assert low <= truth.high
            assert high >= truth.low


@pytest.mark.parametrize("lattice", [optimistic, pessimistic])
def test_swapping_twice_keeps_every_loss_exactly(lattice):
    pair = SubsampledGaussianPair(0.05, 1e-12)
    one = lattice(pair, float(2.0 ** np.floor(np.log2(pair.span / 2**12))))
    twice = one.swapped.swapped
    assert (twice.start, twice.first) == (one.start, one.first)
    assert one.swapped.exact_loss(0) == -one.exact_loss(len(one.mass) - 1)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("distance", [0.5, 1e-3, 1e-9])
def test_an_early_answer_is_that_of_the_narrow_bracket(swapped, distance):
    atoms = DiscretePair((0.31, 0.2, 0.27, 0.22), (0.2, 0.29, 0.22, 0.29))  # their losses have no common unit
    steps = [(atoms, 3), (SubsampledGaussianPair(2.0, 0.1), 5)]
    high = fft.RefinedLatticeCurve(steps, swapped=swapped).epsilon_high(1e-4)
    below, above = (fft.RefinedLatticeCurve(steps, swapped=swapped) for _ in range(2))
    assert not below.surely_below(high * (1 - distance), 1e-4)
    assert above.surely_below(high * (1 + distance), 1e-4)
    assert below.epsilon_high(1e-4) == above.epsilon_high(1e-4) == high
