# SPDX-License-Identifier: Apache-2.0
"""Checks audits of loops from outside: mistakes are found, right loops are left alone, laws are exact."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import binom, chi2, t

import torch_privacy as tp
from torch_privacy.privacy.loop_audit import TESTS, LoopReleases, judge, sizes_spread

Masks = Callable[[np.random.Generator, int, int, float], np.ndarray]


def poisson(rng, steps, n, q):
    return rng.random((steps, n)) < q


def shuffled(rng, steps, n, q):
    size = round(n * q)
    orders = [rng.permutation(n).reshape(-1, size) for _ in range(steps * size // n)]
    masks = np.zeros((steps, n), bool)
    for row, indices in zip(masks, np.concatenate(orders), strict=True):
        row[indices] = True
    return masks


def fixed_size(rng, steps, n, q):
    return np.argsort(rng.random((steps, n)), axis=1) < n * q


def equal_on_two_ranks(rng, steps, n, q):
    return np.tile(poisson(rng, steps, n // 2, q), 2)[:, rng.permutation(n)]


def equal_on_shards_that_change(rng, steps, n, q):
    return rng.permuted(np.tile(poisson(rng, steps, n // 4, q), 4), axis=1)


def a_tenth_too_often(rng, steps, n, q):
    return poisson(rng, steps, n, 1.1 * q)


def equal_in_all_runs(rng, steps, n, q):
    return poisson(np.random.default_rng(0), steps, n, q)


def loop(masks: Masks = poisson, *, noise=lambda z: z, by_batch=False, clipped=True):
    """Returns a loop, with a mistake if it is asked for one."""

    def run(trial: tp.LoopTrial) -> list[torch.Tensor]:
        rng = np.random.default_rng(trial.seed)
        joined = masks(rng, trial.num_steps, trial.num_examples, trial.sampling_probability)
        z = noise(trial.noise_multiplier * rng.standard_normal(joined.shape))
        sums = (joined if clipped else 100 * joined) * trial.clip_norm + z * trial.clip_norm
        divisors = joined.sum(1, keepdims=True) if by_batch else trial.expected_batch_size
        return list(torch.from_numpy(sums / divisors))

    return run


def without_noise_in_a_step(z):
    z[13] = 0
    return z


def used_twice(z):
    z[20] = z[7]
    return z


WRONG = {
    "shuffled": (loop(shuffled), "once in an epoch"),
    "fixed size": (loop(fixed_size), "spread of batch sizes"),
    "equal masks": (loop(equal_on_two_ranks), "pairs of examples"),
    "equal masks of shards that change": (loop(equal_on_shards_that_change), "multiples"),
    "joins too often": (loop(a_tenth_too_often), "sampling probability"),
    "equal batches in all runs": (loop(equal_in_all_runs), "pairs of steps"),
    "real batch size": (loop(by_batch=True), "divisor"),
    "not clipped": (loop(clipped=False), "size of the noise"),
    "a tenth less noise": (loop(noise=lambda z: 0.9 * z), "size of the noise"),
    "a step without noise": (loop(noise=without_noise_in_a_step), "size of the noise"),
    "no noise": (loop(noise=np.zeros_like), "size of the noise"),
    "noise used twice": (loop(noise=used_twice), "fresh noise"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.every_case
def test_a_wrong_loop_is_rejected_and_its_mistake_named(name):
    wrong, test = WRONG[name]
    found = tp.audit_loop(wrong, test_seed=1)
    assert found.p_value < 1e-6
    assert test in {mistake.name for mistake in found.mistakes}
    assert "REJECTED" in str(found)


def test_every_test_finds_a_mistake_that_no_right_loop_shows():
    assert {test for _, test in WRONG.values()} == set(TESTS)
    found = tp.audit_loop(loop(), test_seed=1)
    assert not found.is_rejected
    assert found.mistakes == []


def simulated(count: int, runs: int, steps: int, n: int, q: float) -> np.ndarray:
    """Returns the p-values (count, tests) of right loops."""
    rng, found = np.random.default_rng(5), []
    for _ in range(count):
        joined = poisson(rng, runs * steps, n, q).reshape(runs, steps, n)
        releases = 3.0 * (joined + 0.02 * rng.standard_normal(joined.shape))
        found.append([test.p_value for test in judge(releases, q, 0.02, 1e-6).tests])
    return np.array(found)


@pytest.mark.parametrize(
    ("count", "runs", "steps", "n", "q"),
    [
        (200, 2, 8, 12, 0.5),
        pytest.param(200, 1, 12, 12, 0.25, marks=pytest.mark.thorough),
        pytest.param(100, 2, 64, 64, 0.5, marks=pytest.mark.thorough),
    ],
)
def test_p_values_of_right_loops_are_rarely_small(count, runs, steps, n, q):
    """Each is at most s with probability at most s; the limits are passed by chance once in 1e8."""
    p_values = simulated(count, runs, steps, n, q)
    for s in (0.3, 0.1, 0.03, 0.01):
        assert ((p_values <= s).sum(0) <= binom.ppf(1 - 1e-8, count, s)).all()


SIGMA, FACTOR = 0.02, 3.0


def few_releases(steps: int, n: int, seed: int = 0) -> tuple[LoopReleases, np.ndarray, np.ndarray]:
    """Returns releases of one run with q = 1/2, the entries in units of a canary's part, and the masks."""
    rng = np.random.default_rng(seed)
    joined = rng.random((steps, n)) < 0.5
    entries = joined + SIGMA * rng.standard_normal((steps, n))
    return LoopReleases(FACTOR * entries[None], 0.5, SIGMA), entries, joined


def test_the_size_of_the_noise_is_tested_against_a_part_that_is_surely_not_too_large():
    seen, entries, joined = few_releases(1, 40)
    part = entries[joined].mean() / (1 + 8 * SIGMA / np.sqrt(joined.sum()))
    expected = chi2.cdf((entries[~joined] ** 2).sum() / (part * SIGMA) ** 2, (~joined).sum())
    assert TESTS["size of the noise"][0](seen) == pytest.approx(2 * expected)  # of all steps, and of each of one


def test_the_correlation_of_noise_has_students_law():
    seen, entries, joined = few_releases(2, 30)
    one, other = entries[:, ~joined.any(0)]
    r = (one @ other) / np.sqrt((one @ one) * (other @ other))
    free = len(one) - 1  # without an intercept
    assert TESTS["fresh noise"][0](seen) == pytest.approx(2 * t.sf(abs(r) * np.sqrt(free / (1 - r**2)), free))


def test_the_trend_with_the_batch_size_is_that_of_least_squares():
    seen, entries, joined = few_releases(6, 20)
    k = joined.sum(1)
    means = (entries * joined).sum(1) / k
    slope = np.polynomial.polynomial.polyfit(k, means, 1, w=np.sqrt(k))[1]
    variance = 1 / (k * (k - np.average(k, weights=k)) ** 2).sum()
    spread = np.sqrt((entries[~joined] ** 2).mean())
    expected = 2 * t.sf(abs(slope) / (spread * np.sqrt(variance)), (~joined).sum())
    assert TESTS["divisor"][0](seen) == pytest.approx(expected)


def test_counts_are_tested_by_binomial_tails_times_the_number_of_pairs():
    n, steps = 9, 6
    _, entries, joined = few_releases(2 * steps, n)
    seen = LoopReleases(entries.reshape(2, steps, n), 0.5, SIGMA)
    alike = (joined[:, None] == joined[None]).sum(2)[np.triu_indices(2 * steps, 1)]
    p_values = {name: test(seen) for name, (test, _) in TESTS.items()}
    assert p_values["pairs of steps"] == pytest.approx(len(alike) * binom.sf(alike.max() - 1, n, 0.5))
    runs = [joined[:steps].T, joined[steps:].T]
    most = max((own[:, None] == own[None]).sum(2)[np.triu_indices(n, 1)].max() for own in runs)
    assert p_values["pairs of examples"] == pytest.approx(2 * 36 * binom.sf(most - 1, steps, 0.5))
    once = sum((own.reshape(n, steps // 2, 2).sum(2) == 1).sum() for own in runs)
    assert p_values["once in an epoch"] == pytest.approx(binom.sf(once - 1, n * steps, 0.5))
    assert p_values["sampling probability"] == pytest.approx(binom.sf(joined.sum() - 1, joined.size, 0.5))
    law = binom.pmf(np.arange(n + 1), n, 0.5)
    tails = [binom.sf((joined.sum(1) % r == 0).sum() - 1, 2 * steps, law[::r].sum()) for r in range(2, 9)]
    assert p_values["multiples"] == pytest.approx(7 * min(tails))


@pytest.mark.parametrize("q", [0.5, 0.3])
def test_the_law_of_batch_sizes_is_that_of_all_outcomes(q):
    n, steps = 3, 4
    masses = binom.pmf(np.arange(n + 1), n, q)
    outcomes = np.array([*product(range(n + 1), repeat=steps)])
    sums, mass = ((outcomes - round(n * q)) ** 2).sum(1), masses[outcomes].prod(1)
    releases = np.array([[1, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 0]])[None]
    found = int(((releases.sum(2) - round(n * q)) ** 2).sum())
    seen = LoopReleases(releases.astype(float), q, 0.02)
    expected = 2 * min(mass[sums <= found].sum(), mass[sums >= found].sum())
    assert sizes_spread(seen) == pytest.approx(expected, abs=1e-10)


def test_a_constant_factor_does_not_matter():
    one, other = (tp.audit_loop(lambda trial, f=f: [f * g for g in loop()(trial)], test_seed=3) for f in (1.0, 64.0))
    assert one.tests == other.tests


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_loop_that_draws_fewer_examples_than_stated_is_not_accused_but_refused(share):
    with pytest.raises(tp.Refused, match="no fault"):
        tp.audit_loop(loop(lambda rng, steps, n, q: poisson(rng, steps, n, share * q)))


def test_canaries_that_lose_a_little_of_their_length_are_no_mistake():
    """As with C/(|g| + 0.01) in place of C/max(|g|, C): there is more noise than claimed, relative to them."""

    def softly(trial: tp.LoopTrial) -> list[torch.Tensor]:
        return [g - 0.005 * (g > 0.5 / trial.expected_batch_size) * g for g in loop()(trial)]

    assert not tp.audit_loop(softly, test_seed=2).is_rejected


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (lambda trial: None, "not a list of gradients"),
        (lambda trial: loop()(trial)[1:], "returned 63 gradients with 64 entries"),
        (lambda trial: [torch.full((64,), torch.nan)] * 64, "4096 of them not finite"),
        (lambda trial: [g + torch.randn(64) for g in loop()(trial)], "do not show who joined"),
        (lambda trial: [torch.zeros(64)] * 64, "do not show who joined"),
        (lambda trial: [torch.ones(64)] * 64, "do not show who joined"),
    ],
)
def test_other_returns_are_refused(returned, named):
    with pytest.raises(tp.Refused, match=named):
        tp.audit_loop(returned)
