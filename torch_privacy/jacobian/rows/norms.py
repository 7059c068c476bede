# SPDX-License-Identifier: Apache-2.0
"""Computes squared norms, rows and projections of one op by a given method, in chunks of bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import Method, Op
from ...ops._base import CHUNK_FLOATS, chunk_size
from ...ops.dense import Rows
from .plan import FRESH_BYTES

MIN_PROJECTED, MAX_PROJECTED = 32, 128  # examples per product with directions that do not fit the cache


def cheapest(op: Op) -> Method:
    """Returns the method with the fewest operations for norms alone."""
    return min(op.methods(), key=lambda method: method.flops)


def squared_norms(op: Op, method: Method | None = None) -> Tensor:
    """Returns the squared norms (n,) of an op's rows by a method, by default the cheapest, chunk by chunk."""
    norms = first_squared_norms(op, method)
    return norms if norms.device.type == "cpu" else settled(op, norms)


def first_squared_norms(op: Op, method: Method | None = None) -> Tensor:
    """Returns the same without waiting for a GPU: NaN where a Gram matrix is inaccurate, until they are `settled`."""
    method = method or cheapest(op)
    parts = [_norms_of(method, method.compute(part)) for part in _chunks(op, method)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def settled(op: Op, norms: Tensor) -> Tensor:
    """Returns squared norms (n,), with those that are NaN computed from the rows."""
    unknown = norms.isnan().nonzero().flatten()
    if not len(unknown):
        return norms
    size = chunk_size(len(unknown), len(unknown) * op.shape.numel())
    found = [Rows(op.select(some).rows()).squared_norms() for some in unknown.split(size)]
    return norms.index_copy(0, unknown, torch.cat(found))


def rows_and_norms(op: Op, method: Method) -> tuple[Rows, Tensor]:
    """Returns the rows of an op by a method that makes them, and their squared norms (n,)."""
    n = op.num_examples
    size = chunk_size(n, method.floats - n * op.shape.numel())  # the rows of all examples are held in any case
    if size >= n:
        rows = Rows(method.compute(op))
        return rows, rows.squared_norms()
    values = torch.empty(n, *op.shape, dtype=op.dtype, device=op.device)
    norms = []
    for i in range(0, n, size):
        part = method.compute(op.select(slice(i, i + size)))
        values[i : i + size] = part
        norms.append(Rows(part).squared_norms())
    return Rows(values), torch.cat(norms)


def projections(op: Op, v: Tensor) -> Tensor:
    """Returns J v (n, k) for k directions (k, *shape), by the op's own rule or from its rows.

    If an example has several positions, one product with its row is cheaper than one with every position. The op's own
    rule gets some of the directions at a time.
    """
    n, k, size = op.num_examples, len(v), op.shape.numel()
    if isinstance(op, Rows) or not n or k == 1:
        return op.project(v)
    if op.sum_flops < 2 * n * size:
        some = max(1, CHUNK_FLOATS // max(1, op.projected_floats))
        return torch.cat([op.project(part) for part in v.split(some)], 1)
    fits_cache = max(MIN_PROJECTED, min(MAX_PROJECTED, FRESH_BYTES // max(1, 4 * size)))
    step = max(chunk_size(n, n * size), min(k, fits_cache))
    return torch.cat([Rows(op.select(slice(i, i + step)).rows()).project(v) for i in range(0, n, step)])


def _norms_of(method: Method, answer: Tensor) -> Tensor:
    return Rows(answer).squared_norms() if method.rows else answer


def _chunks(op: Op, method: Method) -> list[Op]:
    n = op.num_examples
    size = chunk_size(n, method.floats)
    return [op] if size >= n else [op.select(slice(i, i + size)) for i in range(0, n, size)]
