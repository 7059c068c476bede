# SPDX-License-Identifier: Apache-2.0
"""No norm in float32 is too short: neither for long sums, nor if positions cancel, nor if squares underflow."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Size, Tensor

from torch_privacy.jacobian.rows.norms import squared_norms
from torch_privacy.ops import Op
from torch_privacy.ops.conv import Conv, Geometry
from torch_privacy.ops.dense import RUN, SUMMED, product, squared_lengths
from torch_privacy.ops.embedding import Embedding, TiedEmbedding
from torch_privacy.ops.linear import Arrangement, Bilinear, GroupedLinear, Linear
from torch_privacy.ops.routed import RoutedLinear

CLOSE = 5e-6  # half of the excess that the guarantee allows a clipped row
HALF_A_UNIT = 2.0**-24  # relative rounding of one addition in float32


def squared(kernel: int) -> Geometry:
    return Geometry((kernel,) * 2, (1, 1), (kernel // 2,) * 2, (1, 1), 1)


# name -> the op of two examples with the factors x and b, each made by a function of its shape
OPS: dict[str, Callable[[Callable[..., Tensor], Callable[..., Tensor]], Op]] = {
    "linear, one position": lambda x, b: Linear(x(2, 1, 5000), b(2, 1, 40)),
    "linear": lambda x, b: Linear(x(2, 4, 5000), b(2, 4, 4)),
    "linear, in halves": lambda x, b: Linear(x(2, 200, 300), b(2, 200, 30)),
    "matrices": lambda x, b: GroupedLinear(
        x(2, 2, 4, 3000), b(2, 2, 4, 4), Arrangement((2, 4, 3000), (0, 1, 2), Size((2, 4, 3000)))
    ),
    "bilinear": lambda x, b: Bilinear(x(2, 4, 3000), torch.rand(2, 4, 3), b(2, 4, 4)),
    "bilinear, one position": lambda x, b: Bilinear(x(2, 1, 3000), b(2, 1, 3), torch.rand(2, 1, 4)),
    "convolution": lambda x, b: Conv(x(2, 1, 16, 12, 12), b(2, 1, 16, 12, 12), squared(3)),
    "convolution of few places": lambda x, b: Conv(x(2, 1, 300, 4, 4), b(2, 1, 300, 4, 4), squared(3)),
    "pointwise convolution": lambda x, b: Conv(x(2, 1, 300, 6, 6), b(2, 1, 30, 6, 6), squared(1)),
    "depthwise convolution": lambda x, b: Conv(
        x(2, 1, 16, 12, 12), b(2, 1, 16, 12, 12), replace(squared(3), groups=16)
    ),
    "look-up": lambda x, b: Embedding(torch.randint(7, (2, 300)), x(2, 300, 30), Size((7, 30))),
    "tied embedding": lambda x, b: TiedEmbedding(
        Embedding(torch.randint(50, (2, 6)), x(2, 6, 300), Size((50, 300))), Linear(x(2, 5, 300), b(2, 5, 50))
    ),
    "routed": lambda x, b: RoutedLinear(x(2, 12, 2000), b(2, 12, 5), torch.randint(3, (2, 12)), 3),
}
FILLS: dict[str, Callable[..., Tensor]] = {
    "all the same": torch.ones,
    "positive": torch.rand,
    "of both signs": torch.randn,
    "the same at all positions": lambda *shape: torch.rand(shape[0], *(1,) * (len(shape) - 2), shape[-1]).repeat(
        1, *shape[1:-1], 1
    ),
}
SCALES = {  # of x and of b; their product may have any length
    "ordinary": (0.3, 1e-3),
    **{f"x of 1e{k}": (2.9 * 10.0**k, 2e18) for k in (-17, -18, -19, -20, -21, -22, -23, -24, -26, -30)},
    **{f"b of 1e{k}": (2e18, 3.1 * 10.0**k) for k in (-19, -20, -21, -22, -23, -25)},
    "both small": (1e-15, 1e-4),
}


def in_float64(held: Any) -> Any:
    if isinstance(held, Tensor) and held.is_floating_point():
        return held.double()
    if isinstance(held, Op):
        return replace(held, **{field.name: in_float64(getattr(held, field.name)) for field in fields(held)})
    return held


def assert_not_too_short(op: Op, allowed: float = CLOSE) -> None:
    """Asserts that no method gives too short a norm, for rows that are long enough to be clipped."""
    exact = in_float64(op).rows().flatten(1).norm(dim=1)
    known = exact > 1e-10
    for method in op.methods():
        found = squared_norms(op, method).double().sqrt()
        assert (found >= exact * (1 - allowed))[known].all(), (method.name, found, exact)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", OPS)
def test_factors_with_squares_that_underflow_leave_no_row_unclipped(name, fill, scale):
    """Squares of numbers below 1e-19 underflow in float32; the other factor may be large."""
    torch.set_default_dtype(torch.float32)
    x, b = SCALES[scale]
    assert_not_too_short(OPS[name](lambda *shape: x * FILLS[fill](*shape), lambda *shape: b * FILLS[fill](*shape)))


def test_positions_of_different_sizes_leave_no_row_unclipped():
    """Small factors at one position count, however large the factors are at another."""
    torch.set_default_dtype(torch.float32)
    x, b = torch.ones(1, 2, 50), torch.zeros(1, 2, 4)
    x[:, 1], b[:, 1] = 1e-23, 2e18
    assert_not_too_short(Linear(x, b))


LONG = [100, 129, 1023, 2048, 2049, 5000, 200_000]


def hard_to_add(kind: str, k: int) -> Tensor:
    """Returns (k,) numbers with squares whose sum, added one by one in float32, is too small.

    Those that follow a one are too small by a hair for a sum of one to notice: all of them are lost.
    """
    numbers = torch.full((k,), 0.3 if kind == "all the same" else (0.98 * HALF_A_UNIT) ** 0.5)
    numbers[0] = 1.0
    return numbers


@pytest.mark.thorough(but=3)
@pytest.mark.parametrize("k", LONG)
@pytest.mark.parametrize("kind", ["all the same", "rounded down"])
def test_products_have_no_long_sums(k, kind):
    """The largest error is the number of consecutive additions times the error of one, on any processor."""
    torch.set_default_dtype(torch.float32)
    additions = SUMMED + RUN + math.log2(k)
    for n, m in ((1, 1), (1, 2), (3, 20)):  # torch has separate loops for small products
        repeated = hard_to_add(kind, k).expand(n, m, k)
        for x in (repeated, repeated.contiguous()):
            exact = x.double() @ x.double().mT
            torch.testing.assert_close(product(x, x.mT).double(), exact, rtol=additions * HALF_A_UNIT, atol=0)


@pytest.mark.parametrize("k", LONG)
@pytest.mark.parametrize("kind", ["all the same", "rounded down"])
def test_lengths_have_no_long_sums(k, kind):
    torch.set_default_dtype(torch.float32)
    x = hard_to_add(kind, k).expand(2, k).contiguous()
    torch.testing.assert_close(squared_lengths(x).double().sqrt(), x.double().norm(dim=1), rtol=1e-5, atol=0)
    norms = squared_norms(Linear(x[:, None], x[:, None])).double().sqrt()
    assert (norms >= x.double().square().sum(1) * (1 - 1e-5)).all()


@pytest.mark.parametrize("k", [100, 129, 2048, 2049, 5000])
def test_products_equal_those_of_torch(k):
    a, b = torch.randn(3, 4, k), torch.randn(3, k, 5)
    torch.testing.assert_close(product(a, b), a @ b)
    torch.testing.assert_close(product(a.mT.contiguous().mT, b), a @ b)


@pytest.mark.parametrize("k", [0, 3, SUMMED + 1])
def test_products_equal_those_of_torch_if_lines_are_far_apart(k):
    a, b = torch.randn(k, 70, 40), torch.randn(k, 70, 50)  # positions first, so that a line follows after 70 others
    halves = torch.randn(k, 70, 100)[:, :, 50:]
    for left, right in ((a, b), (b, a), (a, halves), (a.transpose(0, 1).contiguous().transpose(0, 1), b)):
        left, right = left.transpose(0, 1), right.transpose(0, 1)
        torch.testing.assert_close(product(left.mT, right), left.mT @ right)


@pytest.mark.parametrize("places", [16, 64])
def test_rows_of_many_places_are_as_long_as_they_should_be(places):
    torch.set_default_dtype(torch.float32)
    x, b = torch.full((1, 1, 3, places, places), 0.3), torch.full((1, 1, 4, places, places), 0.7)
    assert_not_too_short(Conv(x, b, squared(3)))


def test_gram_is_computed_again_if_positions_cancel():
    """Two positions with nearly opposite gradients: the Gram sum loses all digits in float32, the row does not."""
    x = torch.ones(4, 2, 50)
    b = torch.ones(4, 2, 50)
    b[:, 1] = -1 + 1e-5
    op = Linear(x.float(), b.float())
    torch.testing.assert_close(op._gram(), op._rows_norms(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [16, 64, 256, 512])
@pytest.mark.parametrize("common", [0.0, 0.3, 1.0, 10.0])
def test_gram_is_right_if_equal_positions_have_alternating_gradients(size, common):
    torch.set_default_dtype(torch.float32)
    x = torch.rand(2, 1, 128) * common + 0.3 * torch.randn(2, size, 128)
    signs = torch.where(torch.arange(size) % 2 == 0, 1.0, -1.0)[None, :, None]
    op = Linear(x, signs * torch.rand(2, 1, 128) + 0.02)
    exact = (op.b.double().mT @ op.x.double()).square().sum((1, 2))
    torch.testing.assert_close(op._gram().double().sqrt(), exact.sqrt(), rtol=CLOSE, atol=0)


@pytest.mark.parametrize("size", [4, 8, 16, 24])
@pytest.mark.parametrize("common", [0.0, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("beside", [0.0, 1e-4, 1e-3, 0.01, 0.02, 0.1])
@pytest.mark.parametrize(
    ("d", "e", "geometry"),
    [(16, 8, squared(3)), (64, 8, squared(1)), (16, 16, replace(squared(3), groups=16))],
    ids=["square", "pointwise", "depthwise"],
)
def test_gram_of_places_is_right_if_gradients_alternate(d, e, geometry, beside, common, size):
    torch.set_default_dtype(torch.float32)
    x = torch.rand(4, 1, d, 1, 1) * common + 0.3 * torch.randn(4, 1, d, size, size)
    places = torch.arange(size)
    signs = torch.where((places[:, None] + places) % 2 == 0, 1.0, -1.0)
    op = Conv(x, signs * torch.rand(4, 1, e, 1, 1) + beside, geometry)
    exact = in_float64(op).rows().flatten(1).norm(dim=1)
    for method in op.methods():
        torch.testing.assert_close(squared_norms(op, method).double().sqrt(), exact, rtol=CLOSE, atol=0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_norms_of_rows_with_terms_that_cancel_come_from_the_rows(scale):
    torch.set_default_dtype(torch.float32)
    x, b = torch.rand(3, 1, 20), torch.rand(3, 1, 6)
    x = scale * torch.cat([x, -x * (1 + 1e-3 * torch.rand_like(x))], 1)
    op = Linear(x, b.expand(3, 2, 6).contiguous())
    (gram,) = [method for method in op.methods() if method.name == "gram"]
    exact = in_float64(op).rows().flatten(1).square().sum(1)
    torch.testing.assert_close(squared_norms(op, gram).double(), exact, rtol=1e-3, atol=0)
