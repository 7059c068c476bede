# SPDX-License-Identifier: Apache-2.0
"""Matrix products with a parameter: linear, addmm, matmul and mm, inputs of any rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ._base import Layout, Method, Op, Use, in_one_dtype
from .dense import Rows
from .elementwise import TermUse

# A norm from a Gram matrix is a sum of t² terms of both signs. Where they cancel so far that rounding could move
# the norm by more than this (relative), that example is computed again from its row.
GRAM_TOLERANCE = 1e-6


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
        """Two uses of one weight are one use with more positions: cross terms come for free."""
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
            Method("gram", Linear._gram, flops=2 * n * t * t * (d + e), floats=3 * n * t * t),
            Method("rows", Linear._rows_norms, flops=2 * n * t * d * e, floats=n * d * e),
        ]

    def rows(self) -> Tensor:
        return self.b.mT @ self.x

    def project(self, v: Tensor) -> Tensor:
        return torch.einsum("nte,ked,ntd->nk", self.b, v, self.x)

    def weighted_sum(self, c: Tensor) -> Tensor:
        return (self.b * c[:, None, None]).flatten(0, 1).mT @ self.x.flatten(0, 1)

    def select(self, index: Tensor | slice) -> Linear:
        return Linear(self.x[index], self.b[index])

    def _outer_product(self) -> Tensor:  # ‖b xᵀ‖² = ‖b‖² ‖x‖², Goodfellow 2015 (arXiv:1510.01799)
        return self.x.flatten(1).square().sum(1) * self.b.flatten(1).square().sum(1)

    def _gram(self) -> Tensor:  # Li et al. 2022 (arXiv:2110.05679), §4
        terms = (self.x @ self.x.mT).mul_(self.b @ self.b.mT).flatten(1)
        squares = terms.sum(1)
        rounding = torch.finfo(terms.dtype).eps * torch.linalg.vector_norm(terms, dim=1)
        doubtful = (rounding > GRAM_TOLERANCE * squares).nonzero().flatten()
        if len(doubtful):
            squares[doubtful] = self.select(doubtful)._rows_norms()
        return squares

    def _rows_norms(self) -> Tensor:
        return self.rows().square().sum((1, 2))


@dataclass(frozen=True)
class LinearUse(Use):
    """One call of ``y = x Wᵀ`` or ``y = x W``: ``x`` (*positions, d), y (*positions, e)."""

    x: Tensor
    transposed: bool = False  # y = x W, with W (d, e)

    def example_dims(self, b_ndim: int) -> list[int]:
        return list(range(b_ndim - 1))

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def op(self, b: Tensor, layout: Layout) -> Op:
        x, b = (_positions(layout.examples_first(tensor)) for tensor in in_one_dtype(self.x, b))
        return Linear(b, x) if self.transposed else Linear(x, b)


@dataclass(frozen=True)
class ColumnsUse(Use):
    """One call of ``y = W x``, positions in the last dimension: ``x`` (*batch, d, t), y (*batch, e, t)."""

    x: Tensor

    def example_dims(self, b_ndim: int) -> list[int]:
        return [dim for dim in range(b_ndim) if dim != b_ndim - 2]

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def op(self, b: Tensor, layout: Layout) -> Op:
        return Linear(*(_positions(layout.examples_first(tensor).mT) for tensor in in_one_dtype(self.x, b)))


@dataclass(frozen=True)
class VectorUse(Use):
    """One call of ``y = x w`` with a vector ``w`` (d,): ``x`` (*positions, d), y (*positions)."""

    x: Tensor

    def example_dims(self, b_ndim: int) -> list[int]:
        return list(range(b_ndim))

    def saved(self) -> tuple[Tensor, ...]:
        return (self.x,)

    def op(self, b: Tensor, layout: Layout) -> Op:
        x, b = (_positions(layout.examples_first(tensor)) for tensor in in_one_dtype(self.x, b.unsqueeze(-1)))
        return Rows((b.mT @ x).squeeze(1))


def _positions(tensor: Tensor) -> Tensor:
    """(n, *positions, d) -> (n, t, d)."""
    n, *positions, d = tensor.shape
    return tensor.reshape(n, math.prod(positions), d)


# The functions below have the signature of the torch function they stand for, with its output in front. Each yields
# a use for every argument that may be a parameter; the tape keeps those that are.


def linear(y: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Iterator[Use]:
    """``y = x Wᵀ + bias``."""
    yield LinearUse(weight, input)
    if bias is not None:
        yield TermUse(bias)


def addmm(y: Tensor, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Iterator[Use]:
    """``y = beta·bias + alpha·x W``."""
    yield TermUse(input, float(beta))
    if alpha == 1:
        yield from matmul(y, mat1, mat2)


def matmul(y: Tensor, input: Tensor, other: Tensor) -> Iterator[Use]:
    """``y = x W`` or ``y = W x``, with a matrix or vector ``W``."""
    if other.ndim == 1:
        yield VectorUse(other, input)
    elif other.ndim == 2:
        yield LinearUse(other, input, transposed=True)
    if input.ndim == 2 and other.ndim > 1:
        yield ColumnsUse(input, other)


RECORDERS = {
    F.linear: linear,
    torch.addmm: addmm,
    Tensor.addmm: addmm,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.mv, Tensor.mv), matmul),
}
