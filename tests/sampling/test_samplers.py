# SPDX-License-Identifier: Apache-2.0
"""Tests Poisson sampling: inclusion counts, independence, and batches that depend only on key and step."""

import numpy as np
import pytest
from scipy import stats

from torch_privacy.sampling.samplers import BinsSampler, CyclicSampler, PoissonSampler, TruncatedSampler

KEY = bytes(range(32))
STEPS = 4000


def inclusions(num_examples=50, q=0.3, steps=STEPS):
    """Returns a table (steps, n) of 0 and 1."""
    sampler = PoissonSampler(num_examples, q, key=KEY)
    table = np.zeros((steps, num_examples))
    for step in range(steps):
        table[step, sampler.indices(step)] = 1
    return table


@pytest.mark.parametrize("q", [0.02, 0.3, 0.9])
def test_every_example_joins_with_probability_q(q):
    counts = inclusions(q=q).sum(0)
    chi_square = ((counts - STEPS * q) ** 2 / (STEPS * q * (1 - q))).sum()
    assert 1e-4 < stats.chi2.sf(chi_square, len(counts)) < 1 - 1e-4


@pytest.mark.parametrize("q", [0.02, 0.3, 0.9])
def test_batch_sizes_are_binomial(q):
    sizes = inclusions(q=q).sum(1).astype(int)
    expected = STEPS * stats.binom.pmf(np.arange(51), 50, q)
    observed = np.bincount(sizes, minlength=51)
    usual = expected > 5
    chi_square = ((observed - expected)[usual] ** 2 / expected[usual]).sum()
    assert stats.chi2.sf(chi_square, usual.sum()) > 1e-4


def test_examples_join_independently_of_each_other_and_of_the_step_before():
    table = inclusions()
    centered = table - 0.3
    bound = 5 / STEPS**0.5 * 0.21
    between_examples = np.cov(table.T)[np.triu_indices(50, 1)]
    assert np.abs(between_examples).max() < bound
    assert np.abs((centered[1:] * centered[:-1]).mean(0)).max() < bound
    assert np.abs(np.cov(table[1:].T, table[:-1].T)[:50, 50:]).max() < bound


def test_indices_are_sorted_and_distinct():
    indices = PoissonSampler(100, 0.5, key=KEY).indices(3)
    assert (np.diff(indices) > 0).all()


def test_one_key_and_step_give_one_batch():
    assert np.array_equal(PoissonSampler(100, 0.5, key=KEY).indices(3), PoissonSampler(100, 0.5, key=KEY).indices(3))
    assert not np.array_equal(PoissonSampler(100, 0.5).indices(3), PoissonSampler(100, 0.5).indices(3))


def test_probability_one_takes_every_example():
    assert PoissonSampler(10, 1.0).indices(0).tolist() == list(range(10))


def test_the_key_is_not_printed():
    assert "key" not in repr(PoissonSampler(10, 0.5))


@pytest.mark.parametrize("q", [0, -0.1, 1.7, float("nan")])
def test_refuses_a_probability_out_of_range(q):
    with pytest.raises(ValueError, match=r"PoissonSampler: sampling_probability="):
        PoissonSampler(10, q)


# Balls and bins, and truncated samples


def bins_of(sampler, num_epochs):
    """Returns (epochs, n) the bin of each example, and checks that each is in exactly one batch of an epoch."""
    found = np.full((num_epochs, sampler.num_examples), -1)
    for step in range(num_epochs * sampler.num_bins):
        epoch, number = divmod(step, sampler.num_bins)
        indices = sampler.indices(step)
        assert (np.diff(indices) > 0).all()
        assert (found[epoch, indices] == -1).all()
        found[epoch, indices] = number
    assert (found >= 0).all()
    return found


@pytest.mark.thorough
def test_bins_are_uniform_and_independent_between_examples_and_epochs():
    n, t, epochs = 12, 5, 4000
    bins = bins_of(BinsSampler(n, t, key=KEY), epochs)
    for column in bins.T:
        assert stats.chisquare(np.bincount(column, minlength=t)).pvalue > 1e-4
    in_first = (bins == 0) - 1 / t
    others = np.concatenate([np.cov(in_first.T)[np.triu_indices(n, 1)], (in_first[1:] * in_first[:-1]).mean(0)])
    assert np.abs(others).max() < 5 * (1 / t) * (1 - 1 / t) / epochs**0.5
    sizes = (bins == 1).sum(1)
    assert abs(sizes.var() / (n * (1 / t) * (1 - 1 / t)) - 1) < 5 * (2 / epochs) ** 0.5


def test_bins_depend_on_key_and_step_alone_in_any_order():
    sampler, other = BinsSampler(100, 7, key=KEY), BinsSampler(100, 7, key=KEY)
    forwards = [sampler.indices(step).tolist() for step in range(35)]
    assert [other.indices(step).tolist() for step in reversed(range(35))][::-1] == forwards
    assert len(other._of_epochs) <= 5
    assert BinsSampler(100, 7).indices(0).tolist() != BinsSampler(100, 7).indices(0).tolist()
    assert "key" not in repr(sampler)


def test_more_bins_than_examples_and_one_bin():
    assert sorted(bins_of(BinsSampler(2, 9, key=KEY), 3).shape) == [2, 3]
    assert BinsSampler(6, 1, key=KEY).indices(4).tolist() == list(range(6))
    with pytest.raises(ValueError, match="BinsSampler: num_bins=0"):
        BinsSampler(10, 0)


@pytest.mark.thorough
def test_a_truncated_sample_is_a_uniform_part_of_the_poisson_sample():
    n, most, counts = 6, 2, {}
    sampler, whole = TruncatedSampler(n, 0.5, most, key=KEY), PoissonSampler(n, 0.5, key=KEY)
    joined = np.zeros(n)
    for step in range(STEPS):
        drawn, kept = whole.indices(step), sampler.indices(step)
        assert len(kept) == min(most, len(drawn))
        assert set(kept.tolist()) <= set(drawn.tolist())
        joined[kept] += 1
        if len(drawn) == 4:
            place = tuple(np.searchsorted(drawn, kept).tolist())
            counts[place] = counts.get(place, 0) + 1
    assert len(counts) == 6  # the pairs of 4
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4
    assert stats.chisquare(joined).pvalue > 1e-4


def test_classes_take_turns_and_are_drawn_once_uniformly_and_independently():
    n, b, q, steps = 60, 4, 0.1, 4000
    sampler = CyclicSampler(n, q, b, key=KEY)
    joined = np.zeros((steps, n))
    for step in range(steps):
        indices = sampler.indices(step)
        assert (sampler.classes[indices] == step % b).all()
        joined[step, indices] = 1
    own = joined.reshape(-1, b, n)[:, sampler.classes, np.arange(n)]  # the steps at which it is an example's turn
    chi_square = ((own.sum(0) - own.shape[0] * q * b) ** 2 / (own.shape[0] * q * b * (1 - q * b))).sum()
    assert 1e-4 < stats.chi2.sf(chi_square, n) < 1 - 1e-4
    keys = [bytes([k]) * 32 for k in range(200)]
    classes = np.stack([CyclicSampler(n, q, b, key=key).classes for key in keys])
    assert stats.chisquare(np.bincount(classes.ravel(), minlength=b)).pvalue > 1e-4
    assert np.abs(np.corrcoef(classes.T)[np.triu_indices(n, 1)]).max() < 5.5 / len(keys) ** 0.5


def test_in_fixed_order_nothing_is_random():
    sampler = CyclicSampler(10, 1 / 4, 4, in_order=True)
    assert [sampler.indices(step).tolist() for step in range(5)] == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7], [0, 4, 8]]
