# SPDX-License-Identifier: Apache-2.0
"""Fetches items from copies of a data set in which the rows of other items are exchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from torch.utils._pytree import tree_flatten

from ..support.random_state import SeededRandomNumbers
from .fingerprint import Unhashable, feed
from .row_laws import RowLaw, StoredRows
from .shadow import DatasetShadow
from .stored_rows import num_bytes

POOLED = 2**17  # bytes from which on one copy is kept and changed in place
BLOCKS = 12  # items of which it is looked at whether they read a block of their own
LOOKED_AT = 2**17  # rows up to which those that replace them are looked at: they should differ

Item = tuple[str, list[bytes]]  # structure, and digest of each leaf


class CannotCompare(Exception):
    """Raised with the reason why items cannot be compared."""


class FetchFailed(Exception):
    """Raised with the name of the error if the data set cannot be fetched from with exchanged rows."""


class ExchangedItems:
    """Fetches items from copies, again and again with the same random numbers.

    Args:
        shadow: the data set.
        generator: chooses random numbers and others.
        owners: see `ItemCheck`.
        n: number of items.
        draws_alike: whether the random numbers are the same for all items, too.
    """

    def __init__(
        self,
        shadow: DatasetShadow,
        generator: np.random.Generator,
        owners: np.ndarray | None,
        n: int,
        *,
        draws_alike: bool = False,
    ):
        self._parts = shadow, generator, owners, n
        self._shadow, self._generator, self._owners, self._n = self._parts
        self._draws_alike = draws_alike
        self._seed, self._first = generator.bytes(32), generator.integers(n)

    @cached_property
    def _others(self) -> np.ndarray:
        """(n,) an item in place of each; made only where rows are exchanged, as it takes time in large data sets."""
        return (np.arange(self._n) + self._generator.integers(1, self._n, size=self._n)) % self._n

    def with_other_numbers(self, *, draws_alike: bool = False) -> ExchangedItems:
        """Returns one with other random numbers."""
        return ExchangedItems(*self._parts, draws_alike=draws_alike)

    def items(
        self,
        items: np.ndarray,
        exchanged: Sequence[StoredRows] = (),
        law: RowLaw | None = None,
        keep: np.ndarray | None = None,
    ) -> list[Item]:
        """Returns items of a copy in which rows of other items are exchanged.

        Args:
            items: indices.
            exchanged: what is exchanged.
            law: assigns the rows to the items; by default the first law of each.
            keep: items that keep their rows; by default ``items``, and all others of their owners.
        """
        keep = self._with_owners(items) if keep is None else keep
        new = {id(stored.value): self._exchanged(stored, law or stored.laws[0], keep) for stored in exchanged}
        return self._fetch(items, new)

    def _exchanged(self, stored: StoredRows, law: RowLaw, keep: np.ndarray) -> Any:
        """Returns a stored thing with the rows of all other items exchanged."""
        put = stored.kind.put
        if law.stops is not None or num_bytes(stored.value) < POOLED or put is None:
            return stored.kind.take(stored.value, law.exchanged(keep, self._others, self._generator))
        if stored.pool is None:
            rows = law.exchanged(keep[:0], self._others, self._generator)
            stored.pool = stored.kind.take(stored.value, rows), rows
        pool, rows = stored.pool
        kept = law.rows(keep)
        put(pool, kept, stored.value, kept)
        return _Pooled(pool, partial(put, pool, kept, stored.value, rows[kept]))

    def _fetch(self, items: np.ndarray, new: dict[int, Any]) -> list[Item]:
        pooled = [value for value in new.values() if isinstance(value, _Pooled)]
        new = {key: value.pool if isinstance(value, _Pooled) else value for key, value in new.items()}
        try:
            with self._shadow.copy(new).in_place() as dataset:
                return self._read(dataset, items)
        except Unhashable as error:
            raise CannotCompare(str(error)) from None
        except Exception as error:  # of the data set's own code; the text may hold data
            if new:
                raise FetchFailed(type(error).__name__) from None
            raise CannotCompare(f"no item can be fetched from a copy ({type(error).__name__})") from None
        finally:
            for value in pooled:
                value.reset()

    def _read(self, dataset: Any, items: np.ndarray) -> list[Item]:
        numbers, found = SeededRandomNumbers(self._seed), []
        try:
            for index in items.tolist():
                place = 0 if self._draws_alike else index
                numbers.begin(hashlib.blake2b(place.to_bytes(8, "little"), key=self._seed, digest_size=32).digest())
                together = getattr(dataset, "__getitems__", None)
                item = dataset[index] if together is None else together([index])[0]
                leaves, structure = tree_flatten(item)
                found.append((str(structure), [digest_of(leaf) for leaf in leaves]))
        finally:
            numbers.close()
        return found

    def _with_owners(self, items: np.ndarray) -> np.ndarray:
        if self._owners is None:
            return items
        return np.flatnonzero(np.isin(self._owners, self._owners[items]))

    def reads_others(self, item: int, stored: StoredRows, law: RowLaw | None = None) -> bool:
        """True if the item changes when the rows of others are exchanged in one thing, or cannot be fetched then."""
        items = np.asarray([item])
        try:
            return self.items(items, [stored], law) != self.items(items)
        except FetchFailed:
            return True

    # Which rows an item reads

    def rows_read(self, item: int, stored: StoredRows) -> tuple[int, int] | None:
        """Returns the first and the last row that the item reads, but for those of its owner; None if it reads none."""
        items, length = np.asarray([item]), stored.length
        expected = self.items(items)

        def differs(first: int, end: int) -> bool:
            return self._with_range(items, stored, first, end) != expected

        if not differs(0, length):
            return None
        low, high = 0, length  # the last row that is read lies in between, and rows from high on are not read
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if differs(middle, high) else (low, middle)
        last, low, high = low, 0, low + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if differs(low, middle) else (middle, high)
        return low, last

    def reads(self, item: int, row: int, stored: StoredRows, end: int | None = None) -> bool:
        """True if the item reads this row, or one of those from it to ``end - 1``."""
        items = np.asarray([item])
        return self._with_range(items, stored, row, row + 1 if end is None else end) != self.items(items)

    def after_others(self, items: np.ndarray, exchanged: Sequence[StoredRows] = ()) -> list[Item]:
        """Returns items, before each of which an item is fetched that does not keep its rows."""
        keep = self._with_owners(items)
        some = np.arange(min(self._n, len(keep) + len(items))) + self._first
        others = np.setdiff1d(some % self._n, keep)[: len(items)]
        pairs = np.stack([np.resize(others, len(items)), items], 1) if len(others) else items[:, None]
        return self.items(pairs.ravel(), exchanged, keep=keep)[pairs.shape[1] - 1 :: pairs.shape[1]]

    def share_blocks(self, item: int, stored: StoredRows) -> bool:
        """True if items have blocks of their own, and this one reads a row of another item's block that reads it, too.

        The blocks are those that items would have if the rows were dealt out evenly.
        """
        own = self._with_owners(np.asarray([item]))
        pairs = [(row, row * self._n // stored.length) for row in self.rows_read(item, stored) or ()]
        shared = any(self.reads(item, row, stored) and self.reads(j, row, stored) for row, j in pairs if j not in own)
        return shared and self._have_blocks(stored)

    def _have_blocks(self, stored: StoredRows) -> bool:
        """True if some items read their blocks, all of them, and hardly one that of another."""
        items = self._others[:BLOCKS]
        ends = [(i * stored.length // self._n, (i + 1) * stored.length // self._n) for i in items.tolist()]
        if not all(self.reads(item, a, stored, b) for item, (a, b) in zip(items, ends, strict=True)):
            return False
        others = zip(items, [*ends[1:], ends[0]], strict=True)
        return sum(self.reads(item, a, stored, b) for item, (a, b) in others) <= 1

    def share_rows(self, item: int, other: int, stored: StoredRows) -> bool:
        """True if two items read a row at the end of what one of them reads."""
        rows = {*(self.rows_read(item, stored) or ()), *(self.rows_read(other, stored) or ())}
        return any(self.reads(item, row, stored) and self.reads(other, row, stored) for row in rows)

    def neighbors(self, item: int, law: RowLaw) -> list[int]:
        """Returns the items next to this one, by number and by their rows, of other owners."""
        order = np.argsort(law.starts, kind="stable")
        place = int(np.flatnonzero(order == item)[0])
        near = {item - 1, item + 1, *order[max(0, place - 1) : place + 2].tolist()}
        own = set(self._with_owners(np.asarray([item])).tolist())
        return sorted(i for i in near if 0 <= i < self._n and i not in own)

    def _with_range(self, items: np.ndarray, stored: StoredRows, first: int, end: int) -> list[Item] | None:
        """Returns the items with rows ``first`` to ``end - 1`` replaced by others; None if fetching fails."""
        kept = np.empty(0, np.int64)
        if self._owners is not None and stored.laws:
            kept = stored.laws[0].rows(self._with_owners(items))
        try:
            with _others_between(stored, first, end, kept) as changed:
                return self._fetch(items, {id(stored.value): changed})
        except FetchFailed:
            return None


@contextmanager
def _others_between(stored: StoredRows, first: int, end: int, kept: np.ndarray) -> Iterator[Any]:
    """Yields a copy with other rows from ``first`` to ``end - 1``, but for those that are kept."""
    value, put = stored.value, stored.kind.put
    if put is None:
        rows = np.arange(stored.length)
        rows[first:end] = _different(stored, first, end)
        rows[kept] = kept
        yield stored.kind.take(value, rows)
        return
    if stored.copy is None:
        stored.copy = stored.kind.take(value, np.arange(stored.length))
    _put_others(stored, first, end)
    put(stored.copy, kept, value, kept)
    try:
        yield stored.copy
    finally:
        if stored.kind.is_array:
            stored.copy[first:end] = value[first:end]
        else:
            put(stored.copy, np.arange(first, end), value, np.arange(first, end))


def _put_others(stored: StoredRows, first: int, end: int) -> None:
    """Writes other rows into the copy, from ``first`` to ``end - 1``."""
    value, length, half = stored.value, stored.length, stored.length // 2
    put = stored.kind.put
    assert put is not None
    if end - first <= LOOKED_AT or not stored.kind.is_array:
        put(stored.copy, np.arange(first, end), value, _different(stored, first, end))
        return
    for a, b, shift in ((first, min(end, length - half), half), (max(first, length - half), end, half - length)):
        stored.copy[a : max(a, b)] = value[a + shift : max(a, b) + shift]


class _Pooled(NamedTuple):
    """A large copy with exchanged rows, in which some rows are those of kept items until ``reset`` is called."""

    pool: Any
    reset: Callable[[], None]


def _different(stored: StoredRows, first: int, end: int) -> np.ndarray:
    """Returns for each row from ``first`` to ``end - 1`` another one, of another content where that is easy to see."""
    own = np.arange(first, end)
    found = (own + stored.length // 2) % stored.length
    for shift in (1, 2, 3, 5, 7, 11, 13, 17, stored.length // 3) if end - first <= LOOKED_AT else ():
        same = np.flatnonzero(_equal(stored, own, found))
        if not len(same):
            break
        found[same] = (own[same] + shift) % stored.length
    return found


def _equal(stored: StoredRows, own: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns where two rows are equal, as far as that is easy to see."""
    value = stored.value
    if stored.kind.is_array and len(own):
        same = np.asarray(value[own] == value[others]).reshape(len(own), -1)
        return np.asarray(same.all(1))
    if isinstance(value, (str, bytes, list, tuple)):
        pairs = ((value[a], value[b]) for a, b in zip(own.tolist(), others.tolist(), strict=True))
        return np.fromiter((type(a) in (str, int, float, bool) and a == b for a, b in pairs), bool, len(own))
    return np.zeros(len(own), bool)


def digest_of(leaf: Any) -> bytes:
    """Returns a digest of a part of an item; raises ``Unhashable`` if its content is not known."""
    digest = hashlib.blake2b(digest_size=16)
    feed(digest, leaf)
    return digest.digest()
