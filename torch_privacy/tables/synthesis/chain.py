# SPDX-License-Identifier: Apache-2.0
"""Provides `Chain`, a distribution of rows in which each column depends on some columns before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .cells import Codes


@dataclass(frozen=True, eq=False)
class Link:
    """The distribution of one column, given its parents.

    Args:
        column: place of the column.
        parents: places of columns that come before it in the chain.
        chances: (sizes of the parents, size of the column): each last axis sums to 1.
    """

    column: int
    parents: tuple[int, ...]
    chances: NDArray[np.float64]

    def rows(self, codes: Codes) -> NDArray[np.float64]:
        """Returns the column's distribution in each row, (n, size)."""
        return self.chances[tuple(codes[:, parent] for parent in self.parents)] if self.parents else self.chances


@dataclass(frozen=True, eq=False)
class Chain:
    """A generator of rows, column by column; and the probability of given rows.

    Args:
        links: one for each column; parents come first.
        merged: for each column the value of each original value, int64 (original size,): rare ones share one.
        within: for each column the chance of each original value among those that share its value.
    """

    links: tuple[Link, ...]
    merged: tuple[NDArray[np.int64], ...]
    within: tuple[NDArray[np.float64], ...]

    def draw(self, count: int, rng: np.random.Generator) -> Codes:
        """Returns rows of original values, int64 (count, k), independent of each other."""
        merged = np.zeros((count, len(self.merged)), np.int64)
        for link in self.links:
            merged[:, link.column] = _drawn(link, merged, rng)
        codes = np.zeros_like(merged)
        for place, (of, chances) in enumerate(zip(self.merged, self.within, strict=True)):
            spread = np.zeros((int(of.max()) + 1, len(of)))
            spread[of, np.arange(len(of))] = chances
            codes[:, place] = _choices(spread, merged[:, place], rng)
        return codes

    def log_chances(self, codes: Codes) -> NDArray[np.float64]:
        """Returns the logarithm of the probability of each row of original values, (n,)."""
        merged = np.stack([of[codes[:, place]] for place, of in enumerate(self.merged)], 1)
        total = np.zeros(len(codes))
        for link in self.links:
            index = (*(merged[:, parent] for parent in link.parents), merged[:, link.column])
            total += np.log(np.maximum(link.chances[index], 1e-300))
        for place, chances in enumerate(self.within):
            total += np.log(np.maximum(chances[codes[:, place]], 1e-300))
        return total


def _drawn(link: Link, codes: Codes, rng: np.random.Generator) -> NDArray[np.int64]:
    """Returns values of a column, given the columns before it."""
    shape = link.chances.shape
    flat = link.chances.reshape(-1, shape[-1])
    if not link.parents:
        return _choices(flat, np.zeros(len(codes), np.int64), rng)
    return _choices(flat, np.ravel_multi_index(tuple(codes[:, p] for p in link.parents), shape[:-1]), rng)


def _choices(chances: NDArray[np.float64], rows: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Returns for each of ``rows`` a place in that row of ``chances``, drawn with these weights."""
    found = np.zeros(len(rows), np.int64)
    order = np.argsort(rows, kind="stable")
    bounds = [*np.flatnonzero(np.diff(rows[order], prepend=-1)), len(rows)]  # of equal rows, after sorting
    uniform = rng.random(len(rows))
    for start, end in pairwise(bounds):
        members = order[start:end]
        sums = np.cumsum(chances[rows[members[0]]])
        found[members] = np.minimum(np.searchsorted(sums, uniform[members] * sums[-1], side="right"), len(sums) - 1)
    return found


def marginal(codes: Codes, columns: Sequence[int], sizes: Sequence[int]) -> NDArray[np.float64]:
    """Returns the number of rows with each combination of values of some columns, (sizes of these columns)."""
    shape = tuple(sizes[column] for column in columns)
    flat = np.ravel_multi_index(tuple(codes[:, column] for column in columns), shape)
    return np.bincount(flat, minlength=int(np.prod(shape))).astype(float).reshape(shape)
