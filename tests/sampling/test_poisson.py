# SPDX-License-Identifier: Apache-2.0
"""Tests Poisson sampling: inclusion counts, independence, and batches that depend only on key and step."""

import numpy as np
import pytest
from scipy import stats

from torch_privacy.sampling.poisson import Poisson

KEY = bytes(range(32))
STEPS = 4000


def inclusions(num_examples=50, q=0.3, steps=STEPS):
    """Returns a table (steps, n) of 0 and 1."""
    sampler = Poisson(num_examples, q, KEY)
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
    indices = Poisson(100, 0.5, KEY).indices(3)
    assert (np.diff(indices) > 0).all()


def test_one_key_and_step_give_one_batch():
    assert np.array_equal(Poisson(100, 0.5, KEY).indices(3), Poisson(100, 0.5, KEY).indices(3))
    assert not np.array_equal(Poisson(100, 0.5).indices(3), Poisson(100, 0.5).indices(3))


def test_probability_one_takes_every_example():
    assert Poisson(10, 1.0).indices(0).tolist() == list(range(10))


def test_the_key_is_not_printed():
    assert "key" not in repr(Poisson(10, 0.5))


@pytest.mark.parametrize("q", [0, -0.1, 1.7, float("nan")])
def test_refuses_a_probability_out_of_range(q):
    with pytest.raises(ValueError, match=r"Poisson: sampling_probability="):
        Poisson(10, q)
