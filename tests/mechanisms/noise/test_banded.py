# SPDX-License-Identifier: Apache-2.0
"""Noise that is correlated between steps: C x = z, from any step on, for any division into tensors, on a grid."""

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz

from torch_privacy.mechanisms.noise import BandedNoise, InverseBandedNoise, Noise, grid_unit

KEY = bytes(range(32))
COEFFICIENTS = (0.8, 0.5, 0.2, 0.1)
STEPS = 12


def zeros(*sizes, dtype=torch.float64):
    return {str(k): torch.zeros(size, dtype=dtype) for k, size in enumerate(sizes)}


def vectors(noise, sizes=(5, 3), first=0, last=STEPS):
    """Returns (steps, 8) the noise of each step."""
    rows = []
    for step in range(first, last):
        sums = zeros(*sizes)
        noise.add_to(step, sums, stddev=1.0)
        rows.append(torch.cat([*sums.values()]))
    return torch.stack(rows).numpy()


def drawn(first=0, last=STEPS):
    rows = []
    for step in range(first, last):
        z = zeros(8)
        Noise(KEY).fill(step, z)
        rows.append(z["0"])
    return torch.stack(rows).numpy()


def matrix(size):
    return toeplitz(np.append(COEFFICIENTS, np.zeros(size))[:size], np.zeros(size))


def test_the_coefficients_times_the_noise_are_independent_numbers():
    x = vectors(BandedNoise(KEY, COEFFICIENTS))
    assert np.abs(matrix(STEPS) @ x - drawn()).max() < 4 * 2.0**-31  # x is on a grid
    noise = BandedNoise(KEY, COEFFICIENTS)
    exact = np.stack([noise.correlated(step, zeros(8), {"0": 0})["0"].numpy() for step in range(STEPS)])
    assert np.abs(matrix(STEPS) @ exact - drawn()).max() < 1e-12


def test_a_banded_inverse_sums_the_numbers_of_its_steps():
    noise = InverseBandedNoise(KEY, COEFFICIENTS)
    exact = np.stack([noise.correlated(step, zeros(8), {"0": 0})["0"].numpy() for step in range(STEPS)])
    assert np.abs(matrix(STEPS) @ drawn() - exact).max() < 1e-14
    later = vectors(InverseBandedNoise(KEY, COEFFICIENTS, since=4), first=4)
    assert np.abs(matrix(STEPS - 4) @ drawn(first=4) - later).max() < 4 * 2.0**-31
    whole = vectors(noise)
    assert np.array_equal(vectors(InverseBandedNoise(KEY, COEFFICIENTS), (2, 6), first=7), whole[7:])
    part = {"b": torch.zeros(3, dtype=torch.float64)}
    noise.add_to(5, part, {"b": 1.0}, {"b": 4})
    assert np.array_equal(part["b"].numpy(), whole[5, 4:7])


def test_one_coefficient_is_ordinary_noise():
    assert np.array_equal(vectors(InverseBandedNoise(KEY, (1.0,))), vectors(Noise(KEY)))
    assert np.array_equal(vectors(BandedNoise(KEY, (1.0,))), vectors(Noise(KEY)))


@pytest.mark.parametrize("first", [1, 3, 7])
def test_a_step_is_the_same_whatever_was_made_before(first):
    whole = vectors(BandedNoise(KEY, COEFFICIENTS))
    again = BandedNoise(KEY, COEFFICIENTS)
    assert np.array_equal(vectors(again, first=first), whole[first:])
    assert np.array_equal(vectors(again, first=2, last=4), whole[2:4])  # back, as after a refused step
    assert np.array_equal(vectors(again, first=9), whole[9:])
    assert len(again._past) <= len(COEFFICIENTS)


@pytest.mark.parametrize("sizes", [(8,), (1, 7), (2, 2, 4)])
def test_the_division_into_tensors_changes_no_number(sizes):
    noise = BandedNoise(KEY, COEFFICIENTS)
    before, whole = vectors(noise, last=5), vectors(BandedNoise(KEY, COEFFICIENTS))
    assert np.array_equal(np.concatenate([before, vectors(noise, sizes, first=5)]), whole)


def test_who_holds_a_slice_makes_the_noise_of_the_slice():
    whole, part, found = vectors(BandedNoise(KEY, COEFFICIENTS)), BandedNoise(KEY, COEFFICIENTS), []
    for step in range(STEPS):
        own = {"b": torch.zeros(3, dtype=torch.float64)}
        part.add_to(step, own, {"b": 1.0}, {"b": 4})
        found.append(own["b"].numpy())
    assert np.array_equal(np.stack(found), whole[:, 4:7])


def test_a_run_that_begins_later_knows_no_step_before():
    noise = BandedNoise(KEY, COEFFICIENTS, since=4)
    x = vectors(noise, first=4)
    assert np.abs(matrix(STEPS - 4) @ x - drawn(first=4)).max() < 4 * 2.0**-31
    with pytest.raises(ValueError, match="step=3"):
        noise.add_to(3, zeros(8), 1.0)


def test_sums_and_noise_are_rounded_once_to_the_grid_of_the_noise():
    stddev, sums = 0.37, {"0": torch.linspace(-1, 1, 8, dtype=torch.float64)}
    noise, unit = BandedNoise(KEY, COEFFICIENTS), grid_unit(0.37)
    before = sums["0"].clone()
    noise.add_to(6, sums, stddev)
    x = noise.correlated(6, sums, {"0": 0})["0"]
    expected = ((before / unit).round() + (x * (stddev / unit)).round()) * unit
    assert torch.equal(sums["0"], expected)
    single = zeros(8, dtype=torch.float32)
    noise.add_to(6, single, {"0": 0.0})
    assert not single["0"].any()


def test_the_variance_of_each_step_is_that_of_the_inverse():
    noise, n = BandedNoise(KEY, COEFFICIENTS), 20_000
    w = np.linalg.inv(matrix(6))
    for step in range(6):
        sums = zeros(n)
        noise.add_to(step, sums, 1.0)
        expected = (w[step] ** 2).sum()
        assert abs(float(sums["0"].var()) / expected - 1) < 5 * (2 / n) ** 0.5
