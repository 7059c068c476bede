# SPDX-License-Identifier: Apache-2.0
"""Tests layers that answer together: small ones of equal shapes, whose factors are stacked, beside others."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import torch_privacy as tp
from torch_privacy.model_check.rehearsal.row_digests import direction
from torch_privacy.ops import linear


def losses_of(model, x):
    return model(x).square().sum(1)


def rows_by_backwards(model, x):
    rows = []
    for k in range(len(x)):
        model.zero_grad()
        losses_of(model, x[k : k + 1]).sum().backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(rows)


@pytest.mark.parametrize("stacked", [linear.STACKED, 0])
def test_outer_products_that_answer_together_are_exact(stacked, monkeypatch):
    monkeypatch.setattr(linear, "STACKED", stacked)
    torch.manual_seed(0)
    widths = [5, 4, 4, 4, 7, 3]
    model = nn.Sequential(*[m for d, e in pairwise(widths) for m in (nn.Linear(d, e), nn.Tanh())]).double()
    x, c = torch.randn(6, 5, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    rows = rows_by_backwards(model, x)
    for _ in range(3):
        with tp.record(model) as tape:
            losses = losses_of(model, x)
        jacobian = tape.jacobian(losses)
        torch.testing.assert_close(jacobian.squared_norms(), rows.square().sum(1), rtol=1e-12, atol=0)
        for _ in range(2):  # rows outside of a training answer as often as they are asked
            total = torch.cat([part.flatten() for part in jacobian.weighted_sum(c).values()])
            torch.testing.assert_close(total, c @ rows, rtol=1e-11, atol=1e-12)


def test_products_with_a_direction_are_those_of_separate_layers_to_the_last_digits():
    """A rehearsal compares them in float64 where the layers of one run answer together, and those of another do not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(5), nn.PReLU(5), nn.Linear(5, 2, bias=False), nn.LayerNorm(2)).double()
    with tp.record(model) as tape:
        losses = losses_of(model, torch.randn(6, 5, dtype=torch.float64))
    jacobian = tape.jacobian(losses)
    names = list(jacobian.shapes)
    together = jacobian.project_on(direction)
    separate = sum(jacobian.restricted([name]).project_on(direction) for name in names)
    torch.testing.assert_close(together, separate, rtol=1e-13, atol=1e-13)
