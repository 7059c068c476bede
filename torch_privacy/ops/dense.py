# SPDX-License-Identifier: Apache-2.0
"""Explicit rows: for small parameters (biases, scales of norms) and where the uses of one have no common form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._base import Method, Op

PIECE = 512  # numbers whose squares are added in a row, by four adders or more side by side
SUMMED, RUN = 128, 16  # products that are added in a row, and such sums
CACHED = 2**16  # numbers of such a sum that lie in the cache until the next is added


@dataclass(frozen=True)
class Rows(Op):
    """The rows of the block as one tensor ``values`` (n, *shape)."""

    values: Tensor

    @property
    def num_examples(self) -> int:
        return self.values.shape[0]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def methods(self) -> list[Method]:
        size = self.values.numel()
        return [Method("rows", Rows.squared_norms, flops=2 * size, floats=0)]

    def squared_norms(self) -> Tensor:
        """(n,), from rows that are already there."""
        return squared_lengths(self._flat)

    def rows(self) -> Tensor:
        return self.values

    def project(self, v: Tensor) -> Tensor:
        order = memory_order(v) if len(v) > self.num_examples else self._order  # the smaller is copied, if any
        return flat_in_order(self.values, order) @ flat_in_order(v, order).mT

    def weighted_sum(self, c: Tensor) -> Tensor:
        if self.values.is_contiguous():
            return (c @ self._flat).view(self.shape)
        order = self._order
        total = (c @ self._flat).view([self.shape[k] for k in order])
        return total.permute([order.index(k) for k in range(len(order))])

    @property
    def _order(self) -> list[int]:
        """The dimensions of the weight, as they lie in memory: rows may be views of something arranged otherwise."""
        return memory_order(self.values)

    @property
    def _flat(self) -> Tensor:  # (n, size) in the order of memory, also of a weight without dimensions
        if self.values.is_contiguous():
            return self.values.view(self.num_examples, self.shape.numel())
        return flat_in_order(self.values, self._order)

    def select(self, index: Tensor | slice) -> Rows:
        return Rows(self.values[index])

    def merge(self, other: Op) -> Op | None:
        return Rows(self.values + other.values) if isinstance(other, Rows) else None


def memory_order(tensors: Tensor) -> list[int]:
    """The dimensions of the shape of (n, *shape) as they lie in memory, that with the largest steps first."""
    strides = tensors.stride()[1:]
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def flat_in_order(tensors: Tensor, order: Sequence[int]) -> Tensor:
    """(n, *shape) -> (n, size), with the dimensions of the shape in this order: a view where they lie so."""
    return tensors.permute(0, *(1 + dim for dim in order)).reshape(len(tensors), tensors.shape[1:].numel())


def squared_lengths(vectors: Tensor) -> Tensor:
    """(n, p) -> (n,): squared norms in one pass and without a copy.

    In pieces: torch's own norm adds one number after the other, which loses digits in float32 where there are many.
    """
    pieces = vectors.shape[1] // PIECE
    if pieces < 2:
        return torch.linalg.vector_norm(vectors, dim=1).square()
    whole = vectors[:, : pieces * PIECE].unflatten(1, (pieces, PIECE))
    squares = torch.linalg.vector_norm(whole, dim=2).square().sum(1)
    rest = vectors[:, pieces * PIECE :]
    return squares + torch.linalg.vector_norm(rest, dim=1).square() if rest.shape[1] else squares


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two stacks (n, m, k) and (n, k, l), with no long sums in a row: its rounding does not grow with k.

    A matrix product adds one number after the other, and where all have one sign and size it loses up to k/2 units in
    the last place: how many depends on the processor. Here sums are no longer than 128, added by 16 and then by pairs.
    Sums are added while they are in the cache; ``baddbmm`` would add their terms to the sum before, one by one.
    """
    k = a.shape[2]
    if k <= SUMMED:
        return a @ b
    total = a.new_empty(len(a), a.shape[1], b.shape[2])
    step = max(1, CACHED // max(1, a.shape[1] * b.shape[2]))
    for i in range(0, len(a), step):
        total[i : i + step] = _in_pieces(a[i : i + step], b[i : i + step])
    return total


def _in_pieces(a: Tensor, b: Tensor) -> Tensor:
    k = a.shape[2]
    if k > RUN * SUMMED:
        half = k // 2 // SUMMED * SUMMED
        return _in_pieces(a[:, :, :half], b[:, :half]).add_(_in_pieces(a[:, :, half:], b[:, half:]))
    step = -(-k // -(-k // SUMMED))
    total = a[:, :, :step] @ b[:, :step]
    for i in range(step, k, step):
        total += a[:, :, i : i + step] @ b[:, i : i + step]
    return total


def sum_rows(ops: list[Op]) -> Rows:
    """Uses of one tensor that have no common form: their rows, added."""
    return Rows(torch.stack([op.rows() for op in ops]).sum(0)) if len(ops) > 1 else Rows(ops[0].rows())
