# SPDX-License-Identifier: Apache-2.0
"""Pairs chosen step by step: exhaustive search of small games, and the family that covers batches of fixed size."""

import math
from functools import cache

import numpy as np
import pytest
from scipy.stats import norm

from torch_privacy import privacy
from torch_privacy.privacy.engines.adaptive import AdaptiveCurve
from torch_privacy.privacy.engines.dispatch import curves
from torch_privacy.privacy.pairs.discrete import DiscretePair
from torch_privacy.privacy.pairs.fixed_size import family
from torch_privacy.privacy.pairs.shifted import GaussianNoise, sampled

GAMES = {
    "one": (DiscretePair((0.6, 0.4), (0.4, 0.6)),),
    "two": (DiscretePair((0.5, 0.3, 0.2), (0.3, 0.3, 0.4)), DiscretePair((0.9, 0.1), (0.75, 0.25))),
    "revealing": (DiscretePair((0.55, 0.35, 0.1), (0.6, 0.4, 0.0)), DiscretePair((0.7, 0.3), (0.5, 0.5))),
}


def game(pairs, count, epsilon):
    """The value by the definition: the best pair for each rest of ε, over all results."""

    @cache
    def value(left, rest):
        if not left:
            return max(-math.expm1(rest), 0.0)
        return max(
            sum(
                p * (value(left - 1, rest - math.log(p / q)) if q else 1.0) for p, q in zip(pair.p, pair.q, strict=True)
            )
            for pair in pairs
        )

    return value(count, epsilon)


@pytest.mark.parametrize("name", GAMES)
def test_adaptive_curve_encloses_the_value_of_small_games(name):
    pairs, count = GAMES[name], 6
    rough = curves([(DiscretePair((0.9, 0.1), (0.1, 0.9)), count)])[0]
    curve = AdaptiveCurve(pairs, count, rough)
    for epsilon in (-1.0, -0.2, 0.0, 0.3, 1.0, 1.7):
        truth = game(pairs, count, epsilon)
        assert truth <= curve.delta(epsilon).high <= truth + 0.01


def triple_sticks(points, shift, q, epsilons):
    """δ of (1 - q) N(v) + q N(x) against (1 - q) N(v) + q N(y), by quadrature in the plane."""
    x = np.linspace(-7, 7, 401)
    first, second = np.meshgrid(x, x, indexing="ij")
    v, a, b = (norm.pdf(first, *(shift * p[:1]), 1) * norm.pdf(second, *(shift * p[1:]), 1) for p in points)
    p, other = (1 - q) * v + q * a, (1 - q) * v + q * b
    return [np.maximum(p - np.exp(epsilon) * other, 0).sum() * (x[1] - x[0]) ** 2 for epsilon in epsilons]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("shift", [0.5, 1.5, 3.0])
def test_some_pair_of_the_family_dominates_each_three_values_in_a_ball(shift):
    q, generator = 0.1, np.random.default_rng(3)
    epsilons = np.array([-0.3, -0.1, -0.02, 0.0, 0.02, 0.1, 0.3])
    angles = np.pi * np.array([[0, 1, 1], [1, 0, 1], [0, 1, 0.5], [0, 2 / 3, 4 / 3], [0.5, 0, 1], [0.3, 0, 1]])
    circle = [np.stack([np.cos(angle), np.sin(angle)], 1) / 2 for angle in angles]
    inside = [p / np.linalg.norm(p, axis=1, keepdims=True) / 2 * generator.random((3, 1)) ** 0.5
              for p in generator.standard_normal((4, 3, 2))]  # fmt: skip
    tails = [pair.tails(epsilons, swapped=False) for pair in family(shift, q)]
    known = np.array([gain - loss for gain, loss, _ in tails])
    for points in circle + inside:
        found = np.array(triple_sticks(points, shift, q, epsilons))
        assert (found <= known + 1e-5).all(1).any()


@pytest.mark.thorough
def test_steps_on_fixed_batches_cost_between_what_is_attained_and_the_symmetrized_curve():
    event = privacy.FixedSizeGaussian(1.0, 0.05)
    bounds = event.dominating_pair()
    low, high = privacy.compose([(event, 60)]).epsilon(1e-5)
    (rough,) = curves([(bounds.upper, 60)])
    assert low < high < 0.6 * rough.epsilon_high(1e-5) + 0.4 * low
    assert privacy.compose([(event, 60)]).epsilon_high(1e-5) == high
    attained = [sampled(GaussianNoise(), 1.0, 0.05, replaced=False).lower[0]]
    attained.append(DiscretePair(attained[0].q, attained[0].p))  # data sets attain both orders, chosen step by step
    assert low < AdaptiveCurve(attained, 60, rough).epsilon_high(1e-5) < high


def test_no_choice_is_plain_composition():
    pair = privacy.FixedSizeGaussian(1.0, 0.05).dominating_pair().upper
    (exact,) = curves([(pair, 60)])
    for delta in (1e-2, 1e-5):
        low, high = exact.epsilon(delta)
        assert low <= AdaptiveCurve((pair,), 60, exact).epsilon_high(delta) < 1.02 * high
