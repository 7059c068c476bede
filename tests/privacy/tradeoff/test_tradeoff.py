# SPDX-License-Identifier: Apache-2.0
import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import chi2
from tradeoff_cases import ALPHA, ANY, EPSILON, PROBABILITY, SAMPLED, SIMPLE, SYMMETRIC

from torch_privacy.privacy.engines import lattice
from torch_privacy.privacy.pairs.gaussian import SubsampledGaussianPair
from torch_privacy.privacy.tradeoff import (
    IDENTITY,
    JL,
    EpsilonDelta,
    FromProfile,
    Gaussian,
    Laplace,
    PiecewiseLinear,
    Subsampled,
    advantage,
    bayes_accuracy,
    compare,
    double_conjugate,
    minimum,
    mu,
    posterior,
    subsampled,
    symmetrized,
    true_positive_rate,
)

MU = st.floats(1e-3, 8)


def assert_same(f, g, tolerance=1e-11):
    np.testing.assert_allclose(f(ALPHA), g(ALPHA), rtol=0, atol=tolerance)
    np.testing.assert_allclose(f.delta(EPSILON), g.delta(EPSILON), rtol=0, atol=tolerance)


@pytest.mark.thorough
@given(ANY)
def test_tradeoff_function_is_convex_nonincreasing_and_below_guessing(f):
    grid = np.linspace(0, 1, 201)
    beta = f(grid)
    assert (beta >= 0).all()
    assert (beta <= 1 - grid + 1e-14).all()
    assert (np.diff(beta) <= 1e-12).all()
    assert (np.diff(beta, 2) >= -3e-12).all()


@given(ANY)
def test_profile_falls_and_is_convex_in_the_likelihood_ratio(f):
    x = np.linspace(0.05, 20, 400)
    delta = f.delta(np.log(x))
    assert (delta >= np.maximum(1 - x, 0) - 1e-12).all()
    assert (np.diff(delta) <= 1e-12).all()
    assert (np.diff(delta, 2) >= -3e-12).all()


@pytest.mark.thorough
@given(ANY)
def test_profile_is_the_conjugate_of_the_tradeoff_function(f):
    grid = np.concatenate([[0.0], np.geomspace(1e-9, 1, 4001)])
    errors = f(grid)
    for epsilon in (-1.0, 0.0, 0.7, 3.0):
        by_hand = (1 - errors - np.exp(epsilon) * grid).max()
        assert by_hand <= f.delta(epsilon) + 1e-12
        assert by_hand == pytest.approx(f.delta(epsilon), abs=2e-3)  # the grid misses the best test


@pytest.mark.thorough
@given(ANY)
def test_duality_comes_back_to_where_it_began(f):
    back = FromProfile(f.delta, f.inverse().delta)
    np.testing.assert_allclose(back(ALPHA), f(ALPHA), rtol=0, atol=1e-11)
    assert (back(ALPHA) <= f(ALPHA) + 1e-13).all()


@pytest.mark.thorough
@given(ANY)
def test_inverse_swaps_the_errors_and_comes_back(f):
    g = f.inverse()
    beta = np.asarray(f(ALPHA))
    inner = (beta > 1e-9) & (beta < f(0.0) - 1e-9) & (ALPHA > 1e-6)
    assert (g(beta[inner]) <= ALPHA[inner] * (1 + 1e-4) + 1e-9).all()
    assert_same(g.inverse(), f)
    dual = 1 - np.exp(EPSILON) + np.exp(EPSILON) * f.delta(-EPSILON)
    np.testing.assert_allclose(g.delta(EPSILON), dual, atol=1e-14 * np.exp(EPSILON.max()))


@given(ANY)
def test_symmetrized_is_idempotent_symmetric_and_below_both_directions(f):
    both = symmetrized(f)
    assert_same(both, both.inverse())
    assert_same(symmetrized(both), both)
    assert both <= f
    assert both <= f.inverse()


@given(SIMPLE, PROBABILITY, PROBABILITY)
def test_sampling_twice_is_sampling_once(f, p, q):
    twice, once = subsampled(subsampled(f, p), q), subsampled(f, p * q)
    assert_same(twice, once)
    assert_same(twice.inverse(), once.inverse())
    assert subsampled(f, 1.0) is f
    assert f <= subsampled(f, p)
    assert_same(subsampled(IDENTITY, p), IDENTITY)


@pytest.mark.thorough
@given(SYMMETRIC, PROBABILITY)
def test_symmetrized_sampling_has_the_three_pieces_of_the_paper(f, q):
    # Dong et al.: f_q up to the fixed point x of f, f_q⁻¹ beyond f_q(x), a straight line of slope -1 in between
    price, sampled = symmetrized(subsampled(f, q)), Subsampled(f, q)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) > middle else (low, middle)
    at_fixed = float(sampled(low))
    left = ALPHA[ALPHA <= low]
    np.testing.assert_allclose(price(left), sampled(left), atol=1e-11)
    between = np.linspace(low, at_fixed, 7)
    np.testing.assert_allclose(price(between), low + at_fixed - between, atol=1e-11)


@pytest.mark.thorough
@given(SIMPLE, SIMPLE)
def test_minimum_is_the_largest_below_both(f, g):
    least = minimum(f, g)
    assert least <= f
    assert least <= g
    grid = np.linspace(0, 1, 201)
    by_hand = double_conjugate(lambda alpha: np.minimum(f(alpha), g(alpha)), points=2001)
    np.testing.assert_allclose(least(grid), by_hand(grid), atol=1e-3)
    assert (least(grid) <= by_hand(grid) + 1e-12).all()


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_post_processing_is_never_easier_to_attack(seed, kept):
    generator = np.random.default_rng(seed)
    q, p = generator.dirichlet(np.ones(6), 2)
    channel = generator.dirichlet(np.full(kept, 0.3), 6)  # outcome -> pair of what is shown
    shown = PiecewiseLinear.from_masses(q @ channel, p @ channel)
    result = compare(PiecewiseLinear.from_masses(q, p), shown)
    assert result.holds
    assert result.certified


@given(st.integers(0, 10**6))
def test_masses_give_the_best_of_all_deterministic_tests(seed):
    q, p = np.random.default_rng(seed).dirichlet(np.ones(6), 2)
    f = PiecewiseLinear.from_masses(q, p)
    tests = np.array(list(np.ndindex(*[2] * 6)), bool)
    alpha, beta = tests @ q, 1 - tests @ p
    assert (f(alpha) <= beta + 1e-12).all()
    corners = np.array(f.corners).T
    reached = np.abs(corners[:, None] - np.stack([alpha, beta], 1)).max(2).min(1)
    assert reached.max() < 1e-12
    for epsilon in (-0.5, 0.0, 1.0):
        assert f.delta(epsilon) == pytest.approx(np.maximum(p - np.exp(epsilon) * q, 0).sum(), abs=1e-14)


def test_masses_may_belong_to_one_law_alone():
    f = PiecewiseLinear.from_masses([0.0, 0.5, 0.5], [0.2, 0.8, 0.0])
    assert f(0.0) == pytest.approx(0.8)
    assert f(0.5) == 0
    assert f.inverse()(0.0) == 0.5
    assert f.delta(50.0) == pytest.approx(0.2)


@given(MU)
def test_gaussian_is_its_own_inverse(mu):
    alpha = np.linspace(0, 1, 201)[1:-1]
    f = Gaussian(mu)
    inner = f(alpha) > 1e-8
    np.testing.assert_allclose(f(f(alpha))[inner], alpha[inner], rtol=1e-6)


@given(MU, st.floats(-5, 20))
def test_gaussian_delta_matches_forty_digits(mu, epsilon):
    with mpmath.workdps(40):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        exact = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
    assert Gaussian(mu).delta(epsilon) == pytest.approx(float(exact), abs=1e-14, rel=1e-9)


@given(st.floats(0.05, 5))
def test_laplace_errors_are_those_of_thresholds(epsilon):
    # Laplace(0) against Laplace(ε) of scale 1, accepting below t
    for t in np.linspace(-3, 3 + epsilon, 23):
        alpha = np.exp(-t) / 2 if t >= 0 else 1 - np.exp(t) / 2
        beta = np.exp(t - epsilon) / 2 if t <= epsilon else 1 - np.exp(epsilon - t) / 2
        assert Laplace(epsilon)(alpha) == pytest.approx(beta, abs=1e-14)
    assert EpsilonDelta(epsilon) <= Laplace(epsilon)


@given(st.floats(0, 4), st.floats(0, 0.9))
def test_epsilon_delta_is_tight(epsilon, budget):
    f = EpsilonDelta(epsilon, budget)
    assert f.delta(epsilon) == pytest.approx(budget, abs=1e-14)
    assert_same(f, PiecewiseLinear(*f.corners))
    for other in (Gaussian(0.7), Laplace(0.9), JL(1.0, 8)):  # (ε, δ)-private means to lie above f_(ε, δ)
        assert (f <= other) == (other.delta(epsilon) <= budget)


@pytest.mark.parametrize("sigma", [0.5, 1.3])
@pytest.mark.parametrize("r", [1, 4, 30])
def test_jl_errors_and_profile_are_the_integrals_of_lemma_4_1(r, sigma):
    f = JL(sigma, r)

    def mean(of):
        def integrand(y):
            return of(np.exp(-y / 2) / sigma) * chi2.pdf(r * np.exp(y), r) * r * np.exp(y)

        return quad(integrand, -60 / r - 3, 4, epsabs=1e-13, limit=400)[0]

    for t in (-2.0, 0.0, 1.5, 6.0):
        alpha, beta = f.errors(t)
        assert alpha == pytest.approx(mean(lambda z, t=t: ndtr(-t / z - z / 2)), abs=1e-11)
        assert beta == pytest.approx(mean(lambda z, t=t: ndtr(t / z - z / 2)), abs=1e-11)
        assert f.delta(t) == pytest.approx(1 - beta - np.exp(t) * alpha, abs=1e-12)
        assert f(alpha) == pytest.approx(beta, abs=1e-12)


def test_jl_is_dearer_with_fewer_projections_and_tends_to_the_gaussian():
    for few, many in [(1, 2), (2, 8), (8, 32), (32, 256)]:
        assert JL(1.0, few) <= JL(1.0, many)
        assert not JL(1.0, many) <= JL(1.0, few)
    assert JL(1.0, 256) <= Gaussian(1.0)
    np.testing.assert_allclose(JL(1.0, 100_000)(ALPHA), Gaussian(1.0)(ALPHA), atol=1e-5)


@pytest.mark.thorough
@given(SIMPLE)
def test_questions_are_what_their_words_say(f):
    grid = np.linspace(0, 1, 20_001)
    beta = f(grid)
    assert advantage(f) == pytest.approx((1 - grid - beta).max(), abs=1e-3)
    assert (true_positive_rate(f, grid) == 1 - beta).all()
    for prior in (0.01, 0.3, 0.5, 0.9):
        error = (prior * beta + (1 - prior) * grid).min()
        assert bayes_accuracy(f, prior) == pytest.approx(1 - error, abs=1e-3)
        assert bayes_accuracy(f, prior) >= max(prior, 1 - prior) - 1e-12
        beliefs = [posterior(f, prior, alpha) for alpha in (0.001, 0.01, 0.1, 0.5)]
        assert (np.diff(beliefs) < 1e-12).all()
        assert all(belief >= prior - 1e-12 for belief in beliefs)


@given(st.floats(0.1, 6), st.floats(0.01, 0.99), st.floats(1e-3, 0.9))
def test_posterior_odds_of_pure_epsilon_rise_by_its_exponential_at_most(epsilon, prior, alpha):
    belief = posterior(EpsilonDelta(epsilon), prior, alpha)
    assert belief <= prior * np.exp(epsilon) / (prior * np.exp(epsilon) + 1 - prior) + 1e-12


@pytest.mark.thorough
@given(st.one_of(SIMPLE, SAMPLED))
def test_mu_is_the_smallest_gaussian_below(f):
    floor = 1e-4
    low, high = mu(f, floor)
    assert low <= high
    end = float(f.inverse()(floor))
    if end <= floor:
        assert low == np.inf
        return
    alpha = np.linspace(floor, end, 3001)
    beta = np.asarray(f(alpha))
    assert (Gaussian(max(high, 1e-9))(alpha) <= beta + 1e-12).all()
    if low > 1e-3 and np.isfinite(low):
        assert (
            Gaussian(low * 0.98)(np.append(alpha, np.geomspace(floor, end, 3001)))
            > f(np.append(alpha, np.geomspace(floor, end, 3001)))
        ).any()


def test_mu_of_a_subsampled_gaussian_tends_to_that_without_sampling():
    f = subsampled(Gaussian(1.0), 0.01)
    values = [mu(f, floor).high for floor in (1e-3, 1e-6, 1e-12)]
    assert values == sorted(values)
    assert values[0] < 0.05 < 0.3 < values[-1] < 1


EXTREME = [
    *(Gaussian(mu) for mu in (1e-6, 1e3)),
    *(Laplace(epsilon) for epsilon in (1e-9, 1e3)),
    *(EpsilonDelta(epsilon, budget) for epsilon in (0.0, 1e4) for budget in (0.0, 0.999)),
    *(JL(sigma, r) for sigma in (0.01, 1e3) for r in (1, 10_000)),
]


@pytest.mark.parametrize("f", EXTREME, ids=repr)
def test_extremes_are_answered_without_a_warning(f):
    epsilon = np.array([-2000.0, -50.0, 0.0, 50.0, 2000.0])
    for g in (f, subsampled(f, 1e-9), subsampled(f, 0.5).inverse(), symmetrized(subsampled(f, 0.5))):
        delta, beta = g.delta(epsilon), g(np.array([0.0, 1e-300, 0.5, 1.0]))
        assert ((delta >= 0) & (delta <= 1 + 1e-12)).all()
        assert (np.diff(delta) <= 1e-12).all()
        assert ((beta >= 0) & (beta <= 1)).all()
        assert beta[-1] == 0


def test_comparison_says_whether_it_is_certain():
    assert compare(EpsilonDelta(1.0), Laplace(1.0)) == (True, True, 0)
    holds, certified, excess = compare(Laplace(1.0), EpsilonDelta(1.0))
    assert (holds, certified) == (False, True)
    assert excess == pytest.approx(Laplace(1.0)(EpsilonDelta(1.0).corners[1][1]) - EpsilonDelta(1.0).corners[1][1])
    assert compare(Gaussian(2.0), Gaussian(1.0)) == (True, False, 0)
    assert Gaussian(1.0) >= Gaussian(2.0)
    assert not Gaussian(1.0) <= Laplace(1.0)  # they cross
    assert not Laplace(1.0) <= Gaussian(1.0)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_parameters_are_refused_by_name(value):
    for make in (Gaussian, Laplace, lambda v: JL(v, 3)):
        with pytest.raises(ValueError, match=r"tradeoff\.\w+: \w+="):
            make(value)
    if value != 0:
        with pytest.raises(ValueError, match=r"tradeoff\.EpsilonDelta: epsilon="):
            EpsilonDelta(value)
    with pytest.raises(ValueError, match="num_projections="):
        JL(1.0, 0)
    with pytest.raises(ValueError, match="probability="):
        subsampled(Gaussian(1.0), 1.5)


@pytest.mark.parametrize(
    ("alpha", "beta", "rule"),
    [
        ([0.1, 1], [0.9, 0], r"corner 0, .* must start at alpha = 0"),
        ([0, 1], [1, 0.1], r"corner 1, .* must end at beta = 0"),
        ([0, 0.5, 0.5], [0.9, 0.3, 0], r"corner 2, .* must have alpha rising"),
        ([0, 0.2, 0.5], [0.5, 0.5, 0], r"corner 1, .* must have beta falling"),
        ([0, 0.5, 0.8], [0.9, 0.6, 0], r"corner 1, .* must not lie above 1 - alpha"),
        ([0, 0.1, 0.8], [0.5, 0.45, 0], r"corner 1, .* must be convex"),
        ([0, float("nan")], [1, 0], r"corner 1, .* must have alpha rising"),
    ],
)
def test_corners_of_no_tradeoff_function_are_refused(alpha, beta, rule):
    with pytest.raises(ValueError, match=rule):
        PiecewiseLinear(np.array(alpha), np.array(beta))


@pytest.mark.parametrize("masses", [([0.5, 0.6], [0.5, 0.5]), ([0.5, 0.5], [-0.1, 1.1]), ([1.0], [0.5, 0.5])])
def test_masses_that_do_not_add_up_are_refused(masses):
    with pytest.raises(ValueError, match=r"PiecewiseLinear\.from_masses: with"):
        PiecewiseLinear.from_masses(*masses)


@given(st.integers(0, 10**6))
def test_losses_and_masses_are_the_same_pair(seed):
    q, p = np.random.default_rng(seed).dirichlet(np.ones(6), 2)
    assert_same(PiecewiseLinear.from_losses(np.log(p / q), p), PiecewiseLinear.from_masses(q, p))
    q, p = np.array([0.0, 0.5, 0.5]), np.array([0.2, 0.8, 0.0])
    assert_same(PiecewiseLinear.from_losses([np.log(1.6)], [0.8], at_infinity=0.2), PiecewiseLinear.from_masses(q, p))


@pytest.mark.parametrize(("losses", "masses"), [([0.0, 1.0], [1.0]), ([np.inf], [1.0]), ([-1.0], [1.0])])
def test_losses_of_no_law_are_refused(losses, masses):
    with pytest.raises(ValueError, match=r"PiecewiseLinear\.from_losses: losses must be finite"):
        PiecewiseLinear.from_losses(losses, masses)


def test_discretised_steps_lie_on_both_sides_of_the_true_curve():
    pair = SubsampledGaussianPair(1.0, 0.1)
    exact = subsampled(Gaussian(1.0), 0.1)
    below, above = (
        PiecewiseLinear.from_losses(side.losses, side.mass, 1 - side.mass.sum())
        for side in (lattice.pessimistic(pair, 0.05), lattice.optimistic(pair, 0.05))
    )
    assert below <= exact
    assert (exact(ALPHA) <= above(ALPHA) + 1e-9).all()
    assert (above(ALPHA) - below(ALPHA)).max() < 0.01


def test_errors_add_up_to_what_the_paper_says():
    # Bu et al. (2020): "type I + type II at least 77.6 %" for μ = 0.57
    assert 1 - advantage(Gaussian(0.57)) == pytest.approx(0.776, abs=5e-4)


@given(SIMPLE, PROBABILITY, st.floats(-3, 6))
def test_sampled_profile_is_that_of_thresholds(f, q, threshold):
    # a test that rejects where f's loss exceeds t: α as for f, β mixed; the best one at ε = log(1 - q + q e^t)
    sampled, epsilon = subsampled(f, q), np.log1p(q * np.expm1(threshold))
    grid = np.linspace(0, 1, 1001)
    mixed = q * np.asarray(f(grid)) + (1 - q) * (1 - grid)
    assert sampled.delta(epsilon) == pytest.approx(q * f.delta(threshold), rel=1e-6, abs=1e-12)
    assert (1 - mixed - np.exp(epsilon) * grid).max() <= sampled.delta(epsilon) + 1e-12
    np.testing.assert_allclose(sampled(grid), mixed, atol=1e-12)


@given(ANY, st.sampled_from([-0.1, 1.1, float("nan"), float("inf"), -1e-9, 1 + 1e-9]))
def test_rates_outside_0_to_1_are_refused(f, alpha):
    for hostile in (alpha, np.array([0.5, alpha])):
        with pytest.raises(ValueError, match=r"alpha=.* must lie in \[0, 1\]"):
            f(hostile)
        with pytest.raises(ValueError, match=r"alpha=.* must lie in \[0, 1\]"):
            true_positive_rate(f, hostile)
