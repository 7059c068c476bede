# SPDX-License-Identifier: Apache-2.0
"""Small blocks of the Jacobian that answer together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ...ops.dense import Rows, squared_lengths
from ...ops.linear import Linear, OuterProducts
from .blocks import Block, Direction


class JoinedBlocks:
    """Blocks that answer together, because for small ones every call of torch costs more than its arithmetic.

    Args:
        blocks: of one Jacobian; those that answer jointly are joined if there are several, all of one type
            and on one device.

    Attributes:
        blocks: those that are joined.
        ids: of these.
    """

    def __init__(self, blocks: Sequence[Block]):
        self._of_rows: list[Block] = []
        self._of_outer: list[Block] = []
        rows: list[Tensor] = []
        outer: list[Linear] = []
        kinds: set[tuple[torch.dtype, torch.device]] = set()
        for block in blocks:
            if block.joint or block.answers_jointly:
                op: Any = block.ops[0]
                if type(op) is Rows:
                    self._of_rows.append(block)
                    rows.append(op.values.unsqueeze(-1).flatten(1))  # also of a scalar
                    kinds.add((op.values.dtype, block.weight.device))
                else:
                    self._of_outer.append(block)
                    outer.append(op)
                    kinds.add((op.b.dtype, block.weight.device))
        if len(rows) + len(outer) < 2 or len(kinds) > 1:
            self._of_rows, self._of_outer, rows, outer = [], [], [], []
        self.blocks = [*self._of_rows, *self._of_outer]
        self.ids = {*map(id, self.blocks)}
        self._rows = torch.cat(rows, 1) if rows else None
        self._outer = OuterProducts(outer) if outer else None

    def squared_norms(self) -> Tensor:
        """Returns (n,), over all of the blocks."""
        parts = [] if self._rows is None else [squared_lengths(self._rows)]
        if self._outer is not None:
            parts.append(self._outer.squared_norms())
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def last_weighted_sum(self, c: Tensor) -> list[tuple[str, Tensor]]:
        """Returns the name of each block's parameter with Jᵀ c in it; frees the factors of blocks summed once."""
        found: list[tuple[str, Tensor]] = []
        if self._rows is not None:
            total, end = c.to(self._rows) @ self._rows, 0
            for block in self._of_rows:
                start, end = end, end + block.weight.numel()
                found.append((block.names[0], total[start:end].view(block.weight.shape)))
        if self._outer is not None:
            blocks, frees = self._of_outer, all(map(_summed_once, self._of_outer))
            op: Any = blocks[0].ops[0]
            c = c.to(blocks[0].weight.device, op.b.dtype)
            for block in blocks if frees else ():
                block.ops = []
            found += [(blocks[k].names[0], total) for k, total in self._outer.weighted_sums(c, frees=frees)]
        return found

    def project_on(self, direction: Direction) -> Iterator[Tensor]:
        """Yields the products (n,) of the rows with one direction in each weight."""
        if self._rows is not None:
            factors = [direction(block.weight.shape, self._rows.device) for block in self._of_rows]
            factors = [(left.to(self._rows.dtype), right.flatten().to(self._rows.dtype)) for left, right in factors]
            yield self._rows @ torch.cat([torch.outer(left, right).flatten() for left, right in factors])
        for block in self._of_outer:
            yield from block.project_on(direction, {})  # parameters themselves


_summed_once = attrgetter("summed_once")
