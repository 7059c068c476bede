# SPDX-License-Identifier: Apache-2.0
"""Tests products in bfloat16: rows are those of autograd, and norms are those of what is summed."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_privacy as tp
from torch_privacy.jacobian.rows.norms import first_squared_norms
from torch_privacy.jacobian.rows.plan import choices
from torch_privacy.ops import dense
from torch_privacy.ops.dense import LEAST_POSITIONS, InHalf, in_its_precision
from torch_privacy.ops.linear import Linear

T, D, E = LEAST_POSITIONS + 3, 24, 16


def added(x: Tensor, w: Tensor) -> Tensor:
    flat = x.flatten(0, 1)  # as GPT-2 in transformers does
    return torch.addmm(flat.new_zeros(E), flat, w).view(*x.shape[:2], E)


SPELLINGS = {  # of a product with a parameter: its shape, that of one input, and how it is computed
    "linear": ((E, D), (T, D), F.linear),
    "matmul": ((D, E), (T, D), torch.matmul),
    "addmm": ((D, E), (T, D), added),
    "convolution": ((E, D, 3, 3), (D, 8, 9), partial(F.conv2d, stride=(1, 2), padding=1)),
    "grouped convolution": ((E, D // 4, 5), (D, 40), partial(F.conv1d, groups=4)),
    "transposed convolution": ((D, E, 2, 2), (D, 6, 7), partial(F.conv_transpose2d, stride=2)),
}


class Product(nn.Module):
    """One of the products, under autocast or in bfloat16 itself."""

    def __init__(self, spelling: str, autocast: bool):
        super().__init__()
        shape, _, self.product = SPELLINGS[spelling]
        self.w, self.autocast = nn.Parameter(torch.randn(shape)), autocast

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self.product(x, self.w).tanh()


@pytest.fixture(autouse=True)
def in_float32() -> None:
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rows_are_what_one_backward_per_example_gives_in_bfloat16(spelling, autocast):
    model, x = Product(spelling, autocast), torch.randn(6, *SPELLINGS[spelling][1])
    if not autocast:
        model, x = model.bfloat16(), x.bfloat16()
    with tp.record(model) as tape:
        losses = model(x).float().square().flatten(1).sum(1)
    rows = tape.jacobian(losses).rows()["w"]
    assert rows.dtype is torch.float32
    assert torch.equal(rows, rows.bfloat16().float())
    for k in range(len(x)):
        (expected,) = torch.autograd.grad(model(x[k : k + 1]).float().square().sum(), model.w)
        torch.testing.assert_close(rows[k], expected.float(), rtol=2**-7, atol=2e-2)  # sums are rounded otherwise


@pytest.mark.parametrize("examples_at_once", [1, 2, 100])
def test_norms_are_those_of_the_rows_that_are_summed(examples_at_once, monkeypatch):
    """Rows that are made twice, for norms and for the sum, are rounded alike: no clipped row exceeds its norm."""
    monkeypatch.setattr("torch_privacy.ops._base.CHUNK_FLOATS", examples_at_once * E * D)
    monkeypatch.setattr("torch_privacy.jacobian.rows.norms.CHUNK_FLOATS", examples_at_once * E * D)
    op = InHalf(Linear(torch.randn(7, T, D).bfloat16(), torch.randn(7, T, E).bfloat16()))
    norms = first_squared_norms(op).sqrt()
    for k in range(7):
        c = torch.zeros(7)
        c[k] = 1 / norms[k]
        assert abs(op.weighted_sum(c).norm().item() - 1) < 1e-6
    unrounded = torch.einsum("nte,ntd->ned", op.op.b.double(), op.op.x.double()).flatten(1).norm(dim=1)
    assert not torch.allclose(norms.double(), unrounded, rtol=1e-6)  # the test would see rows that are not rounded
    torch.testing.assert_close(norms.double(), unrounded, rtol=2**-9, atol=0)


@pytest.mark.parametrize("change", [{}, {"t": LEAST_POSITIONS - 1}, {"most": E * D - 1}, {"in_half": False}], ids=str)
def test_few_positions_and_huge_weights_stay_in_float32(change: dict[str, Any], monkeypatch):
    monkeypatch.setattr(dense, "MOST_ENTRIES", change.get("most", E * D))
    t = change.get("t", LEAST_POSITIONS)
    x, b = torch.randn(3, t, D), torch.randn(3, t, E).bfloat16()
    op = in_its_precision(Linear(x, b), in_half=change.get("in_half", True))
    assert type(op) is (Linear if change else InHalf)
    assert op.dtype is torch.float32
    torch.testing.assert_close(op.rows(), torch.einsum("nte,ntd->ned", b.float(), x), rtol=2**-6, atol=0.3)


def test_rows_are_kept_or_made_again_whatever_is_cheaper():
    factors = (torch.randn(n, 128, 512).bfloat16() for n in (2, 64))
    small, large = (InHalf(Linear(factor, factor)) for factor in factors)
    assert [choice.keeps for choice in choices(small)] == ["rows", "x and b"]
    assert [choice.keeps for choice in choices(large)] == ["x and b", "rows"]  # memory that is fresh each time
    assert choices(small)[1].held == small.op.x.nbytes + small.op.b.nbytes
