# SPDX-License-Identifier: Apache-2.0
"""Far tails, underflow, pure DP, and events of which only upper bounds are known."""

import math

import mpmath
import numpy as np
import pytest
from drawn import draws
from hypothesis import given
from hypothesis import strategies as st

from torch_privacy import privacy
from torch_privacy.privacy import tradeoff
from torch_privacy.privacy.engines import contour, dispatch
from torch_privacy.privacy.engines.fft import LatticeEngine
from torch_privacy.privacy.pairs.gaussian import SubsampledGaussianPair
from torch_privacy.privacy.summary import equal_releases

PROFILE = privacy.KnownProfile


def exact_step(noise, r, q, epsilon):
    """δ(ε) of one step with estimated norms, by mpmath: the mean over χ²_r / r of Gaussian hockey sticks."""
    with mpmath.workdps(30):
        a, noise = mpmath.mpf(r) / 2, mpmath.mpf(noise)
        u = mpmath.log1p(mpmath.expm1(mpmath.mpf(epsilon)) / mpmath.mpf(q))

        def stick(s):
            z = 1 / (noise * mpmath.sqrt(s))
            return mpmath.ncdf(z / 2 - u / z) - mpmath.exp(u) * mpmath.ncdf(-z / 2 - u / z)

        def integrand(s):
            return a**a * s ** (a - 1) * mpmath.exp(-a * s) / mpmath.gamma(a) * stick(s)

        value = mpmath.quad(integrand, [8 * (mpmath.mpf(k) / 100) ** 2 for k in range(101)])
        return float(mpmath.mpf(q) * value)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("noise", "r", "q", "epsilon"), [(3.0, 64, 0.02, 6.0), (2.0, 128, 0.5, 5.0), (1.0, 16, 0.1, 2.0)]
)
def test_far_tails_with_estimated_norms_are_never_missed(noise, r, q, epsilon):
    exact = exact_step(noise, r, q, epsilon)
    low, high = privacy.compose([(privacy.SubsampledJL(noise, r, q), 1)]).directions["remove"].delta(epsilon)
    assert low <= exact * (1 + 1e-14)
    assert exact * (1 - 1e-14) <= high <= low * (1 + 1e-9)


@pytest.mark.parametrize(
    ("event", "count", "epsilon"),
    [
        (privacy.SubsampledGaussian(1.0, 0.5), 50, 1e5),
        (privacy.Gaussian(1.0), 1, 100.0),
        (privacy.Laplace(2.0), 10_000, 4999.0),
    ],
)
def test_delta_that_underflows_is_not_zero(event, count, epsilon):
    low, high = privacy.compose([(event, count)]).delta(epsilon)
    assert low == 0 < high < 1e-30


def test_delta_beyond_the_largest_loss_is_zero():
    for event, largest in ((privacy.Laplace(2.0), 0.5), (privacy.RandomizedResponse(1.5, 4), 1.5)):
        profile = privacy.compose([(event, 3)])
        assert profile.delta(3.1 * largest) == (0, 0)
        assert profile.delta(2.9 * largest).low > 0


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize(
    ("event", "epsilon"),
    [
        (privacy.Laplace(0.8), 1.25),
        (privacy.RandomizedResponse(1.5, 4), 1.5),
        (privacy.FinitePair((0.6, 0.4), (0.4, 0.6)), math.log(1.5)),
        (privacy.Gaussian(3.0), math.inf),
        (privacy.SubsampledGaussian(3.0, 0.1), math.inf),
        (privacy.FinitePair((0.9, 0.1), (1.0, 0.0)), math.inf),
    ],
)
def test_pure_dp_is_the_largest_loss(event, epsilon, count):
    profile = privacy.compose([(event, count)])
    low, high = profile.epsilon(0)
    assert profile.epsilon_high(0.0) == high
    assert low <= high
    if math.isfinite(epsilon):
        assert low == pytest.approx(count * epsilon, rel=1e-13)
        assert high == pytest.approx(count * epsilon, rel=1e-13)
        assert high >= count * epsilon * (1 - 1e-16)
    else:
        assert low == high == math.inf


@pytest.mark.parametrize(
    ("event", "epsilon"),
    [
        (privacy.RandomizedResponse(1e-9), 1e-9),
        (privacy.KnownProfile((1e-17,), (0.0,)), 1e-17),
        (privacy.PoissonSampled(privacy.Laplace(1e6), 0.5), math.log1p(0.5 * math.expm1(1e-6))),
        (privacy.PoissonSampled(privacy.DiscreteLaplace(1e6), 1e-3), math.log1p(1e-3 * math.expm1(1e-6))),
    ],
    ids=repr,
)
def test_pure_dp_of_a_tiny_loss_is_enclosed(event, epsilon):
    low, high = privacy.compose([(event, 1000)]).epsilon(0)
    assert low <= 1000 * epsilon * (1 + 1e-14)
    assert 1000 * epsilon * (1 - 1e-14) <= high < math.inf


@pytest.mark.thorough
@given(st.floats(0.01, 5), st.floats(1e-12, 0.1), st.integers(1, 5))
def test_known_guarantee_is_returned_at_its_own_delta(epsilon, delta, count):
    assert privacy.compose([(PROFILE((epsilon,), (delta,)), 1)]).epsilon(delta).high <= epsilon + 1e-13
    together = -math.expm1(count * math.log1p(-delta)) * (1 + 1e-13)
    assert privacy.compose([(PROFILE((epsilon,), (delta,)), count)]).epsilon(together).high <= count * epsilon + 1e-12
    assert privacy.compose([(PROFILE((epsilon,), (delta,)), count)]).epsilon(0).high == math.inf


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize(
    ("guarantees", "delta", "epsilon"),
    [
        ([(1.0, 0.1, 1), (2.0, 0.2, 1)], 0.28, 3.0),
        ([(1.0, 0.5, 2)], 0.75, 2.0),
        ([(0.5, 0.1, 3), (1.0, 1e-7, 2)], 1 - 0.9**3 * (1 - 1e-7) ** 2 + 1e-15, 3.5),
        ([(1e-3, 1e-300, 5)], 5.1e-300, 5e-3),
    ],
)
def test_infinite_losses_are_all_that_the_delta_of_their_own_mass_allows(guarantees, delta, epsilon):
    known = privacy.compose([(PROFILE((one,), (mass,)), count) for one, mass, count in guarantees])
    assert known.epsilon(delta).high == pytest.approx(epsilon, rel=1e-12)
    assert known.epsilon(0.97 * delta).high == math.inf


@pytest.mark.parametrize(("distribution", "multiple"), [("geometric", 3), ("logarithmic", 2), ("poisson", None)])
def test_the_best_of_pure_runs_is_pure(distribution, multiple):
    search = privacy.Repeated(((privacy.Laplace(10.0), 3),), 10.0, distribution)
    pure = privacy.compose([(search, 1)]).epsilon(0).high
    assert privacy.compose([(search, 1)]).epsilon(1e-14).high <= pure < math.inf
    if multiple is not None:
        assert pure <= multiple * 0.3 * (1 + 1e-12)
        assert privacy.compose([(search, 2)]).epsilon(0).high <= 2 * multiple * 0.3 * (1 + 1e-12)


def test_pure_guarantee_is_pure_dp():
    assert privacy.compose([(PROFILE((0.3,), (0.0,)), 4)]).epsilon(0) == pytest.approx((0.0, 1.2), rel=1e-14)


def test_delta_of_one_is_refused():
    for delta in (1.0, -1e-9, math.nan):
        with pytest.raises(ValueError, match="delta"):
            privacy.compose([(privacy.Laplace(1.0), 1)]).epsilon(delta)


@pytest.mark.thorough
@draws(20)
@given(st.lists(st.floats(0.1, 2.5), min_size=1, max_size=3), st.floats(1e-4, 0.5))
def test_tradeoff_of_known_guarantees_is_that_of_randomized_responses(epsilons, alpha):
    """The worst mechanism with (ε, 0) is randomized response, so the lower curve is that of their product."""
    profile = privacy.compose([(PROFILE((epsilon,), (0.0,)), 1) for epsilon in epsilons])
    odds = np.exp(epsilons)
    p, q = np.ones(1), np.ones(1)
    for odd in odds:
        p = np.outer(p, [odd / (1 + odd), 1 / (1 + odd)]).ravel()
        q = np.outer(q, [1 / (1 + odd), odd / (1 + odd)]).ravel()
    exact = float(tradeoff.PiecewiseLinear.from_masses(q, p)(alpha))
    low, high = profile.tradeoff(alpha)
    assert low <= exact + 1e-12
    assert low >= exact - 0.01
    assert high == pytest.approx(1 - alpha)


def test_tradeoff_with_infinite_losses_reaches_the_finite_ones():
    exact = tradeoff.EpsilonDelta(2.0, 1e-3)
    low = privacy.compose([(PROFILE((2.0,), (1e-3,)), 1)]).tradeoff(0.05).low
    assert float(exact(0.05)) - 0.01 <= low <= float(exact(0.05)) + 1e-12


@pytest.mark.thorough
@draws(6)
@given(st.integers(0, 1000), st.floats(-9, -2))
def test_grouping_many_different_steps_encloses_them(seed, log_delta):
    random = np.random.default_rng(seed)
    steps = [
        (SubsampledGaussianPair(float(shift), float(q)), int(count))
        for shift, q, count in zip(
            random.uniform(0.5, 1.0, 60),
            10 ** random.uniform(-2.5, -1.5, 60),
            random.integers(60, 100, 60),
            strict=True,
        )
    ]
    grouped = dispatch.grouped_gaussians(steps, 20)
    assert grouped is not None
    above, below = grouped
    assert len(above) <= 20 >= len(below)
    for side in grouped:
        assert sum(count for _, count in side) == sum(count for _, count in steps)
    for swapped in (False, True):
        exact = contour.curve(steps, swapped=swapped).epsilon(10**log_delta)
        assert contour.curve(above, swapped=swapped).epsilon(10**log_delta).high >= exact.low
        assert contour.curve(below, swapped=swapped).epsilon(10**log_delta).low <= exact.high
    assert dispatch.grouped_gaussians(steps, 60) is None


@pytest.mark.thorough
def test_two_thousand_different_steps_are_bracketed():
    events = [(privacy.SubsampledGaussian(1.0, 0.001 * (1 + i / 2000)), 1) for i in range(2000)]
    low, high = privacy.compose(events).epsilon(1e-5)
    for q, bound in ((0.001, low), (0.002, high)):
        alone = privacy.compose([(privacy.SubsampledGaussian(1.0, q), 2000)]).epsilon(1e-5)
        assert (alone.high <= bound) if q == 0.001 else (bound <= alone.low)
    assert low <= high <= low * 1.002


def exact_responses(epsilons, delta):
    """ε of randomized responses together, by enumerating their joint answers."""
    losses, p = np.zeros(1), np.ones(1)
    for epsilon in epsilons:
        true = 1 / (1 + np.exp(-epsilon))
        losses = np.add.outer(losses, [epsilon, -epsilon]).ravel()
        p = np.outer(p, [true, 1 - true]).ravel()
        losses, where = np.unique(np.round(losses, 9), return_inverse=True)
        p = np.bincount(where, p)
    low, high = 0.0, sum(epsilons)
    for _ in range(60):
        middle = (low + high) / 2
        enough = p @ np.maximum(-np.expm1(middle - losses), 0) <= delta
        low, high = (low, middle) if enough else (middle, high)
    return high


@pytest.mark.parametrize(
    ("epsilons", "width"),
    [([1.0] * 5, 1e-10), ([0.1] * 20, 1e-10), ([1.0] * 5 + [0.3] * 5, 1e-3), ([0.7] * 4 + [math.pi / 10] * 6, 1e-3)],
)
def test_randomized_responses_are_bracketed_narrowly(epsilons, width):
    exact = exact_responses(epsilons, 1e-5)
    low, high = privacy.compose([(privacy.RandomizedResponse(epsilon), 1) for epsilon in epsilons]).epsilon(1e-5)
    assert low <= exact * (1 + 1e-8)
    assert exact * (1 - 1e-8) <= high <= low * (1 + width)


@pytest.mark.parametrize(
    "events",
    [
        [(privacy.Laplace(2.0), 20)],
        [(privacy.Laplace(10.0), 20)],
        [(privacy.Laplace(2.0), 20), (privacy.Laplace(3.0), 10)],
        [
            (privacy.RandomizedResponse(1.0, 10, privacy.NeighboringRelation.ADD_OR_REMOVE_ONE), 5),
            (privacy.Laplace(2.0), 3),
        ],
    ],
)
def test_losses_with_atoms_are_bracketed_narrowly(events):
    low, high = privacy.compose(events).epsilon(1e-5)
    assert low <= high <= low * 1.001


@pytest.mark.parametrize(
    ("noise", "q", "epsilon"),
    [(0.3, 1e-7, 0.5), (0.3, 1e-7, 9.0), (0.3, 1e-5, 3.0), (1.28, 1e-7, 2e-6), (1.28, 5.6e-6, 1e-3), (0.5, 1e-4, 1e-3)],
)
def test_two_rare_samples_are_bracketed_by_one_integral(noise, q, epsilon):
    """δ of two steps is the mean of one step's closed form over the other's loss, by the trapezoid rule."""
    x = np.arange(-12, 14 + 1 / noise, 1e-3)
    u = x / noise - noise**-2 / 2
    loss = np.log1p(q * np.expm1(u))
    mass = np.exp(loss - x**2 / 2) * 1e-3 / np.sqrt(2 * np.pi)
    tails = SubsampledGaussianPair(1 / noise, q).tails(epsilon - loss, swapped=False)
    delta = float(mass @ (tails.gain - tails.loss))
    curve = LatticeEngine([(SubsampledGaussianPair(1 / noise, q), 2)]).curve(swapped=False)
    low, high = curve.epsilon(delta)
    assert low <= epsilon * (1 + 1e-6)
    assert epsilon * (1 - 1e-6) <= high <= low * 1.001


@pytest.mark.parametrize(
    ("noise", "q", "steps", "delta"),
    [(0.3, 1e-7, 56, 3.2e-9), (0.3, 1e-7, 177_828, 1e-15), (1.28, 5.6e-6, 10**7, 1e-15), (1.28, 1e-7, 3162, 3.2e-9)],
)
def test_rare_sampling_is_bracketed_narrowly(noise, q, steps, delta):
    profile = privacy.compose([(privacy.SubsampledGaussian(noise, q), steps)])
    low, high = profile.epsilon(delta)
    assert 0 < low <= high <= low * 1.001
    assert profile.epsilon_high(delta) == high


@pytest.mark.thorough
@pytest.mark.parametrize(("sigma", "q", "steps"), [(1.0, 0.01, 100), (20.0, 0.001, 1000)])
@pytest.mark.parametrize("delta", [1e-100, 1e-300])
def test_moments_bound_where_delta_is_tiny(sigma: float, q: float, steps: int, delta: float) -> None:
    profile = privacy.compose([(privacy.SubsampledGaussian(sigma, q), steps)])
    low, high = profile.epsilon(delta)
    assert low < high < 2.5 * low
    assert profile.epsilon_high(delta) == high
    assert high < 1.01 * privacy.moments_of(equal_releases(sigma, q, steps), delta)


def test_a_million_times_the_noise_needs_no_binomial_sum_of_a_billion_terms() -> None:
    low, high = privacy.compose([(privacy.SubsampledGaussian(1e6, 0.5), 100)]).epsilon(1e-30)
    assert 0 < low <= high < 1.000001 * low


def test_losses_beyond_floating_point_are_bounded() -> None:
    high = privacy.compose([(privacy.SubsampledGaussian(0.05, 0.3), 3)]).epsilon(1e-40).high
    assert 1_000 < high < 1_060  # 1 - Phi is 1e-40 at 13.3 deviations: 3 (20²) / 2 + 13.3 sqrt(3) 20 = 1,060


def test_one_rare_step_beside_ten_thousand_with_little_noise_is_priced() -> None:
    """The lattice begins with a spacing that is wider than all losses of the rare step."""
    steps = [(privacy.SubsampledGaussian(0.1, 1.0), 10_000), (privacy.SubsampledGaussian(1.0, 0.03), 1)]
    assert 1 - 1e-8 < privacy.compose(steps).delta(0.0).low <= 1


@pytest.mark.parametrize("q", [1e-6, 1e-4])
def test_losses_beyond_floating_point_beside_another_step_have_a_delta(q) -> None:
    """At a loss of 50 the rare step, which reveals its example, decides; the other one hardly adds to it."""
    both = privacy.compose([(privacy.SubsampledGaussian(0.06, q), 1), (privacy.Gaussian(1.0), 1)]).delta(50.0)
    alone = privacy.compose([(privacy.SubsampledGaussian(0.06, q), 1)]).delta(50.0)
    assert 0.999 * alone.low < both.low <= both.high < 1.001 * q


@pytest.mark.parametrize(("noise", "q"), [(0.03, 1.0), (0.01, 1.0), (0.02, 0.3)])
def test_hardly_any_noise_beside_another_mechanism_is_priced_in_parts(noise, q) -> None:
    other = privacy.Laplace(5.0)
    steps = (privacy.SubsampledGaussian(noise, q), 2)
    alone, both = (privacy.compose(events) for events in ([steps], [steps, (other, 1)]))
    rest = privacy.compose([(other, 1)]).epsilon_high(5e-6)
    assert alone.epsilon(1e-5).low <= both.epsilon(1e-5).high <= 1.001 * (alone.epsilon_high(5e-6) + rest)


@pytest.mark.parametrize(
    "event",
    [
        privacy.FinitePair((1.0, 0.0), (0.0, 1.0)),
        privacy.Repeated(((privacy.Gaussian(1.0), 1),), mean=3000),
    ],
    ids=["exact", "upper bound"],
)
def test_a_release_that_may_reveal_everything_has_an_infinite_epsilon_beside_others(event) -> None:
    for steps in ([(event, 2)], [(event, 1), (privacy.Gaussian(1.0), 1)], [(privacy.Laplace(1.0), 5), (event, 1)]):
        both, alone = privacy.compose(steps), privacy.compose([(event, 1)])
        assert both.epsilon(1e-5).high == math.inf
        assert both.delta(1.0).high == 1.0
        assert both.epsilon(1e-5).low >= alone.epsilon(1e-5).low
