# SPDX-License-Identifier: Apache-2.0
"""Products and convolutions in bfloat16: rows as the network's own backward rounds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ._base import Method, Op, chunk_size, in_one_dtype
from .dense import Rows

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
