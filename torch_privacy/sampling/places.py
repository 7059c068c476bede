# SPDX-License-Identifier: Apache-2.0
"""Notices rows of the data that move, or are rewritten, while a training draws from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset, TensorDataset

from ..support.contents import MISSING, copied, has_entries, same
from ..support.model_state import Versions
from .datasets import ChosenByOwners, source_of
from .fingerprint import digest_of
from .item_check import FEWEST
from .row_laws import StoredRows, stored_in
from .shadow import DatasetShadow

KEPT_ROWS, KEPT_ENTRIES, KEPT_ITEMS = 1024, 64, 16  # of a tensor, of a list, and of other data sets
KEPT_BYTES = 2**24  # of the copies of a tensor's rows, or of those of items
FETCHES = 16  # of an item, with its former rows and with its present ones, to see if it depends on them


class KeptRows:
    """Copies of some rows, to notice what changes no version: what numpy writes, or code through ``.data``.

    Args:
        take: returns what rows with these numbers hold at present.
        rows: (m,) numbers of the rows.
        at_once: as many of them are compared in each call.
    """

    def __init__(self, take: Callable[[torch.Tensor], Any], rows: torch.Tensor, at_once: int):
        self._take, self._turn = take, 0
        self._parts = [(part, copied(take(part))) for part in rows.split(at_once)]

    def are_current(self) -> bool:
        """True if rows hold what they held: a part of them, another one in each call."""
        part, copy = self._parts[self._turn]
        self._turn = (self._turn + 1) % len(self._parts)
        return same(self._take(part), copy)


class KeptItems:
    """Copies of the rows from which a data set of any kind makes some items, to notice that these are rewritten.

    Rows may change for other reasons, such as in a cache: the batch of the item alone shows if it depends on them. What
    else it depends on, such as a setting of the data set, is none of its rows.

    Args:
        dataset: map-style.
        batch_of: returns the batch of one item, with the same random numbers each time.
        items: numbers of the items, as many of which are taken as have small rows.
    """

    def __init__(self, dataset: Any, batch_of: Callable[[int], Any], items: Iterable[int]):
        self._dataset, self._batch_of, self._turn = dataset, batch_of, 0
        self._kept: list[tuple[int, dict[str, Any]]] = []
        free, stored = KEPT_BYTES, self._stored()
        for item in items:
            rows = {one.path: copied(_taken(one, places)) for one, places in _rows_of(item, stored)}
            free -= sum(map(_bytes_of, tree_leaves(rows)))
            if free < 0 and self._kept:
                break
            if rows:
                self._kept.append((item, rows))

    def _stored(self) -> list[StoredRows]:
        """Returns the arrays, containers and tables in which the data set has rows of its items at present."""
        try:
            found = stored_in(DatasetShadow(self._dataset), len(self._dataset))
        except Exception:  # of the data set's own code
            return []
        kinds = (
            one for one in found if one.kind.is_array or one.kind.columns or isinstance(one.value, (list, tuple, dict))
        )
        return [one for one in kinds if one.laws]

    def are_current(self) -> bool:
        """True if an item, another one in each call, does not depend on rows that have other numbers than before."""
        if not self._kept:
            return True
        item, kept = self._kept[self._turn]
        self._turn = (self._turn + 1) % len(self._kept)
        for stored, places in _rows_of(item, self._stored()):
            now, before = _taken(stored, places), kept.get(stored.path, MISSING)
            if stored.kind.columns and before is not MISSING:  # a new column is no other content of a row
                before = before | {name: cells for name, cells in now.items() if name not in before}
            if before is not MISSING and not same(now, before):
                if self._depends_on(item, stored, places, now, before):
                    return False
                kept[stored.path] = copied(now)
        return True

    def _depends_on(self, item: int, stored: StoredRows, places: np.ndarray, now: Any, before: Any) -> bool:
        """True if the item differs with the former rows in place; it may draw random numbers of its own."""
        if stored.kind.put is None:
            return True
        found: list[set[bytes]] = [set(), set()]
        every = np.arange(len(places))
        try:
            for _ in range(FETCHES):
                for digests, rows in zip(found, (now, before), strict=True):
                    with torch.no_grad():
                        stored.kind.put(stored.value, places, rows, every)
                    digests.add(digest_of(self._batch_of(item)))
                if found[0] & found[1] or max(map(len, found)) > FETCHES // 2:
                    return False
        except Exception:  # of the data set: it ends the step, too, if a batch has the item
            return False
        finally:
            with suppress(Exception), torch.no_grad():
                stored.kind.put(stored.value, places, now, every)
        return True


def _rows_of(item: int, stored: list[StoredRows]) -> Iterator[tuple[StoredRows, np.ndarray]]:
    """Yields what has rows of an item, a few at most, and where they are in it."""
    for one in stored:
        places = one.laws[0].rows(np.array([item]))
        if 0 < len(places) <= KEPT_ENTRIES:
            yield one, places


def _taken(stored: StoredRows, places: np.ndarray) -> Any:
    """Returns what these rows hold; of a table for each column the cells, as texts that can be compared."""
    rows, columns = stored.kind.take(stored.value, places), stored.kind.columns
    return rows if columns is None else {name: [*map(_of_cell, cells)] for name, cells in columns(rows).items()}


def _of_cell(cell: Any) -> Any:
    """Returns the content of a cell: the bytes of many numbers, which takes a twentieth of the time, or a text."""
    if isinstance(cell, (list, np.ndarray)) and getattr(cell, "ndim", 1) and len(cell) > KEPT_ENTRIES:
        with suppress(ValueError):  # of lists of several lengths
            numbers = np.asarray(cell)
            if numbers.dtype.kind in "biuf":
                return numbers.dtype.str, numbers.shape, numbers.tobytes()
    return repr(cell)


class Places:
    """Notices rows of a list, or of tensors, that are no longer where they were: shuffled, replaced or taken out.

    So it does indices of subsets of any data set. Of other data sets the rows of some items are compared, which may
    change for other reasons: they are noted, and not refused.

    Args:
        dataset: map-style.
        batch_of: returns the batch of one item, with the same random numbers each time.
    """

    def __init__(self, dataset: Any, batch_of: Callable[[int], Any]):
        self._dataset, self._batch_of, (source, chosen) = dataset, batch_of, source_of(dataset)
        self._chosen = None if chosen is None else chosen.copy()
        self._rows = [*source] if type(source) in (list, tuple) else None
        self._held = source.tensors if type(source) is TensorDataset else ()
        self._tensors = Versions(tensor for tensor in self._held if not tensor.is_inference())
        self._is_own = self._rows is None and not self._held
        self._turn = 0

    @cached_property
    def _kept(self) -> list[KeptRows | KeptItems]:
        return [*self._copies()]

    def _copies(self) -> Iterator[KeptRows | KeptItems]:
        """Yields copies of some rows of each tensor that is in the host's memory, or of those of some items."""
        n = len(self._dataset)
        if not self._held and not (self._is_own and n < FEWEST):
            count = min(n, KEPT_ITEMS if self._is_own else KEPT_ENTRIES)
            yield KeptItems(self._dataset, self._batch_of, np.linspace(0, n - 1, count, dtype=np.int64).tolist())
        for tensor in self._held:
            if tensor.device.type == "cpu" and has_entries(tensor):
                chosen = self._spread(min(n, KEPT_ROWS, _most(tensor.nbytes // max(1, len(tensor)))))
                yield KeptRows(partial(tensor.index_select, 0), chosen, KEPT_ROWS // KEPT_ENTRIES)

    def _spread(self, m: int) -> torch.Tensor:
        """Returns the numbers of m rows, at equal distances among those that are used."""
        places = np.linspace(0, len(self._dataset) - 1, m, dtype=np.int64)
        return torch.from_numpy(places if self._chosen is None else self._chosen[places])

    def are_kept(self, indices: np.ndarray) -> bool:
        """True if these rows are where they were."""
        source, places = self._found(indices)
        if places is None or (self._chosen is not None and places != self._chosen[indices].tolist()):
            return False
        if self._rows is not None:
            return len(source) == len(self._rows) and all(source[i] is self._rows[i] for i in places)
        if not self._held:
            return True
        written = not self._tensors.are_current() or not all(rows.are_current() for rows in self._kept)
        return source.tensors is self._held and not written

    def are_rewritten(self, indices: np.ndarray) -> bool:
        """True if these rows are other objects or have other numbers than rows had, and were not moved alone."""
        if self._rows is None:
            return not self._tensors.are_current() or self._shows_writing()
        source, places = self._found(indices)
        return any(id(source[i]) not in self._ids for i in places or () if i < len(source)) or self._shows_writing()

    def _shows_writing(self) -> bool:
        """True if some kept rows have other numbers; looks at a few in some calls, as this takes time."""
        kept = self._kept  # copied in the first call
        self._turn += 1
        number, rest = divmod(self._turn, 32 if self._is_own else 4)
        is_due = not rest or self._turn in (2, 4, 8, 16)  # some trainings are short
        return bool(kept) and is_due and not self._has_moved() and not kept[number % len(kept)].are_current()

    def _has_moved(self) -> bool:
        """True if entries of the list are in other places, where those that are kept cannot be compared."""
        if self._rows is None:
            return False
        (source, _), n = self._found(np.zeros(0, int)), len(self._rows)
        some = range(0, n, max(1, n // KEPT_ENTRIES))
        return len(source) != n or any(source[i] is not self._rows[i] for i in some)

    @cached_property
    def _ids(self) -> set[int]:
        return set(map(id, self._rows or ()))

    def _found(self, indices: np.ndarray) -> tuple[Any, list[int] | None]:
        """Returns the data set behind subsets, and where these rows are in it; None if a subset lacks some."""
        source, places = self._dataset, indices.tolist()
        while type(source) in (Subset, ChosenByOwners):
            if max(places, default=-1) >= len(source.indices):
                return source, None
            source, places = source.dataset, [source.indices[i] for i in places]
        return source, places


def _most(bytes_of_row: int) -> int:
    """Returns how many rows of this size are copied."""
    return max(1, KEPT_BYTES // max(1, bytes_of_row))


def _bytes_of(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return value.nbytes if isinstance(value, (torch.Tensor, np.ndarray)) and has_entries(value) else 0
