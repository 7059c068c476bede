# SPDX-License-Identifier: Apache-2.0
"""Finds what a data set stores, and which rows of it may belong to which item."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .shadow import MANY, DatasetShadow, attributes_of, transforms_of
from .stored_rows import RowKind, integers, is_keyed, keys_in, kind_of

_WITHOUT_PARTS = (type, int, float, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
MOST_LAWS = 16  # assignments of rows to items that are tried


@dataclass(frozen=True, eq=False)
class RowLaw:
    """An assignment of rows to items.

    Args:
        length: number of rows.
        starts: (n,) the row of each item, or the first of its rows; -1 for none.
        stops: (n,) the end of each item's rows; None if each has one.
        of_items: whether the rows are the items of a data set, so that no item has other rows than these.
    """

    length: int
    starts: np.ndarray
    stops: np.ndarray | None = None
    of_items: bool = False

    def rows(self, items: np.ndarray) -> np.ndarray:
        """Returns the rows of these items."""
        starts = self.starts[items]
        if self.stops is None:
            return starts[starts >= 0]
        ranges = [np.arange(a, b) for a, b in zip(starts, self.stops[items], strict=True) if a >= 0]
        return np.concatenate(ranges) if ranges else np.empty(0, np.int64)

    def exchanged(self, items: np.ndarray, others: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns for each row the one to put in its place: those of ``items`` stay.

        Args:
            items: kept items.
            others: (n,) for each item the one in the place of which it is put.
            generator: chooses the rows in place of those that belong to no item.
        """
        shift = generator.integers(1, max(2, self.length), size=self.length)
        rows = (np.arange(self.length) + shift) % self.length
        if self.stops is None:
            known = (self.starts >= 0) & (self.starts[others] >= 0)
            rows[self.starts[known]] = self.starts[others[known]]
        kept = self.rows(items)
        rows[kept] = kept
        return rows


@dataclass(eq=False)
class StoredRows:
    """Something that a data set stores: its rows are exchanged by the first of its laws; without one they stay."""

    path: str
    value: Any
    kind: RowKind
    length: int
    laws: list[RowLaw] = field(default_factory=list)
    pool: tuple[Any, np.ndarray] | None = None  # a copy with all rows exchanged, if copying is costly
    copy: Any = None  # one with all rows as they are, to change some for a while


def stored_in(shadow: DatasetShadow, n: int) -> list[StoredRows]:
    """Returns everything with rows that a data set of n items stores, except for what has fewer rows than items."""
    finder = _Finder(n)
    scope = [RowLaw(n, np.arange(n), of_items=True)]
    for name, value in [("", shadow.root), *((name, value) for name, _, _, value in shadow.slots)]:
        finder.visit(value, name, scope)
    return finder.found


class _Finder:
    """Walks through the parts of a data set."""

    def __init__(self, n: int):
        self._n, self._seen, self._offsets = n, set[int](), set[int]()
        self._found: list[StoredRows] = []

    @property
    def found(self) -> list[StoredRows]:
        """Returns what is stored, but for lists of where items begin."""
        return [stored for stored in self._found if id(stored.value) not in self._offsets]

    def visit(self, value: Any, path: str, scope: list[RowLaw]) -> None:
        """Notes what is stored in a value; ``scope`` has the laws of the data sets around it."""
        if id(value) in self._seen or value is None or isinstance(value, _WITHOUT_PARTS):
            return
        self._seen.add(id(value))
        kind = kind_of(value)
        if kind is not None:
            length = kind.num_rows(value)
            laws = [law for law in scope if law.length == length]
            if length > 1 and (laws or length > self._n) and not (isinstance(value, (str, bytes)) and length <= 64):
                self._found.append(StoredRows(path, value, kind, length, _first(laws)))
                value = transforms_of(value)
                if value is None or not laws:
                    return
        entries = [*_entries(value, path)]
        lists = [(integers(part), part) for _, part in entries]
        lengths = {law.length for law in scope}
        lists = [(p, part) for p, part in lists if p is not None and len(p) in lengths | {m + 1 for m in lengths}]
        parts = _concatenated([part for _, part in entries], scope)
        for name, part in entries:
            laws = self._laws(part, lists, entries, scope) + parts.get(id(part), [])
            self.visit(part, name, [*scope, *laws])

    def _laws(self, part: Any, lists: list[Any], entries: list[Any], scope: list[RowLaw]) -> list[RowLaw]:
        """Returns how index lists beside it may assign the rows of a part."""
        length = _length(part)
        if length is None:
            return []
        is_dataset = kind_of(part) is None or transforms_of(part) is not None
        found = []
        for p, source in lists:
            if source is part or p.max() > length:
                continue
            for law in scope:
                if len(p) == law.length + 1 and (np.diff(p) >= 0).all() and law.stops is None:
                    found.append(_composed(RowLaw(length, p[:-1], p[1:]), law))
                    self._offsets.add(id(source))
                elif len(p) == law.length and p.max() < length and law.stops is None:
                    is_injective = len(np.unique(p)) == len(p)
                    if is_injective if length >= len(p) and not is_dataset else is_dataset:
                        found.append(_composed(RowLaw(length, p, of_items=is_dataset), law))
        if is_keyed(part):
            found += self._laws_of_keys(part, entries, scope)
        return found

    def _laws_of_keys(self, part: Any, entries: list[Any], scope: list[RowLaw]) -> list[RowLaw]:
        """Returns how lists of its keys assign the entries of a dictionary."""
        found = []
        for law in scope:
            if law.stops is not None or law.length > len(part):
                continue
            for keys in (range(law.length), *(value for _, value in entries if _length(value) == law.length)):
                if keys is not part and (places := keys_in(part, keys)) is not None:
                    found.append(_composed(RowLaw(len(part), places), law))
        return found


def _first(laws: list[RowLaw]) -> list[RowLaw]:
    """Returns the laws that differ, as far as they are tried."""
    different: list[RowLaw] = []
    for law in laws[:MOST_LAWS]:
        if not any(np.array_equal(law.starts, known.starts) for known in different):
            different.append(law)
    return different


def _composed(law: RowLaw, before: RowLaw) -> RowLaw:
    """Returns a law of items, given one of the rows to which ``before`` assigns them."""
    none = before.starts < 0
    starts = np.where(none, -1, law.starts[before.starts])
    stops = None if law.stops is None else np.where(none, -1, law.stops[before.starts])
    return RowLaw(law.length, starts, stops, law.of_items and before.of_items)


def _concatenated(parts: list[Any], scope: list[RowLaw]) -> dict[int, list[RowLaw]]:
    """Returns laws for parts, by id, that have as many rows together as a law has."""
    known = [(part, length) for part in parts if (length := _length(part)) and not isinstance(part, (str, bytes))]
    datasets = [(part, length) for part, length in known if kind_of(part) is None]
    found: dict[int, list[RowLaw]] = {}
    for law in scope:
        rows = next((rows for rows in (known, datasets) if sum(n for _, n in rows) == law.length), [])
        if len(rows) < 2 or law.stops is not None:
            continue
        offset = 0
        for part, n in rows:
            inside = (law.starts >= offset) & (law.starts < offset + n)
            found.setdefault(id(part), []).append(
                RowLaw(n, np.where(inside, law.starts - offset, -1), None, law.of_items)
            )
            offset += n
    return found


def _length(value: Any) -> int | None:
    """Returns the number of rows of a value, or of items of a data set; None for others."""
    kind = kind_of(value)
    if kind is not None:
        return kind.num_rows(value)
    if isinstance(value, type) or not (hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")):
        return None
    try:
        return len(value)
    except Exception:
        return None


def _entries(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields what a value holds, by its path."""
    if isinstance(value, Mapping) and kind_of(value) is not None:
        if len(value) <= MANY:
            yield from ((f"{path}[{key!r:.40}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        if len(value) <= MANY:
            yield from ((f"{path}[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield path, value.__self__
    elif kind_of(value) is None:
        yield from ((f"{path}.{name}" if path else name, part) for name, part in attributes_of(value).items())
        if isinstance(value, partial):
            yield from ((f"{path}(...)", part) for part in (value.func, *value.args, *value.keywords.values()))
