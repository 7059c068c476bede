# SPDX-License-Identifier: Apache-2.0
"""Jacobian blocks of products with a matrix, a stack of matrices, or a bilinear form (recorded by ``einsum.py``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._base import Method, Op
from .dense import PIECE, product
from .gram import norms_from_gram, squares_of_factor

STACKED = 2**15  # numbers in the factors of an op, up to which copies are cheaper than calls of torch


@dataclass(frozen=True)
class Linear(Op):
    """A weight ``W`` used as ``y = x Wᵀ``; row i of its Jacobian block is ``Gᵢ = Σₜ bᵢₜ xᵢₜᵀ``.

    Shapes: ``x`` (n, t, d) the detached input; ``b`` (n, t, e) the gradient of ℓᵢ in y; ``W`` (e, d).
    For ``y = x W`` swap the two: the row is the transpose.
    """

    x: Tensor
    b: Tensor

    @property
    def num_examples(self) -> int:
        return self.x.shape[0]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.b.shape[2], self.x.shape[2]))

    def merge(self, other: Op) -> Op | None:
        """Merges two uses of one weight into one use with more positions, which includes the cross terms."""
        if not isinstance(other, Linear):
            return None
        return Linear(torch.cat([self.x, other.x], 1), torch.cat([self.b, other.b], 1))

    @property
    def dtype(self) -> torch.dtype:
        return self.b.dtype

    def methods(self) -> list[Method]:
        n, t, d, e = *self.x.shape, self.b.shape[2]
        if t == 1:
            return [Method("outer product", Linear._outer_product, flops=2 * n * (d + e), floats=0)]
        return [
            Method("gram", Linear._gram, flops=(1.5 if _halves(t) else 2) * n * t * t * (d + e), floats=3 * n * t * t),
            Method("rows", Linear.rows, flops=2 * n * t * d * e, floats=n * d * e, rows=True),
        ]

    @property
    def is_short_outer_product(self) -> bool:
        """True if every row is the outer product of two vectors with norms that are sums of few squares."""
        return self.x.shape[1] == 1 and max(self.x.shape[2], self.b.shape[2]) < 2 * PIECE

    def rows(self) -> Tensor:
        return product(self.b.mT, self.x)

    def project(self, v: Tensor) -> Tensor:
        if len(v) == 1:
            return (F.linear(self.x, v[0]) * self.b).flatten(1).sum(1, keepdim=True)
        longer, shorter = self.x, self.b
        if longer.shape[2] < shorter.shape[2]:
            longer, shorter, v = shorter, longer, v.mT
        products = F.linear(longer, v.flatten(0, 1))  # (n, t, k s): one product of matrices for all directions
        return (products.unflatten(2, v.shape[:2]) @ shorter.unsqueeze(3)).sum((1, 3))

    @property
    def projected_floats(self) -> int:
        return self.x.shape[0] * self.x.shape[1] * min(self.x.shape[2], self.b.shape[2])

    def project_outer(self, left: Tensor, right: Tensor) -> Tensor:
        return ((self.b @ left) * (self.x @ right)).sum(1)

    def weighted_sum(self, c: Tensor) -> Tensor:
        x, b = self.x, self.b
        if x.shape[2] < b.shape[2]:  # copies the smaller one
            x = x * c[:, None, None]
        else:
            b = b * c[:, None, None]
        return b.flatten(0, 1).mT @ x.flatten(0, 1)

    def select(self, index: Tensor | slice) -> Linear:
        return Linear(self.x[index], self.b[index])

    def _outer_product(self) -> Tensor:  # ‖b xᵀ‖² = ‖b‖² ‖x‖², Goodfellow 2015 (arXiv:1510.01799)
        return squares_of_factor(self.x) * squares_of_factor(self.b)

    def _gram(self) -> Tensor:  # Li et al. 2022 (arXiv:2110.05679), §4
        factors, (n, t) = (self.x, self.b), self.x.shape[:2]
        sizes = [factor.shape[2] for factor in factors]
        if not _halves(t):
            return norms_from_gram([product(factor, factor.mT) for factor in factors], sizes, self)
        # The matrices are symmetric: two blocks on the diagonal and one off it take three quarters of the work.
        halves = [factor.reshape(2 * n, t // 2, -1) for factor in factors]
        blocks = [product(half, half.mT).unflatten(0, (n, 2)) for half in halves]
        x, b = (product(factor[:, : t // 2], factor[:, t // 2 :].mT) for factor in factors)
        return norms_from_gram(blocks, sizes, self, twice=x.mul_(b))

    def _rows_norms(self) -> Tensor:
        return self.rows().square().sum((1, 2))


class OuterProducts:
    """Ops with short outer products that answer together; small ones of equal shapes are stacked into one tensor.

    Args:
        ops: with one position for each example, and of one type.
    """

    def __init__(self, ops: Sequence[Linear]):
        alike: dict[Any, list[int]] = {}
        for k, op in enumerate(ops):
            small = op.x.numel() + op.b.numel() <= STACKED
            alike.setdefault((op.x.shape, op.b.shape) if small else k, []).append(k)
        self._numbers = [*alike.values()]
        self._groups: list[tuple[Tensor, Tensor]] = []  # factors of stacked ops, each (count, n, d)
        for first, *others in self._numbers:
            x, b = ops[first].x.transpose(0, 1), ops[first].b.transpose(0, 1)
            if others:
                x = torch.cat([x, *[ops[k].x.transpose(0, 1) for k in others]])
                b = torch.cat([b, *[ops[k].b.transpose(0, 1) for k in others]])
            self._groups.append((x, b))

    def squared_norms(self) -> Tensor:
        """Returns (n,), the sum over the ops of ``‖b‖² ‖x‖²``; like `squares_of_factor`, it counts lost underflow."""
        x, b = zip(*self._groups, strict=True)
        squares = torch.cat([torch.linalg.vector_norm(factor, dim=2) for factor in (*x, *b)]).square_()
        squares += max([factor.shape[2] for factor in (*x, *b)]) * torch.finfo(squares.dtype).tiny
        of_x, of_b = squares.chunk(2)
        products = of_x.mul_(of_b)
        return products.sum(0) if len(products) > 1 else products[0]

    def weighted_sums(self, c: Tensor, *, frees: bool = False) -> list[tuple[int, Tensor]]:
        """Returns the number of each op with its Jᵀ c; ``frees`` the factors on the way, which answer nothing more."""
        c, groups, found = c[:, None], self._groups, []
        self._groups = [] if frees else list(groups)
        for numbers in self._numbers:
            x, b = groups.pop(0)
            if len(numbers) == 1:  # a product of two matrices needs less memory than one of stacks
                x, b = x[0], b[0]
            totals = b.mT @ (x * c) if x.shape[-1] < b.shape[-1] else (b * c).mT @ x
            found += zip(numbers, totals if len(numbers) > 1 else [totals], strict=True)
        return found


@dataclass(frozen=True)
class Arrangement:
    """The arrangement of g matrices (e, d) in a weight of any shape, for a contraction over any of its dimensions.

    ``sizes`` are the sizes of the dimensions that make up g, e and d, in this order; ``order`` are the positions of the
    weight's dimensions (of more than one entry) among these.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    shape: torch.Size

    def weights(self, matrices: Tensor) -> Tensor:
        """Rearranges (k, g, e, d) to (k, *shape)."""
        k = len(matrices)
        moved = matrices.reshape(k, *self.sizes).permute(0, *(1 + dim for dim in self.order))
        return moved.reshape(k, *self.shape)

    def matrices(self, weights: Tensor, g: int, e: int, d: int) -> Tensor:
        """Rearranges (k, *shape) to (k, g, e, d)."""
        k = len(weights)
        unsqueezed = weights.reshape(k, *(self.sizes[dim] for dim in self.order))
        back = [1 + self.order.index(dim) for dim in range(len(self.order))]
        return unsqueezed.permute(0, *back).reshape(k, g, e, d)


@dataclass(frozen=True)
class GroupedLinear(Op):
    """g matrices ``W_k`` in one weight, used as ``y_k = x_k W_kᵀ``: matrix k of row i is ``Σₜ bᵢₖₜ xᵢₖₜᵀ``.

    Shapes: ``x`` (n, g, t, d) the detached input; ``b`` (n, g, t, e) the gradient of ℓᵢ in y; ``W`` as arranged.
    """

    x: Tensor
    b: Tensor
    arrangement: Arrangement

    @property
    def num_examples(self) -> int:
        return self.x.shape[0]

    @property
    def shape(self) -> torch.Size:
        return self.arrangement.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.b.dtype

    def merge(self, other: Op) -> Op | None:
        if not isinstance(other, GroupedLinear) or self._form != other._form:
            return None
        return replace(self, x=torch.cat([self.x, other.x], 2), b=torch.cat([self.b, other.b], 2))

    def methods(self) -> list[Method]:
        """Returns the methods of one matrix, with every pair of example and matrix treated as an example."""
        return [_per_matrix(method) for method in self._matrices().methods()]

    def rows(self) -> Tensor:
        return self.arrangement.weights(self._matrices().rows().unflatten(0, self.x.shape[:2]))

    def project(self, v: Tensor) -> Tensor:
        v = self.arrangement.matrices(v, *self._form[0])
        if len(v) == 1:
            return (torch.einsum("ged,ngtd->ngte", v[0], self.x) * self.b).flatten(1).sum(1, keepdim=True)
        return torch.einsum("ngte,kged,ngtd->nk", self.b, v, self.x)

    def weighted_sum(self, c: Tensor) -> Tensor:
        total = torch.einsum("ngte,ngtd->ged", self.b * c[:, None, None, None], self.x)
        return self.arrangement.weights(total[None])[0]

    def select(self, index: Tensor | slice) -> GroupedLinear:
        return replace(self, x=self.x[index], b=self.b[index])

    @property
    def _form(self) -> tuple[tuple[int, int, int], Arrangement]:
        return (self.x.shape[1], self.b.shape[3], self.x.shape[3]), self.arrangement

    def _matrices(self) -> Linear:
        return Linear(self.x.flatten(0, 1), self.b.flatten(0, 1))


def _per_matrix(method: Method) -> Method:
    if method.rows:
        return replace(method, compute=GroupedLinear.rows)

    def compute(op: GroupedLinear) -> Tensor:
        return method.compute(op._matrices()).view(op.x.shape[:2]).sum(1)

    return replace(method, compute=compute)


@dataclass(frozen=True)
class Bilinear(Op):
    """A weight ``W`` used as ``y_k = x₁ᵀ W_k x₂``; row i is ``Σₜ bᵢₜ ⊗ x₁ᵢₜ ⊗ x₂ᵢₜ``.

    Shapes: ``x1`` (n, t, p) and ``x2`` (n, t, q) the detached inputs; ``b`` (n, t, e) the gradient of ℓᵢ in y;
    ``W`` (e, p, q).
    """

    x1: Tensor
    x2: Tensor
    b: Tensor

    @property
    def num_examples(self) -> int:
        return self.b.shape[0]

    @property
    def shape(self) -> torch.Size:
        return torch.Size(factor.shape[2] for factor in self._factors)

    @property
    def dtype(self) -> torch.dtype:
        return self.b.dtype

    def merge(self, other: Op) -> Op | None:
        if not isinstance(other, Bilinear):
            return None
        pairs = zip((self.x1, self.x2, self.b), (other.x1, other.x2, other.b), strict=True)
        return Bilinear(*(torch.cat(pair, 1) for pair in pairs))

    def methods(self) -> list[Method]:
        n, t = self.b.shape[:2]
        total, size = sum(self.shape), self.shape.numel()
        if t == 1:
            return [Method("outer product", Bilinear._outer_product, flops=2 * n * total, floats=0)]
        made = n * (size + t * math.prod(self.shape[:2]))
        return [
            Method("gram", Bilinear._gram, flops=2 * n * t * t * total, floats=3 * n * t * t),
            Method("rows", Bilinear.rows, flops=2 * n * t * size, floats=made, rows=True),
        ]

    def rows(self) -> Tensor:
        return self._as_linear().rows().view(self.num_examples, *self.shape)

    def project(self, v: Tensor) -> Tensor:
        outputs = (torch.einsum("ntp,epq,ntq->nte", self.x1, w, self.x2) for w in v)
        return torch.stack([(self.b * y).flatten(1).sum(1) for y in outputs], 1)

    def weighted_sum(self, c: Tensor) -> Tensor:
        return self._as_linear().weighted_sum(c).view(self.shape)

    def select(self, index: Tensor | slice) -> Bilinear:
        return Bilinear(self.x1[index], self.x2[index], self.b[index])

    @property
    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.b, self.x1, self.x2

    def _as_linear(self) -> Linear:
        """Returns the linear op with b ⊗ x₁ (n, t, e·p) in place of b."""
        return Linear(self.x2, (self.b.unsqueeze(3) * self.x1.unsqueeze(2)).flatten(2))

    def _outer_product(self) -> Tensor:
        b, x1, x2 = map(squares_of_factor, self._factors)
        return b * x1 * x2

    def _gram(self) -> Tensor:
        grams = [product(factor, factor.mT) for factor in self._factors]
        return norms_from_gram(grams, list(self.shape), self)

    def _rows_norms(self) -> Tensor:
        return self._as_linear()._rows_norms()


def _halves(t: int) -> bool:
    """Returns True if Gram matrices of t positions are computed by blocks, which pays only for large t."""
    return t >= 128 and t % 2 == 0
