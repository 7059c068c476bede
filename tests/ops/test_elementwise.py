# SPDX-License-Identifier: Apache-2.0
"""Tests rows of parameters that are broadcast, beside what the contract and the oracle show of them."""

import torch

from torch_privacy.ops._base import Layout
from torch_privacy.ops.elementwise import sum_to_weight, write


def test_examples_along_a_later_dimension_are_not_taken_for_the_first_ones():
    """Terms (3, 3, 2) fit a weight (3, 2) both ways, if examples are along the first or the second dimension."""
    terms, weight = torch.randn(3, 3, 2), torch.randn(3, 2)
    rows = sum_to_weight(terms, weight, Layout(1, 1, 3, 1))
    for i, row in enumerate(rows):
        expected = torch.zeros(3, 2)
        expected[i] = terms[:, i].sum(0)
        torch.testing.assert_close(row, expected)
    assert sum_to_weight(terms, weight, Layout(0, 1, 3, 1)).equal(terms)


def test_what_is_written_into_some_examples_has_no_rule():
    y, p = torch.randn(3, 2), torch.randn(2)
    assert not [*write(y, y, slice(1, None), p)]
    assert not [*write(y, y, (0, slice(None)), p)]
    assert [use.key for use in write(y, y, (slice(None), 1), p[0])] == [(slice(None), 1)]  # type: ignore[attr-defined]
