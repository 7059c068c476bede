# SPDX-License-Identifier: Apache-2.0
"""Provides orthonormal bases of subspaces of a large space: random start, orthonormalization, products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops._base import CHUNK_FLOATS
from ...support.own_draws import randint, randn
from ...support.torch_modes import full_precision, without_autocast

OVERSAMPLING = 16  # entries of a count sketch per direction
MAX_PASSES = 5  # over directions until they are orthonormal; one or two suffice
WELL_CONDITIONED = 10.0  # ratio of largest to smallest squared length up to which one pass leaves only rounding
COLUMNS, PARTS = 16384, 3  # of a Gram matrix: columns summed in float32; parts of its rows, 3 for 2/3 of the work
ROUNDING = 16  # in units of the dtype's epsilon: shorter directions, relative to the longest, are only rounding


class CountSketch:
    """A sparse random projection from p to ``width`` numbers: random signs, then sums of every ``width``-th entry.

    It preserves inner products in expectation, and for a few directions with high probability, at the cost of reading
    the vectors once. If p is at most the width, it is exact.

    Source: Clarkson & Woodruff (2013, arXiv:1207.6365), sparse embeddings; here with cyclic instead of random buckets.
    """

    def __init__(self, p: int, k: int, generator: torch.Generator, like: Tensor):
        self.width = min(p, OVERSAMPLING * k)
        self._signs = _like(randint(0, 2, (p,), generator=generator) * 2 - 1, like)

    def __call__(self, *parts: Tensor) -> Tensor:
        """Maps vectors, given as consecutive parts (n, size), to (n, width)."""
        folded, start = parts[0].new_zeros(len(parts[0]), self.width), 0
        for part in parts:
            end, a = start + part.shape[1], start
            while a < end:  # one cycle of the buckets at a time
                first = a % self.width
                b = min(a - first + self.width, end)
                folded[:, first : first + b - a].addcmul_(part[:, a - start : b - start], self._signs[a:b])
                a = b
            start = end
        return folded


class RandomStart:
    """k random directions in p dimensions that start a power iteration; they are never formed.

    They are a count sketch followed by a standard normal matrix: dense directions would cost as much as all else.
    """

    def __init__(self, p: int, k: int, generator: torch.Generator, like: Tensor):
        self._sketch = CountSketch(p, k, generator, like)
        self._directions = _like(randn(self._sketch.width, k, generator=generator), like)

    def coordinates(self, parts: Sequence[Tensor]) -> Tensor:
        """Maps vectors, given as consecutive parts (n, size), to (n, k)."""
        return self._sketch(*parts) @ self._directions


@dataclass(frozen=True)
class OrthonormalBasis:
    """r orthonormal directions: the rows of ``T V``, stored as these two factors.

    Args:
        vectors: V (k, p), well-conditioned rows of about equal length.
        mixing: T (r, k).
    """

    vectors: Tensor
    mixing: Tensor

    def __len__(self) -> int:
        return len(self.mixing)

    def matrix(self) -> Tensor:
        """Returns the directions, (r, p)."""
        return self.mixing @ self.vectors

    def coordinates(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns inner products (n, r) with the directions, for vectors given as consecutive parts (n, size)."""
        pieces = self.vectors.split([part.shape[1] for part in parts], 1)
        first, *others = (part @ v.mT for part, v in zip(parts, pieces, strict=True))
        return sum(others, first) @ self.mixing.mT

    def expand(self, coordinates: Tensor) -> Tensor:
        """Returns the linear combination (p,) of the directions with these coordinates (r,)."""
        return (coordinates @ self.mixing) @ self.vectors


@torch.no_grad()
def orthonormalize(vectors: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, OrthonormalBasis]:
    """Returns orthonormal directions that span each group's vectors (k, p), overwriting them; there may be fewer.

    Whitens by the Gram matrix, T V with T = Λ^-½ Qᵀ: first by the Gram matrix of sketched vectors, which is cheap and
    computed in float64, then by that of the vectors themselves, until their lengths are alike; the last T remains a
    factor. Directions that are shorter than rounding errors are dropped. Eigenvalues are computed on the CPU, for all
    groups at once, so that the host waits for a GPU once for each pass.

    Guarantees:
        - The Gram matrix of a group's directions is the identity up to 1e-6 in float32.
        - Never NaN for finite vectors; there may be no direction.

    Source: Cholesky QR, twice, with randomized preconditioning (Balabanov 2022, arXiv:2210.09953); here by
        eigenvalues, so that no rank is assumed.
    """
    if not vectors:
        return {}
    device = next(iter(vectors.values())).device
    with without_autocast(device.type), full_precision(device):
        return _orthonormalized(dict(vectors), generator)


def _orthonormalized(vectors: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, OrthonormalBasis]:
    scales: dict[str, Tensor] = {}
    grams: dict[str, Tensor] = {}
    for group, v in vectors.items():
        scales[group] = _max_magnitude(v)
        v.div_(torch.where(scales[group] > 0, scales[group], 1))
        grams[group] = _gram(CountSketch(v.shape[1], len(v), generator, v)(v).double())
    mixing = _mixing_by_sketches(scales, grams, {group: v.dtype for group, v in vectors.items()})
    mixed = {group: _mix_in_place(_like(t, vectors[group]), vectors[group]) for group, t in mixing.items()}
    return {group: _empty_basis(v) for group, v in vectors.items()} | _polished(mixed)


@torch.no_grad()
def orthonormal_combinations(
    rows: Mapping[str, Sequence[Sequence[Tensor]]],
    directions: Mapping[str, RandomStart | OrthonormalBasis],
    generator: torch.Generator,
) -> dict[str, OrthonormalBasis]:
    """Returns, for each group, directions that span ``Eᵀ G`` with ``E = G Vᵀ``, for rows G chunk by chunk in parts.

    E is whitened before the product, by a sketch of it: that spares a pass over the k directions, and rounds less.
    Guarantees: those of `orthonormalize`.
    """
    if not rows:
        return {}
    likes = {group: chunks[0][0] for group, chunks in rows.items()}
    sizes = {group: sum([part.shape[1] for part in chunks[0]]) for group, chunks in rows.items()}
    device = next(iter(likes.values())).device
    with without_autocast(device.type), full_precision(device):
        es, scales, grams = {}, {}, {}
        for group, chunks in rows.items():
            e = es[group] = torch.cat([directions[group].coordinates(parts) for parts in chunks]).double()
            scales[group] = _max_magnitude(e)
            e.div_(torch.where(scales[group] > 0, scales[group], 1))
            sketch = CountSketch(sizes[group], e.shape[1], generator, likes[group])
            grams[group] = _gram(e.mT @ torch.cat([sketch(*parts) for parts in chunks]).double())
        mixing = _mixing_by_sketches(scales, grams, {group: like.dtype for group, like in likes.items()})
        combined = {
            group: _combined((es[group] @ _like(t, es[group]).mT).to(likes[group].dtype), rows[group], sizes[group])
            for group, t in mixing.items()
        }
        empty = {group: _empty_basis(like.new_empty(0, sizes[group])) for group, like in likes.items()}
        return empty | _polished(combined)


def _mixing_by_sketches(
    scales: Mapping[str, Tensor], grams: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Returns the matrix that whitens each group's sketch, for the groups that are not zero; by one read of a GPU."""
    on_host = _on_host([*scales.values(), *grams.values()])
    known = [group for group, scale in zip(scales, on_host, strict=False) if scale > 0]
    of_group = dict(zip(grams, on_host[len(scales) :], strict=True))
    return {group: _whitening(of_group[group], _least_of_sketch(dtypes[group]))[0] for group in known}


def _combined(e: Tensor, rows: Sequence[Sequence[Tensor]], p: int) -> Tensor:
    """Returns ``Eᵀ G`` (k, p)."""
    total = e.new_empty(e.shape[1], p)
    for number, (some, parts) in enumerate(zip(e.split([len(parts[0]) for parts in rows]), rows, strict=True)):
        for out, part in zip(total.split([part.shape[1] for part in parts], 1), parts, strict=True):
            out.addmm_(some.mT, part, beta=1 if number else 0)
    return total


def _polished(vectors: dict[str, Tensor]) -> dict[str, OrthonormalBasis]:
    """Returns the basis of each group's vectors, which are mixed again as long as they are not well-conditioned."""
    found: dict[str, OrthonormalBasis] = {}
    for passes in range(MAX_PASSES):
        grams = zip(vectors, _on_host([_gram(v) for v in vectors.values()]), strict=True)
        whitening = {group: _whitening(gram, _rounding(vectors[group].dtype)) for group, gram in grams}
        for group, (mixing, _) in whitening.items():
            found[group] = OrthonormalBasis(vectors[group], _like(mixing, vectors[group]))
        rough = [group for group, (_, spread) in whitening.items() if spread > WELL_CONDITIONED]
        if not rough or passes == MAX_PASSES - 1:
            break
        vectors = {g: _mix_in_place(_like(whitening[g][0], vectors[g]), vectors[g]) for g in rough}
    return found


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors on the CPU; those of a GPU come in one copy, in float64."""
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    parts = torch.cat([t.double().flatten() for t in tensors]).cpu().split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def _like(t: Tensor, vectors: Tensor) -> Tensor:
    """Returns t with the type and on the device of the vectors, without waiting for a GPU."""
    return t.to(vectors.device, vectors.dtype, non_blocking=True)


def _rounding(dtype: torch.dtype) -> float:
    return ROUNDING * torch.finfo(dtype).eps


def _least_of_sketch(dtype: torch.dtype) -> float:
    """Returns the smallest eigenvalue of a sketch's Gram matrix that is not rounding, relative to the largest."""
    return max(_rounding(dtype) ** 2, 1e-13)


def _whitening(gram: Tensor, least: float) -> tuple[Tensor, float]:
    """Returns T (r, k) that makes a Gram matrix the identity, and the ratio of its extreme eigenvalues.

    Drops eigenvalues below ``least`` times the largest. Only the lower half of the matrix is read.
    """
    lengths, directions = torch.linalg.eigh(gram)
    known = lengths > least * lengths[-1]
    lengths, directions = lengths[known], directions[:, known]
    return (directions / lengths.sqrt()).T, float(lengths[-1] / lengths[0])


def _mix_in_place(mixing: Tensor, vectors: Tensor) -> Tensor:
    """Returns T V (r, p), written into the memory of V (k, p); r <= k."""
    for piece in vectors.split(max(1, CHUNK_FLOATS // 2 // max(1, len(vectors))), 1):  # pieces that fit in the cache
        piece[: len(mixing)] = mixing @ piece
    return vectors[: len(mixing)]


def _gram(vectors: Tensor) -> Tensor:
    """Returns V Vᵀ in float64, summed over pieces of columns; valid in its lower half."""
    k = len(vectors)
    total, step = torch.zeros(k, k, dtype=torch.float64, device=vectors.device), -(-k // PARTS)
    for piece in vectors.split(COLUMNS, 1):
        for a in range(0, k, step):
            total[a : a + step, : a + step] += piece[a : a + step] @ piece[: a + step].mT
    return total


def _max_magnitude(tensor: Tensor) -> Tensor:
    """Returns the largest absolute value, without a copy; 0 for an empty tensor."""
    if not tensor.numel():
        return tensor.new_zeros(())
    least, most = tensor.aminmax()
    return torch.maximum(-least, most)


def _empty_basis(like: Tensor) -> OrthonormalBasis:
    return OrthonormalBasis(like[:0], like.new_zeros(0, 0))
