# SPDX-License-Identifier: Apache-2.0
"""Explicit rows, for small parameters (biases, scales of norms) and for uses of a parameter without a common form.

Products and convolutions in bfloat16 have rows, too, rounded as the network's own backward rounds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._base import Method, Op, chunk_size, in_one_dtype

PIECE = 512  # squares that one norm call sums, in four or more parallel accumulators
SUMMED, RUN = 150, 4  # products summed by one matrix product, and number of such sums added in sequence
CACHED = 2**16  # entries of a partial sum that stay in the cache until the next is added
COPIED = 2**19  # entries of factors that are copied at once: they stay in the cache until they are multiplied
STACKED = 2**24  # numbers at most in a stack of products, or in partial sums, on a GPU: each call there is a launch
LAUNCHED = 2**16  # squares that one norm call sums on a GPU, in hundreds of threads
PAGE = 4096  # bytes between the lines of a matrix from which on a matrix product runs at half its speed


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
        """Returns the squared norms, (n,)."""
        return squared_lengths(self._flat)

    def rows(self) -> Tensor:
        return self.values

    def project(self, v: Tensor) -> Tensor:
        order = memory_order(v) if len(v) > self.num_examples else self._order  # copies at most the smaller one
        return flat_in_order(self.values, order) @ flat_in_order(v, order).mT

    def weighted_sum(self, c: Tensor) -> Tensor:
        if self.values.is_contiguous():
            return (c @ self._flat).view(self.shape)
        order = self._order
        total = (c @ self._flat).view([self.shape[k] for k in order])
        return total.permute([order.index(k) for k in range(len(order))])

    @property
    def _order(self) -> list[int]:
        """The dimensions of the weight in memory order; rows may be views with permuted dimensions."""
        return memory_order(self.values)

    @property
    def _flat(self) -> Tensor:  # (n, size) in memory order, also for a scalar weight
        if self.values.is_contiguous():
            return self.values.view(self.num_examples, self.shape.numel())
        return flat_in_order(self.values, self._order)

    def select(self, index: Tensor | slice) -> Rows:
        return Rows(self.values[index])

    def merge(self, other: Op) -> Op | None:
        return Rows(self.values + other.values) if isinstance(other, Rows) else None


def memory_order(tensors: Tensor) -> list[int]:
    """Returns the dimensions of ``shape`` in (n, *shape) in memory order, largest stride first."""
    strides = tensors.stride()[1:]
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def flat_in_order(tensors: Tensor, order: Sequence[int]) -> Tensor:
    """Flattens (n, *shape) to (n, size) with the dimensions in this order; a view if that is the memory order."""
    return tensors.permute(0, *(1 + dim for dim in order)).reshape(len(tensors), tensors.shape[1:].numel())


def squared_lengths(vectors: Tensor) -> Tensor:
    """Returns the squared norms (n,) of vectors (n, p), in one pass and without a copy.

    It sums in pieces, because torch's own norm sums sequentially, which loses digits in float32 for many numbers.
    """
    piece = PIECE if vectors.device.type == "cpu" else LAUNCHED
    pieces = vectors.shape[1] // piece
    if pieces < 2:
        return torch.linalg.vector_norm(vectors, dim=1).square()
    whole = vectors[:, : pieces * piece].unflatten(1, (pieces, piece))
    squares = torch.linalg.vector_norm(whole, dim=2).square().sum(1)
    rest = vectors[:, pieces * piece :]
    return squares + torch.linalg.vector_norm(rest, dim=1).square() if rest.shape[1] else squares


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a @ b`` of two stacks (n, m, k) and (n, k, l) with rounding errors that do not grow with k.

    A matrix product sums sequentially, and for terms of equal sign and size it loses up to k/2 units in the last place,
    depending on the processor. Here sums have at most 150 terms, are added by 4 and then in pairs. Partial sums are
    added while they are in the cache; on a CPU ``baddbmm`` would add its terms one by one to the previous sum. Matrices
    with lines far apart in memory, like those of a time-first tensor, are first copied, a few at a time. In bfloat16
    sums are rounded at the end, and the product is torch's own.
    """
    if a.dtype is torch.bfloat16:
        return a @ b
    far_apart = _far_apart(a) or _far_apart(b)
    if a.shape[2] <= SUMMED and not far_apart:
        return a @ b
    on_cpu = a.device.type == "cpu"
    with torch.no_grad():
        if not on_cpu and (stacked := _in_a_stack(a, b)) is not None:
            return stacked
        at_once = CACHED if on_cpu else STACKED
        step = len(a) if a.shape[2] <= SUMMED else at_once // max(1, a.shape[1] * b.shape[2])
        if far_apart:
            step = min(step, COPIED // max(1, a.shape[1:].numel() + b.shape[1:].numel()))
        total, step = a.new_empty(len(a), a.shape[1], b.shape[2]), max(1, step)
        for i in range(0, len(a), step):
            part = slice(i, i + step)
            _in_pieces(_together(a[part]), _together(b[part]), total[part])
    return total


def sum_of_positions(terms: Tensor) -> Tensor:
    """Returns the sums (n, e) over t of terms (n, t, e) that are time-first in memory, as one product with ones.

    That takes less than half the time of torch's sum over t.
    """
    n, t, e = terms.shape
    return product(terms.new_ones(1, 1, t), terms.transpose(0, 1).reshape(1, t, n * e)).view(n, e)


def _far_apart(matrices: Tensor) -> bool:
    """Returns True if, on a CPU, the lines of the matrices (n, m, k) leave gaps and are at least a page apart."""
    if matrices.device.type != "cpu":
        return False
    (_, m, k), (_, down, across) = matrices.shape, matrices.stride()
    apart, length = (down, k) if across == 1 else (across, m)
    return apart * matrices.itemsize >= PAGE and apart >= 2 * length


def _together(matrices: Tensor) -> Tensor:
    """Returns matrices (n, m, k) without gaps between their lines, as a copy in the same order of memory."""
    if not _far_apart(matrices):
        return matrices
    return matrices.contiguous() if matrices.stride(2) == 1 else matrices.mT.contiguous().mT


def _in_a_stack(a: Tensor, b: Tensor) -> Tensor | None:
    """Returns ``a @ b`` as the sum of a stack of products of pieces: fewer launches, if pieces are many and small.

    None if they are not.
    """
    (n, m, k), out = a.shape, b.shape[2]
    least = -(-k // SUMMED)
    pieces = next((some for some in range(least, 2 * least) if k % some == 0), least)
    if least <= RUN or n * pieces * m * out + a.numel() + b.numel() > STACKED:
        return None
    more = -k % pieces
    a, b = (F.pad(a, (0, more)), F.pad(b, (0, 0, 0, more))) if more else (a, b)
    return (a.unflatten(2, (pieces, -1)).transpose(1, 2) @ b.unflatten(1, (pieces, -1))).sum(1)


def _in_pieces(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Writes ``a @ b`` to ``out``."""
    k = a.shape[2]
    if k > RUN * SUMMED:
        half = k // 2 // SUMMED * SUMMED
        other = torch.empty_like(out)
        _in_pieces(a[:, :, :half], b[:, :half], out)
        _in_pieces(a[:, :, half:], b[:, half:], other)
        out += other
        return
    step = max(1, -(-k // max(1, -(-k // SUMMED))))
    torch.bmm(a[:, :, :step], b[:, :step], out=out)
    for i in range(step, k, step):
        if out.device.type == "cpu":
            out += a[:, :, i : i + step] @ b[:, i : i + step]
        else:  # one launch, which adds the whole product
            out.baddbmm_(a[:, :, i : i + step], b[:, i : i + step])


def sum_rows(ops: list[Op]) -> Rows:
    """Returns the sum of the rows of several uses of one tensor, which need no common form."""
    return Rows(torch.stack([op.rows() for op in ops]).sum(0)) if len(ops) > 1 else Rows(ops[0].rows())


LEAST_POSITIONS = 32  # of an example; for fewer, factors in float32 need less time than rows
MOST_ENTRIES = 2**24  # of a weight; the row of one example is made at once
SPEED, PASSES = 4, 30  # products in the time of one in float32; operations in the time to write and read an entry


@dataclass(frozen=True)
class InHalf(Op):
    """An op with factors ``x`` and ``b`` in bfloat16; its rows are rounded to bfloat16.

    So does autograd round the gradient of one example. Norms and sums are of the same rounded rows, in float32. The
    product takes a quarter of the time of one in float32 on processors with instructions for bfloat16, and by the data
    sheets less than a tenth on cards.
    """

    op: Any  # an `Op` with factors x and b, such as a `Linear`

    @property
    def num_examples(self) -> int:
        return self.op.num_examples

    @property
    def shape(self) -> torch.Size:
        return self.op.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def merge(self, other: Op) -> Op | None:
        """Merges two uses of one weight; those that have a common form in float32 only, in that form."""
        if isinstance(other, InHalf):
            both = self.op.merge(other.op)
            return None if both is None else InHalf(both)
        full = replace(self.op, x=self.op.x.float(), b=self.op.b.float())
        return full.merge(other) or other.merge(full)

    def methods(self) -> list[Method]:
        least = min([method for method in self.op.methods() if method.rows], key=lambda method: method.flops)
        flops = least.flops / SPEED + PASSES * self.num_examples * self.shape.numel()
        return [Method("rows in bfloat16", InHalf.rows, flops, least.floats, rows=True)]

    def rows(self) -> Tensor:
        return self.op.rows().float()

    def project(self, v: Tensor) -> Tensor:
        return torch.cat([rows.project(v) for _, rows in self._parts()])

    def weighted_sum(self, c: Tensor) -> Tensor:
        total = c.new_zeros(self.shape)
        for part, rows in self._parts():
            total += rows.weighted_sum(c[part])
        return total

    def select(self, index: Tensor | slice) -> InHalf:
        return InHalf(self.op.select(index))

    def _parts(self) -> Iterator[tuple[slice, Rows]]:
        """Yields the rows in the same chunks of examples as the norms, so that both are rounded alike."""
        n, (method,) = self.num_examples, self.methods()
        size = chunk_size(n, method.floats)
        for i in range(0, max(n, 1), size):
            part = slice(i, i + size)
            yield part, Rows(self.select(part).rows())


def in_its_precision(op: Any, *, in_half: bool) -> Op:
    """Returns an op with factors x and b in one dtype: bfloat16 if y was computed in it and rows are cheap, or wider.

    Args:
        op: the op, with factors as they were recorded; b is (n, positions, e), or (n, m, e, *places).
        in_half: whether y was computed in bfloat16.
    """
    positions = op.b.shape[1] * op.b.shape[3:].numel()  # number of products that an entry of a row sums
    if in_half and positions >= LEAST_POSITIONS and op.shape.numel() <= MOST_ENTRIES:
        return InHalf(replace(op, x=op.x.bfloat16(), b=op.b.bfloat16()))
    x, b = in_one_dtype(op.x, op.b)
    return op if x is op.x and b is op.b else replace(op, x=x, b=b)
