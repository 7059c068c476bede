# SPDX-License-Identifier: Apache-2.0
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tradeoff_cases import ALPHA, SAMPLED, SIMPLE

from torch_privacy import privacy
from torch_privacy.privacy.tradeoff import (
    IDENTITY,
    EpsilonDelta,
    FromProfile,
    Gaussian,
    Laplace,
    PiecewiseLinear,
    compare,
    group,
    of_profile,
    tensor,
)
from torch_privacy.privacy.tradeoff.group import SLACK

SIZE = st.integers(1, 6)


def composed(f, size, alpha, rounding):
    """``1 - (1 - f)∘...∘(1 - f)`` on the grid, with every rate of rejection moved by ``rounding``."""
    for _ in range(size):
        alpha = np.clip(1 - np.asarray(f(alpha)) + rounding, 0, 1)
    return 1 - alpha


@given(st.floats(0.05, 1), st.integers(2, 6))
@settings(max_examples=8)
@pytest.mark.parametrize("law", [Gaussian, Laplace])
def test_group_of_a_noise_on_a_line_is_a_shift_of_that_many_times_its_length(law, shift, size):
    assert group(law(shift), size) == (law(size * shift), law(size * shift))
    low, high = group(FromProfile(law(shift).delta), size, pieces=128)  # without the closed form
    assert compare(low, law(size * shift)) == (True, True, 0.0)
    assert compare(law(size * shift), high) == (True, True, 0.0)
    assert np.max(high(ALPHA) - low(ALPHA)) < 2e-2


@given(st.one_of(SIMPLE, SAMPLED), SIZE)
@settings(max_examples=15)
def test_group_encloses_the_composition_of_rejection_rates(f, size):
    low, high = group(f, size, pieces=128)
    assert (low(ALPHA) <= composed(f, size, ALPHA, -1e-15) + 1e-15).all()  # above the truth, whatever is rounded
    assert (composed(f, size, ALPHA, 1e-15) <= high(ALPHA) + 1e-15).all()
    assert low <= high


@pytest.mark.thorough
@given(st.one_of(SIMPLE, SAMPLED), st.integers(2, 3), st.integers(2, 3))
@example(EpsilonDelta(3.0, 0.0), 3, 3)  # so steep that a corner must not be misplaced by rounding
@settings(max_examples=10)
def test_groups_of_groups_are_groups_and_turn_with_their_direction(f, first, second):
    low, high = group(f, first * second, pieces=128)
    assert group(group(f, first, pieces=128).low, second, pieces=128).low <= high
    assert low <= group(group(f, first, pieces=128).high, second, pieces=128).high
    reverse = group(f.inverse(), first * second, pieces=128)
    assert low.inverse() <= reverse.high
    assert reverse.low <= high.inverse()


@pytest.mark.parametrize(("epsilon", "budget", "size"), [(0.7, 1e-6, 3), (1.0, 0.0, 4), (0.1, 1e-3, 9), (0.0, 0.01, 5)])
def test_group_has_the_known_pair_of_epsilon_delta_and_no_worse_curve(epsilon, budget, size):
    low, high = group(EpsilonDelta(epsilon, budget), size)
    known = budget * sum(np.exp(step * epsilon) for step in range(size))  # δ (e^kε - 1)/(e^ε - 1)
    assert float(low.delta(size * epsilon)) == pytest.approx(known, rel=1e-7, abs=1e-13)
    assert float(high.delta(size * epsilon)) == pytest.approx(known, rel=1e-7, abs=1e-13)
    assert EpsilonDelta(size * epsilon, known + 1e-13) <= low  # the pair alone says less


def test_group_of_many_with_little_epsilon_each_tends_to_laplace_noise():
    low, high = group(EpsilonDelta(1 / 400), 400)
    np.testing.assert_allclose(low(ALPHA), Laplace(1.0)(ALPHA), atol=2e-6)
    np.testing.assert_allclose(high(ALPHA), Laplace(1.0)(ALPHA), atol=2e-6)


def test_bounds_of_a_group_are_rounded_outwards():
    """Against exact fractions; at its corners, where rounding shows."""
    f = PiecewiseLinear(np.array([0, 0.3, 0.9]), np.array([0.99, 0.55, 0.0]))
    corners = [[Fraction(value) for value in side] for side in f.corners]

    def exact(alpha):
        for a, b, c, d in zip(corners[0], corners[0][1:], corners[1], corners[1][1:], strict=False):
            if alpha <= b:
                return c + (d - c) * (alpha - a) / (b - a)
        return Fraction(0)

    for size, (side, sign) in product(range(2, 7), enumerate((1, -1))):
        alpha, beta = group(f, size)[side].corners or ((), ())
        assert len(alpha) > 1
        for false_alarms, missed in zip(alpha, beta, strict=True):
            rate = Fraction(false_alarms)
            for _ in range(size):
                rate = 1 - exact(rate)
            assert 0 <= sign * (1 - rate - Fraction(missed)) <= 2 * SLACK * 2.0**size  # slopes of f are below 2


def test_group_of_one_or_of_no_release_is_unchanged():
    f = PiecewiseLinear(np.array([0, 0.5]), np.array([0.5, 0]))
    assert group(f, 1) == (f, f)
    assert group(IDENTITY, 1000) == (IDENTITY, IDENTITY)


def test_group_of_a_release_of_everything_has_no_privacy_left():
    low, high = group(EpsilonDelta(0.0, 0.6), 3)  # 0.6 + 0.6 > 1: two of them are always noticed
    assert float(low(0.0)) == 0
    assert float(high(0.0)) <= 2 * SLACK
    assert float(low.delta(5.0)) == 1


def test_group_of_a_training_is_no_less_than_pricing_every_example_of_a_person():
    one = of_profile(privacy.compose([(privacy.SubsampledGaussian(1.0, 0.01), 1000)]), pieces=64)["symmetrized"].low
    four = of_profile(privacy.compose([(privacy.SubsampledGroup(1.0, 0.01, 4), 1000)]), pieces=64)["symmetrized"].high
    assert group(one, 4).low <= four


def test_group_of_a_composition_is_the_composition_of_groups_of_gaussians():
    together = group(tensor(Gaussian(0.3), Gaussian(0.4)).low, 3).low
    apart = tensor(group(Gaussian(0.3), 3).low, group(Gaussian(0.4), 3).low).low
    np.testing.assert_allclose(together(ALPHA), apart(ALPHA), atol=1e-13)


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_group_refuses_a_size_below_one(size):
    with pytest.raises(ValueError, match=r"tradeoff\.group: size="):
        group(Gaussian(1.0), size)
