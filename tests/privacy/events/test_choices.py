# SPDX-License-Identifier: Apache-2.0
"""Private selection: utilities enumerated, closed forms of single releases, and what a fixed list attains."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom

from torch_privacy import privacy
from torch_privacy.privacy.events.choices import range_pair

EPSILON = 1.2
TARGETS = np.array([0.0, 0.1, 0.4, 0.7, 1.1])


def exponential(utilities):
    weights = np.exp(EPSILON / 2 * np.array(utilities, float))
    return weights / weights.sum()


def flipped(utilities):
    """Permute-and-flip, by all orders: an option is taken if it passes its coin and no earlier one did."""
    chances = np.exp(EPSILON / 2 * (np.array(utilities, float) - max(utilities)))
    found = np.zeros(len(utilities))
    for order in itertools.permutations(range(len(utilities))):
        left = 1.0
        for option in order:
            found[option] += left * chances[option]
            left *= 1 - chances[option]
    return found / math.factorial(len(utilities))


def neighbors(monotonic):
    """Utilities of four options with every change by at most 1, in steps, and a few utilities to start from."""
    moves = (0, 1) if monotonic else (-1, 0, 1)
    for start in ((0, 0, 0, 0), (0, 0, 0, 2), (0, 1, 2, 3), (0, 0, 3, 3), (0, 5, 5, 5)):
        for move in itertools.product(moves, repeat=4):
            yield start, tuple(a + b for a, b in zip(start, move, strict=True))


KINDS = {
    "exponential": (privacy.ExponentialMechanism, exponential),
    "permute and flip": (privacy.PermuteAndFlip, flipped),
}


@pytest.mark.parametrize("monotonic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_selection_is_never_priced_below_any_utilities(kind, monotonic):
    event, probabilities = KINDS[kind]
    profile = privacy.compose([(event(EPSILON, monotonic), 1)])
    bounds = np.array([profile.delta(target) for target in TARGETS.tolist()])
    attained = np.zeros(len(TARGETS))
    for utilities, changed in neighbors(monotonic):
        pair = probabilities(utilities), probabilities(changed)
        for p, q in (pair, pair[::-1]):
            attained = np.maximum(attained, np.maximum(p - np.exp(TARGETS)[:, None] * q, 0).sum(1))
    assert (attained <= bounds[:, 1] + 1e-12).all()
    assert attained[0] > 0.6 * bounds[0, 1]  # four options come close
    assert (bounds[:, 0] <= bounds[:, 1]).all()


@pytest.mark.parametrize("monotonic", [False, True])
def test_one_exponential_mechanism_has_the_closed_form_which_some_utilities_attain(monotonic):
    width = EPSILON / 2 if monotonic else EPSILON
    profile = privacy.compose([(privacy.ExponentialMechanism(EPSILON, monotonic), 1)])
    for target in (TARGETS * width / EPSILON).tolist():
        closed = (math.exp(width / 2) - math.exp(target / 2)) ** 2 / math.expm1(width)
        assert closed <= profile.delta(target).high <= closed * 1.01 + 1e-6
        pair = range_pair((width + target) / 2, width)
        assert sum(max(p - math.exp(target) * q, 0) for p, q in zip(pair.p, pair.q, strict=True)) == pytest.approx(
            closed
        )


def test_lower_bound_of_permute_and_flip_is_attained_by_two_options():
    pair = privacy.PermuteAndFlip(EPSILON).dominating_pair().lower[0]
    assert pair.p == pytest.approx(flipped((0, 0)))
    assert pair.q == pytest.approx(flipped((-1, 1)))


@pytest.mark.parametrize("count", [4, 30])
def test_composed_exponential_mechanisms_cost_at_least_what_a_fixed_list_attains(count):
    """Dong, Durfee & Rogers: the worst list of two-valued mechanisms, all with the same largest loss t."""
    event, target = privacy.ExponentialMechanism(0.4), 0.4
    profile, wins = privacy.compose([(event, count)]), np.arange(count + 1)
    worst = 0.0
    for largest in np.linspace(0.01, 0.39, 77):
        pair = range_pair(largest, 0.4)
        losses = count * largest - 0.4 * (count - wins)
        worst = max(worst, binom.pmf(wins, count, pair.p[0]) @ np.maximum(-np.expm1(target - losses), 0))
    low, high = profile.delta(target)
    assert low <= worst * (1 + 1e-9) <= high
    pure = privacy.compose([(privacy.RandomizedResponse(0.4), count)]).delta(target)
    assert high < pure.low  # bounded range is worth something
