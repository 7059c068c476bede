# SPDX-License-Identifier: Apache-2.0
"""Explicit rows: for small parameters (biases, scales of norms) and where the uses of one have no common form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._base import Method, Op


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
        return self._flat.square().sum(1)

    def rows(self) -> Tensor:
        return self.values

    def project(self, v: Tensor) -> Tensor:
        return self._flat @ v.reshape(len(v), -1).mT

    def weighted_sum(self, c: Tensor) -> Tensor:
        return (c @ self._flat).view(self.shape)

    @property
    def _flat(self) -> Tensor:  # (n, size), also of a weight without dimensions
        return self.values.reshape(self.num_examples, self.shape.numel())

    def select(self, index: Tensor | slice) -> Rows:
        return Rows(self.values[index])

    def merge(self, other: Op) -> Op | None:
        return Rows(self.values + other.values) if isinstance(other, Rows) else None


def sum_rows(ops: list[Op]) -> Rows:
    """Uses of one tensor that have no common form: their rows, added."""
    return Rows(torch.stack([op.rows() for op in ops]).sum(0)) if len(ops) > 1 else Rows(ops[0].rows())
