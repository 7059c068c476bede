# SPDX-License-Identifier: Apache-2.0
"""A subspace of the space of gradients: groups of parameters, how many directions each gets, orthonormal bases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .jacobian import Jacobian
from .ops._base import CHUNK_FLOATS

OVERSAMPLING = 16  # entries of a folded vector for each direction that is wanted
MOST_PASSES = 5  # over a basis until it is orthonormal; one or two do
WELL_CONDITIONED = 10.0  # ratio of largest to smallest squared length up to which one pass leaves rounding only


def balanced_groups(sizes: Mapping[str, int], count: int) -> dict[str, tuple[str, ...]]:
    """At most ``count`` runs of consecutive parameters whose largest has as few numbers as can be.

    >>> balanced_groups({"a": 3, "b": 1, "c": 2, "d": 2}, 2)
    {'a ... b': ('a', 'b'), 'c ... d': ('c', 'd')}
    """
    ends = [0]
    for size in sizes.values():
        ends.append(ends[-1] + size)
    low, high = max(sizes.values()), ends[-1]
    while low < high:  # the smallest bound with which a greedy walk needs no more than ``count`` runs
        middle = (low + high) // 2
        low, high = (low, middle) if len(_runs(list(sizes.values()), middle)) <= count else (middle + 1, high)
    names = list(sizes)
    runs = [tuple(names[a:b]) for a, b in _runs(list(sizes.values()), low)]
    return {run[0] if len(run) == 1 else f"{run[0]} ... {run[-1]}": run for run in runs}


def _runs(sizes: list[int], bound: int) -> list[tuple[int, int]]:
    starts, total = [0], 0
    for k, size in enumerate(sizes):
        if total + size > bound:
            starts.append(k)
            total = 0
        total += size
    return list(pairwise([*starts, len(sizes)]))


def groups_by_prefix(sizes: Mapping[str, int], prefixes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Every parameter in the group of the longest prefix of its name, as `Groups` has it.

    Raises:
        ValueError: a parameter that no prefix matches, or a prefix that matches none.
    """

    def group_of(name: str) -> str | None:
        return max((p for p in prefixes if p in ("", name) or name.startswith(f"{p}.")), key=len, default=None)

    members: dict[str | None, list[str]] = {prefix: [] for prefix in prefixes}
    for name in sizes:
        members.setdefault(group_of(name), []).append(name)
    without, unused = members.pop(None, []), [prefix for prefix, inside in members.items() if not inside]
    if without or unused:
        raise ValueError(
            f"AnchorSubspace: groups={list(prefixes)!r} must sort the trained parameters by prefix. "
            f"Matched by none: {without or 'no parameter'}; matching none: {unused or 'no prefix'}. "
            "Take names of modules, '' for all that is left, or a number of groups."
        )
    return {str(prefix): tuple(inside) for prefix, inside in members.items()}


def quotas(num_basis: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Directions for each group, in proportion to the root of its size; at least one, at most its size.

    >>> quotas(12, {"small": 4, "large": 100, "tiny": 1})
    {'small': 2, 'large': 9, 'tiny': 1}
    """
    roots = {group: math.sqrt(size) for group, size in sizes.items()}
    found = {group: 1 for group in sizes}
    for _ in range(min(num_basis, sum(sizes.values())) - len(sizes)):
        # Of the groups with room, to the one that is farthest behind its share.
        neediest = max((g for g in sizes if found[g] < sizes[g]), key=lambda g: roots[g] / (found[g] + 0.5))
        found[neediest] += 1
    return found


class Fold:
    """A random map of vectors of p numbers to ``width`` numbers: signs, then sums of the entries ``width`` apart.

    Inner products are kept on average, and for a few directions nearly always: a sparse random projection, at the cost
    of reading the vectors once. Where p is no larger than the width nothing is lost.

    Source: Clarkson & Woodruff (2013, arXiv:1207.6365), sparse embeddings; ours has buckets in turn.
    """

    def __init__(self, p: int, k: int, generator: torch.Generator, like: Tensor):
        self.width = min(p, OVERSAMPLING * k)
        self._signs = (torch.randint(0, 2, (p,), generator=generator) * 2 - 1).to(like.device, like.dtype)

    def __call__(self, vectors: Tensor, start: int = 0) -> Tensor:
        """(n, size), the entries from ``start`` on -> (n, width), their part in the sums."""
        folded = vectors.new_zeros(len(vectors), self.width)
        end, a = start + vectors.shape[1], start
        while a < end:  # turn by turn
            first = a % self.width
            b = min(a - first + self.width, end)
            folded[:, first : first + b - a].addcmul_(vectors[:, a - start : b - start], self._signs[a:b])
            a = b
        return folded


class Start:
    """k random directions for p numbers, to begin a power iteration with: they project without being formed.

    A fold, then standard normal numbers: products with directions of the whole length would cost as much as all else.
    """

    def __init__(self, p: int, k: int, generator: torch.Generator, like: Tensor):
        self._fold = Fold(p, k, generator, like)
        self._directions = torch.randn(self._fold.width, k, generator=generator).to(like.device, like.dtype)

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Vectors, cut into (n, size) one after the other -> (n, k)."""
        start, folded = 0, torch.zeros((), dtype=parts[0].dtype, device=parts[0].device)
        for part in parts:
            folded = folded + self._fold(part, start)
            start += part.shape[1]
        return folded @ self._directions


@torch.no_grad()
def orthonormalize(vectors: Tensor, generator: torch.Generator) -> Tensor:
    """(k, p) -> (r, p): an orthonormal basis of what the vectors span, in their memory; r <= k.

    Whitening by the Gram matrix, T V with T = Λ^-½ Qᵀ: first by that of folded vectors, which costs little and is taken
    in float64, then by that of the vectors themselves, once or until their lengths are alike. Directions that are
    shorter than rounding are left out: they are not known.

    Guarantees:
        - ``V Vᵀ`` is the identity up to 1e-6 in float32.
        - Never NaN for finite vectors: r may be 0.

    Source: Cholesky QR, twice, with randomized preconditioning (Balabanov 2022, arXiv:2210.09953); by eigenvalues, so
        that no rank is assumed.
    """
    k, p = vectors.shape
    least, most = vectors.aminmax() if vectors.numel() else vectors.new_zeros(2)
    largest = torch.maximum(-least, most)  # without a copy of the vectors
    if not largest > 0:
        return vectors[:0]
    vectors.div_(largest)
    rounding = 16 * torch.finfo(vectors.dtype).eps
    gram = _gram(Fold(p, k, generator, vectors)(vectors).double())
    vectors, _ = _whiten(vectors, gram, max(rounding**2, 1e-13))
    for _ in range(MOST_PASSES):
        vectors, spread = _whiten(vectors, _gram(vectors), rounding)
        if spread <= WELL_CONDITIONED:
            break
    return vectors


def _whiten(vectors: Tensor, gram: Tensor, least: float) -> tuple[Tensor, float]:
    """T V, in place, for the T that makes the Gram matrix the identity, and the spread of its eigenvalues.

    Directions with an eigenvalue below ``least`` of the largest are left out.
    """
    lengths, directions = torch.linalg.eigh(gram)
    known = lengths > least * lengths[-1]
    lengths, directions = lengths[known], directions[:, known]
    whitening = (directions / lengths.sqrt()).T.to(vectors.dtype)
    for columns in _pieces(vectors):
        vectors[: len(whitening), columns] = whitening @ vectors[:, columns]
    return vectors[: len(whitening)], float(lengths[-1] / lengths[0])


def _pieces(vectors: Tensor) -> Iterator[slice]:
    """Columns, so many at a time that they stay in the cache."""
    step = max(1, CHUNK_FLOATS // 2 // max(1, len(vectors)))
    return (slice(a, a + step) for a in range(0, vectors.shape[1], step))


def _gram(vectors: Tensor) -> Tensor:
    """V Vᵀ in float64, from products of short pieces; of the half below the diagonal no more than a half."""
    k = len(vectors)
    total, half = torch.zeros(k, k, dtype=torch.float64, device=vectors.device), k // 2
    for columns in _pieces(vectors):
        piece = vectors[:, columns]
        total[:half] += piece[:half] @ piece.mT
        total[half:, half:] += piece[half:] @ piece[half:].mT
    total[half:, :half] = total[:half, half:].mT
    return total


@dataclass(frozen=True)
class Basis:
    """Orthonormal directions of gradients, those of each group in that group's parameters alone.

    Args:
        groups: label -> names of parameters.
        shapes: name -> shape.
        vectors: label -> (k, p) directions as rows, the parameters of the group one after the other.
    """

    groups: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, torch.Size]
    vectors: Mapping[str, Tensor]

    @property
    def num_directions(self) -> dict[str, int]:
        """Directions of each group."""
        return {group: len(v) for group, v in self.vectors.items()}

    def pieces(self, group: str) -> Iterator[tuple[str, slice]]:
        """Where the parameters of a group lie in its vectors."""
        return pieces(self.groups[group], self.shapes)

    def embed(self, jacobian: Jacobian, group: str) -> Tensor:
        """J Vᵀ (n, k) in one group."""
        v = self.vectors[group]
        if not len(v):
            return v.new_zeros(jacobian.num_examples, 0)
        directions = {name: v[:, part].view(len(v), *self.shapes[name]) for name, part in self.pieces(group)}
        return jacobian.restricted(self.groups[group]).project(directions)

    def coordinates(self, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Label -> V g, for a gradient by name."""
        found = {}
        for group, v in self.vectors.items():
            first, *others = (v[:, part] @ gradient[name].flatten().to(v.dtype) for name, part in self.pieces(group))
            found[group] = sum(others, first)
        return found

    def expand(self, coordinates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Vᵀ w by name."""
        expanded = {}
        for group, w in coordinates.items():
            v = self.vectors[group]
            for name, part in self.pieces(group):
                expanded[name] = (w.to(v.dtype) @ v[:, part]).view(self.shapes[name])
        return expanded


def pieces(names: Sequence[str], shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, slice]]:
    """Where the parameters lie when they are put one after the other."""
    start = 0
    for name in names:
        size = shapes[name].numel()
        yield name, slice(start, start + size)
        start += size
