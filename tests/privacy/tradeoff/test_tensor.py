# SPDX-License-Identifier: Apache-2.0
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from tradeoff_cases import ALPHA, SIMPLE, dirichlet

from torch_privacy import privacy
from torch_privacy.privacy.tradeoff import (
    IDENTITY,
    JL,
    EpsilonDelta,
    Gaussian,
    Laplace,
    PiecewiseLinear,
    TradeOff,
    compare,
    enclosed,
    from_bounds,
    of_profile,
    subsampled,
    symmetrized,
    tensor,
)


class Unknown(TradeOff):
    """A trade-off function whose closed form is hidden from the tensor product."""

    def __init__(self, f):
        self.f = f

    def at(self, alpha):
        return self.f(alpha)

    def delta(self, epsilon):
        return self.f.delta(epsilon)

    def inverse(self):
        return Unknown(self.f.inverse())


def assert_overlap(left, right):
    assert (left.low(ALPHA) <= right.high(ALPHA) + 1e-12).all()
    assert (right.low(ALPHA) <= left.high(ALPHA) + 1e-12).all()


@given(st.one_of(SIMPLE, st.builds(subsampled, SIMPLE, st.floats(1e-3, 1))))
def test_enclosed_lies_below_and_above(f):
    low, high = enclosed(Unknown(f), 128)
    assert compare(low, f).holds
    assert compare(f, high).holds
    assert (high(ALPHA) - low(ALPHA)).mean() < 5e-3


@pytest.mark.parametrize("f", [Gaussian(1.0), Laplace(2.0), subsampled(Gaussian(2.0), 0.1), JL(1.0, 16)], ids=repr)
def test_enclosed_closes_with_the_square_of_the_pieces(f):
    gaps = [float((high(ALPHA) - low(ALPHA)).mean()) for low, high in (enclosed(f, 64), enclosed(f, 512))]
    assert gaps[1] < gaps[0] / 20


@pytest.mark.thorough
@given(st.lists(st.floats(0.1, 3), min_size=2, max_size=4))
def test_tensor_of_gaussians_is_or_encloses_a_gaussian(mus):
    exact = Gaussian(float(np.hypot.reduce(mus)))
    known = tensor(*map(Gaussian, mus))
    assert known.low is known.high
    assert known.low.mu == pytest.approx(exact.mu, rel=1e-14)
    low, high = tensor(*(Unknown(Gaussian(mu)) for mu in mus))
    assert compare(low, exact).holds
    assert compare(exact, high).holds
    assert (high(ALPHA) - low(ALPHA)).max() < 2e-3


@given(SIMPLE, SIMPLE)
def test_tensor_commutes_and_is_below_its_factors(f, g):
    one, other = tensor(f, g), tensor(g, f)
    assert_overlap(one, other)
    for factor in (f, g):
        assert compare(one.low, factor).holds


@given(st.tuples(*[st.integers(0, 10**6)] * 3))
def test_tensor_of_discrete_distributions_is_exact_and_associative(seeds):
    f, g, h = (dirichlet(seed, 4) for seed in seeds)
    pairs = [np.random.default_rng(seed).dirichlet(np.ones(4), 2) for seed in seeds]
    q, p = (np.array([np.prod(masses) for masses in product(*side)]) for side in zip(*pairs, strict=True))
    exact = PiecewiseLinear.from_masses(q, p)
    for bracket in (tensor(f, g, h), tensor(f, tensor(g, h).low), tensor(tensor(f, g).low, h)):
        np.testing.assert_allclose(bracket.low(ALPHA), exact(ALPHA), atol=1e-13)
        np.testing.assert_allclose(bracket.high(ALPHA), exact(ALPHA), atol=1e-13)


@pytest.mark.thorough
@given(SIMPLE, SIMPLE, SIMPLE)
def test_tensor_associates(f, g, h):
    left, right = tensor(f, g, pieces=128), tensor(g, h, pieces=128)
    one = [tensor(side, h, pieces=128) for side in left]
    other = [tensor(f, side, pieces=128) for side in right]
    assert_overlap(privacy.Bracket(one[0].low, one[1].high), privacy.Bracket(other[0].low, other[1].high))
    assert np.abs(one[0].low(ALPHA) - other[1].high(ALPHA)).mean() < 0.02


@given(SIMPLE)
def test_blind_guessing_is_the_unit(f):
    assert tensor(f, IDENTITY).low == f
    assert tensor(f).high == f
    assert tensor().low is IDENTITY
    by_hand = tensor(Unknown(f), PiecewiseLinear(np.array([0.0, 1.0]), np.array([1.0, 0.0])))
    assert compare(by_hand.low, f).holds
    assert compare(f, by_hand.high).holds


@pytest.mark.parametrize("count", [3, 12])
def test_tensor_of_randomized_responses_is_binomial(count):
    epsilon = 0.4
    rate = 1 / (1 + np.exp(epsilon))
    low, high = tensor(*[EpsilonDelta(epsilon)] * count)
    outcomes = np.arange(count + 1)
    exact = PiecewiseLinear.from_masses(binom.pmf(outcomes, count, rate), binom.pmf(outcomes, count, 1 - rate))
    for bound in (low, high):
        np.testing.assert_allclose(bound(ALPHA), exact(ALPHA), atol=1e-13)


@given(SIMPLE, SIMPLE, st.integers(0, 10**6))
def test_tensor_keeps_order(f, g, seed):
    coarser = enclosed(f, 16).low  # below f
    assert compare(tensor(coarser, g).low, tensor(f, g).high).holds


@pytest.mark.parametrize("num_steps", [1, 3])
def test_tensor_of_sampled_steps_agrees_with_the_composition(num_steps):
    step = subsampled(Gaussian(1.0), 0.1)
    low, high = tensor(*[step] * num_steps)
    profile = privacy.compose([(privacy.SubsampledGaussian(1.0, 0.1), num_steps)])
    both = [symmetrized(bound) for bound in (low, high)]
    certified = profile.tradeoff(ALPHA)
    assert (both[0](ALPHA) <= certified.high + 1e-12).all()
    assert (certified.low <= both[1](ALPHA) + 1e-12).all()
    assert float(np.max(np.abs(both[0](ALPHA) - certified.low))) < 2e-3


@pytest.mark.parametrize(("epsilon", "count"), [(50.0, 20), (100.0, 8), (20.0, 40)])
def test_tensor_with_ratios_beyond_floating_point_encloses_the_sum_of_losses(epsilon, count):
    low, high = tensor(*[Laplace(epsilon)] * count, pieces=48)
    rates = np.array([0.0, 1e-300, 1e-200, 1e-20, 0.5, 1.0])
    assert (low(rates) <= high(rates) + 1e-13).all()
    for loss in (0.0, 0.98 * epsilon, 0.98 * epsilon * count):  # the sum of losses has its median at about 0.96 of it
        assert low.delta(loss) >= privacy.compose([(privacy.Laplace(1 / epsilon), count)]).delta(loss).low - 1e-13


@pytest.mark.thorough
@given(SIMPLE, st.floats(0, 1e-3))
def test_curve_from_bounds_on_its_profile_encloses_it(f, error):
    generator = np.random.default_rng(0)

    def bracket_of(g):
        def bracket(epsilon):
            delta = float(g.delta(epsilon))
            return privacy.Bracket(
                max(delta - error * generator.random(), 0.0), min(delta + error * generator.random(), 1.0)
            )

        return bracket

    for g in (f, subsampled(f, 0.3)):
        low, high = from_bounds(bracket_of(g), bracket_of(g.inverse()))
        assert compare(low, g).holds
        assert compare(g, high).holds
    if error == 0:
        assert (high(ALPHA) - low(ALPHA)).mean() < 1e-2


@given(SIMPLE, st.lists(st.floats(0.1, 3), min_size=2, max_size=6))
def test_curve_from_a_few_thresholds_still_encloses(f, widths):
    def exact(g):
        return lambda epsilon: privacy.Bracket(float(g.delta(epsilon)), float(g.delta(epsilon)))

    for g in (f, subsampled(f, 0.3)):
        low, high = from_bounds(exact(g), exact(g.inverse()), np.cumsum([0.0, *widths]))
        assert compare(low, g).holds
        assert compare(g, high).holds


@pytest.mark.thorough
def test_curve_of_a_composition_lies_within_the_brackets_of_its_profile():
    profile = privacy.compose([(privacy.SubsampledGaussian(0.8, 0.02), 500)])
    low, high = of_profile(profile)["symmetrized"]
    assert low <= high
    at = profile.tradeoff(ALPHA)
    assert (low(ALPHA) <= at.high + 1e-12).all()
    assert (at.low <= high(ALPHA) + 1e-12).all()
    for delta in (1e-3, 1e-6):
        certified = profile.epsilon(delta)
        assert low.delta(certified.low) >= delta * (1 - 1e-6)
        assert high.delta(certified.high) <= delta * (1 + 1e-6)


@pytest.mark.thorough
def test_directions_are_inverse_and_above_the_symmetrized_curve():
    curves = of_profile(privacy.compose([(privacy.SubsampledGaussian(0.8, 0.02), 500)]))
    remove, add, both = curves["remove"], curves["add"], curves["symmetrized"]
    for one, other in ((remove, add), (add, remove)):
        np.testing.assert_allclose(one.low(ALPHA), other.low.inverse()(ALPHA), atol=1e-9)
        assert both.low <= one.high
    for side in ("low", "high"):
        hull = symmetrized(getattr(remove, side))
        np.testing.assert_allclose(getattr(both, side)(ALPHA), hull(ALPHA), atol=1e-3)


def test_directions_of_one_step_enclose_its_closed_form():
    exact = subsampled(Gaussian(1.0), 0.1)
    curves = of_profile(privacy.compose([(privacy.SubsampledGaussian(1.0, 0.1), 1)]))
    for name, f in {"remove": exact, "add": exact.inverse(), "symmetrized": symmetrized(exact)}.items():
        assert compare(curves[name].low, f).excess < 1e-11
        assert compare(f, curves[name].high).excess < 1e-11
        assert (curves[name].high(ALPHA) - curves[name].low(ALPHA)).max() < 0.01


def test_both_directions_of_full_batches_are_one():
    curves = of_profile(privacy.compose([(privacy.Gaussian(2.0), 4)]))
    assert curves.keys() == {"symmetrized"}
    assert curves["symmetrized"].low <= Gaussian(1.0) <= curves["symmetrized"].high


@pytest.mark.parametrize("thresholds", [[0, 1], [0.1, 1, 2], [0, 2, 1], [[0, 1, 2]]])
def test_thresholds_are_refused(thresholds):
    with pytest.raises(ValueError, match=r"from_bounds: thresholds must be three or more ascending numbers"):
        from_bounds(lambda epsilon: privacy.Bracket(0.0, 0.0), thresholds=thresholds)


@pytest.mark.parametrize("pieces", [0, 7, 100.5])
def test_pieces_are_refused(pieces):
    with pytest.raises(ValueError, match=r"tradeoff\.tensor: pieces="):
        tensor(Gaussian(1.0), Gaussian(1.0), pieces=pieces)
