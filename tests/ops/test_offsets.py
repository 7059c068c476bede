# SPDX-License-Identifier: Apache-2.0
"""Tests the places of entries that are kept from one batch to the next."""

import numpy as np
import pytest
import torch

from torch_privacy.ops._base import KEPT, multiples, offsets

CPU = torch.device("cpu")


@pytest.mark.parametrize(("sizes", "is_kept"), [((2, 3, 4), True), ((KEPT,), True), ((2, KEPT), False)])
def test_offsets_are_those_of_strides_and_only_few_are_kept(sizes, is_kept):
    steps = tuple(range(7, 7 + len(sizes)))
    found = offsets(tuple(zip(sizes, steps, strict=True)), CPU)
    expected = sum(step * index for step, index in zip(steps, np.indices(sizes, sparse=True), strict=True))
    assert np.array_equal(found.numpy(), expected.ravel())
    assert (offsets(tuple(zip(sizes, steps, strict=True)), CPU) is found) == is_kept


@pytest.mark.parametrize("count", [0, 1, 2, 5, 8, 9])
def test_multiples_count_from_zero(count):
    assert multiples(count, 3, CPU).tolist() == [3 * k for k in range(count)]
