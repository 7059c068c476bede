# SPDX-License-Identifier: Apache-2.0
"""Tests that every kind of Jacobian block fulfills the contract."""

from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from contract import OpContract, assert_answers_of
from torch import Tensor

import torch_privacy  # noqa: F401  (registers the ops)
from torch_privacy.ops import Op
from torch_privacy.ops.conv import Conv, Geometry
from torch_privacy.ops.dense import InHalf, Rows
from torch_privacy.ops.embedding import Embedding, TiedEmbedding
from torch_privacy.ops.linear import Arrangement, Bilinear, GroupedLinear, Linear
from torch_privacy.ops.routed import RoutedLinear

pytestmark = pytest.mark.every_case
POSITIONS = {"no position": 0, "one position": 1, "several positions": 4, "more positions than entries": 15}


class TestLinear(OpContract):
    kind = Linear
    forms: ClassVar = list(POSITIONS)

    def make(self, n: int, form: str) -> Linear:
        return Linear(torch.randn(n, POSITIONS[form], 3), torch.randn(n, POSITIONS[form], 2))

    def spelled_out(self, op: Linear) -> Tensor:
        return torch.einsum("nte,ntd->ned", op.b, op.x)

    def partners(self, n: int, form: str) -> list[Op]:
        return [self.make(n, form), self.make(n, "several positions")]

    def strangers(self, n: int, form: str) -> list[Op]:
        return [*super().strangers(n, form), Rows(torch.randn(n, 2, 3))]


class TestInHalf(OpContract):
    """Factors are small integers, so that bfloat16 holds every row."""

    kind = InHalf
    forms: ClassVar = ["no position", "several positions", "more positions than entries"]

    @pytest.fixture(autouse=True)
    def in_float32(self) -> None:
        torch.set_default_dtype(torch.float32)

    def make(self, n: int, form: str) -> InHalf:
        return InHalf(Linear(*(torch.randint(-2, 3, (n, POSITIONS[form], size)).bfloat16() for size in (3, 2))))

    def spelled_out(self, op: InHalf) -> Tensor:
        return torch.einsum("nte,ntd->ned", op.op.b.float(), op.op.x.float())

    def strangers(self, n: int, form: str) -> list[Op]:
        return [*super().strangers(n, form), Rows(torch.randn(n, 2, 3))]

    @pytest.mark.parametrize("dtype", [torch.float32])
    def test_answers_have_the_type_of_the_op(self, form: str, dtype: torch.dtype) -> None:
        super().test_answers_have_the_type_of_the_op(form, dtype)

    def test_other_uses_are_merged_in_float32(self, form: str) -> None:
        op, linear = self.make(4, form), Linear(torch.randn(4, 4, 3), torch.randn(4, 4, 2))
        table = Embedding(torch.randint(2, (4, 5)), torch.randn(4, 5, 3), op.shape)
        for other, kind in ((linear, Linear), (table, TiedEmbedding)):
            merged = op.merge(other)
            assert type(merged) is kind
            assert_answers_of(merged, op.rows() + other.rows())


class TestGroupedLinear(OpContract):
    """Returns two matrices (e, d) = (3, 4), where d consists of two dimensions of the weight, in any order."""

    kind = GroupedLinear
    forms: ClassVar = ["one position", "several positions", "more positions than entries"]
    arrangement = Arrangement((2, 3, 2, 2), (2, 0, 3, 1), torch.Size((2, 1, 2, 2, 3)))

    def make(self, n: int, form: str) -> GroupedLinear:
        t = POSITIONS[form]
        return GroupedLinear(torch.randn(n, 2, t, 4), torch.randn(n, 2, t, 3), self.arrangement)

    def spelled_out(self, op: GroupedLinear) -> Tensor:
        x = op.x.unflatten(3, (2, 2))
        return torch.einsum("ngte,ngtcd->ncgde", op.b, x).unsqueeze(2)

    def strangers(self, n: int, form: str) -> list[Op]:
        op = self.make(n, form)
        other = Arrangement((2, 3, 2, 2), (0, 1, 2, 3), torch.Size((2, 3, 2, 2)))
        return [*super().strangers(n, form), GroupedLinear(op.x, op.b, other), Rows(torch.randn(n, *op.shape))]


class TestBilinear(OpContract):
    kind = Bilinear
    forms: ClassVar = list(POSITIONS)

    def make(self, n: int, form: str) -> Bilinear:
        return Bilinear(*(torch.randn(n, POSITIONS[form], size) for size in (3, 2, 4)))

    def spelled_out(self, op: Bilinear) -> Tensor:
        return torch.einsum("nte,ntp,ntq->nepq", op.b, op.x1, op.x2)


class TestConv(OpContract):
    """Returns rows by autograd, one example at a time."""

    kind = Conv
    geometries: ClassVar = {  # name -> (images, channels in, channels out, size, geometry)
        "signal": (1, 3, 4, (8,), Geometry((3,), (1,), (0,), (1,), 1)),
        "pointwise": (2, 3, 4, (4, 5), Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1)),
        "all options": (2, 4, 6, (7, 8), Geometry((3, 2), (2, 1), (1, 2), (1, 2), 2)),
        "depthwise": (1, 4, 8, (5, 6), Geometry((3, 3), (1, 1), (1, 1), (1, 1), 4)),
        "stride leaves cells over": (1, 2, 3, (8, 9), Geometry((2, 2), (3, 3), (0, 0), (1, 1), 1)),
        "stride shares factors with dilation": (1, 2, 3, (12, 11), Geometry((3, 2), (4, 2), (2, 1), (2, 4), 1)),
        "native blocks": (1, 16, 16, (4, 4), Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)),
        "narrow signals": (2, 16, 3, (9,), Geometry((3,), (2,), (1,), (1,), 1)),
        "narrow, all options": (2, 32, 6, (9, 8), Geometry((3, 2), (2, 1), (1, 2), (1, 2), 2)),
        "narrow, kernel of several strides": (1, 16, 3, (8, 9), Geometry((4, 4), (2, 2), (1, 0), (1, 1), 1)),
        "narrow volume": (2, 16, 3, (3, 4, 4), Geometry((2, 3, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), 1)),
        "kernel of several strides": (2, 4, 6, (7, 10), Geometry((3, 4), (1, 2), (2, 1), (2, 1), 2)),
        "volume of several strides": (2, 2, 3, (4, 4, 7), Geometry((2, 1, 6), (1, 2, 3), (1, 0, 1), (2, 1, 1), 1)),
        "volume": (2, 2, 3, (3, 4, 4), Geometry((2, 1, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), 1)),
    }
    forms: ClassVar = list(geometries)

    def make(self, n: int, form: str) -> Conv:
        images, d, e, size, geometry = self.geometries[form]
        x, weight = torch.randn(n, images, d, *size), torch.zeros(e, d // geometry.groups, *geometry.kernel)
        places = convolved(torch.zeros(1, d, *size), weight, geometry).shape[2:]
        return Conv(x, torch.randn(n, images, e, *places), geometry)

    def spelled_out(self, op: Conv) -> Tensor:
        weight = torch.zeros(op.shape, requires_grad=True)
        rows = [
            torch.autograd.grad(convolved(x, weight, op.geometry), weight, b)[0]
            for x, b in zip(op.x, op.b, strict=True)
        ]
        return torch.stack(rows) if rows else torch.zeros(0, *op.shape)

    def strangers(self, n: int, form: str) -> list[Op]:
        op = self.make(n, form)
        larger = F.pad(op.x, (0, 1))
        return [*super().strangers(n, form), Conv(larger, op.b, op.geometry), Rows(torch.randn(n, *op.shape))]


def convolved(x: Tensor, weight: Tensor, g: Geometry) -> Tensor:
    conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[weight.ndim]
    return conv(x, weight, None, g.stride, g.padding, g.dilation, g.groups)


class TestEmbedding(OpContract):
    kind = Embedding
    tables: ClassVar = {
        "one token": (1, torch.Size((7, 3))),
        "several tokens": (5, torch.Size((7, 3))),
        "small table": (9, torch.Size((2, 3))),
        "table of numbers": (5, torch.Size((7,))),
        "table of two indices": (5, torch.Size((3, 2, 3))),
    }
    forms: ClassVar = list(tables)

    def make(self, n: int, form: str) -> Embedding:
        t, table = self.tables[form]
        e = 1 if len(table) == 1 else table[-1]
        return Embedding(torch.randint(0, table.numel() // e, (n, t)), torch.randn(n, t, e), table)

    def spelled_out(self, op: Embedding) -> Tensor:
        one_hot = F.one_hot(op.ids, op.table.numel() // op.b.shape[2]).to(op.b)
        return torch.einsum("ntv,nte->nve", one_hot, op.b).reshape(-1, *op.table)

    def strangers(self, n: int, form: str) -> list[Op]:
        return [*super().strangers(n, form), Rows(torch.randn(n, *self.tables[form][1]))]


class TestTiedEmbedding(OpContract):
    kind = TiedEmbedding
    forms: ClassVar = ["one of each", "several of each", "more products than tokens"]

    def make(self, n: int, form: str) -> TiedEmbedding:
        t, s = {"one of each": (1, 1), "several of each": (4, 3), "more products than tokens": (2, 9)}[form]
        looked_up = Embedding(torch.randint(0, 7, (n, t)), torch.randn(n, t, 3), torch.Size((7, 3)))
        op = looked_up.merge(Linear(torch.randn(n, s, 3), torch.randn(n, s, 7)))
        assert isinstance(op, TiedEmbedding)
        return op

    def spelled_out(self, op: TiedEmbedding) -> Tensor:
        product = torch.einsum("nte,ntd->ned", op.product.b, op.product.x)
        return product + TestEmbedding().spelled_out(op.looked_up)

    def partners(self, n: int, form: str) -> list[Op]:
        op = self.make(n, form)
        return [op.looked_up, op.product, op]


class TestRoutedLinear(OpContract):
    kind = RoutedLinear
    forms: ClassVar = ["one token", "several tokens", "one expert", "more experts than tokens"]

    def make(self, n: int, form: str) -> RoutedLinear:
        t, k = {"one token": (1, 3), "several tokens": (8, 3), "one expert": (4, 1)}.get(form, (2, 6))
        return RoutedLinear(torch.randn(n, t, 3), torch.randn(n, t, 2), torch.randint(0, k, (n, t)), k)

    def spelled_out(self, op: RoutedLinear) -> Tensor:
        return torch.einsum("ntk,nte,ntd->nked", F.one_hot(op.experts, op.num_experts).to(op.b), op.b, op.x)

    def strangers(self, n: int, form: str) -> list[Op]:
        return [*super().strangers(n, form), Rows(torch.randn(n, *self.make(n, form).shape))]


class TestRows(OpContract):
    kind = Rows
    shapes: ClassVar = {"number": (), "vector": (3,), "tensor": (2, 3, 2)}
    forms: ClassVar = list(shapes)

    def make(self, n: int, form: str) -> Rows:
        return Rows(torch.randn(n, *self.shapes[form]))

    def spelled_out(self, op: Rows) -> Tensor:
        return op.values.clone()


def kinds_of(kind: type) -> Iterator[type]:
    for below in kind.__subclasses__():
        yield from kinds_of(below)
        if below.__module__.startswith("torch_privacy."):
            yield below


def test_every_kind_of_op_is_under_contract():
    under_contract = {tests.kind for tests in OpContract.__subclasses__()}
    assert under_contract == set(kinds_of(Op))
