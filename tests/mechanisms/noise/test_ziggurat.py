# SPDX-License-Identifier: Apache-2.0
"""Tests the ziggurat part by part: its areas, its rectangles, and what is left beside them and in the tail."""

import math

import numpy as np
import pytest
from scipy import special, stats

from torch_privacy.mechanisms.noise.processor import PARTS, Keystream, edges, in_rectangles, in_the_rest, tables

AREA = math.sqrt(math.pi / 2)  # under exp(-x²/2), x >= 0


def curve(x):
    return np.exp(-0.5 * x * x)


def random_words(*shape):
    return np.random.default_rng(1).integers(0, 2**64, shape, dtype=np.uint64)


def numbers_of(words):
    """Returns the numbers of signed words in rectangles, and the indices of those that are in none."""
    out = np.empty(len(words))
    return out, in_rectangles(words, 1.0, np.empty(len(words), np.int64), out)


def under_the_rectangles(x):
    """Returns the area of the rectangles to the left of x."""
    right = np.array(edges())
    heights = np.diff(curve(right), prepend=0.0)
    upward = np.cumsum(heights)
    beyond = np.cumsum((heights * right)[::-1])[::-1]  # of the rectangles from each one to the top
    higher = len(right) - np.searchsorted(right[::-1], x)  # rectangles that reach beyond x come first
    return upward[higher - 1] * (higher > 0) * x + np.append(beyond, 0.0)[higher]


def test_rectangles_are_equal_parts_of_the_area_under_the_curve():
    right = np.array(edges())
    areas = right * np.diff(curve(right), prepend=0.0)
    np.testing.assert_allclose(areas, AREA / PARTS, rtol=1e-11)
    assert (np.diff(right) < 0).all()
    assert len(right) + tables().num_rest == PARTS


def test_boxes_cover_what_is_left_under_the_curve():
    left, width, bottom, _, upper, fall, *_ = tables().boxes[1:].T
    for along in np.linspace(0, 1, 33):
        height = curve(left + width * along) - bottom
        assert (height >= -1e-15).all()
        assert (height <= upper - fall * along + 1e-15).all()


def test_boxes_accept_the_share_that_the_areas_say():
    words = random_words(10**6, 4)
    count = int(in_the_rest(words)[1].sum())
    expected = tables().num_rest / PARTS * AREA / tables().areas[-1]
    assert stats.binomtest(count, len(words), expected).pvalue > 1e-3
    assert expected > 0.96


def test_numbers_beside_the_rectangles_have_the_law_that_is_left():
    """Both signs are equally likely, and magnitudes follow the area under the curve, less that of the rectangles."""
    numbers, accepted = in_the_rest(random_words(10**6, 4))
    numbers = numbers[accepted]
    left = tables().num_rest * AREA / PARTS

    def distribution(x):
        return (AREA * special.erf(x / 2**0.5) - under_the_rectangles(x)) / left

    assert distribution(np.array([40.0])) == pytest.approx(1, abs=1e-9)
    assert stats.kstest(np.abs(numbers), distribution).pvalue > 1e-3
    assert stats.binomtest(int((numbers > 0).sum()), len(numbers)).pvalue > 1e-3


def test_numbers_in_the_tail_have_its_law():
    words = random_words(10**6, 4)
    words[:, 0] = 0  # chooses the first box
    numbers, accepted = in_the_rest(words)
    beyond = edges()[0]
    magnitudes = np.abs(numbers[accepted])
    assert magnitudes.min() > beyond
    assert stats.kstest(magnitudes, lambda x: 1 - stats.norm.sf(x) / stats.norm.sf(beyond)).pvalue > 1e-3


def test_the_largest_number_is_the_documented_one():
    words = np.zeros((1, 4), np.uint64)
    assert np.abs(in_the_rest(words)[0][0]) == pytest.approx(edges()[0] + 65 * math.log(2) / edges()[0])
    assert round(float(np.abs(in_the_rest(words)[0][0])), 1) == 14.3
    assert 2 * stats.norm.sf(14.2) < 1e-45


@pytest.mark.parametrize("part", [3, 4, 1000, PARTS // 2, PARTS - 1])
def test_words_of_a_rectangle_are_uniform_in_it_with_sign(part):
    words = (random_words(10**5) & ~np.uint64(PARTS - 1) | np.uint64(part)).view(np.int64)
    numbers, none = numbers_of(words)
    width = edges()[part - 3]
    assert not len(none)
    assert stats.kstest(numbers, stats.uniform(-width, 2 * width).cdf).pvalue > 1e-3


def test_words_of_the_other_parts_are_found():
    words = np.arange(-PARTS, PARTS, dtype=np.int64)
    numbers, none = numbers_of(words)
    assert none.tolist() == [0, 1, 2, PARTS, PARTS + 1, PARTS + 2]
    assert not numbers[none].any()


def test_every_part_is_equally_likely():
    memory, size = bytearray(2**20), 100_000
    counts = np.zeros(PARTS, int)
    for start in range(0, 20 * size, size):
        words = Keystream(bytes(32)).words(0, start, size, memory)
        counts += np.bincount(words & (PARTS - 1), minlength=PARTS)
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize(("magnitude", "error"), [(0.5, 1e-7), (1.5, 2e-7), (2.5, 6e-7), (3.5, 4e-6)])
def test_points_of_the_grid_have_their_probability_to_the_documented_error(magnitude, error):
    """Counts the words of every rectangle that fall between two points, for 100 points of the grid of 2^-32."""
    right, unit, errors = np.array(edges()), 2.0**-32, []
    for point in np.random.default_rng(2).uniform(magnitude - 0.5, magnitude + 0.5, 100):
        reaching = right[right > point + unit]
        upper_bits = 64 - int(math.log2(PARTS))  # with sign; the others choose the part
        counts = np.floor((point + unit) / reaching * 2.0 ** (upper_bits - 1))
        counts -= np.floor(point / reaching * 2.0 ** (upper_bits - 1))
        expected = curve(reaching[-1]) * unit / (2 * AREA)
        errors.append(counts.sum() / 2.0**upper_bits / PARTS / expected - 1)
    assert np.square(errors).mean() ** 0.5 < error
