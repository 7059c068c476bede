# SPDX-License-Identifier: Apache-2.0
"""The plan: which exact method answers for each op, and why."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ops import Method, Op
from .ops._base import CHUNK_FLOATS


def cheapest(op: Op) -> Method:
    """The method with the fewest operations; all are exact, and chunks bound what each of them holds at once."""
    return min(op.methods(), key=lambda method: method.flops)


def squared_norms(op: Op, method: Method | None = None) -> Tensor:
    """Squared norms (n,) of an op's rows by a method (the cheapest unless given), chunk by chunk."""
    method = method or cheapest(op)
    n = op.num_examples
    size = chunk_size(n, method.floats)
    if size >= n:
        return _norms_by(method, op)
    return torch.cat([_norms_by(method, op.select(slice(i, i + size))) for i in range(0, n, size)])


def _norms_by(method: Method, op: Op) -> Tensor:
    answer = method.compute(op)
    return answer.reshape(op.num_examples, -1).square().sum(1) if method.rows else answer


def chunk_size(num_examples: int, floats: float) -> int:
    """How many examples to take at a time so that temporaries of ``floats`` numbers for all stay within a chunk."""
    return max(1, num_examples // max(1, math.ceil(floats / CHUNK_FLOATS)))
