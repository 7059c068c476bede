# SPDX-License-Identifier: Apache-2.0
"""Notices rows of the data that move, or are rewritten, while a training draws from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset, TensorDataset

from ..support.contents import copied, has_entries, plain_type, same, values_in
from ..support.held_state import SIMPLE
from ..support.model_state import Versions
from .datasets import ChosenByOwners, source_of
from .fingerprint import KEY_BYTES, MOST_SECONDS, digest_of_item

KEPT_ROWS, KEPT_ENTRIES, KEPT_ITEMS = 1024, 64, 16  # of a tensor, of a list, and of other data sets
KEPT_BYTES = 2**24  # of the copies of a tensor's rows, or of a list's entries


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
    """Digests of some items of any data set, fetched with the same random numbers each time.

    They are made anew where a plain setting of the data set has changed, such as the epoch that its augmentation reads.

    Args:
        dataset: map-style.
        indices: of the items; those that differ from one time that they are fetched to the next are left out.
    """

    def __init__(self, dataset: Any, indices: list[int]):
        self._dataset, self._turn, self._indices = dataset, 0, indices
        self._keep()

    def _keep(self) -> None:
        dataset, indices = self._dataset, self._indices
        self._settings, self._turn = [*_plain_in(dataset)], 0
        self._items: list[tuple[int, bytes]] = []
        start = time.monotonic()
        for index in indices:
            digest = self._digest(index)
            if digest is not None and digest == self._digest(index):
                self._items.append((index, digest))
            if time.monotonic() - start > MOST_SECONDS:
                break

    def _digest(self, index: int) -> bytes | None:
        try:
            return digest_of_item(self._dataset, index, bytes(KEY_BYTES))
        except Exception:  # of the data set: it ends the step, too, if a batch has the item
            return None

    def are_current(self) -> bool:
        """True if an item, another one in each call, is what it was."""
        if [*_plain_in(self._dataset)] != self._settings:
            self._keep()
        if not self._items:
            return True
        index, digest = self._items[self._turn]
        self._turn = (self._turn + 1) % len(self._items)
        return self._digest(index) in (digest, None)


class Places:
    """Notices rows of a list, or of tensors, that are no longer where they were: shuffled, replaced or taken out.

    So it does indices of subsets of any data set. Of other data sets some items are compared, which may change for
    other reasons, such as augmentation that grows: they are noted, and not refused.
    """

    def __init__(self, dataset: Any):
        self._dataset, (source, chosen) = dataset, source_of(dataset)
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
        """Yields copies of some rows of the list, or of each tensor that is in the host's memory, or of some items."""
        n = len(self._dataset)
        if self._is_own:
            yield KeptItems(self._dataset, np.linspace(0, n - 1, min(n, KEPT_ITEMS), dtype=np.int64).tolist())
        if self._rows is not None:
            rows = self._rows
            chosen = self._spread(min(n, KEPT_ENTRIES, _most(sum(map(_bytes_of, tree_leaves(rows[0]))))))
            yield KeptRows(lambda part: [rows[i] for i in part.tolist()], chosen, 1)
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
        """True if some kept rows have other numbers; looks at a few in every fourth call, as this takes some time."""
        kept = self._kept  # copied in the first call
        self._turn += 1
        number, rest = divmod(self._turn, 16 if self._is_own else 4)
        return bool(kept) and not rest and not kept[number % len(kept)].are_current()

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
    return value.nbytes if isinstance(value, (torch.Tensor, np.ndarray)) and has_entries(value) else 0


def _plain_in(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yields the plain values among an object's attributes, in its containers and in objects within."""
    if type(value) in SIMPLE:
        yield value
    elif depth and not isinstance(value, (torch.Tensor, np.ndarray)):
        held = values_in(value) if plain_type(value) is not None else [*getattr(value, "__dict__", {}).values()]
        if len(held) <= KEPT_ENTRIES:
            for part in held:
                yield from _plain_in(part, depth - 1)
