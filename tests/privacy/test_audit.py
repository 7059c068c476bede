# SPDX-License-Identifier: Apache-2.0
"""Checks the tests and bounds of audits: against closed forms, published numbers, and simulated games."""

import json
import re

import numpy as np
import pytest
from scipy.special import logit
from scipy.stats import binom, norm

from torch_privacy import privacy
from torch_privacy.privacy.audit import Audit, audit_scores
from torch_privacy.privacy.audit_bounds import (
    AuditPlan,
    Errors,
    Guesses,
    epsilon_bound,
    gaussian_bound,
    interpolated,
    p_value,
    plan,
)
from torch_privacy.privacy.audit_sums import Sums, _accuracy, plan_block, sums
from torch_privacy.privacy.tradeoff import EpsilonDelta, Gaussian

ONE_GAUSSIAN = privacy.compose([(privacy.Gaussian(1.0), 1)])
# m, r, v; Steinke et al. at delta 0 and 1e-5; Mahloujifar et al. in the Gaussian family, as epsilon at delta 1e-5.
# JAX-Privacy gives the same four digits.
PUBLISHED = [
    (1000, 1000, 600, 0.2975, 0.2972, 0.5835),
    (1000, 1000, 800, 1.2543, 1.2540, 2.3332),
    (1000, 200, 180, 1.7989, 1.7963, 2.9012),
    (1000, 100, 100, 3.4930, 3.4654, 5.5490),
    (5000, 500, 490, 3.3563, 3.3357, 4.9501),
]


def gaussian_game(rng: np.random.Generator, count: int, mu: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores inside and outside of the ideal attack on one Gaussian release."""
    coins = rng.random(count) < 0.5
    scores = mu * coins + rng.standard_normal(count)
    return scores[coins], scores[~coins]


@pytest.mark.parametrize(("m", "r", "v", "pure", "approximate", "_"), PUBLISHED)
def test_the_bound_for_any_mechanism_is_the_published_one(m, r, v, pure, approximate, _):
    assert Guesses(m, r, v).epsilon_low(0.0) == pytest.approx(pure, abs=6e-5)
    assert Guesses(m, r, v).epsilon_low(1e-5) == pytest.approx(approximate, abs=6e-5)


@pytest.mark.parametrize(("m", "r", "v", "_", "__", "expected"), PUBLISHED)
def test_the_gaussian_bound_is_the_published_one(m, r, v, _, __, expected):
    mu = gaussian_bound(Guesses(m, r, v))
    assert privacy.compose([(privacy.Gaussian(1 / mu), 1)]).epsilon(1e-5).high == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("count", [1, 10, 100])
@pytest.mark.parametrize("significance", [0.05, 0.001])
def test_all_guesses_right_has_a_closed_form(count, significance):
    expected = max(0.0, float(logit(significance ** (1 / count))))
    assert Guesses(count, count, count).epsilon_low(0.0, significance) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_a_p_value_is_never_below_that_of_randomized_response(epsilon, share):
    """Randomized response of every coin is (epsilon, 0)-private, and its guesses are right independently."""
    m, p = 200, 1 / (1 + np.exp(-epsilon))
    r = round(share * m)
    for v in range(r // 2, r + 1, max(1, r // 10)):
        assert p_value(EpsilonDelta(epsilon, 0.0), Guesses(m, r, v)) >= binom.sf(v - 1, r, p) * (1 - 1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("mu", [1.0])
def test_an_honest_claim_is_rejected_no_more_often_than_stated(mu, independent):
    rng, runs = np.random.default_rng(3), 60
    claim = privacy.compose([(privacy.Gaussian(1 / mu), 1)])
    audits = [audit_scores(*gaussian_game(rng, 400, mu), claim, independent=independent) for _ in range(runs)]
    most = binom.ppf(1 - 1e-6, runs, 0.05)
    assert sum(audit.is_rejected for audit in audits) <= most
    assert sum(audit.epsilon_low() > claim.epsilon(1e-5).high for audit in audits) <= most


@pytest.mark.parametrize("independent", [False, True])
def test_twice_the_claimed_signal_is_rejected(independent):
    rng = np.random.default_rng(3)
    audit = audit_scores(*gaussian_game(rng, 4000, 1.2), privacy.compose([(privacy.Gaussian(1 / 0.6), 1)]))
    assert audit.is_rejected
    assert audit.epsilon_low() > audit.profile.epsilon(1e-5).high / 2
    assert "REJECTED" in str(audit)


def test_the_exact_curve_finds_halved_noise_that_the_bound_for_any_mechanism_misses():
    rng, q, steps, m = np.random.default_rng(1), 0.1, 50, 4000
    coins, scores = rng.random(m) < 0.5, np.zeros(m)
    for _ in range(steps):
        x = (coins & (rng.random(m) < q)) + 0.5 * rng.standard_normal(m)
        scores += np.log1p(q * np.expm1(4 * x - 2))
    audit = audit_scores(scores[coins], scores[~coins], privacy.compose([(privacy.SubsampledGaussian(1.0, q), steps)]))
    assert audit.epsilon_any() < audit.profile.epsilon(1e-5).low
    assert audit.is_rejected


@pytest.mark.parametrize("missed", [0, 3])
def test_bounds_on_error_rates_are_clopper_and_pearsons(missed):
    """With rates bounded by a and b, the largest rejected (epsilon, 0) curve goes through (a, b)."""
    errors, significance = Errors(50, 0, 60, missed), 0.05
    alpha = 1 - (significance / 2) ** (1 / 50)  # no event in 50
    beta = errors._upper(significance)[1]
    assert binom.cdf(missed, 60, beta) == pytest.approx(significance / 2)
    expected = max(np.log((1 - beta) / alpha), np.log((1 - alpha) / beta))
    assert errors.epsilon_low(0.0, significance) == pytest.approx(expected)
    mu = norm.ppf(1 - alpha) - norm.ppf(beta)
    assert gaussian_bound(errors, significance) == pytest.approx(mu, abs=1e-3)


def test_a_curve_is_interpolated_as_it_is():
    curve = ONE_GAUSSIAN.tradeoffs["symmetrized"].low
    fast, alphas = interpolated(curve), np.concatenate([[0.0, 1.0], np.random.default_rng(0).random(200)])
    assert [fast(float(alpha)) for alpha in alphas] == pytest.approx(np.asarray(curve(alphas)).tolist(), abs=1e-12)


@pytest.mark.thorough
def test_the_plan_does_not_depend_on_the_scores_and_fits_the_canaries():
    for noise, q, steps in [(1.0, 1.0, 1), (0.6, 0.01, 500), (30.0, 0.1, 3), (0.3, 0.2, 5)]:
        profile = privacy.compose([(privacy.SubsampledGaussian(noise, q), steps)])
        for count in (1, 2, 7, 1000):
            planned = plan(profile, count)
            assert 1 <= planned.num_in
            for share in (0.25, 1.0, 8.0):
                scaled = planned.scaled(share, count)
                assert 1 <= sum(scaled) <= count
                assert min(scaled) >= 0


@pytest.mark.parametrize("block", [1, 2, 8])
@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_the_accuracy_of_sums_of_gaussian_scores_has_a_closed_form(mu, block):
    """The sum of 2g scores, half of them with the sign changed, has the mean g mu or -g mu and the variance 2g."""
    exact = norm.cdf(mu * np.sqrt(block / 2))
    assert _accuracy(Gaussian(mu), block) == pytest.approx(exact, abs=1e-12)
    curve = privacy.compose([(privacy.Gaussian(1 / mu), 1)]).tradeoffs["symmetrized"].low
    assert exact <= _accuracy(curve, block) + 1e-12 <= exact + 0.05 * (1 - exact) + 1e-6


@pytest.mark.parametrize("epsilon", [0.3, 2.0])
def test_the_accuracy_of_pairs_of_randomized_responses_has_a_closed_form(epsilon):
    """A guess at which of two canaries is in is right as often as an answer is true; equal answers are guessed."""
    assert _accuracy(EpsilonDelta(epsilon, 0.0), 1) == pytest.approx(1 / (1 + np.exp(-epsilon)), abs=1e-9)


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("seen", [lambda s: s, np.exp, np.sign, lambda s: np.where(s > 2, np.inf, s)])
def test_sums_reject_an_honest_claim_no_more_often_than_stated(block, seen):
    """Whatever an attack makes of the scores, and whoever has the larger group."""
    rng, runs = np.random.default_rng(4), 1000
    accuracy = _accuracy(Gaussian(1.0), block)
    games = (gaussian_game(rng, 120, 1.0) for _ in range(runs))
    outcomes = [sums(seen(inside), seen(outside), block) for inside, outside in games]
    p_values = np.array([binom.sf(found.num_right - 1, found.num_blocks, accuracy) for found in outcomes])
    for s in (0.2, 0.05):
        assert (p_values <= s).sum() <= binom.ppf(1 - 1e-7, runs, s)


@pytest.mark.thorough
@pytest.mark.parametrize(("noise", "q", "steps"), [(0.7, 0.05, 20), (0.3, 0.01, 10)])
def test_sums_of_rarely_sampled_canaries_reject_no_more_often_than_stated(noise, q, steps):
    """The bound on epsilon exceeds the claim only if the claim is rejected."""
    profile = privacy.compose([(privacy.SubsampledGaussian(noise, q), steps)])
    block, rng, runs = plan_block(profile, 400), np.random.default_rng(6), 400
    accuracy, rejected = _accuracy(profile.tradeoffs["symmetrized"].low, block), 0
    for _ in range(runs):
        coins = rng.random(400) < 0.5
        x = (coins & (rng.random((steps, 400)) < q)) / noise + rng.standard_normal((steps, 400))
        scores = np.log1p(q * np.expm1((x - 0.5 / noise) / noise)).sum(0)
        found = sums(scores[coins], scores[~coins], block)
        rejected += binom.sf(found.num_right - 1, found.num_blocks, accuracy) <= 0.05
    assert rejected <= binom.ppf(1 - 1e-7, runs, 0.05)


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("mu", [0.8, 0.95, 1.3])
def test_the_bound_by_sums_exceeds_the_claim_if_and_only_if_sums_reject_it(mu):
    rng = np.random.default_rng(round(10 * mu))
    audit = audit_scores(*gaussian_game(rng, 1000, mu), ONE_GAUSSIAN, disjoint=True)
    assert audit.sums is not None
    curve = ONE_GAUSSIAN.tradeoffs["symmetrized"].low
    rejected = audit.sums.reject(curve, audit.significance)
    alone = audit_scores(audit.inside, audit.outside, ONE_GAUSSIAN)
    assert audit.p_value == min(1.0, 2 * min(alone.p_value, audit.sums.p_value(curve)))
    assert (audit.epsilon_sums() > 0.98 * ONE_GAUSSIAN.epsilon(1e-5).high) == rejected


def test_sums_show_more_than_guesses():
    rng = np.random.default_rng(1)
    audit = audit_scores(*gaussian_game(rng, 2000, 1.0), ONE_GAUSSIAN, disjoint=True)
    assert audit.epsilon_low() < audit.epsilon_sums() < ONE_GAUSSIAN.epsilon(1e-5).high
    assert audit.epsilon_sums() > 0.75 * ONE_GAUSSIAN.epsilon(1e-5).high
    shown = [float(number) for number in re.findall(r"(?:epsilon =|at least|show) (\d+\.\d{3})", str(audit))]
    exact = [audit.profile.epsilon(1e-5).high, audit.epsilon_low(), audit.epsilon_ideal(), audit.epsilon_sums()]
    assert exact[0] <= shown[0] < exact[0] + 1e-3  # the claim is rounded up, what was shown down
    assert all(bound - 1e-3 < text <= bound for text, bound in zip(shown[1:], exact[1:], strict=True))
    assert json.loads(json.dumps(audit.as_json()))["sums"] == audit.sums._asdict()
    assert audit_scores(audit.inside, audit.outside, ONE_GAUSSIAN).epsilon_sums() == 0.0


def test_sums_find_a_signal_that_guesses_do_not():
    rng = np.random.default_rng(3)
    scores = gaussian_game(rng, 2000, 1.3)
    assert audit_scores(*scores, ONE_GAUSSIAN, disjoint=True).is_rejected
    assert not audit_scores(*scores, ONE_GAUSSIAN).is_rejected


def test_equal_sums_are_decided_by_coins():
    found = sums(np.zeros(3000), np.zeros(3100), 1)
    assert abs(found.num_right - 1500) < 5.5 * np.sqrt(750)


def test_sums_of_few_or_lopsided_canaries_show_nothing():
    assert sums(np.ones(3), np.zeros(0), 1) == Sums(0, 1, 0)
    audit = audit_scores(np.ones(3), np.zeros(0), ONE_GAUSSIAN, disjoint=True)
    assert (audit.p_value, audit.epsilon_sums()) == (1.0, 0.0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("noise", "q", "steps", "expected"), [(1.0, 1.0, 1, 1), (0.7, 0.05, 20, 4), (0.3, 0.001, 100, 16)]
)
def test_scores_are_added_where_few_of_them_show_much(noise, q, steps, expected):
    """Of rarely sampled canaries, one in many has a large score; a sum of 2g of them is nearly normal."""
    assert plan_block(privacy.compose([(privacy.SubsampledGaussian(noise, q), steps)]), 4000) == expected


def test_bounds_of_several_deltas_come_from_one_noise():
    audit = audit_scores(*gaussian_game(np.random.default_rng(0), 2000, 1.0), ONE_GAUSSIAN)
    lows = [audit.epsilon_low(delta) for delta in (1e-3, 1e-5, 1e-8)]
    assert lows == sorted(lows)
    assert audit.epsilon_low(1e-5) > audit.epsilon_any(1e-5)


@pytest.mark.parametrize("bound", ["epsilon_low", "epsilon_sums"])
def test_a_claim_without_noise_is_bounded_no_higher_than_the_truth(bound):
    """Randomized response has a larger epsilon at small deltas in the family of Gaussians."""
    rng, right = np.random.default_rng(0), 1 / (1 + np.exp(-1.0))
    claim = privacy.compose([(privacy.RandomizedResponse(1.0), 1)])
    games = [((rng.random(500) < right) * 1.0, (rng.random(500) > right) * 1.0) for _ in range(8)]
    bounds = [getattr(audit_scores(*game, claim, disjoint=True), bound)() for game in games]
    assert sum(found > 1.0 for found in bounds) <= 2
    assert np.mean(bounds) > 0.5


EPOCH = privacy.BallsAndBins(1.0, 10)


@pytest.mark.parametrize(
    "events",
    [
        [(EPOCH, 1), (privacy.LaterBatch(EPOCH), 9)],
        [(privacy.DiscreteLaplace(2.0), 1), (privacy.ExponentialMechanism(0.5), 1)],
        [(privacy.Claimed(privacy.Laplace(2.0), noise="own"), 1)],
    ],
)
def test_the_family_of_a_claim_has_the_claim_in_it(events):
    claim = privacy.compose(events)
    beta = claim.tradeoffs["symmetrized"].low(0.1)
    found = epsilon_bound(claim, lambda curve: bool(curve(0.1) > beta), 1e-5)
    assert 0.95 * claim.epsilon(1e-5).low < found <= claim.epsilon(1e-5).high


def test_a_claim_with_the_most_noise_that_has_a_price_is_bounded():
    rng, claim = np.random.default_rng(0), privacy.compose([(privacy.Gaussian(1e6), 1)])
    assert audit_scores(rng.random(1000), rng.random(1000), claim).epsilon_low() == 0


def test_equal_scores_show_nothing():
    """They come in random order, which shows something in one audit of twenty at most."""
    audits = [audit_scores(np.zeros(500), np.zeros(500), ONE_GAUSSIAN) for _ in range(20)]
    assert sum(audit.epsilon_low() > 0 for audit in audits) <= 8  # more by chance in one run of millions
    assert {audit.p_value for audit in audits} == {1.0}
    assert {audit.area_under_curve for audit in audits} == {0.5}


def test_rates_are_those_of_the_scores():
    audit = audit_scores([3.0, 2.0, 1.0], [2.5, 0.0, -1.0, -1.0], ONE_GAUSSIAN)
    false, true = audit.roc()
    assert false.tolist() == [0, 0, 0.25, 0.25, 0.25, 0.5, 1]
    assert true.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 2 / 3, 1, 1, 1])
    assert audit.true_positive_rate(0.0) == pytest.approx(1 / 3)
    assert audit.true_positive_rate(0.3) == 1.0
    assert audit.area_under_curve == pytest.approx(np.mean([1, 3 / 4, 3 / 4]))  # of each inside, the outside below it


def test_the_numbers_are_plain_json_without_the_coins():
    audit = audit_scores(*gaussian_game(np.random.default_rng(0), 300, 1.0), ONE_GAUSSIAN, notes=["a note"])
    content = json.loads(json.dumps(audit.as_json(), allow_nan=False))
    assert content["epsilon_low"] <= content["epsilon_claimed"]
    assert content["notes"] == ["a note"]
    assert {"inside", "outside", "coins", "scores"}.isdisjoint(content)


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        (([], []), {}, "no score"),
        (([1.0, np.nan], [0.0]), {}, "NaN"),
        (([[1.0]], [0.0]), {}, "inside"),
        (([1.0], [0.0]), {"significance": 0.0}, "significance"),
        (([1.0], [0.0]), {"delta": 1.0}, "delta"),
        (([1.0], [0.0]), {"num_guesses": (2, 1)}, "num_guesses"),
        (([1.0], [0.0]), {"num_guesses": (-1, 1)}, "num_in"),
        (([1.0], [0.0]), {"independent": True}, "independent"),
    ],
)
def test_wrong_arguments_are_refused(arguments, options, named):
    with pytest.raises(ValueError, match=named):
        audit_scores(*arguments, ONE_GAUSSIAN, **options)


def test_a_given_number_of_guesses_is_used():
    audit = audit_scores([3.0, 2.0, 1.0], [2.5, 0.0, -1.0], ONE_GAUSSIAN, num_guesses=(2, 1))
    assert audit.outcome == Guesses(6, 3, 2)
    assert audit.plan == AuditPlan(2, 1)
    assert isinstance(audit, Audit)
