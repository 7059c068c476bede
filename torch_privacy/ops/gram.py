# SPDX-License-Identifier: Apache-2.0
"""Computes squared norms of sums of outer products from Gram matrices, and checks for rounding and underflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._base import CHUNK_FLOATS, Op
from .dense import Rows, squared_lengths

# A squared norm from a Gram matrix is a sum of t² terms of both signs. If rounding and underflow could change it by
# more than this (relative), it is recomputed from the example's row. The largest error seen in networks was a third of
# it.
GRAM_TOLERANCE = 5e-6


def norms_from_gram(grams: Sequence[Tensor], sizes: Sequence[int], op: Op, twice: Tensor | None = None) -> Tensor:
    """Returns squared norms (n,) of the rows of ``op``: the summed entries of the product of factors' Gram matrices.

    Overwrites ``grams`` (n, .., t, t); ``sizes`` are the numbers of products that each of their entries sums. ``twice``
    (n, ..) are additional terms that count twice.
    """
    t = grams[0].shape[1:-1].numel()
    lost = lost_to_underflow(t, [gram.diagonal(dim1=-2, dim2=-1).flatten(1).sum(1) for gram in grams], sizes)
    terms, *others = grams
    for other in others:
        terms.mul_(other)
    terms = terms.flatten(1)
    squares, size = terms.sum(1), torch.linalg.vector_norm(terms, 1, dim=1)
    if twice is not None:
        twice = twice.flatten(1)
        squares, size = squares + 2 * twice.sum(1), size + 2 * torch.linalg.vector_norm(twice, 1, dim=1)
    return checked_sums(squares, size, lost, op)


def checked_sums(squares: Tensor, size: Tensor, lost: Tensor | float, op: Op) -> Tensor:
    """Returns the sums ``squares`` (n,); recomputes them from the rows of ``op`` where they may be inaccurate.

    ``size`` is the sum of the terms' magnitudes; ``lost`` bounds the error by underflow. On a GPU, where asking costs a
    wait for the device, inaccurate ones become NaN, and the caller recomputes those.
    """
    eps = torch.finfo(squares.dtype).eps
    error = torch.add(lost, size, alpha=eps) if isinstance(lost, Tensor) else eps * size + lost
    accurate = error <= GRAM_TOLERANCE * squares  # not where NaN
    if squares.device.type != "cpu":
        return torch.where(accurate, squares, torch.nan)
    for some in (~accurate).nonzero().flatten().split(max(1, CHUNK_FLOATS // max(1, op.shape.numel()))):
        if len(some):
            squares[some] = Rows(op.select(some).rows()).squared_norms()
    return squares


def lost_to_underflow(t: int, traces: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Bounds the error (n,) of the sum over t² products of Gram matrices' entries if numbers below tiny become zero.

    The error of an entry is at most ``size·tiny``, and no entry exceeds the trace: bounds follow factor by factor.
    """
    tiny = torch.finfo(traces[0].dtype).tiny
    lost: Any = t**2 * (sizes[0] + 1) * tiny  # of the first factor; numbers of Python cost no call of torch
    total: Any = float(t**2)  # the sum of t² ones, times the largest entries of the factors so far
    for k in range(1, len(traces)):
        total = (traces[k - 1] + t * sizes[k - 1] * tiny) * total
        largest = traces[k] + t * sizes[k] * tiny
        lost = torch.add(lost * largest, total, alpha=sizes[k] * tiny) + t**2 * tiny
    return lost if len(traces) > 1 else torch.full_like(traces[0], lost)


def squares_of_factor(factor: Tensor) -> Tensor:
    """Returns upper bounds (n,) on the squared norms of (n, ...), tight up to underflow.

    Squares of numbers below 1e-19 underflow in float32, while the other factor may be large and the product of any
    size.
    """
    flat = factor.flatten(1)
    return squared_lengths(flat) + flat.shape[1] * torch.finfo(flat.dtype).tiny
