# SPDX-License-Identifier: Apache-2.0
"""Tests of projections by the linear rule itself, which larger layers get from their rows."""

import pytest
import torch

from torch_privacy.jacobian.rows.norms import projections
from torch_privacy.ops.linear import Linear


@pytest.mark.parametrize(("t", "d", "e"), [(1, 7, 3), (1, 3, 7), (4, 5, 2), (4, 2, 5), (2, 3, 3), (0, 3, 2)])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_products_with_directions_are_those_of_the_rows(t, d, e, k):
    op, v = Linear(torch.randn(5, t, d), torch.randn(5, t, e)), torch.randn(k, e, d)
    rows = torch.stack([b.mT @ x for x, b in zip(op.x, op.b, strict=True)])
    expected = torch.stack([torch.stack([(row * one).sum() for one in v]) for row in rows])
    torch.testing.assert_close(op.project(v), expected)
    torch.testing.assert_close(projections(op, v), expected)
