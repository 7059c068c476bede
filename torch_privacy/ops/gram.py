# SPDX-License-Identifier: Apache-2.0
"""Computes squared norms of sums of outer products from Gram matrices, and checks for rounding and underflow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._base import CHUNK_FLOATS, Op
from .dense import Rows, squared_lengths

# A squared norm from a Gram matrix is a sum of t² terms of both signs. If rounding and underflow could change it by
# more than this (relative), it is recomputed from the example's row. The largest error seen in networks was a third of
# it.
GRAM_TOLERANCE = 5e-6


class Lost(NamedTuple):
    """A bound on the error by underflow: ``units * of + more``; as three numbers, because each sum costs a call."""

    of: Tensor  # (n,)
    units: float
    more: float = 0.0


def norms_from_gram(grams: Sequence[Tensor], sizes: Sequence[int], op: Op, twice: Tensor | None = None) -> Tensor:
    """Returns squared norms (n,) of the rows of ``op``: the summed entries of the product of factors' Gram matrices.

    Overwrites ``grams`` (n, .., t, t), at least two; ``sizes`` are the numbers of products that each of their entries
    sums. ``twice`` (n, ..) are additional terms that count twice.
    """
    t = grams[0].shape[1:-1].numel()
    lost = lost_to_underflow(t, [gram.diagonal(dim1=-2, dim2=-1).flatten(1) for gram in grams], sizes)
    terms, *others = grams
    for other in others:
        terms.mul_(other)
    terms = terms.flatten(1)
    squares, size = terms.sum(1), torch.linalg.vector_norm(terms, 1, dim=1)
    if twice is not None:
        twice = twice.flatten(1)
        squares.add_(twice.sum(1), alpha=2)
        size.add_(torch.linalg.vector_norm(twice, 1, dim=1), alpha=2)
    return checked_sums(squares, size, lost, op)


def checked_sums(squares: Tensor, size: Tensor, lost: Lost, op: Op) -> Tensor:
    """Returns the sums ``squares`` (n,); recomputes them from the rows of ``op`` where they may be inaccurate.

    ``size`` is the sum of the terms' magnitudes. On a GPU, where asking costs a wait for the device, inaccurate ones
    become NaN, and the caller recomputes those.
    """
    eps = torch.finfo(squares.dtype).eps
    error = torch.add(size, lost.of, alpha=lost.units / eps)  # in units of eps, without lost.more
    accurate = torch.add(squares, error, alpha=-eps / GRAM_TOLERANCE) >= lost.more / GRAM_TOLERANCE  # not where NaN
    if squares.device.type != "cpu":
        return torch.where(accurate, squares, _nan(squares.dtype, squares.device))
    for some in (~accurate).nonzero().flatten().split(max(1, CHUNK_FLOATS // max(1, op.shape.numel()))):
        if len(some):
            squares[some] = Rows(op.select(some).rows()).squared_norms()
    return squares


@lru_cache(maxsize=16)
def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device)  # kept: to make it costs a launch


def lost_to_underflow(t: int, diagonals: Sequence[Tensor], sizes: Sequence[int]) -> Lost:
    """Bounds the error (n,) of the sum over t² products of Gram matrices' entries if numbers below tiny become zero.

    The error of an entry is at most ``size·tiny``, and no entry exceeds the trace, the sum of the diagonal (n, t):
    bounds follow factor by factor.
    """
    first, second, *others = diagonals
    tiny = torch.finfo(first.dtype).tiny
    more = t**2 * tiny * (1 + t * (2 * sizes[0] + 1) * sizes[1] * tiny)
    both = torch.add(second, first, alpha=sizes[1] / (sizes[0] + 1)).sum(1)
    lost = Lost(both, t**2 * (sizes[0] + 1) * tiny, more)
    total: Any = float(t**2)  # the sum of t² ones, times the largest entries of the factors so far
    traces = [diagonal.sum(1) for diagonal in diagonals] if others else []
    for k in range(2, len(traces)):
        for earlier in (0, 1) if k == 2 else (k - 1,):
            total = (traces[earlier] + t * sizes[earlier] * tiny) * total
        largest = traces[k] + t * sizes[k] * tiny
        so_far = lost.of * lost.units + lost.more
        lost = Lost(torch.add(so_far * largest, total, alpha=sizes[k] * tiny), 1.0, t**2 * tiny)
    return lost


def squares_of_factor(factor: Tensor) -> Tensor:
    """Returns upper bounds (n,) on the squared norms of (n, ...), tight up to underflow.

    Squares of numbers below 1e-19 underflow in float32, while the other factor may be large and the product of any
    size.
    """
    flat = factor.flatten(1)
    return squared_lengths(flat) + flat.shape[1] * torch.finfo(flat.dtype).tiny
