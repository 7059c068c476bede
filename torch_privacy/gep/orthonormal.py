# SPDX-License-Identifier: Apache-2.0
"""Orthonormal directions of a large space: drawn at random, made orthonormal by Gram matrices, held as two factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._torch_modes import without_autocast
from ..ops._base import CHUNK_FLOATS

OVERSAMPLING = 16  # entries of a folded vector for each direction that is wanted
MOST_PASSES = 5  # over directions until they are orthonormal; one or two do
WELL_CONDITIONED = 10.0  # ratio of largest to smallest squared length up to which one pass leaves rounding only
COLUMNS, PARTS = 16384, 3  # of a Gram matrix: summed in float32; parts of its rows, 3 for 2/3 of the work
ROUNDING = 16  # in units of the type's: a length below that of the largest is not known


class Fold:
    """A random map of vectors of p numbers to ``width`` numbers: signs, then sums of the entries ``width`` apart.

    Inner products are kept on average, and for a few directions nearly always: a sparse random projection, at the cost
    of reading the vectors once. Where p is no larger than the width nothing is lost.

    Source: Clarkson & Woodruff (2013, arXiv:1207.6365), sparse embeddings; ours has buckets in turn.
    """

    def __init__(self, p: int, k: int, generator: torch.Generator, like: Tensor):
        self.width = min(p, OVERSAMPLING * k)
        self._signs = (torch.randint(0, 2, (p,), generator=generator) * 2 - 1).to(like.device, like.dtype)

    def __call__(self, *parts: Tensor) -> Tensor:
        """Vectors, cut into (n, size) one after the other -> (n, width)."""
        folded, start = parts[0].new_zeros(len(parts[0]), self.width), 0
        for part in parts:
            end, a = start + part.shape[1], start
            while a < end:  # turn by turn
                first = a % self.width
                b = min(a - first + self.width, end)
                folded[:, first : first + b - a].addcmul_(part[:, a - start : b - start], self._signs[a:b])
                a = b
            start = end
        return folded


class Start:
    """k random directions for p numbers, to begin a power iteration with: they project without being formed.

    A fold, then standard normal numbers: products with directions of the whole length would cost as much as all else.
    """

    def __init__(self, p: int, k: int, generator: torch.Generator, like: Tensor):
        self._fold = Fold(p, k, generator, like)
        self._directions = torch.randn(self._fold.width, k, generator=generator).to(like.device, like.dtype)

    def coordinates(self, parts: Sequence[Tensor]) -> Tensor:
        """Vectors, cut into (n, size) one after the other -> (n, k)."""
        return self._fold(*parts) @ self._directions


@dataclass(frozen=True)
class Frame:
    """r orthonormal directions: the rows of ``T V``, of which the factors are held.

    Args:
        vectors: V (k, p), rows of about the same length that are far from dependent.
        mixing: T (r, k).
    """

    vectors: Tensor
    mixing: Tensor

    def __len__(self) -> int:
        return len(self.mixing)

    def formed(self) -> Tensor:
        """(r, p): the directions."""
        return self.mixing @ self.vectors

    def coordinates(self, parts: Sequence[Tensor]) -> Tensor:
        """Vectors, cut into (n, size) one after the other -> (n, r): inner products with the directions."""
        pieces = self.vectors.split([part.shape[1] for part in parts], 1)
        first, *others = (part @ v.mT for part, v in zip(parts, pieces, strict=True))
        return sum(others, first) @ self.mixing.mT

    def expand(self, coordinates: Tensor) -> Tensor:
        """(r,) -> (p,): the directions, each so many times, added up."""
        return (coordinates @ self.mixing) @ self.vectors


@torch.no_grad()
def orthonormalize(vectors: Tensor, generator: torch.Generator) -> Frame:
    """Orthonormal directions that span the vectors (k, p), in whose memory they are held; there may be fewer than k.

    Whitening by the Gram matrix, T V with T = Λ^-½ Qᵀ: first by that of folded vectors, which costs little and is taken
    in float64, then by that of the vectors themselves, until their lengths are alike; the last T is left a factor.
    Directions that are shorter than rounding are left out: they are not known.

    Guarantees:
        - The Gram matrix of the directions is the identity up to 1e-6 in float32.
        - Never NaN for finite vectors: there may be no direction.

    Source: Cholesky QR, twice, with randomized preconditioning (Balabanov 2022, arXiv:2210.09953); by eigenvalues, so
        that no rank is assumed.
    """
    with without_autocast(vectors.device.type):
        return _orthonormalized(vectors, generator)


def _orthonormalized(vectors: Tensor, generator: torch.Generator) -> Frame:
    largest = _largest(vectors)
    if not largest > 0:
        return _nothing(vectors)
    rounding = ROUNDING * torch.finfo(vectors.dtype).eps
    folded = Fold(vectors.shape[1], len(vectors), generator, vectors)(vectors.div_(largest))
    mixing, _ = _whitening(_gram(folded.double()), max(rounding**2, 1e-13))
    for _ in range(MOST_PASSES):
        vectors = _mixed(mixing.to(vectors.dtype), vectors)
        mixing, spread = _whitening(_gram(vectors), rounding)
        if spread <= WELL_CONDITIONED:
            break
    return Frame(vectors, mixing.to(vectors.dtype))


def _whitening(gram: Tensor, least: float) -> tuple[Tensor, float]:
    """T (r, k) that makes a Gram matrix the identity, and the spread of its eigenvalues.

    Directions with an eigenvalue below ``least`` of the largest are left out. Of the matrix the lower half is read.
    """
    lengths, directions = torch.linalg.eigh(gram)
    known = lengths > least * lengths[-1]
    lengths, directions = lengths[known], directions[:, known]
    return (directions / lengths.sqrt()).T, float(lengths[-1] / lengths[0])


def _mixed(mixing: Tensor, vectors: Tensor) -> Tensor:
    """T V (r, p), in the memory of V (k, p); r <= k."""
    for piece in vectors.split(max(1, CHUNK_FLOATS // 2 // max(1, len(vectors))), 1):  # which stays in the cache
        piece[: len(mixing)] = mixing @ piece
    return vectors[: len(mixing)]


def _gram(vectors: Tensor) -> Tensor:
    """V Vᵀ in float64, from products of pieces of so many columns; the lower half, and little more."""
    k = len(vectors)
    total, step = torch.zeros(k, k, dtype=torch.float64, device=vectors.device), -(-k // PARTS)
    for piece in vectors.split(COLUMNS, 1):
        for a in range(0, k, step):
            total[a : a + step, : a + step] += piece[a : a + step] @ piece[: a + step].mT
    return total


def _largest(tensor: Tensor) -> Tensor:
    """The largest absolute value, without a copy; 0 of nothing."""
    if not tensor.numel():
        return tensor.new_zeros(())
    least, most = tensor.aminmax()
    return torch.maximum(-least, most)


def _nothing(like: Tensor) -> Frame:
    return Frame(like[:0], like.new_zeros(0, 0))
