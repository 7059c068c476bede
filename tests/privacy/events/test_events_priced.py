# SPDX-License-Identifier: Apache-2.0
"""Every event type: the tables of accounting.md 4 to 7, closed forms, other accountants, and simulation."""

import json
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import geom, logser, norm, poisson

from torch_privacy import privacy
from torch_privacy.mechanisms.clipping import Flat
from torch_privacy.privacy import Gaussian, SubsampledGaussian, SubsampledGEP, SubsampledJL

MNIST, CIFAR, IMDB = 256 / 60000, 256 / 50000, 256 / 25000
REPLACE_ONE = privacy.NeighboringRelation.REPLACE_ONE
ZERO_OUT = privacy.NeighboringRelation.REPLACE_SPECIAL


def assert_digits(bracket, expected: str):
    """The bracket lies within half a unit of the last digit given (and a little for a table that truncated)."""
    unit = 10.0 ** -len(expected.partition(".")[2])
    assert bracket.low >= float(expected) - 0.75 * unit
    assert bracket.high <= float(expected) + 0.75 * unit


def assert_near(bracket, expected: str):
    """The bracket is narrow and has the value, as far as its digits go."""
    unit = 10.0 ** -len(expected.partition(".")[2])
    assert bracket.low - 0.75 * unit <= float(expected) <= bracket.high + 0.75 * unit
    assert bracket.high <= bracket.low * (1 + 2e-4)


def epsilon(event, count, delta=1e-5, method="auto"):
    return privacy.compose([(event, count)], method).epsilon(delta)


SETTINGS = {"MNIST": (1.3, MNIST, 3516), "CIFAR": (0.9, CIFAR, 3906), "IMDb": (0.6, IMDB, 1953)}
JL_TABLE = {  # projections -> remove and add for each setting
    8: (("15.7048", "1.0344"), ("39.5204", "2.4615"), ("96.548", "6.5235")),
    10: (("7.1475", ".9743"), ("19.6181", "2.3027"), ("50.760", "6.2500")),
    16: (("1.7300", ".8979"), ("6.9220", "2.0893"), ("22.212", "5.8337")),
    20: (("1.1384", ".8758"), ("4.9272", "2.0254"), ("18.048", "5.6951")),
    30: (("0.9545", ".8487"), ("3.2293", "1.9460"), ("14.341", "5.5120")),
    64: (("0.8973", ".8225"), ("2.4222", "1.8687"), ("11.715", "5.3210")),
    128: (("0.8800", ".8118"), ("2.2713", "1.8368"), ("10.831", "5.2383")),
}


@pytest.mark.thorough
@pytest.mark.parametrize("projections", JL_TABLE)
def test_jl_table_of_the_notes(projections):
    for (noise, q, steps), expected in zip(SETTINGS.values(), JL_TABLE[projections], strict=True):
        curves = privacy.compose([(SubsampledJL(noise, projections, q), steps)]).directions
        assert_near(curves["remove"].epsilon(1e-5), expected[0])
        assert_near(curves["add"].epsilon(1e-5), expected[1])


# A single projection is priced in tests/papers/test_claims.py.
FEW = {  # projections -> the notes' bounds in the remove direction, and add, for each setting
    3: (((3.98e3, 5.63e3), "1.7857"), ((1.09e4, 1.42e4), "4.0332"), ((2.54e4, 3.21e4), "8.4767")),
    5: (((131.1, 131.7), "1.2590"), ((313.6, 314.6), "2.9962"), ((717.5, 718.7), "7.3000")),
}


@pytest.mark.thorough
@pytest.mark.parametrize("projections", FEW)
def test_few_projections_match_the_bounds_of_the_notes(projections):
    settings = [*zip(SETTINGS.values(), FEW[projections], strict=True)]
    for (noise, q, steps), (remove, add) in settings if projections == 3 else settings[:1]:
        curves = privacy.compose([(SubsampledJL(noise, projections, q), steps)]).directions
        low, high = curves["remove"].epsilon(1e-5)
        assert low <= remove[1] * 1.001  # the notes give three digits
        assert high >= remove[0] * 0.999
        assert high <= low * 1.003
        low, high = curves["add"].epsilon(1e-5)
        assert low - 1e-4 <= float(add) <= high + 1e-4
        assert high <= low * 1.03


@pytest.mark.thorough
def test_eight_projections_match_the_lattice_of_the_notes():
    low, high = epsilon(SubsampledJL(1.0, 8, 0.01), 2000)
    assert 32.2954 <= low <= high <= 32.3005


def test_many_projections_approach_the_exact_norm_at_the_rate_of_the_notes():
    for projections, expected in ((100, "2.699840"), (1000, "2.594016"), (10_000, "2.584847"), (100_000, "2.583942")):
        assert_digits(epsilon(SubsampledJL(1.0, projections, 0.01), 2000), expected)
    assert_digits(epsilon(SubsampledJL(2.0, 64, 1e-3), 1_000_000), "2.192491")


GEP_TABLE = [
    (3.64, 1000 / 50000, 50 * 50, 1e-5, "1.5946"),
    (2.24, 1000 / 50000, 100 * 50, 1e-5, "4.4050"),
    (2.09, 1000 / 50000, 200 * 50, 1e-5, "7.2772"),
    (3.33, 1000 / 60000, 50 * 60, 1e-5, "1.6047"),
    (2.07, 1000 / 60000, 100 * 60, 1e-5, "4.4389"),
    (1.93, 1000 / 60000, 200 * 60, 1e-5, "7.3679"),
]


@pytest.mark.parametrize("row", GEP_TABLE, ids=str)
def test_gep_table_of_the_notes(row):
    noise, q, steps, delta, expected = row
    assert_digits(epsilon(SubsampledGEP(noise, q), steps, delta), expected)
    blocks = privacy.SubsampledBlocks((noise, noise), q)
    assert epsilon(blocks, steps, delta).high == pytest.approx(epsilon(SubsampledGEP(noise, q), steps, delta).high)


@pytest.mark.parametrize(("noise", "expected"), [(0.87, 3.0606), (0.65, 10.5511), (0.60, 18.4379)])
def test_gep_on_svhn_costs_more_than_was_claimed(noise, expected):
    epochs = {0.87: 5, 0.65: 10, 0.60: 20}[noise]
    q = 1000 / 604388
    low, high = epsilon(SubsampledGEP(noise, q), int(epochs / q), 1e-6)
    assert low == pytest.approx(expected, rel=1e-3)  # the notes do not say how they rounded the steps
    assert high == pytest.approx(expected, rel=1e-3)


GEP_NEEDS = [  # noise per part, batch, examples, epochs, delta, epsilon that it is just enough for
    (3.0307, 1000, 50_000, 50, 1e-5, 2.0),
    (2.0534, 1000, 50_000, 100, 1e-5, 5.0),
    (1.9647, 1000, 50_000, 200, 1e-5, 8.0),
    (2.7952, 1000, 60_000, 50, 1e-5, 2.0),
    (1.9128, 1000, 60_000, 100, 1e-5, 5.0),
    (1.8326, 1000, 60_000, 200, 1e-5, 8.0),
    (0.9688, 1000, 604_388, 5, 1e-6, 2.0),
    (0.7933, 1000, 604_388, 10, 1e-6, 5.0),
    (0.7400, 1000, 604_388, 20, 1e-6, 8.0),
]


@pytest.mark.parametrize("row", GEP_NEEDS, ids=str)
def test_gep_needs_the_noise_of_the_notes(row):
    noise, batch, examples, epochs, delta, target = row
    steps = epochs * examples // batch
    less, more = (epsilon(SubsampledGEP(noise + x, batch / examples), steps, delta).high for x in (-6e-5, 6e-5))
    assert less > target > more


@pytest.mark.parametrize(("embedding", "residual"), [(2.752, 1.073), (2**0.5, 2**0.5)])
def test_blocks_of_unequal_noise_are_one_gaussian_as_in_the_notes(embedding, residual):
    blocks, whole = privacy.SubsampledBlocks((2 * embedding, 2 * residual), 0.01), SubsampledGaussian(2.0, 0.01)
    assert epsilon(blocks, 2000).high == pytest.approx(epsilon(whole, 2000).high, rel=1e-3)


INFLATION = [(8, 2.602), (16, 1.339), (32, 1.089), (64, 1.035), (128, 1.016), (256, 1.008)]


@pytest.mark.thorough
@pytest.mark.parametrize(("projections", "noise"), INFLATION)
def test_estimated_norms_need_the_noise_of_the_notes(projections, noise):
    exact = epsilon(SubsampledGaussian(1.0, 0.01), 2000).high
    less, more = (epsilon(SubsampledJL(noise + x, projections, 0.01), 2000).high for x in (-6e-4, 6e-4))
    assert less > exact > more


WITHOUT_REPLACEMENT = [  # noise over clip norm, q, steps, Poisson add/remove, Poisson replace-one, fixed size
    (1.0, MNIST, 10_000, "2.3451", "3.9798", ("17.7241", "21.4318")),
    pytest.param((1.3, MNIST, 3516, "0.8645", "1.5555", ("4.3568", "5.0872")), marks=pytest.mark.thorough),
    (2.0, MNIST, 10_000, "0.8438", "1.6790", ("2.3451", "3.0302")),
    (4.0, 0.01, 10_000, "0.9469", "1.9931", ("2.1627", "2.5616")),
    pytest.param((2.0, 0.02, 2500, "2.1845", "4.3897", ("6.3451", "7.9872")), marks=pytest.mark.thorough),
]


@pytest.mark.parametrize("row", WITHOUT_REPLACEMENT, ids=str)
def test_relations_and_fixed_sizes_match_the_table_of_the_notes(row):
    noise, q, steps, add_remove, replace, (low, high) = row
    assert_digits(epsilon(SubsampledGaussian(noise, q), steps), add_remove)
    assert_digits(epsilon(SubsampledGaussian(noise, q, ZERO_OUT), steps), add_remove)
    assert_digits(epsilon(SubsampledGaussian(noise / 2, q, REPLACE_ONE), steps), replace)
    fixed = epsilon(privacy.FixedSizeGaussian(noise / 2, q), steps)
    assert fixed.low == pytest.approx(float(low), abs=1e-4)
    if steps > 4000:  # of fewer, pairs that are chosen step by step have a smaller bound
        assert fixed.high == pytest.approx(float(high), abs=1e-4)
    else:
        assert float(low) < fixed.high < 0.95 * float(high)


def test_whole_batches_cost_the_same_under_every_relation():
    expected = epsilon(Gaussian(3.0), 7)
    for relation in privacy.NeighboringRelation:
        assert epsilon(Gaussian(3.0, relation), 7) == expected
        assert epsilon(SubsampledGaussian(3.0, 1.0, relation), 7) == expected
    assert epsilon(privacy.FixedSizeGaussian(3.0, 1.0), 7) == expected


def test_adaptive_clipping_is_one_release_with_its_count():
    joint = privacy.SubsampledBlocks((1.2, 3.0), 0.01)  # sum and count
    alone = SubsampledGaussian((1.2**-2 + 3.0**-2) ** -0.5, 0.01)
    assert epsilon(joint, 500).high == pytest.approx(epsilon(alone, 500).high, rel=1e-9)
    apart = privacy.compose([(SubsampledGaussian(1.2, 0.01), 500), (SubsampledGaussian(3.0, 0.01), 500)])
    assert epsilon(joint, 500).low > apart.epsilon(1e-5).high  # two samples of their own would seem cheaper


def test_covariance_is_one_gaussian():
    assert epsilon(privacy.NoisyCovariance(4.0), 1) == epsilon(Gaussian(4.0), 1)
    assert epsilon(privacy.NoisyCovariance(4.0, 0.1), 9) == epsilon(SubsampledGaussian(4.0, 0.1), 9)


COUNTS = {
    "Laplace": (privacy.Laplace(5.0), lambda: pld.from_laplace_mechanism(5.0)),
    "response": (privacy.RandomizedResponse(0.3), lambda: pld.from_randomized_response(2 / (np.exp(0.3) + 1), 2)),
    "answers": (privacy.RandomizedResponse(0.3, 5), lambda: pld.from_randomized_response(5 / (np.exp(0.3) + 4), 5)),
    "integer": (privacy.DiscreteLaplace(10.0, 3), lambda: pld.from_discrete_laplace_mechanism(0.1, 3)),
    "rounded": (privacy.DiscreteGaussian(10.0, 3), lambda: pld.from_discrete_gaussian_mechanism(10.0, 3)),
    "sampled": (
        privacy.PoissonSampled(privacy.Laplace(1.0), 0.2),
        lambda: pld.from_laplace_mechanism(1.0, sampling_prob=0.2),
    ),
    "mixture": (
        privacy.GaussianMixture(2.0, (0.0, 0.5, 1.0), (0.5, 0.3, 0.2)),
        lambda: pld.from_mixture_gaussian_mechanism(
            2.0, (0.0, 0.5, 1.0), (0.5, 0.3, 0.2), value_discretization_interval=5e-3
        ),
    ),
}


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("case", COUNTS)
@pytest.mark.parametrize("count", [1, 30])
def test_counts_agree_with_another_accountant(case, count):
    event, witness = COUNTS[case]
    above = witness().self_compose(count)
    profile = privacy.compose([(event, count)])
    for target in (0.1, 0.5):
        low, high = profile.delta(target * count**0.5)
        truth = above.get_delta_for_epsilon(target * count**0.5)
        assert low <= truth + 1e-12
        assert high == pytest.approx(truth, rel=4e-3, abs=1e-9)
        assert low >= high * 0.99 - 1e-12


def test_small_releases_join_a_training_run_without_loss():
    events = [(privacy.Laplace(5.0), 1), (SubsampledGaussian(1.0, 0.01), 1000)]
    contour_like = privacy.compose(events).epsilon(1e-5)
    assert epsilon(SubsampledGaussian(1.0, 0.01), 1000).high < contour_like.low <= contour_like.high
    assert contour_like.high - contour_like.low < 1e-4


def test_known_profile_of_pure_privacy_is_randomized_response():
    known, coin = privacy.KnownProfile((0.1,), (0.0,)), privacy.RandomizedResponse(0.1)
    assert epsilon(known, 20).low == 0
    assert epsilon(known, 20).high == pytest.approx(epsilon(coin, 20).high, rel=1e-9)


@pytest.mark.parametrize("clip_norm", [0.5, 3.0])
@pytest.mark.parametrize("q", [0.1, 1.0])
def test_replace_one_noise_multiplier_is_over_twice_the_clip_norm(clip_norm, q):
    """The pair that replacing an example realises: its clipped value C becomes -C. Noise over C would understate it."""
    stddev, target = 1.5 * clip_norm, 0.4
    x = np.linspace(-12 * stddev, 12 * stddev, 200_001)

    def density(value):
        return (1 - q) * norm.pdf(x, 0, stddev) + q * norm.pdf(x, value, stddev)

    exact = np.maximum(density(clip_norm) - np.exp(target) * density(-clip_norm), 0).sum() * (x[1] - x[0])
    sensitivity = Flat(clip_norm).sensitivity(REPLACE_ONE)
    assert sensitivity == 2 * clip_norm
    step = SubsampledGaussian(stddev / sensitivity, q, REPLACE_ONE)
    low, high = privacy.compose([(step, 1)]).delta(target)
    assert exact == pytest.approx(low, rel=1e-6)
    assert exact == pytest.approx(high, rel=1e-6)
    as_in_papers = SubsampledGaussian(stddev / clip_norm, q, REPLACE_ONE)
    assert privacy.compose([(as_in_papers, 1)]).delta(target).high < 0.5 * exact


def test_known_profile_of_a_gaussian_closes_in_on_it_from_above():
    curve, exact = privacy.tradeoff.Gaussian(0.3), epsilon(Gaussian(1 / 0.3), 50)
    last = np.inf
    for points in (40, 160):
        grid = np.linspace(0, 2.5, points)
        known = privacy.KnownProfile(tuple(grid.tolist()), tuple(np.asarray(curve.delta(grid)).tolist()))
        high = epsilon(known, 50).high
        assert exact.low <= high < last
        last = high
    assert last < 1.02 * exact.high


def test_pair_of_densities_is_priced_from_above_and_closes_in():
    def normal(mean):
        return lambda x: np.exp(-((x - mean) ** 2) / 2) / np.sqrt(2 * np.pi)

    exact = epsilon(Gaussian(2.0), 20)
    pair = privacy.FinitePair.from_densities(normal(0.5), normal(0.0), np.linspace(-8, 8.5, 400))
    assert exact.low <= epsilon(pair, 20).high < exact.high * 1.001


def test_search_costs_more_than_one_run_and_at_most_what_simulation_shows():
    """δ of the best of K coins, by exact enumeration, lies below the bound."""
    run = privacy.RandomizedResponse(0.5)
    truth, lie = 1 / (1 + np.exp(-0.5)), 1 / (1 + np.exp(0.5))
    for distribution, generate in (
        ("poisson", lambda x: np.exp(4 * (x - 1))),
        ("geometric", lambda x: 0.25 * x / (1 - 0.75 * x)),
    ):
        search = privacy.Repeated(((run, 1),), 4, distribution)
        # outcomes: nothing (Poisson only), best is 0, best is 1; F = mass of the answers that are not better
        p = np.array([generate(0), generate(lie) - generate(0), 1 - generate(lie)])
        q = np.array([generate(0), generate(truth) - generate(0), 1 - generate(truth)])
        for target in (0.0, 0.3, 0.7, 1.0, 1.5):
            exact = max(np.maximum(a - np.exp(target) * b, 0).sum() for a, b in ((p, q), (q, p)))
            assert privacy.compose([(search, 1)]).delta(target).high >= exact


def best_of(masses, chances):
    """Distribution of the best of K draws (later outcomes are better) by a sum over K; last, the chance of no draw."""
    below = np.append(0.0, np.cumsum(masses))
    return np.append(np.diff(below[:, None] ** np.arange(len(chances)) @ chances), chances[0])


RUNS = np.arange(600)
LOGARITHMIC = brentq(lambda p: logser.mean(p) - 4, 1e-6, 1 - 1e-6)
CHANCES = {  # of K = 0, 1, ...; mean 4
    "poisson": poisson.pmf(RUNS, 4),
    "geometric": geom.pmf(RUNS, 1 / 4),
    "logarithmic": logser.pmf(RUNS, LOGARITHMIC),
}
RANKINGS = {"up": lambda x: x, "down": lambda x: -x, "outer": np.abs, "inner": lambda x: -np.abs(x - 0.5)}


@pytest.mark.parametrize("distribution", CHANCES)
@pytest.mark.parametrize("shift", [0.3, 1.0, 2.5])
def test_search_is_never_priced_below_the_enumerated_best_of_gaussian_runs(distribution, shift):
    """One Gaussian run cut into cells, ranked in several ways, every number of runs counted by its own probability."""
    x = np.linspace(-7, 7 + shift, 400)
    masses = [np.diff(ndtr(np.concatenate([[-np.inf], x - mean, [np.inf]]))) for mean in (0.0, shift)]
    assert CHANCES[distribution] @ RUNS == pytest.approx(4, rel=1e-9)
    search = privacy.compose([(privacy.Repeated(((Gaussian(1 / shift), 1),), 4, distribution), 1)])
    for rank in RANKINGS.values():
        order = np.argsort(rank(np.append(x[0] - 1, x)), kind="stable")
        with_it, without = (best_of(mass[order], CHANCES[distribution]) for mass in masses)
        for target in (0.0, 0.2, 0.5, 1.0, 2.0, 4.0):
            exact = max(
                np.maximum(a - np.exp(target) * b, 0).sum() for a, b in ((with_it, without), (without, with_it))
            )
            assert search.delta(target).high >= exact * (1 - 1e-9)


@pytest.mark.parametrize(("distribution", "times"), [("geometric", 3), ("logarithmic", 2)])
def test_search_over_pure_runs_costs_what_the_published_theorem_says(distribution, times):
    """Papernot & Steinke: (2 + η) ε for runs that are (ε, 0)-private, the limit of many runs; 3 ε is Liu & Talwar's."""
    search = privacy.Repeated(((privacy.RandomizedResponse(0.5), 1),), 10_000, distribution)
    assert 0.97 < epsilon(search, 1, 1e-9).high / (times * 0.5) < 1.02


@pytest.mark.thorough
def test_search_over_hardly_private_runs_is_no_better_than_its_runs():
    search = privacy.Repeated(((SubsampledGaussian(2.0, 0.01), 1000),), 10)
    one = privacy.compose(search.releases).epsilon(1e-6).high
    assert one < privacy.compose([(search, 1)]).epsilon(1e-6).high < 3 * one


ALL = [
    Gaussian(2.0, REPLACE_ONE),
    SubsampledGaussian(1.0, 0.1, ZERO_OUT),
    privacy.FixedSizeGaussian(1.0, 0.1),
    privacy.SubsampledBlocks((1.0, 2.0), 0.1),
    SubsampledGEP(1.0, 0.1),
    privacy.NoisyCovariance(3.0, 0.5),
    SubsampledJL(1.0, 32, 0.1),
    privacy.Laplace(2.0),
    privacy.RandomizedResponse(0.5, 3),
    privacy.DiscreteLaplace(3.0, 2, REPLACE_ONE),
    privacy.DiscreteGaussian(3.0, 2, ZERO_OUT),
    privacy.PoissonSampled(privacy.DiscreteGaussian(3.0, 2, REPLACE_ONE), 0.1),
    privacy.GaussianMixture(2.0, (0.0, 0.5, 1.0), (0.5, 0.3, 0.2)),
    privacy.Claimed(SubsampledGaussian(1.0, 0.1), "Mine()", ZERO_OUT),
    privacy.ExponentialMechanism(0.5, monotonic=True),
    privacy.PermuteAndFlip(0.5),
    privacy.KnownProfile((0.5, 1.0), (1e-3, 1e-6)),
    privacy.ZeroConcentrated(0.01, 1e-6),
    privacy.FinitePair((0.5, 0.5), (0.25, 0.75)),
    privacy.Repeated(((SubsampledGaussian(1.0, 0.01), 10),), 3.0, "geometric"),
]


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("event", ALL, ids=lambda event: type(event).__name__)
def test_every_event_survives_json_and_has_one_step_prices(event):
    assert privacy.event_from_dict(json.loads(json.dumps(privacy.event_to_dict(event)))) == event
    assert hash(event) == hash(privacy.event_from_dict(privacy.event_to_dict(event)))
    profile = privacy.compose([(event, 1)])
    low, high = profile.epsilon(1e-3)
    assert 0 <= low <= high < np.inf
    assert profile.neighboring_relation is event.neighboring_relation
    assert event.sampler in profile.statement(1e-3)
    assert event.assumption in profile.statement(1e-3)


def test_incompatible_relations_are_refused_in_one_list():
    with pytest.raises(ValueError, match=r"different neighboring relations \['ADD_OR_REMOVE_ONE', 'REPLACE_ONE'\]"):
        privacy.compose([(SubsampledGaussian(1.0, 0.1), 1), (privacy.FixedSizeGaussian(1.0, 0.1), 1)])


@pytest.mark.parametrize(
    "event",
    [
        SubsampledGaussian(1.0, 0.1),
        privacy.SubsampledGEP(1.0, 0.1),
        privacy.SubsampledJL(1.0, 32, 0.1),
        privacy.SubsampledGroup(1.0, 0.1, 3),
        privacy.NoisyCovariance(2.0, 0.5),
    ],
    ids=lambda event: type(event).__name__,
)
def test_zero_out_costs_what_removing_costs_and_both_compose_to_zero_out(event):
    zeroed = replace(event, neighboring_relation=ZERO_OUT)
    prices = [privacy.compose([(one, 3)]).epsilon(1e-3) for one in (event, zeroed)]
    assert prices[0] == prices[1]
    both = privacy.compose([(event, 1), (zeroed, 2)])
    assert (both.epsilon(1e-3), both.neighboring_relation) == (prices[0], ZERO_OUT)
    assert f"(zero out one {event.unit}, " in str(both)
    with pytest.raises(ValueError, match="different neighboring relations"):
        privacy.compose([(zeroed, 1), (privacy.FixedSizeGaussian(1.0, 0.1), 1)])


def test_events_that_cannot_be_priced_for_replacing_say_so():
    with pytest.raises(ValueError, match="has no known price here"):
        SubsampledJL(1.0, 32, 0.1, neighboring_relation=REPLACE_ONE)


@pytest.mark.thorough
def test_estimated_norms_with_too_little_noise_for_a_price_cost_more_than_with_the_least_that_has_one():
    little, least = (privacy.compose([(SubsampledJL(noise, 16, 0.1), 3)]) for noise in (0.01, 0.05))
    assert tuple(little.epsilon(1e-5)) == (least.epsilon(1e-5).low, float("inf"))
    assert little.epsilon_high(1e-5) == float("inf")
    assert tuple(little.delta(1.0)) == (least.delta(1.0).low, 1.0)
    other = privacy.compose([(SubsampledGaussian(1.0, 0.1), 5), (SubsampledJL(0.01, 16, 0.1), 3)])
    assert other.epsilon_high(1e-5) == float("inf")
    assert little.tradeoff(0.1).low == 0


NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SubsampledGaussian(1.0, 0.1, "replace"), "neighboring_relation='replace' must be one of"),
        (lambda: privacy.FixedSizeGaussian(NAN, 0.1), "FixedSizeGaussian: noise_multiplier=nan must be a finite"),
        (lambda: privacy.FixedSizeGaussian(1.0, 1.1), r"FixedSizeGaussian: sampling_probability=1.1 must lie in"),
        (lambda: privacy.SubsampledBlocks((), 0.1), r"noise_multipliers=\(\) must be a tuple of one or more"),
        (lambda: privacy.SubsampledBlocks([1.0], 0.1), r"noise_multipliers=\[1.0\] must be a tuple"),
        (lambda: privacy.SubsampledBlocks((1.0, -1.0), 0.1), "noise_multiplier=-1.0 must be greater"),
        (lambda: SubsampledGEP(0, 0.1), "SubsampledGEP: noise_multiplier=0 must be greater"),
        (lambda: SubsampledJL(1.0, 0, 0.1), "SubsampledJL: num_projections=0 must be an integer of at least 1"),
        (lambda: SubsampledJL(1.0, 16.0, 0.1), "num_projections=16.0 must be an integer"),
        (lambda: SubsampledJL(1.0, 10**8, 0.1), "must be at most 10000000"),
        (lambda: privacy.Laplace(1e-3), "Laplace: noise_multiplier=0.001 must be at least 0.01"),
        (lambda: privacy.DiscreteLaplace(1.0, 101), "noise_scale=1.0 must be at least a hundredth"),
        (lambda: privacy.DiscreteLaplace(1.0, 1.0), "sensitivity=1.0 must be an integer"),
        (lambda: privacy.DiscreteGaussian(1.0, 21), "noise_stddev=1.0 must be at least 0.1, and at least a twentieth"),
        (lambda: privacy.DiscreteGaussian(2e5), r"noise_stddev=200000.0 must lie in \(0, 100000\]"),
        (lambda: privacy.PoissonSampled(3, 0.1), "PoissonSampled: event=3 must be an event"),
        (lambda: privacy.PoissonSampled(Gaussian(1.0), 1e-8), "sampling_probability=1e-08 must lie in"),
        (
            lambda: privacy.PoissonSampled(SubsampledGaussian(1.0, 0.1), 0.1),
            "has no known price on a sample under",
        ),
        (lambda: privacy.PoissonSampled(privacy.RandomizedResponse(1.0), 0.1), "on a sample under replace one example"),
        (lambda: privacy.PoissonSampled(privacy.PermuteAndFlip(1.0, False, REPLACE_ONE), 0.1), "must be one of Gauss"),
        (lambda: privacy.PoissonSampled(privacy.DiscreteLaplace(1.0, 1, REPLACE_ONE), 0.1), "an even sensitivity"),
        (lambda: privacy.GaussianMixture(1.0, (1.0,), (0.5, 0.5)), "1 sensitivities and 2 probabilities"),
        (lambda: privacy.GaussianMixture(1.0, (-1.0, 1.0), (0.5, 0.5)), "must be 0 or larger"),
        (lambda: privacy.GaussianMixture(1.0, (0.0, 1.0), (0.5, 0.4)), "must be probabilities that add up"),
        (lambda: privacy.GaussianMixture(1.0, (0.0, 1.0), (1.0, 0.0)), "must be above 0 with a probability"),
        (lambda: privacy.GaussianMixture(1.0, (0.0, 21.0), (0.5, 0.5)), "noise_stddev=1.0 must lie in"),
        (lambda: privacy.ExponentialMechanism(51.0), "ExponentialMechanism: epsilon=51.0 must lie in"),
        (lambda: privacy.PermuteAndFlip(1.0, 1), "PermuteAndFlip: monotonic=1 must be True or False"),
        (lambda: privacy.RandomizedResponse(0.0), "epsilon=0.0 must be greater than 0"),
        (lambda: privacy.RandomizedResponse(0.1, 1), "num_answers=1 must be an integer of at least 2"),
        (lambda: privacy.ZeroConcentrated(0.0), r"ZeroConcentrated: rho=0.0 must lie in \(0, 100\]"),
        (lambda: privacy.ZeroConcentrated(0.1, 1.0), "ZeroConcentrated: delta=1.0 must lie in"),
        (lambda: privacy.ZeroConcentrated(0.1, neighboring_relation="x"), "neighboring_relation='x' must be one of"),
        (lambda: privacy.KnownProfile((0.1,), ()), r"deltas=\(\) must be a tuple"),
        (lambda: privacy.KnownProfile((0.1,), (0.1, 0.2)), "1 epsilons and 2 deltas"),
        (lambda: privacy.KnownProfile((-0.1,), (0.1,)), r"epsilons=\(-0.1,\) must lie in \[0, 600\]"),
        (lambda: privacy.KnownProfile((0.1,), (1.1,)), r"deltas=\(1.1,\) must lie in \[0, 1\]"),
        (lambda: privacy.FinitePair((0.5, 0.4), (0.5, 0.5)), "must be probabilities that add up to 1"),
        (lambda: privacy.FinitePair((1.0,), (0.5, 0.5)), "p has 1 outcomes and q has 2"),
        (lambda: privacy.Repeated(((Gaussian(1.0), 1),), 1.0, "geometric"), r"mean=1.0 must lie in \(1, 1e\+06\]"),
        (lambda: privacy.Repeated(((Gaussian(1.0), 1),), 3.0, "fixed"), "distribution='fixed' must be one of"),
        (lambda: privacy.Repeated(((Gaussian(1.0), 0),), 3.0), "count=0 must be an integer of at least 1"),
        (lambda: privacy.Repeated((("x", 1),), 3.0), "cannot price 'x'"),
        (lambda: privacy.priced(lambda event: None)(Gaussian), "an event type named 'Gaussian' exists"),
        (lambda: privacy.compose([], method="fft"), "method='fft' must be one of 'auto', 'contour', 'lattice'"),
    ],
)
def test_hostile_fields_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def one_step_losses(event, draws, swapped, generator):
    """Privacy losses of one step drawn from P (or Q if swapped), by simulating the release itself."""
    noise, q = event.noise_multiplier, event.sampling_probability
    z = np.full(draws, 1 / noise)
    if isinstance(event, SubsampledJL):
        s = generator.chisquare(event.num_projections, draws) / event.num_projections
        z = 1 / (noise * np.sqrt(s))
    if event.neighboring_relation is REPLACE_ONE:
        z = z / 2
        x = generator.standard_normal(draws) + z * (generator.random(draws) < q) * (-1 if swapped else 1)
        sign = -1 if swapped else 1
        parts = [np.log1p(q * np.expm1(side * z * x - z**2 / 2)) for side in (sign, -sign)]
        return parts[0] - parts[1]
    x = generator.standard_normal(draws) + (0 if swapped else 1) * z * (generator.random(draws) < q)
    loss = np.log1p(q * np.expm1(np.minimum(z * x - z**2 / 2, 700)))
    return -loss if swapped else loss


SIMULATED = {
    "Gaussian": SubsampledGaussian(1.0, 0.1),
    "replace": SubsampledGaussian(0.6, 0.1, REPLACE_ONE),
    "JL": SubsampledJL(1.0, 8, 0.1),
    "JL of one": SubsampledJL(1.3, 1, 0.05),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("case", SIMULATED)
def test_one_step_delta_agrees_with_simulation(case, swapped):
    event, generator = SIMULATED[case], np.random.default_rng(5)
    losses = one_step_losses(event, 400_000, swapped, generator)
    curves = list(privacy.compose([(event, 1)]).directions.values())
    for target in (-0.05, 0.02, 0.2, 1.0):
        gains = np.maximum(-np.expm1(target - losses), 0)
        low, high = curves[-1 if swapped else 0].delta(target)
        deviation = gains.std() / len(gains) ** 0.5 + 1e-7
        assert low - 4 * deviation <= gains.mean() <= high + 4 * deviation


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("case", SIMULATED)
def test_composed_delta_agrees_with_simulation(case, swapped):
    event, generator, steps = SIMULATED[case], np.random.default_rng(6), 100
    totals = sum(one_step_losses(event, 30_000, swapped, generator) for _ in range(steps))
    curves = list(privacy.compose([(event, steps)]).directions.values())
    for target in (0.0, 1.0):
        gains = np.maximum(-np.expm1(np.minimum(target - totals, 0)), 0)
        low, high = curves[-1 if swapped else 0].delta(target)
        deviation = gains.std() / len(gains) ** 0.5 + 1e-6
        assert low - 4 * deviation <= gains.mean() <= high + 4 * deviation


HEAVY = {  # lists with a heavy tail: alone, in whole batches, beside bounded losses, beside much that matters more
    "one projection": [(SubsampledJL(1.0, 1, 0.01), 100)],
    "whole batches": [(SubsampledJL(1.4, 5, 1.0), 753)],
    "whole batches beside others": [(SubsampledJL(1.4, 5, 1.0), 753), (SubsampledGaussian(2.4, 0.0035), 898)],
    "beside Laplace": [(SubsampledJL(2.1, 3, 8.5e-4), 1612), (privacy.Laplace(1.7), 2)],
    "hardly ever sampled": [(SubsampledJL(2.0, 8, 1.6e-4), 41), (SubsampledGaussian(0.73, 0.0055), 231)],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", HEAVY)
def test_heavy_tails_have_narrow_brackets_above_each_part(name):
    low, high = privacy.compose(HEAVY[name]).epsilon(1e-5)
    assert high <= low * (1.4 if high > 1e5 else 1.02)
    for part in HEAVY[name]:
        assert low >= privacy.compose([part]).epsilon(1e-5).low * (1 - 1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(HEAVY)[:1])
def test_lattice_of_a_heavy_tail_stays_within_the_free_bounds(name):
    rough, fine = privacy.compose(HEAVY[name]), privacy.compose(HEAVY[name], "lattice")
    for delta in (1e-2, 1e-5, 1e-8):
        low, high = fine.epsilon(delta)
        assert low <= rough.epsilon(delta).high
        assert high >= rough.epsilon(delta).low


def test_engine_that_cannot_resolve_a_list_says_so():
    with pytest.raises(ValueError, match="Use method='auto'"):
        privacy.compose([(privacy.Laplace(1.0), 3)], "contour").epsilon(1e-5)


def test_banded_steps_where_an_example_is_replaced_cost_the_reduced_steps():
    banded = privacy.BandedGaussian(0.8, 0.01, 5, neighboring_relation=REPLACE_ONE)
    assert epsilon(banded, 100) == epsilon(SubsampledGaussian(0.8, 0.05, REPLACE_ONE), 20)


def test_replaced_row_of_a_sampled_covariance_costs_what_quadrature_finds_for_the_worst_angle():
    """Two unit rows at an angle: their matrices have the scalar product cos², and lie in a plane with 0."""
    noise, q, x = 0.7, 0.2, np.linspace(-9, 10, 1201)  # noise over sqrt(2)
    profile = privacy.compose([(privacy.NoisyCovariance(noise, q, REPLACE_ONE), 1)])
    first, second = np.meshgrid(x, x, indexing="ij")
    length, mass = 1 / (noise * 2**0.5), (x[1] - x[0]) ** 2 * norm.pdf(first) * norm.pdf(second)
    worst = np.zeros(3)
    for angle in np.linspace(0.1, np.pi / 2, 6):
        product = np.cos(angle) ** 2
        sides = [length * (c * first + s * second) for c, s in ((1.0, 0.0), (product, (1 - product**2) ** 0.5))]
        p, other = (mass * (1 - q + q * np.exp(side - length**2 / 2)) for side in sides)
        found = [np.maximum(p - np.exp(target) * other, 0).sum() for target in (0.0, 0.1, 0.5)]
        worst = np.maximum(worst, found)
    for target, delta in zip((0.0, 0.1, 0.5), worst, strict=True):
        low, high = profile.delta(target)
        assert low * 0.999 <= delta <= high
        assert high < 2 * low
    assert epsilon(privacy.NoisyCovariance(noise, 1.0, REPLACE_ONE), 3) == epsilon(Gaussian(noise), 3)


def test_a_sample_mixes_the_pair_and_agrees_with_the_event_of_its_own():
    pair = privacy.FinitePair((0.7, 0.3), (0.4, 0.6))
    mixed = privacy.FinitePair((0.25 * 0.7 + 0.75 * 0.4, 0.25 * 0.3 + 0.75 * 0.6), (0.4, 0.6))
    assert epsilon(privacy.PoissonSampled(pair, 0.25), 9) == pytest.approx(epsilon(mixed, 9))
    for relation in privacy.NeighboringRelation:
        sampled = privacy.PoissonSampled(Gaussian(1.0, relation), 0.1)
        assert epsilon(sampled, 9) == epsilon(SubsampledGaussian(1.0, 0.1, relation), 9)
