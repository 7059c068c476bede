# SPDX-License-Identifier: Apache-2.0
"""Products with a matrix in bfloat16: rows as the network's own backward rounds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ._base import Method, Op, chunk_size, in_one_dtype
from .dense import Rows
from .linear import Linear

LEAST_POSITIONS = 32  # of an example; for fewer, factors in float32 need less time than rows
MOST_ENTRIES = 2**24  # of a weight; the row of one example is made at once
SPEED, PASSES = 4, 30  # products in the time of one in float32; operations in the time to write and read an entry


@dataclass(frozen=True)
class HalfLinear(Op):
    """A weight ``W`` used as ``y = x Wᵀ`` in bfloat16; row i is ``Σₜ bᵢₜ xᵢₜᵀ``, rounded to bfloat16.

    So does autograd round the gradient of one example. Norms and sums are of the same rounded rows, in float32. The
    product takes a quarter of the time of one in float32 on processors with instructions for bfloat16, and less than a
    tenth on cards.

    Shapes: ``x`` (n, t, d), ``b`` (n, t, e), both bfloat16; ``W`` (e, d).
    """

    x: Tensor
    b: Tensor

    @property
    def num_examples(self) -> int:
        return self.x.shape[0]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.b.shape[2], self.x.shape[2]))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def merge(self, other: Op) -> Op | None:
        """Merges two uses of one weight; those that have a common form in float32 only, in that form."""
        if isinstance(other, HalfLinear):
            return HalfLinear(torch.cat([self.x, other.x], 1), torch.cat([self.b, other.b], 1))
        full = Linear(self.x.float(), self.b.float())
        return full.merge(other) or other.merge(full)

    def methods(self) -> list[Method]:
        (n, t, d), e = self.x.shape, self.b.shape[2]
        flops = n * d * e * (2 * t / SPEED + PASSES)
        return [Method("rows in bfloat16", HalfLinear.rows, flops, floats=n * d * e, rows=True)]

    def rows(self) -> Tensor:
        return torch.bmm(self.b.mT, self.x).float()

    def project(self, v: Tensor) -> Tensor:
        return torch.cat([rows.project(v) for _, rows in self._parts()])

    def weighted_sum(self, c: Tensor) -> Tensor:
        total = c.new_zeros(self.shape)
        for part, rows in self._parts():
            total += rows.weighted_sum(c[part])
        return total

    def select(self, index: Tensor | slice) -> HalfLinear:
        return HalfLinear(self.x[index], self.b[index])

    def _parts(self) -> Iterator[tuple[slice, Rows]]:
        """Yields the rows of some examples after the other, of as many as those whose norms are computed at once."""
        n = self.num_examples
        size = chunk_size(n, n * self.shape.numel())
        for i in range(0, max(n, 1), size):
            part = slice(i, i + size)
            yield part, Rows(self.select(part).rows())


def product_with_matrix(x: Tensor, b: Tensor, *, in_half: bool) -> Op:
    """Returns the block of ``y = x Wᵀ`` for x (n, t, d) and b (n, t, e); ``in_half`` if y was computed in bfloat16."""
    positions, entries = x.shape[1], x.shape[2] * b.shape[2]
    if in_half and positions >= LEAST_POSITIONS and entries <= MOST_ENTRIES:
        return HalfLinear(x.bfloat16(), b.bfloat16())
    return Linear(*in_one_dtype(x, b))
