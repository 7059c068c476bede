# SPDX-License-Identifier: Apache-2.0
"""Squared norms of sums of outer products from Gram matrices, checked for what rounding and vanishing numbers take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._base import CHUNK_FLOATS, Op
from .dense import Rows, squared_lengths

# A norm from a Gram matrix is a sum of t² terms of both signs. Where rounding, and numbers too small for the type,
# could move its square by more than this (relative), that example is computed again from its row. In networks a third
# of it was seen.
GRAM_TOLERANCE = 5e-6


def norms_from_gram(grams: Sequence[Tensor], sizes: Sequence[int], op: Op, twice: Tensor | None = None) -> Tensor:
    """Squared norms (n,) of the rows of ``op``: the sum of the entries of its factors' Gram matrices, multiplied.

    ``grams`` (n, .., t, t) are used up; ``sizes`` says how many products each of their entries sums. ``twice`` (n, ..)
    are terms beside those, which count twice.
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
    return sure(squares, size, lost, op)


def sure(squares: Tensor, size: Tensor, lost: Tensor | float, op: Op) -> Tensor:
    """The sums ``squares`` (n,) of terms whose magnitudes add up to ``size``, from the rows of ``op`` where in doubt.

    ``lost`` bounds what numbers too small for the type took from the sums.
    """
    unsure = ~(torch.finfo(squares.dtype).eps * size + lost <= GRAM_TOLERANCE * squares)  # or undefined
    for some in unsure.nonzero().flatten().split(max(1, CHUNK_FLOATS // max(1, op.shape.numel()))):
        if len(some):
            squares[some] = Rows(op.select(some).rows()).squared_norms()
    return squares


def lost_to_underflow(t: int, traces: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """How far (n,) the sum over t² products of Gram matrices' entries can be off where numbers below tiny are zero.

    An entry is off by at most ``size·tiny``, and no entry is larger than the trace: bounds follow factor by factor.
    """
    tiny = torch.finfo(traces[0].dtype).tiny
    lost, total = torch.zeros_like(traces[0]), torch.full_like(traces[0], t**2)  # of t² ones
    for trace, size in zip(traces, sizes, strict=True):
        largest = trace + t * size * tiny
        lost, total = lost * largest + total * (size * tiny) + t**2 * tiny, total * largest
    return lost


def squares_of_factor(factor: Tensor) -> Tensor:
    """(n, ...) -> (n,): squared norms, and at least that: squares of numbers below 1e-19 vanish in float32.

    The other factor may be as large as they are small, and the product any length.
    """
    flat = factor.flatten(1)
    return squared_lengths(flat) + flat.shape[1] * torch.finfo(flat.dtype).tiny


def lengths(vectors: Tensor) -> Tensor:
    """(.., d) -> (..): norms, and at least that."""
    return squares_of_factor(vectors.flatten(0, -2)).sqrt().view(vectors.shape[:-1])
