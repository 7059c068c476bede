# SPDX-License-Identifier: Apache-2.0
"""Bounds on mixtures of shifted noise: exact pairs, direct sums over integers, and quadrature as witnesses."""

import numpy as np
import pytest

from torch_privacy.privacy.engines.dispatch import curves
from torch_privacy.privacy.pairs import shifted
from torch_privacy.privacy.pairs.base import PairBounds
from torch_privacy.privacy.pairs.gaussian import ReplaceOneGaussianPair, SubsampledGaussianPair

EPSILONS = (-2.0, -0.3, -1e-3, 0.0, 0.01, 0.3, 2.0)


def sides(pair):
    return (pair.upper, pair.lower[0]) if isinstance(pair, PairBounds) else (pair, pair)


def stick(pair, epsilon, swapped=False):
    tails = pair.tails(np.array(epsilon), swapped=swapped)
    return float(tails.gain - tails.loss)


@pytest.mark.parametrize("q", [1.0, 0.2, 1e-6])
@pytest.mark.parametrize("shift", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("replaced", [False, True])
def test_cells_of_a_gaussian_enclose_its_exact_pair(shift, q, replaced):
    exact = SubsampledGaussianPair(shift, q)
    if replaced and q < 1:
        exact = ReplaceOneGaussianPair(shift / 2, q)
    upper, lower = sides(shifted.sampled(shifted.GaussianNoise(), shift, q, replaced=replaced))
    for epsilon in EPSILONS:
        for swapped in (False, True):
            above, truth, below = (stick(pair, epsilon * q, swapped) for pair in (upper, exact, lower))
            error = 1e-14 + 1e-9 * truth
            assert below - error <= truth <= above + error
            assert above - below <= 1e-4 * truth + error


def test_many_steps_of_cells_enclose_those_of_the_exact_pair():
    enclosed = shifted.sampled(shifted.GaussianNoise(), 1.0, 0.01, replaced=False)
    (found,) = curves([(enclosed, 1000)])
    exact = curves([(SubsampledGaussianPair(1.0, 0.01), 1000)])[0].epsilon(1e-5)
    low, high = found.epsilon(1e-5)
    assert low < exact.low <= exact.high < high < low * (1 + 1e-4)


K = np.arange(-700, 701)
MASSES = {
    shifted.DiscreteLaplaceNoise(7.0): np.exp(-np.abs(K) / 7.0),
    shifted.DiscreteLaplaceNoise(0.5): np.exp(-np.abs(K) / 0.5),
    shifted.DiscreteGaussianNoise(7.0): np.exp(-((K / 7.0) ** 2) / 2),
    shifted.DiscreteGaussianNoise(0.4): np.exp(-((K / 0.4) ** 2) / 2),
}


@pytest.mark.parametrize("noise", MASSES, ids=repr)
def test_no_two_values_of_integers_are_told_apart_better_than_opposite_ones(noise):
    """The theorem on replaced examples, by sums over all integers, for all values; and the sums of the pair."""
    q, c, mass = 0.3, 3, MASSES[noise] / MASSES[noise].sum()

    def mixture(value):
        return (1 - q) * mass + q * np.roll(mass, value)

    upper, lower = sides(shifted.sampled(noise, 2 * c, q, replaced=True))
    for epsilon in EPSILONS:
        found = {
            (x, y): np.maximum(mixture(x) - np.exp(epsilon) * mixture(y), 0).sum()
            for x in range(-c, c + 1)
            for y in range(-c, c + 1)
        }
        assert max(found.values()) <= found[c, -c] + 1e-13
        assert stick(lower, epsilon) - 1e-13 <= found[c, -c] <= stick(upper, epsilon) + 1e-13
        assert stick(upper, epsilon) - stick(lower, epsilon) < 1e-12


@pytest.mark.parametrize("noise", MASSES, ids=repr)
@pytest.mark.parametrize("q", [1.0, 0.3])
def test_an_added_integer_costs_the_direct_sum(noise, q):
    mass = MASSES[noise] / MASSES[noise].sum()
    p = (1 - q) * mass + q * np.roll(mass, 5)
    for pair in sides(shifted.sampled(noise, 5, q, replaced=False)):
        for epsilon in EPSILONS:
            assert stick(pair, epsilon) == pytest.approx(np.maximum(p - np.exp(epsilon) * mass, 0).sum(), abs=1e-12)
            swapped = np.maximum(mass - np.exp(epsilon) * p, 0).sum()
            assert stick(pair, epsilon, True) == pytest.approx(swapped, abs=1e-12)


@pytest.mark.parametrize("kind", [shifted.DiscreteLaplaceNoise, shifted.DiscreteGaussianNoise])
def test_grouped_integers_enclose_the_direct_sum(kind):
    noise, q, change = kind(900.0), 0.3, 6000
    k = np.arange(-60_000, 60_001)
    mass = np.exp(noise.log_density(k))
    mass /= mass.sum()
    p = (1 - q) * mass + q * np.roll(mass, change)
    upper, lower = sides(shifted.sampled(noise, change, q, replaced=False))
    assert len(lower.p) < 1.1 * shifted.CELLS
    for epsilon in EPSILONS:
        truth = np.maximum(p - np.exp(epsilon) * mass, 0).sum()
        assert stick(lower, epsilon) - 1e-12 <= truth <= stick(upper, epsilon) + 1e-12
        assert stick(upper, epsilon) - stick(lower, epsilon) < 1e-4 * truth


@pytest.mark.parametrize("replaced", [False, True])
def test_sampled_laplace_agrees_with_quadrature(replaced):
    q, change, x = 0.2, 1.5, np.linspace(-40, 40, 200_001)

    def density(at):
        return (1 - q) * np.exp(-np.abs(x)) / 2 + q * np.exp(-np.abs(x - at)) / 2

    p, other = density(change / 2 if replaced else change), density(-change / 2 if replaced else 0.0)
    upper, lower = sides(shifted.sampled(shifted.LaplaceNoise(), change, q, replaced=replaced))
    for epsilon in EPSILONS:
        truth = np.trapezoid(np.maximum(p - np.exp(epsilon) * other, 0), x)
        assert stick(lower, epsilon) - 1e-6 <= truth <= stick(upper, epsilon) + 1e-6
        assert stick(upper, epsilon) - stick(lower, epsilon) < 1e-6


def test_outcomes_beyond_all_cells_are_kept():
    upper, _ = sides(shifted.sampled(shifted.GaussianNoise(), 8.0, 1.0, replaced=False))
    assert 0 < stick(SubsampledGaussianPair(8.0, 1.0), 140.0) < stick(upper, 140.0) < 1e-38
