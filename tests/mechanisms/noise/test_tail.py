# SPDX-License-Identifier: Apache-2.0
"""Noise of any symmetric law: the law itself, its bits, its places, its jitter on the grid."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtri

import torch_privacy as tp
from torch_privacy.mechanisms.noise import Noise, TailNoise, grid_unit
from torch_privacy.mechanisms.noise.processor import Keystream
from torch_privacy.mechanisms.noise.tail import SMALLEST_TAIL

KEY = bytes(range(32))
LAWS = {  # the inverse of the tail, and scipy's law
    "normal": (lambda tail: -2.0 * ndtri(tail / 2), stats.norm(scale=2.0)),
    "laplace": (lambda tail: -np.log(tail), stats.laplace()),
    "logistic": (lambda tail: np.log(2 / tail - 1), stats.logistic()),
}


def noise_of(law="laplace"):
    magnitude, theirs = LAWS[law]
    return TailNoise(KEY, magnitude, float(theirs.std()))


def zeros(*sizes, dtype=torch.float64):
    return {str(k): torch.zeros(size, dtype=dtype) for k, size in enumerate(sizes)}


def added(noise, *sizes, step=3, places=None, stddev=1.0):
    sums = zeros(*sizes)
    noise.add_to(step, sums, stddev, places)
    return torch.cat([*sums.values()]).numpy()


def words(step, count):
    """Returns the two words of each place as Python's integers, from the cipher itself."""
    keystream = Keystream(hashlib.blake2b(b"tail", key=KEY, digest_size=32).digest())
    found = keystream.words(step, 0, 2 * count, bytearray(16 * count + 32)).view(np.uint64)
    return [(int(first), int(second)) for first, second in found.reshape(-1, 2)]


@pytest.mark.parametrize("law", LAWS)
def test_numbers_have_the_law_divided_by_its_standard_deviation(law):
    n, theirs = 200_000, LAWS[law][1]
    found = np.sort(added(noise_of(law), n) * theirs.std())
    most = np.sqrt(np.log(2e6) / (2 * n))  # a sample is farther off with probability 1e-6 (Massart 1990)
    cdf = theirs.cdf(found)
    assert max((np.arange(1, n + 1) / n - cdf).max(), (cdf - np.arange(n) / n).max()) < most
    for tail in (1e-2, 1e-3):  # of both sides, where the whole distribution shows little
        for beyond in (found > theirs.isf(tail), found < theirs.ppf(tail)):
            assert stats.binomtest(int(beyond.sum()), n, tail).pvalue > 1e-6


def test_numbers_of_neighboring_places_and_steps_are_uncorrelated():
    n, noise = 200_000, noise_of()
    x, y = added(noise, n), added(noise, n, step=4)
    pairs = [(x, y), (x[1:], x[:-1]), (np.abs(x), np.abs(y)), (np.abs(x[1:]), np.abs(x[:-1]))]
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(n) for a, b in pairs)


def test_a_tail_has_111_bits_and_a_number_its_sign():
    seen = []
    noise = TailNoise(KEY, lambda tail: (seen.append(tail), 1 - tail)[1], 1.0)
    tensors = zeros(500)
    noise.fill(7, tensors)
    for tail, number, (first, second) in zip(seen[0], tensors["0"].tolist(), words(7, 500), strict=True):
        exact = Fraction(2 * ((first << 47) + (second >> 17)) + 1, 2**112)
        assert abs(Fraction(float(tail)) / exact - 1) < Fraction(1, 2**52)
        assert number == (-(1 - tail) if second % 2 else 1 - tail)


@pytest.mark.parametrize("second", [0, 2**17, 2**17 * 12345, 2**64 - 2])
def test_the_smallest_tails_keep_their_bits(second, monkeypatch):
    pair = np.array([0, second], np.uint64).view(np.int64)
    monkeypatch.setattr(Keystream, "words", lambda *_: pair)
    tensor = {"": torch.zeros(1, dtype=torch.float64)}
    TailNoise(KEY, lambda tail: tail, 1.0).fill(0, tensor)
    assert tensor[""].item() == ((second >> 17) + 0.5) * 2.0**-111 >= SMALLEST_TAIL
    monkeypatch.setattr(Keystream, "words", lambda *_: np.full(2, -1, np.int64))
    TailNoise(KEY, lambda tail: tail, 1.0).fill(0, tensor)
    assert tensor[""].item() == -1.0


def test_sums_and_noise_are_on_the_grid_and_jitter_is_uniform_on_its_65536_points():
    n, stddev, noise = 20_000, 0.37, noise_of()
    sums, numbers = {"0": torch.linspace(-1, 1, n, dtype=torch.float64)}, zeros(n)
    before, unit = sums["0"].numpy().copy(), grid_unit(stddev)
    noise.add_to(5, sums, stddev)
    noise.fill(5, numbers)
    jitter = sums["0"].numpy() / unit - np.rint(before / unit) - np.rint(numbers["0"].numpy() * (stddev / unit))
    assert np.array_equal(jitter, [(second >> 1) % 2**16 - 2**15 for _, second in words(5, n)])
    assert stats.kstest(jitter, stats.uniform(-(2**15), 2**16).cdf).pvalue > 1e-6
    single = zeros(8, dtype=torch.float32)
    noise.add_to(5, single, {"0": 0.0})
    assert not single["0"].any()


@pytest.mark.parametrize("sizes", [(1, 7), (2, 2, 4)])
def test_the_division_into_tensors_changes_no_number(sizes):
    assert np.array_equal(added(noise_of(), *sizes), added(noise_of(), 8))


def test_who_holds_a_slice_makes_the_noise_of_the_slice():
    whole = added(noise_of(), 70_000)  # more than a chunk
    assert np.array_equal(added(noise_of(), 100, places={"0": 65_000}), whole[65_000:65_100])
    assert np.array_equal(added(noise_of(), 100, 7, places={"0": 7, "1": 0}), np.append(whole[7:107], whole[:7]))


def test_numbers_depend_on_key_and_step_and_are_not_those_of_gaussian_noise():
    whole = added(noise_of("normal"), 50)
    others = [added(noise_of("normal"), 50, step=4), added(TailNoise(bytes(32), LAWS["normal"][0], 2.0), 50)]
    gaussian = zeros(50)
    Noise(KEY).add_to(3, gaussian, 1.0)
    assert not any((whole == other).any() for other in [*others, gaussian["0"].numpy()])


@pytest.mark.parametrize("magnitude", [lambda tail: tail * np.nan, lambda tail: tail[:-1], lambda tail: 1 / (tail * 0)])
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_numbers_that_are_not_finite_are_refused(magnitude):
    sums = zeros(4)
    with pytest.raises(tp.Refused, match=r"magnitude\(tail\) must return a finite number"):
        TailNoise(KEY, magnitude, 1.0).add_to(0, sums, 1.0)
    assert not sums["0"].any()
